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
from benchmarks.campaign.project import new_project, whole_run
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
        shutil.rmtree(self.project)
        shutil.copytree(self.copy, self.project, symlinks=True)
        child = start(self.project, "train", "cfg.yaml", *KEYS)
        time.sleep(draw.uniform(0.0, 1.0) * self.whole_s)
        what = self._change(draw, child.id)
        ended = child.wait(COMMAND_S)
        try:
            check_same(ended, self.project / "whole", run)
            if checkpoints(run):
                check_told(command(self.project, "resume", "run"))
        except AssertionError as error:
            raise AssertionError(f"{what}: {error}") from error
        return 1

    def _change(self, draw: random.Random, process: int) -> str:
        """Change something; returns what. Files may go while it looks."""
        kind = draw.choice(["damage"] * 4 + ["remove the run", "move the run", "stop", "term"])
        run = self.project / "run"
        match kind:
            case "damage":
                there = [path for path in files_in(self.project) if "whole" not in path.parts]
                path = draw.choice(there)
                try:
                    kind = f"{damage(path, there, draw)}: {path.relative_to(self.project)}"
                except OSError:  # it was quicker
                    pass
            case "remove the run":
                shutil.rmtree(run, ignore_errors=True)
            case "move the run":
                if run.is_dir():
                    run.rename(self.project / "moved")
            case "stop":
                os.kill(process, signal.SIGSTOP)
                time.sleep(draw.uniform(0, 1))
                os.kill(process, signal.SIGCONT)
            case "term":
                os.kill(process, signal.SIGTERM)
        return kind
