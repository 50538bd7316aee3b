"""What is done to a run folder, step by step: each scenario must survive a kill before any system
call, and any system call's failure."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatrain.storage.checkpoint import (
    find_resumable,
    load_checkpoint,
    nothing_to_resume,
    reopen,
    write_final,
)
from megatrain.storage.export import export
from tests.helpers.still import StillEngine, save_steps, still_engine

Action = Callable[[Path, StillEngine], object]


@dataclass(frozen=True)
class Scenario:
    """What was there, what is cut off, and the steps of which one must be found then."""

    before: Action
    action: Action
    steps: frozenset[int]


def saved(*steps: int) -> Action:
    return lambda folder, engine: save_steps(folder / "run", engine, *steps, keep=2)


def final(folder: Path, engine: StillEngine, full: bool = False) -> None:
    write_final(folder / "run", full=full)


def finished(folder: Path, engine: StillEngine) -> None:
    saved(1, 2)(folder, engine)
    final(folder, engine, full=True)


def lost_newest(folder: Path, engine: StillEngine) -> None:
    finished(folder, engine)
    shutil.rmtree(folder / "run" / "checkpoint-2")


def reopened(folder: Path, engine: StillEngine) -> None:
    found = find_resumable(folder / "run").path
    if found is None:
        raise nothing_to_resume(folder / "run")
    reopen(folder / "run", found)


def exported(folder: Path, engine: StillEngine, dtype: str | None = None) -> None:
    export(folder / "run", folder / "out", dtype)


def nothing(folder: Path, engine: StillEngine) -> None:
    pass


def scenario(before: Action, action: Action, *steps: int) -> Scenario:
    return Scenario(before, action, frozenset(steps))


SCENARIOS = {
    "first save": scenario(nothing, saved(1), 0, 1),
    "save": scenario(saved(1, 2), saved(3), 2, 3),
    "save again": scenario(saved(1, 2), saved(2), 2),
    "final": scenario(saved(1, 2), final, 2),
    "final with state": scenario(saved(1, 2), partial(final, full=True), 2),
    "reopen": scenario(finished, reopened, 2),
    "newest lost": scenario(lost_newest, reopened, 2),
    "export": scenario(finished, exported, 2),
    "export in float32": scenario(finished, partial(exported, dtype="float32"), 2),
}


class Stage:
    """A scenario, to be tried again and again in a folder of its own."""

    def __init__(self, name: str, folder: Path, engine: StillEngine) -> None:
        self.scenario, self.engine = SCENARIOS[name], engine
        self.start, self.folder, whole = folder / "start", folder / "now", folder / "whole"
        self.start.mkdir(parents=True)
        self.bits = {step: self._bits_of(step) for step in self.scenario.steps}
        self.scenario.before(self.start, engine)
        shutil.copytree(self.start, whole, symlinks=True)
        self.scenario.action(whole, engine)
        self.exported = contents(whole / "out")

    def _bits_of(self, step: int) -> str:
        self.engine.update(step)
        return self.engine.bits()

    def set_up(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.start, self.folder, symlinks=True)

    def act(self) -> None:
        self.scenario.action(self.folder, self.engine)

    def check(self) -> None:
        """Nothing is lost, every bit is as saved, and the next save and export put it right."""
        run, out, engine = self.folder / "run", self.folder / "out", self.engine
        path = find_resumable(run).path
        step = 0 if path is None else load_checkpoint(path, engine)["step"]
        assert step in self.scenario.steps, f"step {step} is the newest"
        assert step == 0 or engine.bits() == self.bits[step], "bits differ"
        save_steps(run, engine, 9, keep=1)
        left = {path.name for path in run.iterdir()} - {"final"}
        assert left == {"checkpoint-9", "last"}, f"left over: {left}"
        assert os.readlink(run / "last") == "checkpoint-9"
        if not self.exported:
            return
        if out.exists():
            assert contents(out) == self.exported, "half an export"
        else:
            export(run, out)
        left = {path.name for path in self.folder.iterdir()}
        assert left == {"run", "out"}, f"left over by the export: {left}"


def all_stages(folder: Path) -> dict[str, Stage]:
    """Every scenario with a folder and an engine of its own."""
    return {
        name: Stage(name, folder / str(number), still_engine(layers=1))
        for number, name in enumerate(SCENARIOS)
    }


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a folder; none if it is not there."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
