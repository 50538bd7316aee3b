"""Meters of a run: memory and power as the machine counts them, and load of the processors."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from megatrain.machine.hardware import opened_nvml, processors

if TYPE_CHECKING:
    import torch

RECENT_READINGS = 20
CONTENDED = 0.9  # share of all cores that are busy from which one process slows another
WORTH_NAMING = 0.1  # share of all cores that others take


def peak_host_bytes(ranks: int = 1) -> int:
    """Peak resident bytes of this process (Linux's VmHWM), and its children's resident ones now. A
    page that several processes map is divided among them (PSS): a forked child has most of its
    pages from its parent. ranks: of this host, which have shared memory in common (RssShmem)."""
    own, kib = psutil.Process(), dict[str, int]()
    of_children = sum(map(_own_bytes, own.children(recursive=True)))
    with suppress(OSError):
        lines = map(str.split, Path("/proc/self/status").read_text().splitlines())
        kib = {words[0]: int(words[1]) for words in lines if "kB" in words}
    if "VmHWM:" not in kib:  # a sandbox: what is resident now is the best there is
        return int(own.memory_info().rss) + of_children
    others = kib.get("RssShmem:", 0) * (ranks - 1) // ranks
    return (kib["VmHWM:"] - others) * 1024 + of_children


def _own_bytes(process: psutil.Process) -> int:
    try:
        memory = process.memory_full_info()
    except (psutil.NoSuchProcess, psutil.AccessDenied):  # gone, or another user's
        return 0
    return int(getattr(memory, "pss", memory.rss))


def allocator_retries() -> int:
    """Times that PyTorch found the GPU full, and freed its cache to try again."""
    import torch

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return 0
    return int(torch.cuda.memory_stats().get("num_alloc_retries", 0))


class GpuMeter(AbstractContextManager["GpuMeter"]):
    """Peak bytes of one GPU as its driver counts them (NVML): torch's, the context's, libraries'.
    NVML keeps no peak: the largest of one reading a step counts. Where the driver does not say
    which process holds how much (in a container, often), the device's whole use counts."""

    def __init__(self, device: torch.device) -> None:
        """On a CPU, and where the driver does not answer, every reading is None."""
        self._stack = ExitStack()
        self._nvml: Any = None
        self._peak_bytes = 0
        nvml = self._stack.enter_context(opened_nvml()) if device.type == "cuda" else None
        if nvml is None:
            return
        import torch

        # The UUID, as NVML does not know CUDA_VISIBLE_DEVICES.
        uuid = torch.cuda.get_device_properties(device).uuid
        with suppress(nvml.NVMLError):
            self._handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            self._nvml = nvml

    def __exit__(self, *_: object) -> None:
        self._nvml = None
        self._stack.close()

    def peak_bytes(self) -> int | None:
        """Read the driver and return the largest reading so far; None without a GPU."""
        if self._nvml is None:
            return None
        running = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        used = next((one.usedGpuMemory for one in running if one.pid == os.getpid()), None)
        used = used or self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used
        self._peak_bytes = max(self._peak_bytes, int(used))
        return self._peak_bytes

    def energy_j(self) -> float | None:
        """Joules of the device since its driver was loaded, by any process; None where the device
        or its virtualisation does not count them."""
        if self._nvml is not None:
            with suppress(self._nvml.NVMLError):
                return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1000
        return None


# -- load of the processors ------------------------------------------------------------------------


# Seconds since some beginning: wall time, busy cores in all, and those of this run.
ProcessorTimes = tuple[float, float, float]


@dataclass(frozen=True)
class Load:
    """Busy cores on average: all that this run may use, and those of other processes."""

    cores: int
    busy: float = 0.0
    others: float = 0.0

    @property
    def shared(self) -> bool:
        """True if others use a share of the cores that is worth naming."""
        return self.others >= WORTH_NAMING * self.cores

    @property
    def contended(self) -> bool:
        """True if others leave too little for this run."""
        return self.shared and self.busy >= CONTENDED * self.cores

    @property
    def words(self) -> str:
        return f"other processes use {self.others:.1f} of {self.cores} cores"


def read_processors() -> ProcessorTimes:
    """Read the processors that this process may use."""
    every, own = psutil.cpu_times(percpu=True), psutil.Process().cpu_times()
    mine = [every[number] for number in processors() if number < len(every)]
    busy = sum(each.user + each.system + getattr(each, "nice", 0.0) for each in mine)
    spent = own.user + own.system + own.children_user + own.children_system
    return time.monotonic(), busy, spent


@dataclass
class LoadMeter:
    """The load while the latest steps ran. One reading a step."""

    processors: Callable[[], ProcessorTimes] = read_processors
    count: int = field(default_factory=lambda: len(processors()))
    _readings: deque[ProcessorTimes] = field(default_factory=lambda: deque(maxlen=RECENT_READINGS))

    def read(self) -> Load:
        """Load since the oldest of the latest readings; none at the first."""
        self._readings.append(self.processors())
        ends = zip(self._readings[0], self._readings[-1], strict=True)
        wall, busy, own = (now - then for then, now in ends)
        if wall <= 0:
            return Load(self.count)
        return Load(self.count, busy / wall, max(0.0, busy - own) / wall)
