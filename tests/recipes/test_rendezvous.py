"""Ranks that are started again in the store of those that died, or of which some do not come."""

from __future__ import annotations

import math
import os
import resource
import signal
import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed

from megatrain.data.loader import StepBatch
from megatrain.data.rows import Position
from megatrain.errors import DataError, MegaTrainError
from megatrain.heartbeat import beat, total
from megatrain.machine.launcher import job_of, port_of
from megatrain.planner.job import ImageTokens
from megatrain.recipes.ranks import liveness, rendezvous
from megatrain.recipes.ranks.liveness import LastWords, OtherFailed
from megatrain.recipes.ranks.rendezvous import (
    Sealed,
    Wait,
    awaiting,
    fresh_part,
    meeting_store,
)
from megatrain.recipes.signals import Stopped, StopRequest
from megatrain.world import World, decode, encode
from tests.helpers.commands import wait_for
from tests.helpers.ranks import Started, run_ranks

SOON_S = 20.0


def met(
    store: Any, rank: int, size: int, seconds: float = SOON_S, secret: bytes = b"ours"
) -> Sealed:
    wait = Wait(timedelta(seconds=seconds), "here:1")
    sign = f"of {rank}", f"said by {rank}"
    return fresh_part(Sealed(store, secret, "job"), rank, size, wait, sign)


def test_each_start_has_a_part_of_the_store_for_itself():
    store, size = distributed.HashStore(), 3  # type: ignore[attr-defined]
    with ThreadPoolExecutor(size) as ranks:
        for start in range(3):
            # the second comes in the end: what it left before is there
            found = [ranks.submit(met, store, rank, size) for rank in (0, 2, 1)]
            first, *others = (one.result() for one in found)
            assert not first.check(["failed"])
            said = [one.get(f"of {rank}") for one in (first, *others) for rank in range(size)]
            assert said == size * [f"said by {rank}" for rank in range(size)]
            first.set("failed", f"of start {start}")
            assert [part.get("failed") for part in others] == 2 * [f"of start {start}"]


def test_who_lacks_the_secret_is_not_there_whatever_he_writes_or_repeats():
    store = distributed.HashStore()  # type: ignore[attr-defined]
    with ThreadPoolExecutor(3) as ranks:
        stranger = ranks.submit(met, store, 1, 2, 2.0, b"another's")
        time.sleep(0.5)
        late = ranks.submit(met, store, 1, 2)
        first, second = met(store, 0, 2), late.result()
        with pytest.raises(RuntimeError, match="the first rank did not come"):
            stranger.result()
    raw, said = first.store, "of 1"
    raw.set("failed", '[0, "host", "finished well", 0, 0]')
    raw.set("all", "here")
    raw.set("repeated", raw.get(said).decode())  # a sealed word, under another name
    raw.set(said, "garbage")
    assert [second.get(key) for key in ("failed", "all", "repeated", said)] == [None] * 4
    assert not second.check(["failed"])
    assert second.first("failed", "mine") == second.get("failed") == "mine"
    assert first.first("failed", "later") == "mine"
    again = distributed.HashStore()  # type: ignore[attr-defined]
    again.set(
        "hello/1", store.get("hello/1").decode()
    )  # the first word of a start before, said by nobody
    with pytest.raises(RuntimeError, match=r"ranks \[1\] did not come"):
        met(again, 0, 2, 0.3)
    code = LastWords.read('[1, "host", "stopped", 1, 0]').exit_code
    assert code != 0, "nobody ends well by failing"


def test_a_job_of_slurm_has_a_port_of_its_own():
    def task(job: str) -> dict[str, str]:
        return {"SLURM_PROCID": "0", "SLURM_JOB_ID": job, "SLURM_STEP_ID": "0"}

    ports = {port_of(job_of(task(str(job)))) for job in range(100)}
    assert len(ports) > 95 and all(10_000 <= port < 30_000 for port in ports)
    assert job_of({**task("7"), "WORLD_SIZE": "2"}) == "", "torchrun's"


