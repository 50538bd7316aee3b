"""Signals, kills and full disks: what is saved when a run is stopped from outside, and that nothing
is lost by it."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from unittest.mock import Mock

import pytest

import megatrain as mt
from megatrain.data import build, cache, encoding
from megatrain.engine.engine import Engine
from megatrain.recipes import describe, loop, setup
from megatrain.recipes.signals import STOPS
from megatrain.storage import weights
from megatrain.storage.beside import Beside
from megatrain.storage.run_folder import checkpoints
from tests.helpers.commands import evaluations_of, steps_of, wait_for
from tests.recipes.same_run import same_run

SCHEDULERS = tuple(number for number in STOPS if number != signal.SIGINT)
SIGNALS = [*((number, 75) for number in SCHEDULERS), (signal.SIGINT, 130)]
Interrupt = Callable[..., None]


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> Interrupt:
    """interrupt(owner, name, at=3): the third call of owner.name sends this process a signal, and
    then does its work."""

    def at_call(
        owner: Any, name: str, at: int, number: int = signal.SIGTERM, times: int = 1
    ) -> None:
        original, calls = getattr(owner, name), iter(range(1, 1 << 30))

        def interrupted(*positional: Any, **named: Any) -> Any:
            if next(calls) == at:
                for _ in range(times):
                    os.kill(os.getpid(), number)
            return original(*positional, **named)

        monkeypatch.setattr(owner, name, interrupted)

    return at_call


def saved_steps(run_dir: Path) -> list[int]:
    return [int(path.name.partition("-")[2]) for path in checkpoints(run_dir)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)]
)
def test_a_signal_finishes_the_step_and_saves(megatrain, project, interrupt, number, code):
    """A second warning of a scheduler does not end the save."""
    handlers = [signal.getsignal(each) for each, _ in SIGNALS]
    times = 2 if number in SCHEDULERS else 1
    interrupt(loop, "train_step", at=2, number=number, times=times)
    done = megatrain("train cfg.yaml data.eval=null", code=code)
    assert "Ctrl-C stops at once" in done.err
    assert "after step 2; the run is saved" in done.err
    assert "to go on: megatrain resume run" in done.out
    assert saved_steps(project / "run") == [2]
    assert [row["step"] for row in steps_of(project / "run")] == [1, 2]
    assert not (project / "run" / "final").exists()
    assert [signal.getsignal(each) for each, _ in SIGNALS] == handlers


def test_a_run_that_is_asked_to_save_saves_and_goes_on(megatrain, project, monkeypatch):
    original, run_dir = loop.train_step, project / "run"

    def asked(run: Any, *rest: Any) -> None:
        if run.step == 2:
            assert "saves a checkpoint" in megatrain("save run").out
        original(run, *rest)

    monkeypatch.setattr(loop, "train_step", asked)
    megatrain("train cfg.yaml data.eval=null checkpoint.every=null train.max_steps=4")
    assert "INFO step 3: saving after the step\n" in (run_dir / "train.log").read_text()
    assert saved_steps(run_dir) == [3, 4] and (run_dir / "final").is_dir()
    refused = megatrain("save run", code=2).err
    assert "no process of yours on this host runs in it" in refused


def test_somebody_is_told_how_a_run_ends(megatrain, project, interrupt):
    """By a command, and by a URL; one that fails is a warning."""
    got: list[dict[str, str]] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200 if len(got) == 1 else 500)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    command = "on_end=echo $MEGATRAIN_STATUS $MEGATRAIN_EXIT_CODE $MEGATRAIN_RUN >> told"
    short = "train cfg.yaml train.max_steps=3"
    megatrain(short, command)
    megatrain(f"{short} output=bad data.train=none.jsonl", command, code=3)  # refused, not begun
    megatrain(f"{short} output=bad model.config=null train.seq_len=4", command, code=3)
    with ThreadingHTTPServer(("127.0.0.1", 0), Hook) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        hook = f"on_end=http://127.0.0.1:{server.server_port}/secret"
        interrupt(loop, "train_step", at=2)
        megatrain(f"{short} output=stopped", hook, code=75)
        said = megatrain("resume stopped").err
        server.shutdown()
    assert (project / "told").read_text() == "finished 0 run\nfailed 3 bad\n"
    assert [one["text"] for one in got] == ["stopped stopped", "stopped finished"]
    assert "warning: on_end: HTTP Error 500" in said and "secret" not in said


@pytest.mark.slow
@pytest.mark.parametrize("sweep", [2, 6])
def test_a_signal_ends_an_evaluation(megatrain, project, interrupt, trained_once, sweep):
    """Held-out rows of four sweeps: the signal comes in the first evaluation, or in the one after
    step 5."""
    config = ("data.eval=30", "train.max_steps=10", "checkpoint.every=null")
    whole = trained_once(*config) / "run"
    interrupt(Engine, "evaluate", at=sweep)
    done = megatrain("train cfg.yaml", *config, "output=halves", code=75)
    step = 0 if sweep < 4 else 5
    assert saved_steps(project / "halves") == [step]
    # half an evaluation is none; the one before step 1 is repeated when the run goes on
    assert step not in [row["step"] for row in evaluations_of(project / "halves")]
    assert ("the run is saved, but not evaluated" in done.err) == (step == 5)
    megatrain("resume halves")
    same_run(whole, project / "halves", but_evaluations_of=5)


def test_a_signal_during_a_save_stops_after_it(megatrain, project, interrupt):
    interrupt(loop, "save_checkpoint", at=1)
    megatrain("train cfg.yaml", code=75)
    saved, last = saved_steps(project / "run"), steps_of(project / "run")[-1]["step"]
    assert (saved[0], saved[-1]) == (5, last) and last in (5, 6)  # the next one may have begun


def test_a_signal_in_the_last_step_changes_nothing(megatrain, project, interrupt):
    interrupt(loop, "train_step", 2)
    megatrain("train cfg.yaml train.max_steps=2")
    assert (project / "run" / "final").is_dir()
    assert evaluations_of(project / "run")[-1]["step"] == 2


def test_a_second_ctrl_c_stops_at_once(megatrain, project, interrupt):
    threads = set(threading.enumerate())
    interrupt(loop, "train_step", at=3, number=signal.SIGINT, times=2)
    megatrain("train cfg.yaml", code=130)
    assert (saved_steps(project / "run"), len(steps_of(project / "run"))) == ([], 2)
    assert set(threading.enumerate()) <= threads, "nothing goes on in the background"


def test_a_handler_of_the_program_and_an_ignored_signal_stay(megatrain, project, interrupt):
    came: list[int] = []
    handlers: dict[int, Any] = {
        signal.SIGUSR2: lambda number, _: came.append(number),  # for something else
        signal.SIGHUP: signal.SIG_IGN,  # as nohup does
    }
    for number, handler in handlers.items():
        before = signal.signal(number, handler)
        try:
            interrupt(loop, "train_step", at=1, number=number)
            megatrain(f"train cfg.yaml train.max_steps=2 output=run-{number}")
        finally:
            assert signal.signal(number, before) == handler
        assert saved_steps(project / f"run-{number}") == [2]
    assert came == [signal.SIGUSR2]


# What is under way when a signal comes before the first step, and what must not be begun after it.
EARLY = {
    "the machine is looked at": (setup, "resolve_run", build.AskedSet, "rows"),
    "rows are read": (encoding.Encoder, "encode", cache.RowWriter, "finish"),
    "the run is described": (describe, "write_text", Engine, "load_weights"),
    "weights are loaded": (weights, "copy_tensor", Engine, "weights_changed"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("when", "number", "code"), [(w, *s) for w, s in zip(EARLY, SIGNALS[::-1], strict=False)]
)
def test_a_signal_before_the_first_step_ends_the_work(
    megatrain, project, interrupt, monkeypatch, when, number, code
):
    monkeypatch.setenv("MEGATRAIN_CACHE", str(project / "cache"))
    monkeypatch.setattr(encoding, "BATCH_ROWS", 8)
    megatrain("plan cfg.yaml")  # for what that keeps: `train` need not compare a small model
    handlers = [signal.getsignal(each) for each, _ in SIGNALS]
    (owner, name, later, work), after = EARLY[when], Mock(side_effect=AssertionError("goes on"))
    interrupt(owner, name, at=1, number=number)
    monkeypatch.setattr(later, work, after)
    done = megatrain("train cfg.yaml", code=code)
    said = f"stopped by {signal.Signals(number).name} before the first step: nothing was trained"
    assert done.err.count(said) == 1
    assert "megatrain resume" not in done.out
    assert not checkpoints(project / "run")
    assert not list((project / "cache").glob("*.tmp*"))
    assert not after.called
    assert [signal.getsignal(each) for each, _ in SIGNALS] == handlers


@pytest.mark.slow
def test_a_second_signal_before_the_first_step_stops_at_once(forker, project):
    twice = "import os; from megatrain.recipes import setup; f = setup.resolve_run\n"
    twice += (
        "def prepare(*a, **n):\n for _ in (1, 2): os.kill(os.getpid(), 15)\n return f(*a, **n)\n"
    )
    forker.start("train", "cfg.yaml", first=twice + "setup.resolve_run = prepare")
    assert forker.wait() == -signal.SIGTERM


def test_a_signal_while_libraries_are_imported_is_heeded(megatrain, project, monkeypatch):
    def find_model(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("megatrain.cli.training.find_model", find_model)
    done = megatrain("train cfg.yaml", code=75)
    assert "stopped by SIGTERM before the first step" in done.err
    assert {path.name for path in (project / "run").iterdir()} == {".lock", "train.log"}


# -- kill -9 -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_kill_9_at_any_moment_costs_no_bit(forker, project):
    draw, folder, kills, resumed = random.Random(5), project / "run", 0, 0
    config = ("precision=bfloat16", "checkpoint.every=1", "train.eval_every=3")
    forker.start("train", "cfg.yaml", *config, "output=whole")
    began = time.monotonic()
    assert forker.wait() == 0
    whole_s = time.monotonic() - began
    code = -1
    while code != 0:
        going_on = bool(checkpoints(folder))
        resumed += going_on
        child = forker.start(*(("resume", "run") if going_on else ("train", "cfg.yaml", *config)))
        if kills < 5:
            if not going_on:  # a kill before the first checkpoint would show nothing
                wait_for(lambda: bool(checkpoints(folder)))
            time.sleep(draw.uniform(0.0, 0.8 if going_on else 0.1) * whole_s)
            try:
                os.kill(child, signal.SIGKILL)
            except ProcessLookupError:  # it was quicker, and the forker has collected it
                pass
        code = forker.wait()
        kills += code == -signal.SIGKILL
        assert code in (0, -signal.SIGKILL), (project / "forked.log").read_text()
    assert resumed, "no kill hit a run that had saved"
    same_run(project / "whole", folder)


# -- disks ---------------------------------------------------------------------------------------


@pytest.fixture
def file_limit() -> Iterator[Callable[[int], None]]:
    """file_limit(n): no file may grow beyond n bytes, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(
        resource.RLIMIT_FSIZE, (size if size >= 0 else soft, hard)
    )
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_full_at_the_end_leaves_the_checkpoint_before(
    megatrain, project, before_step, file_limit, finished_project
):
    before_step(7, lambda: file_limit(60_000))
    done = megatrain("train cfg.yaml", code=7)
    file_limit(-1)
    assert "checkpoint-10.tmp/model.safetensors: cannot" in done.err
    assert "free space there or choose another folder" in done.err
    assert "Traceback" not in done.err
    folders = {path.name for path in (project / "run").iterdir() if path.is_dir()}
    assert folders == {"checkpoint-5", "last", "best", "proven"}
    assert "cannot" in (project / "run" / "train.log").read_text(), "the reason is in the log, too"
    before_step(7, lambda: None)
    megatrain("resume run")
    same_run(project / "run", finished_project / "run")


