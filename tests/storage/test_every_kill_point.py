"""A process that is killed before any of its system calls on files loses no save, and leaves
nothing that the next save does not put right."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatrain.storage.checkpoint import reopen, save_checkpoint, write_final
from megatrain.storage.export import export
from megatrain.storage.manifest import read_manifest
from megatrain.storage.restore import find_resumable, load_checkpoint
from megatrain.storage.saves import find_checkpoint
from tests.files import names

CALLS = [
    "open",
    "write",
    "fsync",
    "mkdir",
    "rename",
    "replace",
    "unlink",
    "rmdir",
    "symlink",
    "link",
]
EVERY = 11  # kill point: all of them take half a minute


def killed_before(number: int, action: Callable[[], object]) -> bool:
    """Run `action` in a child that dies before its `number`th call; False if it has fewer."""
    child = os.fork()
    if child == 0:
        left = number

        def counted(call: Callable[..., object]) -> Callable[..., object]:
            def dying(*given: Any, **named: Any) -> object:
                nonlocal left
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*given, **named)

            return dying

        try:
            for name in CALLS:
                setattr(os, name, counted(getattr(os, name)))
            action()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the action failed by itself"
    return os.WIFSIGNALED(status)


def saved(run_dir: Path, engine: Any, *steps: int, keep: int = 2) -> None:
    for step in steps:
        engine.update(step)
        save_checkpoint(run_dir, step, engine, None, {"step": step}, keep)


def reopened(run_dir: Path) -> None:
    found = find_resumable(run_dir).path
    assert found is not None
    reopen(run_dir, found)


def finished(run_dir: Path, engine: Any) -> None:
    saved(run_dir, engine, 1, 2)
    write_final(run_dir, full=True)


def lost_newest(run_dir: Path, engine: Any) -> None:
    finished(run_dir, engine)
    shutil.rmtree(run_dir / "checkpoint-2")


# what was there, what is cut off, and the steps of which one must be found then
SCENARIOS: dict[str, tuple[Callable[..., object], Callable[..., object], set[int]]] = {
    "first save": (lambda *_: None, lambda run, engine: saved(run, engine, 1), {0, 1}),
    "save": (
        lambda run, engine: saved(run, engine, 1, 2),
        lambda run, engine: saved(run, engine, 3),
        {2, 3},
    ),
    "save again": (
        lambda run, engine: saved(run, engine, 1, 2),
        lambda run, engine: saved(run, engine, 2),
        {2},
    ),
    "final": (
        lambda run, engine: saved(run, engine, 1, 2),
        lambda run, _: write_final(run),
        {2},
    ),
    "reopen": (finished, lambda run, _: reopened(run), {2}),
    "newest lost": (lost_newest, lambda run, _: reopened(run), {2}),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_kill_before_any_system_call_loses_nothing(tmp_path, new_engine, name):
    before, action, steps = SCENARIOS[name]
    engine, start, run = new_engine(layers=1), tmp_path / "start", tmp_path / "run"
    start.mkdir()
    before(start, engine)
    number = 1
    while True:
        shutil.copytree(start, run, symlinks=True)
        if not killed_before(number, lambda: action(run, engine)):
            break
        path = find_resumable(run).path
        step = 0 if path is None else load_checkpoint(path, engine)["step"]
        assert step in steps, f"killed before call {number}"
        saved(run, engine, 9, keep=1)
        left = {path.name for path in run.iterdir()} - {"final"}
        assert left == {"checkpoint-9", "last"}, f"killed before call {number}"
        assert os.readlink(run / "last") == "checkpoint-9"
        shutil.rmtree(run)
        number += EVERY
    assert number > 1, "it makes system calls"


def test_a_killed_export_is_whole_or_absent_and_leaves_nothing(tmp_path, new_engine):
    run, out, number = tmp_path / "run", tmp_path / "out", 1
    saved(run, new_engine(layers=1), 1)
    expected = names(export(run, tmp_path / "first"))
    while killed_before(number, lambda: export(run, out)):
        if not out.exists():
            export(run, out)
        assert names(out) == expected
        assert names(tmp_path) == {"run", "first", "out"}, f"killed before call {number}"
        shutil.rmtree(out)
        number += 4
    assert number > 20


def test_a_last_that_leads_nowhere_is_mended_by_the_next_save_that_fails(
    run_dir, engine, save, monkeypatch
):
    save(1, 2)
    shutil.rmtree(run_dir / "checkpoint-2")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 0))
    with pytest.raises(Exception, match="a checkpoint needs"):
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
