"""GGUF files, for llama.cpp and its users, written from a checkpoint's tensors.

The `gguf` package has the format and the names of tensors; `models/gguf_families.py` says which
families come out right, and how.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from megatrain.errors import ModelError
from megatrain.models.gguf_families import Family, family_of, keys_of, refused, rope_tensors
from megatrain.models.gguf_vocabulary import add_tokenizer
from megatrain.storage.hashed_file import system_errors
from megatrain.storage.safetensors import TensorSource

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

FILE = "model.gguf"
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}
# The format's names of a dtype, and of a file whose matrices have it.
NAMES = {
    torch.bfloat16: ("BF16", "MOSTLY_BF16"),
    torch.float16: ("F16", "MOSTLY_F16"),
    torch.float32: ("F32", "ALL_F32"),
}
EXPERT = re.compile(r"\.experts\.(\d+)\.")
# Readers want these in float32, besides vectors.
EXACT = re.compile(r"ffn_gate_inp|ssm_conv1d|ssm_a$|shortconv\.conv|position_embd")


class Tensor(NamedTuple):
    """A tensor of the file: one source, or one for each of a mixture's experts."""

    name: str
    sources: list[TensorSource]
    experts: tuple[int, ...]  # their number, or () of another tensor
    shape: tuple[int, ...]  # in the file
    dtype: torch.dtype


def write_gguf(
    path: Path,
    name: str,
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[TensorSource],
    dtype: torch.dtype,
) -> None:
    """Write a model, called `name`, as one GGUF file, tensor by tensor.

    Args:
        sources: all tensors, under their names in transformers.
        dtype: of matrices; one of DTYPES. Vectors, such as norms, are float32, as readers want.

    Raises:
        ModelError: the family, the tokenizer or a tensor cannot be written.
        StorageError: the disk is full or fails.
    """
    import gguf
    import numpy as np

    family = family_of(config)
    keys = keys_of(family, config)
    tensors = _tensors(family, config, sources, dtype)
    writer: Any = gguf.GGUFWriter(path, family.architecture)
    size = sum(math.prod(source.shape) for source in sources)
    writer.add_type("model")
    writer.add_name(name)
    writer.add_size_label(gguf.size_label(size, 0, 0, 0))
    writer.add_file_type(getattr(gguf.LlamaFileType, NAMES[dtype][1]))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    add |= {str: writer.add_string, list: writer.add_array}
    for key, value in keys.items():
        add[type(value)](f"{family.architecture}.{key}", value)
    add_tokenizer(writer, tokenizer, config.vocab_size)
    for tensor in tensors:
        kind = getattr(gguf.GGMLQuantizationType, NAMES[tensor.dtype][0])
        shape = (*tensor.shape[:-1], tensor.shape[-1] * tensor.dtype.itemsize)  # as bytes
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.uint8), math.prod(shape), kind)
    with system_errors(path, "write it"):
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for tensor in tensors:
                values = family.changed(tensor.name, _values(tensor), config).contiguous()
                writer.write_tensor_data(values.view(torch.uint8).numpy())
        finally:
            writer.close()


def _tensors(
    family: Family, config: PretrainedConfig, sources: Sequence[TensorSource], dtype: torch.dtype
) -> list[Tensor]:
    """All tensors of a file. Raises ModelError for one without a name in GGUF."""
    found = []
    for name, parts in _named(family, config, sources).items():
        experts = (len(parts),) if EXPERT.search(parts[0].name) else ()
        whole = torch.empty((*experts, *parts[0].shape), device="meta")
        shape = tuple(family.changed(name, whole, config).shape)
        exact = len(shape) < 2 or EXACT.search(name)
        found.append(Tensor(name, parts, experts, shape, torch.float32 if exact else dtype))
    return found


def _named(
    family: Family, config: PretrainedConfig, sources: Sequence[TensorSource]
) -> dict[str, list[TensorSource]]:
    """Sources by their names in GGUF, a mixture's experts under one."""
    import gguf

    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == family.architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    found: dict[str, dict[int, TensorSource]] = {}
    for name, values in rope_tensors(config).items():
        shape = tuple(values.shape)
        found[name] = {0: TensorSource(name, values.dtype, shape, partial(iter, [values]))}
    for source in sources:
        expert = EXPERT.search(source.name)
        own = EXPERT.sub(".experts.", source.name)
        # some are known there by what the model without its head calls them
        tries = (own, own.partition(".")[2], f"transformer.{own}", f"model.{own}")
        called = (names.get_name(each, try_suffixes=(".weight", ".bias")) for each in tries)
        known = next(filter(None, called), None)
        number = int(expert[1]) if expert else 0
        if known is None or number in found.get(known, {}):
            raise refused(config, f"a tensor {source.name}")
        found.setdefault(known, {})[number] = source
    return {name: [parts[at] for at in sorted(parts)] for name, parts in found.items()}


def _values(tensor: Tensor) -> torch.Tensor:
    """The values as transformers has them. Raises ModelError for values beyond float16."""
    parts = []
    for part in tensor.sources:
        whole = torch.cat([piece.flatten().cpu() for piece in part.pieces()]).view(part.shape)
        values = whole.to(tensor.dtype)
        if tensor.dtype == torch.float16 and bool((values.isinf() & ~whole.isinf()).any()):
            raise ModelError(
                f"{part.name}: has values beyond those of float16; export it as bfloat16"
            )
        parts.append(values)
    return torch.stack(parts) if tensor.experts else parts[0]
