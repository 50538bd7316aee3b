"""kill -9 of one of two ranks, until a run is through."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from functools import partial
from pathlib import Path

from benchmarks.campaign.children import Child, start, wait_until
from benchmarks.campaign.kills import EVERY_STEP, check_newest
from benchmarks.campaign.project import new_project
from benchmarks.campaign.trials import COMMAND_S, Trial
from megatrain.recipes.ranks.launch import environment_of, free_port
from megatrain.storage.run_folder import checkpoints
from tests.recipes.same_run import same_run

RANKS, KILLS = 2, 8  # kills of one run
ENDED_S = 20.0  # by when all have ended
KEYS = (EVERY_STEP, "train.rows_per_step=6", "precision=float32")


class KilledRanks(Trial):
    """A case is a run of two ranks, of which one is killed again and again."""

    def __init__(self, folder: Path) -> None:
        self.project = new_project(folder)
        for _ in range(2):  # the first fills the cache
            shutil.rmtree(self.project / "whole", ignore_errors=True)
            began = time.monotonic()
            ranks = self._start("train", "cfg.yaml", *KEYS, "output=whole")
            ended = [rank.wait(COMMAND_S) for rank in ranks]
            assert {each.code for each in ended} == {0}, [each.words for each in ended]
            self.whole_s = time.monotonic() - began

    def attempt(self, case: str) -> int:
        draw, run = random.Random(case), self.project / "run"
        shutil.rmtree(run, ignore_errors=True)
        kills, newest = 0, 0
        while True:
            line = ("resume", "run") if checkpoints(run) else ("train", "cfg.yaml", *KEYS)
            logged = size_of(run / "train.log")
            ranks = self._start(*line)
            victim = draw.randrange(RANKS)
            if kills < KILLS:
                # they have met: before that, a launcher ends all
                wait_until(partial(is_longer, run / "train.log", logged), ranks[0])
                time.sleep(draw.uniform(0, 0.7) * self.whole_s)
                ranks[victim].kill()
            began = time.monotonic()
            ended = [rank.wait(ENDED_S if kills < KILLS else COMMAND_S) for rank in ranks]
            codes = [each.code for each in ended]
            if set(codes) == {0}:
                break
            said = f"{codes} after {time.monotonic() - began:.0f} s: {ended[1 - victim].words}"
            assert codes[victim] == -signal.SIGKILL, said
            named = (f"rank {victim} on ", "not all 2 ranks have met")
            # the other may have been through
            assert codes[1 - victim] == 0 or any(n in ended[1 - victim].words for n in named), said
            kills += 1
            newest = check_newest(run, newest)
            if codes[1 - victim] == 0 and line[0] == "resume":
                break
        same_run(self.project / "whole", run)
        return kills

    def _start(self, *arguments: str) -> list[Child]:
        port = free_port()
        return [
            start(self.project, *arguments, first=partial(become, rank, port))
            for rank in range(RANKS)
        ]


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def is_longer(path: Path, size: int) -> bool:
    return size_of(path) > size


def become(rank: int, port: int) -> None:
    """Make this process one of the ranks that meet at a port."""
    os.environ |= environment_of(rank, RANKS, port)
