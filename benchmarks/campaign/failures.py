"""System calls that fail, once or for ever."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

from benchmarks.campaign import calls
from benchmarks.campaign.children import command, start
from benchmarks.campaign.project import new_project, whole_run
from benchmarks.campaign.saves import all_stages
from benchmarks.campaign.trials import COMMAND_S, Trial, check_same, check_told, warned
from megatrain.storage.run_folder import checkpoints
from tests.recipes.same_run import same_run

NAMES = (*calls.CHANGES, *calls.READS)
ERRNOS = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC}
HOW_LONG = {"once": False, "for ever": True}
ENDS = {0, 2, 7}  # done all the same, or refused in a sentence


_write = os.write


def _note(fd: int) -> None:
    _write(fd, b".")


class FailingSaves(Trial):
    """A case is a scenario, the system call that fails, how, and for how long."""

    def __init__(self, folder: Path) -> None:
        self.stages = all_stages(folder)

    def cases(self, seed: int) -> Iterator[str]:
        points = []
        for name, stage in self.stages.items():
            stage.set_up()
            number = calls.count_calls(stage.act, NAMES)
            points += [
                f"{name}:{point}:{error}:{long}"
                for point in range(1, number + 1)
                for error in ERRNOS
                for long in HOW_LONG
            ]
        random.Random(seed).shuffle(points)
        yield from points

    def attempt(self, case: str) -> int:
        name, number, error, long = case.split(":")
        stage = self.stages[name]
        stage.set_up()
        before = calls.failing(int(number), ERRNOS[error], HOW_LONG[long])
        ended = calls.with_calls(stage.act, before, NAMES)
        assert ended.code in ENDS, f"{ended.code}: {ended.words}"
        stage.check()
        return 1


class FailingRuns(Trial):
    """A case is a whole `train` in which calls on the project's files fail; then `resume` goes on
    without."""

    def __init__(self, folder: Path) -> None:
        self.project = new_project(folder)
        whole_run(self.project)
        shutil.rmtree(self.project / "cache")  # a run that makes its tokens anew makes most calls
        noted = folder / "calls"

        def count() -> None:
            calls.watch(lambda *_: _note(fd), NAMES, self.project)

        fd = os.open(noted, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        ended = start(self.project, "train", "cfg.yaml", first=count).wait(COMMAND_S)
        os.close(fd)
        assert ended.code == 0, ended.words
        self.calls = noted.stat().st_size

    def attempt(self, case: str) -> int:
        draw, run = random.Random(case), self.project / "run"
        for made in (run, self.project / "cache"):
            shutil.rmtree(made, ignore_errors=True)
        number, error = draw.randint(1, self.calls), draw.choice([*ERRNOS.values()])
        before = calls.failing(number, error, draw.random() < 0.5)
        child = start(
            self.project,
            "train",
            "cfg.yaml",
            first=lambda: calls.watch(before, NAMES, self.project),
        )
        ended = child.wait(COMMAND_S)
        check_same(ended, self.project / "whole", run)
        if not checkpoints(run):
            assert ended.code != 0
            shutil.rmtree(run, ignore_errors=True)
            again = command(self.project, "train", "cfg.yaml")
        else:
            again = command(self.project, "resume", "run")
        check_told(again)
        assert again.code == 0, again.words
        if not warned(again) and not warned(ended):
            same_run(self.project / "whole", run)
        return 1
