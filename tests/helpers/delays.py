"""Delays in lanes, waits that are taken away, and calls that fail once: what races and
interruptions are found with."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from megatrain.engine.components import AppliedGradients
from megatrain.engine.engine import Engine

LANES = ("upload", "download", "fetch", "update")
CYCLES_PER_SECOND = 2e9  # of a GPU's clock, about


def sleeper(
    seed: int, shortest_s: float, longest_s: float, *, on_stream: bool = False
) -> Callable[..., None]:
    """A delay of random length; safe to call from any thread.

    on_stream: the current CUDA stream is occupied, and the host goes on at once.
    """
    draw, lock = random.Random(seed), threading.Lock()

    def sleep(*_: object) -> None:
        with lock:
            seconds = draw.uniform(shortest_s, longest_s)
        if on_stream:
            torch.cuda._sleep(int(seconds * CYCLES_PER_SECOND))
        else:
            time.sleep(seconds)

    return sleep


def delay(
    engine: Engine, who: Iterable[str], longest_s: float, shortest_s: float = 0.0, seed: int = 0
) -> Engine:
    """Slow these lanes down before every job, or `compute` before every layer.

    On CUDA their streams are held up; updates sleep on the host.
    """
    on_cuda = engine.device.type == "cuda"
    for number, name in enumerate(who):
        on_stream = on_cuda and name != "update"
        sleep = sleeper(seed * 1000 + number, shortest_s, longest_s, on_stream=on_stream)
        if name == "update":
            engine.parts.updater.lane.delay = sleep
        elif name == "compute":
            before_layers(engine, sleep)
        else:
            engine.parts.lanes[name].delay = sleep
    return engine


def before_layers(engine: Engine, act: Callable[[], object]) -> None:
    """Call `act` before every layer's forward and recomputation."""
    layer = engine.skeleton.layer

    def acting(*arguments: Any) -> torch.Tensor:
        act()
        return layer(*arguments)

    engine.skeleton.layer = acting  # type: ignore[method-assign,assignment]


class NoUpdates:
    """In the place of an engine's updates, for a streamer that is not to wait for any."""

    def wait_ready(self, block: int) -> None: ...


def take_staging_at_once(engine: Engine) -> None:
    """Take away the wait for the update that still reads a staging buffer of gradients."""
    sink = engine.parts.sink
    assert isinstance(sink, AppliedGradients)
    take = sink.ring.take
    sink.ring.take = lambda block: (take(block)[0], None)  # type: ignore[method-assign]


def failing(
    function: Callable[..., Any], at: int, error: BaseException, *, after: bool = False
) -> Callable[..., Any]:
    """`function`, whose `at`-th call, counted from 1, fails: instead of running, or after it."""
    calls = iter(range(1, 10**9))

    def once(*args: Any, **options: Any) -> Any:
        now = next(calls) == at
        result = None if now and not after else function(*args, **options)
        if now:
            raise type(error)(*error.args)  # a new one: its traceback holds on to what failed
        return result

    return once


def poison(engine: Engine, layer: int, backwards: range = range(10**9)) -> None:
    """Make a layer's gradients infinite in these of its recomputations, as an overflow would."""
    again, seen = engine.skeleton.layer_again, iter(range(10**9))

    def poisoned(index: int, *arguments: Any) -> torch.Tensor:
        output = again(index, *arguments)
        return output * torch.inf if index == layer and next(seen) in backwards else output

    engine.skeleton.layer_again = poisoned  # type: ignore[method-assign,assignment]
