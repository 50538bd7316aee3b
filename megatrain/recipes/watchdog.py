"""Ends a run that hangs, with what every thread was doing."""

from __future__ import annotations

import faulthandler
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatrain.errors import UNEXPECTED
from megatrain.heartbeat import total
from megatrain.recipes.signals import STDERR
from megatrain.reporting.words import human_seconds

WAKES = 20  # in the time allowed
PLANNED_STEPS = 3  # without a sign of life are no hang yet


@contextmanager
def watchdog(timeout_s: float | None, step_s: float, log: Path) -> Iterator[None]:
    """Inside, end the process after `timeout_s` (at least three planned steps) without a beat.

    Counts its own wake-ups, not the clock: a process that was stopped and goes on has not hung.

    Args:
        timeout_s: seconds; None: never.
        step_s: a step as planned, in seconds.
        log: file to which every thread's stack is appended, as to stderr.
    """
    if timeout_s is None:
        yield
        return
    allowed = max(timeout_s, PLANNED_STEPS * step_s)
    ended = threading.Event()

    def watch() -> None:
        seen, idle = total(), 0
        while not ended.wait(allowed / WAKES):
            now = total()
            seen, idle = now, idle + 1 if now == seen else 0
            if idle >= WAKES:
                _end(allowed, log)

    thread = threading.Thread(target=watch, name="megatrain-watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _end(seconds: float, log: Path) -> None:
    """Write what hangs and leave: nothing is saved, as whatever hangs may hold a save up, too."""
    sentence = (
        f"error: nothing has moved for {human_seconds(seconds)} (hang_timeout); every thread's "
        f"stack follows and is in {log}; go on from the last checkpoint with `megatrain resume "
        f"{log.parent}`\n"
    )
    # past logging and Python's streams, whose locks what hangs may hold
    with suppress(OSError):
        _dump(sentence, os.open(log, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW))
    with suppress(OSError):
        _dump(sentence, STDERR)
    os._exit(UNEXPECTED)


def _dump(sentence: str, descriptor: int) -> None:
    os.write(descriptor, sentence.encode())
    faulthandler.dump_traceback(descriptor, all_threads=True)
