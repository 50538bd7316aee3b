"""What an engine cannot be built with is refused in a sentence that says what to write instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatrain.engine.engine import Engine
from megatrain.errors import ConfigError
from megatrain.settings import Settings
from tests.support import differing, state_of, tiny_config

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "device of no kind": (
        {"device": "gpu"},
        "device: 'gpu' is unknown; choose auto, cpu, cuda or cuda:N",
    ),
    "device not built": ({"device": "mps"}, "device: 'mps' is unknown"),
    "device not there": ({"device": "cuda:99"}, "device: cuda:99 was asked for, but PyTorch sees"),
    "precision": (
        {"precision": "fp4"},
        "precision: 'fp4' is not built; choose one of auto, bfloat16, float32",
    ),
    "clip of zero": (
        {"max_grad_norm": 0.0},
        r"max_grad_norm: 0\.0 is out of range; give a number above 0, or None",
    ),
    "clip of nothing": ({"max_grad_norm": float("nan")}, "max_grad_norm: nan is out of range"),
}


@pytest.mark.parametrize("fault", BAD)
def test_an_option_that_cannot_be_honoured_is_refused(fault):
    options, message = BAD[fault]
    with pytest.raises(ConfigError, match=message):
        Engine.from_config(tiny_config("llama"), **{"device": "cpu", **options})


@pytest.mark.parametrize("field", ["groups", "head_chunk_tokens", "update_threads"])
def test_settings_count_from_one(field):
    zero: dict[str, Any] = {field: 0}
    with pytest.raises(
        ConfigError, match=f"{field}: 0 is out of range; it must be a whole number of at least 1"
    ):
        Settings(**zero)


def test_any_integer_is_a_seed():
    states = []
    for seed in (-1, 0, 2**63, 10**30):
        with Engine.from_config(tiny_config("llama"), device="cpu", seed=seed) as engine:
            engine.train_step(
                [
                    {
                        "input_ids": torch.ones(1, 4, dtype=torch.long),
                        "labels": torch.ones(1, 4, dtype=torch.long),
                    }
                ]
            )
            states.append(state_of(engine, ["weight"]))
    assert all(differing(states[0], other) for other in states[1:])
