"""Ends a run that hangs, with what every thread was doing."""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatrain.errors import UNEXPECTED
from megatrain.heartbeat import total
from megatrain.recipes.signals import STDERR
from megatrain.reporting.summary import human_seconds

WAKES = 20  # in the time allowed
PLANNED_STEPS = 3  # without a sign of life are no hang yet
# Libraries that download, tokenise or take a model apart give no signs: until the plan is made, a
# process that computes, reads or writes as much as this has not hung.
BUSY_SHARE = 0.05  # of one core
BUSY_BYTES = 1 << 20
COUNTED = Path("/proc/self/io")


# why: decision 0056
class Watch:
    """Ends the process after some seconds without a sign of life.

    Counts its own wake-ups, not the clock: a process that was stopped and goes on has not hung.
    """

    def __init__(self, timeout_s: float, log: Path | None) -> None:
        """log: file to which every thread's stack is appended, as to stderr."""
        self.allowed_s, self.log = timeout_s, log
        self.preparing = True  # nothing is planned yet
        self.ended = threading.Event()

    def expect(self, step_s: float) -> None:
        """From here on work gives signs of life itself, at least once in three planned steps."""
        self.allowed_s = max(self.allowed_s, PLANNED_STEPS * step_s)
        self.preparing = False

    def look(self) -> None:
        """The thread: look for signs of life until `ended`."""
        seen, moved, computed, idle = total(), _bytes_moved(), time.process_time(), 0
        while not self.ended.wait(pause := self.allowed_s / WAKES):
            lives = total() != seen
            seen = total()
            if self.preparing and not lives:
                busy = time.process_time() - computed > BUSY_SHARE * pause
                lives = busy or _bytes_moved() - moved > BUSY_BYTES
            if lives:
                moved = _bytes_moved()
            computed, idle = time.process_time(), 0 if lives else idle + 1
            if idle >= WAKES:
                self._end()

    def _end(self) -> None:
        """Write what hangs and leave: nothing is saved, as whatever hangs may hold a save up."""
        when, where, way_on = "", "", "nothing is lost"
        if self.log is not None:
            where = f" and is in {self.log}"
        if self.preparing:
            when = " before the first step"
        elif self.log is not None:
            resumed = f"`megatrain resume {self.log.parent}`"
            way_on = f"go on from the last checkpoint with {resumed}"
        sentence = (
            f"error: nothing has moved for {human_seconds(self.allowed_s)}{when} (hang_timeout); "
            f"every thread's stack follows{where}; {way_on}\n"
        )
        # past logging and Python's streams, whose locks what hangs may hold
        with suppress(OSError):
            if self.log is not None:
                _dump(sentence, os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW))
        with suppress(OSError):
            _dump(sentence, STDERR)
        os._exit(UNEXPECTED)


@contextmanager
def watchdog(timeout_s: float | None, log: Path | None = None) -> Iterator[Watch]:
    """Inside, end the process after `timeout_s` without a sign of life; None: never."""
    watch = Watch(timeout_s or 0.0, log)
    if timeout_s is None:
        yield watch
        return
    thread = threading.Thread(target=watch.look, name="megatrain-watchdog", daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        watch.ended.set()
        thread.join()


def _bytes_moved() -> int:
    """Read and written by this process so far, from files and sockets; 0 where nobody counts."""
    try:
        lines = COUNTED.read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))


def _dump(sentence: str, descriptor: int) -> None:
    os.write(descriptor, sentence.encode())
    faulthandler.dump_traceback(descriptor, all_threads=True)
