"""Checks of what slows this machine down: a figure for each suspect, and advice for it."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import torch

from megatrain.machine.cgroups import cgroup_cpus, cgroup_memory
from megatrain.machine.hardware import GIB, IN_RAM, OVERLAY, Hardware, from_driver, mount_of
from megatrain.machine.profile import MachineProfile
from megatrain.measure.transfers import PIECE_BYTES

# bytes/s of one PCIe lane, by generation
LANE_BYTES = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.56e9}
LINK_SHARE = 0.75  # of a link's rate, the least of large copies on a healthy machine; 0.88: H200
OTHERS_SHARE = 0.25  # of the cores, busy with other programs before figures are doubtful
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
SHARED_MEMORY = Path("/dev/shm")
NCCL_BYTES = GIB  # what NCCL's manual asks of a container; Docker gives 64 MiB
COMPILERS = ("cc", "gcc", "clang")


@dataclass(frozen=True)
class Finding:
    """One row of the doctor's table."""

    what: str
    figure: str
    advice: str | None = None


@dataclass(frozen=True)
class PcieLink:
    """Generations and lanes as the driver gives them: of the link, and the most of the GPU."""

    generation: int
    width: int
    gpu_generation: int
    gpu_width: int

    @property
    def rate(self) -> float:
        """Bytes/s that the link could carry one way."""
        return self.width * LANE_BYTES[min(self.generation, max(LANE_BYTES))]


def check(hardware: Hardware, profile: MachineProfile, load: float) -> list[Finding]:
    """All findings. `load`: runnable processes before anything was measured (`os.getloadavg`)."""
    present = psutil.cpu_count(logical=False) or hardware.physical_cores
    findings = [
        usable_cores(hardware),
        other_programs(load, present),  # of the whole machine, as the load is in a container, too
        host_memory(hardware),
        huge_pages(),
    ]
    if hardware.gpu is not None:
        findings += [pcie(pcie_link(), profile.upload), pinned_memory(hardware)]
        findings += [shared_memory(torch.cuda.device_count()), compiler()]
    return [*findings, free_disk(hardware)]


def usable_cores(hardware: Hardware) -> Finding:
    """Physical cores that are withheld: by a container's quota, or by the affinity mask."""
    allowed, quota = hardware.physical_cores, cgroup_cpus()
    present = psutil.cpu_count(logical=False) or allowed
    advice = (
        "this process may not use all cores; start it without taskset, or give its container more"
    )
    if quota is not None and max(1, int(quota)) <= allowed:
        advice = f"the container may use only {quota:g} cores' time; raise its CPU limit"
    return Finding("cores", f"{allowed} of {present}", advice if allowed < present else None)


def other_programs(load: float, physical_cores: int) -> Finding:
    advice = (
        "other programs were running, so the figures are too low; measure again when the machine "
        "is idle"
    )
    busy = load > 1 + OTHERS_SHARE * physical_cores  # one is ourselves, starting up
    return Finding("load before", f"{load:.1f}", advice if busy else None)


def host_memory(hardware: Hardware) -> Finding:
    present = psutil.virtual_memory().total
    limit = cgroup_memory()[0] or present
    advice = (
        f"the container may use only {limit / GIB:.1f} of {present / GIB:.1f} GiB; raise its "
        "memory limit to train larger models"
    )
    total, left = hardware.host_total_bytes / GIB, hardware.host_available_bytes / GIB
    figure = f"{total:.1f} GiB, {left:.1f} for this process"
    return Finding("host memory", figure, advice if limit < present else None)


def huge_pages(file: Path = HUGE_PAGES) -> Finding:
    """Transparent huge pages, which our arrays ask for: fewer address look-ups."""
    try:
        chosen = file.read_text().split("[", 1)[1].split("]", 1)[0]
    except (OSError, IndexError):
        return Finding("huge pages", "unknown")
    advice = f"updates and pinning are slower without; as root: echo madvise > {file}"
    return Finding("huge pages", chosen, advice if chosen == "never" else None)


