"""What a user waits for before the first step, in another checkout and in this one, on a CPU.

    make demo  # fetches the model and the rows
    python -m benchmarks.starts --before FOLDER

FOLDER holds the other checkout's package (`git archive COMMIT megatrain | tar x -C FOLDER`).
Commands run one after another, both checkouts in turn: `megatrain data` on the demo's rows written
many times over (tokenising), the same once more (the start from the token cache), and a run of
one step. Prints the least wall-clock and processor seconds of each; writes JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.records import ROOT, machine, new_folder

CONFIG = ROOT / "examples" / "demo" / "config.yaml"
DEMO = ROOT / ".cache" / "demo"


def write_rows(copies: int, path: Path) -> Path:
    """The demo's rows, each copy a little different, so that none is a repetition."""
    rows = json.loads((DEMO / "alpaca_en_demo.json").read_text())
    copied = [
        row | {"instruction": f"{row['instruction']} ({number})"}
        for number in range(copies)
        for row in rows
    ]
    path.write_text(json.dumps(copied))
    return path


def timed(package: Path, cache: Path, words: list[str]) -> dict[str, float]:
    environment = {**os.environ, "PYTHONPATH": str(package), "MEGATRAIN_CACHE": str(cache)}
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    words = [sys.executable, "-m", "megatrain", *words]
    subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, check=True)
    wall, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    computed = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall_s": wall, "processor_s": computed}


def rounds(
    packages: dict[str, Path], copies: int, count: int
) -> Iterator[tuple[str, str, dict[str, float]]]:
    """(what was done, by which checkout, its seconds)."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        rows = write_rows(copies, place / "rows.json")
        data = ["data", str(CONFIG), f"data.train={rows}", "--json"]
        train = ["train", str(CONFIG), "train.max_steps=1", "train.warmup=0"]
        for number in range(count):
            for name, package in packages.items():
                cache = place / f"{name}-{number}"
                yield "tokenising", name, timed(package, cache, data)
                yield "start from the cache", name, timed(package, cache, data)
                output = f"output={place / f'run-{name}-{number}'}"
                yield "run of one step", name, timed(package, cache, [*train, output])


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--before", type=Path, required=True, help="folder of the other package")
    parser.add_argument("--copies", type=int, default=20, help="of the demo's 999 rows")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    packages = {"before": args.before.absolute(), "now": ROOT}
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    for what, name, seconds in rounds(packages, args.copies, args.rounds):
        found.setdefault(what, {}).setdefault(name, []).append(seconds)
    record: dict[str, Any] = {"date": date.today().isoformat(), "machine": machine()}
    folder = new_folder()
    folder.mkdir(parents=True, exist_ok=True)
    figures = record | {"copies": args.copies, "rounds": found}
    (folder / "starts.json").write_text(json.dumps(figures, indent=1) + "\n")
    for what, by in found.items():
        for name, times in by.items():
            wall, processor = (min(t[key] for t in times) for key in ("wall_s", "processor_s"))
            print(f"{what:22} {name:8} {wall:7.2f} s, processor {processor:7.2f} s")


if __name__ == "__main__":
    main()
