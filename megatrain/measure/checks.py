"""What keeps this machine from what it could do: a figure for each suspect, and a sentence of advice where something is off."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import psutil
import torch

from megatrain.hardware import GIB, Hardware, _nvml, cgroup_memory
from megatrain.machine import MachineProfile
from megatrain.measure.transfers import PIECE_BYTES

LANE_BYTES = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.56e9}  # bytes/s of one PCIe lane, by generation
LINK_SHARE = 0.75  # of a link's rate that large copies reach at least on a healthy machine; 0.88 beside an H200
OTHERS_SHARE = 0.25  # of the cores that other programs may keep busy before figures are doubtful
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
COMPILERS = ("cc", "gcc", "clang")


@dataclass(frozen=True)
class Finding:
    """One row of the doctor's table."""

    what: str
    figure: str
    advice: str | None = None


@dataclass(frozen=True)
class PcieLink:
    """Generations and lanes as the driver gives them: of the link, and of what the GPU itself can."""

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
    findings = [cores(hardware), other_programs(load, hardware.physical_cores), host_memory(hardware), huge_pages()]
    if hardware.gpu is not None:
        findings += [pcie(pcie_link(), profile.upload), pinned_memory(hardware), compiler()]
    return [*findings, free_disk(hardware)]


# -- processor ----------------------------------------------------------------------------------------------------------------------


def cores(hardware: Hardware) -> Finding:
    present = psutil.cpu_count(logical=False) or hardware.physical_cores
    allowed, quota = hardware.physical_cores, cpu_quota()
    figure = f"{allowed} of {present}"
    if quota is not None and quota < allowed:
        return Finding("cores", figure, f"the container may use only {quota:g} cores' time; raise its CPU limit, or set threads to match")
    if allowed < present:
        return Finding("cores", figure, "this process may not use all cores; start it without taskset, or give its container more")
    return Finding("cores", figure)


def cpu_quota(file: Path = CPU_QUOTA) -> float | None:
    """Cores' worth of time that the container may use; None without a limit."""
    try:
        quota, period = file.read_text().split()
    except (OSError, ValueError):  # no such file, or another format
        return None
    return None if quota == "max" else int(quota) / int(period)


def other_programs(load: float, physical_cores: int) -> Finding:
    advice = None
    if load > 1 + OTHERS_SHARE * physical_cores:  # one is ourselves, starting up
        advice = "other programs were running, so the figures are too low; measure again when the machine is idle"
    return Finding("load before", f"{load:.1f}", advice)


# -- host memory --------------------------------------------------------------------------------------------------------------------


def host_memory(hardware: Hardware) -> Finding:
    limit, _ = cgroup_memory()
    present = psutil.virtual_memory().total
    advice = None
    if limit is not None and limit < present:
        advice = f"the container may use only {limit / GIB:.0f} of {present / GIB:.0f} GiB; raise its memory limit to train larger models"
    return Finding("host memory", f"{hardware.host_total_bytes / GIB:.1f} GiB", advice)


def huge_pages(file: Path = HUGE_PAGES) -> Finding:
    """Transparent huge pages: our arrays ask for them, which saves the processor most look-ups of addresses."""
    try:
        chosen = file.read_text().split("[", 1)[1].split("]", 1)[0]
    except (OSError, IndexError):
        return Finding("huge pages", "unknown")
    advice = f"updates and pinning are slower without; as root: echo madvise > {file}" if chosen == "never" else None
    return Finding("huge pages", chosen, advice)


def pinned_memory(hardware: Hardware) -> Finding:
    """The limit on locked memory. Most drivers pin past it: then it is below what was pinned just now."""
    limit = hardware.memlock_bytes
    if limit is None:
        return Finding("memlock limit", "none")
    figure = f"{limit / GIB:.2f} GiB"
    if limit < PIECE_BYTES:
        return Finding("memlock limit", f"{figure}, not enforced for GPU memory")
    return Finding("memlock limit", figure, "it may stop large models from being pinned; raise it: ulimit -l unlimited")


# -- GPU ----------------------------------------------------------------------------------------------------------------------------


def pcie_link() -> PcieLink | None:
    """The link of the current CUDA device; None where the driver does not say, as in some virtual machines."""
    with _nvml() as nvml:
        if nvml is None:
            return None
        try:
            gpu = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties().uuid}")
            return PcieLink(
                generation=nvml.nvmlDeviceGetMaxPcieLinkGeneration(gpu),  # that GPU and board agree on: an idle link runs slower
                width=nvml.nvmlDeviceGetCurrPcieLinkWidth(gpu),
                gpu_generation=nvml.nvmlDeviceGetGpuMaxPcieLinkGeneration(gpu),
                gpu_width=nvml.nvmlDeviceGetMaxPcieLinkWidth(gpu),
            )
        except nvml.NVMLError:
            return None


def pcie(link: PcieLink | None, upload: float) -> Finding:
    """Whether the link is what the GPU can, and `upload` (bytes/s) what the link can."""
    if link is None:
        return Finding("PCIe link", "unknown")
    figure = f"generation {link.generation}, {link.width} lanes"
    if link.width < link.gpu_width or link.generation < link.gpu_generation:
        best = f"generation {link.gpu_generation} with {link.gpu_width} lanes"
        return Finding("PCIe link", figure, f"the GPU can do {best}; try another slot, or without a riser cable, and see the BIOS settings")
    if upload < LINK_SHARE * link.rate:
        share = f"{upload / 1e9:.0f} of {link.rate / 1e9:.0f} GB/s"
        return Finding("PCIe link", figure, f"copies reach only {share}; see whether other devices share the link, or a virtual machine")
    return Finding("PCIe link", figure)


def compiler() -> Finding:
    found = next((name for name in COMPILERS if shutil.which(name)), None)
    if found is None:
        return Finding("C compiler", "none", "layers cannot be compiled, which costs a sixth of the speed; install gcc")
    if find_spec("triton") is None:
        return Finding("C compiler", found, "Triton is missing, so layers cannot be compiled; install the CUDA build of PyTorch")
    return Finding("C compiler", found)


# -- disk ---------------------------------------------------------------------------------------------------------------------------


def free_disk(hardware: Hardware) -> Finding:
    """Room for a checkpoint of the largest model that fits host memory: 14 bytes a parameter in both."""
    advice = None
    if hardware.disk_free_bytes < hardware.host_total_bytes:
        advice = "a checkpoint of the largest model that fits host memory needs more; name a larger disk in output"
    return Finding("free disk", f"{hardware.disk_free_bytes / GIB:.0f} GiB", advice)