def pinned_memory(hardware: Hardware) -> Finding:
    """The limit on locked memory. A limit below what was pinned just now is not enforced."""
    limit = hardware.memlock_bytes
    if limit is None:
        return Finding("memlock limit", "none")
    figure = f"{limit / GIB:.2f} GiB"
    if limit < PIECE_BYTES:
        return Finding("memlock limit", f"{figure}, not enforced for GPU memory")
    advice = (
        "it may stop large models from being pinned; raise it: ulimit -l unlimited, or docker run "
        "--ulimit memlock=-1"
    )
    return Finding("memlock limit", figure, advice)


def shared_memory(gpus: int, folder: Path = SHARED_MEMORY) -> Finding:
    """Room in /dev/shm, of which one GPU needs nothing and NCCL between several does."""
    if not folder.is_dir():
        return Finding("shared memory", "unknown")
    size = shutil.disk_usage(folder).total
    advice = "several GPUs may need more (NCCL); docker run --shm-size=1g"
    few = gpus > 1 and size < NCCL_BYTES
    return Finding("shared memory", f"{size / GIB:.2f} GiB", advice if few else None)


def pcie_link() -> PcieLink | None:
    """The current CUDA device's link; None where the driver does not say, as in some VMs."""

    def ask(nvml: Any) -> PcieLink:
        gpu = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties().uuid}")
        return PcieLink(
            # the most that GPU and board agree on: an idle link runs slower
            generation=nvml.nvmlDeviceGetMaxPcieLinkGeneration(gpu),
            width=nvml.nvmlDeviceGetCurrPcieLinkWidth(gpu),
            gpu_generation=nvml.nvmlDeviceGetGpuMaxPcieLinkGeneration(gpu),
            gpu_width=nvml.nvmlDeviceGetMaxPcieLinkWidth(gpu),
        )

    return from_driver(ask, None)


def pcie(link: PcieLink | None, upload: float) -> Finding:
    """A link below the GPU's best, or copies (`upload`, bytes/s) far below the link's rate."""
    if link is None:
        return Finding("PCIe link", "unknown")
    advice = None
    if link.width < link.gpu_width or link.generation < link.gpu_generation:
        advice = (
            f"the GPU can do generation {link.gpu_generation} with {link.gpu_width} lanes; try "
            "another slot, or without a riser cable, and see the BIOS settings"
        )
    elif upload < LINK_SHARE * link.rate:
        advice = (
            f"copies reach only {upload / 1e9:.0f} of {link.rate / 1e9:.0f} GB/s; see whether "
            "other devices share the link, or a virtual machine"
        )
    return Finding("PCIe link", f"generation {link.generation}, {link.width} lanes", advice)


def compiler() -> Finding:
    found = next((name for name in COMPILERS if shutil.which(name)), None)
    advice = None
    if found is None:
        advice = "layers cannot be compiled, which costs a sixth of the speed; install gcc"
    elif find_spec("triton") is None:
        advice = (
            "Triton is missing, so layers cannot be compiled; install the CUDA build of PyTorch"
        )
    return Finding("C compiler", found or "none", advice)


def free_disk(hardware: Hardware) -> Finding:
    """Room for a checkpoint of the largest model in host memory: 14 bytes a parameter in both."""
    advice = (
        "a checkpoint of the largest model that fits host memory needs more; name a larger disk in "
        "output"
    )
    few = hardware.disk_free_bytes < hardware.host_total_bytes
    figure = f"{hardware.disk_free_bytes / GIB:.0f} GiB"
    return Finding("free disk", figure, advice if few else None)


def places(folders: Iterable[Path]) -> Iterator[Finding]:
    """Folders that lie on no drive: in RAM, or in what a container loses when it is removed."""
    advice = dict.fromkeys(IN_RAM, "it lies in RAM; name a folder on a drive")
    goes = "if this is a container, its files go when it is removed; mount a folder of the host"
    advice |= dict.fromkeys(OVERLAY, f"{goes} there: docker run --volume")
    for folder in folders:
        mount = mount_of(folder)
        if mount is not None and mount.fstype in advice:
            yield Finding(str(folder), mount.fstype, advice[mount.fstype])
