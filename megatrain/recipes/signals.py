"""Signals ask a run to stop, which the loop does where nothing is lost: a handler sets a flag."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOPPED = 75  # exit code: a signal stopped the run and left a checkpoint to resume
INTERRUPTED = 130  # exit code: Ctrl-C, after saving
NOTE = b"\nfinishing this step and saving; a second signal stops at once\n"
STDERR = 2


class StopRequest:
    """The signal that asked the run to stop, if one came."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def came(self) -> bool:
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        return INTERRUPTED if self.signal == signal.SIGINT else STOPPED


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Turn the first SIGINT or SIGTERM into a request; a second one stops the process at once.

    Outside the main thread, where Python allows no handlers, signals keep their meaning and the
    request is never set.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    both = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) or signal.SIG_DFL for number in both}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, _frame: FrameType | None) -> None:
        request.signal = number
        restore()
        os.write(STDERR, NOTE)  # past Python's buffers, which the signal may have interrupted

    for number in before:
        signal.signal(number, note)
    try:
        yield request
    finally:
        restore()
