"""Shapes of known models by name, as transformers' configurations have them: for random weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig

KEYS = (
    "model_type",
    "rms_norm_eps",
    "rope_theta",
    "max_position_embeddings",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
QWEN, LLAMA = ("qwen2", 1e-6, 1e6, 32768), ("llama", 1e-5, 5e5, 8192)


def _shape(family: tuple[Any, ...], *sizes: int, tied: bool = False) -> dict[str, Any]:
    return dict(zip(KEYS, (*family, *sizes), strict=True)) | {"tie_word_embeddings": tied}


# As published, except that qwen2.5-1.5b is untied: 1.8B parameters, with an embedding and a head as
# its larger sisters have.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": _shape(QWEN, 151936, 896, 4864, 24, 14, 2, tied=True),
    "qwen2.5-1.5b": _shape(QWEN, 151936, 1536, 8960, 28, 12, 2),
    "qwen2.5-7b": _shape(QWEN, 152064, 3584, 18944, 28, 28, 4),
    "qwen2.5-14b": _shape(QWEN, 152064, 5120, 13824, 48, 40, 8),
    "qwen2.5-32b": _shape(QWEN, 152064, 5120, 27648, 64, 40, 8),
    "llama-3-8b": _shape(LLAMA, 128256, 4096, 14336, 32, 32, 8),
    "llama-3-70b": _shape(LLAMA, 128256, 8192, 28672, 80, 64, 8),
    "tiny": _shape(QWEN, 512, 64, 128, 4, 4, 2),
}


def set_depth(config: PretrainedConfig, layers: int) -> None:
    """Give the model `layers` layers: its first ones, repeated as often as needed."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None)  # only families with several kinds of layers have it
    text.num_hidden_layers = layers
    if kinds:
        text.layer_types = [kinds[i % len(kinds)] for i in range(layers)]
