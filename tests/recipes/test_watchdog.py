"""A run in which nothing moves is ended, and only such a run."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from megatrain.recipes.signals import HangWatch
from tests.helpers.commands import metrics_of, wait_for

# The time allowed is short where something hangs, and nowhere else: on a busy machine a process may
# get no time for longer.
QUICKLY = """
from megatrain.recipes.signals import HangWatch
original_watch, watches = HangWatch.__init__, []
def known_watch(watch, seconds, log):
    original_watch(watch, seconds, log)
    watches.append(watch)
HangWatch.__init__ = known_watch
def allow(seconds):
    for watch in watches:
        watch.allowed_s = seconds
"""
SECONDS = 5  # otherwise
HANGS = """
import threading
from megatrain.recipes import loop
original, lock = loop.train_step, threading.Lock()
def hang_at_step_3(run, *rest):
    if run.step == 2:
        allow(0.4)
        lock.acquire()
        lock.acquire()
    original(run, *rest)
loop.train_step = hang_at_step_3
"""


@pytest.mark.slow
def test_a_held_lock_ends_the_run_and_shows_where(forker, project):
    forker.start("train", "cfg.yaml", f"hang_timeout={SECONDS}", first=QUICKLY + HANGS)
    assert forker.wait() == 1
    log, shown = project / "run" / "train.log", project / "forked.log"
    for said in (log.read_text(), shown.read_text()):
        assert "error: nothing has moved for 0.4s (hang_timeout)" in said
        assert "in hang_at_step_3" in said
        assert "go on from the last checkpoint with `megatrain resume run`" in said
    assert len(metrics_of(project / "run")) == 3, "an evaluation and two steps"


# what is waited for, for ever, before the first step
EARLY = {
    "a download": ("megatrain.cli.training", "find_model"),
    "the plan": ("megatrain.engine.resolved", "make_plan"),
    "tokens": ("megatrain.data.build", "make_shards"),
}
WAITS = """
import threading, {module} as module
def waits_for_ever(*given, **named):
    allow(0.4)
    threading.Event().wait()
module.{name} = waits_for_ever
"""


@pytest.mark.slow
@pytest.mark.parametrize("what", EARLY)
def test_so_does_whatever_is_waited_for_before_the_first_step(
    forker, project, monkeypatch, tmp_path, what
):
    module, name = EARLY[what]
    cache = f"import os; os.environ['MEGATRAIN_CACHE'] = {str(tmp_path / 'cache')!r}"
    first = cache + QUICKLY + WAITS.format(module=module, name=name)
    forker.start("train", "cfg.yaml", f"hang_timeout={SECONDS}", first=first)
    assert forker.wait() == 1
    said = (project / "forked.log").read_text()
    assert "error: nothing has moved for 0.4s before the first step (hang_timeout)" in said
    assert "nothing is lost" in said
    assert "in waits_for_ever" in said
    log = project / "run" / "train.log"
    assert what == "a download" or "in waits_for_ever" in log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("work", ["computes", "reads", "beats"])
def test_what_works_before_the_first_step_has_not_hung(forker, project, work):
    first = QUICKLY + WORKS.format(work=work)
    forker.start("train", "cfg.yaml", "hang_timeout=60", "train.max_steps=1", first=first)
    assert forker.wait() == 0, (project / "forked.log").read_text()


WORKS = """
import time
from megatrain import heartbeat
from megatrain.recipes import run
def computes():
    sum(range(1 << 16))
def reads():
    time.sleep(0.02)
    open("/dev/zero", "rb").read(1 << 20)
def beats():
    time.sleep(0.02)
    heartbeat.beat()
original = run.read_model
def slowly(*given):
    allow(0.4)
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        {work}()
    allow(60)
    return original(*given)
run.read_model = slowly
"""


def test_three_planned_steps_may_take_longer_than_is_allowed():
    watch, allowed = HangWatch(60.0, None), []
    for step_s in (1.0, 100.0, 1.0):
        watch.expect(step_s)
        allowed.append(watch.allowed_s)
    assert allowed == [60.0, 300.0, 300.0]


@pytest.mark.slow
def test_it_can_be_turned_off(forker, project):
    child = forker.start("train", "cfg.yaml", "hang_timeout=null", first=QUICKLY + HANGS)
    written = project / "run" / "metrics.jsonl"
    wait_for(lambda: written.exists() and len(metrics_of(written.parent)) == 3)
    time.sleep(0.6)
    os.kill(child, signal.SIGKILL)
    assert forker.wait() == -signal.SIGKILL


@pytest.mark.slow
def test_a_process_that_was_stopped_has_not_hung(forker, project):
    config = ("hang_timeout=60", "train.max_steps=4", "checkpoint.every=null", "data.eval=null")
    child = forker.start("train", "cfg.yaml", *config, first=QUICKLY + STOPS)
    status = Path(f"/proc/{child}/stat")
    wait_for(lambda: status.read_text().rpartition(")")[2].split()[0] == "T")
    time.sleep(0.8)
    os.kill(child, signal.SIGCONT)
    assert forker.wait() == 0, (project / "forked.log").read_text()


STOPS = """
import os, signal, time
from megatrain.recipes import loop
original = loop.train_step
def stop_at_step_3(run, *rest):
    if run.step == 2:
        allow(0.4)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.1)
        allow(60)
    original(run, *rest)
loop.train_step = stop_at_step_3
"""