@pytest.mark.parametrize("beside", [True, False], ids=["beside training", "before the next step"])
def test_a_disk_full_in_the_middle_does_not_end_the_run(
    megatrain, project, before_step, file_limit, monkeypatch, beside
):
    monkeypatch.setattr(Beside, "usable", beside)
    before_step(2, lambda: file_limit(60_000))
    before_step(3, lambda: file_limit(-1))
    done = megatrain("train cfg.yaml train.max_steps=4 checkpoint.every=2")
    assert "error: step 2 is not saved, training goes on: " in done.err
    assert saved_steps(project / "run") == [4]


# -- power loss ------------------------------------------------------------------------------------

File = tuple[int, int]
RENAMES = ("rename", "replace")
MADE_AGAIN = "report.html"  # by `megatrain report`, so a run does not wait for the disk


class Disk:
    """Follows fsync and rename below a folder: what would be there after a power loss."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.synced: dict[File, tuple[int, int]] = {}
        self.renamed_in: dict[Path, set[str]] = {}
        self.lost: list[str] = []
        for name in RENAMES:
            patch.setattr(os, name, self.rename(getattr(os, name)))
        patch.setattr(os, "fsync", self.fsync(os.fsync))

    def fsync(self, call: Callable[[int], None]) -> Callable[[int], None]:
        def noted(fd: int) -> None:
            call(fd)
            found = os.fstat(fd)
            self.synced[found.st_dev, found.st_ino] = (found.st_size, found.st_mtime_ns)
            if stat.S_ISDIR(found.st_mode):
                self.renamed_in.pop(Path(os.readlink(f"/proc/self/fd/{fd}")), None)

        return noted

    def rename(self, call: Callable[..., None]) -> Callable[..., None]:
        def noted(source: Any, target: Any) -> None:
            path = Path(source).absolute()
            call(source, target)
            target = Path(target).absolute()
            if self.folder in path.parents and not target.name.endswith((".tmp", MADE_AGAIN)):
                self.check(target)
                self.renamed_in.setdefault(target.parent, set()).add(target.name)

        return noted

    def check(self, path: Path) -> None:
        inside = [path, *path.rglob("*")] if path.is_dir() and not path.is_symlink() else [path]
        for each in inside:
            found = each.lstat()
            known = self.synced.get((found.st_dev, found.st_ino))
            is_old_link = stat.S_ISLNK(found.st_mode)
            if not is_old_link and known != (found.st_size, found.st_mtime_ns):
                self.lost.append(str(each.relative_to(self.folder)))


@pytest.fixture
def disk(project: Path) -> Iterator[Disk]:
    with pytest.MonkeyPatch.context() as patch:
        yield Disk(project, patch)


def test_nothing_is_renamed_before_it_is_on_the_disk(megatrain, project, disk):
    megatrain("train cfg.yaml train.max_steps=2 checkpoint.every=1 output=new/runs/a")
    megatrain("resume new/runs/a train.max_steps=3")
    megatrain("export new/runs/a out")
    megatrain("export new/runs/a whole --dtype float32")
    with mt.Engine.from_pretrained("out", device="cpu") as engine:
        engine.save_pretrained("saved")
    assert disk.lost == []
    assert disk.renamed_in == {}, "each folder is synced after a rename in it"
    for folder in (project, project / "new", project / "new" / "runs"):
        found = folder.stat()
        assert (found.st_dev, found.st_ino) in disk.synced, folder
