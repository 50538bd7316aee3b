"""Calls out of order, and steps that must not change the model: with nothing to learn from, or
with what is not finite."""

from __future__ import annotations

import pytest

from megatrain.errors import DivergedError
from tests.compare import differing
from tests.delays import poison
from tests.runs import run, state_of, train_engine
from tests.support import Scaled, engine_of, full_batches, micro_batches, without_targets

STEPS = [micro_batches(seed) for seed in range(2)]
FULL = [full_batches(seed, [(2, 8), (1, 8), (2, 8)]) for seed in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factor", "precision"), [(float("nan"), "bfloat16"), (float("inf"), "float32")]
)
@pytest.mark.parametrize("clip", [1.0, None])
def test_a_loss_that_is_not_finite_leaves_the_state_as_it_was(clip, precision, factor):
    with engine_of("llama-tied", precision=precision, max_grad_norm=clip) as engine:
        engine.train_step(STEPS[0])
        before = state_of(engine)
        assert engine.train_step(STEPS[1], Scaled(factor)).skipped
        assert differing(before, state_of(engine)) == []
        assert (engine.updates, engine.skipped) == (1, 1)
        engine.train_step(STEPS[1])
        after = state_of(engine)
    expected = run(engine_of("llama-tied", precision=precision, max_grad_norm=clip), STEPS)
    assert differing(after, expected.state) == [], "the skipped step left a trace"


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("layer", [0, 2])  # the last and the first whose gradient arrives
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_gradient_that_is_not_finite_leaves_the_state_as_it_was(precision, layer, device):
    with engine_of("llama-tied", precision=precision, device=device) as engine:
        engine.train_step(FULL[0])
        before = state_of(engine)
        poison(engine, layer)
        assert engine.train_step(FULL[1]).skipped
        assert differing(before, state_of(engine)) == []
        assert (engine.updates, engine.skipped) == (1, 1)


def test_without_clipping_it_ends_the_run_and_is_never_saved(device):
    with engine_of("llama", max_grad_norm=None, device=device) as engine:
        engine.train_step(FULL[0])
        poison(engine, 1)
        with pytest.raises(DivergedError, match="not finite"):
            engine.train_step(FULL[1])
        with pytest.raises(DivergedError):
            list(engine.iter_weights())
        with pytest.raises(DivergedError):
            engine.train_step(FULL[0])


@pytest.mark.parametrize("clip", [1.0, None])
def test_a_step_without_targets_is_counted_and_skipped(clip):
    empty = without_targets(STEPS[0])
    with engine_of("llama", max_grad_norm=clip) as engine:
        train_engine(engine, STEPS[1:])
        before = state_of(engine)
        result = engine.train_step(empty)
        assert (result.loss, result.target_tokens, result.grad_norm) == (0.0, 0, 0.0)
        assert result.skipped
        assert differing(before, state_of(engine)) == []
        assert (engine.updates, engine.skipped) == (1, 1)
        assert engine.evaluate(empty).target_tokens == 0
