"""Device memory does not grow with depth: what the engine keeps there, and what a step needs at its
peak beside its activation checkpoints."""

from __future__ import annotations

from functools import cache
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import megatrain as mt
from megatrain.engine.components import AppliedGradients
from megatrain.engine.engine import Engine
from megatrain.errors import MegaTrainError, OutOfMemory
from megatrain.planner.cost.footprint import LiveBytes
from megatrain.schedule import own_sums, slot_sizes, sum_buffers, summed_blocks
from megatrain.settings import ALL, Settings
from tests.helpers.compare import differing
from tests.helpers.runs import run, state_of
from tests.helpers.support import Batch, engine_of, full_batches, micro_batches, tiny_config

DEPTHS = (4, 12)
BATCHES = full_batches(0, [(2, 16), (1, 16)])
TOKENS = sum(batch["input_ids"].numel() for batch in BATCHES)
MODES: dict[str, dict[str, Any]] = {
    "one group": {},
    "two groups, sums travel": {"settings": Settings(groups=2, head_chunk_tokens=7)},
    "gradients twice": {"settings": Settings(second_backward=True, head_chunk_tokens=7)},
}


def device_bytes(engine: Engine) -> int:
    """Bytes of everything the engine keeps on the device, activations apart."""
    gradients = engine.parts.gradients
    buffers = [slot.flat for slot in engine.parts.streamer.slots]
    buffers += [
        buffer.flat for buffer in (*gradients._own.values(), *gradients._ring, gradients._staging)
    ]
    slots = {tensor.untyped_storage().data_ptr() for tensor in buffers}
    for parameters in engine.parts.passes.parameters:
        assert {p.untyped_storage().data_ptr() for p in parameters} <= slots, (
            "a parameter that is no view of a slot"
        )
    return sum(buffer.nbytes for buffer in buffers)


@cache
def measure(family: str, mode: str, depth: int) -> tuple[int, int]:
    """(bytes that the engine keeps on the device, peak bytes of a step beyond them)."""
    with engine_of(tiny_config(family, num_hidden_layers=depth), **MODES[mode]) as engine:
        engine.train_step(BATCHES)
        with LiveBytes() as live:
            engine.train_step(BATCHES)
        return device_bytes(engine), live.peak


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "mode"), [*(("llama", mode) for mode in MODES), ("qwen2-tied", "one group")]
)
def test_device_memory_less_boundary_activations_is_the_same_for_any_depth(family, mode):
    kept = {measure(family, mode, depth)[0] for depth in DEPTHS}
    assert len(kept) == 1
    tokens = 32 if mode == "two groups, sums travel" else TOKENS  # of one group at a time
    boundary = tokens * 32 * 4  # hidden states in float32
    peaks = {depth: measure(family, mode, depth)[1] - depth * boundary for depth in DEPTHS}
    assert len(set(peaks.values())) == 1, peaks
    assert 0 < peaks[4] < 4 << 20


def test_the_engine_s_buffers_are_those_of_the_schedule():
    for family in ["llama", "qwen2-tied"]:
        for mode in [*MODES, "two groups, sums stay"]:
            stay = {"settings": Settings(groups=2, sums_on_device=3)}
            with engine_of(family, **MODES.get(mode, stay)) as engine:
                settings, tied = engine.settings, engine.anatomy.embed_feeds_head
                numels, groups = [layout.numel for layout in engine.store.layouts], settings.groups
                slots = slot_sizes(numels, 0, tied)
                own = own_sums(summed_blocks(len(numels), groups, 0, settings.sums_on_device), tied)
                sums = sum(numels[:own]) + sum(sum_buffers(numels[own:], travel=groups > 1))
                weights = sum(slots.layers) + sum(slots.edges) + max(numels)
                assert device_bytes(engine) == 4 * (weights + sums)  # in float32


@pytest.mark.slow
def test_nothing_of_a_step_stays_behind():
    with engine_of("llama") as engine:
        engine.train_step(BATCHES)
        with LiveBytes() as live:
            for seed in range(3):
                engine.train_step(micro_batches(seed))
        assert live.live == 0


@pytest.mark.slow
def test_evaluation_keeps_no_boundaries():
    def peak(depth: int, batches: list[Batch]) -> int:
        with engine_of(tiny_config("llama", num_hidden_layers=depth)) as engine:
            engine.evaluate(batches)
            with LiveBytes() as live:
                engine.evaluate(batches)
            return int(live.peak)

    assert peak(4, BATCHES) == peak(16, BATCHES)


def test_host_bytes_are_those_of_the_table_in_the_design():
    for precision, clip, mode, per_parameter in [
        ("bfloat16", 1.0, "one group", 14),
        ("bfloat16", None, "one group", 12),
        ("bfloat16", 1.0, "gradients twice", 12),
        ("float32", 1.0, "one group", 16),
        ("float32", None, "one group", 12),
        ("float32", 1.0, "gradients twice", 12),
    ]:
        with engine_of("llama", precision=precision, max_grad_norm=clip, **MODES[mode]) as engine:
            numel = sum(layout.numel for layout in engine.store.layouts)
            arrays = sum(
                engine.store.array(name, block.index).nbytes
                for name in engine.store.arrays
                for block in engine.anatomy.blocks
            )
            assert arrays == per_parameter * numel


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


SMALL = micro_batches(0)


def test_a_step_of_more_micro_batches_than_planned_has_more_groups_not_larger_ones(monkeypatch):
    settings = Settings(groups=2, group_size=1, head_chunk_tokens=7)
    with engine_of("llama", settings=settings) as engine:
        begun: list[int] = []
        monkeypatch.setattr(
            engine.parts.checkpoints, "begin_group", lambda tokens: begun.append(len(tokens))
        )
        engine.train_step(SMALL)
        assert begun == [1, 1, 1]
        assert differing(run(engine_of("llama"), [SMALL]).state, state_of(engine)) == []


@pytest.mark.parametrize(("precision", "kept"), [("bfloat16", 2), ("float32", 4)])
def test_without_clipping_gradients_are_staged_and_train_step_alone_updates(precision, kept):
    with engine_of("llama", precision=precision, max_grad_norm=None) as engine:
        assert "grad" not in engine.store.arrays
        assert isinstance(engine.parts.sink, AppliedGradients)
        staging = sum(buffer.nbytes for buffer in engine.parts.sink.ring.buffers)
        assert staging <= 3 * kept * max(layout.numel for layout in engine.store.layouts)
        with pytest.raises(MegaTrainError, match="use train_step"):
            engine.forward_backward(BATCHES)


# -- the heap of malloc ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("room", "bound"), [(4.0, False), (1.5, True)])
def test_malloc_is_bound_where_memory_is_short(monkeypatch, room, bound):
    bound_heap = Mock()
    monkeypatch.setattr("megatrain.engine.constructors.bound_heap", bound_heap)
    sizes: dict[str, Any] = {"tokens_per_step": 32, "seq_len": 16, "device": "cpu"}
    with mt.Engine.from_config(tiny_config("llama"), **sizes) as engine:
        assert engine.plan is not None
        planned = engine.plan.host_bytes
    bound_heap.reset_mock()
    memory = {"host": int(planned * room)}
    mt.Engine.from_config(tiny_config("llama"), memory=memory, **sizes).close()
    assert bound_heap.called == bound


def fail(*_: object) -> None:
    raise torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has 79 GiB"
    )


# -- too little of it ------------------------------------------------------------------------------


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
