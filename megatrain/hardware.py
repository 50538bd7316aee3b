"""What this machine has: memory of every tier, cores, limits. Read once, before anything is allocated.

Nothing here creates a CUDA context or imports torch: NVML answers for the GPU.
"""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from megatrain.errors import ConfigError

MIB = 2**20
GIB = 2**30

# What the driver counts beyond torch's reservation once all kernels of a model have been loaded: H200, torch 2.11, CUDA 13. The same to the
# byte from 0.2 to 7.6 billion parameters, eager and compiled; 8 MiB less in float32, whose attention has no kernels of its own.
CUDA_CONTEXT_BYTES = 756 * MIB
# cuBLAS and cuBLASLt (products with a bias) share a workspace of 32 MiB inside torch's reservation on Hopper; less on older chips. There is
# one for every thread and stream that multiplies.
CUBLAS_WORKSPACE_BYTES = 32 * MIB
# Resident memory that libraries take after planning, when they compute: the update kernel's compiler and code, oneDNN's kernels or CUDA's
# host side. `benchmarks/plan_check.py` measures it: the host's peak less all other rows of the plan.
CPU_LIBRARY_BYTES = 150 * MIB  # besides what grows with the head, see planner_bytes.CPU_HEAD_BYTES
CUDA_LIBRARY_BYTES = 1080 * MIB
CUDNN_LIBRARY_BYTES = 135 * MIB  # of these, what only attention in bf16 loads
COMPILER_BYTES = 150 * MIB  # torch.compile beside them, with nothing in its cache; 70 MiB with all of it there

# What the kernel keeps of its own about a process's memory: 8 bytes of page table for 4 KiB, on huge pages too; where they are pinned, the
# GPU's driver as much again, twice. H200, 124 GiB: 0.24 and 0.44 GiB. Without this room it throws out the pages of code that runs.
PAGE_TABLE_SHARE = 8 / 4096
PINNED_SHARE = 16 / 4096
KERNEL_SPARE_BYTES = 512 * MIB  # of RAM, for what else it and others may come to need: its own caches grew by 110 MiB meanwhile
KERNEL_SPARE_SHARE = 1 / 32  # and of a small machine's RAM no more than that

# glibc maps large blocks and gives them back when they are freed, but raises the bound from which it does so up to 32 MiB as it goes.
# Smaller activations then leave holes in heaps that nobody takes back: 50 to 160 MiB of a 2 to 4 GiB run, another figure every time.
# A fixed bound costs page faults: at 2 MiB a tenth to a third of a CPU's step (docs/log.md).
LARGE_BLOCK_BYTES = 2 * MIB
_M_MMAP_THRESHOLD = -3  # malloc.h
# oneDNN keeps generated code for 1024 shapes of bf16 products, and PyTorch its own copy of as many; rows of ever new lengths make ever new
# shapes: 27 MiB more with every step of a small model, 35 MiB of a 135M one. A step needs some forty; the second copy gains nothing.
LIBRARY_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "1"}

FIRST_BFLOAT16 = (8, 0)  # compute capability
FEWEST_CORES_KEPT_FREE = 2  # by the update: one core drives the GPU, one feeds data and copies
SHARE_OF_CORES_KEPT_FREE = 1 / 8  # memory is busy with fewer than all, and whoever drives the GPU must not queue for a core


@dataclass(frozen=True)
class Gpu:
    """The GPU that a run will use. Bytes as the driver counts them, before a context of ours exists."""

    name: str
    total_bytes: int
    free_bytes: int
    capability: tuple[int, int]


@dataclass(frozen=True)
class Hardware:
    """All that the planner knows about a machine. Bytes unless said otherwise."""

    gpu: Gpu | None  # None: training runs on the CPU
    host_total_bytes: int  # RAM of the machine or of the container, whichever is smaller
    host_available_bytes: int  # what this process may grow to, its present size included
    physical_cores: int  # that this process may run on
    disk_free_bytes: int  # where the run folder will be
    memlock_bytes: int | None  # how much may be pinned; None: no limit
    context_bytes: int  # of the GPU, that the driver counts and PyTorch does not
    workspace_bytes: int  # of the GPU, that libraries take through PyTorch
    resident_bytes: int  # of the host, that this process holds already: Python, its imports, a tokenizer
    library_bytes: int  # of the host, that libraries take once they compute


