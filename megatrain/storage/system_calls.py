"""System calls on files: what to tell the user when one fails."""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from megatrain.durable import sync_folder
from megatrain.errors import StorageError
from megatrain.heartbeat import beat

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


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
def system_errors(path: Path, doing: str) -> Iterator[None]:
    """Raise a StorageError for an OSError, from a library or a rename, that the block raises."""
    try:
        yield
        beat()
    except OSError as error:
        raise storage_error(Path(error.filename or path), error, doing) from error


def sync_tree(folder: Path, but: Collection[str] = ()) -> None:
    """Make everything below a folder survive a power loss; `but`: files that are known to."""
    for path in (folder, *sorted(folder.rglob("*"))):
        if path.is_dir():
            sync_folder(path)
        elif str(path.relative_to(folder)) not in but:
            with path.open("rb") as file:
                os.fsync(file.fileno())
