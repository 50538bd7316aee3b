"""Recomputation replays dropout exactly, every mask has a seed of its own, and the caller's random
state is left alone."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch

from megatrain.engine.rollout.draw import mix
from megatrain.engine.verify import gradients_of
from megatrain.settings import Settings
from tests.helpers.compare import apart
from tests.helpers.plain import gradients_without_recompute, named_gradients
from tests.helpers.support import engine_of, full_batches, plain_model, tiny_config, without_targets

DROPOUTS = {
    "gpt-neox": {"hidden_dropout": 0.3, "attention_dropout": 0.3},
    "falcon-7b-untied": {"hidden_dropout": 0.3, "attention_dropout": 0.3},
    "gpt2": {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3},
    "mixtral": {"router_jitter_noise": 0.3},
}
BATCHES = full_batches(0)
SEED = 11
CASES: list[Any] = [("cpu", *case) for case in product(DROPOUTS, [1, 2])]
CASES.append(pytest.param("cuda", "gpt-neox", 1, marks=pytest.mark.cuda))


@pytest.mark.slow
@pytest.mark.parametrize(("device", "family", "groups"), CASES)
def test_gradients_equal_those_of_the_same_masks_without_recomputation(device, family, groups):
    config = tiny_config(family, **DROPOUTS[family])
    # on CUDA every kernel of attention draws other masks
    attention, loose = ("auto", 1) if device == "cpu" else ("eager", 10)
    model = plain_model(config, attention=attention, device=device)
    options = {"attention": attention, "settings": Settings(groups=groups), "device": device}
    kept = torch.random.fork_rng(devices=[0] if device == "cuda" else [])
    with engine_of(config, seed=SEED, **options) as engine, kept:
        for step in range(2):  # the weights do not change: dropout alone makes the steps differ
            model.zero_grad()
            expected = gradients_without_recompute(model, BATCHES, engine, step)
            loss = engine.forward_backward(BATCHES).loss
            assert loss == pytest.approx(expected, rel=loose * 1e-6)
            differ = apart(gradients_of(engine), named_gradients(model), loose * 1e-5, 0.0)
            engine.step(lr=0.0)
            rounding = ("query_key_value.bias", "c_attn.bias")
            names = (name for name in differ if not name.partition(":")[0].endswith(rounding))
            assert [*names] == []


def test_every_mask_has_a_seed_of_its_own_and_recomputation_repeats_it(monkeypatch):
    drawn: list[int] = []

    def noting(*numbers: int) -> int:
        drawn.append(mix(*numbers))
        return drawn[-1]

    monkeypatch.setattr("megatrain.engine.step.mix", noting)
    config = tiny_config("gpt-neox", **DROPOUTS["gpt-neox"])
    with engine_of(config, seed=SEED) as engine:
        drawn.clear()
        for _ in range(3):
            engine.train_step(BATCHES)
    blocks = config.num_hidden_layers + 2
    counts = Counter(drawn)
    expected = {
        mix(SEED, step, block, number): 1 if block == blocks - 1 else 2
        for step, block, number in product(range(3), range(blocks), range(2))
    }
    assert len(expected) == 3 * blocks * 2
    assert counts == expected  # the head runs once, all others forward and again in backward


def test_a_skipped_step_draws_new_masks_next_time():
    config = tiny_config("gpt-neox", **DROPOUTS["gpt-neox"])
    with engine_of(config) as engine:
        first = engine.forward_backward(BATCHES).loss
    with engine_of(config) as engine:
        engine.train_step(without_targets(BATCHES))
        second = engine.forward_backward(BATCHES).loss
    assert first != second


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_the_caller_s_random_state_is_left_alone(dropout, device):
    generators = [torch.get_rng_state]
    generators += [torch.cuda.get_rng_state] if device == "cuda" else []
    with engine_of(tiny_config("gpt-neox", hidden_dropout=dropout), device=device) as engine:
        torch.manual_seed(5)
        before = [state() for state in generators]
        for use in (
            lambda: engine.train_step(BATCHES),
            lambda: engine.evaluate(BATCHES),
            lambda: engine.logits(BATCHES[0]["input_ids"]),
            lambda: engine.generate(BATCHES[0]["input_ids"][:1].tolist(), max_new_tokens=2),
        ):
            use()
            assert all(map(torch.equal, before, [state() for state in generators]))