def probe(output_folder: str | Path, device: str = "auto") -> Hardware:
    """Read the machine. `device` is "auto", "cpu" or "cuda"; `output_folder` need not exist yet.

    Raises:
        ConfigError: "cuda" is asked for and no NVIDIA GPU is visible.
    """
    gpu = None if device == "cpu" else visible_gpu()
    if gpu is None and device.startswith("cuda"):
        raise ConfigError(
            "device: cuda was asked for, but no NVIDIA GPU is visible; set device: cpu, or check nvidia-smi and CUDA_VISIBLE_DEVICES"
        )
    memory, own = psutil.virtual_memory(), psutil.Process().memory_info()
    limit, room = cgroup_memory()
    code_bytes = getattr(own, "shared", 0)  # page cache, which counts as available; memory shared with other processes is in it, too
    most = own.rss - code_bytes + memory.available - min(KERNEL_SPARE_BYTES, int(memory.total * KERNEL_SPARE_SHARE))
    return Hardware(
        gpu=gpu,
        host_total_bytes=memory.total if limit is None else min(memory.total, limit),
        host_available_bytes=without_tables(max(0, most if room is None else min(most, own.rss + room)), pinned=gpu is not None),
        physical_cores=physical_cores(),
        disk_free_bytes=disk_free(Path(output_folder)),
        memlock_bytes=memlock_limit(),
        context_bytes=CUDA_CONTEXT_BYTES if gpu else 0,
        workspace_bytes=CUBLAS_WORKSPACE_BYTES if gpu else 0,
        resident_bytes=own.rss,
        library_bytes=CUDA_LIBRARY_BYTES if gpu else CPU_LIBRARY_BYTES,
    )


def without_tables(nbytes: int, *, pinned: bool) -> int:
    """How many of so many bytes of RAM can be used, when the kernel has taken what it needs to manage them. pinned: for a GPU."""
    return int(nbytes / (1 + PAGE_TABLE_SHARE + (PINNED_SHARE if pinned else 0)))


def physical_cores() -> int:
    """Physical cores that this process may use: its affinity mask can be smaller than the machine, and its container's share of time."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup_cpus()
    if quota is not None:
        allowed = min(allowed, int(quota))  # more threads than that are stopped in the middle, all of them
    return max(1, min(psutil.cpu_count(logical=False) or allowed, allowed))


def update_threads(cores: int | None = None) -> int:
    """How many threads the optimizer update gets: all physical cores but an eighth of them, two at least; one in any case."""
    cores = physical_cores() if cores is None else cores
    return max(1, cores - max(FEWEST_CORES_KEPT_FREE, int(cores * SHARE_OF_CORES_KEPT_FREE)))


def bf16_is_fast(device: str, cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether `device` ("cpu" or "cuda...") multiplies bf16 matrices faster than fp32 ones.

    GPUs from compute capability 8.0 on do; CPUs with AMX or AVX512-BF16 (2.3 times on a Zen 4 core), or Arm's bf16 extension.
    """
    if device.startswith("cuda"):
        gpu = visible_gpu()
        return gpu is not None and gpu.capability >= FIRST_BFLOAT16
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return False
    flags = next((line.split(":", 1)[1].split() for line in lines if line.lower().startswith(("flags", "features")) and ":" in line), [])
    return not {"amx_bf16", "avx512_bf16", "bf16"}.isdisjoint(flags)


def disk_free(folder: Path) -> int:
    """Free bytes for this user on the file system that holds `folder`, or its nearest existing parent."""
    return shutil.disk_usage(_existing(folder)).free


def drive_of(folder: Path) -> int:
    """A number that tells the file system that holds `folder`, or its nearest existing parent, from others."""
    return _existing(folder).stat().st_dev


def one_of_each_drive(folders: Iterable[Path]) -> list[Path]:
    """Of the folders those that lie on drives of their own."""
    return list({drive_of(folder): folder for folder in folders}.values())


def drive_name(folder: Path) -> str:
    """The device and the mount point of that file system, such as "259:1 /mnt/fast": to know it again in another run."""
    mount = _existing(folder).resolve()
    device = mount.stat().st_dev
    while not mount.is_mount():
        mount = mount.parent
    return f"{os.major(device)}:{os.minor(device)} {mount}"


def _existing(folder: Path) -> Path:
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def memlock_limit() -> int | None:
    """The soft limit on locked memory; None when there is none. It binds pinned memory only on systems that count it there."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def keep_heap_small() -> None:
    """Keep malloc (glibc's) and the CPU's kernel libraries from holding on to memory, as the plan assumes. Call it before they compute."""
    for name, value in LIBRARY_CACHES.items():
        os.environ.setdefault(name, value)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)


# -- GPU ----------------------------------------------------------------------------------------------------------------------------


def visible_gpu() -> Gpu | None:
    """The first GPU that CUDA would show this process, or None."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    chosen = "0" if visible is None else visible.split(",")[0].strip()
    if chosen in ("", "-1"):
        return None
    with _nvml() as nvml:
        if nvml is None:
            return None
        try:
            if chosen.isdigit():
                handle = nvml.nvmlDeviceGetHandleByIndex(int(chosen))
            else:
                handle = nvml.nvmlDeviceGetHandleByUUID(chosen)
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            capability = tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle))
            name = nvml.nvmlDeviceGetName(handle)
        except nvml.NVMLError:  # an index or UUID that does not exist here: CUDA shows no device either
            return None
    return Gpu(name if isinstance(name, str) else name.decode(), memory.total, memory.free, (capability[0], capability[1]))


