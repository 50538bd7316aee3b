"""Families of transformers as GGUF files describe them: keys, tensors, and what readers assume.

A row has what readers of GGUF files, llama.cpp or transformers, cannot guess. A model that no row
can describe is refused: a wrong key would show only as a worse model.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from megatrain.errors import ModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig


logger = logging.getLogger("megatrain")

Change = Callable[[torch.Tensor, Any], torch.Tensor]


@dataclass(frozen=True)
class Family:
    """A family of transformers, by its name in GGUF."""

    architecture: str
    # by GGUF's key: a field of the configuration, or a function of the configuration
    keys: Mapping[str, Any]
    # values of the configuration that readers take for granted, or functions that give them
    must: Mapping[str, Any] = field(default_factory=dict)
    # patterns of GGUF's names of tensors, and how readers want such tensors
    changes: tuple[tuple[str, Change], ...] = ()
    # types of rotary embeddings that files can express; empty: the family has none
    rope: tuple[str, ...] = ("default", "linear", "yarn")
    turns_part: bool = False  # rotary embeddings may turn the first part of a head only

    def changed(self, name: str, values: torch.Tensor, config: PretrainedConfig) -> torch.Tensor:
        """Convert a tensor to what readers want; on the meta device, for its shape."""
        for pattern, change in self.changes:
            if re.search(pattern, name):
                values = change(values, config)
        return values


# --- Values of keys ---


def head_dim(config: Any) -> int:
    size: int | None = getattr(config, "head_dim", None)
    return size or int(config.hidden_size // config.num_attention_heads)


def _real(name: str) -> Callable[[Any], float | None]:
    """A float field, which a configuration may hold as an integer."""
    return lambda config: None if (value := getattr(config, name)) is None else float(value)


def _always(value: Any) -> Callable[[Any], Any]:
    return lambda config: value


def _within_window(config: Any) -> int:
    """The context length, cut to the sliding window that readers do not know."""
    length, window = int(config.max_position_embeddings), config.sliding_window
    if window is None or window >= length:
        return length
    logger.warning(
        f"GGUF files of this family have no sliding window: the context is written as {window:,} "
        "tokens, within which it makes no difference"
    )
    return int(window)


def _inner(config: Any) -> int:
    return config.n_inner or 4 * config.n_embd  # type: ignore[no-any-return]


def _lfm2_inner(config: Any) -> int:
    """The width of LFM2's feed-forward layers, which it may compute from another."""
    width = int(config.intermediate_size)
    if config.block_auto_adjust_ff_dim:
        width = int(config.block_ffn_dim_multiplier * int(2 * width / 3))
        width = -(-width // config.block_multiple_of) * config.block_multiple_of
    return width


def _lfm2_groups(config: Any) -> list[int]:
    """Key-value heads by layer; a convolution has none."""
    groups = config.num_key_value_heads
    return [groups if kind == "full_attention" else 0 for kind in config.layer_types]


SHAPE: dict[str, Any] = {
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
GROUPED = SHAPE | {
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": head_dim,
    "attention.value_length": head_dim,
}
RMS = GROUPED | {"attention.layer_norm_rms_epsilon": _real("rms_norm_eps")}
WINDOWED = {"context_length": _within_window}
MIXED = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}


def _layer_norm(epsilon: str) -> dict[str, Any]:
    return {"attention.layer_norm_epsilon": _real(epsilon)}


# --- What readers take for granted ---

PLAIN: dict[str, Any] = {"hidden_act": "silu"}
WITHOUT_BIAS = PLAIN | {"attention_bias": False, "mlp_bias": False}
ALL_MIXED = {"decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False}


def _gemma(full_every: int, layers_of_27b: int) -> dict[str, Any]:
    def scale(config: Any) -> Any:
        of_27b = config.num_hidden_layers == layers_of_27b
        return config.hidden_size // config.num_attention_heads if of_27b else head_dim(config)

    def layers(config: Any) -> list[str]:
        every = range(1, config.num_hidden_layers + 1)
        return [f"{'sliding' if at % full_every else 'full'}_attention" for at in every]

    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "use_bidirectional_attention": lambda c: (
            None if c.use_bidirectional_attention else c.use_bidirectional_attention
        ),
        "query_pre_attn_scalar": scale,
        "layer_types": layers,
    }


# --- Changes of tensors ---


def _pairs(heads: str) -> Change:
    """Rows of q or k, where a reader's rotary embeddings turn neighbours, not halves of a head."""

    def change(values: torch.Tensor, config: Any) -> torch.Tensor:
        number: int = getattr(config, heads)
        halves = values.view(number, 2, values.shape[0] // number // 2, *values.shape[1:])
        return halves.transpose(1, 2).reshape(values.shape)

    return change


def _threes(values: torch.Tensor, config: Any) -> torch.Tensor:
    """Rows of all q, then k, then v, instead of those of each head."""
    by_head = values.view(config.n_head, 3, -1, *values.shape[1:])
    return by_head.transpose(0, 1).reshape(values.shape)


LLAMA = (
    (r"\.attn_q\.", _pairs("num_attention_heads")),
    (r"\.attn_k\.", _pairs("num_key_value_heads")),
)
NORMS_PLUS_ONE = ((r"norm\.weight$", lambda values, _: values + 1),)
SHARED_GATE = ((r"\.ffn_gate_inp_shexp\.", lambda values, _: values.squeeze(0)),)
GPT2 = ((r"\.(attn_qkv|attn_output|ffn_up|ffn_down)\.weight$", lambda values, _: values.t()),)
CONVOLUTION = ((r"conv(1d)?\.weight$", lambda values, _: values.squeeze(1)),)
DECAY = ((r"\.ssm_a$", lambda values, _: -torch.exp(values)),)

LLAMA_ROPE = ("default", "linear", "llama3", "yarn")
FAMILIES = {
    "llama": Family("llama", RMS, WITHOUT_BIAS, LLAMA, LLAMA_ROPE),
    "mistral": Family("llama", RMS | WINDOWED, PLAIN, LLAMA, LLAMA_ROPE),
    "mixtral": Family(
        "llama",
        RMS
        | WINDOWED
        | {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
        PLAIN,
        LLAMA,
        LLAMA_ROPE,
    ),
    "qwen2": Family("qwen2", RMS, PLAIN | {"use_sliding_window": False}),
    "qwen3": Family("qwen3", RMS, WITHOUT_BIAS | {"use_sliding_window": False}),
    "qwen2_moe": Family(
        "qwen2moe",
        RMS | MIXED | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        PLAIN | ALL_MIXED | {"norm_topk_prob": False, "qkv_bias": True},
        SHARED_GATE,
    ),
    "qwen3_moe": Family(
        "qwen3moe", RMS | MIXED, WITHOUT_BIAS | ALL_MIXED | {"norm_topk_prob": True}
    ),
    "gemma2": Family(
        "gemma2",
        RMS
        | {"attention.sliding_window": "sliding_window"}
        | {name: _real(name) for name in ("attn_logit_softcapping", "final_logit_softcapping")},
        _gemma(full_every=2, layers_of_27b=46) | {"tie_word_embeddings": True},
        NORMS_PLUS_ONE,
        rope=("default",),
    ),
    "gemma3_text": Family(
        "gemma3",
        RMS | {"attention.sliding_window": "sliding_window"},
        _gemma(full_every=6, layers_of_27b=62)
        | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
        NORMS_PLUS_ONE,
        rope=("default", "linear"),
    ),
    "phi3": Family("phi3", RMS | WINDOWED, PLAIN, rope=("default", "longrope"), turns_part=True),
    "stablelm": Family(
        "stablelm",
        GROUPED
        | _layer_norm("layer_norm_eps")
        | {"use_parallel_residual": "use_parallel_residual"},
        PLAIN | {"qk_layernorm": False},
        turns_part=True,
    ),
    "falcon": Family(
        "falcon",
        GROUPED
        | _layer_norm("layer_norm_epsilon")
        | {"feed_forward_length": "ffn_hidden_size", "attention.head_count_kv": _always(1)},
        {"activation": "gelu", "alibi": False, "bias": False, "multi_query": True}
        | {"new_decoder_architecture": False, "parallel_attn": True, "tie_word_embeddings": True},
    ),
    "gpt2": Family(
        "gpt2",
        SHAPE | _layer_norm("layer_norm_epsilon") | {"feed_forward_length": _inner},
        {"activation_function": "gelu_new", "scale_attn_weights": True}
        | {"scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
        GPT2,
        rope=(),
    ),
    "bloom": Family(
        "bloom",
        SHAPE
        | _layer_norm("layer_norm_epsilon")
        | {"context_length": lambda config: getattr(config, "seq_length", 2048)}
        | {"feed_forward_length": lambda config: 4 * config.hidden_size},
        {"apply_residual_connection_post_layernorm": False, "tie_word_embeddings": True},
        ((r"\.attn_qkv\.", _threes),),
        rope=(),
    ),
    "starcoder2": Family(
        "starcoder2",
        GROUPED | _layer_norm("norm_epsilon") | WINDOWED,
        {"hidden_act": "gelu_pytorch_tanh", "use_bias": True},
    ),
    "nemotron": Family(
        "nemotron",
        GROUPED | _layer_norm("norm_eps"),
        {"hidden_act": "relu2", "attention_bias": False, "mlp_bias": False},
        NORMS_PLUS_ONE,
        turns_part=True,
    ),
    "mamba": Family(
        "mamba",
        SHAPE
        | {"context_length": _always(1 << 20), "feed_forward_length": _always(0)}
        | {"attention.head_count": _always(0)}
        | {"attention.layer_norm_rms_epsilon": _real("layer_norm_epsilon")}
        | {f"ssm.{name}": name for name in ("conv_kernel", "state_size", "time_step_rank")}
        | {"ssm.inner_size": "intermediate_size", "ssm.dt_b_c_rms": _always(False)},
        PLAIN | {"use_bias": False, "use_conv_bias": True},
        CONVOLUTION + DECAY,
        rope=(),
    ),
    "lfm2": Family(
        "lfm2",
        GROUPED
        | {
            "attention.layer_norm_rms_epsilon": _real("norm_eps"),
            "shortconv.l_cache": "conv_L_cache",
        }
        | {"attention.head_count_kv": _lfm2_groups, "feed_forward_length": _lfm2_inner},
        {"conv_bias": False},
        CONVOLUTION,
    ),
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
    for name, wanted in family.must.items():
        value = wanted(config) if callable(wanted) else wanted
        if (found := getattr(config, name, value)) != value:
            raise refused(config, f"{name}: {found}")
    if problem := rope_problem(config, family.rope, family.turns_part):
        raise refused(config, problem)
    return family


def refused(config: PretrainedConfig, what: str) -> ModelError:
    return ModelError(
        f"a {config.model_type} model with {what} cannot be written as a GGUF file; export a "
        "Hugging Face folder"
    )


def keys_of(family: Family, config: PretrainedConfig) -> dict[str, Any]:
    """The keys that describe a model in a file, without the architecture's prefix.

    Raises ModelError for what it cannot leave out.
    """
    said = {
        key: value(config) if callable(value) else getattr(config, value)
        for key, value in family.keys.items()
    }
    for key, value in said.items():
        if value is None:
            raise refused(config, f"no {key.rpartition('.')[2]}")
    return said | (rope_keys(config, head_dim(config)) if family.rope else {})


# Of each type of scaling, what a file can say besides the base and the part of a head.
SAYS = {
    "default": set[str](),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {"factor", "original_max_position_embeddings", "attention_factor"}
    | {"beta_fast", "beta_slow", "truncate"},
    "longrope": {"factor", "original_max_position_embeddings", "attention_factor"}
    | {"short_factor", "long_factor"},
}
YARN = {"beta_fast": 32, "beta_slow": 1, "truncate": True}  # keys of theirs llama.cpp passes over
ALWAYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
LOCAL, GLOBAL = "sliding_attention", "full_attention"


def rope_problem(config: PretrainedConfig, types: tuple[str, ...], turns_part: bool) -> str | None:
    """The part of a model's rotary embeddings that no file can express; None if there is none."""
    if not types:
        return None
    rope = _of_whole(config)
    kind = rope.get("rope_type", "default")
    if kind not in types or _of_windows(config).get("rope_type", "default") != "default":
        return f"rotary embeddings of type {kind}"
    if rope.get("partial_rotary_factor", 1) != 1 and not turns_part:
        return "partial rotary embeddings"
    unsaid = {name for name, value in rope.items() if value is not None} - SAYS[kind] - ALWAYS
    if unsaid:
        return f"{', '.join(sorted(unsaid))} of rotary embeddings"
    if kind == "yarn":
        usual = {"attention_factor": 0.1 * math.log(max(rope["factor"], 1)) + 1} | YARN
        for name, value in usual.items():
            if rope.get(name) is not None and not math.isclose(rope[name], value):
                return f"{name}: {rope[name]} of rotary embeddings"
    return None


def rope_keys(config: PretrainedConfig, head_dim: int) -> dict[str, Any]:
    rope = _of_whole(config)
    kind = rope.get("rope_type", "default")
    said = {
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1)),
        "rope.freq_base": float(rope["rope_theta"]),
    }
    if local := _of_windows(config):
        said["rope.freq_base_swa"] = float(local["rope_theta"])
    if kind in ("default", "llama3"):
        return said
    about: dict[str, Any] = {"type": kind}
    if kind != "longrope":  # which has a factor for each frequency
        about["factor"] = float(rope["factor"])
    if kind != "linear":
        length = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        about["original_context_length"] = int(length)
    if kind == "longrope":
        about["attn_factor"] = float(_scaled(config)[1])
    return said | {f"rope.scaling.{name}": value for name, value in about.items()}


def rope_tensors(config: PretrainedConfig) -> dict[str, torch.Tensor]:
    """By how much scaling slows each frequency, float32 [rotated / 2], by the tensors' names."""
    rope = (getattr(config, "rope_parameters", None) and _of_whole(config)) or {}
    if rope.get("rope_type") == "longrope":
        pairs = {name: rope[f"{name}_factor"] for name in ("long", "short")}
        return {
            f"rope_factors_{name}.weight": torch.tensor(factors, dtype=torch.float32)
            for name, factors in pairs.items()
        }
    if rope.get("rope_type") == "llama3":
        scaled = _scaled(config)[0]
        steps = torch.arange(0, 2 * len(scaled), 2, dtype=torch.float32) / (2 * len(scaled))
        return {"rope_freqs.weight": 1 / (rope["rope_theta"] ** steps) / scaled}
    return {}


def _of_whole(config: Any) -> dict[str, Any]:
    """Parameters of layers without a sliding window, if those with one have their own."""
    found: dict[str, Any] = config.rope_parameters.get(GLOBAL, config.rope_parameters)
    return found


def _of_windows(config: Any) -> dict[str, Any]:
    found: dict[str, Any] = config.rope_parameters.get(LOCAL, {})
    return found


def _scaled(config: PretrainedConfig) -> tuple[torch.Tensor, float]:
    """Scaled frequencies, and by what cosine and sine are multiplied."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = _of_whole(config)
    found: tuple[torch.Tensor, float] = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, "cpu")
    return found
