"""Random delays everywhere change no bit; and each wait, taken away, changes the result, so the
delays do find races."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch

from megatrain.engine.engine import Engine
from megatrain.engine.streamer import StoredWeights
from megatrain.engine.streams import Event
from megatrain.settings import ALL, Settings
from tests.helpers.compare import differing
from tests.helpers.delays import LANES, NoUpdates, delay, take_staging_at_once
from tests.helpers.runs import Trace, assert_same, run, state_of, train_engine
from tests.helpers.support import engine_of, full_batches, tiny_config

STEPS = {
    device: [full_batches(seed, [shape] * 3) for seed in range(steps)]
    for device, shape, steps in (("cpu", (1, 6), 2), ("cuda", (2, 8), 3))
}
MODES = {
    "one group": Settings(),
    "two groups, sums on the device": Settings(groups=2, sums_on_device=ALL),
    "two groups, sums travel": Settings(groups=2),
    "front resident, end retained": Settings(resident=2, retained=2),
    "boundaries offloaded": Settings(groups=2, offload_activations=True),
    "boundaries offloaded by a codec": Settings(offload_activations=True, activations="int4"),
    "graphs on the host": Settings(offload_activations=True, retained=1, retained_on_host=2),
    "two groups, front resident": Settings(groups=2, resident=2, sums_on_device=3, retained=ALL),
    "gradients twice": Settings(second_backward=True, offload_activations=True),
    "gradients of two layers twice": Settings(second_backward=2, offload_activations=True),
    "gradients twice, resident": Settings(second_backward=True, resident=3),
}
# they use all lanes
WITH_ONE_SLOW = ("two groups, sums travel", "graphs on the host", "gradients twice")
WHO = (*LANES, "compute")
Inject = Callable[[Engine, pytest.MonkeyPatch], None]
pytestmark = pytest.mark.usefixtures("deterministic")


def make(
    mode: str = "one group",
    clip: float | None = 0.5,
    device: str = "cpu",
    family: str = "qwen2-tied",
    precision: str = "bfloat16",
) -> Engine:
    config, settings = tiny_config(family, num_hidden_layers=4), MODES[mode]
    options: Any = {"max_grad_norm": clip, "precision": precision, "device": device}
    return engine_of(config, settings=settings, **options)


@cache
def undelayed(mode: str, clip: float | None, device: str) -> Trace:
    return run(make(mode, clip, device), STEPS[device])


def delayed_runs() -> Iterator[Any]:
    """Every mode with all slow, and some with each alone; half of either are clipped."""
    for number, mode in enumerate(MODES):
        twice = MODES[mode].second_backward > 0
        alone = [(slow,) for slow in WHO] if mode in WITH_ONE_SLOW else []
        for other, slow in enumerate([WHO, *alone]):
            clip = 0.5 if twice or (number + max(other - 1, 0)) % 2 == 0 else None
            yield pytest.param(mode, clip, slow, marks=[pytest.mark.slow] * twice)


@pytest.mark.parametrize(("mode", "clip", "slow"), [*delayed_runs()])
def test_delays_change_no_bit(mode, clip, slow, device):
    delayed = run(delay(make(mode, clip, device), slow, longest_s=0.003), STEPS[device])
    assert_same(delayed, undelayed(mode, clip, device))


# -- the tests above can fail ----------------------------------------------------------------------


def never_wait(*_: object) -> None:
    """In the place of a wait."""


def updates_may_lag(engine: Engine, _: pytest.MonkeyPatch) -> None:
    source = engine.parts.streamer.source
    assert isinstance(source, StoredWeights)
    source.updates = NoUpdates()


def compute_skips(cause: str) -> Inject:
    def inject(engine: Engine, patch: pytest.MonkeyPatch) -> None:
        wait = engine.parts.compute.wait
        some = lambda event, why: None if why == cause else wait(event, why)  # noqa: E731
        patch.setattr(engine.parts.compute, "wait", some)

    return inject


def lane_skips(name: str) -> Inject:
    def inject(engine: Engine, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(engine.parts.lanes[name], "wait", never_wait)

    return inject


def landings_are_not_awaited(_: Engine, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Event, "synchronize", never_wait)


def staging_is_taken_at_once(engine: Engine, _: pytest.MonkeyPatch) -> None:
    take_staging_at_once(engine)


@dataclass(frozen=True)
class Fault:
    """A wait that is taken away, and where that must show. On a CPU compute is never late."""

    inject: Inject
    slow: str
    mode: str = "one group"
    clip: float | None = 0.5
    devices: tuple[str, ...] = ("cpu",)


BOTH, CUDA = ("cpu", "cuda"), ("cuda",)
FAULTS = [
    Fault(updates_may_lag, "update", devices=BOTH),
    Fault(compute_skips("upload"), "upload", devices=BOTH),
    Fault(compute_skips("download"), "download", devices=BOTH),
    Fault(lane_skips("upload"), "download", "two groups, sums travel", devices=BOTH),
    Fault(lane_skips("upload"), "compute", devices=CUDA),
    Fault(lane_skips("download"), "compute", devices=CUDA),
    Fault(landings_are_not_awaited, "download", clip=None),
    Fault(landings_are_not_awaited, "download", "two groups, sums travel", clip=None),
    Fault(lane_skips("fetch"), "download", "boundaries offloaded"),
    Fault(compute_skips("upload"), "fetch", "boundaries offloaded"),
    Fault(lane_skips("fetch"), "download", "graphs on the host"),
    Fault(compute_skips("upload"), "fetch", "graphs on the host"),
    Fault(compute_skips("download"), "download", "boundaries offloaded"),
    Fault(staging_is_taken_at_once, "update", clip=None),
]
ON_DEVICES = [
    pytest.param(fault, device, marks=[pytest.mark.cuda] if device == "cuda" else [])
    for device in BOTH
    for fault in FAULTS
    if device in fault.devices
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "device"),
    ON_DEVICES,
    ids=lambda x: f"{x.inject.__qualname__}-{x.slow}-{x.mode}" if isinstance(x, Fault) else x,
)
def test_without_its_wait_a_delay_changes_the_result(fault, device, monkeypatch):
    """On a busy machine a lane may have to be held up for longer until others overtake it."""
    assert any(result_changes(fault, device, late_s, monkeypatch) for late_s in (0.01, 0.04, 0.5))


def result_changes(fault: Fault, device: str, late_s: float, monkeypatch: Any) -> bool:
    expected = undelayed(fault.mode, fault.clip, device)
    engine = delay(make(fault.mode, fault.clip, device), [fault.slow], late_s, late_s)
    with engine, monkeypatch.context() as patch:
        fault.inject(engine, patch)
        broken = train_engine(engine, STEPS[device])
        state = state_of(engine)
        if device == "cuda":
            torch.cuda.synchronize()
    return bool(broken.losses != expected.losses or differing(state, expected.state))
