"""How much memory a run has taken, as the machine counts it rather than we."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from megatrain.machine.hardware import opened_nvml

if TYPE_CHECKING:
    import torch


def peak_host_bytes(ranks: int = 1) -> int:
    """Peak resident bytes of this process (Linux's VmHWM), and its children's resident ones now.

    A page that several processes map is divided among them. Forked children, such as a compiler's,
    have most of theirs from their parent, and would each be counted for all of it (Linux says how
    much is whose: PSS).

    ranks: of this host, which have shared memory in common (RssShmem): one copy of the weights, and
        what NCCL sends through.
    """
    own = os.getpid()
    return _peak_bytes(own, ranks) + sum(_own_bytes(child) for child in _descendants(own))


def _descendants(pid: int) -> list[int]:
    """The processes that a process started, and those that these started.

    It is asked after every step, and psutil would look at every process of the machine.
    """
    try:  # Linux lists them by the thread that started them
        lists = [path.read_bytes() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:  # a thread has ended
        lists = []
    if not lists:
        return _descendants_by_psutil(pid)
    children = [int(word) for text in lists for word in text.split()]
    return children + [each for child in children for each in _descendants(child)]


def _descendants_by_psutil(pid: int) -> list[int]:
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _own_bytes(pid: int) -> int:
    try:
        memory = psutil.Process(pid).memory_full_info()
    except (psutil.NoSuchProcess, psutil.AccessDenied):  # gone, or another user's
        return 0
    return int(getattr(memory, "pss", memory.rss))


def _peak_bytes(pid: int, ranks: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        status = ""
    kib = {
        words[0]: int(words[1]) for words in map(str.split, status.splitlines()) if "kB" in words
    }
    if "VmHWM:" not in kib:  # not Linux, or a sandbox: what is resident now is the best there is
        return int(psutil.Process(pid).memory_info().rss)
    others = kib.get("RssShmem:", 0) * (ranks - 1) // ranks
    return (kib["VmHWM:"] - others) * 1024


def allocator_retries() -> int:
    """How often PyTorch found the GPU full, and gave back what it kept there to try again. The GPU
    stands still meanwhile."""
    import torch

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return 0
    return int(torch.cuda.memory_stats().get("num_alloc_retries", 0))


class GpuMeter:
    """Peak bytes of one GPU as its driver counts them (NVML): torch's, the context's, libraries'.

    NVML keeps no peak, so the largest reading counts. torch's allocator hands no memory back
    between steps, which makes one reading a step enough. Where the driver does not say which
    process holds how much (in a container, often), the device's whole use counts.
    """

    def __init__(self, device: torch.device) -> None:
        """On a CPU, and where the driver does not answer, every reading is None."""
        self._stack = ExitStack()
        self._nvml: Any = None
        self._peak_bytes = 0
        if device.type == "cuda":
            self._open(device)

    def _open(self, device: torch.device) -> None:
        import torch

        nvml = self._stack.enter_context(opened_nvml())
        if nvml is None:
            return
        # The UUID, as NVML does not know CUDA_VISIBLE_DEVICES.
        uuid = torch.cuda.get_device_properties(device).uuid
        try:
            self._handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        except nvml.NVMLError:
            return
        self._nvml = nvml

    def __enter__(self) -> GpuMeter:
        return self

    def __exit__(self, *_: object) -> None:
        self._nvml = None
        self._stack.close()

    def peak_bytes(self) -> int | None:
        """Read the driver and return the largest reading so far; None without a GPU."""
        if self._nvml is None:
            return None
        self._peak_bytes = max(self._peak_bytes, self._used_bytes())
        return self._peak_bytes

    def energy_j(self) -> float | None:
        """Joules of the device since its driver was loaded, by any process; None if not counted."""
        return self._reading("nvmlDeviceGetTotalEnergyConsumption")

    def power_w(self) -> float | None:
        """Watts that the device draws now; None if it does not say."""
        return self._reading("nvmlDeviceGetPowerUsage")

    def _reading(self, function: str) -> float | None:
        """A figure in thousandths; None where the device or its virtualisation lacks it."""
        if self._nvml is None:
            return None
        try:
            return float(getattr(self._nvml, function)(self._handle)) / 1000
        except self._nvml.NVMLError:
            return None

    def _used_bytes(self) -> int:
        for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle):
            if process.pid == os.getpid() and process.usedGpuMemory:
                return int(process.usedGpuMemory)
        return int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used)
