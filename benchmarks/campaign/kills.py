"""kill -9 at random instants of `train` and `resume`, of one process or of one of two ranks, until
a run is through."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from benchmarks.campaign import calls
from benchmarks.campaign.children import Child, start, wait_until
from benchmarks.campaign.project import new_project, whole_run
from benchmarks.campaign.saves import all_stages
from benchmarks.campaign.trials import COMMAND_S, Trial
from examples.images import draw
from megatrain.recipes.ranks.launch import environment_of, free_port
from megatrain.storage.checkpoint import find_resumable
from megatrain.storage.manifest import read_manifest
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
    "answers that are written": (
        *("method=grpo", "data.train=prompts.jsonl", "data.eval=null", "checkpoint.every=3"),
        *("train.tokens_per_step=null", "train.rows_per_step=8", "grpo.num_generations=4"),
        *("rollout.generation_batch_size=16", "rollout.steps_per_generation=2"),
        *("grpo.max_completion_length=6", "rewards.functions=[rewards.py:slow]"),
    ),
    "pictures and their tower": (
        *(EVERY_STEP, "model={config: sees/model}", "method=sft", "precision=float32"),
        *("data.train=sees/train.jsonl", "data.eval=sees/eval.jsonl", "train.freeze=[]"),
    ),
}
REWARDS = """import time
def slow(completions, **columns):
    time.sleep(0.05)
    return [float(len(text) % 3) for text in completions]
"""


class RandomKills(Trial):
    """A case is a run that is killed several times and then brought to its end."""

    def __init__(self, name: str, folder: Path) -> None:
        self.keys, self.project = CONFIGURATIONS[name], new_project(folder)
        prompts = "".join(f'{{"prompt": "{a}{b} is"}}\n' for a in "abcdef" for b in "abcd")
        (self.project / "prompts.jsonl").write_text(prompts)
        (self.project / "rewards.py").write_text(REWARDS)
        draw_pictures(self.project / "sees")
        whole_run(self.project, self.keys)  # the first fills the cache
        shutil.rmtree(self.project / "whole")
        began = time.monotonic()
        whole_run(self.project, self.keys)
        self.whole_s = time.monotonic() - began

    def attempt(self, case: str) -> int:
        draw, run = random.Random(case), self.project / "run"
        shutil.rmtree(run, ignore_errors=True)
        kills, newest, journals = 0, 0, dict[Path, bytes]()
        while True:
            check_kept(journals)
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
            journals = {path: path.read_bytes() for path in run.glob("rollouts/*.jsonl")}
        check_kept(journals)
        same_run(self.project / "whole", run)
        left = [path.name for path in run.iterdir() if path.name.endswith((".tmp", ".replaced"))]
        assert left == [], left
        return kills

    def _start(self, run: Path) -> tuple[Child, bool]:
        if checkpoints(run):
            return start(self.project, "resume", "run"), True
        return start(self.project, "train", "cfg.yaml", *self.keys), False


def draw_pictures(folder: Path) -> None:
    """Pictures, questions about them, and a model of two layers, as `same_run` wants, that sees."""
    draw.model(folder / "model")
    described = folder / "model" / "config.json"
    about = json.loads(described.read_text())
    about["text_config"]["num_hidden_layers"] = 2
    about["vision_config"]["deepstack_visual_indexes"] = [1]
    described.write_text(json.dumps(about))
    for name, count in (("train", 24), ("eval", 6)):
        draw.rows(folder, name, count, seed=count)


def check_kept(journals: dict[Path, bytes]) -> None:
    """Lines that are whole are still there, where the file is: no answer was written twice."""
    for path, before in journals.items():
        whole = before[: before.rfind(b"\n") + 1]
        kept = not path.exists() or path.read_bytes().startswith(whole)
        assert kept, f"{path.name}: what was on disk is written anew"


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


# -- one of two ranks -----------------------------------------------------------------------------

RANKS = 2
ENDED_S = 20.0  # by when all have ended
RANK_KEYS = (EVERY_STEP, "train.rows_per_step=6", "precision=float32")


class KilledRanks(Trial):
    """A case is a run of two ranks, of which one is killed again and again."""

    def __init__(self, folder: Path) -> None:
        self.project = new_project(folder)
        for _ in range(2):  # the first fills the cache
            shutil.rmtree(self.project / "whole", ignore_errors=True)
            began = time.monotonic()
            ranks = self._start("train", "cfg.yaml", *RANK_KEYS, "output=whole")
            ended = [rank.wait(COMMAND_S) for rank in ranks]
            assert {each.code for each in ended} == {0}, [each.words for each in ended]
            self.whole_s = time.monotonic() - began

    def attempt(self, case: str) -> int:
        draw, run = random.Random(case), self.project / "run"
        shutil.rmtree(run, ignore_errors=True)
        kills, newest = 0, 0
        while True:
            line = ("resume", "run") if checkpoints(run) else ("train", "cfg.yaml", *RANK_KEYS)
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
