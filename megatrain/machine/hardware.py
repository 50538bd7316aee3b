"""The hardware of this machine: memory of every tier, cores, limits.

Read once, before anything is allocated. Nothing here creates a CUDA context or imports torch: the
GPU's driver answers (NVML).
"""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import permutations, takewhile
from pathlib import Path
from runpy import run_path
from typing import Any, TypeVar

import psutil

from megatrain.errors import ConfigError
from megatrain.machine.cgroups import cgroup_cpus, cgroup_memory
from megatrain.machine.datasheets import FIRST_BFLOAT16

T = TypeVar("T")

MIB = 2**20
GIB = 2**30
CPUINFO = Path("/proc/cpuinfo")
TOPOLOGY = Path("/sys/devices/system/cpu")
IN_RAM = ("tmpfs", "ramfs")  # file systems
OVERLAY = ("overlay", "fuse.fuse-overlayfs", "aufs")  # as the folders that a container comes with

# What the driver counts beyond torch's reservation once a model's kernels are loaded: H200, torch
# 2.11, CUDA 13. The same to the byte from 0.2 to 7.6 billion parameters, eager and compiled; 8 MiB
# less in float32, whose attention has no kernels of its own.
CUDA_CONTEXT_BYTES = 756 * MIB
# cuBLAS and cuBLASLt (matmuls with a bias) share a workspace of 32 MiB inside torch's reservation
# on Hopper, less on older chips: one for every thread and stream that multiplies.
CUBLAS_WORKSPACE_BYTES = 32 * MIB
# What NCCL takes of a GPU's memory for a communicator, beside PyTorch's, and for each other GPU in
# it, which it reaches by NVLink or only through host RAM. H100 and H200, torch 2.11, NCCL 2.28.9:
# of two 770 to 776 MiB, of four 1984, of two without peer access 320.
COMMUNICATOR_BYTES, PEER_BYTES, STAGED_PEER_BYTES = 169 * MIB, 605 * MIB, 151 * MIB
# The same of the host's: what a rank of two took beyond its plan, twice.
COMMUNICATOR_HOST_BYTES = 260 * MIB
P2P_READS = 0  # NVML_P2P_CAPS_INDEX_READ, which pynvml has as a tuple
# Resident memory that libraries take after planning: those that read rows (datasets and pyarrow,
# 85 MiB), and once they compute the update kernel's compiler and code, oneDNN's kernels or CUDA's
# host side. `benchmarks/plan_check.py` measures it: the host's peak less other rows of the plan.
CPU_LIBRARY_BYTES = 260 * MIB  # besides what grows with the head, planner.memory.CPU_HEAD_BYTES
CUDA_LIBRARY_BYTES = 1080 * MIB
CUDNN_LIBRARY_BYTES = 135 * MIB  # the part of these that only attention in bf16 loads
COMPILER_BYTES = 150 * MIB  # torch.compile, its cache empty; 70 MiB with a full one
# Packages of kernels, which load compilers of their own: Qwen3.5 on an H200 with
# flash-linear-attention and TileLang took 1.0 GiB more than all other rows, twice; profiled 1.5.
PACKAGES_BYTES = 1024 * MIB

# The kernel's own memory for a process: 8 bytes of page table for 4 KiB, on huge pages too, and for
# pinned pages twice as much again by the GPU's driver. H200, 124 GiB: 0.24 and 0.44 GiB. Without
# this room it throws out the pages of running code.
PAGE_TABLE_SHARE = 8 / 4096
PINNED_SHARE = 16 / 4096
KERNEL_SPARE_BYTES = 512 * MIB  # of RAM, for growth: the kernel's own caches grew by 110 MiB
KERNEL_SPARE_SHARE = 1 / 32  # and of a small machine's RAM no more than that

