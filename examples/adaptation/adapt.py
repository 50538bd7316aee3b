"""Adapt a model to a domain, from fetching to the last figure: `make adaptation`.

    python -m examples.adaptation.adapt

Runs the commands that a person would type, each shown before it runs, and says how long each took.
Ends with the table of `check.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

from examples.adaptation import check, fetch

HERE = Path("examples/adaptation")
RUNS = Path("runs/adaptation")
TASKS = ["--tasks", "adaptation", "--include-path", str(HERE / "tasks")]


def main() -> None:
    if RUNS.exists():
        raise SystemExit(f"error: {RUNS} is that of an earlier adaptation; remove or rename it")
    RUNS.mkdir(parents=True)
    seconds = {}
    started = time.monotonic()
    fetch.main()
    seconds["fetch"] = time.monotonic() - started
    model = str(fetch.TARGET / fetch.MODEL)
    with (RUNS / check.BEFORE).open("w") as file:
        seconds["before"] = megatrain("eval", model, *TASKS, "--json", into=file)
    for stage in check.STAGES:
        seconds[stage] = megatrain("train", str(HERE / f"{stage}.yaml"))
    (RUNS / check.SECONDS).write_text(json.dumps(seconds))
    check.main(RUNS)


def megatrain(*words: str, into: IO[str] | None = None) -> float:
    """Run a command, its result to this file or the terminal; seconds that it took.

    Ends with its exit code if that is not 0.
    """
    print(f"$ megatrain {' '.join(words)}" + (f" > {into.name}" if into else ""), flush=True)
    started = time.monotonic()
    code = subprocess.run([sys.executable, "-m", "megatrain", *words], stdout=into).returncode
    if code != 0:
        raise SystemExit(code)
    return time.monotonic() - started


if __name__ == "__main__":
    main()
