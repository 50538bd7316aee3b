"""The machine of a plan: this one, alone or beside other ranks, several of its GPUs, or one that is
described, as by `megatrain plan --gpu "RTX 4090" --ram 128GiB`."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatrain.config import Config
from megatrain.engine.ranks.exchange import peer_devices
from megatrain.engine.request import choose_device, choose_precision
from megatrain.engine.resolved import Machine, Resolved
from megatrain.errors import ConfigError, StorageError, logger
from megatrain.machine import profile as rates
from megatrain.machine.datasheets import FIRST_BFLOAT16, FIRST_FP8, parse_size
from megatrain.machine.hardware import (
    GIB,
    IN_RAM,
    Hardware,
    drive_name,
    mount_of,
    read_hardware,
    shared_out,
)
from megatrain.machine.hypothetical import DRIVER_BYTES, SYSTEM_BYTES, find_gpu, hypothetical
from megatrain.machine.profile import (
    DriveRates,
    MachineProfile,
    fingerprint,
    save_drive,
    typical,
    with_drives,
)
from megatrain.measure.disk import drive_rates
from megatrain.planner.plan import OnGpus, Plan
from megatrain.recipes.doctor import measured_or_typical, measured_together
from megatrain.recipes.ranks.rendezvous import cores_of_host
from megatrain.recipes.setup import plan_run, prices_of
from megatrain.reporting.energy import Economy
from megatrain.storage.run_folder import bytes_of_checkpoints
from megatrain.world import ALONE, World

BYTES_OF_GBIT = 1e9 / 8


def planned_machine(
    config: Config,
    *,
    gpus: int | None = None,
    hosts: int | None = None,
    network: float | None = None,
    **other: Any,
) -> Machine:
    """This machine, or one that is `described`, with `gpus` of each of `hosts` like it at work.
    network: Gbit/s of each host to the others. Raises ConfigError, naming the command's flags."""
    if (hosts or 1) > 1 and network is None:
        raise ConfigError("--hosts needs --network, too: Gbit/s of each host, such as 400")
    if network is not None and not (network > 0 and (hosts or 1) > 1):
        raise ConfigError("--network: Gbit/s of each host, more than 0, for two --hosts or more")
    machine = _described(config, gpus=gpus or 1, **other) if other else find_machine(config)
    if not other and machine.device.type == "cuda":  # ranks on a CPU share its cores
        there = torch.cuda.device_count()
        if there < (gpus or 1):
            raise ConfigError(
                f"--gpus: {gpus}, but this machine shows {there}; describe another one with --gpu "
                "and --ram"
            )
    if gpus is None and hosts is None:
        return machine
    profile = replace(machine.profile, network=(network or 0.0) * BYTES_OF_GBIT)
    return several(replace(machine, profile=profile), gpus or 1, hosts or 1)


def _described(
    config: Config,
    gpu: str | None = None,
    ram: str | None = None,
    cores: int | None = None,
    *,
    gpu_memory: str | None = None,
    gpu_tflops: float | None = None,
    pcie: float | None = None,
    gpus: int = 1,
) -> Machine:
    """A machine with this GPU, RAM ("128GiB") and number of cores (None: the usual host's).

    gpu: a name in machine/datasheets.py, or that of a GPU which is described by its memory
        ("12GiB"), its dense bf16 TFLOP/s and the GB/s each way of its link to the host.
    gpus: of the same kind.

    Raises ConfigError for a GPU that is neither known nor described, a bad size, and a precision
    that the GPU lacks.
    """
    if ram is None or (gpu, gpu_memory, gpu_tflops, pcie) == (None, None, None, None):
        together = "--gpu and --ram belong together, and --cores to them"
        raise ConfigError(f"{together}; give none of them for this machine")
    memory = None
    if gpu_memory is not None:
        memory = _size("--gpu-memory", gpu_memory, DRIVER_BYTES, "12GiB")
    for flag, value in {"--gpu-tflops": gpu_tflops, "--pcie": pcie}.items():
        if value is not None and value <= 0:
            raise ConfigError(f"{flag}: must be more than 0, not {value:g}")
    name, sheet, listed = find_gpu(gpu, memory, gpu_tflops, pcie)
    hardware = hypothetical(name, sheet, _size("--ram", ram, SYSTEM_BYTES, "128GiB"), cores, gpus)
    if not listed:
        logger.warning(
            f"{name} is not in the table of GPUs: assumed are {sheet.memory:,.0f} GB/s of memory, "
            f"{sheet.float32:,.0f} TFLOP/s in float32, no fp8, and a desktop around it"
        )
    precision = _precision(config, name, sheet.capability)
    profile = typical(hardware, sheet)
    return Machine(torch.device("cuda"), precision, hardware, profile, compiles=True, here=False)


