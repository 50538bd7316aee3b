"""How much energy a run has taken: the GPU's by its driver, the processors' by their own counters (RAPL) where those may be read."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatrain.meters import GpuMeter

POWERCAP = Path("/sys/class/powercap")


@dataclass(frozen=True)
class Energy:
    """Joules of a while; None for what cannot be measured."""

    gpu_j: float | None = None
    host_j: float | None = None

    @property
    def total_j(self) -> float | None:
        """Of the parts that are known."""
        known = [joules for joules in (self.gpu_j, self.host_j) if joules is not None]
        return sum(known) if known else None

    def or_given(self, seconds: float, gpu_w: float | None, host_w: float | None) -> Energy:
        """With the power that the user gave instead."""
        gpu_j = gpu_w * seconds if gpu_w is not None else self.gpu_j
        return Energy(gpu_j, host_w * seconds if host_w is not None else self.host_j)  # what was given is more than processors

    def __add__(self, other: Energy) -> Energy:
        return Energy(_sum(self.gpu_j, other.gpu_j), _sum(self.host_j, other.host_j))

    def since(self, before: Energy) -> Energy:
        """What was taken between two readings."""
        return Energy(_difference(self.gpu_j, before.gpu_j), _difference(self.host_j, before.host_j))


class EnergyMeter:
    """Energy of one GPU and of the host's processors and their memory.

    A GPU without a counter of energy (before Volta) is asked for its power at every reading, which is taken to have been drawn since the
    reading before. RAPL's files are root's on most systems: then the host's energy stays unknown.
    """

    def __init__(self, gpu: GpuMeter, powercap: Path = POWERCAP, clock: Callable[[], float] = time.monotonic) -> None:
        self._gpu, self._clock = gpu, clock
        self._at = clock()
        self._counter_j = gpu.energy_j()
        self._gpu_j = 0.0
        self._domains = [domain for folder in sorted(powercap.glob("intel-rapl:*")) if (domain := _Domain.of(folder)) is not None]

    @property
    def measures_gpu(self) -> bool:
        return self._counter_j is not None or self._gpu.power_w() is not None

    def read(self) -> Energy:
        """Joules so far."""
        host = sum(domain.read() for domain in self._domains) if self._domains else None
        return Energy(self._read_gpu(), host)

    def _read_gpu(self) -> float | None:
        now = self._clock()
        passed, self._at = now - self._at, now
        if self._counter_j is not None:
            counted = self._gpu.energy_j()
            return None if counted is None else counted - self._counter_j
        watts = self._gpu.power_w()
        if watts is None:
            return None
        self._gpu_j += watts * passed
        return self._gpu_j


class _Domain:
    """One RAPL counter, in microjoules, that begins anew when it is full."""

    def __init__(self, file: Path, full_uj: int, first_uj: int) -> None:
        self._file, self._full_uj, self._last_uj, self._sum_uj = file, full_uj, first_uj, 0

    @classmethod
    def of(cls, folder: Path) -> _Domain | None:
        """A package's or its memory's counter; None for a part of a package, which is counted with it, and for one that cannot be read."""
        try:
            name = (folder / "name").read_text().strip()
            if not (name.startswith("package") or name == "dram"):
                return None
            return cls(folder / "energy_uj", int((folder / "max_energy_range_uj").read_text()), int((folder / "energy_uj").read_text()))
        except (OSError, ValueError):
            return None

    def read(self) -> float:
        """Joules since it was opened. A counter that cannot be read any more stands still."""
        try:
            now = int(self._file.read_text())
        except (OSError, ValueError):
            now = self._last_uj
        self._sum_uj += now - self._last_uj + (self._full_uj if now < self._last_uj else 0)
        self._last_uj = now
        return self._sum_uj / 1e6


def _sum(left: float | None, right: float | None) -> float | None:
    return None if left is None or right is None else left + right


def _difference(now: float | None, before: float | None) -> float | None:
    return None if now is None or before is None else now - before