def test_messages_are_what_was_sent_and_run_nothing():
    sent = [
        *(None, True, 3, 0.1, math.nan, math.inf, "text", b"\0\xff", Path("a/b"), date(2026, 1, 2)),
        *((1, ("a", [2])), {3, 4}, {1: "one", ("a", 2): {"dict": []}}, Position(1, 2, 3)),
        *(np.arange(6.0).reshape(2, 3), np.float64(0.5), np.int64(7)),
        *(torch.ones(2, 3, dtype=torch.bfloat16), torch.tensor(4.0), torch.zeros(0)),
        *(ImageTokens(0.25, 0.5, 64.0), OtherFailed("as it says", 7)),
    ]
    found = decode(encode(sent))
    for one, other in zip(sent, found, strict=True):
        assert repr(one if not isinstance(one, np.generic) else one.item()) == repr(other)
        assert isinstance(other, type(one)) or isinstance(one, np.generic)
    assert (str(found[-1]), found[-1].exit_code) == ("as it says", 7)
    strange = ["{", '{"object": ["os", "system", {}]}', '{"object": ["megatrain.world", "os", {}]}']
    strange += ['{"kind": 1}', '{"tensor": ["load", [1], {"bytes": ""}]}', '{"tuple": 1}']
    for said in strange:
        with pytest.raises(MegaTrainError, match="a message of another rank is broken"):
            decode(said.encode())
    with pytest.raises(TypeError, match="a message cannot have a function"):
        encode([len, met][1:])


@pytest.mark.parametrize(
    ("rank", "words"), [(0, r"ranks \[1\] did not come"), (1, "the first rank did not come")]
)
def test_who_does_not_come_is_named(rank, words):
    store = distributed.HashStore()  # type: ignore[attr-defined]
    with ThreadPoolExecutor(2) as ranks:  # of a start before
        list(ranks.map(met, 2 * [store], (0, 1), 2 * [2]))
    with pytest.raises(RuntimeError, match=words):
        met(store, rank, 2, 0.2)


def test_a_stranger_at_the_address_is_not_waited_for_longer(capfd):
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        host, port = stranger.getsockname()
        wait = Wait(timedelta(seconds=0.2), "here:1")
        with pytest.raises(RuntimeError, match="the first rank did not come to here:1"):
            meeting_store(host, port, 1, 2, wait)
    wait_for(lambda: all(each.name != "megatrain-rendezvous" for each in threading.enumerate()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("missing", "said", "number", "code"),
    [
        (2, "waiting for ranks [2] at ", signal.SIGTERM, 75),
        (0, "waiting for the first rank at ", signal.SIGINT, 130),
    ],
)
def test_who_waits_says_for_whom_and_ends_when_asked(
    project, finished_project, monkeypatch, missing, said, number, code
):
    monkeypatch.setattr(rendezvous, "SAYS_AFTER_S", 2.0)  # the other one has come by then

    def first(rank: int) -> None:
        if rank == missing:
            os._exit(0)

    started = Started(3, "train cfg.yaml device=cpu", first=first)
    speaker, *others = [rank for rank in range(3) if rank != missing]
    wait_for(lambda: said in started.said()[speaker])
    for rank in (speaker, *others):
        os.kill(started.ranks[rank].pid, number)
    expected = [0 if rank == missing else code for rank in range(3)]
    assert started.wait(5.0) == expected, started.said()
    assert started.said()[speaker].count("waiting for") == 1
    assert not (project / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("dies", [0, 1])
def test_one_that_dies_while_they_connect_is_not_waited_for(
    project, finished_project, monkeypatch, dies
):
    """The library would wait for it for ten minutes."""
    monkeypatch.setattr(liveness, "STORE_TIMEOUT", timedelta(seconds=2))
    monkeypatch.setattr(liveness, "BEATS_EVERY_S", 0.1)
    connect = distributed.init_process_group

    def first(rank: int) -> None:
        def connected(*given: Any, **named: Any) -> None:
            Path(f"connects-{rank}").touch()
            if rank == dies:
                wait_for(lambda: all(Path(f"connects-{other}").exists() for other in range(3)))
                os.kill(os.getpid(), signal.SIGKILL)
            connect(*given, **named)

        pytest.MonkeyPatch().setattr(distributed, "init_process_group", connected)

    started = Started(3, "train cfg.yaml device=cpu", first=first)
    expected = [-signal.SIGKILL if rank == dies else 1 for rank in range(3)]
    assert started.wait(SOON_S) == expected, started.said()
    assert any(
        f"error: rank {dies} on {socket.gethostname()} " in said for said in started.said()
    ), started.said()
    assert not (project / "run").exists()


# -- barrier ---------------------------------------------------------------------------------------


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


def test_the_soft_limit_of_open_files_is_raised_for_sockets():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
    try:
        rendezvous.allow_sockets()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
