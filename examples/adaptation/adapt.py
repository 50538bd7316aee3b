"""Adapt a model to a domain, from fetching to the last figure: `make adaptation`.

    python -m examples.adaptation.adapt

Runs the commands that a person would type, each shown before it runs, and says how long each took.
Ends with the table of `check.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
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
    model, times = str(fetch.TARGET / fetch.MODEL), Times()
    fetch.main()
    times.note("fetch")
    evaluate(model, "before")
    times.note("before")
    for stage in check.STAGES:
        megatrain("train", str(HERE / f"{stage}.yaml"))
        evaluate(str(RUNS / stage), stage)
        times.note(stage)
    (RUNS / check.SECONDS).write_text(json.dumps(times.noted))
    check.main(RUNS)


def evaluate(model: str, name: str) -> None:
    """Run the tasks on a model or a run; their results are `tasks-NAME.json` beside the runs."""
    with (RUNS / check.TASKS.format(name)).open("w") as file:
        megatrain("eval", model, *TASKS, "--json", into=file)


class Times:
    """Seconds on the clock and of processors, own and of commands, between notes."""

    def __init__(self) -> None:
        self.noted: dict[str, dict[str, float]] = {}
        self._last = self._now()

    def note(self, name: str) -> None:
        now = self._now()
        spent = (new - old for new, old in zip(now, self._last, strict=True))
        self.noted[name] = dict(zip(("wall", "processor"), spent, strict=True))
        self._last = now

    def _now(self) -> tuple[float, float]:
        times = os.times()
        return times.elapsed, sum(times[:4])


def megatrain(*words: str, into: IO[str] | None = None) -> None:
    """Run a command, its result to this file or the terminal; ends with its exit code if not 0."""
    print(f"$ megatrain {' '.join(words)}" + (f" > {into.name}" if into else ""), flush=True)
    done = subprocess.run([sys.executable, "-m", "megatrain", *words], stdout=into, check=False)
    if done.returncode != 0:
        raise SystemExit(done.returncode)


if __name__ == "__main__":
    main()
