"""Shapes of known models by name, as transformers' configurations have them: for random weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig

KEYS = (
    *("model_type", "rms_norm_eps", "rope_theta", "max_position_embeddings"),
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads"),
)
QWEN, LLAMA = ("qwen2", 1e-6, 1e6, 32768), ("llama", 1e-5, 5e5, 8192)
QWEN3, LLAMA32 = ("qwen3", 1e-6, 1e6, 40960), ("llama", 1e-5, 5e5, 131072)
MISTRAL, SMOLLM = ("mistral", 1e-5, 1e6, 32768), ("llama", 1e-5, 1e5, 8192)

QWEN3_MOE = ("qwen3_moe", 1e-6, 1e6, 40960)


def _shape(
    family: tuple[Any, ...], *sizes: int, tied: bool = False, **others: Any
) -> dict[str, Any]:
    return dict(zip(KEYS, (*family, *sizes), strict=True)) | {"tie_word_embeddings": tied} | others


# As published (mistral-7b: v0.3), except that positions are not rescaled, and that qwen2.5-1.5b is
# untied: 1.8B parameters, with an embedding and a head as its larger sisters have.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": _shape(QWEN, 151936, 896, 4864, 24, 14, 2, tied=True),
    "qwen2.5-1.5b": _shape(QWEN, 151936, 1536, 8960, 28, 12, 2),
    "qwen2.5-3b": _shape(QWEN, 151936, 2048, 11008, 36, 16, 2, tied=True),
    "qwen2.5-7b": _shape(QWEN, 152064, 3584, 18944, 28, 28, 4),
    "qwen2.5-14b": _shape(QWEN, 152064, 5120, 13824, 48, 40, 8),
    "qwen2.5-32b": _shape(QWEN, 152064, 5120, 27648, 64, 40, 8),
    "qwen2.5-72b": _shape(QWEN, 152064, 8192, 29568, 80, 64, 8),
    "qwen3-0.6b": _shape(QWEN3, 151936, 1024, 3072, 28, 16, 8, tied=True, head_dim=128),
    "qwen3-1.7b": _shape(QWEN3, 151936, 2048, 6144, 28, 16, 8, tied=True, head_dim=128),
    "qwen3-4b": _shape(QWEN3, 151936, 2560, 9728, 36, 32, 8, tied=True, head_dim=128),
    "qwen3-8b": _shape(QWEN3, 151936, 4096, 12288, 36, 32, 8, head_dim=128),
    "qwen3-14b": _shape(QWEN3, 151936, 5120, 17408, 40, 40, 8, head_dim=128),
    "qwen3-32b": _shape(QWEN3, 151936, 5120, 25600, 64, 64, 8, head_dim=128),
    "llama-3.2-1b": _shape(LLAMA32, 128256, 2048, 8192, 16, 32, 8, tied=True),
    "llama-3.2-3b": _shape(LLAMA32, 128256, 3072, 8192, 28, 24, 8, tied=True),
    "llama-3-8b": _shape(LLAMA, 128256, 4096, 14336, 32, 32, 8),
    "llama-3-70b": _shape(LLAMA, 128256, 8192, 28672, 80, 64, 8),
    "mistral-7b": _shape(MISTRAL, 32768, 4096, 14336, 32, 32, 8, sliding_window=None),
    "smollm2-135m": _shape(SMOLLM, 49152, 576, 1536, 30, 9, 3, tied=True),
    "smollm2-1.7b": _shape(SMOLLM, 49152, 2048, 8192, 24, 32, 32, tied=True),
    "qwen3-30b-a3b": _shape(
        QWEN3_MOE, 151936, 2048, 6144, 48, 32, 4, head_dim=128, num_experts=128, norm_topk_prob=True
    ),
    # The rest of these is what transformers takes for granted of their families.
    "qwen3.5-35b-a3b": {"model_type": "qwen3_5_moe_text", "max_position_embeddings": 262144},
    "gpt-oss-20b": {"model_type": "gpt_oss", "num_hidden_layers": 24, "num_local_experts": 32},
    "gpt-oss-120b": {"model_type": "gpt_oss", "num_hidden_layers": 36, "num_local_experts": 128},
    "tiny": _shape(QWEN, 512, 64, 128, 4, 4, 2),
}


def set_depth(config: PretrainedConfig, layers: int) -> None:
    """Give the model `layers` layers: its first ones, repeated as often as needed."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None)  # only families with several kinds of layers have it
    text.num_hidden_layers = layers
    if kinds:
        text.layer_types = [kinds[i % len(kinds)] for i in range(layers)]
