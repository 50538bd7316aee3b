"""Ranks wait for each other's rows without being stuck in it."""

from __future__ import annotations

import signal
import threading
import time
from concurrent.futures import Future
from typing import Any

import pytest

from megatrain.data.loader import Position, StepBatch
from megatrain.errors import DataError
from megatrain.heartbeat import beat, total
from megatrain.recipes.ranks.rendezvous import awaiting
from megatrain.recipes.signals import Stopped, StopRequest
from megatrain.world import World
from tests.ranks import run_ranks


def batch(*lengths: int) -> StepBatch:
    return StepBatch([], lengths, 0.0, Position(1, 0, len(lengths)))


def done(found: StepBatch | Exception) -> Future[StepBatch]:
    future = Future[StepBatch]()
    future.set_exception(found) if isinstance(found, Exception) else future.set_result(found)
    return future


def all_cases(world: World) -> dict[str, Any]:
    """What a rank finds; of two the first has its rows each time."""
    own, found = StopRequest(), dict[str, Any]()
    await_ = awaiting(world, own.of_all(world), lambda: 1)
    late, before = Future[StepBatch](), total()

    def works() -> None:
        for _ in range(6):
            beat()
            time.sleep(0.1)
        late.set_result(batch(3, 4))

    threading.Thread(target=works).start()
    given = done(batch(3, 4)) if world.is_first else late
    found["rows"] = await_(given).lengths
    found["signs of life"] = total() - before - 6

    def told(given: Future[StepBatch]) -> str:
        with pytest.raises(DataError) as raised:
            await_(given)
        return str(raised.value)

    found["others"] = told(done(batch(3, 4 + world.rank)))
    found["fails"] = told(done(batch(3) if world.is_first else DataError("row 5 is bad")))
    own.signal = None if world.is_first else signal.SIGTERM
    with pytest.raises(Stopped):
        await_(given if world.is_first else Future())
    return found


def test_two_agree_on_rows_errors_and_requests_to_stop(tmp_path):
    first, second = run_ranks(2, all_cases, tmp_path)
    assert first.pop("signs of life") > 1, "it shows those of the one that it waits for"
    assert second.pop("signs of life") == 0
    assert first == second
    assert first["rows"] == (3, 4)
    assert first["others"].startswith("ranks 0 and 1 have different rows for the next step: the so")
    assert first["fails"] == "row 5 is bad"
