"""The machine of a run, alone or beside other ranks, and what it reaches."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from megatrain.config import Config
from megatrain.engine.build import choose_device, choose_precision
from megatrain.engine.placement import peers
from megatrain.engine.resolved import Machine
from megatrain.machine.hardware import read_hardware, shared_out
from megatrain.recipes.doctor import measured_or_typical, measured_together
from megatrain.recipes.nvme import with_drives
from megatrain.recipes.ranks.device import cores_of_host
from megatrain.storage.run_folder import bytes_of_checkpoints
from megatrain.world import ALONE, World


def find_machine(config: Config, *, may_measure: bool = False, world: World = ALONE) -> Machine:
    """This machine, with the config's device and precision; the same on all ranks. Raises
    ConfigError. may_measure, world: as in `prepare`."""
    device = choose_device(config.device)
    hardware = read_hardware(config.output, device.type)
    # the run's own checkpoints make room for the next ones
    free = hardware.disk_free_bytes + bytes_of_checkpoints(config.output)
    hardware = replace(hardware, disk_free_bytes=free)
    measure = partial(measured_or_typical, hardware, device, may_measure=may_measure)
    profile = world.told(world.in_turn(measure))
    assumed_together = False
    if not world.is_alone:
        hardware = replace(hardware, physical_cores=cores_of_host(world))
        one = profile, hardware, device, world
        profile, assumed_together = measured_together(*one, may_measure=may_measure)
        hardware = shared_out(world.every(hardware), world.local_size)
    drives = partial(with_drives, profile, config, hardware, may_measure=may_measure)
    profile, assumed = world.told(world.in_turn(drives))
    precisions = world.every(choose_precision(config.precision, device))
    return Machine(
        device,
        "float32" if "float32" in precisions else precisions[0],
        hardware,
        profile,
        drives_assumed=assumed,
        ranks=world.local_size,
        hosts=world.hosts,
        together_assumed=assumed_together,
        peers=world.hosts > 1 or peers(world, device),
        world=world,
    )
