"""Files beyond the page cache: folders synced for a power loss, and direct access."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path


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
