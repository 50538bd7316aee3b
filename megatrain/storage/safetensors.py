"""Safetensors files: read tensor by tensor into existing memory, written straight from it.

The format (https://huggingface.co/docs/safetensors): 8 bytes of little-endian header length, a JSON
header, then the tensors' bytes without gaps. Nothing in a file that is read is trusted. The
`safetensors` package wants all tensors of a file at once and does not hash; here bytes are hashed
in memory, so a checkpoint's manifest says what was to be written, not what a disk gave back.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from megatrain.data.samples import json_value
from megatrain.errors import ModelError, StorageError, system_errors
from megatrain.heartbeat import BYTES_READ, beat, may_end_here
from megatrain.memory.nvme_store import READ_BYTES
from megatrain.memory.slab import StagingBuffer
from megatrain.storage.hashed_file import HashedFile, WrittenFile

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
UNREAD = ("U16", "U32", "U64", "C64", "F4", "F6_E2M3", "F6_E3M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the safetensors package's own limit
CHUNK_ELEMENTS = 1 << 22  # per read: 16 MiB of fp32, little memory for a few threads together
PIECE_BYTES = 4 << 20  # read at a time and then hashed
IO_THREADS = 8  # a disk with a queue wants several requests at once

T = TypeVar("T")


def dtype_name(dtype: torch.dtype) -> str:
    """As config.json has it, such as bfloat16."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class StoredTensor:
    """One tensor in a file, `offset` bytes from the start of the file."""

    name: str
    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def where(self) -> str:
        """File and name, for error messages."""
        return f"{self.path}: {self.name}"

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def chunks(
        self, start: int = 0, stop: int | None = None, *, chunk: int = 0
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """`HashedReader.chunks` of it alone, without a hash."""
        with HashedReader(self.path, hashes=False, kept=True) as file:
            yield from file.chunks(self, start, stop, chunk=chunk)


@dataclass(frozen=True)
class Header:
    """A safetensors file's own description of its tensors."""

    tensors: dict[str, StoredTensor]
    metadata: dict[str, str]


def in_parallel(jobs: Sequence[Callable[[], T]]) -> list[T]:
    """The results of all jobs, run on a few threads, in order. An error cancels those that have not
    begun; of several, that of the first job is raised."""
    # more threads than cores wait for Python's lock: 18,867 small tensors took 8.4 s with eight on
    # two cores, and 5.4 with two
    threads = min(IO_THREADS, max(2, len(os.sched_getaffinity(0))))
    with ThreadPoolExecutor(threads, thread_name_prefix="storage") as pool:
        try:
            futures = [pool.submit(job) for job in jobs]
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def open_regular(path: Path) -> int:
    """A read-only descriptor of a regular file: others may wait for ever. Raises StorageError."""
    with system_errors(path, "open it for reading"):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise StorageError(f"{path}: is not a regular file; do not trust this folder")
    return fd


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, not a copy."""
    assert tensor.is_contiguous(), tensor.stride()
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def read_header(path: Path) -> Header:
    """Parse and check the header of a safetensors file, its sizes before anything is allocated.
    Raises StorageError."""
    with os.fdopen(open_regular(path), "rb") as file, system_errors(path, "read it"):
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if length > MAX_HEADER_BYTES or length > size - 8:
            raise StorageError(
                f"{path}: claims a header of {length} bytes in a file of {size}; it is truncated "
                "or not a safetensors file: copy or download it again"
            )
        text = file.read(length)
    try:
        entries = json_value(text.decode())
        return _parse_header(path, entries, 8 + length, size)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise StorageError(
            f"{path}: malformed safetensors header ({error}); copy or download the file again"
        ) from error


def _parse_header(path: Path, entries: Any, start: int, size: int) -> Header:
    """Check a decoded header of a file of `size` bytes, whose data begin at byte `start`. Raises
    ValueError, TypeError or KeyError."""
    if not isinstance(entries, dict):
        raise ValueError("not a JSON object")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError("__metadata__ is not a table of strings")
    tensors: dict[str, StoredTensor] = {}
    spans: list[tuple[int, int]] = []
    for name, entry in entries.items():
        shape, (begin, end) = entry["shape"], entry["data_offsets"]
        if entry["dtype"] in UNREAD:
            raise ModelError(
                f"{path}: {name} has the dtype {entry['dtype']}, which cannot be read; "
                "name the model in bf16, fp16 or fp32"
            )
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"tensor {name!r} has the unknown dtype {entry['dtype']!r}")
        # in this order: a product of long numbers takes minutes
        if not all(type(n) is int and 0 <= n <= size for n in (*shape, begin, end)):
            raise ValueError(f"tensor {name!r} has a shape or offset that is no size in this file")
        tensor = StoredTensor(name, path, DTYPES[entry["dtype"]], tuple(shape), start + begin)
        if end - begin != tensor.nbytes:
            raise ValueError(f"tensor {name!r} needs {tensor.nbytes} bytes and has {end - begin}")
        tensors[name] = tensor
        spans.append((begin, end))
    reached = 0
    for begin, end in sorted(spans):
        if begin != reached:
            at = start + min(begin, reached)
            raise ValueError(f"tensors overlap or leave a gap at byte {at}")
        reached = end
    if start + reached != size:
        raise ValueError(f"the tensors end at byte {start + reached} and the file at {size}")
    return Header(tensors, metadata)


def open_shards(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of a Hugging Face model folder by name. Raises ModelError if there are none, or a
    shard is missing, and StorageError."""
    single, index = folder / "model.safetensors", folder / INDEX
    if single.exists():
        return read_header(single).tensors
    if not index.exists():
        raise _no_weights(folder)
    files = _read_index(index)
    shards = sorted(set(files.values()))
    if missing := [file for file in shards if not (folder / file).exists()]:
        are = "is" if len(missing) == 1 else "are"
        raise ModelError(
            f"{index}: names {len(shards)} shards, {len(missing)} {are} missing ({missing[0]}); "
            "download it again"
        )
    tensors = {
        name: stored
        for file in shards
        for name, stored in read_header(folder / file).tensors.items()
    }
    # a name that no file holds may be a tied head's; another is missed where it is looked for
    for name, held in sorted((name, stored.path.name) for name, stored in tensors.items()):
        if files.get(name) != held:
            raise StorageError(
                f"{index}: places {name} in {files.get(name)}, and it is in {held}; download the "
                "folder again"
            )
    return tensors


def _read_index(index: Path) -> dict[str, str]:
    """The weight map of an index file: tensor name -> file name inside the same folder."""
    try:
        with system_errors(index, "read it"):
            files = json.loads(index.read_text())["weight_map"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise StorageError(f"{index}: malformed index ({error}); download it again") from error
    if not isinstance(files, dict):
        raise StorageError(f"{index}: weight_map is not a table; download it again")
    for name, file in files.items():
        inside = isinstance(file, str) and Path(file).name == file and not {"\\", "\0"} & {*file}
        if not inside or file in {"", ".", ".."}:
            raise StorageError(
                f"{index}: places {name} in {file!r}, which is not a file of this folder; "
                "do not trust this folder"
            )
    return files


def _no_weights(folder: Path) -> ModelError:
    pickles = sorted([*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")])
    if pickles:
        return ModelError(
            f"{folder}: has only pickled weights ({pickles[0].name}), which may run code when "
            "read; convert them where you trust them: "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
        )
    return ModelError(
        f"{folder}: has neither model.safetensors nor {INDEX}; name a folder with a model's weights"
    )


class HashedReader(AbstractContextManager["HashedReader"]):
    """A file that is read once, from beginning to end, and hashed meanwhile. A context manager.

    hashes: false leaves out the hash, and what is skipped is not read.
    kept: leave what was read in the page cache, for another process that reads this file, too.

    The disk reads on while a piece is hashed. Unless it is `kept`, the page cache holds almost
    nothing of the file: the RAM is the run's.

    Raises StorageError if the file is missing, unreadable, too short or not a regular file.
    """

    def __init__(self, path: Path, hashes: bool = True, kept: bool = False) -> None:
        self.path = path
        self._hashes, self._kept = hashes, kept
        self._fd = open_regular(path)
        self.nbytes = os.fstat(self._fd).st_size
        self._hash = hashlib.sha256()
        self._done = 0

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def chunks(
        self, stored: StoredTensor, start: int = 0, stop: int | None = None, *, chunk: int = 0
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first element, values) of consecutive flat pieces, each in memory of its own. A
        piece has at most `chunk` elements, by default CHUNK_ELEMENTS. start, stop: the elements
        that are read; default: all. They lie behind all that was read before."""
        stop, chunk = stored.numel if stop is None else stop, chunk or CHUNK_ELEMENTS
        self.skip_to(stored.offset + start * stored.dtype.itemsize)
        for begin in range(start, stop, chunk):
            values = torch.empty(min(chunk, stop - begin), dtype=stored.dtype)
            view = bytes_of(values)
            for first in range(0, len(view), PIECE_BYTES):
                self._read(view[first : first + PIECE_BYTES])
            yield begin, values

    def skip_to(self, offset: int) -> None:
        """Hash the bytes up to `offset`, no more."""
        assert offset >= self._done, (self.path, offset)
        if not self._hashes:
            self._done = offset
        scratch = memoryview(bytearray(min(PIECE_BYTES, offset - self._done)))
        while self._done < offset:
            self._read(scratch[: offset - self._done])

    def _read(self, view: memoryview) -> None:
        begin, stop = self._done, self._done + len(view)
        os.posix_fadvise(self._fd, stop, PIECE_BYTES, os.POSIX_FADV_WILLNEED)
        while self._done < stop:  # a short read is continued
            with system_errors(self.path, "read it"):
                got = os.preadv(self._fd, [view[self._done - begin :]], self._done)
            if got == 0:
                raise StorageError(
                    f"{self.path}: ends at byte {self._done}, {stop - self._done} bytes too early; "
                    "copy or download it again"
                )
            self._done += got
        if self._hashes:
            self._hash.update(view)
        beat(BYTES_READ, len(view))
        if not self._kept:
            os.posix_fadvise(self._fd, begin, len(view), os.POSIX_FADV_DONTNEED)
        may_end_here()

    def ends_as(self, written: WrittenFile) -> bool:
        """Read on to the end; false for a file of another size or, where it is hashed, hash."""
        self.skip_to(self.nbytes)
        same = not self._hashes or self.sha256 == written.sha256
        return same and self.nbytes == written.nbytes

    @property
    def sha256(self) -> str:
        """SHA-256 of all that was read, in hexadecimal."""
        return self._hash.hexdigest()


NAMES = {dtype: name for name, dtype in DTYPES.items()}
SHARD_BYTES = 5_000_000_000  # what `save_pretrained` cuts at


@dataclass(frozen=True)
class TensorSource:
    """A tensor to be written. `pieces()` yields its contiguous parts in order, on the CPU, or of at
    most READ_BYTES on the GPU. owned: how many of its elements each rank has, by rank, one's behind
    the other's; `pieces` then yields this rank's own, all but the last of them in whole
    MESSAGE_BYTES. Empty: every rank has them all."""

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
    """Write one file through to the disk. Raises StorageError; the file is removed."""
    ordered = in_order(sources)
    with HashedFile(path) as file, closing(StagingBuffer(READ_BYTES)) as staging:
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
    passthrough: Sequence[TensorSource] = (),
    shard_bytes: int = SHARD_BYTES,
) -> dict[str, list[TensorSource]]:
    """Cut tensors, in order, into files of at most `shard_bytes`, or one tensor, named as Hugging
    Face does. passthrough: tensors that share no file with the others."""
    shards = [*_cut(sources, shard_bytes), *_cut(passthrough, shard_bytes)]
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
