"""Which parameters decay: those that transformers' Trainer would let decay, in every family."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, Trainer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from megatrain.models.anatomy import decaying
from megatrain.models.skeleton import Skeleton
from tests.helpers.support import tiny_config

FAMILIES = 165  # that can be built in two layers of default sizes, of transformers 5.23's 189


def of_trainer(model: Any) -> set[str]:
    return set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]


def built() -> Iterator[tuple[str, nn.Module]]:
    """Every family whose defaults make a model, without memory."""
    for family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        kind: Any = CONFIG_MAPPING[family]
        try:
            with torch.device("meta"):
                yield family, AutoModelForCausalLM.from_config(kind(num_hidden_layers=2))
        except Exception:  # noqa: BLE001  whatever a family's code does with its own defaults
            continue


@pytest.mark.slow
def test_they_are_the_trainers_in_every_family_that_can_be_built():
    found = {family: decaying(model) ^ of_trainer(model) for family, model in built()}
    assert {family: names for family, names in found.items() if names} == {}
    assert len(found) >= FAMILIES


@pytest.mark.parametrize(
    ("family", "changes", "decay", "not_decay"),
    [
        ("cohere", {"use_qk_norm": True}, "", "layers.0.self_attn.q_norm.weight"),
        ("gpt-oss", {}, "layers.0.self_attn.sinks", "layers.0.mlp.experts.down_proj_bias"),
        ("qwen3-next", {}, "layers.0.linear_attn.A_log", "layers.0.linear_attn.norm.weight"),
        ("gpt2", {}, "h.0.attn.c_attn.weight", "h.0.ln_1.weight"),
    ],
)
def test_a_layout_says_so_and_muon_s_matrices_decay(family, changes, decay, not_decay):
    skeleton = Skeleton(tiny_config(family, **changes))
    specs = [spec for block in skeleton.anatomy.blocks for spec in block.layout.tensors]
    of = {spec.name.partition(".")[2]: spec for spec in specs}
    assert not (of[not_decay].decay or of[not_decay].hidden)
    assert not decay or of[decay].decay
    assert all(spec.decay for spec in specs if spec.hidden)
