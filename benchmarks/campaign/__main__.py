"""Tries, for hours, what must never be lost and what must never crash or hang.

    python -m benchmarks.campaign --hours 8 --seed 1
    python -m benchmarks.campaign --only "odd rows" --case 1-345

Prints one JSON line for each part: what was tried, how often, what survived, what was lost, from
which seed, in how many seconds. The name of a case that is lost is printed too; --case tries it
again. All of it is written to benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.campaign.trials import Trial

# Before anything imports torch or a Hugging Face library: one thread, for children are forked, and
# no network.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


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


def main() -> int:
    args = parse()
    os.environ.update(ENVIRONMENT)
    with tempfile.TemporaryDirectory(prefix="megatrain-campaign-", dir=args.folder) as folder:
        os.environ["HF_HOME"] = os.environ["MEGATRAIN_CACHE"] = f"{folder}/home"
        from benchmarks.campaign.project import warm

        known = parts()
        names = args.only or [*known]
        unknown = [name for name in names if name not in known]
        if unknown:
            sys.exit(f"error: unknown part {unknown[0]!r}; known are {', '.join(known)}")
        warm(Path(folder) / "warm")
        if args.case:
            return try_one(names[0], args.case, Path(folder))
        found, of = [], commit()
        for outcome in outcomes(names, args, Path(folder)):
            print(json.dumps(outcome), flush=True)
            found.append(outcome)
            write(args, of, found)  # after each part: a campaign may be cut off
    return 1 if any(outcome["lost"] or not outcome["tried"] for outcome in found) else 0


def parts() -> dict[str, tuple[Callable[[Path], Trial], float]]:
    """Parts by name: what each tries, and its share of the time. What can be tried whole comes
    first, and leaves the rest of its time to the others."""
    from benchmarks.campaign.damage import DamagedCheckpoints, DamagedFiles
    from benchmarks.campaign.failures import FailingRuns, FailingSaves
    from benchmarks.campaign.fuzz import Configs, Models, Rows
    from benchmarks.campaign.kills import CONFIGURATIONS, KilledRanks, KillPoints, RandomKills

    return {
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


def try_one(name: str, case: str, folder: Path) -> int:
    """One case, and what it says."""
    from benchmarks.campaign.trials import run_case

    ended = run_case(parts()[name][0](folder / "part"), case)
    print(ended.words, end="")
    return 0 if ended.code == 0 else 1


def outcomes(
    names: Sequence[str], args: argparse.Namespace, folder: Path
) -> Iterator[dict[str, Any]]:
    """What became of each part; each gets its share of the time that is left."""
    from benchmarks.campaign.trials import tally

    known = parts()
    end, shares = time.monotonic() + 3600 * args.hours, [known[name][1] for name in names]
    for number, name in enumerate(names):
        began, place = time.monotonic(), folder / str(number)
        seconds = (end - began) * shares[number] / sum(shares[number:])
        place.mkdir()
        trial = known[name][0](place)  # takes some of the time
        outcome = tally(name, trial, args.seed, seconds - (time.monotonic() - began))
        yield {**asdict(outcome), "survived": outcome.survived}


def write(args: argparse.Namespace, of: str, found: Sequence[dict[str, Any]]) -> None:
    from benchmarks import records

    path = args.json or records.new_folder() / "campaign.json"
    about = {
        "date": date.today().isoformat(),
        "machine": records.machine(),
        "commit": of,
        "command": ["python", "-m", "benchmarks.campaign", *sys.argv[1:]],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**about, "parts": found}, indent=1) + "\n")


def commit() -> str:
    words = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
