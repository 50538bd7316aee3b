"""Signals ask a run to stop, which the loop does where nothing is lost: a handler sets a flag.

Schedulers warn with SIGTERM, SIGUSR1 or SIGXCPU, some with several; a terminal that is closed sends
SIGHUP, perhaps twice. None of them may end a save, so only Ctrl-C stops at once the second time.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOPPED = 75  # exit code: a signal stopped the run and left a checkpoint to resume
INTERRUPTED = 130  # exit code: Ctrl-C, after saving
NOTE = b"\nfinishing this step and saving; Ctrl-C stops at once\n"
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGXCPU)
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
    """Turn the first of STOPS into a request; Ctrl-C after it stops the process at once.

    A signal that was ignored before, as SIGHUP under nohup, stays so. Outside the main thread,
    where Python allows no handlers, signals keep their meaning and the request is never set.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    found = {number: signal.getsignal(number) or signal.SIG_DFL for number in STOPS}
    before = {number: handler for number, handler in found.items() if handler != signal.SIG_IGN}

    def note(number: int, _frame: FrameType | None) -> None:
        if request.came():
            return
        request.signal = number
        if signal.SIGINT in before:
            signal.signal(signal.SIGINT, before[signal.SIGINT])
        try:
            os.write(STDERR, NOTE)  # past Python's buffers, which the signal may have interrupted
        except OSError:  # of a pipe whose reader died of the same Ctrl-C
            pass

    for number in before:
        signal.signal(number, note)
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
