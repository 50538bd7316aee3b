"""Runs that train on a set while it is tokenised."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.data.test_shards import bytes_in
from tests.helpers.commands import (
    chat_rows,
    metrics_of,
    small_windows,
    steps_of,
    wait_for,
    write_jsonl,
)
from tests.recipes.same_run import same_run

CONFIG = """
model: model
data: {train: rows.jsonl, eval: 4, streaming: true, processes: 1}
train: {rows_per_step: 7, seq_len: 64, max_steps: 10, learning_rate: 0.01, warmup: 2, eval_every: 5}
checkpoint: {every: 5, keep: 2}
threads: 1
device: cpu
output: run
"""
SAID = "step 6 waits for rows, which are still being tokenised"
# in a process of its own
FIRST = """
import pytest
from tests.helpers.commands import small_windows
small_windows(pytest.MonkeyPatch(), waits=True)
"""


@pytest.fixture(autouse=True)
def small(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """60 rows in three windows, a config that streams them, and an empty cache."""
    small_windows(monkeypatch)
    monkeypatch.setenv("MEGATRAIN_CACHE", str(tmp_path / "cache"))
    (project / "cfg.yaml").write_text(CONFIG)
    yield
    (project / "go").touch()  # or a run would wait for ever whose test has failed


def log_of(project: Path) -> str:
    """What a command wrote that runs in a process of its own, so far."""
    log = project / "forked.log"
    return log.read_text() if log.exists() else ""


def sets_in(cache: Path) -> dict[str, bytes]:
    """Every file of the sets in a cache, which holds more."""
    return {name: data for name, data in bytes_in(cache).items() if "/" in name}


@pytest.mark.slow
def test_a_run_is_that_on_the_finished_cache_to_the_bit(megatrain, project, tmp_path):
    said = megatrain("train cfg.yaml output=first")
    assert "are those of the first 20 rows of the source" in said.err
    assert re.search(r"1 epoch of all \d+ rows of 3 windows, and \d+ rows of \d window", said.out)
    before = sets_in(tmp_path / "cache")
    megatrain("train cfg.yaml output=second")
    same_run(project / "first", project / "second")
    assert sets_in(tmp_path / "cache") == before
    os.environ["MEGATRAIN_CACHE"] = str(tmp_path / "other")
    megatrain("data cfg.yaml data.streaming=false")
    assert sets_in(tmp_path / "other") == before
    assert [row["epoch"] for row in steps_of(project / "first")][-3:] == [1, 1, 1]
    assert "data" in steps_of(project / "first")[0]["time"]


@pytest.mark.slow
def test_kill_9_in_the_middle_costs_no_bit(forker, megatrain, project, tmp_path):
    """Once while it waits for rows, of which the writer ends as well, and once behind a save."""
    rows = f"data.train={project / 'rows.jsonl'}"  # a shard tells the place of its largest token
    megatrain("train cfg.yaml output=whole", rows)
    whole = sets_in(tmp_path / "cache")
    cache = f"import os\nos.environ['MEGATRAIN_CACHE'] = '{tmp_path / 'killed'}'\n"
    child = forker.start("train", "cfg.yaml", rows, first=cache + FIRST)
    wait_for(lambda: SAID in log_of(project), seconds=60)
    wait_for((project / "run/checkpoint-5").is_dir, seconds=60)  # written beside training
    os.kill(child, signal.SIGKILL)
    assert forker.wait() == -signal.SIGKILL
    shards_there = [path.name for path in (tmp_path / "killed").glob("*/*") if path.suffix == ""]
    assert sorted(shards_there)[:2] == ["00000", "00001"]
    (project / "go").touch()
    forker.start("resume", "run", first=cache + FIRST)
    assert forker.wait() == 0, log_of(project)
    same_run(project / "whole", project / "run")
    assert sets_in(tmp_path / "killed") == whole


@pytest.mark.slow
def test_a_run_that_waits_for_rows_says_so_and_may_be_stopped(forker, project, tmp_path):
    cache = f"import os\nos.environ['MEGATRAIN_CACHE'] = '{tmp_path / 'cache'}'\n"
    child = forker.start("train", "cfg.yaml", "checkpoint.every=100", first=cache + FIRST)
    wait_for(lambda: SAID in log_of(project), seconds=60)
    os.kill(child, signal.SIGTERM)
    assert forker.wait() == 75
    assert "stopped by SIGTERM while step 6 waited for rows; the run is saved" in log_of(project)
    assert (project / "run" / "checkpoint-5").is_dir()
    (project / "go").touch()
    forker.start("resume", "run", first=cache + FIRST)
    assert forker.wait() == 0
    assert [row["step"] for row in steps_of(project / "run")] == list(range(1, 11))


@pytest.mark.slow
def test_a_writer_that_fails_ends_the_run_after_saving(megatrain, project):
    rows = chat_rows()
    write_jsonl(project / "rows.jsonl", [*rows[:45], {"prompt": "and?"}, *rows[46:]])
    failed = megatrain("train cfg.yaml train.eval_every=100 checkpoint.every=100", code=3)
    assert "error: rows.jsonl:46: field 'messages' is missing" in failed.err
    assert "(mend them, or set data.on_bad_row: skip)" in failed.err
    assert "Traceback" not in failed.err
    assert len(steps_of(project / "run")) == 5
    assert (project / "run" / "checkpoint-5").is_dir()
    again = megatrain("resume run", code=3)
    assert "rows.jsonl:46" in again.err
    write_jsonl(project / "rows.jsonl", rows)
    megatrain("resume run")
    assert len(steps_of(project / "run")) == 10


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ("train.max_steps=null train.epochs=1", "data.streaming: needs train.max_steps: how long"),
        ("train.epochs=1", "train.epochs: how long they are is not known with data.streaming"),
        ("data.eval=0.1", "data.eval: a share is of the whole set, whose size is not known with"),
        ("data.train='[{path: rows.jsonl, weight: 1}]'", "data.train: weights are of whole sets,"),
        ("method=dpo", "data.streaming: method: dpo computes a reference over all rows before"),
        ("data.eval=20", "data.eval: 20 holds out 20 of 20 rows"),
    ],
)
def test_what_cannot_go_with_streaming_is_refused(megatrain, project, keys, words):
    failed = megatrain(f"train cfg.yaml {keys}", code=3 if "=20" in keys else 2)
    assert words in failed.err
    assert failed.err.count("error: ") == 1
    assert not (project / "run" / "config.yaml").exists()


def test_a_run_cannot_change_it(megatrain, project):
    megatrain("train cfg.yaml train.max_steps=1")
    failed = megatrain("resume run data.streaming=false train.max_steps=2", code=2).err
    assert "data.streaming: cannot change from True to False in a resumed run" in failed


def test_data_shows_the_first_window_and_says_so(megatrain):
    shown = megatrain("data cfg.yaml").out
    assert shown.startswith("─") and "16 rows, " in shown
    assert "data.streaming: what is said of rows" in shown
    counts = megatrain("data cfg.yaml --json").json
    assert (counts["train"]["rows"], counts["eval"]["rows"]) == (16, 4)


@pytest.mark.slow
def test_held_out_rows_are_evaluated_and_other_rows_too(megatrain, project):
    megatrain("train cfg.yaml train.max_steps=2")
    held = megatrain("eval run --json").json
    assert held["eval_loss"] == pytest.approx(metrics_of(project / "run")[-1]["eval_loss"])
    every = megatrain("eval run --data rows.jsonl --json").json
    assert every["eval_target_tokens"] > 10 * held["eval_target_tokens"], "all, not one window"
