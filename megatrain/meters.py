"""How much memory a run has taken, as the machine sees it rather than as we counted it."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def host_bytes() -> int:
    """Peak resident bytes of this process (Linux counts it as VmHWM), and what its living children hold now.

    A page that several processes map is shared out among them (Linux: PSS): children that were forked, as a compiler's are, have most of
    theirs from their parent, and would each be counted for all of it.
    """
    import psutil

    own = psutil.Process()
    return _peak_resident_bytes(own) + sum(_own_bytes(child) for child in own.children(recursive=True))


def _own_bytes(process: Any) -> int:
    import psutil

    try:
        memory = process.memory_full_info()
    except (psutil.NoSuchProcess, psutil.AccessDenied):  # gone; or not ours to look into
        return 0
    return int(getattr(memory, "pss", memory.rss))


def _peak_resident_bytes(process: Any) -> int:
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
    except OSError:
        status = ""
    peaks = [int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:")]
    return peaks[0] if peaks else int(process.memory_info().rss)  # not Linux, or a sandbox's: what is resident now is the best there is


class GpuMeter:
    """Peak bytes of one GPU's memory as its driver counts them (NVML): torch's allocator, the CUDA context, libraries, all of it.

    NVML has no peak of its own, so the largest of all readings is kept. torch's allocator does not hand memory back between steps,
    which makes one reading a step enough. Where the driver does not say which process holds how much (in a container, often), the
    device's whole use counts, neighbours included.
    """

    def __init__(self, device: torch.device) -> None:
        """`device` may be a CPU: then every reading is None, as it is when the driver does not answer."""
        self._nvml: Any = None
        self._peak_bytes = 0
        if device.type == "cuda":
            self._open(device)

    def _open(self, device: torch.device) -> None:
        import pynvml
        import torch

        try:
            pynvml.nvmlInit()
            uuid = torch.cuda.get_device_properties(device).uuid  # NVML knows nothing of CUDA_VISIBLE_DEVICES, but it knows the chip
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        except pynvml.NVMLError:
            return
        self._nvml = pynvml

    def __enter__(self) -> GpuMeter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._nvml is not None:
            self._nvml.nvmlShutdown()
            self._nvml = None

    def peak_bytes(self) -> int | None:
        """Read the driver and return the largest reading so far; None without a GPU."""
        if self._nvml is None:
            return None
        self._peak_bytes = max(self._peak_bytes, self._used_bytes())
        return self._peak_bytes

    def energy_j(self) -> float | None:
        """Joules that the device has counted since its driver was loaded, neighbours' work included; None if it does not count them."""
        return self._reading("nvmlDeviceGetTotalEnergyConsumption")

    def power_w(self) -> float | None:
        """Watts that the device draws now; None if it does not say."""
        return self._reading("nvmlDeviceGetPowerUsage")

    def _reading(self, function: str) -> float | None:
        """A figure in thousandths."""
        if self._nvml is None:
            return None
        try:
            return float(getattr(self._nvml, function)(self._handle)) / 1000
        except self._nvml.NVMLError:  # the device or its virtualisation lacks it
            return None

    def _used_bytes(self) -> int:
        for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle):
            if process.pid == os.getpid() and process.usedGpuMemory:
                return int(process.usedGpuMemory)
        return int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used)
