"""Rotary embeddings as GGUF files describe them: keys, and tensors of factors by frequency."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PretrainedConfig

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
    """What of a model's rotary embeddings no file can say; None: there is nothing."""
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
    """Of layers without a sliding window, if those with one have their own."""
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
