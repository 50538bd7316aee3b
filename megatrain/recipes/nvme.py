"""From a config to the third tier: what is asked of it, the room that it has, and what the engine is told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatrain.config import Config
from megatrain.engine.settings import Settings
from megatrain.errors import StorageError
from megatrain.hardware import Hardware, disk_free, drive_of
from megatrain.machine import MachineProfile
from megatrain.measure.disk import disk_rates
from megatrain.planner import Plan


def asked_of_nvme(config: Config) -> dict[str, Any]:
    """Fields of the job."""
    memory = config.memory
    return {
        "nvme_drives": len({drive_of(folder) for folder in memory.nvme or ()}),
        "nvme_blocks": None if memory.nvme_blocks == "auto" else memory.nvme_blocks,
        "nvme_arrays": None if memory.nvme_arrays == "auto" else memory.nvme_arrays,
        "nvme_activations": None if memory.nvme_activations == "auto" else memory.nvme_activations,
    }


def on_nvme(settings: Settings, plan: Plan, config: Config) -> Settings:
    """The engine's settings with what the plan puts there."""
    choices = plan.choices
    return replace(
        settings,
        nvme_folders=config.memory.nvme or (),
        nvme_blocks=choices.nvme_blocks,
        nvme_arrays=choices.nvme_arrays,
        nvme_activations=choices.nvme_activations,
        largest_group=choices.largest_group(plan.job),
    )


def with_drives(profile: MachineProfile, config: Config) -> MachineProfile:
    """The profile with what the slowest drive of memory.nvme writes and reads: measured now, for some seconds each.

    Unchanged where that fails: a folder that is full or cannot be written is told of by the plan or the store, with what they need of it.
    """
    try:
        rates = [disk_rates(folder) for folder in {drive_of(folder): folder for folder in config.memory.nvme or ()}.values()]
    except StorageError:
        return profile
    if not rates:
        return profile
    return replace(profile, disk_write=min(write for write, _ in rates), disk_read=min(read for _, read in rates))


def nvme_room(config: Config, hardware: Hardware, checkpoints: Mapping[str, int]) -> int | None:
    """Bytes that fit into the folders of memory.nvme, each of which holds an equal share, beside the run's checkpoints; None: no folder."""
    folders = config.memory.nvme
    if not folders:
        return None
    on_drive = Counter(drive_of(folder) for folder in folders)
    own = drive_of(config.output)
    beside = hardware.disk_free_bytes - sum(checkpoints.values())
    shares = [(beside if drive_of(folder) == own else disk_free(folder)) // on_drive[drive_of(folder)] for folder in folders]
    room = max(0, len(folders) * min(shares))
    return room if config.memory.nvme_size == "auto" else min(room, int(config.memory.nvme_size))
