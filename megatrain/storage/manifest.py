"""MANIFEST.json: the files of a complete checkpoint, and the check that a folder still has them."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from megatrain.errors import DamagedError, StorageError, system_errors
from megatrain.heartbeat import BYTES_READ, doing
from megatrain.models.pretrained import DESCRIBED_IN
from megatrain.storage.hashed_file import WrittenFile

MANIFEST = "MANIFEST.json"
CHECKPOINT = re.compile(r"checkpoint-(\d+)")
# of a complete checkpoint that a new one of the same step is about to replace
REPLACED = ".replaced"
EVERY_STEP = "every"  # in place of a step, in files that are the same in all checkpoints of a run
FORMAT = 2  # of the folder; a reader refuses another
USE_ANOTHER = "use another checkpoint"
# Files that transformers reads in a model folder besides `DESCRIBED_IN`: other vocabularies, and
# files for some of its versions.
READ_TOO = ("*.model", "tokenizer.*.json", "config.*.json", "processor_config.json")
# Errors from reading wrong JSON, such as a number that is infinite or none.
NO_MANIFEST = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)


UNVERIFIED = "--no-verify: files are not compared with their hashes; damage goes unnoticed"

_verified = ContextVar("megatrain_verified", default=True)


@contextmanager
def verifying(wanted: bool) -> Iterator[None]:
    """Switch checks against the hashes of manifests on or off inside; sizes are always checked."""
    before = _verified.set(wanted)
    try:
        yield
    finally:
        _verified.reset(before)


def verifies() -> bool:
    """True if hashes are to be checked; call it in the thread that entered `verifying`."""
    return _verified.get()


@dataclass(frozen=True)
class Manifest:
    """The files of one checkpoint. `sequence` counts the run's saves: after a resume from an older
    step, newer may be a lower step. `constants` are names of tensors that are saved as they were
    read, whatever the others' dtype."""

    step: int
    sequence: int
    files: dict[str, WrittenFile]
    constants: tuple[str, ...] = ()

    def encode(self) -> bytes:
        """The file's only valid bytes, a checksum of the rest included: any flipped bit is seen."""
        body: dict[str, Any] = {"format": FORMAT, "step": self.step, "sequence": self.sequence}
        files = sorted(self.files.items())
        if self.constants:
            body["constants"] = list(self.constants)
        body["files"] = {name: {"bytes": f.nbytes, "sha256": f.sha256} for name, f in files}
        body["sha256"] = hashlib.sha256(json.dumps(body).encode()).hexdigest()
        return json.dumps(body, indent=1).encode() + b"\n"


def read_manifest(checkpoint: Path) -> Manifest:
    """Read and check MANIFEST.json, not the files that it lists. Raises StorageError."""
    path = checkpoint / MANIFEST
    with system_errors(path, "read it"):
        if not path.exists():
            cut_off = f"has no {MANIFEST}: its save was cut off"
            raise StorageError(f"{checkpoint}: {cut_off}; {USE_ANOTHER}")
    data = read_bytes(path)
    try:
        body = json.loads(data)
        if body["format"] != FORMAT:
            raise StorageError(
                f"{path}: has format {body['format']!r} and this release reads {FORMAT}; "
                "use the release that wrote it"
            )
        files = {
            name: WrittenFile(name, int(entry["bytes"]), str(entry["sha256"]))
            for name, entry in body["files"].items()
        }
        constants = tuple(map(str, body.get("constants", ())))
        manifest = Manifest(int(body["step"]), int(body["sequence"]), files, constants)
        intact = manifest.encode() == data
    except NO_MANIFEST as error:
        raise StorageError(f"{path}: is damaged ({error}); {USE_ANOTHER}") from error
    if not intact:
        raise StorageError(f"{path}: does not match its own checksum; {USE_ANOTHER}")
    named = CHECKPOINT.fullmatch(checkpoint.name.removesuffix(REPLACED))
    if named and int(named[1]) != manifest.step:
        raise StorageError(f"{path}: is of step {manifest.step}, not of this folder; {USE_ANOTHER}")
    for name in files:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise StorageError(
                f"{path}: names a file outside the checkpoint ({name}); do not trust this folder"
            )
    return manifest


def read_bytes(path: Path) -> bytes:
    """A small regular file. Raises StorageError naming it."""
    from megatrain.storage.safetensors import open_regular  # brings torch, as below

    with os.fdopen(open_regular(path), "rb") as file, system_errors(path, "read it"):
        return file.read()


def describe_files(folder: Path, names: Iterable[str]) -> list[WrittenFile]:
    """Size and SHA-256 of files as they are on the disk. Raises StorageError naming one."""
    from megatrain.storage.safetensors import HashedReader, in_parallel

    def describe(name: str) -> WrittenFile:
        with HashedReader(folder / name) as file:
            file.skip_to(file.nbytes)
            return WrittenFile(name, file.nbytes, file.sha256)

    names = list(names)
    with system_errors(folder, "read it"):
        nbytes = sum((folder / name).stat().st_size for name in names)
    with doing("comparing files with their hashes", nbytes, BYTES_READ):
        return in_parallel([partial(describe, name) for name in names])


