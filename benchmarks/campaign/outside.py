"""Changes by others while a run is under way: files that go, come back older, or become something
else."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from pathlib import Path

from benchmarks.campaign.children import command, start
from benchmarks.campaign.damage import damage, files_in
from benchmarks.campaign.project import new_project, put_back, whole_run
from benchmarks.campaign.trials import COMMAND_S, Trial, check_same, check_told
from megatrain.storage.run_folder import checkpoints

KEYS = ("checkpoint.every=2",)


class Changes(Trial):
    """At a random instant of a run something is changed around it; then it is resumed."""

    def __init__(self, folder: Path) -> None:
        self.project = new_project(folder)
        whole_run(self.project, KEYS)
        shutil.rmtree(self.project / "whole")
        began = time.monotonic()
        whole_run(self.project, KEYS)
        self.whole_s = time.monotonic() - began
        self.copy = folder / "copy"
        shutil.copytree(self.project, self.copy, symlinks=True)

    def attempt(self, case: str) -> int:
        draw, run = random.Random(case), self.project / "run"
        put_back(self.copy, self.project)
        child = start(self.project, "train", "cfg.yaml", *KEYS)
        time.sleep(draw.uniform(0.0, 1.0) * self.whole_s)
        # what a run makes, it must know again; what it is given may be meant
        given = draw.random() < 0.3
        what = self._damage(draw, given) if draw.random() < 0.5 else self._change(draw, child.id)
        ended = child.wait(COMMAND_S)
        try:
            check_told(ended)
            if not given:
                check_same(ended, self.project / "whole", run)
            if checkpoints(run):
                check_told(command(self.project, "resume", "run"))
        except AssertionError as error:
            raise AssertionError(f"{what}: {error}") from error
        return 1

    def _damage(self, draw: random.Random, given: bool) -> str:
        """Damage a file; returns which and how."""
        names = ("model", ".") if given else ("run", "cache")
        there = files_in(self.project / draw.choice(names))
        if not there:
            return "nothing"
        path = draw.choice(there)
        try:
            return f"{damage(path, there, draw)}: {path.relative_to(self.project)}"
        except OSError:  # the run was quicker
            return "nothing"

    def _change(self, draw: random.Random, process: int) -> str:
        """Do something to the run's folder or its process; returns what."""
        kind, run = draw.choice(["remove", "move", "stop", "end"]), self.project / "run"
        match kind:
            case "remove":
                shutil.rmtree(run, ignore_errors=True)
            case "move":
                if run.is_dir():
                    run.rename(self.project / "moved")
            case "stop":
                os.kill(process, signal.SIGSTOP)
                time.sleep(draw.uniform(0, 1))
                os.kill(process, signal.SIGCONT)
            case "end":
                os.kill(process, signal.SIGTERM)
        return kind
