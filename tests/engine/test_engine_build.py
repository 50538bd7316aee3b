"""Options that an engine cannot honour are refused in a sentence that says what to write."""

from __future__ import annotations

from typing import Any

import pytest

from megatrain.engine.engine import Engine
from megatrain.errors import ConfigError
from tests.helpers.compare import differing
from tests.helpers.runs import state_of
from tests.helpers.support import full_batches, tiny_config

BAD: list[tuple[dict[str, Any], str]] = [
    ({"device": "gpu"}, "device: 'gpu' is unknown; choose auto, cpu, cuda or cuda:N"),
    ({"device": "mps"}, "device: 'mps' is unknown"),
    ({"device": "cuda:99"}, "device: cuda:99 was asked for, but PyTorch sees"),
    ({"precision": "fp4"}, "precision: 'fp4' is not built; choose one of auto, bfloat16, float32"),
    (
        {"max_grad_norm": 0.0},
        r"max_grad_norm: 0\.0 is out of range; give a number above 0, or None",
    ),
    ({"max_grad_norm": float("nan")}, "max_grad_norm: nan is out of range"),
]


def test_an_option_that_cannot_be_honoured_is_refused():
    for options, message in BAD:
        with pytest.raises(ConfigError, match=message):
            Engine.from_config(tiny_config("llama"), **{"device": "cpu", **options})


def test_a_launcher_s_processes_do_not_train_a_model_each(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"WORLD_SIZE is 2, .*; call megatrain\.train, which"):
        Engine.from_config(tiny_config("llama"), device="cpu")
    monkeypatch.delenv("WORLD_SIZE")
    for name in ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID"):
        monkeypatch.setenv(name, "2")
    with pytest.raises(ConfigError, match="SLURM_NTASKS is 2"):
        Engine.from_config(tiny_config("llama"), device="cpu")
    monkeypatch.setenv("SLURM_NTASKS", "1")
    Engine.from_config(tiny_config("llama"), device="cpu").close()


def test_any_integer_is_a_seed():
    states = []
    for seed in (-1, 0, 2**63, 10**30):
        with Engine.from_config(tiny_config("llama"), device="cpu", seed=seed) as engine:
            engine.train_step(full_batches(0, [(1, 4)]))
            states.append(state_of(engine, ["weight"]))
    assert all(differing(states[0], other) for other in states[1:])
