"""What GGUF files say of a model, and what is refused as none of them can say it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from megatrain.errors import ModelError
from megatrain.models.gguf_families import FAMILIES, family_of, keys_of, rope_tensors
from tests.gguf_toys import CONFIGS, SCALED


def test_all_families_are_compared():
    assert FAMILIES.keys() == CONFIGS.keys()


def said_of(config: Any) -> dict[str, Any]:
    return keys_of(family_of(config), config)


def scaled(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


YARN = {"factor": 4.0, "original_max_position_embeddings": 16}
LONG = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


def test_scaled_rotary_embeddings_have_keys_of_their_own():
    """llama.cpp reads them; the reader of transformers passes over them."""
    plain = said_of(CONFIGS["qwen3"]())
    linear = said_of(CONFIGS["qwen3"](**scaled("linear", factor=2)))
    scaling = "rope.scaling."
    assert linear == plain | {f"{scaling}type": "linear", f"{scaling}factor": 2.0}
    yarn = said_of(CONFIGS["qwen2"](**scaled("yarn", **YARN)))
    assert {key: value for key, value in yarn.items() if key.startswith(scaling)} == {
        f"{scaling}type": "yarn",
        f"{scaling}factor": 4.0,
        f"{scaling}original_context_length": 16,
    }
    config = CONFIGS["phi3"](**scaled("longrope", **LONG), original_max_position_embeddings=16)
    long = said_of(config)
    # transformers' formula, of 64 tokens instead of 16
    assert long[f"{scaling}attn_factor"] == pytest.approx((1 + math.log(4) / math.log(16)) ** 0.5)
    assert (long[f"{scaling}type"], long[f"{scaling}original_context_length"]) == ("longrope", 16)
    tensors = {name: values.tolist() for name, values in rope_tensors(config).items()}
    assert tensors == {
        "rope_factors_long.weight": LONG["long_factor"],
        "rope_factors_short.weight": LONG["short_factor"],
    }
    part = said_of(CONFIGS["phi3"](**scaled("default", partial_rotary_factor=0.75)))
    assert (part["rope.dimension_count"], part["attention.key_length"]) == (12, 16)


def test_layers_with_windows_have_a_base_of_their_own():
    both = {"full_attention": scaled("linear", factor=8.0)["rope_parameters"]}
    both["sliding_attention"] = {"rope_type": "default", "rope_theta": 500.0}
    said = said_of(CONFIGS["gemma3_text"](rope_parameters=both))
    assert (said["rope.freq_base"], said["rope.freq_base_swa"]) == (10000.0, 500.0)
    assert (said["rope.scaling.type"], said["rope.scaling.factor"]) == ("linear", 8.0)
    assert said["attention.sliding_window"] == 8


# By what is named: the family, and values that no file can say.
UNSAID: Any = {
    "attention_bias: True": ("llama", {"attention_bias": True}),
    "hidden_act: relu": ("qwen2", {"hidden_act": "relu"}),
    "use_sliding_window: True": ("qwen3_moe", {"use_sliding_window": True}),
    "norm_topk_prob: False": ("qwen3_moe", {"norm_topk_prob": False}),
    "norm_topk_prob: True": ("qwen2_moe", {"norm_topk_prob": True}),
    "mlp_only_layers: [1]": ("qwen2_moe", {"mlp_only_layers": [1]}),
    "query_pre_attn_scalar: 100": ("gemma2", {"query_pre_attn_scalar": 100}),
    "no attn_logit_softcapping": ("gemma2", {"attn_logit_softcapping": None}),
    "use_bidirectional_attention: True": ("gemma3_text", {"use_bidirectional_attention": True}),
    "layer_types: ['full_attention', ": ("gemma3_text", {"layer_types": ["full_attention"] * 7}),
    "final_logit_softcapping: 9.0": ("gemma3_text", {"final_logit_softcapping": 9.0}),
    "tie_word_embeddings: False": ("gemma2", {"tie_word_embeddings": False}),
    "qk_layernorm: True": ("stablelm", {"qk_layernorm": True}),
    "new_decoder_architecture: True": ("falcon", {"new_decoder_architecture": True}),
    "alibi: True": ("falcon", {"alibi": True}),
    "scale_attn_by_inverse_layer_idx": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "activation_function: relu": ("gpt2", {"activation_function": "relu"}),
    "apply_residual": ("bloom", {"apply_residual_connection_post_layernorm": True}),
    "use_bias: False": ("starcoder2", {"use_bias": False}),
    "hidden_act: silu": ("nemotron", {"hidden_act": "silu"}),
    "use_conv_bias: False": ("mamba", {"use_conv_bias": False}),
    "conv_bias: True": ("lfm2", {"conv_bias": True}),
    "rotary embeddings of type dynamic": ("llama", scaled("dynamic", factor=2.0)),
    "rotary embeddings of type llama3": ("qwen2", {"rope_parameters": SCALED}),
    "partial rotary embeddings": ("qwen3", scaled("default", partial_rotary_factor=0.5)),
    "attention_factor: 3.0 of rotary": ("qwen2", scaled("yarn", **YARN, attention_factor=3.0)),
    "beta_fast: 16 of rotary": ("qwen2", scaled("yarn", **YARN, beta_fast=16)),
    "truncate: False of rotary": ("qwen2", scaled("yarn", **YARN, truncate=False)),
    "mscale of rotary": ("qwen2", scaled("yarn", **YARN, mscale=0.7)),
}


@pytest.mark.parametrize("words", UNSAID)
def test_what_no_file_can_say_is_refused(words):
    family, values = UNSAID[words]
    with pytest.raises(ModelError) as caught:
        said_of(CONFIGS[family](**values))
    assert f"a {family} model with" in str(caught.value)
    assert all(each in str(caught.value) for each in (words, "export a Hugging Face folder"))
