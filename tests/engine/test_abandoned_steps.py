"""Steps that are interrupted, skipped or diverge: nothing half-done is ever used, and what can go
on goes on to the bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from megatrain.engine.engine import Engine
from megatrain.engine.objective import Objective
from megatrain.errors import DivergedError, MegaTrainError
from megatrain.losses import NextToken
from megatrain.settings import ALL, Settings
from tests.engine.test_lifecycle import USES
from tests.helpers.compare import differing
from tests.helpers.delays import delay, failing, poison
from tests.helpers.runs import Trace, run, state_of
from tests.helpers.support import (
    Scaled,
    engine_of,
    full_batches,
    micro_batches,
    tiny_config,
    without_targets,
)

STEPS = [micro_batches(seed) for seed in range(2)]
FULL = [full_batches(seed, [(2, 8), (1, 8), (2, 8)]) for seed in range(3)]
FREE: dict[str, Any] = {"max_grad_norm": None}
BF16: dict[str, Any] = {"precision": "bfloat16"}


def dials(**given: Any) -> dict[str, Any]:
    return {"settings": Settings(head_chunk_tokens=7, **given)}


TWICE = dials(second_backward=True) | BF16
HALF_RESIDENT = dials(second_backward=True, resident=3, offload_activations=True) | BF16
OFFLOAD = dials(offload_activations=True, retained=1) | BF16
GRAPHS = dials(offload_activations=True, retained=1, retained_on_host=1) | BF16
pytestmark = pytest.mark.usefixtures("deterministic")


@cache
def undisturbed(model: str, full: bool = False, **options: Any) -> Trace:
    return run(engine_of(model, **options), FULL[:2] if full else STEPS)


# -- interrupted -----------------------------------------------------------------------------------

PLACES: dict[str, Callable[[Engine], object]] = {
    "skeleton": lambda engine: engine.skeleton,
    "passes": lambda engine: engine.parts.passes,
    "gradients": lambda engine: engine.parts.gradients,
    "updater": lambda engine: engine.parts.updater,
    "download": lambda engine: engine.parts.lanes["download"],
    "objective": lambda engine: Objective,
}


def interrupted_step(engine: Engine, where: str, at: int, *, after: bool = False) -> None:
    """Take a step whose `at`-th call of a method fails, as by Ctrl-C: before it runs, or after."""
    place, _, method = where.partition(".")
    owner = PLACES[place](engine)
    once = failing(getattr(owner, method), at, KeyboardInterrupt(), after=after)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, method, once)
        with pytest.raises(KeyboardInterrupt):
            engine.train_step(micro_batches(77))


SLOW = ("upload", "download", "update")
QUEUED = "objective.mean_loss"  # all is queued by then, and the host waits for the loss
SECOND_PASS = "passes._turn"  # the first call is of the first pass
LATE = [("embed", 1), ("layer", 8), ("head", 2), ("layer", 17), ("embed", 5)]
# model, options, lanes that are slow, what fails, in which call, before or after it
Interruption = tuple[str, dict[str, Any], tuple[str, ...], str, int, bool]
IN_GROUPS = ("qwen2-tied", dials(groups=2))
QUICK: list[Interruption] = [
    ("qwen2-tied", dials(), (), QUEUED, 1, False),
    (*IN_GROUPS, (), QUEUED, 1, False),
    ("llama", FREE, (), "skeleton.layer", 5, False),  # before any update
    ("qwen2-tied", TWICE, (), SECOND_PASS, 2, False),
    # between a ring's stretch and the note of what frees it; the first begins the group
    *(
        ("llama", options, (), "download.submit", 5, after)
        for options in (GRAPHS, OFFLOAD)
        for after in (False, True)
    ),
]
MORE: list[Interruption] = [
    *(
        (*mode, slow, f"skeleton.{part}", at, False)
        for mode in (("qwen2-tied", dials()), IN_GROUPS)
        for slow, places in ((SLOW, LATE), ((), [("layer", 1), ("layer", 10)]))
        for part, at in places
    ),
    # wherever backward stopped: what had been asked for is nobody's any more
    *(
        ("llama", options, (), "gradients.add", at, False)
        for options in (GRAPHS, OFFLOAD)
        for at in (1, 3, 5)
    ),
]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "case", [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE)]
)
def test_an_interrupted_step_leaves_no_trace(case):
    model, options, slow, where, at, after = case
    losses = []
    with delay(engine_of(model, **options), slow, longest_s=0.004) as engine:
        for batches in STEPS:
            interrupted_step(engine, where, at, after=after)
            losses.append(engine.train_step(batches).loss)
        assert losses == undisturbed(model, **options).losses
        assert differing(undisturbed(model, **options).state, state_of(engine)) == []


@pytest.mark.parametrize(
    ("layers", "options", "where", "at"),
    [
        # 3 micro-batches: the last layer's gradient is complete and on its way. With two layers
        # all blocks of a tied model stay on the device and nothing need be read
        (2, FREE, "skeleton.layer", 10),
        (3, FREE, "skeleton.layer", 13),
        (3, {}, "updater.submit", 3),
        (3, TWICE, "skeleton.layer_again", 10),
    ],
)
def test_one_that_was_interrupted_between_updates_ends_the_engine(layers, options, where, at):
    with engine_of(tiny_config("llama-tied", num_hidden_layers=layers), **options) as engine:
        engine.train_step(STEPS[0])
        interrupted_step(engine, where, at)
        reason = r"stopped in the middle of an update.*resume from the last checkpoint"
        for use in ("train_step", "evaluate", "logits", "generate", "iter_weights", "wait_ready"):
            with pytest.raises(MegaTrainError, match=reason):
                USES[use](engine)


def test_a_step_without_targets_takes_over_nothing_of_one_that_was_interrupted():
    with engine_of("llama", **TWICE) as engine:
        interrupted_step(engine, QUEUED, 1)
        assert engine.train_step(without_targets(STEPS[0])).skipped


def test_evaluation_and_forgotten_slots_between_two_passes_change_nothing():
    with engine_of("qwen2-tied", **TWICE) as engine:
        for batches in STEPS:
            engine.forward_backward(batches)
            with pytest.raises(MegaTrainError, match="called twice"):
                engine.forward_backward(batches)
            engine.evaluate(FULL[2])
            engine.weights_changed()
            engine.step()
        with pytest.raises(MegaTrainError, match="without forward_backward"):
            engine.step()
        expected = undisturbed("qwen2-tied", **dials(), **BF16)
        assert differing(state_of(engine), expected.state) == []
        engine.forward_backward(FULL[2])  # closed between the two, it gives all back


# -- skipped ---------------------------------------------------------------------------------------

LOSSES = {"loss is nan": Scaled(float("nan")), "loss is infinite": Scaled()}
Skipped = tuple[str, dict[str, Any]]
OF_GRADIENTS: list[Skipped] = [
    (f"gradient of layer {layer}", options)  # the last and the first that arrives
    for layer in (0, 2)
    for options in ({}, BF16)
]
OF_SECOND_PASSES: list[Skipped] = [
    ("loss is infinite", TWICE),
    ("loss is infinite", HALF_RESIDENT),
    ("gradient of layer 0", TWICE),
    ("gradient of layer 0", dials(second_backward=True, resident=ALL) | BF16),
    ("gradient of layer 0", dials(second_backward=1) | BF16),
    ("no target", HALF_RESIDENT),
]
SKIPPED: list[Any] = [("cpu", *case) for case in OF_GRADIENTS]
SKIPPED += [("cpu", "no target", clip) for clip in ({}, FREE)]
SKIPPED += [("cpu", "loss is infinite", FREE)]
SKIPPED += [
    pytest.param("cpu", *case, marks=pytest.mark.slow)
    for case in (("loss is nan", BF16), ("loss is nan", FREE | BF16), ("loss is infinite", {}))
]
SKIPPED += [pytest.param("cpu", *case, marks=pytest.mark.slow) for case in OF_SECOND_PASSES]
SKIPPED += [
    pytest.param("cuda", *case, marks=pytest.mark.cuda)
    for case in (*OF_GRADIENTS, *OF_SECOND_PASSES)
]


@pytest.mark.parametrize(("device", "what", "options"), SKIPPED)
def test_a_step_that_cannot_be_taken_leaves_the_state_as_it_was(device, what, options):
    options = {"device": device, **options}
    batches = without_targets(FULL[2]) if what == "no target" else FULL[2]
    with engine_of("llama-tied", **options) as engine:
        engine.train_step(FULL[0])
        before = state_of(engine)
        if what.startswith("gradient"):
            poison(engine, int(what[-1]), range(3))
        result = engine.train_step(batches, LOSSES.get(what, NextToken()))
        assert result.skipped
        if what == "no target":
            assert (result.loss, result.target_tokens, result.grad_norm) == (0.0, 0, 0.0)
            assert engine.evaluate(batches).target_tokens == 0
        assert differing(before, state_of(engine)) == []
        assert (engine.updates, engine.skipped) == (1, 1)
        engine.train_step(FULL[1])
        after = state_of(engine)
    expected = undisturbed("llama-tied", full=True, **options)
    assert differing(after, expected.state) == [], "the skipped step left a trace"


# -- diverged --------------------------------------------------------------------------------------

SECOND_ONLY = range(3, 6)  # recomputations of a layer, for three micro-batches
DIVERGED: list[Any] = [
    ("cpu", FREE, 1, range(10**9)),
    pytest.param("cuda", FREE, 1, range(10**9), marks=pytest.mark.cuda),
    ("cpu", TWICE, 0, SECOND_ONLY),
    ("cpu", TWICE, 2, SECOND_ONLY),
    ("cpu", dials(second_backward=True, resident=ALL) | BF16, 0, SECOND_ONLY),
    ("cpu", dials(second_backward=1) | BF16, 0, SECOND_ONLY),
]


@pytest.mark.parametrize(("device", "options", "layer", "backwards"), DIVERGED)
def test_one_that_was_taken_half_ends_the_run_and_is_never_saved(device, options, layer, backwards):
    with engine_of("llama", device=device, **options) as engine:
        engine.train_step(FULL[0])
        poison(engine, layer, backwards)
        with pytest.raises(DivergedError, match="not finite"):
            engine.train_step(FULL[1])
        for use in ("iter_weights", "train_step"):
            with pytest.raises(DivergedError):
                USES[use](engine)
