"""GGUF files, as llama.cpp and what is built on it read them, from a checkpoint's tensors.

The `gguf` package has the format and the names of tensors. What is ours: which families are known
to come out right, and how (models/gguf_families.py).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatrain.errors import ModelError
from megatrain.models.gguf_families import Family, family_of, keys_of, refused, rope_tensors
from megatrain.models.gguf_vocabulary import Vocabulary, vocabulary_of
from megatrain.storage.hashed_file import system_errors
from megatrain.storage.safetensors import TensorSource

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

FILE = "model.gguf"
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}
# By dtype: the format's names for it and for a file of it.
NAMES = {
    torch.bfloat16: ("BF16", "MOSTLY_BF16"),
    torch.float16: ("F16", "MOSTLY_F16"),
    torch.float32: ("F32", "ALL_F32"),
}
EXPERT = re.compile(r"\.experts\.(\d+)\.")
# What readers want in float32, besides vectors.
EXACT = re.compile(r"ffn_gate_inp|ssm_conv1d|ssm_a$|shortconv\.conv|position_embd")


@dataclass(frozen=True)
class Tensor:
    """One of a file.

    Attributes:
        parts: what it is made of: one, or a mixture's experts.
        stacked: their number, or (), of one that is no expert.
        shape: in the file.
    """

    name: str
    parts: list[TensorSource]
    stacked: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype


def write_gguf(
    path: Path,
    name: str,
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[TensorSource],
    dtype: torch.dtype,
) -> None:
    """Write a model as one GGUF file, tensor by tensor.

    Vectors, such as norms, are float32, as readers want them.

    Args:
        name: told by the file.
        sources: all tensors, under their names in transformers.
        dtype: of matrices; one of DTYPES.

    Raises:
        ModelError: the family, the tokenizer or a tensor cannot be written.
        StorageError: the disk is full or fails.
    """
    import gguf

    family = family_of(config)
    said = keys_of(family, config)
    tensors = _tensors(family, config, sources, dtype)
    words = vocabulary_of(tokenizer, config.vocab_size)
    writer = gguf.GGUFWriter(path, family.architecture)
    size = gguf.size_label(sum(_numel(source.shape) for source in sources), 0, 0, 0)
    writer.add_type("model")
    writer.add_name(name)
    writer.add_size_label(size)
    writer.add_file_type(getattr(gguf.LlamaFileType, NAMES[dtype][1]))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for key, value in said.items():
        _add_key(writer, f"{family.architecture}.{key}", value)
    _add_words(writer, words)
    for tensor in tensors:
        _add_info(writer, tensor)
    with system_errors(path, "write it"):
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for tensor in tensors:
                values = family.changed(tensor.name, _values(tensor), config)
                writer.write_tensor_data(_bytes_of(values))
        finally:
            writer.close()


def _tensors(
    family: Family,
    config: PretrainedConfig,
    sources: Sequence[TensorSource],
    dtype: torch.dtype,
) -> list[Tensor]:
    """All of a file. Raises ModelError for one that has no name in GGUF."""
    found = []
    for name, parts in _named(family, config, sources).items():
        stacked = (len(parts),) if EXPERT.search(parts[0].name) else ()
        whole = torch.empty((*stacked, *parts[0].shape), device="meta")
        shape = tuple(family.changed(name, whole, config).shape)
        exact = len(shape) < 2 or EXACT.search(name)
        found.append(Tensor(name, parts, stacked, shape, torch.float32 if exact else dtype))
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


def _add_key(writer: Any, key: str, value: Any) -> None:
    add = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    add[type(value)](key, value)


def _add_words(writer: Any, words: Vocabulary) -> None:
    writer.add_tokenizer_model(words.model)
    writer.add_tokenizer_pre(words.split)
    writer.add_token_list(words.tokens)
    writer.add_token_types(words.types)
    if words.merges is not None:
        writer.add_token_merges(words.merges)
    if words.scores is not None:
        writer.add_token_scores(words.scores)
    add_id = {
        "bos": writer.add_bos_token_id,
        "eos": writer.add_eos_token_id,
        "eot": writer.add_eot_token_id,
        "unknown": writer.add_unk_token_id,
        "padding": writer.add_pad_token_id,
    }
    for name, token in words.ids.items():
        add_id[name](token)
    writer.add_add_bos_token(words.adds_bos)
    writer.add_add_eos_token(words.adds_eos)
    writer.add_add_space_prefix(words.adds_space)
    if words.chat_template is not None:
        writer.add_chat_template(words.chat_template)


def _values(tensor: Tensor) -> torch.Tensor:
    """As transformers has it. Raises ModelError if float16 has no room for its values."""
    parts = []
    for part in tensor.parts:
        whole = torch.cat([piece.flatten().cpu() for piece in part.pieces()]).view(part.shape)
        values = whole.to(tensor.dtype)
        if tensor.dtype == torch.float16 and bool((values.isinf() & ~whole.isinf()).any()):
            raise ModelError(
                f"{part.name}: has values beyond those of float16; export it as bfloat16"
            )
        parts.append(values)
    return torch.stack(parts) if tensor.stacked else parts[0]


def _add_info(writer: Any, tensor: Tensor) -> None:
    import gguf
    import numpy as np

    kind = getattr(gguf.GGMLQuantizationType, NAMES[tensor.dtype][0])
    *rows, last = tensor.shape
    bytes_shape = (*rows, last * tensor.dtype.itemsize)
    nbytes = _numel(tensor.shape) * tensor.dtype.itemsize
    writer.add_tensor_info(tensor.name, bytes_shape, np.dtype(np.uint8), nbytes, kind)


def _bytes_of(values: torch.Tensor) -> Any:
    return values.contiguous().view(torch.uint8).numpy()


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()
