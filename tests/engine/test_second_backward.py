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
from tests.helpers.delays import failing, poison
from tests.helpers.runs import Trace, run, state_of
from tests.helpers.support import (
    Scaled,
    engine_of,
    full_batches,
    micro_batches,
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


@cache
def two_steps(family: str, settings: Settings, device: str = "cpu") -> Trace:
    return run(make(family, settings, device=device), FULL[:2])


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
