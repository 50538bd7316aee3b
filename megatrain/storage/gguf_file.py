"""GGUF files, as llama.cpp and what is built on it read them, from a checkpoint's tensors.

The `gguf` package has the format, the names of keys and of tensors. What is ours: which families
are known to come out right, and the order of rows that llama.cpp wants of Llama's q and k.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatrain.errors import ModelError
from megatrain.models.gguf_vocabulary import Vocabulary, vocabulary_of
from megatrain.storage.safetensors_writer import TensorSource
from megatrain.storage.system_calls import system_errors

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
logger = logging.getLogger("megatrain")


@dataclass(frozen=True)
class Family:
    """How a family of transformers is called in GGUF.

    Attributes:
        rotates_pairs: rotary embeddings turn neighbouring rows of q and k, not halves of a head.
        must: values of the configuration that the reader takes for granted.
    """

    architecture: str
    rotates_pairs: bool = False
    must: Mapping[str, Any] = field(default_factory=dict)


PLAIN: dict[str, Any] = {"hidden_act": "silu"}
WITHOUT_BIAS = PLAIN | {"attention_bias": False, "mlp_bias": False}
FAMILIES = {
    "llama": Family("llama", rotates_pairs=True, must=WITHOUT_BIAS),
    "mistral": Family("llama", rotates_pairs=True, must=PLAIN),
    "qwen2": Family("qwen2", must=PLAIN | {"use_sliding_window": False}),
    "qwen3": Family("qwen3", must=WITHOUT_BIAS | {"use_sliding_window": False}),
}


def family_of(config: PretrainedConfig) -> Family:
    """Raises ModelError for a model that cannot be written."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        known = ", ".join(FAMILIES)
        raise ModelError(
            f"a model of type {config.model_type} cannot be written as a GGUF file; known are "
            f"{known}; export a Hugging Face folder"
        )
    for name, value in family.must.items():
        if (found := getattr(config, name, value)) != value:
            raise _refused(config, f"{name}: {found}")
    rope = config.rope_parameters
    scaled = rope.get("rope_type", "default")
    if scaled not in ("default", *(["llama3"] if family.architecture == "llama" else [])):
        raise _refused(config, f"rotary embeddings of type {scaled}")
    if rope.get("partial_rotary_factor", 1) != 1:
        raise _refused(config, "partial rotary embeddings")
    return family


def _refused(config: PretrainedConfig, what: str) -> ModelError:
    return ModelError(
        f"a {config.model_type} model with {what} cannot be written as a GGUF file; export a "
        "Hugging Face folder"
    )


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
    named = _named(family, config, sources)
    words = vocabulary_of(tokenizer, config.vocab_size)
    writer = gguf.GGUFWriter(path, family.architecture)
    size = gguf.size_label(sum(_numel(source) for source in sources), 0, 0, 0)
    writer.add_type("model")
    writer.add_name(name)
    writer.add_size_label(size)
    writer.add_file_type(getattr(gguf.LlamaFileType, NAMES[dtype][1]))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _add_shape(writer, config)
    _add_words(writer, words)
    factors = _rope_factors(config)
    if factors is not None:
        named = {"rope_freqs.weight": factors} | named
    for tensor, source in named.items():
        _add_info(writer, tensor, source, _dtype_of(source, dtype))
    with system_errors(path, "write it"):
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for tensor, source in named.items():
                values = _values(source, _heads(family, config, tensor), _dtype_of(source, dtype))
                writer.write_tensor_data(_bytes_of(values))
        finally:
            writer.close()


def _named(
    family: Family, config: PretrainedConfig, sources: Sequence[TensorSource]
) -> dict[str, TensorSource]:
    """The tensors by their names in GGUF. Raises ModelError for one that has none."""
    import gguf

    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == family.architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    found = {}
    for source in sources:
        name = names.get_name(source.name, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise _refused(config, f"a tensor {source.name}")
        found[name] = source
    return found


def _add_shape(writer: Any, config: PretrainedConfig) -> None:
    heads, hidden = config.num_attention_heads, config.hidden_size
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    window = getattr(config, "sliding_window", None)
    length = config.max_position_embeddings
    if config.model_type == "mistral" and window is not None and window < length:
        logger.warning(
            f"GGUF files of this family have no sliding window: the context is told as {window:,} "
            "tokens, within which it makes no difference"
        )
        length = window
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(length)
    writer.add_embedding_length(hidden)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


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


def _rope_factors(config: PretrainedConfig) -> TensorSource | None:
    """By how much scaling slows each frequency, float32 [head_dim / 2]; None: not at all."""
    kind = config.rope_parameters.get("rope_type", "default")
    if kind == "default":
        return None
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    steps = torch.arange(0, 2 * len(scaled), 2, dtype=torch.float32) / (2 * len(scaled))
    factors = 1 / (config.rope_parameters["rope_theta"] ** steps) / scaled
    return TensorSource("rope_freqs.weight", factors.dtype, (len(factors),), lambda: [factors])


def _heads(family: Family, config: PretrainedConfig, tensor: str) -> int | None:
    """Heads whose rows are to be put into the reader's order; None: the tensor stays as it is."""
    if not family.rotates_pairs:
        return None
    heads: int = config.num_attention_heads
    groups: int = config.num_key_value_heads
    return heads if ".attn_q." in tensor else groups if ".attn_k." in tensor else None


def _dtype_of(source: TensorSource, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if len(source.shape) < 2 else dtype


def _values(source: TensorSource, heads: int | None, dtype: torch.dtype) -> torch.Tensor:
    """A whole tensor. Raises ModelError if float16 has no room for its values."""
    whole = torch.cat([piece.flatten() for piece in source.pieces()]).view(source.shape)
    values = whole.to(dtype)
    if dtype == torch.float16 and bool((values.isinf() & ~whole.isinf()).any()):
        raise ModelError(
            f"{source.name}: has values beyond those of float16; export it as bfloat16"
        )
    if heads is None:
        return values
    halves = values.view(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return halves.transpose(1, 2).reshape(values.shape)


def _add_info(writer: Any, name: str, source: TensorSource, dtype: torch.dtype) -> None:
    import gguf
    import numpy as np

    kind = getattr(gguf.GGMLQuantizationType, NAMES[dtype][0])
    bytes_shape = (*source.shape[:-1], source.shape[-1] * dtype.itemsize)
    nbytes = _numel(source) * dtype.itemsize
    writer.add_tensor_info(name, bytes_shape, np.dtype(np.uint8), nbytes, kind)


def _bytes_of(values: torch.Tensor) -> Any:
    return values.contiguous().view(torch.uint8).numpy()


def _numel(source: TensorSource) -> int:
    return torch.Size(source.shape).numel()
