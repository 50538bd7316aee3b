"""`train` and `resume` on several ranks: the run of one, and none outlives another."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from torch import distributed

from megatrain.config import load_config
from megatrain.heartbeat import may_end_here
from megatrain.recipes import loop
from megatrain.recipes.ranks import liveness
from megatrain.recipes.state import Run
from megatrain.reporting.words import human_bytes
from megatrain.storage.checkpoint import read_about
from tests.helpers.commands import (
    evaluations_of,
    make_project,
    small_windows,
    steps_of,
    wait_for,
    write_jsonl,
)
from tests.helpers.once import runs_are_quick
from tests.helpers.ranks import Started
from tests.recipes.same_run import CLOCK, same_run
from tests.recipes.test_preference_runs import judged, pairs

KEYS = {
    "precision": "float32",
    "device": "cpu",
    "train.rows_per_step": 6,
}
SOON_S = 20.0


@pytest.fixture(autouse=True)
def looked_after_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "BEATS_EVERY_S", 0.1)


@pytest.fixture
def silent_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "SILENT_S", 2.0)


@pytest.fixture(autouse=True)
def imported(finished_project: Path) -> None:
    """What a run imports and finds out once, before ranks are forked."""


def train(*changes: str) -> str:
    """The command line of a run."""
    keys = KEYS | dict(change.split("=") for change in changes)
    return " ".join(["train cfg.yaml", *(f"{key}={value}" for key, value in keys.items())])


def at_steps(action: Callable[[Run], object]) -> None:
    """In a rank's own process: called before every step."""
    made = loop.train_step

    def train_step(run: Run, *given: Any) -> None:
        action(run)
        made(run, *given)

    pytest.MonkeyPatch().setattr(loop, "train_step", train_step)


def slowly(rank: int) -> None:
    """Steps of all ranks take a while."""
    at_steps(lambda _: time.sleep(0.1))


def trained_to(step: int) -> bool:
    return Path("run/metrics.jsonl").exists() and any(
        row["step"] >= step for row in steps_of(Path("run"))
    )


@pytest.mark.slow
@pytest.mark.parametrize(("method", "rows"), [("dpo", pairs), ("kto", judged)])
def test_answers_and_their_reference_are_shared_out(project, megatrain, monkeypatch, method, rows):
    write_jsonl(project / "rows.jsonl", rows())
    line = train(f"method={method}", "train.max_steps=4", "train.learning_rate=1e-3")
    for output, run in {
        "alone": lambda: megatrain(f"{line} output=alone"),
        "run": lambda: Started(2, line).wait() == [0, 0],
    }.items():
        monkeypatch.setenv("MEGATRAIN_CACHE", str(project / output / "cache"))
        assert run()
    assert_steps_agree(Path("run"), Path("alone"), "loss", "grad_norm")
    held_out = [
        {name: value for name, value in evaluations_of(Path(run))[-1].items() if name not in CLOCK}
        for run in ("run", "alone")
    ]
    assert held_out[0] == pytest.approx(held_out[1], rel=1e-4, abs=1e-6)


def sums_kept(run: Path) -> object:
    """What a run goes on with, if it goes on with as many ranks."""
    return read_about(run / "last")["state"].get("sums_on_device")


def assert_steps_agree(run: Path, other: Path, *names: str) -> None:
    for name in names:
        found, expected = ([row[name] for row in steps_of(each)] for each in (run, other))
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-7), name


@pytest.mark.slow
def test_two_ranks_train_as_one_and_either_goes_on(project, megatrain):
    keys = "train.schedule=constant", "train.groups=2", "train.warmup=9"
    started, together = Started(2, train("train.max_steps=4", *keys)), Path("run")
    assert started.wait() == [0, 0]
    assert (project / "rank-1.log").read_text() == ""  # the first one speaks
    planned = json.loads((together / "plan.json").read_text())["totals"]["host"]["need"]
    of_host = human_bytes(steps_of(together)[-1]["host_bytes"]), human_bytes(planned)
    assert "host memory {}, planned {}".format(*of_host) in " ".join(started.said()[0].split())
    assert {row["slowest_rank"] for row in steps_of(together)} <= {0, 1}
    assert isinstance(sums_kept(together), int)
    said = megatrain(f"resume {together} train.max_steps=6").err
    assert "2 ranks before and 1 now: sums are added in another order from here on" in said
    assert sums_kept(together) is None  # one rank's order does not depend on it
    megatrain(train("output=alone", "train.max_steps=6", *keys))
    assert_steps_agree(together, Path("alone"), "loss", "grad_norm", "lr", "target_tokens")
    held_out = [evaluations_of(run)[-1]["eval_loss"] for run in (together, Path("alone"))]
    assert held_out[0] == pytest.approx(held_out[1], rel=1e-5)
    lines = (together / "train.log").read_text().splitlines()
    assert sum("step 3/4" in line for line in lines) == 1
    warned = [line for line in lines if "train.learning_rate 0.01 is never reached" in line]
    assert warned and not any("rank 1" in line for line in warned)


