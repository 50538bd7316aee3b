"""Safetensors files: ours and the safetensors package's are the same; none is trusted."""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatrain.errors import ModelError, StorageError
from megatrain.storage import safetensors_reader, safetensors_writer
from megatrain.storage.safetensors_reader import (
    DTYPES,
    HashedReader,
    StoredTensor,
    open_shards,
    read_chunks,
    read_header,
)
from megatrain.storage.safetensors_writer import (
    TensorSource,
    encode_index,
    plan_shards,
    write_files,
    write_safetensors,
)


def source(name: str, tensor: torch.Tensor) -> TensorSource:
    return TensorSource(name, tensor.dtype, tuple(tensor.shape), lambda: [tensor])


def sample(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    raw = (
        torch.arange(torch.Size(shape).numel() * dtype.itemsize, dtype=torch.int64)
        .mul(37)
        .to(torch.uint8)
    )
    if dtype == torch.bool:
        raw = raw & 1
    return raw.view(dtype).reshape(shape)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(
        a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8)
    )


def read_tensor(stored: StoredTensor) -> torch.Tensor:
    """By both of our ways, which must agree."""
    out = torch.empty(stored.shape, dtype=stored.dtype)
    with HashedReader(stored.path) as file:
        file.skip_to(stored.offset)
        file.read_into(out)
    chunks = [values for _, values in read_chunks(stored, chunk=3)]
    assert same_bytes(torch.cat([out.new_empty(0), *chunks]).view(stored.shape), out)
    return out


@contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    """A disk that is full after `nbytes` of any one file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def write_raw(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_the_package_reads_what_we_write(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {
        "a.weight": sample(dtype, 3, 5),
        "scalar": sample(dtype),
        "empty": sample(dtype, 0, 4),
    }
    write_safetensors(
        tmp_path / "x.safetensors", [source(n, t) for n, t in tensors.items()], {"format": "pt"}
    )
    read = load_file(tmp_path / "x.safetensors")
    assert {n: t.dtype for n, t in read.items()} == dict.fromkeys(tensors, dtype)
    assert all(same_bytes(read[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_we_read_what_the_package_writes(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"b": sample(dtype, 7), "a": sample(dtype, 2, 3), "empty": sample(dtype, 0)}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt", "step": "7"})
    header = read_header(tmp_path / "x.safetensors")
    assert header.metadata == {"format": "pt", "step": "7"}
    assert all(
        same_bytes(read_tensor(header.tensors[name]), tensor) for name, tensor in tensors.items()
    )


def test_mixed_dtypes_stay_aligned(tmp_path: Path) -> None:
    tensors = {
        "low": sample(torch.int16, 3),
        "wide": sample(torch.float32, 3),
        "bf": sample(torch.bfloat16, 1),
        "w2": sample(torch.float32, 1),
    }
    write_safetensors(tmp_path / "x.safetensors", [source(n, t) for n, t in tensors.items()], {})
    header = read_header(tmp_path / "x.safetensors")
    assert all(stored.offset % stored.dtype.itemsize == 0 for stored in header.tensors.values())
    assert all(same_bytes(load_file(tmp_path / "x.safetensors")[n], t) for n, t in tensors.items())


def test_the_hash_is_of_the_file(tmp_path: Path) -> None:
    written = write_safetensors(
        tmp_path / "x.safetensors", [source("a", sample(torch.float32, 100_000))], {}
    )
    data = (tmp_path / "x.safetensors").read_bytes()
    assert (written.nbytes, written.sha256) == (len(data), hashlib.sha256(data).hexdigest())


def test_chunks_are_the_tensor_in_order(tmp_path: Path) -> None:
    tensor = sample(torch.float32, 10, 7)
    write_safetensors(
        tmp_path / "x.safetensors",
        [source("pad", sample(torch.float32, 3)), source("a", tensor)],
        {},
    )
    pieces = list(read_chunks(read_header(tmp_path / "x.safetensors").tensors["a"], chunk=16))
    assert [begin for begin, _ in pieces] == [0, 16, 32, 48, 64]
    assert same_bytes(torch.cat([piece for _, piece in pieces]).view(10, 7), tensor)


def test_a_file_is_hashed_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_reader, "PIECE_BYTES", 64)
    tensors = {"a": sample(torch.float32, 50), "b": sample(torch.bfloat16, 33)}
    path = tmp_path / "x.safetensors"
    save_file(tensors, path)
    stored = read_header(path).tensors
    out = torch.zeros(33, dtype=torch.bfloat16)
    with HashedReader(path) as file:
        file.skip_to(stored["b"].offset)
        file.read_into(out)
        file.skip_to(file.nbytes)
        assert file.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert same_bytes(out, tensors["b"])


def test_a_file_that_ends_while_it_is_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(bytes(100))
    with (
        HashedReader(path) as file,
        pytest.raises(StorageError, match=r"x\.bin: ends at byte 100, 20 bytes too early"),
    ):
        file.skip_to(120)


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:13]))
    tensor = sample(torch.float32, 50)
    write_safetensors(tmp_path / "x.safetensors", [source("a", tensor)], {})
    assert same_bytes(load_file(tmp_path / "x.safetensors")["a"], tensor)


def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = sample(torch.float32, 50)
    save_file({"a": tensor}, tmp_path / "x.safetensors")
    readv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: readv(fd, [views[0][:11]], offset))
    assert same_bytes(read_tensor(read_header(tmp_path / "x.safetensors").tensors["a"]), tensor)


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with (
        largest_file(4096),
        pytest.raises(
            StorageError,
            match=r"x\.safetensors: cannot write it: File too large \(errno 27\); free space",
        ),
    ):
        write_safetensors(path, [source("a", sample(torch.float32, 5000))], {})
    assert not path.exists()


def test_a_disk_that_fails_at_fsync_is_named_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(fd: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StorageError, match=r"errno 5"):
        write_safetensors(tmp_path / "x.safetensors", [source("a", sample(torch.float32, 5))], {})
    assert not any(tmp_path.iterdir())


def test_large_files_are_flushed_on_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_writer, "FLUSH_BYTES", 1 << 12)
    monkeypatch.setattr(safetensors_writer, "WRITE_BYTES", 1 << 10)
    syncs: list[int] = []
    monkeypatch.setattr(os, "fsync", syncs.append)
    write_safetensors(tmp_path / "x.safetensors", [source("a", sample(torch.uint8, 1 << 15))], {})
    assert len(syncs) >= 8


def test_shards_are_named_cut_and_indexed_as_hugging_face_does(tmp_path: Path) -> None:
    tensors = {f"t{i}": sample(torch.float32, 100) for i in range(5)} | {
        "big": sample(torch.float32, 999)
    }
    plan = plan_shards([source(n, t) for n, t in tensors.items()], shard_bytes=1000)
    assert {file: [s.name for s in shard] for file, shard in plan.items()} == {
        "model-00001-of-00004.safetensors": ["t0", "t1"],
        "model-00002-of-00004.safetensors": ["t2", "t3"],
        "model-00003-of-00004.safetensors": ["t4"],
        "model-00004-of-00004.safetensors": ["big"],
    }
    write_files(tmp_path, plan, {"format": "pt"})
    (tmp_path / "model.safetensors.index.json").write_bytes(encode_index(plan))
    shards = open_shards(tmp_path)
    assert {
        name: same_bytes(read_tensor(shards[name]), tensor) for name, tensor in tensors.items()
    } == dict.fromkeys(tensors, True)


def test_a_small_model_is_one_file() -> None:
    assert list(plan_shards([source("a", sample(torch.float32, 3))])) == ["model.safetensors"]


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
HOSTILE: dict[str, tuple[Any, bytes]] = {
    "not json": (b"{nope}", b""),
    "not utf-8": (b'{"\xff": 1}', b""),
    "a list": ([1, 2], b""),
    "nested too deep": (b'{"a":' * 50_000 + b"1" + b"}" * 50_000, b""),
    "a number of 5000 digits": (
        b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,8]}}',
        bytes(8),
    ),
    "unknown dtype": ({"a": ENTRY | {"dtype": "F4"}}, bytes(8)),
    "dtype of another kind": ({"a": ENTRY | {"dtype": ["F32"]}}, bytes(8)),
    "no offsets": ({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)),
    "three offsets": ({"a": ENTRY | {"data_offsets": [0, 4, 8]}}, bytes(8)),
    "negative shape": ({"a": ENTRY | {"shape": [-2]}}, bytes(8)),
    "boolean shape": ({"a": ENTRY | {"shape": [True, 2]}}, bytes(8)),
    "fractional shape": ({"a": ENTRY | {"shape": [2.0]}}, bytes(8)),
    "shape is text": ({"a": ENTRY | {"shape": "2"}}, bytes(8)),
    "shape does not fit the bytes": ({"a": ENTRY | {"shape": [3]}}, bytes(8)),
    "backwards": ({"a": ENTRY | {"data_offsets": [8, 0]}}, bytes(8)),
    "past the end": (
        {"a": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 4 << 40]}},
        bytes(8),
    ),
    "overlap": ({"a": ENTRY, "b": ENTRY | {"data_offsets": [4, 12]}}, bytes(12)),
    "twice the same bytes": ({"a": ENTRY, "b": ENTRY}, bytes(8)),
    "gap": ({"a": ENTRY, "b": ENTRY | {"data_offsets": [12, 20]}}, bytes(20)),
    "bytes left over": ({"a": ENTRY}, bytes(9)),
    "duplicate name": (
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
        b'"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        bytes(8),
    ),
    "metadata is a list": ({"__metadata__": ["x"], "a": ENTRY}, bytes(8)),
    "metadata value is a number": ({"__metadata__": {"step": 3}, "a": ENTRY}, bytes(8)),
    "entry is null": ({"a": None}, b""),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_malformed_headers_are_refused_by_file_name(tmp_path: Path, case: str) -> None:
    header, data = HOSTILE[case]
    with pytest.raises(StorageError, match=r"bad\.safetensors: malformed safetensors header"):
        read_header(write_raw(tmp_path / "bad.safetensors", header, data))


@pytest.mark.parametrize("length", [1 << 63, (1 << 64) - 1, 100_000_001, 9])
def test_a_header_length_is_checked_before_it_is_believed(tmp_path: Path, length: int) -> None:
    (tmp_path / "bad.safetensors").write_bytes(struct.pack("<Q", length) + b"{}      ")
    with pytest.raises(StorageError, match="claims a header of"):
        read_header(tmp_path / "bad.safetensors")


def test_every_truncation_is_found(tmp_path: Path) -> None:
    save_file(
        {"a": sample(torch.float32, 8), "b": sample(torch.int16, 3)}, tmp_path / "x.safetensors"
    )
    data = (tmp_path / "x.safetensors").read_bytes()
    for length in range(len(data)):
        (tmp_path / "x.safetensors").write_bytes(data[:length])
        with pytest.raises(StorageError, match=r"x\.safetensors"):
            read_header(tmp_path / "x.safetensors")


def test_a_flipped_header_is_refused_or_stays_inside_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file(
        {"a": sample(torch.float32, 8), "b": sample(torch.int16, 3)},
        path,
        metadata={"format": "pt"},
    )
    data = path.read_bytes()
    draw, refused = random.Random(0), 0
    for _ in range(500):
        mutated = bytearray(data)
        mutated[draw.randrange(len(data) - 38)] ^= 1 << draw.randrange(8)
        path.write_bytes(mutated)
        try:
            header = read_header(path)
        except StorageError:
            refused += 1
        else:
            assert all(
                t.offset >= 0 and t.offset + t.nbytes <= len(data) for t in header.tensors.values()
            )
    assert refused > 250


def test_a_pipe_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(StorageError, match="not a regular file"):
        open_shards(tmp_path)


@pytest.mark.parametrize(
    "file", ["../secret.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "", 7, "a\0b"]
)
def test_an_index_cannot_leave_its_folder(tmp_path: Path, file: object) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": sample(torch.float32, 2)}, tmp_path / "secret.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(StorageError, match="not a file of this folder"):
        open_shards(folder)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": [1]}', '{"weight_map": null}'])
def test_a_malformed_index_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(StorageError, match=r"index\.json"):
        open_shards(tmp_path)


def test_an_index_and_its_shards_must_agree(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    save_file({"a": sample(torch.float32, 2)}, tmp_path / "s.safetensors")
    index.write_text(json.dumps({"weight_map": {"a": "s.safetensors", "b": "s.safetensors"}}))
    with pytest.raises(StorageError, match=r"s\.safetensors: lacks b"):
        open_shards(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    with pytest.raises(
        StorageError, match=r"gone\.safetensors: cannot open it for reading: No such file"
    ):
        open_shards(tmp_path)
    save_file(
        {"a": sample(torch.float32, 2), "stray": sample(torch.float32, 2)},
        tmp_path / "s.safetensors",
    )
    index.write_text(json.dumps({"weight_map": {"a": "s.safetensors"}}))
    with pytest.raises(StorageError, match="holds stray"):
        open_shards(tmp_path)


def test_pickled_weights_are_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ModelError, match=r"only pickled weights.*save_pretrained"):
        open_shards(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor"):
        open_shards(tmp_path)
