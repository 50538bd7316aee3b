"""A run keeps the right checkpoints under the right names; one process at a time writes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from unittest.mock import Mock

import pytest

import megatrain as mt
from megatrain.data.workers import ended, forked
from megatrain.errors import ConfigError, StorageError
from megatrain.storage.checkpoint import (
    find_resumable,
    load_checkpoint,
    save_checkpoint,
    write_final,
)
from megatrain.storage.manifest import verify_checkpoint
from megatrain.storage.run_folder import find_checkpoint, run_lock
from tests.helpers.files import as_an_ordinary_user, names


def test_the_newest_are_kept_and_last_points_to_the_newest(run_dir, engine, save):
    save(1, 2, 3, 10, keep=2)
    assert names(run_dir) == {"checkpoint-3", "checkpoint-10", "last"}
    assert os.readlink(run_dir / "last") == "checkpoint-10"


def test_best_is_kept_besides_until_another_is_better(run_dir, engine, save):
    save_checkpoint(run_dir, 1, engine, None, {}, best=1)
    save(2, 3, keep=1)
    assert names(run_dir) == {"checkpoint-1", "checkpoint-3", "best", "last"}
    save_checkpoint(run_dir, 4, engine, None, {}, keep=1, best=4)
    assert names(run_dir) == {"checkpoint-4", "best", "last"}, "the former best goes at once"
    save(5, keep=1)
    assert names(run_dir) == {"checkpoint-4", "checkpoint-5", "best", "last"}
    assert find_checkpoint(run_dir, "best") == run_dir / "checkpoint-4"


def test_final_is_hard_links_of_the_last(run_dir, engine, save):
    last = save(1, 2)
    final = write_final(run_dir)
    assert verify_checkpoint(final).step == 2
    assert (final / "model.safetensors").samefile(last / "model.safetensors")
    save(3, 4, keep=1)
    assert verify_checkpoint(final).step == 2, "pruning must leave final alone"
    write_final(run_dir)
    assert verify_checkpoint(final).step == 4


def test_final_is_copied_where_links_are_not_possible(run_dir, engine, monkeypatch, save):
    last = save(1)
    monkeypatch.setattr(os, "link", Mock(side_effect=OSError(1, "Operation not permitted")))
    final = write_final(run_dir)
    assert verify_checkpoint(final).step == 1
    assert not (final / "model.safetensors").samefile(last / "model.safetensors")


def test_saving_a_step_again_replaces_it(run_dir, engine, save):
    save(4)
    engine.update(5)
    path = save_checkpoint(run_dir, 4, engine, None, {"second": True})
    assert load_checkpoint(path, engine) == {"second": True}
    assert names(run_dir) == {"checkpoint-4", "last"}


def test_after_going_back_the_new_saves_are_the_newest(run_dir, engine, save):
    save(100, 200, 300)
    save(150, keep=2)  # resumed from 100 by hand
    assert names(run_dir) == {"checkpoint-150", "checkpoint-300", "last"}
    assert find_resumable(run_dir).path == run_dir / "checkpoint-150"


def test_checkpoints_are_found_by_name(run_dir, engine, save):
    save(1, 2)
    which = {None: 2, "last": 2, "checkpoint-1": 1, "1": 1}
    for name, step in which.items():
        assert find_checkpoint(run_dir, name) == run_dir / f"checkpoint-{step}"


def test_what_is_taken_instead_of_a_damaged_final_is_said(run_dir, engine, save, caplog):
    save(1)
    for harm in (lambda path: path.write_text("{"), Path.unlink):
        write_final(run_dir)
        assert find_checkpoint(run_dir) == run_dir / "final" and not caplog.messages
        harm(run_dir / "final" / "MANIFEST.json")
        assert find_checkpoint(run_dir) == run_dir / "checkpoint-1"
        assert caplog.messages == [f"{run_dir}/final: is damaged; checkpoint-1 is used instead"]
        caplog.clear()


def test_a_checkpoint_that_is_not_there_is_answered_with_those_that_are(run_dir, engine, save):
    for which in ["best", "final", "3", "../run/checkpoint-1"]:
        save(1)
        with pytest.raises(ConfigError, match=r"there is checkpoint-1, last"):
            find_checkpoint(run_dir, which)


def test_a_folder_that_cannot_be_read_is_an_error_of_ours(run_dir, engine, save):
    save(1)
    run_dir.chmod(0o600)
    with as_an_ordinary_user():
        for which in (None, "last", "1"):
            with pytest.raises(StorageError, match=r"run.*: cannot look for checkpoints: Perm"):
                find_checkpoint(run_dir, which)
        with pytest.raises(StorageError, match=r"run.*: cannot look for checkpoints: Perm"):
            mt.export(run_dir, run_dir.parent / "out")
    with pytest.raises(StorageError, match="cannot look for checkpoints: File name too long"):
        find_checkpoint(run_dir.parent / ("x" * 300))


def test_what_was_forked_from_a_run_does_not_keep_its_lock(run_dir):
    started, says = os.pipe()

    def stay() -> None:
        os.write(says, b"!")
        signal.pause()

    with run_lock(run_dir):
        child = forked(stay)
        os.read(started, 1)
    try:
        with run_lock(run_dir):
            os.kill(child, 0)  # it is still there
    finally:
        ended(child)
        os.close(started)
        os.close(says)


def test_a_run_folder_serves_one_run(run_dir):
    words = rf"in use by another run \(process {os.getpid()}\)"
    with run_lock(run_dir), pytest.raises(ConfigError, match=words), run_lock(run_dir):
        pass
    with run_lock(run_dir):
        pass
    assert run_dir.stat().st_mode & 0o777 == 0o700