@pytest.mark.slow
def test_two_that_share_sequences_train_as_one_and_that_goes_on(project, megatrain):
    """One resumes in whole sequences what two have begun in pieces."""
    keys = "train.max_steps=4", "train.schedule=constant", "train.micro_batch_tokens=255"
    assert Started(2, train(*keys, "train.context_parallel=2")).wait() == [0, 0]
    log = Path("run/train.log").read_text()
    assert "2 GPUs to a sequence" in log
    assert load_config("run/config.resolved.yaml").train.micro_batch_tokens == 255
    megatrain("resume run train.max_steps=6 train.context_parallel=1")
    megatrain(train("output=alone", "train.max_steps=6", *keys[1:]))
    assert_steps_agree(Path("run"), Path("alone"), "loss", "grad_norm", "lr", "target_tokens")
    held_out = [evaluations_of(Path(run))[-1]["eval_loss"] for run in ("run", "alone")]
    assert held_out[0] == pytest.approx(held_out[1], rel=1e-5)


def counting(rank: int) -> None:
    """Count the main thread's messages to other ranks from step to step."""
    found, gather = list[int](), distributed.all_gather

    def counted(*given: Any, **named: Any) -> Any:
        found[-1:] = [found[-1] + 1] if found else []
        return gather(*given, **named)

    def step(run: Run) -> None:
        found.append(0)
        Path(f"messages-{rank}").write_text(json.dumps(found))

    pytest.MonkeyPatch().setattr(distributed, "all_gather", counted)
    at_steps(step)


def test_ranks_tell_each_other_little_at_a_step(project):
    """What a step has to learn, how many micro-batches, its loss; at last times, and a stop."""
    line = train("train.max_steps=4", "train.eval_every=null", "checkpoint.every=null")
    assert Started(2, line, first=counting).wait() == [0, 0]
    for rank in range(2):
        *steps, _ = json.loads(Path(f"messages-{rank}").read_text())
        assert steps == [4, 4, 4]


SHARED = "train.context_parallel"
FEW_ROWS = "half of the steps have at most 1 row, work for at most 1 GPU, not for 2"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: Any, model_dir: Path, token_cache: Path) -> Path:
    """The run of two ranks that nothing happens to."""
    folder = make_project(tmp_path_factory.mktemp("whole") / "project", model_dir)
    with runs_are_quick(), pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("MEGATRAIN_CACHE", str(token_cache))
        assert Started(2, train()).wait() == [0, 0]
    return folder / "run"


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_when_one_is_killed_all_end_and_the_run_goes_on(project, monkeypatch, whole, rank):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    started = Started(2, train(), first=slowly)
    wait_for(lambda: trained_to(6))
    os.kill(started.ranks[rank].pid, signal.SIGKILL)
    codes = started.wait(SOON_S)
    assert codes[rank] == -signal.SIGKILL and codes[1 - rank] == 1
    assert f"rank {rank} on " in started.said()[1 - rank]
    if rank:  # torchrun starts them again
        assert Started(2, train()).wait() == [0, 0]
    else:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another")
        assert Started(2, train()).wait() == [2, 2]
        assert Started(2, "resume run").wait() == [0, 0]
    same_run(Path("run"), whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "words"), [(1, "has said nothing for 2 s"), (0, "has died, was stopped, or cannot be")]
)
def test_one_that_is_stopped_by_a_signal_is_not_waited_for(
    project, monkeypatch, silent_soon, rank, words
):
    monkeypatch.setattr(liveness, "STORE_TIMEOUT", timedelta(seconds=2))
    started = Started(2, train(), first=slowly)
    wait_for(lambda: trained_to(2))
    os.kill(started.ranks[rank].pid, signal.SIGSTOP)
    started.ranks[1 - rank].join(SOON_S)
    assert started.ranks[1 - rank].exitcode == 1, started.said()
    os.kill(started.ranks[rank].pid, signal.SIGKILL)  # as a launcher does
    assert f"error: rank {rank} on {socket.gethostname()} {words}" in started.said()[1 - rank]


@pytest.mark.slow
def test_when_all_are_stopped_for_long_they_go_on(project, silent_soon, whole):
    """As by a scheduler that suspends a job. The last one to stop is the first to go on."""
    started = Started(2, train(), first=slowly)
    wait_for(lambda: trained_to(2))
    for number, order, seconds in ((signal.SIGSTOP, (1, 0), 3.0), (signal.SIGCONT, (0, 1), 0.0)):
        for rank in order:
            os.kill(started.ranks[rank].pid, number)
            time.sleep(0.3)
        time.sleep(seconds)
    assert started.wait() == [0, 0], started.said()
    same_run(Path("run"), whole)