@contextmanager
def _nvml() -> Iterator[Any]:
    """pynvml, initialised; None on a machine without a driver."""
    try:
        import pynvml
    except ImportError:
        yield None
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


# -- cgroups ------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _CgroupFiles:
    """Where one version of the memory controller keeps its figures. Swap is left out: a run that needs it would not end."""

    limits: tuple[str, ...]  # the smallest counts
    usage: str
    cache: tuple[str, str]  # keys in memory.stat: page cache not used lately and used lately, which the kernel gives up before it kills
    mapped: str  # of it, what processes have mapped: code that runs, ours among it, which is counted with us


# memory.high does not kill, but a group above it is slowed down to a crawl.
_CGROUP_V2 = _CgroupFiles(("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file"), "file_mapped")
_CGROUP_V1 = _CgroupFiles(
    ("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"), "total_mapped_file"
)
_V1_UNLIMITED = 2**60  # version 1 writes "no limit" as the largest page-aligned 64-bit number
_CPU_V2, _CPU_V1 = "cpu.max", "cpu.cfs_quota_us"
CGROUPS, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def cgroup_memory(mount: Path = CGROUPS, membership: Path = MEMBERSHIP) -> tuple[int | None, int | None]:
    """(smallest memory limit, room left under the tightest one) over this process's cgroup and its parents; None where no limit is set.

    Both versions of cgroups are read, for a machine may mount either, or version 1 for memory beside an empty version 2. Page cache, such
    as that of checkpoints just written, is room; what lies in /dev/shm is not.
    """
    limits: list[int] = []
    rooms: list[int] = []
    for folder, version in _cgroup_folders(mount, membership, "memory", (_CGROUP_V1.limits[0], _CGROUP_V2.limits[0])):
        files = _CGROUP_V2 if version == 2 else _CGROUP_V1
        stat = _stat(folder / "memory.stat")
        set_here = [_number(folder / name) for name in files.limits]
        # version 1 tells of limits of parents that a container does not see
        limit = min((n for n in (*set_here, stat.get("hierarchical_memory_limit")) if n is not None), default=None)
        if limit is None or limit >= _V1_UNLIMITED:
            continue
        limits.append(limit)
        usage = _number(folder / files.usage)
        if usage is not None:
            rooms.append(max(0, limit - usage + _reclaimable(stat, files)))
    return min(limits, default=None), min(rooms, default=None)


def _reclaimable(stat: dict[str, int], files: _CgroupFiles) -> int:
    inactive, active = (stat.get(key, 0) for key in files.cache)
    return max(inactive, inactive + active - stat.get(files.mapped, 0))  # shared memory counts as mapped, and not as cache


def cgroup_cpus(mount: Path = CGROUPS, membership: Path = MEMBERSHIP) -> float | None:
    """How many processors' time this process's cgroup and its parents may use (a container's --cpus); None without a limit."""
    quotas = []
    for folder, version in _cgroup_folders(mount, membership, "cpu", (_CPU_V1, _CPU_V2)):
        if version == 2:
            quota, period = (folder / _CPU_V2).read_text().split()
        else:
            quota, period = (str(_number(folder / name) or "max") for name in (_CPU_V1, "cpu.cfs_period_us"))  # -1: no limit
        if quota.isdigit() and period.isdigit():
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _cgroup_folders(mount: Path, membership: Path, controller: str, markers: tuple[str, str]) -> Iterator[tuple[Path, int]]:
    """The folders of this process's controllers from its own up to the mount point, where the version's marker exists, and the version."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, version = mount, 2
        elif controller in controllers.split(","):
            root, version = mount / controller, 1
        else:
            continue
        own = Path(path.lstrip("/"))
        # inside a container the path may be the host's and lead nowhere; the mount point itself is then the container's group
        for folder in [own, *own.parents]:
            if (root / folder / markers[version - 1]).exists():
                yield root / folder, version


def _number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max": no limit


def _stat(file: Path) -> dict[str, int]:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return {}
    return {key: int(value) for key, value in (line.split() for line in lines)}
