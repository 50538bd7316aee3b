"""Engines that fail or are closed leak nothing and do not hang; and batches that are refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatrain.engine import constructors
from megatrain.engine.engine import Engine
from megatrain.engine.streamer import Slot
from megatrain.errors import ConfigError, MegaTrainError, ModelError, OutOfMemory
from megatrain.memory import slab
from megatrain.memory import store as stores
from megatrain.settings import Settings
from tests.helpers.compare import differing
from tests.helpers.delays import delay
from tests.helpers.runs import state_of
from tests.helpers.support import (
    engine_of,
    full_batches,
    micro_batches,
    tiny_config,
)

STEPS = [micro_batches(seed) for seed in range(2)]


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
@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [
        (Slot, "__init__", OutOfMemory),  # while parts are opened
        (constructors, "initialize", torch.OutOfMemoryError),  # while weights are drawn
    ],
)
def test_an_engine_that_cannot_be_made_gives_back_what_it_had(
    owner, name, error, max_grad_norm, open_slabs, monkeypatch
):
    before = lanes()
    monkeypatch.setattr(owner, name, no_room)
    with pytest.raises(error):
        Engine.from_config(tiny_config("llama"), device="cpu", max_grad_norm=max_grad_norm)
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
    "generate": lambda engine: engine.generate([[4, 5]], max_new_tokens=1),
    "iter_weights": lambda engine: list(engine.iter_weights()),
    "wait_ready": lambda engine: engine.wait_ready(0),
}


def test_a_closed_engine_says_so():
    engine = engine_of("llama")
    engine.close()
    for use in USES.values():
        with pytest.raises(MegaTrainError, match="the engine is closed; make a new one"):
            use(engine)


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


# -- options that cannot be honoured ---------------------------------------------------------------

OPTIONS: list[tuple[dict[str, Any], str]] = [
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
    for options, message in OPTIONS:
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
