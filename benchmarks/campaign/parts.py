"""The parts of a campaign, by name: what each tries, and for which share of the time.

What can be tried whole comes first, and leaves the rest of its time to the others.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.campaign.damage import DamagedCheckpoints, DamagedFiles
from benchmarks.campaign.failures import FailingRuns, FailingSaves
from benchmarks.campaign.fuzz import Configs, Models, Rows
from benchmarks.campaign.kills import CONFIGURATIONS, KillPoints, RandomKills
from benchmarks.campaign.ranks import KilledRanks
from benchmarks.campaign.trials import Trial

PARTS: dict[str, tuple[Callable[[Path], Trial], float]] = {
    "kills before every system call": (KillPoints, 2),
    "system calls that fail": (FailingSaves, 2),
    "damaged checkpoints": (DamagedCheckpoints, 2),
    "damaged files": (DamagedFiles, 3),
    "runs whose system calls fail": (FailingRuns, 3),
    "odd rows": (Rows, 3),
    "odd configs": (Configs, 3),
    "odd models": (Models, 3),
    **{f"kills of {name}": (partial(RandomKills, name), 4) for name in CONFIGURATIONS},
    "kills of one of two ranks": (KilledRanks, 2),
}
