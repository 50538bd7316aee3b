"""Engines that fail, are interrupted or are closed: nothing leaks, nothing hangs, and nothing
half-done is ever used."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from megatrain.engine import constructors
from megatrain.engine.engine import Engine
from megatrain.engine.objective import Objective
from megatrain.engine.streamer import Slot
from megatrain.errors import DivergedError, MegaTrainError, ModelError, OutOfMemory
from megatrain.memory import slab
from megatrain.memory import store as stores
from megatrain.settings import Settings
from tests.helpers.compare import differing
from tests.helpers.delays import delay, failing, interrupt, poison
from tests.helpers.runs import Trace, assert_same, run, state_of, train_engine
from tests.helpers.support import (
    Scaled,
    engine_of,
    full_batches,
    micro_batches,
    tiny_config,
    without_targets,
)

STEPS = [micro_batches(seed) for seed in range(2)]
MODES = {
    "one group": Settings(head_chunk_tokens=7),
    "two groups, sums travel": Settings(groups=2, head_chunk_tokens=7),
}


@pytest.fixture
def open_slabs(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Slabs of host memory that were made and not closed."""
    found: set[int] = set()
    make, close = slab.Slab.__init__, slab.Slab.close

    def noted_make(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        found.add(id(self))

    def noted_close(self: Any) -> None:
        close(self)
        found.discard(id(self))

    monkeypatch.setattr(slab.Slab, "__init__", noted_make)
    monkeypatch.setattr(slab.Slab, "close", noted_close)
    return found


def lanes() -> int:
    return sum(thread.name.startswith("megatrain-") for thread in threading.enumerate())


# -- making one that fails -----------------------------------------------------------------------


def no_room(*_: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("max_grad_norm", [1.0, None])
def test_an_engine_that_cannot_be_made_gives_back_what_it_had(
    max_grad_norm, open_slabs, monkeypatch
):
    before = lanes()
    with monkeypatch.context() as patch:
        patch.setattr(Slot, "__init__", no_room)
        with pytest.raises(OutOfMemory):
            engine_of("llama", max_grad_norm=max_grad_norm)
    assert (lanes(), open_slabs) == (before, set())


def test_weights_that_cannot_be_drawn_close_the_engine(open_slabs, monkeypatch):
    monkeypatch.setattr(constructors, "initialize", no_room)
    before = lanes()
    with pytest.raises(torch.OutOfMemoryError):
        Engine.from_config(tiny_config("llama"), device="cpu")
    assert (lanes(), open_slabs) == (before, set())


def test_what_cannot_be_compiled_is_refused_before_any_memory_is_taken(monkeypatch):
    monkeypatch.setattr(stores, "Slab", no_room)
    with pytest.raises(ModelError, match="cannot replay this model's dropout"):
        engine_of(tiny_config("gpt-neox", hidden_dropout=0.1), settings=Settings(compile=True))


# -- closing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_grad_norm", [1.0, None])
def test_closing_ends_all_threads_and_twice_is_once(max_grad_norm, open_slabs):
    before = lanes()
    with engine_of("llama", max_grad_norm=max_grad_norm) as engine:
        delay(engine, ["update", "upload", "download"], longest_s=0.003).train_step(STEPS[0])
        engine.close()
    assert (lanes(), open_slabs) == (before, set())


USES: dict[str, Callable[[Engine], Any]] = {
    "train_step": lambda engine: engine.train_step(STEPS[0]),
    "step": lambda engine: engine.step(),
    "weights_changed": lambda engine: engine.weights_changed(),
    "load_state": lambda engine: engine.load_state(engine.state()),
    "forward_backward": lambda engine: engine.forward_backward(STEPS[0]),
    "evaluate": lambda engine: engine.evaluate(STEPS[0]),
    "logits": lambda engine: engine.logits(STEPS[0][0]["input_ids"]),
    "generate": lambda engine: engine.generate(torch.tensor([[4, 5]]), 1),
    "iter_weights": lambda engine: list(engine.iter_weights()),
    "wait_ready": lambda engine: engine.wait_ready(0),
}


def test_a_closed_engine_says_so():
    engine = engine_of("llama")
    engine.close()
    for use in USES.values():
        with pytest.raises(MegaTrainError, match="the engine is closed; make a new one"):
            use(engine)


# -- interrupted steps ---------------------------------------------------------------------------


WHERE = [
    ("embed", 1),
    ("layer", 8),
    ("head", 2),
    ("layer", 17),
    ("embed", 5),
]


SLOW = ("upload", "download", "update")


@cache
def undisturbed(mode: str) -> Trace:
    return run(engine_of("qwen2-tied", settings=MODES[mode]), STEPS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "at", "slow"),
    [*((*where, SLOW) for where in WHERE), ("layer", 1, ()), ("layer", 10, ())],
)
@pytest.mark.parametrize("mode", MODES)
def test_a_clipped_step_that_was_interrupted_leaves_no_trace(mode, slow, part, at):
    losses = []
    with delay(engine_of("qwen2-tied", settings=MODES[mode]), slow, longest_s=0.004) as engine:
        for batches in STEPS:
            interrupt(engine, part, at)
            with pytest.raises(KeyboardInterrupt):
                engine.train_step(micro_batches(77))
            losses.append(engine.train_step(batches).loss)
        assert losses == undisturbed(mode).losses
        assert differing(undisturbed(mode).state, state_of(engine)) == []


@pytest.mark.parametrize("mode", MODES)
def test_nor_does_one_that_was_interrupted_while_the_device_computed(mode, monkeypatch):
    """All is queued by then, and the host waits for the loss."""
    with engine_of("qwen2-tied", settings=MODES[mode]) as engine:
        once = failing(Objective.mean_loss, 1, KeyboardInterrupt())
        monkeypatch.setattr(Objective, "mean_loss", once)
        with pytest.raises(KeyboardInterrupt):
            engine.train_step(micro_batches(77))
        assert_same(run(engine, STEPS), undisturbed(mode))


def after_interruption(engine: Engine) -> None:
    for use in ("train_step", "evaluate", "logits", "generate", "iter_weights", "wait_ready"):
        with pytest.raises(
            MegaTrainError,
            match=r"stopped in the middle of an update.*resume from the last checkpoint",
        ):
            USES[use](engine)


# with two, all blocks of a tied model stay on the device and nothing need be read
@pytest.mark.parametrize("layers", [2, 3])
def test_an_unclipped_step_that_was_interrupted_in_backward_ends_the_engine(layers):
    config = tiny_config("llama-tied", num_hidden_layers=layers)
    with engine_of(config, max_grad_norm=None) as engine:
        engine.train_step(STEPS[0])
        # 3 micro-batches: the last layer's gradient is complete and on its way
        interrupt(engine, "layer", 3 * layers + 4)
        with pytest.raises(KeyboardInterrupt):
            engine.train_step(STEPS[1])
        after_interruption(engine)


def test_an_unclipped_step_that_was_interrupted_before_any_update_leaves_no_trace():
    with engine_of("llama", max_grad_norm=None) as engine:
        interrupt(engine, "layer", 5)
        with pytest.raises(KeyboardInterrupt):
            engine.train_step(STEPS[0])
        assert_same(run(engine, STEPS), run(engine_of("llama", max_grad_norm=None), STEPS))


def test_an_update_that_was_interrupted_while_it_was_handed_out_ends_the_engine(monkeypatch):
    with engine_of("llama") as engine:
        engine.train_step(STEPS[0])
        engine.forward_backward(STEPS[1])
        updater = engine.parts.updater
        once = failing(updater.submit, 3, KeyboardInterrupt())
        monkeypatch.setattr(updater, "submit", once)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        after_interruption(engine)


# -- batches that cannot be right ----------------------------------------------------------------


def changed(**changes: Any) -> dict[str, Any]:
    (batch,) = full_batches(0, [(2, 8)])
    return {name: value for name, value in {**batch, **changes}.items() if value is not None}


def out_of_range(name: str, value: int) -> dict[str, Any]:
    batch = changed()
    batch[name][1, 3] = value
    return batch


BAD = {
    "no ids": (changed(input_ids=None), "micro-batch 1 has no input_ids"),
    "no labels": (changed(labels=None), "micro-batch 1 has no labels"),
    "unequal shapes": (changed(labels=torch.ones(2, 7).long()), r"\[2, 7\] int64.*\[2, 8\] int64"),
    "not whole numbers": (changed(labels=torch.zeros(2, 8)), r"labels of .* \[2, 8\] float32"),
    "no row": (changed(input_ids=torch.ones(8).long()), r"input_ids of .* are \[8\] int64"),
    "id too large": (out_of_range("input_ids", 97), "input_ids of .* hold 97, .* has 97 tokens"),
    "id negative": (out_of_range("input_ids", -1), "input_ids of micro-batch 1 hold -1"),
    "label too large": (out_of_range("labels", 1000), "labels of micro-batch 1 hold 1000"),
    "label negative": (out_of_range("labels", -1), "labels of micro-batch 1 hold -1"),
}


def test_a_batch_that_cannot_be_right_is_refused_before_anything_runs():
    with engine_of("llama") as engine:
        for batch, message in BAD.values():
            for use in (engine.train_step, engine.evaluate):
                with pytest.raises(MegaTrainError, match=message):
                    use([changed(), batch])
        assert engine.train_step([changed()]).target_tokens == 14


FULL = [full_batches(seed, [(2, 8), (1, 8), (2, 8)]) for seed in range(2)]


# -- steps that must not change the model ----------------------------------------------------------


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
