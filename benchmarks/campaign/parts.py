"""The parts of a campaign: what each tries, for which share of its time, and how much is wanted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.campaign.caches import KilledCaches
from benchmarks.campaign.damage import DamagedCheckpoints, DamagedFiles
from benchmarks.campaign.failures import FailingRuns, FailingSaves
from benchmarks.campaign.fuzz import Configs, Models, Rows
from benchmarks.campaign.kills import CONFIGURATIONS, KillPoints, RandomKills
from benchmarks.campaign.outside import Changes
from benchmarks.campaign.ranks import KilledRanks
from benchmarks.campaign.trials import Trial


@dataclass(frozen=True)
class Part:
    new: Callable[[Path], Trial]
    kind: str  # of which so much is wanted
    share: float  # of the time


@dataclass(frozen=True)
class Wanted:
    """How much of a kind of trial is wanted, in cases or seconds; None: as many as there are."""

    number: float | None
    unit: str


WANTED = {
    "kills": Wanted(10_000, "kills"),
    "kill points": Wanted(None, "system calls"),
    "corruptions": Wanted(10_000, "corruptions"),
    "kills of ranks": Wanted(100, "kills"),
    "failing calls": Wanted(None, "system calls"),
    "failing runs": Wanted(1_000, "runs"),
    "odd input": Wanted(7_200, "seconds"),
    "changes": Wanted(1_000, "changes"),
}
# In this order: what can be tried whole comes first and leaves the rest of its time to the others.
PARTS = {
    "kills before every system call": Part(KillPoints, "kill points", 2),
    "system calls that fail": Part(FailingSaves, "failing calls", 2),
    "damaged checkpoints": Part(DamagedCheckpoints, "corruptions", 2),
    "damaged files": Part(DamagedFiles, "corruptions", 3),
    "runs whose system calls fail": Part(FailingRuns, "failing runs", 3),
    "changes from outside": Part(Changes, "changes", 3),
    "odd rows": Part(Rows, "odd input", 3),
    "odd configs": Part(Configs, "odd input", 3),
    "odd models": Part(Models, "odd input", 3),
    **{f"kills of {name}": Part(partial(RandomKills, name), "kills", 4) for name in CONFIGURATIONS},
    "kills of tokenising": Part(KilledCaches, "kills", 1),
    "kills of one of two ranks": Part(KilledRanks, "kills of ranks", 2),
}
