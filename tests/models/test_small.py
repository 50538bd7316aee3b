"""A small configuration is of the same family, or there is none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers
from torch import nn

from megatrain.errors import ModelError
from megatrain.models.anatomy import find_layers
from megatrain.models.family import build_model
from megatrain.models.shapes import SHAPES
from megatrain.models.trials import small as module_under_test
from megatrain.models.trials.behaviour import across_documents, observe
from megatrain.models.trials.small import shrink
from tests.helpers.support import VOCABULARY, tiny_config

SPLIT: dict[str, Any] = {"mrope_section": [16, 24, 24], "rope_type": "default", "rope_theta": 1e4}
LONG: dict[str, Any] = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 48,
    "long_factor": [2.0] * 48,
}
LONG |= {"rope_theta": 1e4, "original_max_position_embeddings": 4096, "partial_rotary_factor": 1.0}

# configuration class -> what is set besides its defaults, and what the small one has
REAL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "LlamaConfig": (
        {"num_key_value_heads": 8, "rope_parameters": SPLIT, "attention_dropout": 0.1},
        {"num_hidden_layers": 2, "num_key_value_heads": 2, "attention_dropout": 0.0}
        | {"rope_parameters": SPLIT | {"mrope_section": [2, 3, 3]}},
    ),
    "Phi3Config": (
        {"rope_parameters": LONG, "pad_token_id": 31_999, "eos_token_id": [31_000, 5]},
        {"rope_parameters": LONG | {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}}
        | {"pad_token_id": 127, "eos_token_id": [24, 5]},
    ),
    "Qwen3Config": ({"head_dim": 64}, {"head_dim": 16, "hidden_size": 48}),  # 32 x 64 of 4096
    "Gemma3TextConfig": (
        {},
        {"layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 2, "sliding_window": 5}
        | {"num_attention_heads": 4, "num_key_value_heads": 2},
    ),
    "FalconConfig": ({"multi_query": True}, {"num_attention_heads": 4, "hidden_size": 64}),
    "GPT2Config": ({}, {"n_layer": 2, "n_embd": 64, "n_head": 4, "attn_pdrop": 0.0}),
    "MixtralConfig": ({}, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "DeepseekV3Config": (
        {"n_routed_experts": 16},
        {"num_hidden_layers": 5, "n_group": 2, "qk_head_dim": 48, "q_lora_rank": 16},
    ),
    "Qwen3NextConfig": (
        {"num_experts": 16},
        {"num_hidden_layers": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    ),
    "JambaConfig": ({}, {"num_hidden_layers": 13, "mamba_d_state": 16}),
    "BambaConfig": ({}, {"mamba_n_heads": 4, "mamba_d_head": 32}),
    "GPTNeoConfig": ({}, {"num_layers": 4, "attention_types": [[["global", "local"], 2]]}),
}


def small_of(config: Any) -> Any:
    model: Any = build_model(config, "auto", torch.float32)
    _, stack = find_layers(model, config.num_hidden_layers)
    return shrink(model.config, stack, model.config._attn_implementation)


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_a_real_configuration_becomes_a_small_one_of_its_family(name):
    given, expected = REAL[name]
    config = getattr(transformers, name)(**given)
    small = small_of(config)
    assert type(small) is type(config)
    assert {key: getattr(small, key) for key in expected} == expected
    model = build_model(small, "auto", torch.float32)
    assert sum(p.numel() for p in model.parameters()) < 2 << 20
    assert small.tie_word_embeddings == config.tie_word_embeddings


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "qwen3-0.6b", "llama-3.2-1b"])
def test_known_shapes_become_small(name):
    small = small_of(transformers.AutoConfig.for_model(**SHAPES[name]))
    assert (small.num_hidden_layers, small.num_key_value_heads, small.vocab_size) == (2, 2, 128)


def test_there_is_none_that_lacks_a_kind_of_layer(monkeypatch):
    """Its types of layers are said to be in its names alone, which a small model forgets."""
    config = tiny_config("gemma3", num_hidden_layers=4)
    read = type(config).from_dict

    def all_sliding(given: dict[str, Any], **more: Any) -> Any:
        types = ["sliding_attention"] * given["num_hidden_layers"]
        return read({**given, "layer_types": types}, **more)

    monkeypatch.setattr(type(config), "from_dict", all_sliding)
    with pytest.raises(ModelError, match="layers have not all kinds"):
        small_of(config)


def test_one_that_draws_random_numbers_or_has_no_finite_logits_tells_nothing(monkeypatch):
    with pytest.raises(ModelError, match="its logits are not finite"):
        observe(tiny_config("llama", rms_norm_eps=float("nan")), "sdpa")
    config = tiny_config("llama", num_hidden_layers=2)
    drawing = build_model(config, "auto", torch.float32)
    drawing.extra = nn.Dropout(0.5)
    monkeypatch.setattr(module_under_test, "build_model", Mock(return_value=drawing))
    with pytest.raises(ModelError, match="no small model: it draws random numbers"):
        small_of(config)


def test_a_document_that_is_moved_by_its_place_alone_is_noticed():
    def placed(input_ids: torch.Tensor, **_: Any) -> Any:
        places = torch.arange(input_ids.shape[1])[:, None]  # whatever positions it is given
        return SimpleNamespace(logits=nn.functional.one_hot(input_ids, VOCABULARY) + places)

    model: Any = Mock(side_effect=placed, config=tiny_config("llama"), device="cpu")
    model.modules.return_value = []
    assert across_documents(model) > 0.1
