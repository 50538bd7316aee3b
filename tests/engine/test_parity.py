"""The engine against a plain PyTorch loop: every family, clipping active, weight decay, a schedule, padding, unequal micro-batches."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from megatrain.optim import AdamW
from megatrain.settings import ALL, Settings
from tests.support import (
    FAMILIES,
    MORE_FAMILIES,
    Batch,
    cosine,
    count_targets,
    differing,
    distance,
    engine_of,
    follow_in_fp32,
    full_batches,
    gradients_of,
    load,
    masters_of,
    micro_batches,
    plain_gradients,
    plain_loss,
    plain_model,
    tiny_config,
    train_engine,
    train_plain,
)

STEPS = 20
MAX_NORM = 0.5
DECAY = 0.1
RATES = cosine(STEPS, 1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_twenty_steps_equal_a_plain_loop(family):
    config = tiny_config(family)
    steps = [micro_batches(seed) for seed in range(STEPS)]
    plain = train_plain(plain_model(config), steps, RATES, weight_decay=DECAY, max_norm=MAX_NORM)
    twin = train_plain(
        plain_model(config), steps, RATES, weight_decay=DECAY, max_norm=MAX_NORM, backwards=True
    )
    with engine_of(config, optimizer=AdamW(weight_decay=DECAY), max_grad_norm=MAX_NORM) as engine:
        ours = train_engine(engine, steps, RATES)
    assert min(plain.norms) > MAX_NORM, "clipping must have been active in every step"
    assert ours.losses == pytest.approx(plain.losses, rel=1e-6)
    assert ours.norms == pytest.approx(plain.norms, rel=1e-5)
    assert ours.weights.keys() == plain.weights.keys()
    for name, weight in plain.weights.items():
        bound = max(1e-5, 10 * distance(twin.weights[name], weight))
        assert distance(ours.weights[name], weight) <= bound, name


@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES])
def test_gradients_equal_autograd_with_padding_on_either_side(family):
    config = tiny_config(family)
    assert_gradients_equal_autograd(config, [*micro_batches(1), *micro_batches(2, pad_left=True)])


def packed(documents: Sequence[int], pad: int = 0) -> Batch:
    """One row of documents of these lengths, told apart by their positions alone, and padding that a mask hides."""
    tokens = sum(documents) + pad
    (batch,) = full_batches(3, [(1, tokens)])
    batch["position_ids"] = torch.cat([torch.arange(n) for n in (*documents, pad)])[None]
    if pad:
        batch["attention_mask"] = (torch.arange(tokens) < tokens - pad).long()[None]
        batch["labels"][0, -pad:] = -100
    return batch


@pytest.mark.parametrize("pad", [0, 3], ids=["full", "padded"])
@pytest.mark.parametrize("family", ["llama", "mistral-sliding", "opt", "gpt2"])
def test_packed_rows_are_read_as_transformers_reads_them(family, pad):
    """It keeps documents apart by their positions, but only where there is no mask."""
    assert_gradients_equal_autograd(tiny_config(family), [packed([5, 4, 3], pad)])


@pytest.mark.parametrize("family", ["llama", "falcon-rw", "gemma2", "opt"])
def test_a_row_of_nothing_but_padding_adds_nothing(family):
    (batch,) = micro_batches(1, [(3, 9)])
    batch["attention_mask"][1] = 0
    batch["labels"][1] = -100
    assert_gradients_equal_autograd(tiny_config(family), [batch])


def assert_gradients_equal_autograd(config: Any, batches: list[Batch]) -> None:
    model = plain_model(config)
    plain_gradients(model, batches, count_targets(batches))
    with engine_of(config, model=model) as engine:
        engine.forward_backward(batches)
        ours = gradients_of(engine)
    largest = max(float(p.grad.norm()) for p in model.parameters() if p.grad is not None)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert (
            float((ours[name] - parameter.grad).norm())
            <= 1e-5 * float(parameter.grad.norm()) + 1e-6 * largest
        ), name


def test_without_clipping_training_equals_a_plain_loop_too():
    config = tiny_config("llama-tied")
    steps = [micro_batches(seed) for seed in range(6)]
    plain = train_plain(
        plain_model(config), steps, RATES[:6], weight_decay=DECAY, max_norm=float("inf")
    )
    with engine_of(config, optimizer=AdamW(weight_decay=DECAY), max_grad_norm=None) as engine:
        ours = train_engine(engine, steps, RATES[:6])
    assert ours.losses == pytest.approx(plain.losses, rel=1e-6)
    assert (
        max(distance(ours.weights[name], weight) for name, weight in plain.weights.items()) <= 1e-5
    )


def test_evaluation_is_the_plain_mean_over_targets_and_changes_nothing():
    config = tiny_config("falcon-40b", hidden_dropout=0.5)  # evaluation mode has no dropout
    batches = micro_batches(3)
    model = plain_model(config).eval()
    with torch.no_grad():
        expected = plain_loss_value(model, batches)
    with engine_of(config, model=model) as engine:
        before = {name: weight.clone() for name, weight in engine.iter_weights()}
        result = engine.evaluate(batches)
        assert result.loss == pytest.approx(expected, rel=1e-6)
        assert result.target_tokens == count_targets(batches)
        assert differing(before, dict(engine.iter_weights())) == []


def plain_loss_value(model: nn.Module, batches: list[Batch]) -> float:
    return float(sum(plain_loss(model, batch) for batch in batches)) / count_targets(batches)


def test_greedy_generation_equals_transformers():
    config = tiny_config("qwen3")
    model = plain_model(config).eval()
    prompt = torch.tensor([[5, 9, 3, 44]])
    generate: Any = model.generate
    rows = generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=None)
    expected = rows[0, 4:].tolist()
    with engine_of(config, model=model) as engine:
        assert engine.generate(prompt, 8) == expected
        assert (
            engine.generate(prompt, 8, eos_token_ids=[expected[2]])
            == expected[: expected.index(expected[2]) + 1]
        )


# -- bfloat16 with fp32 master weights ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "settings"),
    [("qwen2-tied", Settings()), ("falcon-40b", Settings(groups=2, sums_on_device=ALL))],
)
def test_bfloat16_follows_a_plain_fp32_loop_fed_with_the_same_gradients(family, settings):
    config = tiny_config(family)
    with engine_of(
        config,
        precision="bfloat16",
        optimizer=AdamW(weight_decay=DECAY),
        max_grad_norm=MAX_NORM,
        settings=settings,
    ) as engine:
        start = {name: master.clone() for name, master in masters_of(engine).items()}
        expected = follow_in_fp32(engine, cosine(10, 1e-3))
        for name, master in masters_of(engine).items():
            assert distance(master, expected[name]) <= 1e-6, name
            assert distance(master - start[name], expected[name] - start[name]) <= 1e-3, (
                name
            )  # and so the updates themselves


@pytest.mark.parametrize("family", ["llama", "falcon-7b"])
def test_bfloat16_gradients_are_as_exact_as_those_of_a_plain_bfloat16_model(family):
    config = tiny_config(family)
    batches = micro_batches(0)
    rounded = plain_model(config, dtype=torch.bfloat16)
    exact = copy.deepcopy(rounded).float()
    for model in (rounded, exact):
        plain_gradients(model, batches, count_targets(batches))
    with engine_of(config, model=rounded, precision="bfloat16") as engine:
        engine.forward_backward(batches)
        ours = gradients_of(engine)
    theirs = dict(rounded.named_parameters())
    for name, parameter in exact.named_parameters():
        assert parameter.grad is not None
        gradient = theirs[name].grad
        assert gradient is not None
        assert (
            distance(ours[name], parameter.grad) <= 2 * distance(gradient, parameter.grad) + 0.01
        ), name


def test_updates_at_a_rate_that_vanishes_in_bfloat16_are_kept():
    config = tiny_config("llama")
    with engine_of(config, precision="bfloat16", optimizer=AdamW(weight_decay=0.0)) as engine:
        load(engine, plain_model(config))
        before = {name: master.clone() for name, master in masters_of(engine).items()}
        rounded = {name: weight.clone() for name, weight in engine.iter_weights()}
        for step in range(3):
            engine.train_step(micro_batches(step), lr=1e-6)
        name = "model.layers.1.mlp.down_proj.weight"
        moved = (masters_of(engine)[name] - before[name]).abs()
        assert (moved > 0).float().mean() > 0.99
        assert 1e-6 < moved.median() < 4e-6  # Adam's step is about lr
        same = (dict(engine.iter_weights())[name] == rounded[name]).float().mean()
        assert same > 0.95, (
            "this learning rate should be too small for bf16 weights, or the test shows nothing"
        )
