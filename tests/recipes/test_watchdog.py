"""A run in which nothing moves is ended, and only such a run."""

from __future__ import annotations

import os
import signal
import time

from tests.commands import metrics_of, wait_for

HANGS = """
import threading
from megatrain.recipes import loop
original, lock = loop.train_step, threading.Lock()
def hang_at_step_3(run, *rest):
    if run.step == 2:
        lock.acquire()
        lock.acquire()
    original(run, *rest)
loop.train_step = hang_at_step_3
"""


def test_a_held_lock_ends_the_run_and_shows_where(forker, project):
    forker.start("train", "cfg.yaml", "hang_timeout=1", first=HANGS)
    assert forker.wait() == 1
    log, shown = project / "run" / "train.log", project / "forked.log"
    for said in (log.read_text(), shown.read_text()):
        assert "error: nothing has moved for 1.0s (hang_timeout)" in said
        assert "in hang_at_step_3" in said
        assert "go on from the last checkpoint with `megatrain resume run`" in said
    assert len(metrics_of(project / "run")) == 3, "an evaluation and two steps"


def test_it_can_be_turned_off(forker, project):
    child = forker.start("train", "cfg.yaml", "hang_timeout=null", first=HANGS)
    written = project / "run" / "metrics.jsonl"
    wait_for(lambda: written.exists() and len(metrics_of(written.parent)) == 3)
    time.sleep(1.5)
    os.kill(child, signal.SIGKILL)
    assert forker.wait() == -signal.SIGKILL


def test_a_process_that_was_stopped_has_not_hung(forker, project):
    config = ("hang_timeout=1", "train.max_steps=60", "checkpoint.every=null")
    child = forker.start("train", "cfg.yaml", *config)
    written = project / "run" / "metrics.jsonl"
    wait_for(lambda: written.exists() and len(metrics_of(written.parent)) > 2)
    os.kill(child, signal.SIGSTOP)
    time.sleep(2)
    os.kill(child, signal.SIGCONT)
    assert forker.wait() == 0
