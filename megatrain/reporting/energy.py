"""Time, energy and money of training: planned, and measured by a run.

A GPU's energy is its driver's count, the processors' their own (RAPL) where that may be read. No
price is assumed. Power that nobody gave or measured is a share of the GPU's public board
power, and is called assumed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatrain.reporting.meters import GpuMeter

MILLION = 1_000_000
J_PER_KWH = 3.6e6
# Of the data sheet's board power. Assumed, not measured by us: large matmuls run at the power
# limit, and a GPU whose memory and clocks are up while it waits draws about a third.
COMPUTING_SHARE, WAITING_SHARE = 0.9, 0.35
POWERCAP = Path("/sys/class/powercap")


@dataclass(frozen=True)
class Prices:
    """Prices that a user pays. None: nothing, or unknown."""

    per_hour: float | None = None  # of the whole machine
    per_kwh: float | None = None
    currency: str = "USD"

    def times(self, hosts: float) -> Prices:
        """Prices of `hosts` machines."""
        per_hour = None if self.per_hour is None else hosts * self.per_hour
        return replace(self, per_hour=per_hour)


@dataclass(frozen=True)
class Economy:
    """Time, energy and money of `tokens`; a figure is None where its price or power is unknown."""

    tokens: int
    seconds: float
    joules: float | None
    prices: Prices
    counted: str  # parts that joules cover, in words

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def kwh(self) -> float | None:
        return None if self.joules is None else self.joules / J_PER_KWH

    @property
    def cost(self) -> float | None:
        """In the prices' currency, as far as prices are known; None without any."""
        per_hour, per_kwh = self.prices.per_hour, self.prices.per_kwh
        return known_sum(
            None if per_hour is None else per_hour * self.seconds / 3600,
            None if per_kwh is None or self.kwh is None else per_kwh * self.kwh,
        )

    @property
    def kwh_per_million(self) -> float | None:
        """kWh of a million tokens."""
        return None if self.kwh is None or not self.tokens else self.kwh * MILLION / self.tokens

    @property
    def cost_per_million(self) -> float | None:
        return None if self.cost is None or not self.tokens else self.cost * MILLION / self.tokens

    def to_dict(self) -> dict[str, Any]:
        """JSON-able, derived figures included."""
        return {
            "tokens": self.tokens,
            "tokens_per_s": self.tokens_per_s,
            "hours": self.seconds / 3600,
            "kwh": self.kwh,
            "kwh_per_million_tokens": self.kwh_per_million,
            "cost": self.cost,
            "cost_per_million_tokens": self.cost_per_million,
            "currency": self.prices.currency,
            "counted": self.counted,
        }


def planned_power(
    busy: float,
    board_w: float | None,
    gpu_w: float | None,
    host_w: float | None,
    gpus: int = 1,
    hosts: int = 1,
) -> tuple[float | None, str]:
    """(watts during a step; None where unknown, what they are of) of `gpus` GPUs, each of which
    computes for `busy` of the time, 0 to 1, in `hosts` hosts. board_w: of the GPU's data sheet, if
    there is one. gpu_w, host_w: of one, from the config."""
    how, parts = "as given", list[str]()
    if gpu_w is None and board_w is not None:
        gpu_w, how = board_w * (busy * COMPUTING_SHARE + (1 - busy) * WAITING_SHARE), "assumed"
    if gpu_w is not None:
        gpu_w *= gpus
        parts.append(f"GPU {gpu_w:,.0f} W, {how}")
    if host_w is not None:
        host_w *= hosts
        parts.append(f"host {host_w:,.0f} W, as given")
    elif parts:
        parts.append("the host's power is not counted")
    words = "; ".join(parts) or "power unknown: set economy.host_power_w"
    return known_sum(gpu_w, host_w), words


def human_hours(seconds: float) -> str:
    """`0.31 hours`."""
    return f"{seconds / 3600:,.3g} hours"


