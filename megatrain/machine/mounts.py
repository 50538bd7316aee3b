"""The file system below a folder, as Linux reports it. Only a file is read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

MOUNTS = Path("/proc/self/mountinfo")
IN_RAM = ("tmpfs", "ramfs")
OVERLAY = ("overlay", "fuse.fuse-overlayfs", "aufs")  # as the folders that a container comes with


class Mount(NamedTuple):
    """A mounted file system: where, of which kind, and from what device or server."""

    point: Path
    kind: str
    source: str


def mount_of(folder: Path, table: Path = MOUNTS) -> Mount | None:
    """The file system of `folder`, or of its nearest existing parent; None where none is told."""
    folder = folder.absolute()
    folder = next(path for path in (folder, *folder.parents) if path.exists()).resolve()
    try:
        lines = table.read_text(errors="surrogateescape").splitlines()  # as paths are decoded
    except OSError:  # as everywhere but on Linux
        return None
    found = None
    for line in lines:
        before, _, after = line.partition(" - ")
        point, (kind, source) = Path(_unescaped(before.split()[4])), after.split()[:2]
        # The longest path; of two mounts on one, the later hides the earlier.
        nearer = found is None or len(point.parts) >= len(found.point.parts)
        if nearer and folder.is_relative_to(point):
            found = Mount(point, kind, _unescaped(source))
    return found


def _unescaped(text: str) -> str:
    """Spaces and such are written as \\040."""
    return re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), text)
