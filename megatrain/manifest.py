"""MANIFEST.json: what a complete checkpoint consists of, and whether a folder still is that."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from megatrain.errors import DamagedError, StorageError
from megatrain.models.safetensors_io import IO_THREADS, HashedReader, open_regular, read_header, storage_error
from megatrain.models.safetensors_writer import WrittenFile

MANIFEST = "MANIFEST.json"
FORMAT = 1  # of the folder; a reader refuses what it does not know
USE_ANOTHER = "use another checkpoint"


@dataclass(frozen=True)
class Manifest:
    """The files of one checkpoint. `sequence` counts the run's saves: after a resume from an older step, newer is not a higher step."""

    step: int
    sequence: int
    files: dict[str, WrittenFile]

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files.values())

    def encode(self) -> bytes:
        """The file's only valid bytes: they end in a checksum of the rest, so that no flipped bit goes unseen."""
        files = {name: {"bytes": file.nbytes, "sha256": file.sha256} for name, file in sorted(self.files.items())}
        body: dict[str, Any] = {"format": FORMAT, "step": self.step, "sequence": self.sequence, "files": files}
        body["sha256"] = hashlib.sha256(json.dumps(body).encode()).hexdigest()
        return json.dumps(body, indent=1).encode() + b"\n"


def read_manifest(checkpoint: Path) -> Manifest:
    """Read and check MANIFEST.json; not the files that it lists.

    Raises:
        StorageError: it is missing (the save was cut off), damaged, or of a newer format.
    """
    path = checkpoint / MANIFEST
    if not path.exists():
        raise StorageError(f"{checkpoint}: has no {MANIFEST}, so it was not saved to its end; {USE_ANOTHER}")
    data = read_bytes(path)
    try:
        body = json.loads(data)
        if body["format"] != FORMAT:
            raise StorageError(f"{path}: has format {body['format']!r} and this release reads {FORMAT}; use the release that wrote it")
        files = {name: WrittenFile(name, int(entry["bytes"]), str(entry["sha256"])) for name, entry in body["files"].items()}
        manifest = Manifest(int(body["step"]), int(body["sequence"]), files)
        intact = manifest.encode() == data
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise StorageError(f"{path}: is damaged ({error}); {USE_ANOTHER}") from error
    if not intact:
        raise StorageError(f"{path}: does not match its own checksum; {USE_ANOTHER}")
    outside = [name for name in files if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts]
    if outside:
        raise StorageError(f"{path}: names a file outside the checkpoint ({outside[0]}); do not trust this folder")
    return manifest


def read_bytes(path: Path) -> bytes:
    """A small regular file. Raises StorageError naming it."""
    with os.fdopen(open_regular(path), "rb") as file:
        try:
            return file.read()
        except OSError as error:
            raise storage_error(path, error, "read it") from error


def describe_file(path: Path, name: str) -> WrittenFile:
    """Size and SHA-256 of a file as it is on the disk. Raises StorageError naming it."""
    with HashedReader(path) as file:
        file.skip_to(file.nbytes)
        return WrittenFile(name, file.nbytes, file.sha256)


def describe_files(folder: Path, names: Iterable[str]) -> list[WrittenFile]:
    """`describe_file` of several files, a few at a time."""
    with ThreadPoolExecutor(IO_THREADS, thread_name_prefix="hash") as pool:
        return list(pool.map(lambda name: describe_file(folder / name, name), names))


def verify_checkpoint(checkpoint: Path | str, deep: bool = True) -> Manifest:
    """Check that a checkpoint is complete and of one step; with `deep`, that every byte is what was saved (reads all of it).

    Raises:
        StorageError: naming the first file that is missing, added, truncated, changed, or of another step.
    """
    checkpoint = Path(checkpoint)
    manifest = read_manifest(checkpoint)
    for name, file in manifest.files.items():
        path = checkpoint / name
        if not path.is_file():
            raise StorageError(f"{path}: is missing; {USE_ANOTHER}")
        if path.stat().st_size != file.nbytes:
            raise StorageError(f"{path}: has {path.stat().st_size} bytes and was saved with {file.nbytes}; {USE_ANOTHER}")
    present = [str(path.relative_to(checkpoint)) for path in sorted(checkpoint.rglob("*.safetensors"))]
    added = [name for name in present if name not in manifest.files]
    if added:  # transformers would prefer a stray model.safetensors to the shards
        raise StorageError(f"{checkpoint / added[0]}: does not belong to this checkpoint; remove it, or {USE_ANOTHER}")
    if deep:
        check_files(checkpoint, manifest, manifest.files)
    for name in present:
        try:
            step = read_header(checkpoint / name).metadata.get("step")
            if step != str(manifest.step):
                raise StorageError(f"{checkpoint / name}: is of step {step} in a checkpoint of step {manifest.step}; {USE_ANOTHER}")
        except StorageError:
            if not deep:
                check_files(checkpoint, manifest, [name])  # the header may be wrong because it is damaged
            raise
    return manifest


def check_files(checkpoint: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Read these files to their last byte. Raises StorageError naming the first that is not what was saved."""
    for found in describe_files(checkpoint, names):
        if found != manifest.files[found.name]:
            raise damaged(checkpoint / found.name)


def damaged(path: Path) -> DamagedError:
    return DamagedError(f"{path}: does not match its checksum; {USE_ANOTHER}")
