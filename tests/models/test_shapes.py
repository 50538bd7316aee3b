"""Named shapes are the models of those names."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megatrain.models.shapes import SHAPES, set_depth

KINDS = 4  # layers, after which all kinds come again

PARAMETERS = {  # as published, in millions
    "qwen2.5-0.5b": 494,
    "qwen2.5-1.5b": 1777,  # untied
    "qwen2.5-3b": 3086,
    "qwen2.5-7b": 7616,
    "qwen2.5-14b": 14770,
    "qwen2.5-32b": 32764,
    "qwen2.5-72b": 72706,
    "qwen3-0.6b": 596,
    "qwen3-1.7b": 1721,
    "qwen3-4b": 4022,
    "qwen3-8b": 8191,
    "qwen3-14b": 14768,
    "qwen3-32b": 32762,
    "llama-3.2-1b": 1236,
    "llama-3.2-3b": 3213,
    "llama-3-8b": 8030,
    "llama-3-70b": 70554,
    "mistral-7b": 7248,
    "smollm2-135m": 135,
    "smollm2-1.7b": 1711,
    "qwen3-30b-a3b": 30532,
    "qwen3.5-35b-a3b": 34661,
    "gpt-oss-20b": 20915,
    "gpt-oss-120b": 116829,
}


@pytest.mark.parametrize("name", sorted(SHAPES.keys() - {"tiny"}))
def test_a_shape_has_the_parameters_of_its_model(name):
    config = AutoConfig.for_model(**SHAPES[name])
    layers = config.num_hidden_layers
    set_depth(config, KINDS)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    some = sum(weight.numel() for weight in model.model.layers.parameters())
    whole = sum(weight.numel() for weight in model.parameters())
    found = whole - some + some * layers / KINDS
    assert round(found / 1e6) == PARAMETERS[name]
