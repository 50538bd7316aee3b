"""The memory that state takes, and how a batch may be cut."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from megatrain.engine.components import AppliedGradients
from megatrain.engine.verify import gradients_of
from megatrain.errors import MegaTrainError
from megatrain.models.trials.small import count_targets
from megatrain.optim import AdamW
from megatrain.settings import ALL, Settings
from tests.helpers.compare import apart, differing
from tests.helpers.runs import run, state_of
from tests.helpers.support import (
    Batch,
    engine_of,
    full_batches,
    micro_batches,
    tiny_config,
    without_targets,
)

STEPS = micro_batches(0)
FULL = full_batches(0, [(2, 9), (1, 7)])


# -- memory ----------------------------------------------------------------------------------------


def test_resident_blocks_take_no_host_memory():
    with (
        engine_of("llama") as streamed,
        engine_of("llama", settings=Settings(resident=2)) as mixed,
        engine_of("llama", settings=Settings(resident=ALL)) as whole,
    ):
        here = 16 * sum(layout.numel for layout in mixed.store.layouts[:2])  # four fp32 arrays
        resident = [mixed.store.array(name, b) for name in mixed.store.arrays for b in range(2)]
        assert sum(array.nbytes for array in resident) == here
        assert streamed.store.nbytes - mixed.store.nbytes == pytest.approx(here, abs=8 << 20)
        assert [mixed.store.is_resident(block) for block in range(5)] == [True] * 2 + [False] * 3
        assert whole.store.nbytes == 0


def test_a_step_of_more_micro_batches_than_planned_has_more_groups_not_larger_ones(monkeypatch):
    settings = Settings(groups=2, group_size=1, head_chunk_tokens=7)
    with engine_of("llama", settings=settings) as engine:
        begun: list[int] = []
        monkeypatch.setattr(
            engine.parts.checkpoints, "begin_group", lambda tokens, *_: begun.append(len(tokens))
        )
        engine.train_step(STEPS)
        assert begun == [1, 1, 1]
        assert differing(run(engine_of("llama"), [STEPS]).state, state_of(engine)) == []


@pytest.mark.parametrize(("precision", "kept"), [("bfloat16", 2), ("float32", 4)])
def test_without_clipping_no_model_sized_gradient_exists(precision, kept):
    """12 bytes a parameter are the weights' and the optimizer's."""
    sizes = {"num_hidden_layers": 12, "hidden_size": 256, "intermediate_size": 1024}
    config = tiny_config("llama", **sizes, num_key_value_heads=4)
    with engine_of(config, precision=precision, max_grad_norm=None) as engine:
        assert "grad" not in engine.store.arrays
        assert engine.store.nbytes == pytest.approx(12 * engine.anatomy.parameters, rel=0.1)
        assert isinstance(engine.parts.sink, AppliedGradients)
        staging = sum(buffer.nbytes for buffer in engine.parts.sink.ring.buffers)
        assert staging <= 3 * kept * max(layout.numel for layout in engine.store.layouts)
        with pytest.raises(MegaTrainError, match="use train_step"):
            engine.forward_backward(FULL)
    with engine_of(config, precision=precision) as engine:
        expected = (12 + kept) * engine.anatomy.parameters
        assert engine.store.nbytes == pytest.approx(expected, rel=0.1)


# -- how a batch is cut ----------------------------------------------------------------------------


def backward(
    batches: list[Batch], family: str = "qwen2-tied", **options: Any
) -> tuple[float, dict[str, Tensor]]:
    """(loss, gradients) of one step."""
    with engine_of(family, **options) as engine:
        return engine.forward_backward(batches).loss, gradients_of(engine)


@pytest.mark.parametrize("sizes", [(3, 3), (1, 5), (1,) * 6], ids=str)
def test_the_size_of_micro_batches_changes_only_summation_order(sizes):
    (whole,) = micro_batches(0, [(6, 11)])
    cut: list[Batch] = [
        dict(zip(whole, parts, strict=True))
        for parts in zip(*(t.split(list(sizes)) for t in whole.values()), strict=True)
    ]
    (loss, expected), (found, ours) = backward([whole], "llama"), backward(cut, "llama")
    assert found == pytest.approx(loss, rel=1e-6)
    assert apart(ours, expected, of_largest=0.0) == []


@pytest.mark.parametrize("groups", [1, 3])
def test_a_micro_batch_without_targets_adds_nothing(groups):
    settings = Settings(groups=groups, head_chunk_tokens=7)
    empty = without_targets(micro_batches(1)[:1])
    loss, expected = backward(STEPS, settings=settings)
    found, ours = backward([*STEPS, *empty], settings=settings)
    assert found == loss
    assert differing(ours, expected) == []


def test_the_loss_is_divided_by_all_targets_of_the_step_and_not_by_micro_batch():
    few, many = full_batches(0, [(1, 3), (4, 12)])
    with engine_of("llama", optimizer=AdamW(lr=0.0)) as engine:
        losses = [engine.evaluate([batch]).loss for batch in (few, many)]
        counts = [count_targets([batch]) for batch in (few, many)]
        assert abs(losses[0] - losses[1]) > 0.01
        expected = (losses[0] * counts[0] + losses[1] * counts[1]) / sum(counts)
        result = engine.forward_backward([few, many])
        assert result.loss == pytest.approx(expected, rel=1e-6)
        assert result.target_tokens == sum(counts)
