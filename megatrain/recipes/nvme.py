"""From a config to the third tier: what is asked of it, the room that it has, and what the engine is told."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatrain.config import Config
from megatrain.engine.settings import Settings
from megatrain.errors import StorageError
from megatrain.hardware import Hardware, disk_free, drive_name, drive_of, one_of_each_drive
from megatrain.machine import DriveRates, MachineProfile, fingerprint, load_drives, save_drive
from megatrain.measure.disk import drive_rates
from megatrain.planner import Plan

logger = logging.getLogger("megatrain")


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


def with_drives(
    profile: MachineProfile, config: Config, hardware: Hardware, *, may_measure: bool
) -> tuple[MachineProfile, tuple[Path, ...]]:
    """The profile with what the slowest drive of memory.nvme writes and reads, and a folder on each drive whose rates are assumed to be
    the profile's own.

    Rates that were measured once are kept. A drive without is measured now, for some seconds, where the run computes on a GPU (on a CPU it
    is over before that pays) and, unless `may_measure`, where the folder is there.
    """
    folders = one_of_each_drive(config.memory.nvme or ())
    if not folders:
        return profile, ()
    here = fingerprint(hardware)
    kept = load_drives(here)
    known, assumed = [], []
    for folder in folders:
        rates = kept.get(drive_name(folder))
        if rates is None and hardware.gpu and (may_measure or (folder.is_dir() and os.access(folder, os.W_OK))):
            rates = _measured(folder, here)
        if rates is None:
            assumed.append(folder)
        else:
            known.append((rates.write, rates.read))
    if assumed:
        known.append((profile.disk_write, profile.disk_read))
    write, read = map(min, zip(*known, strict=True))
    return replace(profile, disk_write=write, disk_read=read), tuple(assumed)


def _measured(folder: Path, machine: str) -> DriveRates | None:
    """None where that fails: a folder that is full or cannot be written is told of by the plan or the store, with what they need of it."""
    logger.info(f"measuring the drive of {folder}, once; `megatrain doctor --nvme {folder}` does it anew")
    try:
        rates = drive_rates(folder)
    except StorageError:
        return None
    try:
        save_drive(machine, drive_name(folder), rates)
    except StorageError as error:
        logger.warning(str(error))
    return rates


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
