"""kill -9 at random instants of `train` and `resume`, until a run is through."""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.campaign import calls
from benchmarks.campaign.children import Child, start, wait_until
from benchmarks.campaign.project import new_project, whole_run
from benchmarks.campaign.saves import all_stages
from benchmarks.campaign.trials import COMMAND_S, Trial
from megatrain.storage.manifest import read_manifest
from megatrain.storage.restore import find_resumable
from megatrain.storage.run_folder import checkpoints
from tests.recipes.same_run import same_run

KILLS = 8  # of one run
EARLY = 0.2  # share of first kills that may come before the first checkpoint
EVERY_STEP = "checkpoint.every=1"
SECOND_BACKWARD = ("memory.second_backward=true", "data.packing=true")
# what is trained, by name: keys
CONFIGURATIONS = {
    "adamw": (EVERY_STEP,),
    "int8 moments on NVMe": (EVERY_STEP, "optimizer.moments=int8", "memory.nvme=swap"),
    "lion without clipping": (EVERY_STEP, "optimizer.name=lion", "train.max_grad_norm=null"),
    "muon with second backward": (EVERY_STEP, "optimizer.name=muon", *SECOND_BACKWARD),
}


class RandomKills(Trial):
    """A case is a run that is killed several times and then brought to its end."""

    def __init__(self, name: str, folder: Path) -> None:
        self.keys, self.project = CONFIGURATIONS[name], new_project(folder)
        whole_run(self.project, self.keys)  # the first fills the cache
        shutil.rmtree(self.project / "whole")
        began = time.monotonic()
        whole_run(self.project, self.keys)
        self.whole_s = time.monotonic() - began

    def attempt(self, case: str) -> int:
        draw, run = random.Random(case), self.project / "run"
        shutil.rmtree(run, ignore_errors=True)
        kills, newest = 0, 0
        while True:
            child, resuming = self._start(run)
            if kills < KILLS:
                if not resuming and draw.random() > EARLY:
                    wait_until(lambda: bool(checkpoints(run)), child)
                    time.sleep(draw.uniform(0, 0.2) * self.whole_s)
                else:
                    time.sleep(draw.uniform(0, 1.0) * self.whole_s)
                child.kill()
            ended = child.wait(COMMAND_S)
            if ended.code == 0:
                break
            assert ended.code == -signal.SIGKILL, f"{ended.code}: {ended.words}"
            kills += 1
            newest = check_newest(run, newest)
        same_run(self.project / "whole", run)
        left = [path.name for path in run.iterdir() if path.name.endswith((".tmp", ".replaced"))]
        assert left == [], left
        return kills

    def _start(self, run: Path) -> tuple[Child, bool]:
        if checkpoints(run):
            return start(self.project, "resume", "run"), True
        return start(self.project, "train", "cfg.yaml", *self.keys), False


def check_newest(run: Path, newest: int) -> int:
    """The step of the newest save, which is intact and not older than before."""
    found = find_resumable(run)
    assert found.warnings == (), found.warnings
    step = 0 if found.path is None else read_manifest(found.path).step
    assert step >= newest, f"step {newest} was saved, step {step} is the newest"
    return step


class KillPoints(Trial):
    """A case is a scenario and the system call before which it is killed."""

    def __init__(self, folder: Path) -> None:
        self.stages = all_stages(folder)

    def cases(self, seed: int) -> Iterator[str]:
        points = []
        for name, stage in self.stages.items():
            stage.set_up()
            number = calls.count_calls(stage.act, calls.CHANGES)
            points += [f"{name}:{point}" for point in range(1, number + 1)]
        random.Random(seed).shuffle(points)
        yield from points

    def attempt(self, case: str) -> int:
        name, _, number = case.partition(":")
        stage = self.stages[name]
        stage.set_up()
        assert calls.killed_before(int(number), stage.act), "it made fewer calls this time"
        stage.check()
        return 1
