"""The machine of a plan: this one, alone or beside other ranks, several of its GPUs, or one that is
described (recipes/planned_site.py)."""

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
from megatrain.engine.resolved import Machine
from megatrain.errors import ConfigError, StorageError, logger
from megatrain.machine.hardware import (
    IN_RAM,
    Hardware,
    drive_name,
    mount_of,
    read_hardware,
    shared_out,
)
from megatrain.machine.profile import (
    DriveRates,
    MachineProfile,
    fingerprint,
    save_drive,
    with_drives,
)
from megatrain.measure.disk import drive_rates
from megatrain.recipes.doctor import measured_or_typical, measured_together
from megatrain.recipes.planned_site import planned_site
from megatrain.recipes.ranks.rendezvous import cores_of_host
from megatrain.storage.run_folder import bytes_of_checkpoints
from megatrain.world import ALONE, World


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
        try:
            save_drive(fingerprint(hardware), drive_name(folder), rates)
        except StorageError as error:
            logger.warning(str(error))
        return rates

    return with_drives(profile, config.memory.nvme or (), hardware, measure)
