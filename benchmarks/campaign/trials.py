"""What is tried again and again, and the count of it."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from benchmarks.campaign.children import Ended, in_child
from megatrain.errors import CONTROLS
from tests.recipes.same_run import same_run

LIMIT_S = 300.0  # of one case: many times what the slowest takes
COMMAND_S = 60.0
REASON = 600  # characters of a failure that are kept
TOLD = {0, 2, 3, 4, 5, 6, 7, 75}  # exit codes of commands that end as they should


class Trial(ABC):
    """Set up once in a folder of its own; then a case at a time is tried, each in a process of its
    own. A case is a name from which everything random about it is drawn."""

    def cases(self, seed: int) -> Iterator[str]:
        """Names of cases, without end unless they can all be tried."""
        return (f"{seed}-{number}" for number in count(1))

    @abstractmethod
    def attempt(self, case: str) -> int:
        """Try it; returns how many kills, corruptions, ... that were. Raises AssertionError, or
        anything, where something is lost."""


@dataclass
class Outcome:
    """What became of one trial. `of`: how many cases there are, where they can all be tried."""

    what: str
    tried: int = 0
    lost: int = 0
    seed: int = 0
    seconds: float = 0.0
    of: int | None = None
    failures: list[dict[str, str]] = field(default_factory=list)

    @property
    def survived(self) -> int:
        return self.tried - self.lost

    def count(self, case: str, ended: Ended) -> None:
        if ended.code == 0:
            self.tried += int(json.loads(ended.words.splitlines()[-1])["tried"])
            return
        self.tried, self.lost = self.tried + 1, self.lost + 1
        reason = "it hung" if ended.code is None else ended.words[-REASON:].strip()
        self.failures.append({"case": case, "reason": reason})


def run_case(trial: Trial, case: str) -> Ended:
    def attempt() -> int:
        try:
            print(json.dumps({"tried": trial.attempt(case)}))
        except AssertionError as lost:
            if not str(lost):
                raise
            print(lost)
            return 1
        return 0

    return in_child(attempt, LIMIT_S)


def tally(what: str, trial: Trial, seed: int, seconds: float) -> Outcome:
    """Try cases until the time is over, or all."""
    found, began = Outcome(what, seed=seed), time.monotonic()
    for case in trial.cases(seed):
        if time.monotonic() - began > seconds:
            break
        found.count(case, run_case(trial, case))
        if found.failures and found.failures[-1]["case"] == case:
            print(f"{what}: case {case} is lost: {found.failures[-1]['reason']}", flush=True)
    else:
        found.of = found.tried  # each is one
    found.seconds = time.monotonic() - began
    return found


# -- what may come of a command ------------------------------------------------------------------


def check_told(ended: Ended) -> None:
    """It ended by itself, and said what was wrong in words: no crash, no hang, no escape
    sequence."""
    assert ended.code is not None, f"it hung: {ended.words[-REASON:]}"
    assert ended.code in TOLD, f"exit code {ended.code}: {ended.words[-REASON:]}"
    for sign in ("Traceback (most recent call last)", "error: unexpected "):
        assert sign not in ended.words, ended.words[-REASON:]
    odd = CONTROLS.search(ended.words.replace("\r", ""))
    assert odd is None, f"{odd!r} in what it says"


def warned(ended: Ended) -> bool:
    return "warning: " in ended.words or "error: " in ended.words


def check_same(ended: Ended, whole: Path, run: Path) -> None:
    """A run that ended well, and said nothing, is bit for bit the one that nothing happened to."""
    check_told(ended)
    if ended.code == 0 and not warned(ended):
        same_run(whole, run)
