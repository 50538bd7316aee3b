"""What GGUF files say of a model, and what is refused as none of them can say it."""

from __future__ import annotations

from typing import Any

import pytest

from megatrain.errors import ModelError
from megatrain.storage.gguf_file import FAMILIES, family_of, keys_of
from tests.helpers.gguf_toys import CONFIGS, SCALED


def test_all_families_are_compared():
    assert FAMILIES.keys() == CONFIGS.keys()


def said_of(config: Any) -> dict[str, Any]:
    return keys_of(family_of(config), config)


def scaled(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


def test_scaled_rotary_embeddings_have_keys_of_their_own():
    """llama.cpp reads them; the reader of transformers passes over them."""
    plain = said_of(CONFIGS["qwen3"]())
    linear = said_of(CONFIGS["qwen3"](**scaled("linear", factor=2)))
    assert linear == plain | {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}


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
    "mlp_only_layers: [1]": ("qwen3_moe", {"mlp_only_layers": [1]}),
    "query_pre_attn_scalar: 100": ("gemma3_text", {"query_pre_attn_scalar": 100}),
    "use_bidirectional_attention: True": ("gemma3_text", {"use_bidirectional_attention": True}),
    "layer_types: ['full_attention', ": ("gemma3_text", {"layer_types": ["full_attention"] * 7}),
    "rotary embeddings of type dynamic": ("llama", scaled("dynamic", factor=2.0)),
    "final_logit_softcapping: 9.0": ("gemma3_text", {"final_logit_softcapping": 9.0}),
    "yarn": ("qwen2", scaled("yarn", factor=4.0)),
    "rotary embeddings of type llama3": ("qwen2", {"rope_parameters": SCALED}),
    "partial rotary embeddings": ("qwen3", scaled("default", partial_rotary_factor=0.5)),
}


def test_what_no_file_can_say_is_refused():
    for words, (family, values) in UNSAID.items():
        with pytest.raises(ModelError) as caught:
            said_of(CONFIGS[family](**values))
        said = (f"a {family} model with", words, "export a Hugging Face folder")
        assert all(each in str(caught.value) for each in said)
