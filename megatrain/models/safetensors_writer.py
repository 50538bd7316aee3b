"""Safetensors files, written tensor by tensor straight from the memory that the tensors live in.

The `safetensors` package wants all tensors of a file at once and does not hash. Here bytes are hashed as they leave, so that a checkpoint's
manifest describes what was meant to be written and not what a disk gave back.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatrain.models.safetensors_io import DTYPES, IO_THREADS, bytes_of, storage_error

NAMES = {dtype: name for name, dtype in DTYPES.items()}
SHARD_BYTES = 5_000_000_000  # what `save_pretrained` cuts at
WRITE_BYTES = 16 << 20  # per system call; hashed while it is still in the cache
FLUSH_BYTES = 256 << 20  # per file: dirty pages are pushed out and dropped, or a big save would fill the RAM the run lives in


@dataclass(frozen=True)
class TensorSource:
    """A tensor to be written: `pieces()` yields contiguous CPU tensors of `dtype` that make it up, in order."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[torch.Tensor]]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class WrittenFile:
    """A file as it was written. `name` is relative to the folder it was written for."""

    name: str
    nbytes: int
    sha256: str


class HashedFile:
    """A new file whose SHA-256 is taken of the bytes in memory while they are written. Removed again if its block fails.

    Raises:
        StorageError: on any failed system call, a full disk above all; names the file and the errno.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.nbytes = 0
        self._hash = hashlib.sha256()
        self._unflushed = 0
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise storage_error(path, error, "create it") from error

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        failed = kind is not None
        try:
            if not failed:
                failed = True  # until the bytes are known to be on the disk
                self._flush()
                failed = False
        finally:
            os.close(self._fd)
            if failed:
                self.path.unlink(missing_ok=True)

    def write(self, data: bytes | memoryview) -> None:
        """Append `data`; a short write is continued."""
        view = memoryview(data).cast("B")
        for begin in range(0, len(view), WRITE_BYTES):
            piece = view[begin : begin + WRITE_BYTES]
            self._hash.update(piece)
            done = 0
            while done < len(piece):
                try:
                    done += os.write(self._fd, piece[done:])
                except OSError as error:
                    raise storage_error(self.path, error, "write it") from error
            self.nbytes += len(piece)
            self._unflushed += len(piece)
            if self._unflushed >= FLUSH_BYTES:
                self._flush()

    def _flush(self) -> None:
        try:
            os.fsync(self._fd)
        except OSError as error:  # a full disk may show only here
            raise storage_error(self.path, error, "write it") from error
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        self._unflushed = 0

    def written(self, name: str) -> WrittenFile:
        """What the manifest says about this file."""
        return WrittenFile(name, self.nbytes, self._hash.hexdigest())


def encode_header(sources: Sequence[TensorSource], metadata: Mapping[str, str]) -> bytes:
    """The length and the JSON header of a file that holds `sources` in this order; padded so that the data start at a multiple of 8."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for source in sources:
        assert source.name not in entries, source.name
        entries[source.name] = {
            "dtype": NAMES[source.dtype],
            "shape": list(source.shape),
            "data_offsets": [end, end + source.nbytes],
        }
        end += source.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def write_safetensors(path: Path, sources: Iterable[TensorSource], metadata: Mapping[str, str]) -> WrittenFile:
    """Write one file, tensor by tensor, straight from the tensors' memory, and wait until it is on the disk.

    Wider dtypes come first, as in the safetensors package, so that every tensor is aligned to its element size.

    Raises:
        StorageError: the disk is full or fails; what was written of the file is removed.
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
    return file.written(path.name)


def plan_shards(sources: Sequence[TensorSource], shard_bytes: int = SHARD_BYTES) -> dict[str, list[TensorSource]]:
    """Cut tensors, in order, into files of at most `shard_bytes` (a larger tensor gets a file of its own), named as Hugging Face does."""
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
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": shard for i, shard in enumerate(shards, 1)}


def encode_index(plan: Mapping[str, Sequence[TensorSource]]) -> bytes:
    """model.safetensors.index.json of a plan with several shards."""
    total = sum(source.nbytes for shard in plan.values() for source in shard)
    weight_map = {source.name: file for file, shard in plan.items() for source in shard}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2).encode() + b"\n"


def write_bytes(path: Path, data: bytes) -> WrittenFile:
    """Write a small file the same way as a large one."""
    with HashedFile(path) as file:
        file.write(data)
    return file.written(path.name)


def write_files(folder: Path, plan: Mapping[str, Sequence[TensorSource]], metadata: Mapping[str, str]) -> list[WrittenFile]:
    """Write several safetensors files (paths relative to `folder`) with a few threads; the first failure cancels the rest.

    Raises:
        StorageError: as `write_safetensors`.
    """
    with ThreadPoolExecutor(IO_THREADS, thread_name_prefix="write") as pool:
        futures = {name: pool.submit(write_safetensors, folder / name, sources, metadata) for name, sources in plan.items()}
        try:
            return [WrittenFile(name, future.result().nbytes, future.result().sha256) for name, future in futures.items()]
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