def _size(flag: str, text: str, least: int, example: str) -> int:
    size = parse_size(text)
    if not isinstance(size, int) or size <= least:
        wanted = f"a size of more than {least / GIB:.2g} GiB, such as {example}"
        raise ConfigError(f"{flag}: must be {wanted}, not {text!r}")
    return size


def _precision(config: Config, name: str, capability: tuple[int, int]) -> str:
    if config.precision == "auto":
        return "bfloat16" if capability >= FIRST_BFLOAT16 else "float32"
    if config.precision == "fp8" and capability < FIRST_FP8:
        where = config.where("precision")
        raise ConfigError(f"{where}: the {name} has no fp8 units; set precision: bfloat16")
    return config.precision


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
        device,
        "float32" if "float32" in precisions else precisions[0],
        hardware,
        profile,
        drives_assumed=assumed,
        ranks=world.local_size,
        hosts=world.hosts,
        together_assumed=assumed_together,
        peers=world.hosts > 1 or peer_devices(world, device),
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
        if mount is not None and mount.kind in IN_RAM:
            where = config.where("memory.nvme")
            logger.warning(f"{where}: {folder} lies in RAM ({mount.kind}), which it takes away")

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
        try:
            save_drive(fingerprint(hardware), drive_name(folder), rates)
        except StorageError as error:
            logger.warning(str(error))
        return rates

    return with_drives(profile, config.memory.nvme or (), hardware, measure)


# -- several GPUs ----------------------------------------------------------------------------------

COUNTS = (1, 2, 4, 8)  # of GPUs that are compared


def several(machine: Machine, ranks: int, hosts: int = 1) -> Machine:
    """The machine with `ranks` GPUs at work, each with its part of the host. machine: with one,
    which has all of it. hosts: machines like it."""
    if ranks == 1:
        return replace(machine, hosts=hosts, alone=machine)
    known = rates.known(machine.profile, machine.hardware, ranks) if machine.here else None
    return replace(
        machine,
        hardware=rates.part_of(machine.hardware, ranks),
        profile=known or rates.assumed(machine.profile, machine.hardware, ranks),
        ranks=ranks,
        hosts=hosts,
        together_assumed=known is None,
        peers=rates.gpus_reach_each_other(machine.hardware),
        alone=machine,
    )


def beside_others(config: Config, plan: Plan) -> Plan:
    """The plan with what 1, 2, 4 and 8 GPUs of each host would give, as far as a step has rows for
    them, if a number was asked for. The config's price is that of the plan's machine; others are
    taken in proportion."""
    resolved: Resolved = plan.made_of
    alone, job, rows = resolved.machine.alone, plan.job, list[OnGpus]()
    most = job.size if job.most_ranks is None else max(job.most_ranks, job.size)
    for gpus in sorted({*COUNTS, job.ranks}) if alone else ():
        if gpus % job.pieces or (job.most_ranks is not None and gpus * job.hosts > most):
            continue
        found = plan
        if alone and gpus != job.ranks:
            others = several(alone, gpus, job.hosts)
            found = plan_run(config, replace(resolved, machine=others))
        if not found.fits:
            rows.append(OnGpus(gpus, fits=False))
            continue
        timing = found.timing
        prices = prices_of(config).times(gpus / job.ranks * job.hosts)
        spent = Economy(round(timing.tokens_per_s * 3600), 3600, None, prices, "")
        rows.append(
            OnGpus(
                gpus,
                fits=True,
                seconds=timing.seconds,
                tokens_per_s=timing.tokens_per_s,
                tflops=timing.tflops,
                cost_per_million=spent.cost_per_million,
            )
        )
    return replace(plan, on_gpus=tuple(rows))
