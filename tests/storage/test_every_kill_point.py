"""A process that is killed before any of its system calls on files loses no save, and leaves
nothing that the next save does not put right; nor does one whose system call fails."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from itertools import cycle

import pytest

from benchmarks.campaign import calls
from benchmarks.campaign.saves import SCENARIOS, Stage
from megatrain.errors import ConfigError, StorageError
from megatrain.storage.checkpoint import load_checkpoint, reopen, write_final
from megatrain.storage.manifest import read_manifest
from megatrain.storage.run_folder import find_checkpoint
from tests.helpers.still import still_engine

EVERY = 17  # kill point; `make campaign` tries them all
EVERY_FAILURE = 59
ENDS = (0, ConfigError.exit_code, StorageError.exit_code)


@pytest.fixture(scope="module", params=SCENARIOS)
def stage(request, tmp_path_factory) -> Iterator[Stage]:
    engine = still_engine(layers=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)  # a kill is no power loss
        yield Stage(request.param, tmp_path_factory.mktemp("stage"), engine)
    engine.store.close()


def test_a_kill_before_any_system_call_loses_nothing(stage):
    number = 1
    stage.set_up()
    while calls.killed_before(number, stage.act):
        stage.check()
        stage.set_up()
        number += EVERY
    assert number > 1, "it makes system calls"


@pytest.mark.slow
def test_a_system_call_that_fails_loses_nothing(stage):
    """In turns it is that one alone, and it is all from there on."""
    names = (*calls.CHANGES, *calls.READS)
    stage.set_up()
    points = range(1, calls.count_calls(stage.act, names), EVERY_FAILURE)
    for number, ever in zip(points, cycle([False, True])):
        stage.set_up()
        before = calls.failing(number, errno.EIO, ever)
        ended = calls.with_calls(stage.act, before, names)
        assert ended.code in ENDS, ended.words
        stage.check()


def test_a_last_that_leads_nowhere_is_mended_by_the_next_save_that_fails(
    run_dir, engine, save, monkeypatch
):
    save(1, 2)
    shutil.rmtree(run_dir / "checkpoint-2")

    def full(*_: object, **__: object) -> None:
        raise StorageError("the disk is full")

    monkeypatch.setattr("megatrain.storage.checkpoint.write_model", full)
    with pytest.raises(StorageError, match="is full"):
        save(3)
    assert os.readlink(run_dir / "last") == "checkpoint-1"


def test_the_save_after_a_lost_one_is_newer_than_its_model(run_dir, engine, save):
    save(1, 2)
    write_final(run_dir)
    shutil.rmtree(run_dir / "checkpoint-2")
    reopen(run_dir, run_dir / "checkpoint-1")
    assert read_manifest(run_dir / "final").step == 2, "the model of step 2 is nowhere else"
    save(3)
    assert find_checkpoint(run_dir) == run_dir / "checkpoint-3"


def test_a_final_newer_than_what_is_resumed_from_stays(run_dir, engine, save):
    save(1, 2)
    write_final(run_dir, full=True)
    reopen(run_dir, run_dir / "checkpoint-1")
    assert load_checkpoint(run_dir / "final", engine) == {"step": 2}
    reopen(run_dir, run_dir / "checkpoint-2")
    assert not (run_dir / "final").exists()
