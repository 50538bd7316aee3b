"""Clipping by the global norm without stored gradients: the same bits as with them, less memory,
and nothing half done."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from megatrain.engine.engine import Engine
from megatrain.errors import DivergedError, MegaTrainError
from megatrain.losses import NextToken
from megatrain.settings import ALL, Settings
from tests.helpers.compare import differing
from tests.helpers.delays import LANES, delay, failing, poison
from tests.helpers.runs import Steps, Trace, assert_same, run, state_of
from tests.helpers.support import (
    Scaled,
    engine_of,
    full_batches,
    micro_batches,
    tiny_config,
    without_targets,
)

STEPS = [micro_batches(seed) for seed in range(4)]
FULL = [full_batches(seed, [(2, 8), (1, 8), (2, 8)]) for seed in range(3)]
TWICE = Settings(head_chunk_tokens=7, second_backward=True)
HALF_RESIDENT = replace(TWICE, resident=3, offload_activations=True)
ONCE = replace(TWICE, second_backward=False)
pytestmark = pytest.mark.usefixtures("deterministic")


def make(model: Any = "llama", settings: Settings = TWICE, **options: Any) -> Engine:
    return engine_of(model, settings=settings, **{"precision": "bfloat16", **options})


def check_equal(model: Any, settings: Settings, steps: Steps = STEPS[:3], **options: Any) -> None:
    """That a second backward under `settings` ends where stored gradients do."""
    stored = run(make(model, replace(settings, second_backward=False), **options), steps)
    assert_same(run(make(model, settings, **options), steps), stored)


@cache
def two_steps(family: str, settings: Settings, device: str = "cpu") -> Trace:
    return run(make(family, settings, device=device), FULL[:2])


# -- the same bits ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "settings", "precision", "clip"),
    [
        ("llama", TWICE, "float32", 0.5),
        ("qwen2-tied", TWICE, "bfloat16", 1e9),
        ("qwen2-tied", replace(TWICE, offload_activations=True), "bfloat16", 0.5),
        ("llama", replace(TWICE, resident=1), "bfloat16", 0.5),
        ("qwen2-tied", replace(TWICE, resident=3, offload_activations=True), "float32", 1e9),
        ("qwen2-tied", replace(TWICE, resident=ALL), "bfloat16", 0.5),
        ("llama", replace(TWICE, update_threads=1), "bfloat16", 0.5),
    ],
    ids=["fp32", "unclipped", "offloaded", "1 resident", "3 resident", "all resident", "1 thread"],
)
def test_it_changes_no_bit(family, settings, precision, clip, device):
    options = {"precision": precision, "max_grad_norm": clip, "device": device}
    check_equal(family, settings, STEPS[:2] if device == "cpu" else FULL, **options)


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore")  # of torch.compile's own
@pytest.mark.parametrize(
    ("family", "precision", "compiled"),
    [("llama", "fp8", False), ("llama", "float32", True), ("qwen2-tied", "bfloat16", True)],
)
def test_nor_on_cuda_with_fp8_products_and_compiled_layers(family, precision, compiled):
    config = tiny_config(family, num_hidden_layers=4, hidden_size=64, intermediate_size=128)
    settings = replace(TWICE, compile=compiled)
    check_equal(config, settings, FULL, precision=precision, device="cuda")


@pytest.mark.slow
@pytest.mark.parametrize("offload", [False, True])
def test_nor_where_units_drop_out(offload):
    config = tiny_config("gpt-neox", hidden_dropout=0.2, attention_dropout=0.2)
    check_equal(config, replace(TWICE, offload_activations=offload), precision="float32")


def test_nor_where_rows_are_padded_on_the_left_and_micro_batches_have_no_targets():
    steps = [[*micro_batches(0, pad_left=True), *micro_batches(1)] for _ in range(2)]
    steps[1][:1] = without_targets(steps[1][:1])
    check_equal("llama", replace(TWICE, offload_activations=True), steps, precision="float32")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch.compile's own
@pytest.mark.usefixtures("no_code_is_generated")
def test_nor_where_layers_are_compiled():
    steps = [full_batches(seed, [(2, 16)] * 2) for seed in range(2)]
    config = tiny_config("llama", num_hidden_layers=2)
    check_equal(config, replace(TWICE, compile=True), steps, precision="float32")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "slow"),
    [
        *((replace(TWICE, offload_activations=True), (lane,)) for lane in LANES),
        (TWICE, LANES),
        (replace(TWICE, resident=3, offload_activations=True), LANES),
    ],
    ids=[*LANES, "all, streamed", "all, 3 resident"],
)
def test_delays_change_no_bit(settings, slow, device):
    late = delay(make("qwen2-tied", settings, device=device), slow, longest_s=0.003)
    assert_same(run(late, FULL[:2]), two_steps("qwen2-tied", ONCE, device))


def test_evaluation_and_forgotten_slots_between_the_two_change_nothing():
    with make("qwen2-tied") as engine:
        for batches in STEPS[:2]:
            engine.forward_backward(batches)
            with pytest.raises(MegaTrainError, match="called twice"):
                engine.forward_backward(batches)
            engine.evaluate(STEPS[3])
            engine.weights_changed()
            engine.step()
        stored = run(make("qwen2-tied", ONCE), STEPS[:2])
        assert differing(state_of(engine), stored.state) == []
        engine.forward_backward(STEPS[2])  # closed between the two, it gives all back


# -- steps that must not change the model ----------------------------------------------------------

OF_BACKWARDS = (range(3), range(3, 6))  # recomputations of a layer, for three micro-batches


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "settings"),
    [
        ("loss", TWICE),
        ("loss", HALF_RESIDENT),
        ("gradient", TWICE),
        ("gradient", replace(TWICE, resident=ALL)),
        ("no target", HALF_RESIDENT),
    ],
)
def test_a_step_that_cannot_be_taken_leaves_the_state_as_it_was(what, settings, device):
    with make("llama-tied", settings, device=device) as engine:
        engine.train_step(FULL[0])
        before = state_of(engine)
        if what == "gradient":
            poison(engine, 0, OF_BACKWARDS[0])
        batches = without_targets(FULL[2]) if what == "no target" else FULL[2]
        result = engine.train_step(batches, Scaled() if what == "loss" else NextToken())
        assert result.skipped
        assert differing(state_of(engine), before) == []
        assert (engine.updates, engine.skipped) == (1, 1)
        engine.parts.passes.step -= 1
        engine.skipped -= 1
        engine.train_step(FULL[1])
        after = state_of(engine)
    expected = two_steps("llama-tied", settings, device)
    assert differing(after, expected.state) == [], "the skipped step left a trace"


@pytest.mark.parametrize(("resident", "layer"), [(0, 0), (0, 2), (ALL, 0)])
def test_a_second_gradient_that_alone_is_not_finite_ends_the_run(resident, layer):
    with make(settings=replace(TWICE, resident=resident)) as engine:
        engine.train_step(STEPS[0])
        poison(engine, layer, OF_BACKWARDS[1])
        with pytest.raises(DivergedError):
            engine.train_step(STEPS[1])
        with pytest.raises(DivergedError):
            list(engine.iter_weights())


def test_an_interrupt_before_the_first_update_loses_the_step_alone(monkeypatch):
    with make("qwen2-tied") as engine:
        engine.train_step(STEPS[0])
        engine.forward_backward(STEPS[1])
        with monkeypatch.context() as patch:
            head = failing(engine.skeleton.head, 1, KeyboardInterrupt())
            patch.setattr(engine.skeleton, "head", head)
            with pytest.raises(KeyboardInterrupt):
                engine.step()
        with pytest.raises(MegaTrainError, match="without forward_backward"):
            engine.step()
        engine.train_step(STEPS[1])
        expected = run(make("qwen2-tied"), STEPS[:2])
        assert differing(state_of(engine), expected.state) == []


def test_an_interrupt_between_updates_ends_the_run(monkeypatch):
    with make() as engine:
        engine.forward_backward(STEPS[0])
        again = failing(engine.skeleton.layer_again, 1, KeyboardInterrupt())
        monkeypatch.setattr(engine.skeleton, "layer_again", again)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        with pytest.raises(MegaTrainError, match="in the middle of an update"):
            engine.evaluate(STEPS[0])
