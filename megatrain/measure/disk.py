"""The disk under a folder: writing and reading in large pieces on several threads, past the page cache."""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path

from megatrain.errors import StorageError
from megatrain.machine import DriveRates

FILE_BYTES = 1 << 30
PIECE_BYTES = 16 << 20
THREADS = 8
LONGEST_S = 3.0  # each way: a slow disk is known after fewer pieces


def drive_rates(folder: Path) -> DriveRates:
    """Of the drive that holds `folder`, measured now, for some seconds. Raises StorageError."""
    return DriveRates(*disk_rates(folder), date.today().isoformat())


def disk_rates(folder: Path, file_bytes: int = FILE_BYTES) -> tuple[float, float]:
    """(write, read) bytes/s of a file without a name in the nearest existing parent of `folder`. Raises StorageError."""
    while not folder.exists():
        folder = folder.parent
    pieces = file_bytes // PIECE_BYTES
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file, mmap.mmap(-1, PIECE_BYTES) as piece:
            number = file.fileno()
            _bypass_cache(number)
            piece.write(os.urandom(PIECE_BYTES))  # not zeros, which some disks do not store
            written, write = _rate(lambda start: os.pwrite(number, piece, start), pieces, lambda: os.fsync(number))
            _forget(number)
            _, read = _rate(lambda start: os.preadv(number, [piece], start), written)  # all into one buffer: nobody looks at it
    except OSError as error:
        raise StorageError(f"{folder}: the disk cannot be measured: {error.strerror}; name another folder") from error
    return write, read


def _bypass_cache(number: int) -> None:
    """Write to the disk itself, where the system can and the file system allows it; elsewhere fsync and `_forget` come close."""
    try:
        fcntl.fcntl(number, fcntl.F_SETFL, fcntl.fcntl(number, fcntl.F_GETFL) | getattr(os, "O_DIRECT", 0))
    except OSError:
        return


def _forget(number: int) -> None:
    """Let the page cache drop the file, where the system takes such advice."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)


def _rate(move: Callable[[int], object], pieces: int, finish: Callable[[], object] = lambda: None) -> tuple[int, float]:
    """(pieces moved in order, bytes/s) of `move` at each piece's offset, until all are moved or time is up."""
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
