"""New files that are hashed while they are written, and on the disk when they are closed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from megatrain.durable import sync_folder
from megatrain.errors import system_errors
from megatrain.heartbeat import BYTES_WRITTEN, beat

SMALL_FILES_BYTES = 64 << 20  # allowance for a checkpoint's tokenizer, configuration and headers


def sync_tree(folder: Path, but: Collection[str] = ()) -> None:
    """Make everything below a folder survive a power loss; `but`: files that are known to."""
    for path in (folder, *sorted(folder.rglob("*"))):
        if path.is_dir():
            sync_folder(path)
        elif str(path.relative_to(folder)) not in but:
            with path.open("rb") as file:
                os.fsync(file.fileno())
            beat()


WRITE_BYTES = 16 << 20  # per system call
HASHED_MEANWHILE = 1 << 20  # from this size on another thread hashes a piece while it is written
# Bytes of a file between two waits for the disk, which drop its pages: the RAM is the run's.
FLUSH_BYTES = 256 << 20
# NOFOLLOW: not through a link that somebody else may have put there
NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW


@dataclass(frozen=True)
class WrittenFile:
    """A file as it was written. `name` is relative to a model folder or checkpoint."""

    name: str
    nbytes: int
    sha256: str


class HashedFile(AbstractContextManager["HashedFile"]):
    """A new file, hashed (SHA-256) as it is written; removed if that fails. Raises StorageError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.nbytes = 0
        self._hash = hashlib.sha256()
        self._hasher = ThreadPoolExecutor(1, thread_name_prefix="storage")
        self._unflushed = 0
        with system_errors(path, "create it"):
            self._fd = os.open(path, NEW_FILE, 0o666)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        complete = False
        try:
            if kind is None:
                self._flush()
                complete = True
        finally:
            os.close(self._fd)
            self._hasher.shutdown()
            if not complete:
                self.path.unlink(missing_ok=True)

    def write(self, data: bytes | memoryview) -> None:
        """Append `data`; a short write is continued."""
        view = memoryview(data).cast("B")
        for begin in range(0, len(view), WRITE_BYTES):
            piece = view[begin : begin + WRITE_BYTES]
            if len(piece) < HASHED_MEANWHILE:
                self._hash.update(piece)
                self._append(piece)
                continue
            hashed = self._hasher.submit(self._hash.update, piece)
            try:
                self._append(piece)
            finally:
                hashed.result()

    def _append(self, piece: memoryview) -> None:
        done = 0
        while done < len(piece):
            with system_errors(self.path, "write it"):
                done += os.write(self._fd, piece[done:])
        # the disk begins with these pages now; only where its queue is full does this wait
        os.posix_fadvise(self._fd, self.nbytes, len(piece), os.POSIX_FADV_DONTNEED)
        beat(BYTES_WRITTEN, len(piece))
        self.nbytes += len(piece)
        self._unflushed += len(piece)
        if self._unflushed >= FLUSH_BYTES:
            self._flush()

    def _flush(self) -> None:
        """Wait until the bytes are on the disk, and drop them from the page cache."""
        with system_errors(self.path, "write it"):  # a full disk may show only here
            os.fsync(self._fd)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        self._unflushed = 0

    def written(self) -> WrittenFile:
        return WrittenFile(self.path.name, self.nbytes, self._hash.hexdigest())


def write_bytes(path: Path, data: bytes) -> WrittenFile:
    """Write a small file; hashed, and on the disk when it returns. Raises StorageError."""
    with HashedFile(path) as file:
        file.write(data)
    return file.written()
