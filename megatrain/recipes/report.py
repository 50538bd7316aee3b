"""`report.html` of a run folder: written while the run goes on, and anew by `megatrain report`."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

from megatrain.errors import ConfigError
from megatrain.recipes.report_blocks import blocks_of
from megatrain.recipes.reported import Reported
from megatrain.reporting.history import BUCKETS, History, Row, read_history
from megatrain.reporting.page import REPORT_FILE, page, write_page

logger = logging.getLogger("megatrain")

# While a run goes on, a page is written again after so many times what the last one took, and not
# before so many seconds.
PACE, EVERY_S = 100, 5.0
FINE = 4  # runs in a page that are drawn as finely as one


def write_report(folders: Sequence[Path], output: Path | None = None) -> Path:
    """Write the page of these run folders; by default into the only one. Raises MegaTrainError."""
    if output is None and len(folders) > 1:
        raise ConfigError("command line: name the page of several runs: --output FILE")
    path = output or folders[0] / REPORT_FILE
    buckets = BUCKETS * FINE // max(FINE, len(folders))
    names = [str(run) if len(folders) > 1 else "" for run in folders]  # some have the same last one
    runs = [
        Reported.of(run, read_history(run, buckets), name)
        for run, name in zip(folders, names, strict=True)
    ]
    write_page(path, report_of(runs))
    return path


def report_of(runs: Sequence[Reported]) -> str:
    """The page of one run, or of several side by side."""
    names = [run.name for run in runs]
    return page(", ".join(names), names, [*blocks_of(runs)])


class LiveReport:
    """The page of a run that goes on. That it cannot be written is said once."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._history = folder, History()
        self._next = 0.0  # time.monotonic() from which it is worth writing again
        self._failed = False

    def begin(self) -> None:
        """Read what the run has written before. Raises StorageError."""
        self._history = read_history(self._folder)

    def add(self, row: Row) -> None:
        """A new line of metrics.jsonl."""
        self._history.add(row)

    def write(self, last: bool = False) -> None:
        """Write it, unless the last time is so recent that this would slow the run.

        Called after every step. last: write it in any case.
        """
        began = time.monotonic()
        if began < self._next and not last:
            return
        try:
            page_now = report_of([Reported.of(self._folder, self._history)])
            write_page(self._folder / REPORT_FILE, page_now)
        except Exception as error:  # noqa: BLE001  no picture is worth a run
            if not self._failed:
                reason = " ".join(str(error).split()) or type(error).__name__
                logger.warning(f"no report is written, training goes on: {reason}")
            self._failed = True
        now = time.monotonic()
        self._next = now + max(EVERY_S, PACE * (now - began))


class NoReport(LiveReport):
    """Of a rank that does not speak."""

    def write(self, last: bool = False) -> None:
        pass
