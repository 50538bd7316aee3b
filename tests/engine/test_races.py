"""Random delays in every lane change no bit; and each wait, taken away, changes the result, so the delays do find races."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache

import pytest

from megatrain.engine.engine import Engine
from megatrain.engine.streams import Event
from megatrain.settings import ALL, Settings
from tests.support import (
    LANES,
    NoUpdates,
    State,
    Trace,
    delay,
    differing,
    engine_of,
    full_batches,
    state_of,
    take_staging_at_once,
    tiny_config,
    train_engine,
)

STEPS = [full_batches(seed, [(1, 6)] * 3) for seed in range(3)]
MODES = {
    "one group": Settings(),
    "two groups, sums on the device": Settings(groups=2, sums_on_device=ALL),
    "two groups, sums travel": Settings(groups=2),
    "front resident, end retained": Settings(resident=2, retained=2),
    "boundaries offloaded": Settings(groups=2, offload_activations=True),
    "boundaries offloaded by a codec": Settings(offload_activations=True, activations="int4"),
    "graphs on the host": Settings(offload_activations=True, retained=1, retained_on_host=2),
    "two groups, front resident": Settings(groups=2, resident=2, sums_on_device=3, retained=ALL),
}


def make(
    mode: str = "one group",
    clip: float | None = 0.5,
    family: str = "llama",
    precision: str = "bfloat16",
) -> Engine:
    config = tiny_config(family, num_hidden_layers=4)
    return engine_of(config, settings=MODES[mode], max_grad_norm=clip, precision=precision)


def run(engine: Engine) -> tuple[Trace, State]:
    with engine:
        return train_engine(engine, STEPS), state_of(engine)


@cache
def undelayed(mode: str = "one group", clip: float | None = 0.5) -> tuple[Trace, State]:
    return run(make(mode, clip))


def delayed_runs() -> Iterator[tuple[str, float | None, tuple[str, ...]]]:
    """Every mode with all lanes slow, clipped and not; and with each lane slow alone, of which half are clipped, of every mode and lane."""
    for number, mode in enumerate(MODES):
        yield from ((mode, clip, LANES) for clip in (0.5, None))
        yield from (
            (mode, None if (number + lane) % 2 else 0.5, (LANES[lane],))
            for lane in range(len(LANES))
        )


@pytest.mark.parametrize(("mode", "clip", "slow"), [*delayed_runs()])
def test_delays_change_no_bit(mode, clip, slow):
    expected, state = undelayed(mode, clip)
    delayed, again = run(delay(make(mode, clip), slow, longest_s=0.003))
    assert (delayed.losses, delayed.norms) == (expected.losses, expected.norms)
    assert differing(state, again) == []


@pytest.mark.parametrize(
    ("family", "precision"),
    [("qwen2-tied", "bfloat16"), ("falcon-7b", "float32"), ("gpt-neox", "bfloat16")],
)
def test_delays_change_no_bit_in_other_families(family, precision):
    expected, state = run(make("two groups, sums travel", family=family, precision=precision))
    delayed, again = run(
        delay(
            make("two groups, sums travel", family=family, precision=precision),
            LANES,
            longest_s=0.003,
            seed=1,
        )
    )
    assert delayed.losses == expected.losses
    assert differing(state, again) == []


def test_evaluation_and_saving_right_after_a_step_see_its_update():
    with make() as prompt, make() as late:
        late.train_step(STEPS[0])
        state_of(late)  # waits
        expected = late.evaluate(STEPS[1]).loss
        delay(prompt, ["update"], longest_s=0.02).train_step(STEPS[0])
        assert prompt.evaluate(STEPS[1]).loss == expected
        prompt.train_step(STEPS[1])
        late.train_step(STEPS[1])
        state_of(late)
        assert (
            differing(
                {name: weight.clone() for name, weight in prompt.iter_weights()},
                dict(late.iter_weights()),
            )
            == []
        )


# -- the tests above can fail -------------------------------------------------------------------------------------------------------


def never_wait(*_: object) -> None:
    """In the place of a wait."""


def updates_may_lag(engine: Engine, _: pytest.MonkeyPatch) -> None:
    engine.parts.streamer.updates = NoUpdates()


def uploads_may_lag(engine: Engine, _: pytest.MonkeyPatch) -> None:
    skip_compute_waits(engine, "upload")


def downloads_may_lag(engine: Engine, _: pytest.MonkeyPatch) -> None:
    skip_compute_waits(engine, "download")


def skip_compute_waits(engine: Engine, skipped: str) -> None:
    wait = engine.parts.compute.wait

    def some(event: Event | None, cause: str) -> None:
        if cause != skipped:
            wait(event, cause)

    engine.parts.compute.wait = some  # type: ignore[method-assign]


def uploads_ignore_other_lanes(engine: Engine, _: pytest.MonkeyPatch) -> None:
    engine.parts.lanes["upload"].wait = never_wait  # type: ignore[method-assign,assignment]


def fetches_ignore_other_lanes(engine: Engine, _: pytest.MonkeyPatch) -> None:
    engine.parts.lanes["fetch"].wait = never_wait  # type: ignore[method-assign,assignment]


def landings_are_not_awaited(_: Engine, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Event, "synchronize", never_wait)


def staging_is_taken_at_once(engine: Engine, _: pytest.MonkeyPatch) -> None:
    take_staging_at_once(engine)


@dataclass(frozen=True)
class Fault:
    """A wait that is taken away, and the conditions under which that must show."""

    inject: Callable[[Engine, pytest.MonkeyPatch], None]
    slow: tuple[str, ...]
    mode: str = "one group"
    clip: float | None = field(default=0.5)


FAULTS = [
    Fault(updates_may_lag, ("update",)),
    Fault(uploads_may_lag, ("upload",)),
    Fault(downloads_may_lag, ("download",)),
    Fault(landings_are_not_awaited, ("download",), clip=None),
    Fault(landings_are_not_awaited, ("download",), "two groups, sums travel", clip=None),
    Fault(uploads_ignore_other_lanes, ("download",), "two groups, sums travel"),
    Fault(fetches_ignore_other_lanes, ("download",), "boundaries offloaded"),
    Fault(uploads_may_lag, ("fetch",), "boundaries offloaded"),
    Fault(fetches_ignore_other_lanes, ("download",), "graphs on the host"),
    Fault(uploads_may_lag, ("fetch",), "graphs on the host"),
    Fault(downloads_may_lag, ("download",), "boundaries offloaded"),
    Fault(staging_is_taken_at_once, ("update",), clip=None),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f"{f.inject.__name__}-{f.mode}")
def test_without_its_wait_a_delay_changes_the_result(fault, monkeypatch):
    expected, state = undelayed(fault.mode, fault.clip)
    with delay(make(fault.mode, fault.clip), fault.slow, longest_s=0.03, shortest_s=0.03) as engine:
        fault.inject(engine, monkeypatch)
        broken = train_engine(engine, STEPS)
        again = state_of(engine)
    assert broken.losses != expected.losses or differing(state, again)
