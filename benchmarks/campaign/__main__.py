"""Tries, for hours, what must never be lost and what must never crash or hang.

    python -m benchmarks.campaign --hours 8 --seed 1
    python -m benchmarks.campaign --only "odd rows" --case 1-345

Prints one JSON line for each part: what was tried, how often, what survived, what was lost, from
which seed, in how many seconds. The name of a case that is lost is printed too; --case tries it
again. All of it is written to benchmarks/results, from where `python -m benchmarks.campaign.page`
makes docs/reliability.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from pathlib import Path


@dataclass(frozen=True)
class Part:
    """A trial, and the share of the time that it gets."""

    new: Callable[[Path], "Trial"]
    share: float
    kind: str


def parse() -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", metavar="PART", help="parts by name; default: all")
    parser.add_argument("--case", help="try this case alone, and show what becomes of it")
    where = "folder to work in; default: the system's for temporary files"
    parser.add_argument("--folder", type=Path, help=where)
    parser.add_argument("--json", type=Path, help="file for results; default: of this day")
    return parser.parse_args()