# glibc maps large blocks and returns them when they are freed, but raises the size from which it
# does so up to 32 MiB as it goes. Smaller activations then leave holes in heaps that are never
# returned: 50 to 160 MiB of a 2 to 4 GiB run, another figure every time. A fixed size costs page
# faults: at 2 MiB a tenth to a third of a CPU's step, so it is for short memory.
LARGE_BLOCK_BYTES = 2 * MIB
_M_MMAP_THRESHOLD = -3  # malloc.h
# oneDNN keeps generated code for 1024 shapes of bf16 matmuls, and PyTorch its own copy: with
# variable-length sequences 27 MiB more with every step of a small model, 35 MiB of a 135M one. A
# step needs some forty; the second copy gains nothing.
LIBRARY_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "1"}

# Cores that the update leaves free: one drives the GPU, one feeds data and copies, and memory is
# busy with fewer threads than all.
FEWEST_CORES_KEPT_FREE = 2
SHARE_OF_CORES_KEPT_FREE = 1 / 8


@dataclass(frozen=True)
class Gpu:
    """The GPU of a run. Bytes as the driver counts them, before we have a context on it."""

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
    memlock_bytes: int | None  # limit on locked memory, which few drivers count; None: no limit
    context_bytes: int  # of the GPU, counted by the driver and not by PyTorch
    workspace_bytes: int  # of the GPU, taken by libraries through PyTorch
    resident_bytes: int  # of the host, held already: Python, its imports, a tokenizer
    library_bytes: int  # of the host, taken by libraries once they compute


def read_hardware(output_folder: str | Path, device: str = "auto") -> Hardware:
    """Read the machine. `device` is "auto", "cpu" or "cuda"; `output_folder` need not exist yet.

    Raises:
        ConfigError: "cuda" is asked for and no NVIDIA GPU is visible.
    """
    gpu = None if device == "cpu" else visible_gpu()
    if gpu is None and device.startswith("cuda"):
        raise ConfigError(
            "device: cuda was asked for, but no NVIDIA GPU is visible; set device: cpu, or check "
            "nvidia-smi and CUDA_VISIBLE_DEVICES"
        )
    memory, own = psutil.virtual_memory(), psutil.Process().memory_info()
    limit, left = cgroup_memory()
    memlock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    # `shared` is page cache, which counts as available (and memory shared with other processes)
    held = own.rss - getattr(own, "shared", 0)
    spare = min(KERNEL_SPARE_BYTES, int(memory.total * KERNEL_SPARE_SHARE))
    most = held + memory.available - spare
    if left is not None:
        most = min(most, own.rss + left)
    if limit is not None:  # code that other containers run, too, is in `rss` and may not be charged
        most = min(most, limit)
    return Hardware(
        gpu=gpu,
        host_total_bytes=memory.total if limit is None else min(memory.total, limit),
        host_available_bytes=without_tables(max(0, most), pinned=gpu is not None),
        physical_cores=physical_cores(),
        disk_free_bytes=disk_free(Path(output_folder)),
        memlock_bytes=None if memlock == resource.RLIM_INFINITY else memlock,
        context_bytes=CUDA_CONTEXT_BYTES if gpu else 0,
        workspace_bytes=CUBLAS_WORKSPACE_BYTES if gpu else 0,
        resident_bytes=own.rss,
        library_bytes=CUDA_LIBRARY_BYTES if gpu else CPU_LIBRARY_BYTES,
    )