def verify_checkpoint(checkpoint: Path, deep: bool = True) -> Manifest:
    """Check that a checkpoint is complete, of one step, and has no stray files that would be read.
    deep: that every byte is as saved; else only small files are hashed. Raises StorageError."""
    from megatrain.storage.safetensors import read_header

    manifest = read_manifest(checkpoint)
    with system_errors(checkpoint, "read it"):
        for name, file in manifest.files.items():
            path = checkpoint / name
            if not path.is_file():
                raise StorageError(f"{path}: is missing; {USE_ANOTHER}")
            size = path.stat().st_size
            if size != file.nbytes:
                sizes = f"has {size} bytes and was saved with {file.nbytes}"
                raise StorageError(f"{path}: {sizes}; {USE_ANOTHER}")
    refuse_strays(checkpoint, manifest)
    tensors = list(filter(_is_tensors, manifest.files))
    small = [name for name in manifest.files if not _is_tensors(name)]
    check_files(checkpoint, manifest, manifest.files if deep else small)
    for name in tensors:
        try:
            step = read_header(checkpoint / name).metadata.get("step")
            if step not in (str(manifest.step), EVERY_STEP):
                raise StorageError(
                    f"{checkpoint / name}: is of step {step} in a checkpoint of step "
                    f"{manifest.step}; {USE_ANOTHER}"
                )
        except StorageError:
            if not deep:  # the header may be wrong because the file is damaged: then say so
                check_files(checkpoint, manifest, [name])
            raise
    return manifest


def _is_tensors(name: str) -> bool:
    return name.endswith(".safetensors")


def stray_files(checkpoint: Path, manifest: Manifest) -> list[str]:
    """Files in the folder that its manifest does not list. May raise OSError."""
    there = (path for path in checkpoint.rglob("*") if not path.is_dir())
    names = sorted(str(path.relative_to(checkpoint)) for path in there)
    return [name for name in names if name not in manifest.files and name != MANIFEST]


def refuse_strays(folder: Path, manifest: Manifest, code: bool = False) -> None:
    """Raise DamagedError for an unlisted file that would be read. code: Python files are, too."""
    with system_errors(folder, "read it"):
        strays = stray_files(folder, manifest)
    for name in strays:
        if would_be_read(name, code):
            raise DamagedError(
                f"{folder / name}: does not belong to this checkpoint; remove it, or {USE_ANOTHER}"
            )


def would_be_read(name: str, code: bool = False) -> bool:
    """True if transformers reads a file of this name in a model folder; code: Python files, too."""
    described = [pattern for names in DESCRIBED_IN.values() for pattern in names]
    # of a file, or of the files in a folder
    patterns = map(PurePosixPath, [*described, *READ_TOO, *(["*.py"] if code else [])])
    here = PurePosixPath(name)
    of_folder = (one.name for one in patterns if one.parent == here.parent)
    # it prefers stray tensors to shards
    return _is_tensors(name) or any(fnmatchcase(here.name, pattern) for pattern in of_folder)


def check_files(checkpoint: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Read these files to the end. Raises DamagedError naming the first that is not as saved."""
    from megatrain.storage.safetensors import HashedReader

    if not verifies():
        for name in names:
            with HashedReader(checkpoint / name) as file:
                if file.nbytes != manifest.files[name].nbytes:
                    raise damaged(checkpoint / name)
        return
    for found in describe_files(checkpoint, names):
        if found != manifest.files[found.name]:
            raise damaged(checkpoint / found.name)


def damaged(path: Path) -> DamagedError:
    return DamagedError(f"{path}: does not match its checksum; {USE_ANOTHER}")


def manifest_of_model(folder: Path) -> Manifest | None:
    """The manifest of a model's folder, None if it has none. Raises StorageError."""
    return read_manifest(folder) if (folder / MANIFEST).is_file() else None


def check_description(folder: Path, code: bool = False) -> None:
    """Check the small files of a model's folder against its manifest before they are read. code:
    Python files are, too. Raises DamagedError."""
    if manifest := manifest_of_model(folder):
        small = [name for name in manifest.files if not _is_tensors(name)]
        check_model_files(folder, manifest, small, code)


def check_model_files(
    folder: Path, manifest: Manifest, names: Iterable[str], code: bool = False
) -> None:
    """Call `check_files` and `refuse_strays` for a model that is read; users may have edited it."""
    try:
        check_files(folder, manifest, names)
        refuse_strays(folder, manifest, code)
    except StorageError as error:
        on_purpose = f"if it was changed on purpose, remove {folder / MANIFEST}"
        raise DamagedError(f"{error}; {on_purpose}") from error
