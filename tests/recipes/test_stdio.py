"""Streams that are closed, full or broken: a run goes on, saves, and keeps its exit code."""

from __future__ import annotations

import os
import signal

import pytest

from megatrain.storage.run_folder import checkpoints
from tests.helpers.commands import metrics_of, steps_of, wait_for

STREAMS = {
    "nobody reads stdout": {"stdout": "broken"},
    "nobody reads stderr": {"stderr": "broken"},
    "nobody reads either": {"stdout": "broken", "stderr": "broken"},
    "no stdout": {"stdout": "closed"},
    "no stderr": {"stderr": "closed"},
    "none at all": {"stdin": "closed", "stdout": "closed", "stderr": "closed"},
    "a full disk below stdout": {"stdout": "full"},
    "a full disk below stderr": {"stderr": "full"},
    "a reader that leaves": {"stdout": "head -3", "stderr": "head -3"},
}


@pytest.mark.slow
@pytest.mark.parametrize("streams", STREAMS.values(), ids=STREAMS.keys())
def test_output_that_cannot_be_printed_does_not_end_a_run(forker, project, streams):
    config = ("train.log_every=1", "train.max_steps=4", "data.eval=null", "checkpoint.every=2")
    forker.start("train", "cfg.yaml", *config, **streams)
    assert forker.wait() == 0
    run_dir = project / "run"
    assert len(steps_of(run_dir)) == 4 and (run_dir / "final").is_dir()
    log = (run_dir / "train.log").read_text()
    assert all(f"step {step}/4" in log for step in range(1, 5)), "the log lost nothing"
    if streams.get("stdout") == "full":
        said = (project / "forked.log").read_text()
        assert "stdout cannot be written: No space left on device; the summary is lost" in said


def test_nor_does_it_hide_that_a_result_is_lost(forker, project):
    forker.start("plan", "cfg.yaml", stdout="full")
    assert forker.wait() == 7
    assert "error: stdout cannot be written: No space" in (project / "forked.log").read_text()


def test_a_reader_that_has_read_enough_is_no_error(forker, project):
    forker.start("schema", stdout="head -1")
    assert forker.wait() == 0
    assert "error" not in (project / "forked.log").read_text()


def test_no_stdin_is_an_empty_prompt(forker, project):
    forker.start("generate", "model", stdin="closed")
    assert forker.wait() == 2
    assert "PROMPT is empty" in (project / "forked.log").read_text()


def test_ctrl_c_that_also_ends_tee_saves(forker, project):
    config = ("train.max_steps=100000", "checkpoint.every=null", "train.eval_every=null")
    group = forker.start("train", "cfg.yaml", *config, stdout="tee seen", stderr="tee seen")
    written = project / "run" / "metrics.jsonl"
    wait_for(lambda: written.exists() and len(metrics_of(written.parent)) > 2)
    os.killpg(group, signal.SIGINT)
    assert forker.wait() == 130
    assert len(checkpoints(project / "run")) == 1
