"""Damaged files, full disks and GGUF files, for tests of what is written and read back."""

from __future__ import annotations

import ctypes
import hashlib
import resource
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers

from megatrain.storage.hashed_file import WrittenFile
from megatrain.storage.manifest import read_manifest


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def flip(path: Path, position: int = -1) -> None:
    """Change one bit of a file, but not of its hard links."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.unlink()
    path.write_bytes(data)


def forge(folder: Path, **changes: Any) -> None:
    """Write a manifest that agrees with the files as they are now."""
    old = read_manifest(folder)
    data = {name: (folder / name).read_bytes() for name in old.files}
    files = {
        name: WrittenFile(name, len(read), hashlib.sha256(read).hexdigest())
        for name, read in data.items()
    }
    (folder / "MANIFEST.json").write_bytes(replace(old, **{"files": files, **changes}).encode())


@contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    """A disk that is full after `nbytes` of any one file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def as_an_ordinary_user() -> Iterator[None]:
    """Without the right to read what its modes forbid (CAP_DAC_OVERRIDE and _READ_SEARCH)."""
    libc = ctypes.CDLL(None)
    header = struct.pack("=Ii", 0x20080522, 0)  # version 3, this thread and those it starts
    before = ctypes.create_string_buffer(24)
    assert libc.capget(header, before) == 0
    effective, *others = struct.unpack("=6I", before.raw)
    assert libc.capset(header, struct.pack("=6I", effective & ~0b110, *others)) == 0
    try:
        yield
    finally:
        assert libc.capset(header, before.raw) == 0


def logits_of(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """By transformers, of a model folder."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        return model.eval()(ids).logits.float()  # type: ignore[no-any-return]


@contextmanager
def gguf_writer(path: Path, config: transformers.LlamaConfig) -> Iterator[gguf.GGUFWriter]:
    """A GGUF file of a llama model; its tensors and words are still to be added."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads or config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    yield writer
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tensors(writer: gguf.GGUFWriter, tensors: Mapping[str, torch.Tensor], layers: int) -> None:
    """Tensors by their names in transformers."""
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
    for name, tensor in tensors.items():
        stem = known.get_name(name.removesuffix(".weight"))
        writer.add_tensor(f"{stem}.weight", tensor.detach().numpy())
