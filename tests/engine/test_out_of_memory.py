"""A GPU that is too small ends a run with a sentence, not with a traceback of the allocator."""

from __future__ import annotations

import pytest
import torch

from megatrain.errors import OutOfMemory
from megatrain.planner.cost.footprint import LiveBytes
from tests.support import engine_of, full_batches


def fail(*_: object) -> None:
    raise torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has 79 GiB"
    )


@pytest.mark.parametrize("part", ["layer", "embed", "head"])
def test_a_step_that_does_not_fit_names_what_and_how_to_shrink_it(part, monkeypatch):
    with engine_of("llama") as engine:
        monkeypatch.setattr(engine.skeleton, part, fail)
        remedy = r"a step's activations; .*train\.micro_batch_tokens.*Tried to allocate 2\.00 GiB"
        with pytest.raises(OutOfMemory, match=remedy):
            engine.train_step(full_batches(0))
        with pytest.raises(OutOfMemory, match="an evaluation's activations"):
            engine.evaluate(full_batches(0))


def test_a_smaller_batch_may_be_tried_while_the_error_is_still_at_hand(monkeypatch):
    """Its traceback leads to every activation of the step that failed."""
    calls, large = iter(range(100)), full_batches(0, [(4, 32)] * 2)
    with engine_of("llama") as engine, LiveBytes() as live:
        layer = engine.skeleton.layer
        monkeypatch.setattr(
            engine.skeleton, "layer", lambda *args: layer(*args) if next(calls) < 8 else fail()
        )
        try:
            engine.train_step(large)
        except OutOfMemory:
            assert live.live == 0
            monkeypatch.setattr(engine.skeleton, "layer", layer)
            assert not engine.train_step(full_batches(0, [(1, 4)])).skipped
        else:
            pytest.fail("it fits")
