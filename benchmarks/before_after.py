"""`megatrain bench` of another checkout against this one.

    python -m benchmarks.before_after --before FOLDER --cases 7.6b-65k 7.6b-16k

FOLDER holds the other checkout's package (`git archive COMMIT megatrain | tar x -C FOLDER`). The
processes of a case run one after another, the other checkout's first and last, so that a drift of
the machine shows. Prints a table and writes JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

from benchmarks.cases import CASES, Case
from benchmarks.records import ROOT, machine, new_folder


@dataclass(frozen=True)
class Timed:
    """One process: seconds of its median step."""

    case: str
    what: str
    step_s: float
    steps_s: list[float]


def sizes(case: Case) -> list[str]:
    return ["--tokens-per-step", str(case.tokens), "--seq-len", str(case.seq_len)]


def run(case: Case, what: str, arguments: list[str], package: Path) -> Timed:
    """Run a module of `package` in a process of its own; it prints JSON."""
    environment = {**os.environ, "PYTHONPATH": f"{package}{os.pathsep}{ROOT}"}
    process = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=package,
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    found = json.loads(process.stdout)
    steps = found.get("steps_s") or [step["seconds"] for step in found["steps"]]
    return Timed(case.name, what, found["step_s"], steps)


def compare(case: Case, before: Path, steps: int) -> list[Timed]:
    """The other checkout, this one twice, and the other checkout again."""
    bench = ["megatrain", "bench", case.model, *sizes(case), "--steps", str(steps), "--json"]
    bench += case.overrides
    order = [("before", before), ("now", ROOT), ("now, again", ROOT), ("before, again", before)]
    return [run(case, what, bench, package) for what, package in order]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, required=True, help="folder of the other package")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["7.6b-65k", "7.6b-16k"])
    parser.add_argument("--steps", type=int, default=4, help="measured, after two to warm up")
    parser.add_argument("--output", type=Path, default=None, help="folder of the JSON file")
    args = parser.parse_args()
    folder = args.output or new_folder()
    folder.mkdir(parents=True, exist_ok=True)
    timed: list[Timed] = []
    for name in args.cases:
        timed += compare(CASES[name], args.before.absolute(), args.steps)
        record = {"date": date.today().isoformat(), "machine": machine()}
        figures = record | {"timed": [asdict(one) for one in timed]}
        (folder / "before_after.json").write_text(json.dumps(figures, indent=1) + "\n")
    for one in timed:
        print(f"{one.case:16} {one.what:20} {one.step_s:8.3f} s")


if __name__ == "__main__":
    main()
