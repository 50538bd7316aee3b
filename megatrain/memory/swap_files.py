"""Files on one or several drives for data that host RAM has no room for.

Transfers bypass the page cache, in pieces, by several threads. The files have no names: nobody else
finds them, and they vanish with the process, however it ends. They are never a checkpoint.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from megatrain.errors import StorageError
from megatrain.memory.layout import round_up
from megatrain.memory.sizes import PAGE

PIECE_BYTES = 8 << 20  # of a transfer: consecutive ones lie in different folders
QUEUE_DEPTH = 16  # pieces on their way at a time, in each folder
NO_PROGRESS = 8  # consecutive answers of less than a page after which a drive counts as broken
NOT_OFFERED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)

logger = logging.getLogger("megatrain")

Done = Callable[[StorageError | None], None]
Move = Callable[[int, list[memoryview], int], int]


@dataclass(frozen=True)
class _File:
    number: int  # descriptor
    folder: Path


def _failed(folder: Path, doing: str, error: OSError) -> StorageError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    advice = (
        "free space there, or name other folders in memory.nvme"
        if full
        else "check the drive, or name another folder in memory.nvme"
    )
    reason = f"{error.strerror} (errno {error.errno})"
    return StorageError(f"{folder}: cannot {doing} the run's files there: {reason}; {advice}")


class SwapFiles:
    """`nbytes` of addresses, striped over a file per folder. Zero at first; owned until `close`.

    Raises:
        StorageError: a folder cannot be written, or lacks the space, which is reserved at once. A
            transfer that fails passes it to its `done`.
    """

    def __init__(self, folders: Sequence[Path], nbytes: int) -> None:
        share = round_up(-(-round_up(nbytes, PIECE_BYTES) // len(folders)), PIECE_BYTES)
        with ExitStack() as opened:
            self._files = [_open(folder, share, opened) for folder in folders]
            self._pool = ThreadPoolExecutor(
                QUEUE_DEPTH * len(folders), thread_name_prefix="megatrain-nvme"
            )
            opened.callback(self._pool.shutdown)
            self._opened = opened.pop_all()

    def read(self, offset: int, memory: memoryview, done: Done) -> None:
        """Fill `memory` from `offset` on, both in whole pages.

        Another thread calls `done` with None or the error.
        """
        self._transfer("read", os.preadv, offset, memory, done)

    def write(self, offset: int, memory: memoryview, done: Done) -> None:
        """Write `memory` from `offset` on, as `read` does. It must not change until `done`."""
        self._transfer("write", os.pwritev, offset, memory, done)

    def _transfer(
        self, doing: str, move: Move, offset: int, memory: memoryview, done: Done
    ) -> None:
        pieces, begin = [], 0
        while begin < len(memory):
            # consecutive pieces are in different folders: all drives work on one transfer
            stripe, inside = divmod(offset + begin, PIECE_BYTES)
            end = min(len(memory), begin + PIECE_BYTES - inside)
            row, column = divmod(stripe, len(self._files))
            pieces.append((self._files[column], memory[begin:end], row * PIECE_BYTES + inside))
            begin = end
        lock, left = threading.Lock(), len(pieces)
        failure: StorageError | None = None

        def job(file: _File, view: memoryview, at: int) -> None:
            nonlocal left, failure
            error = _whole(doing, move, file, view, at)
            with lock:
                failure, left = failure or error, left - 1
                last = left == 0
            if last:  # wait: the other pieces have moved
                done(failure)

        for piece in pieces:
            self._pool.submit(job, *piece)

    def close(self) -> None:
        """Finish the transfers under way, and give the space back."""
        self._opened.close()


def _whole(doing: str, move: Move, file: _File, view: memoryview, at: int) -> StorageError | None:
    """Move all of `view`. A short transfer is continued from a whole page, as O_DIRECT demands."""
    moved, stuck = 0, 0
    while moved < len(view):
        try:
            count = move(file.number, [view[moved:]], at + moved)
        except OSError as error:  # not for EINTR: Python itself tries again
            return _failed(file.folder, doing, error)
        progress = count if moved + count == len(view) else count - count % PAGE
        moved, stuck = moved + progress, 0 if progress else stuck + 1
        if stuck == NO_PROGRESS:
            short = f"only {count} of {len(view) - moved} bytes were moved at byte {at + moved}"
            return StorageError(
                f"{file.folder}: cannot {doing} the run's files there: {short}, again and again; "
                "check the drive"
            )
    return None


def _open(folder: Path, nbytes: int, opened: ExitStack) -> _File:
    """A file without a name, its space reserved. Raises StorageError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115  `opened` closes it
        opened.enter_context(file)
        try:  # all space now: no later step finds the drive full
            os.posix_fallocate(file.fileno(), 0, nbytes)
        except OSError as error:
            if error.errno not in NOT_OFFERED:
                raise
            logger.warning(
                f"{folder}: this file system cannot reserve space; a run that fills it stops there"
            )
            os.ftruncate(file.fileno(), nbytes)
    except OSError as error:
        raise _failed(folder, f"reserve {nbytes / 2**30:.2f} GiB for", error) from error
    try:
        flags = fcntl.fcntl(file.fileno(), fcntl.F_GETFL) | getattr(os, "O_DIRECT", 0)
        fcntl.fcntl(file.fileno(), fcntl.F_SETFL, flags)
    except OSError:
        logger.warning(
            f"{folder}: this file system has no direct access (O_DIRECT); "
            "its page cache takes host RAM as well"
        )
    return _File(file.fileno(), folder)
