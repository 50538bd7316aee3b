"""Safetensors files, written tensor by tensor straight from the tensors' memory.

The `safetensors` package wants all tensors of a file at once and does not hash. Here bytes are
hashed in memory: a checkpoint's manifest says what was to be written, not what a disk gave back.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatrain.machine.heartbeat import BYTES_WRITTEN, beat
from megatrain.storage.safetensors_reader import DTYPES, INDEX, bytes_of, in_parallel
from megatrain.storage.system_calls import system_errors

NAMES = {dtype: name for name, dtype in DTYPES.items()}
SHARD_BYTES = 5_000_000_000  # what `save_pretrained` cuts at
WRITE_BYTES = 16 << 20  # per system call; hashed while it is still in the cache
# Per file: then dirty pages are written and dropped, as the RAM is the run's.
FLUSH_BYTES = 256 << 20


@dataclass(frozen=True)
class TensorSource:
    """A tensor to be written. `pieces()` yields its contiguous parts in order, on the CPU."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[torch.Tensor]]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class WrittenFile:
    """A file as it was written. `name` is relative to a model folder or checkpoint."""

    name: str
    nbytes: int
    sha256: str


class HashedFile:
    """A new file, hashed (SHA-256) while it is written, and removed again if its block fails.

    Raises StorageError if a system call fails, most likely as the disk is full.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.nbytes = 0
        self._hash = hashlib.sha256()
        self._unflushed = 0
        with system_errors(path, "create it"):
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        complete = False
        try:
            if kind is None:
                self._flush()
                complete = True
        finally:
            os.close(self._fd)
            if not complete:
                self.path.unlink(missing_ok=True)

    def write(self, data: bytes | memoryview) -> None:
        """Append `data`; a short write is continued."""
        view = memoryview(data).cast("B")
        for begin in range(0, len(view), WRITE_BYTES):
            piece = view[begin : begin + WRITE_BYTES]
            self._hash.update(piece)
            done = 0
            while done < len(piece):
                with system_errors(self.path, "write it"):
                    done += os.write(self._fd, piece[done:])
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


def encode_header(sources: Sequence[TensorSource], metadata: Mapping[str, str]) -> bytes:
    """Length and JSON header of a file with `sources` in this order, padded to a multiple of 8."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for source in sources:
        assert source.name not in entries, source.name
        begin, end = end, end + source.nbytes
        described = {"dtype": NAMES[source.dtype], "shape": list(source.shape)}
        entries[source.name] = {**described, "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def write_safetensors(
    path: Path, sources: Iterable[TensorSource], metadata: Mapping[str, str]
) -> WrittenFile:
    """Write one file, tensor by tensor, and wait until it is on the disk.

    Wider dtypes come first, as in the safetensors package: every tensor is aligned to its dtype.

    Raises StorageError if the disk is full or fails; the file is removed.
    """
    ordered = sorted(sources, key=lambda source: -source.dtype.itemsize)
    with HashedFile(path) as file:
        file.write(encode_header(ordered, metadata))
        for source in ordered:
            before = file.nbytes
            for piece in source.pieces():
                assert piece.dtype == source.dtype, (source.name, piece.dtype)
                file.write(bytes_of(piece))
            assert file.nbytes - before == source.nbytes, source.name
    return file.written()


def plan_shards(
    sources: Sequence[TensorSource], shard_bytes: int = SHARD_BYTES
) -> dict[str, list[TensorSource]]:
    """Cut tensors, in order, into files of at most `shard_bytes`, named as Hugging Face does.

    A larger tensor gets a file of its own.
    """
    shards: list[list[TensorSource]] = [[]]
    size = 0
    for source in sources:
        if shards[-1] and size + source.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(source)
        size += source.nbytes
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    ends = f"of-{len(shards):05d}.safetensors"
    return {f"model-{number:05d}-{ends}": shard for number, shard in enumerate(shards, 1)}


def encode_index(plan: Mapping[str, Sequence[TensorSource]]) -> bytes:
    """model.safetensors.index.json of a plan with several shards."""
    total = sum(source.nbytes for shard in plan.values() for source in shard)
    weight_map = {source.name: file for file, shard in plan.items() for source in shard}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return json.dumps(index, indent=2).encode() + b"\n"


def write_bytes(path: Path, data: bytes) -> WrittenFile:
    """Write a small file; hashed, and on the disk when it returns. Raises StorageError."""
    with HashedFile(path) as file:
        file.write(data)
    return file.written()


def write_files(
    folder: Path, plan: Mapping[str, Sequence[TensorSource]], metadata: Mapping[str, str]
) -> list[WrittenFile]:
    """Write several safetensors files (paths relative to `folder`), a few at a time.

    The first failure cancels the rest. Raises as `write_safetensors`.
    """
    write = partial(write_safetensors, metadata=metadata)
    files = in_parallel([partial(write, folder / name, plan[name]) for name in plan])
    return [replace(file, name=name) for file, name in zip(files, plan, strict=True)]


def write_model(
    folder: Path,
    weights: Mapping[str, Sequence[TensorSource]],
    metadata: Mapping[str, str],
    others: Mapping[str, Sequence[TensorSource]] | None = None,
) -> list[WrittenFile]:
    """Write weight files and, for several, their index; and `others`, which it does not list."""
    files = write_files(folder, {**weights, **(others or {})}, metadata)
    if len(weights) > 1:
        files.append(write_bytes(folder / INDEX, encode_index(weights)))
    return files
