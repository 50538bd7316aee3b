"""Files beyond the page cache: folders synced for a power loss, direct access, and the errors of
system calls on them."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatrain.errors import StorageError
from megatrain.heartbeat import beat

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def sync_folder(folder: Path) -> None:
    """Make the folder's entries, renames included, survive a power loss."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def bypass_cache(descriptor: int) -> bool:
    """Read and write a file past the cache from now on. False: its file system cannot."""
    with suppress(OSError):
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL) | getattr(os, "O_DIRECT", 0)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
        return True
    return False


def storage_error(path: Path, error: OSError, doing: str, advice: str = "") -> StorageError:
    """The error for a failed system call on `path`; by default the advice depends on its errno."""
    reason = f"{error.strerror or error} (errno {error.errno})"
    if not advice and error.errno in FULL:
        advice = "free space there or choose another folder"
    if error.errno == errno.ELOOP:
        advice = "it is a symbolic link: remove it"
    advice = advice or "check the disk and the folder's permissions"
    return StorageError(f"{path}: cannot {doing}: {reason}; {advice}")


@contextmanager
def system_errors(path: Path, doing: str, advice: str = "") -> Iterator[None]:
    """Raise a StorageError for an OSError, from a library or a rename, that the block raises."""
    try:
        yield
        beat()
    except OSError as error:
        raise storage_error(Path(error.filename or path), error, doing, advice) from error
