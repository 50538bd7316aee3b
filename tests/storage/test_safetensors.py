"""Safetensors files: ours and the safetensors package's are the same; none is trusted."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatrain.errors import ModelError, StorageError
from megatrain.storage import hashed_file, safetensors
from megatrain.storage.safetensors import (
    DTYPES,
    HashedReader,
    StoredTensor,
    TensorSource,
    encode_index,
    open_shards,
    plan_shards,
    read_header,
    write_safetensors,
)
from megatrain.storage.sharded_write import write_files
from tests.helpers.files import largest_file

FLOAT = torch.float32


def source(name: str, tensor: torch.Tensor) -> TensorSource:
    return TensorSource(name, tensor.dtype, tuple(tensor.shape), lambda: [tensor])


def sample(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.arange(nbytes, dtype=torch.int64).mul(37).to(torch.uint8)
    return (raw & 1 if dtype == torch.bool else raw).view(dtype).reshape(shape)


def sources(**tensors: torch.Tensor) -> list[TensorSource]:
    return [source(name, tensor) for name, tensor in tensors.items()]


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    left, right = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b))
    return a.shape == b.shape and torch.equal(left, right)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.safetensors"


def read_tensor(stored: StoredTensor) -> torch.Tensor:
    """By both of our ways, which must agree."""
    with HashedReader(stored.path) as file:
        out = torch.cat([torch.empty(0, dtype=stored.dtype), *(v for _, v in file.chunks(stored))])
        out = out.view(stored.shape)
    chunks = [values for _, values in stored.chunks(chunk=3)]
    assert same_bytes(torch.cat([out.new_empty(0), *chunks]).view(stored.shape), out)
    return out


def test_the_package_reads_what_we_write(path):
    for dtype in DTYPES.values():
        tensors = {"a": sample(dtype, 3, 5), "scalar": sample(dtype), "empty": sample(dtype, 0, 4)}
        write_safetensors(path, sources(**tensors), {"format": "pt"})
        read = load_file(path)
        assert {n: t.dtype for n, t in read.items()} == dict.fromkeys(tensors, dtype)
        assert all(same_bytes(read[name], tensor) for name, tensor in tensors.items())


def test_we_read_what_the_package_writes(path):
    for dtype in DTYPES.values():
        tensors = {"b": sample(dtype, 7), "a": sample(dtype, 2, 3), "empty": sample(dtype, 0)}
        save_file(tensors, path, metadata={"format": "pt", "step": "7"})
        header = read_header(path)
        assert header.metadata == {"format": "pt", "step": "7"}
        for name, tensor in tensors.items():
            assert same_bytes(read_tensor(header.tensors[name]), tensor)


def test_mixed_dtypes_stay_aligned(path):
    low, wide, bf16 = sample(torch.int16, 3), sample(FLOAT, 3), sample(torch.bfloat16, 1)
    tensors = {"low": low, "wide": wide, "bf16": bf16, "more": sample(FLOAT, 1)}
    write_safetensors(path, sources(**tensors), {})
    stored = read_header(path).tensors.values()
    assert all(each.offset % each.dtype.itemsize == 0 for each in stored)
    assert all(same_bytes(load_file(path)[name], tensor) for name, tensor in tensors.items())


def test_a_file_is_hashed_while_it_is_read(path, monkeypatch):
    monkeypatch.setattr(safetensors, "PIECE_BYTES", 64)
    tensors = {"a": sample(FLOAT, 50), "b": sample(torch.bfloat16, 33)}
    save_file(tensors, path)
    with HashedReader(path) as file:
        ((_, out),) = file.chunks(read_header(path).tensors["b"])
        file.skip_to(file.nbytes)
        assert file.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert same_bytes(out, tensors["b"])


def test_a_file_that_ends_while_it_is_read_is_named(path):
    path.write_bytes(bytes(100))
    words = r"x\.safetensors: ends at byte 100, 20 bytes too early"
    with HashedReader(path) as file, pytest.raises(StorageError, match=words):
        file.skip_to(120)


def test_short_writes_and_reads_are_continued(path, monkeypatch):
    readv, write, tensor = os.preadv, os.write, sample(FLOAT, 50)
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:13]))
    written = write_safetensors(path, sources(a=tensor), {})
    assert written.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert same_bytes(load_file(path)["a"], tensor)
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: readv(fd, [views[0][:11]], offset))
    assert same_bytes(read_tensor(read_header(path).tensors["a"]), tensor)


def test_a_disk_that_is_full_or_fails_is_named_and_leaves_nothing(path, monkeypatch):
    words = r"x\.safetensors: cannot write it: File too large \(errno 27\); free space"
    for meanwhile in [1 << 10, 1 << 20]:  # the hash of a piece beside its write, or before
        monkeypatch.setattr(hashed_file, "HASHED_MEANWHILE", meanwhile)
        with largest_file(4096), pytest.raises(StorageError, match=words):
            write_safetensors(path, sources(a=sample(FLOAT, 5000)), {})
        assert not path.exists()
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(5, "Input/output error")))
    with pytest.raises(StorageError, match=r"errno 5"):
        write_safetensors(path, sources(a=sample(FLOAT, 5)), {})
    assert not any(path.parent.iterdir())


def test_shards_are_named_cut_and_indexed_as_hugging_face_does(tmp_path):
    tensors = {f"t{i}": sample(FLOAT, 100) for i in range(5)} | {"big": sample(FLOAT, 999)}
    assert list(plan_shards(sources(**tensors))) == ["model.safetensors"]
    plan = plan_shards(sources(**tensors), shard_bytes=1000)
    shards = [["t0", "t1"], ["t2", "t3"], ["t4"], ["big"]]
    files = [f"model-0000{number}-of-00004.safetensors" for number in (1, 2, 3, 4)]
    found = {file: [each.name for each in shard] for file, shard in plan.items()}
    assert found == dict(zip(files, shards, strict=True))
    write_files(tmp_path, plan, {"format": "pt"})
    (tmp_path / "model.safetensors.index.json").write_bytes(encode_index(plan))
    stored = open_shards(tmp_path)
    assert stored.keys() == tensors.keys()
    assert all(same_bytes(read_tensor(stored[name]), tensors[name]) for name in tensors)


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
LONG = b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,8]}}'
HUGE = {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 4 << 40]}
TWICE = json.dumps({"a": ENTRY})[:-1] + ", " + json.dumps({"a": ENTRY})[1:]
HOSTILE: dict[str, tuple[Any, int]] = {  # the header, and the bytes behind it
    "not json": (b"{nope}", 0),
    "not utf-8": (b'{"\xff": 1}', 0),
    "a list": ([1, 2], 0),
    "nested too deep": (b'{"a":' * 50_000 + b"1" + b"}" * 50_000, 0),
    "a number of 5000 digits": (LONG, 8),
    "unknown dtype": ({"a": ENTRY | {"dtype": "F31"}}, 8),
    "dtype of another kind": ({"a": ENTRY | {"dtype": ["F32"]}}, 8),
    "no offsets": ({"a": {"dtype": "F32", "shape": [2]}}, 8),
    "three offsets": ({"a": ENTRY | {"data_offsets": [0, 4, 8]}}, 8),
    "negative shape": ({"a": ENTRY | {"shape": [-2]}}, 8),
    "boolean shape": ({"a": ENTRY | {"shape": [True, 2]}}, 8),
    "fractional shape": ({"a": ENTRY | {"shape": [2.0]}}, 8),
    "shape is text": ({"a": ENTRY | {"shape": "2"}}, 8),
    "shape does not fit the bytes": ({"a": ENTRY | {"shape": [3]}}, 8),
    "backwards": ({"a": ENTRY | {"data_offsets": [8, 0]}}, 8),
    "past the end": ({"a": HUGE}, 8),
    "overlap": ({"a": ENTRY, "b": ENTRY | {"data_offsets": [4, 12]}}, 12),
    "twice the same bytes": ({"a": ENTRY, "b": ENTRY}, 8),
    "gap": ({"a": ENTRY, "b": ENTRY | {"data_offsets": [12, 20]}}, 20),
    "bytes left over": ({"a": ENTRY}, 9),
    "duplicate name": (TWICE.encode(), 8),
    "metadata is a list": ({"__metadata__": ["x"], "a": ENTRY}, 8),
    "metadata value is a number": ({"__metadata__": {"step": 3}, "a": ENTRY}, 8),
    "entry is null": ({"a": None}, 0),
}


def test_malformed_headers_are_refused_by_file_name(path):
    for case in HOSTILE:
        header, nbytes = HOSTILE[case]
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(nbytes))
        with pytest.raises(StorageError, match=r"x\.safetensors: malformed safetensors header"):
            read_header(path)


def test_a_dtype_that_cannot_be_read_is_no_damage(path):
    text = json.dumps({"a": {"dtype": "U16", "shape": [4], "data_offsets": [0, 8]}}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    with pytest.raises(ModelError, match="a has the dtype U16, which cannot be read; name the"):
        read_header(path)


def test_a_header_length_is_checked_before_it_is_believed(path):
    for length in [1 << 63, (1 << 64) - 1, 100_000_001, 9]:
        path.write_bytes(struct.pack("<Q", length) + b"{}      ")
        with pytest.raises(StorageError, match="claims a header of"):
            read_header(path)


def test_every_truncation_is_found(path):
    save_file({"a": sample(FLOAT, 8), "b": sample(torch.int16, 3)}, path)
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(StorageError, match=r"x\.safetensors"):
            read_header(path)


def test_a_pipe_is_refused_instead_of_waited_for(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(StorageError, match="not a regular file"):
        open_shards(tmp_path)


def test_an_index_that_is_malformed_or_leaves_its_folder_is_refused(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": sample(FLOAT, 2)}, tmp_path / "secret.safetensors")
    outside = ["../secret.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "", 7, "a\0b"]
    cases = [(json.dumps({"weight_map": {"a": file}}), "not a file of this") for file in outside]
    texts = ["", "[]", "{}", '{"weight_map": [1]}', '{"weight_map": null}']
    for text, words in [*cases, *((text, r"index\.json: ") for text in texts)]:
        (folder / "model.safetensors.index.json").write_text(text)
        with pytest.raises(StorageError, match=words):
            open_shards(folder)


def test_an_index_and_its_shards_must_agree(tmp_path):
    for named, file, held, words in [
        ("a", "gone.safetensors", "a", r"1 shards, 1 is missing \(gone\.safetensors\)"),
        ("a", "s.safetensors", "az", r"places z in None, and it is in s\.safetensors"),
    ]:
        save_file({name: sample(FLOAT, 2) for name in held}, tmp_path / "s.safetensors")
        index = tmp_path / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": dict.fromkeys(named, file)}))
        with pytest.raises((ModelError, StorageError), match=words):
            open_shards(tmp_path)


def test_pickled_weights_are_refused_with_the_way_out(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ModelError, match=r"only pickled weights.*save_pretrained"):
        open_shards(tmp_path)
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor"):
        open_shards(tmp_path / "empty")
