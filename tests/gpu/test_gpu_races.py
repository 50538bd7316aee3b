"""On CUDA: delays on every stream and in the update threads change no bit, and each wait, taken away, is missed."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.engine.engine import Engine
from megatrain.engine.streams import Event
from megatrain.settings import ALL, Settings
from tests.support import (
    NoUpdates,
    State,
    Trace,
    differing,
    engine_of,
    full_batches,
    sleeper,
    state_of,
    tiny_config,
    train_engine,
)

STEPS = [full_batches(seed, [(2, 8)] * 3) for seed in range(3)]
MODES = {
    "one group": Settings(),
    "two groups, sums on the device": Settings(groups=2, sums_on_device=ALL),
    "two groups, sums travel": Settings(groups=2),
    "front resident, end retained": Settings(resident=2, retained=2),
    "boundaries offloaded": Settings(groups=2, offload_activations=True),
    "graphs on the host": Settings(offload_activations=True, retained=1, retained_on_host=2),
    "two groups, front resident": Settings(groups=2, resident=2, sums_on_device=3, retained=ALL),
}
WHO = ("upload", "download", "fetch", "update", "compute")
pytestmark = pytest.mark.usefixtures("deterministic")


def make(mode: str = "one group", clip: float | None = 0.5) -> Engine:
    config = tiny_config("qwen2-tied", num_hidden_layers=4)
    return engine_of(
        config, device="cuda", precision="bfloat16", settings=MODES[mode], max_grad_norm=clip
    )


def gpu_sleeper(seed: int, shortest_cycles: int, longest_cycles: int) -> Callable[[], None]:
    """Occupies the current stream for a random time; the host goes on at once."""
    draw = random.Random(seed)
    return lambda: torch.cuda._sleep(draw.randint(shortest_cycles, longest_cycles))


def delay(
    engine: Engine,
    slow: Iterable[str],
    cycles: tuple[int, int] = (0, 4_000_000),
    seconds: tuple[float, float] = (0, 0.003),
) -> Engine:
    """Slow down transfers (on their streams), updates (on the host) or computation (on its stream, before every layer).

    About 2 ms at most, and 3 ms for an update, unless told otherwise.
    """
    for number, who in enumerate(slow):
        sleep = gpu_sleeper(number, *cycles)
        if who == "update":
            engine.parts.updater.delay = sleeper(number, *seconds)
        elif who == "compute":
            before_layers(engine, sleep)
        else:
            {
                "upload": engine.parts.lanes["upload"],
                "download": engine.parts.lanes["download"],
                "fetch": engine.parts.lanes["fetch"],
            }[who].delay = sleep
    return engine


def before_layers(engine: Engine, act: Callable[[], None]) -> None:
    """Call `act` before every layer's forward and recomputation."""
    layer = engine.skeleton.layer

    def acting(index: int, hidden: Any, call: Any) -> torch.Tensor:
        act()
        return layer(index, hidden, call)

    engine.skeleton.layer = acting  # type: ignore[method-assign]


def run(engine: Engine) -> tuple[Trace, State]:
    with engine:
        return train_engine(engine, STEPS), state_of(engine)


@cache
def undelayed(mode: str, clip: float | None) -> tuple[Trace, State]:
    return run(make(mode, clip))


@pytest.mark.parametrize("slow", [*((who,) for who in WHO), WHO], ids="+".join)
@pytest.mark.parametrize("clip", [0.5, None], ids=["clipped", "unclipped"])
@pytest.mark.parametrize("mode", MODES)
def test_delays_change_no_bit(mode, clip, slow):
    expected, state = undelayed(mode, clip)
    delayed, again = run(delay(make(mode, clip), slow))
    assert (delayed.losses, delayed.norms) == (expected.losses, expected.norms)
    assert differing(state, again) == []


def test_the_host_runs_ahead_of_the_gpu():
    """What the tests of slow computation rest on: when the host asks for a layer, the GPU has not finished the one before."""
    with make() as engine:
        engine.train_step(STEPS[0])
        marks: list[Any] = []
        unfinished: list[bool] = []

        def note() -> None:
            if marks:
                unfinished.append(not marks[-1].query())
            torch.cuda._sleep(20_000_000)
            marks.append(torch.cuda.Event())
            marks[-1].record()

        before_layers(engine, note)
        engine.train_step(STEPS[1])
        assert sum(unfinished) > len(unfinished) // 2, unfinished


def test_a_step_waits_for_the_gpu_only_when_all_is_computed():
    """Whoever waits in between lets the GPU run dry: it has nothing queued when the host goes on."""
    with make("two groups, sums travel") as engine:
        engine.train_step(STEPS[0])
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                engine.train_step(STEPS[1])
            finally:
                torch.cuda.set_sync_debug_mode("default")
    waits = [Path(w.filename).name for w in seen if "called a synchronizing" in str(w.message)]
    assert waits == ["engine.py", "streams.py"]  # the loss is read, then the norm


def never_wait(*_: object) -> None:
    """In the place of a wait."""


def updates_may_lag(engine: Engine) -> None:
    engine.parts.streamer.updates = NoUpdates()


def uploads_may_overtake_computation(engine: Engine) -> None:
    engine.parts.lanes["upload"].wait = never_wait  # type: ignore[method-assign,assignment]


def downloads_may_overtake_computation(engine: Engine) -> None:
    engine.parts.lanes["download"].wait = never_wait  # type: ignore[method-assign,assignment]


def computation_may_overtake(engine: Engine, skipped: str) -> None:
    wait = engine.parts.compute.wait

    def some(event: Event | None, cause: str) -> None:
        if cause != skipped:
            wait(event, cause)

    engine.parts.compute.wait = some  # type: ignore[method-assign]


def computation_may_overtake_uploads(engine: Engine) -> None:
    computation_may_overtake(engine, "upload")


def computation_may_overtake_downloads(engine: Engine) -> None:
    computation_may_overtake(engine, "download")


FAULTS = [
    (updates_may_lag, "update", "one group"),
    (uploads_may_overtake_computation, "compute", "one group"),
    (downloads_may_overtake_computation, "compute", "one group"),
    (computation_may_overtake_uploads, "upload", "one group"),
    (computation_may_overtake_downloads, "download", "one group"),
    (uploads_may_overtake_computation, "download", "two groups, sums travel"),
]


@pytest.mark.parametrize(("fault", "slow", "mode"), FAULTS, ids=lambda x: getattr(x, "__name__", x))
def test_without_its_wait_a_delay_changes_the_result(fault, slow, mode):
    expected, state = undelayed(mode, 0.5)
    with delay(make(mode), [slow], (150_000_000, 150_000_000), (0.1, 0.1)) as engine:
        fault(engine)
        broken = train_engine(engine, STEPS)
        again = state_of(engine)
        torch.cuda.synchronize()
    assert broken.losses != expected.losses or differing(state, again)