@pytest.mark.slow
def test_an_error_of_one_ends_all_with_its_sentence_and_code(project):
    def fails(rank: int) -> None:
        def step(run: Run) -> None:
            if rank == 1 and run.step == 2:
                raise MemoryError

        at_steps(step)

    started = Started(2, train(), first=fails)
    assert started.wait(SOON_S) == [5, 5]
    (said,), nothing = started.errors()
    assert "rank 1 on " in said and "stopped: out of host memory, although only" in said
    assert nothing == []


@pytest.mark.slow
@pytest.mark.parametrize("asked", [0, 1])
def test_one_that_is_stopped_before_the_first_step_ends_all(project, monkeypatch, asked):
    """While the first one prepares, the other waits inside the library."""
    monkeypatch.setattr(liveness, "STORE_TIMEOUT", timedelta(seconds=1))
    monkeypatch.setattr(liveness, "LEAVES_WITHIN_S", 1.0)

    def first(rank: int) -> None:
        def slow(*_: Any, **__: Any) -> None:
            Path(f"prepares-{rank}").touch()
            while True:
                may_end_here()
                time.sleep(0.01)

        if rank == 0:
            pytest.MonkeyPatch().setattr("megatrain.recipes.run.get_ready", slow)

    started = Started(2, train(), first=first)
    wait_for(Path("prepares-0").exists)
    os.kill(started.ranks[asked].pid, signal.SIGTERM)
    assert started.wait(8.0) == [75, 75], started.said()
    assert ("rank 0 on " in started.said()[1]) == (asked == 0)


SEVENS = "train.rows_per_step=7", "checkpoint.every=100", "train.eval_every=100"


@pytest.fixture
def windows(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """60 rows in three windows, of which the third waits for a file; an empty cache."""
    small_windows(monkeypatch, waits=True)
    monkeypatch.setenv("MEGATRAIN_CACHE", str(tmp_path / "cache"))
    config = (project / "cfg.yaml").read_text().replace("tokens_per_step: 256, ", "")
    config = config.replace("eval: 8}", "eval: 4, streaming: true, processes: 1}")
    (project / "cfg.yaml").write_text(config)
    yield project
    (project / "go").touch()


@pytest.mark.slow
def test_rows_of_a_stream_are_waited_for_by_all(windows, megatrain, monkeypatch):
    """A signal to the second and the death of the first end that; one goes on as if it had been
    one all the time."""
    said = "step 6 waits for rows, which are still being tokenised"
    started = Started(2, train(*SEVENS))
    wait_for(lambda: said in started.said()[0])
    os.kill(started.ranks[1].pid, signal.SIGTERM)
    assert started.wait(SOON_S) == [75, 75]
    assert said not in started.said()[1]
    assert "stopped by SIGTERM while step 6 waited for rows; the run is saved" in started.said()[0]
    assert (windows / "run" / "checkpoint-5").is_dir()
    started = Started(2, "resume run")
    wait_for(lambda: said in started.said()[0])
    os.kill(started.ranks[0].pid, signal.SIGKILL)
    assert started.wait(SOON_S) == [-signal.SIGKILL, 1]
    (windows / "go").touch()
    assert "2 ranks before and 1 now" in megatrain("resume run").err
    monkeypatch.setenv("MEGATRAIN_CACHE", str(windows / "other"))
    megatrain(train("output=alone", *SEVENS))
    assert_steps_agree(Path("run"), Path("alone"), "loss", "grad_norm", "tokens", "epoch")


@pytest.mark.slow
def test_a_signal_to_any_stops_all_after_the_step_and_saves(project):
    started = Started(2, train(), first=slowly)
    wait_for(lambda: trained_to(1))
    os.kill(started.ranks[1].pid, signal.SIGTERM)
    assert started.wait(SOON_S) == [75, 75]
    assert Started(2, "resume run").wait() == [0, 0]
    assert [row["step"] for row in steps_of(Path("run"))] == [*range(1, 11)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "code", "words"),
    [
        ("gpus=3", 2, "gpus: 3, but 2 process(es) of this host take part"),
        ("train.rows_per_step=null train.tokens_per_step=40", 4, FEW_ROWS),
        (f"{SHARED}=3", 2, f"{SHARED}: 3 GPUs of a host cannot share sequences where 2 train"),
        (f"{SHARED}=2 method=dpo", 2, f"{SHARED}: 2 does not work with method: dpo, whose loss"),
    ],
)
def test_what_is_not_built_is_refused_and_said_once(project, keys, code, words):
    started = Started(2, train(*keys.split()))
    assert started.wait(SOON_S) == [code, code]
    (said,) = chain.from_iterable(started.errors())
    assert words in said
