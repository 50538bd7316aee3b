"""Safetensors files, written tensor by tensor straight from the tensors' memory.

The `safetensors` package wants all tensors of a file at once and does not hash. Here bytes are
hashed in memory: a checkpoint's manifest says what was to be written, not what a disk gave back.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatrain.memory.nvme_store import READ_BYTES
from megatrain.memory.slab import StagingBuffers
from megatrain.storage.hashed_file import HashedFile, WrittenFile
from megatrain.storage.safetensors_reader import DTYPES, bytes_of

NAMES = {dtype: name for name, dtype in DTYPES.items()}
SHARD_BYTES = 5_000_000_000  # what `save_pretrained` cuts at


@dataclass(frozen=True)
class TensorSource:
    """A tensor to be written. `pieces()` yields its contiguous parts in order, on the CPU, or
    of at most READ_BYTES on the GPU.

    owned: how many of its elements each rank has, by rank, one's behind the other's; `pieces` then
        yields this rank's own, all but the last of them in whole MESSAGE_BYTES. Empty: every rank
        has them all.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[torch.Tensor]]
    owned: Mapping[int, int] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


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


def in_order(sources: Iterable[TensorSource]) -> list[TensorSource]:
    """As they lie in a file: wider dtypes first, as in the safetensors package, so that every
    tensor is aligned to its dtype."""
    return sorted(sources, key=lambda source: -source.dtype.itemsize)


def write_safetensors(
    path: Path, sources: Iterable[TensorSource], metadata: Mapping[str, str]
) -> WrittenFile:
    """Write one file, tensor by tensor, and wait until it is on the disk.

    Raises StorageError if the disk is full or fails; the file is removed.
    """
    ordered = in_order(sources)
    with HashedFile(path) as file, closing(StagingBuffers(READ_BYTES)) as staging:
        file.write(encode_header(ordered, metadata))
        for source in ordered:
            before = file.nbytes
            for piece in source.pieces():
                assert piece.dtype == source.dtype, (source.name, piece.dtype)
                file.write(bytes_of(staging.on_cpu(piece)))
            assert file.nbytes - before == source.nbytes, source.name
    return file.written()


def plan_shards(
    sources: Sequence[TensorSource],
    carried: Sequence[TensorSource] = (),
    shard_bytes: int = SHARD_BYTES,
) -> dict[str, list[TensorSource]]:
    """Cut tensors, in order, into files of at most `shard_bytes`, named as Hugging Face does.

    A larger tensor gets a file of its own. carried: tensors that share no file with the others.
    """
    shards = [*_cut(sources, shard_bytes), *_cut(carried, shard_bytes)]
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    ends = f"of-{len(shards):05d}.safetensors"
    return {f"model-{number:05d}-{ends}": shard for number, shard in enumerate(shards, 1)}


def _cut(sources: Sequence[TensorSource], shard_bytes: int) -> list[list[TensorSource]]:
    shards: list[list[TensorSource]] = []
    size = 0
    for source in sources:
        if not shards or size + source.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(source)
        size += source.nbytes
    return shards


def encode_index(plan: Mapping[str, Sequence[TensorSource]]) -> bytes:
    """model.safetensors.index.json of a plan with several shards."""
    total = sum(source.nbytes for shard in plan.values() for source in shard)
    weight_map = {source.name: file for file, shard in plan.items() for source in shard}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return json.dumps(index, indent=2).encode() + b"\n"
