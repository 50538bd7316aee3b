"""The disk under a folder: large pieces written and read by several threads, past the cache."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path

from megatrain.durable import bypass_cache
from megatrain.errors import system_errors
from megatrain.machine.profile import DriveRates

FILE_BYTES = 1 << 30
PIECE_BYTES = 16 << 20
THREADS = 8
LONGEST_S = 3.0  # each way: a slow disk is known after fewer pieces


def drive_rates(folder: Path) -> DriveRates:
    """Rates of the drive that holds `folder`, measured for some seconds. Raises StorageError."""
    return DriveRates(*disk_rates(folder), date.today().isoformat())


def disk_rates(folder: Path, file_bytes: int = FILE_BYTES) -> tuple[float, float]:
    """(write, read) bytes/s of an unnamed file in `folder` or its nearest existing parent. Raises
    StorageError."""
    folder = next(path for path in (folder, *folder.parents) if path.exists())
    pieces = file_bytes // PIECE_BYTES
    with (
        system_errors(folder, "measure the disk", "name another folder"),
        tempfile.TemporaryFile(dir=folder, buffering=0) as file,
        mmap.mmap(-1, PIECE_BYTES) as piece,
    ):
        number = file.fileno()
        bypass_cache(number)  # elsewhere fsync and advice to drop pages come close
        piece.write(os.urandom(PIECE_BYTES))  # not zeros, which some disks do not store
        written, write = _rate(
            lambda start: os.pwrite(number, piece, start), pieces, lambda: os.fsync(number)
        )
        os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
        # all into one buffer, which is never looked at
        _, read = _rate(lambda start: os.preadv(number, [piece], start), written)
    return write, read


def _rate(
    move: Callable[[int], object], pieces: int, finish: Callable[[], object] = lambda: None
) -> tuple[int, float]:
    """(pieces moved, bytes/s) of `move`, called at each piece's offset until LONGEST_S are over."""
    started = time.perf_counter()

    def job(index: int) -> bool:
        if time.perf_counter() - started > LONGEST_S:
            return False
        move(index * PIECE_BYTES)
        return True

    with ThreadPoolExecutor(THREADS) as pool:
        moved = sum(pool.map(job, range(pieces)))
    finish()
    return moved, moved * PIECE_BYTES / (time.perf_counter() - started)