def described(economy: Economy, whole: bool) -> list[tuple[str, str]]:
    """(name, words) of cost and energy, where known, per million tokens and, if `whole`, in all."""

    def money(value: float) -> str:
        digits = f"{value:,.2f}" if value >= 1 else f"{value:.3g}"
        return f"{digits} {economy.prices.currency}"

    rows = []
    if economy.cost is not None and economy.cost_per_million is not None:
        total = f"{money(economy.cost)}, " if whole else ""
        rows.append(("cost", f"{total}{money(economy.cost_per_million)} per million tokens"))
    if economy.kwh is not None and economy.kwh_per_million is not None:
        total = f"{economy.kwh:,.3g} kWh, " if whole else ""
        each = f"{economy.kwh_per_million:,.3g} kWh per million tokens"
        rows.append(("energy", f"{total}{each} ({economy.counted})"))
    return rows


def compared(measured: Economy | None, planned: Economy | None) -> list[tuple[str, str]]:
    """The rows of `described` for a run, beside the plan's figures for a million tokens."""
    if measured is None or not measured.tokens:
        return []
    rows = dict(described(measured, whole=True))
    if planned is not None:
        for name, each in (("cost", "cost_per_million"), ("energy", "kwh_per_million")):
            found, plan = getattr(measured, each), getattr(planned, each)
            if found is not None and plan:
                rows[name] += f"; planned {plan:.3g} ({found / plan - 1:+.1%})"
    return list(rows.items())


@dataclass(frozen=True)
class Energy:
    """Joules of GPU and host; None for what cannot be measured."""

    gpu_j: float | None = None
    host_j: float | None = None

    @property
    def total_j(self) -> float | None:
        return known_sum(self.gpu_j, self.host_j)

    def or_given(self, seconds: float, gpu_w: float | None, host_w: float | None) -> Energy:
        """With the user's power in place of what was measured: a host is more than processors."""
        return Energy(
            self.gpu_j if gpu_w is None else gpu_w * seconds,
            self.host_j if host_w is None else host_w * seconds,
        )

    def __add__(self, other: Energy) -> Energy:
        return Energy(_plus(self.gpu_j, other.gpu_j), _plus(self.host_j, other.host_j))

    def since(self, before: Energy) -> Energy:
        """The energy between two readings."""
        return Energy(_plus(self.gpu_j, before.gpu_j, -1), _plus(self.host_j, before.host_j, -1))


class EnergyMeter:
    """Energy of one GPU (Volta or later) and of the host's processors and their memory. RAPL's
    files are root's on most systems: then the host's is unknown."""

    def __init__(self, gpu: GpuMeter, powercap: Path = POWERCAP) -> None:
        self._gpu, self._before_j = gpu, gpu.energy_j()
        self._counters = list[Callable[[], float]]()
        for folder in sorted(powercap.glob("intel-rapl:*")):
            # of whole processors and of their memory, as far as they can be read
            with suppress(OSError, ValueError):
                if (folder / "name").read_text().startswith(("package", "dram")):
                    self._counters.append(_counter(folder))

    def read(self) -> Energy:
        """Joules so far."""
        host = sum(joules() for joules in self._counters) if self._counters else None
        return Energy(_plus(self._gpu.energy_j(), self._before_j, -1), host)


def _counter(folder: Path) -> Callable[[], float]:
    """A function that gives a RAPL counter's joules from now on; one that cannot be read any more
    stands still. Raises OSError or ValueError if it cannot be read now."""
    file, sum_uj = folder / "energy_uj", 0
    full_uj, last_uj = int((folder / "max_energy_range_uj").read_text()), int(file.read_text())

    def joules() -> float:
        nonlocal sum_uj, last_uj
        with suppress(OSError, ValueError):
            now = int(file.read_text())
            # it begins at 0 again when it is full
            sum_uj += now - last_uj + (full_uj if now < last_uj else 0)
            last_uj = now
        return sum_uj / 1e6

    return joules


def _plus(left: float | None, right: float | None, sign: int = 1) -> float | None:
    return None if left is None or right is None else left + sign * right


def known_sum(*parts: float | None) -> float | None:
    """The sum of the parts that are known; None if none is."""
    known = [part for part in parts if part is not None]
    return sum(known) if known else None
