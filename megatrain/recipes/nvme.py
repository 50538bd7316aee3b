"""The rates of the drives for NVMe that a config names, and the room on them."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from megatrain.config import Config
from megatrain.engine.resolved import room_on_drives
from megatrain.errors import StorageError
from megatrain.machine import profile as profiles
from megatrain.machine.hardware import Hardware, disk_free, drive_name, drive_of
from megatrain.machine.mounts import IN_RAM, mount_of
from megatrain.machine.profile import DriveRates, MachineProfile, fingerprint, save_drive
from megatrain.measure.disk import drive_rates

logger = logging.getLogger("megatrain")


def with_drives(
    profile: MachineProfile, config: Config, hardware: Hardware, *, may_measure: bool
) -> tuple[MachineProfile, tuple[Path, ...]]:
    """The profile with the rates of the slowest drive of memory.nvme, and a folder on each drive
    whose rates are assumed to be the profile's own.

    A drive is measured once, for some seconds, if the run computes on a GPU (on a CPU it is over
    before that pays) and the folder is there.

    may_measure: measure folders that are not there yet, too.
    """

    for folder in config.memory.nvme or ():
        mount = mount_of(folder)
        if mount is not None and mount.kind in IN_RAM:
            where = config.where("memory.nvme")
            logger.warning(f"{where}: {folder} lies in RAM ({mount.kind}), which it takes away")

    def measure(folder: Path) -> DriveRates | None:
        if not hardware.gpu:
            return None
        if not (may_measure or (folder.is_dir() and os.access(folder, os.W_OK))):
            return None
        anew = f"`megatrain doctor --nvme {folder}` does it anew"
        logger.info(f"measuring the drive of {folder}, once; {anew}")
        try:
            rates = drive_rates(folder)
        except StorageError:  # full or not writable: plan or store report it with what they need
            return None
        try:
            save_drive(fingerprint(hardware), drive_name(folder), rates)
        except StorageError as error:
            logger.warning(str(error))
        return rates

    return profiles.with_drives(profile, config.memory.nvme or (), hardware, measure)


def least(rooms: Iterable[int | None]) -> int | None:
    """Of several ranks' `nvme_room`."""
    return min((room for room in rooms if room is not None), default=None)


def nvme_room(config: Config, hardware: Hardware, checkpoints: Mapping[str, int]) -> int | None:
    """Bytes that fit into the folders of memory.nvme, which hold equal shares; None without any.

    checkpoints: bytes of the run's checkpoints, which take room on the drive of its own folder.
    """
    own = drive_of(config.output)
    beside = hardware.disk_free_bytes - sum(checkpoints.values())

    def free(folder: Path) -> int:
        return beside if drive_of(folder) == own else disk_free(folder)

    size = config.memory.nvme_size
    limit = None if size == "auto" else int(size)
    return room_on_drives(config.memory.nvme or (), free, limit)
