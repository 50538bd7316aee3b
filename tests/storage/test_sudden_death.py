"""Full disks and kill -9: what was saved stays, what was not leaves nothing."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from megatrain.errors import StorageError
from megatrain.storage.checkpoint import save_checkpoint
from megatrain.storage.restore import find_resumable, load_checkpoint
from megatrain.storage.run_folder import checkpoints
from tests.files import largest_file, names


@pytest.mark.parametrize("limit", [0, 100, 700, 4096, 9000])
def test_a_full_disk_leaves_the_previous_checkpoint_and_nothing_else(run_dir, engine, limit, save):
    save(1)
    before = engine.bits()
    engine.update(2)
    words = r"checkpoint-2\.tmp/.*errno 27.*free space"
    with largest_file(limit), pytest.raises(StorageError, match=words):
        save_checkpoint(run_dir, 2, engine, None, {})
    assert names(run_dir) == {"checkpoint-1", "last"}
    load_checkpoint(run_dir / "checkpoint-1", engine)
    assert engine.bits() == before
    assert save(2).name == "checkpoint-2", "the run can go on and save later"


def test_too_little_space_is_known_before_writing(run_dir, engine, monkeypatch, save):
    usage = shutil.disk_usage(run_dir.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    with pytest.raises(StorageError, match=r"a checkpoint needs .* GiB and 0\.00 GiB are free"):
        save(1)


def test_a_replacement_cut_off_in_the_middle_loses_nothing(run_dir, engine, save):
    save(1)
    # killed before the new one was renamed
    (run_dir / "checkpoint-1").rename(run_dir / "checkpoint-1.replaced")
    assert find_resumable(run_dir).path == run_dir / "checkpoint-1.replaced"
    save(2)
    assert names(run_dir) == {"checkpoint-1", "checkpoint-2", "last"}


def save_until_killed(run_dir: Path, engine: Any, step: int) -> None:
    """The child: train and save forever, now and then a step twice as a resumed run does."""
    while True:
        step += 1
        engine.update(step)
        save_checkpoint(run_dir, step, engine, None, {"step": step}, keep=1)
        if step % 3 == 0:
            save_checkpoint(run_dir, step, engine, None, {"step": step}, keep=1)


@pytest.mark.slow
def test_kill_9_in_the_middle_of_saves_loses_no_finished_save(run_dir, engine, save):
    draw = random.Random(2)
    save(1)  # whatever is done but once is done
    began = time.monotonic()
    save(2)
    save_s = time.monotonic() - began  # the machine may be busy: kills are timed in saves
    newest, interrupted, in_vain = 2, 0, 0
    for kills in range(400):
        if kills >= 12 and interrupted > 4 and newest > 6:
            break  # enough kills hit a save, and enough saves were finished between kills
        child = os.fork()
        if child == 0:
            try:
                save_until_killed(run_dir, engine, newest)
            finally:
                os._exit(1)
        time.sleep(draw.uniform(0.2, 4 + in_vain) * save_s)  # it may have become busier since
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "the child must not end by itself"
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        interrupted += any(path.name.endswith((".tmp", ".replaced")) for path in run_dir.iterdir())
        finished = int(os.readlink(run_dir / "last").partition("-")[2])
        found = find_resumable(run_dir)
        assert found.path is not None
        assert found.warnings == ()
        state = load_checkpoint(found.path, engine)
        assert state["step"] == engine.updates >= max(newest, finished)
        loaded = engine.bits()
        engine.update(state["step"])
        assert engine.bits() == loaded
        in_vain = 0 if state["step"] > newest else in_vain + 1
        newest = state["step"]
    assert interrupted > 4
    assert newest > 6
    assert len(checkpoints(run_dir)) <= 3