def shared_out(found: Sequence[Hardware], among: int) -> Hardware:
    """The equal share of each of several processes on one machine. found: by each. among: how many
    share host RAM and NVMe."""
    resident = max(each.resident_bytes for each in found)
    left = min(each.host_available_bytes - each.resident_bytes for each in found)
    gpus = [each.gpu for each in found if each.gpu is not None]
    memlock = [each.memlock_bytes for each in found if each.memlock_bytes is not None]
    return replace(
        found[0],
        gpu=min(gpus, key=lambda gpu: gpu.free_bytes) if gpus else None,
        host_total_bytes=found[0].host_total_bytes // among,
        host_available_bytes=resident + left // among,
        physical_cores=max(1, min(each.physical_cores for each in found) // among),
        disk_free_bytes=min(each.disk_free_bytes for each in found),
        memlock_bytes=min(memlock) if memlock else None,
        resident_bytes=resident,
    )


def without_tables(nbytes: int, *, pinned: bool) -> int:
    """The part of `nbytes` of RAM that is left beside the page tables for it. pinned: for a GPU."""
    return int(nbytes / (1 + PAGE_TABLE_SHARE + (PINNED_SHARE if pinned else 0)))


def physical_cores() -> int:
    """Physical cores that this process may use, by its affinity mask and its container's quota."""
    # the mask, and a container's set of processors (--cpuset-cpus), may have both halves of a core
    allowed = len({_siblings(number) for number in processors()})
    quota = cgroup_cpus()
    if quota is not None:  # with more threads than that, all are stopped in the middle
        allowed = min(allowed, int(quota))
    return max(1, min(psutil.cpu_count(logical=False) or allowed, allowed))


def processors() -> list[int]:
    """Logical processors that this process may use, in order."""
    return sorted(os.sched_getaffinity(0))


def _siblings(processor: int) -> str:
    """A name of the core that a logical processor is one of; its own where nothing is told."""
    try:
        return (TOPOLOGY / f"cpu{processor}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return f"processor {processor}"


def update_threads(cores: int | None = None) -> int:
    """Threads of the optimizer update: all cores but an eighth, or but two; at least one."""
    cores = physical_cores() if cores is None else cores
    return max(1, cores - max(FEWEST_CORES_KEPT_FREE, int(cores * SHARE_OF_CORES_KEPT_FREE)))


def bf16_is_fast(device: str, cpuinfo: Path = CPUINFO) -> bool:
    """True if `device` ("cpu" or "cuda...") multiplies bf16 matrices faster than fp32 ones. GPUs
    from Ampere on do; CPUs with AMX or AVX512-BF16 (2.3 times on a Zen 4 core) or Arm's bf16."""
    if device.startswith("cuda"):
        gpu = visible_gpu()
        return gpu is not None and gpu.capability >= FIRST_BFLOAT16
    flags = next(processor_facts(("flags", "features"), cpuinfo), "").split()
    return not {"amx_bf16", "avx512_bf16", "bf16"}.isdisjoint(flags)


def processor_facts(names: tuple[str, ...], cpuinfo: Path = CPUINFO) -> Iterator[str]:
    """Read Linux's value for each core under one of these names; nothing elsewhere."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return
    yield from (line.partition(":")[2].strip() for line in lines if line.lower().startswith(names))


def disk_free(folder: Path) -> int:
    """Free bytes for this user on the drive of `folder`, or of its nearest existing parent."""
    return shutil.disk_usage(_existing(folder)).free


def drive_of(folder: Path) -> int:
    """The device number of the drive of `folder`, or of its nearest existing parent."""
    return _existing(folder).stat().st_dev


def one_of_each_drive(folders: Iterable[Path]) -> list[Path]:
    """One folder on each drive, the last one named."""
    return list({drive_of(folder): folder for folder in folders}.values())


def drive_name(folder: Path) -> str:
    """Device and mount point, such as "259:1 /mnt/fast": to know a drive again in another run.

    A file system without a device of its own (NFS, btrfs, a container's overlay) has another number
    each time it is mounted, so it goes by its source: "server:/export /mnt/data".
    """
    mount = _existing(folder).resolve()
    device = mount.stat().st_dev
    found = mount_of(mount) if os.major(device) == 0 else None
    if found is not None:
        return f"{found.device} {found.mountpoint}"
    while not mount.is_mount():
        mount = mount.parent
    return f"{os.major(device)}:{os.minor(device)} {mount}"


def mount_of(folder: Path) -> Any:
    """The file system of `folder`, or of its nearest existing parent, as psutil describes it
    (mountpoint, fstype, device); None where none is told."""
    folder = _existing(folder).resolve()
    mounts = psutil.disk_partitions(all=True)
    holding = [mount for mount in mounts if folder.is_relative_to(mount.mountpoint)]
    # the longest path; of two mounts on one, the later hides the earlier
    return max(reversed(holding), key=lambda it: len(Path(it.mountpoint).parts), default=None)


def _existing(folder: Path) -> Path:
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.exists())


def keep_caches_small() -> None:
    """Keep libraries from hoarding memory. Call it before they compute."""
    for name, value in LIBRARY_CACHES.items():
        os.environ.setdefault(name, value)


# why: decision 0029
def bound_heap() -> None:
    """Keep malloc from hoarding memory: it returns large blocks, at the price of page faults."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)


def communicators(ranks: int, hosts: int, pieces: int) -> list[int]:
    """Members of each group of NCCL's that a rank is in: of its host's ranks, of one of each host,
    and of some of the first, `pieces`, that share sequences."""
    shared = pieces if pieces < ranks * hosts else 1
    return [members for members in (ranks, hosts, shared) if members > 1]


def communicator_bytes(groups: Sequence[int], peers: bool) -> int:
    """GPU memory of communicators with so many members. peers: GPUs reach each other's memory."""
    each = PEER_BYTES if peers else STAGED_PEER_BYTES
    return sum(COMMUNICATOR_BYTES + (members - 1) * each for members in groups)


def visible_gpu() -> Gpu | None:
    """The first GPU that CUDA would show this process, or None."""
    chosen, *_ = visible_gpus() or [""]

    def read(nvml: Any) -> Gpu:
        if chosen.isdigit():
            handle = nvml.nvmlDeviceGetHandleByIndex(int(chosen))
        else:
            handle = nvml.nvmlDeviceGetHandleByUUID(chosen)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
        return Gpu(nvml.nvmlDeviceGetName(handle), memory.total, memory.free, (major, minor))

    # no such index or UUID: CUDA shows no device either
    return from_driver(read, None) if chosen else None


def visible_gpus() -> list[str]:
    """The GPUs that CUDA would show this process, in its order: by index or UUID."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    there = from_driver(lambda nvml: int(nvml.nvmlDeviceGetCount()), 0)
    if visible is None or not there:
        return [str(index) for index in range(there)]
    names = (name.strip() for name in visible.split(","))
    # CUDA shows none behind the first that cannot be
    return [*takewhile(lambda name: name not in ("", "-1"), names)]


def built_for_cuda() -> bool:
    """True if PyTorch was built for GPUs of NVIDIA. It is not imported: 0.3 GiB, for a launcher."""
    found = find_spec("torch")
    assert found is not None and found.origin is not None
    return run_path(str(Path(found.origin).with_name("version.py")))["cuda"] is not None


def reach_each_other(uuids: Sequence[str]) -> bool:
    """True if each of this host's GPUs reads the others' memory; true where the driver cannot say.
    Asked of NVML: a rank's CUDA shows it one GPU. NCCL may have been told not to use it."""
    if os.environ.get("NCCL_P2P_DISABLE") == "1":
        return False

    def ask(nvml: Any) -> bool:
        gpus = [nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
        found = (nvml.nvmlDeviceGetP2PStatus(*pair, P2P_READS) for pair in permutations(gpus, 2))
        return all(status == nvml.NVML_P2P_STATUS_OK for status in found)

    return from_driver(ask, True)


def from_driver(ask: Callable[[Any], T], otherwise: T) -> T:
    """The answer of NVIDIA's driver to `ask`, which gets pynvml; `otherwise` where there is no
    driver, or it cannot say."""
    with opened_nvml() as nvml:
        if nvml is None:
            return otherwise
        try:
            return ask(nvml)
        except nvml.NVMLError:
            return otherwise


@contextmanager
def opened_nvml() -> Iterator[Any]:
    """pynvml, initialised; None on a machine without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()
