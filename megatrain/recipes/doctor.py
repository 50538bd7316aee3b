"""The machine, measured: what `doctor` shows, and the machine that plans are made for."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from megatrain.config import Config
from megatrain.engine.ranks.exchange import peer_devices
from megatrain.engine.request import choose_device, choose_precision
from megatrain.engine.resolved import Machine
from megatrain.errors import ConfigError, StorageError, logger
from megatrain.machine import profile as profiles
from megatrain.machine.hardware import (
    IN_RAM,
    Hardware,
    drive_name,
    mount_of,
    one_of_each_drive,
    read_hardware,
    shared_out,
)
from megatrain.machine.profile import DriveRates, MachineProfile
from megatrain.measure.checks import Finding, check, places
from megatrain.measure.disk import drive_rates
from megatrain.measure.profile import measure_machine
from megatrain.measure.ranks import measure_together, network_rate
from megatrain.recipes.planned_site import planned_site
from megatrain.recipes.ranks.rendezvous import cores_of_host, measure_processes
from megatrain.reporting.meters import LoadMeter
from megatrain.reporting.words import three_digits
from megatrain.storage.run_folder import bytes_of_checkpoints
from megatrain.world import ALONE, World


@dataclass(frozen=True)
class Diagnosis:
    """The findings of `megatrain doctor`."""

    profile: MachineProfile
    guessed: list[str]  # fields of the profile that were not measured
    findings: list[Finding]
    saved: Path  # the profile's place in the cache
    drives: dict[str, DriveRates]  # all ever measured for memory.nvme, by device and mount point
    together: MachineProfile | None = None  # of several GPUs at work, or of processes without

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def render(self, console: Console) -> None:
        """Print one table: what was measured, then what might be off."""
        title = f"this machine ({self.profile.fingerprint})"
        table = Table("what", "figure", "verdict", title=title)
        drives = []
        for name, rates in self.drives.items():
            write, read = (three_digits(rate / 1e9) for rate in (rates.write, rates.read))
            words = f"writes {write}, reads {read} GB/s, on {rates.measured_on}"
            drives.append(Finding(f"drive {name}", words))
        together = figures(self.together, ()) if self.together else ()
        for found in (*figures(self.profile, self.guessed), *together, *drives, *self.findings):
            style = "yellow" if found.advice else None
            table.add_row(found.what, found.figure, found.advice or "", style=style)
        console.print(table)
        console.print(f"kept in {self.saved}", highlight=False, soft_wrap=True)


def examine(
    output: Path,
    quick: bool,
    note: Callable[[str], object],
    nvme: Sequence[Path] = (),
    gpus: int = 1,
) -> Diagnosis:
    """Measure this machine and cache what was found.

    Args:
        output: the folder whose disk is measured.
        quick: leave out what the planner can do without.
        note: is told what is measured next.
        nvme: folders whose drives are measured, too, as those of memory.nvme.
        gpus: that are also measured at work together; processes, on a machine without GPUs.

    Raises ConfigError, OutOfMemory (2 GiB on the GPU, pinned memory), StorageError.
    """
    load = os.getloadavg()[0]
    device = choose_device("auto")
    there = torch.cuda.device_count() if device.type == "cuda" else gpus
    if there < gpus:
        raise ConfigError(f"--gpus: {gpus}, but this machine shows {there}")
    hardware = read_hardware(output, device.type)
    profile = measure_machine(hardware, device, output, note, quick=quick)
    guess = profiles.typical(hardware)
    if profile.grouped:
        guess = replace(guess, grouped=profiles.usual_grouped(profile.matmul))
    pairs = ((field, getattr(profile, field), getattr(guess, field)) for field, *_ in ROWS)
    guessed = [field for field, found, typical in pairs if found and found == typical]
    findings, saved = check(hardware, profile, load), profiles.save_profile(profile)
    findings += places(dict.fromkeys([output, *nvme]))
    for folder in one_of_each_drive(nvme):
        note(f"the drive of {folder}")
        profiles.save_drive(profile.fingerprint, drive_name(folder), drive_rates(folder))
    together = None
    if gpus > 1:
        note(f"{gpus} {'GPUs' if device.type == 'cuda' else 'processes'} at work together")
        found = measure_processes(gpus, device.type)
        together = keep_together(profile, hardware, found)
    drives = profiles.load_drives(profile.fingerprint)
    return Diagnosis(profile, guessed, findings, saved, drives, together)


def keep_together(
    base: MachineProfile, hardware: Hardware, found: dict[str, Any]
) -> MachineProfile:
    """The profile of one with what ranks found together, which is cached. Raises StorageError."""
    name = profiles.fingerprint(hardware, found["ranks"])
    profile = replace(profiles.joined(base, replace(base, **found)), fingerprint=name)
    profiles.save_profile(profile)
    return profile


def measured_together(
    base: MachineProfile,
    hardware: Hardware,
    device: torch.device,
    world: World,
    *,
    may_measure: bool = False,
) -> tuple[MachineProfile, bool]:
    """(The profile of one with what this host's ranks reach together, whether that is assumed). All
    ranks call it, before anything is allocated. may_measure: what is not cached, on GPUs."""
    if world.hosts > 1:  # each time: it is of these hosts together, and takes a moment
        base = replace(base, network=network_rate(world, device))
    ranks = world.local_size
    if ranks == 1:
        return base, False
    profile = world.all_gather(profiles.known(base, hardware, ranks))[0]
    if profile is not None:
        return profile, False
    if not may_measure or device.type != "cuda":
        return world.all_gather(profiles.assumed(base, hardware, ranks))[0], True
    if world.rank == 0:
        logger.info(f"measuring {ranks} GPUs at work together for the plan, once")
    found = measure_together(world, device, profiles.part_of(hardware, ranks).physical_cores)
    if world.rank == 0:
        keep_if_possible(keep_together, base, hardware, found)
    return world.all_gather(profiles.joined(base, replace(base, **found)))[0], False


def measured_or_typical(
    hardware: Hardware, device: torch.device, *, may_measure: bool = False
) -> MachineProfile:
    """The cached profile of this machine, or a guess. may_measure: measure what is not cached for
    some seconds, and cache it unless other processes kept the cores busy; on a GPU alone, as a CPU
    run is over before that pays. Else nothing touches the device, and a guess about a GPU without a
    data sheet is logged."""
    there = profiles.load(profiles.fingerprint(hardware)) is not None
    if there or not may_measure or device.type != "cuda":
        return profiles.known_or_typical(hardware)
    logger.info("measuring this machine for the plan, once; `megatrain doctor` does it thoroughly")
    meter = LoadMeter()
    meter.read()
    profile = measure_machine(hardware, device, Path(), logger.debug, quick=True)
    load = meter.read()
    if load.shared:
        logger.warning(
            f"{load.words} while this machine was measured: its rates are not kept; run "
            "`megatrain doctor` when it is idle"
        )
        return profile
    keep_if_possible(profiles.save_profile, profile)
    return profile


def keep_if_possible(save: Callable[..., object], *what: object) -> None:
    """Save rates in the cache; a warning says where that fails, as they are used all the same."""
    try:
        save(*what)
    except StorageError as error:
        logger.warning(str(error))


# -- the machine of a plan -------------------------------------------------------------------------


def planned_machine(config: Config, **asked: Any) -> Machine:
    """This machine, or one that is described: arguments as for `planned_site`."""

    def find() -> Machine:
        machine, gpus, there = find_machine(config), asked.get("gpus"), torch.cuda.device_count()
        if machine.device.type == "cuda" and there < (gpus or 1):  # ranks on a CPU share its cores
            raise ConfigError(
                f"--gpus: {gpus}, but this machine shows {there}; describe another one with --gpu "
                "and --ram"
            )
        return machine

    return Machine.of_site(planned_site(config, find, **asked))


def find_machine(config: Config, *, may_measure: bool = False, world: World = ALONE) -> Machine:
    """This machine, with the config's device and precision; the same on all ranks.

    Args:
        may_measure: measure unknown rates of a machine, for seconds, instead of guessing them.
        world: the ranks that share this machine.

    Raises ConfigError.
    """
    device = choose_device(config.device)
    hardware = read_hardware(config.output, device.type)
    # the run's own checkpoints make room for the next ones
    free = hardware.disk_free_bytes + bytes_of_checkpoints(config.output)
    hardware = replace(hardware, disk_free_bytes=free)
    measure = partial(measured_or_typical, hardware, device, may_measure=may_measure)
    profile = world.broadcast(world.local_rank0_first(measure))
    assumed_together = False
    if not world.is_alone:
        hardware = replace(hardware, physical_cores=cores_of_host(world))
        one = profile, hardware, device, world
        profile, assumed_together = measured_together(*one, may_measure=may_measure)
        hardware = shared_out(world.all_gather(hardware), world.local_size)
    drives = partial(rates_with_drives, profile, config, hardware, may_measure=may_measure)
    profile, assumed = world.broadcast(world.local_rank0_first(drives))
    precisions = world.all_gather(choose_precision(config.precision, device))
    return Machine(
        "float32" if "float32" in precisions else precisions[0],
        hardware,
        profile,
        drives_assumed=assumed,
        ranks=world.local_size,
        hosts=world.hosts,
        together_assumed=assumed_together,
        peers=world.hosts > 1 or peer_devices(world, device),
        device=device,
        world=world,
    )


def rates_with_drives(
    profile: MachineProfile, config: Config, hardware: Hardware, *, may_measure: bool
) -> tuple[MachineProfile, tuple[Path, ...]]:
    """The profile with the rates of the slowest drive of memory.nvme, and a folder on each drive
    whose rates are assumed to be the profile's own. A drive is measured once, for some seconds, if
    the run computes on a GPU (on a CPU it is over before that pays) and the folder is there.
    may_measure: measure folders that are not there yet, too."""

    for folder in config.memory.nvme or ():
        mount = mount_of(folder)
        if mount is not None and mount.fstype in IN_RAM:
            where = config.where("memory.nvme")
            logger.warning(f"{where}: {folder} lies in RAM ({mount.fstype}), which it takes away")

    def measure(folder: Path) -> DriveRates | None:
        there = may_measure or (folder.is_dir() and os.access(folder, os.W_OK))
        if not (hardware.gpu and there):
            return None
        again = f"`megatrain doctor --nvme {folder}` does it again"
        logger.info(f"measuring the drive of {folder}, once; {again}")
        try:
            rates = drive_rates(folder)
        except StorageError:  # full or not writable: plan or store report it with what they need
            return None
        machine, drive = profiles.fingerprint(hardware), drive_name(folder)
        keep_if_possible(profiles.save_drive, machine, drive, rates)
        return rates

    return profiles.with_drives(profile, config.memory.nvme or (), hardware, measure)


# -- figures ---------------------------------------------------------------------------------------

ROWS = (  # field of the profile, what it is, its unit in SI, the unit's name
    ("upload", "PCIe, up", 1e9, "GB/s"),
    ("download", "PCIe, down", 1e9, "GB/s"),
    ("both", "PCIe, both ways at once", 1e9, "GB/s"),
    ("update", "host update, by threads", 1e9, "G parameters/s"),
    ("arithmetic", "arithmetic of the update", 1.0, "of an EPYC's"),
    ("update_busy", "host update, PCIe busy", 1e9, "G parameters/s"),
    ("both_busy", "PCIe, both ways, meanwhile", 1e9, "GB/s"),
    ("device_update", "device update", 1e9, "G parameters/s"),
    ("matmul", "bf16 products, by tokens", 1e12, "TFLOP/s"),
    ("matmul_fp32", "fp32 products, by tokens", 1e12, "TFLOP/s"),
    ("fp8", "fp8 products", 1e12, "TFLOP/s"),
    ("grouped", "experts' products, by rows", 1e12, "TFLOP/s"),
    ("attention", "attention, by length", 1e12, "TFLOP/s"),
    ("memory", "device memory", 1e9, "GB/s"),
    ("fresh", "memory just mapped", 1e9, "GB/s"),
    ("launch", "starting an operation", 1e-6, "µs"),
    ("disk_write", "disk, writing", 1e9, "GB/s"),
    ("disk_read", "disk, reading", 1e9, "GB/s"),
)
AT_WORK = (  # of each of several GPUs, with all at work
    *(row for row in ROWS if row[0] in profiles.TOGETHER),
    ("gather", "weights of the others", 1e9, "GB/s"),
    ("gather_loss", "computing lost meanwhile", 0.01, "%"),
    ("reduce", "sums of the others", 1e9, "GB/s"),
    ("reduce_loss", "computing lost meanwhile", 0.01, "%"),
)
SAME_ON_CPU = ("update_busy", "device_update")  # as the host's update: the host is the device
SAME_ON_GPU = ("fresh",)  # as the device's memory


def figures(profile: MachineProfile, guessed: Container[str]) -> Iterator[Finding]:
    """The profile's figures in units that people compare; of ranks, with all at work."""
    for field, what, unit, name in ROWS if profile.ranks == 1 else AT_WORK:
        value = getattr(profile, field)
        if not value or field in (SAME_ON_GPU if profile.upload else SAME_ON_CPU):
            continue
        sizes = () if isinstance(value, float) else value
        listed = ", ".join(f"{size:,}: {three_digits(rate / unit)}" for size, rate in sizes)
        text = listed or three_digits(value / unit)
        each = "" if profile.ranks == 1 else f", each of {profile.ranks}"
        guess = "a guess, not measured" if field in guessed else None
        yield Finding(f"{what}{each}", f"{text} {name}", guess)
