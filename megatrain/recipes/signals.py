"""Signals that ask a run to stop, or to save, and the watchdog that ends one which hangs.

A signal stops a run where nothing is lost: a handler sets a flag.

Before the first step there is nothing to save: `Stopped` is raised where work may end next
(heartbeat.py), and a second signal of any kind means what it meant before. Then the loop looks at
the flag. Schedulers warn with SIGTERM, SIGUSR1, SIGXCPU or SIGALRM, some with several; a terminal
that is closed sends SIGHUP, perhaps twice. None of them may end a save, so only Ctrl-C stops at
once the second time. SIGUSR2 asks for a checkpoint after the step, and the run goes on.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from megatrain.errors import UNEXPECTED, logger
from megatrain.heartbeat import beside, ending, total
from megatrain.reporting.words import human_seconds

if TYPE_CHECKING:
    from megatrain.world import World

STOPPED = 75  # exit code: a signal stopped the run, which can be resumed, or did not begin
INTERRUPTED = 130  # exit code: Ctrl-C, after saving
EARLY_NOTE = b"\nstopping before the first step; a second signal stops at once\n"
NOTE = b"\nfinishing this step and saving; Ctrl-C stops at once\n"
SAVE_NOTE = b"\nsaving after this step, then going on\n"
SAVES = signal.SIGUSR2
USED_BY_OTHERS = (SAVES, signal.SIGALRM)  # left to a handler that is there already
STOPS = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1),
    *(signal.SIGXCPU, signal.SIGALRM),
)
STDERR = 2


class Stopped(BaseException):
    """A run is asked to stop before its first step: no error to be handled on the way."""


class StopRequest:
    """The signal that asked the run to stop, if one came, and whether one asked it to save."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self.save = False
        self.early = True  # nothing has been trained yet
        self.agreed = False  # on all ranks: each ends, and waits for none

    def came(self) -> bool:
        return self.signal is not None

    @property
    def here(self) -> int | None:
        """The signal that came to this rank, whatever others know."""
        return SAVES if self.signal is None and self.save else self.signal

    def heed(self, signals: Sequence[int | None]) -> None:
        """Agree on every rank's `here`, which ranks told each other beside something else."""

    def asks_to_save(self) -> bool:
        """True once after a step, on all ranks, if a signal asked for a checkpoint."""
        asked, self.save = self.save, False
        return asked

    def stop_if_early(self) -> None:
        """Raise Stopped if a signal came before the first step."""
        if self.early and self.came():
            raise Stopped

    def of_all(self, world: World) -> StopRequest:
        """A request of any rank, on which all agree each time they ask, at the same place."""
        return self if world.is_alone else _OfAll(self, world)

    @property
    def pending(self) -> str:
        """The action that was asked of the run, for the panel; empty: none."""
        if self.signal is not None:
            return "stopping after the step, with a checkpoint"
        return "saving after the step" if self.save else ""

    def says(self, what: str) -> bool:
        """Log that the run was stopped; False, which is what `fit` then returns."""
        assert self.signal is not None
        logger.info(f"stopped by {signal.Signals(self.signal).name} {what}")
        return False

    @property
    def exit_code(self) -> int:
        return INTERRUPTED if self.signal == signal.SIGINT else STOPPED


class _OfAll(StopRequest):
    def __init__(self, own: StopRequest, world: World) -> None:
        super().__init__()
        self._own, self._world, self.early = own, world, False
        self._heeded = False  # the next question is answered already

    def came(self) -> bool:
        if self.signal is None and not self._heeded:
            self.heed(self._world.all_gather(self.here))
        self._heeded = False
        return self.signal is not None

    @property
    def here(self) -> int | None:
        return self._own.here

    def heed(self, signals: Sequence[int | None]) -> None:
        stops = (number for number in signals if number not in (None, SAVES))
        self.signal, self.save = next(stops, None), self.save or SAVES in signals
        self._own.agreed, self._heeded = self.signal is not None, True

    def asks_to_save(self) -> bool:
        if asked := super().asks_to_save():
            self._own.save = False
        return asked


_current: list[StopRequest] = []  # the one whose handlers are installed


def early_request() -> StopRequest | None:
    """The current request of a run that has not begun its first step."""
    return next((request for request in _current if request.early), None)


def all_stop() -> bool:
    """True if all ranks have agreed to stop."""
    return any(request.agreed for request in _current)


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Turn the first of STOPS, and every SAVES, into a request. Inside another such block: that
    block's request. A signal that was ignored before, as SIGHUP under nohup, stays so, and so do a
    program's own handlers of SIGUSR2 and SIGALRM. Outside the main thread Python allows none."""
    if threading.current_thread() is not threading.main_thread():
        yield StopRequest()
        return
    if _current:
        yield _current[0]
        return
    request = StopRequest()
    found = {number: signal.getsignal(number) or signal.SIG_DFL for number in (*STOPS, SAVES)}
    before = {
        number: handler
        for number, handler in found.items()
        if handler == signal.SIG_DFL or (number not in USED_BY_OTHERS and handler != signal.SIG_IGN)
    }

    def note(number: int, _frame: FrameType | None) -> None:
        if request.came():
            return
        if number == SAVES:
            request.save = True
            _note(SAVE_NOTE)
            return
        request.signal = number
        for again in STOPS if request.early else (signal.SIGINT,):
            if again in before:
                signal.signal(again, before[again])
        _note(EARLY_NOTE if request.early else NOTE)

    for number in before:
        signal.signal(number, note)
    _current.append(request)
    try:
        with ending(request.stop_if_early):
            yield request
    finally:
        _current.clear()
        for number, handler in before.items():
            signal.signal(number, handler)


def _note(words: bytes) -> None:
    with suppress(OSError):  # of a pipe whose reader died of the same Ctrl-C
        os.write(STDERR, words)  # past Python's buffers, which the signal may have interrupted


# -- the watchdog ----------------------------------------------------------------------------------

WAKES = 20  # in the time allowed
PLANNED_STEPS = 3  # without a sign of life are no hang yet
# Libraries that download, tokenise or take a model apart give no signs: until the plan is made, a
# process that computes, reads or writes as much as this has not hung.
BUSY_SHARE = 0.05  # of one core
BUSY_BYTES = 1 << 20
COUNTED = Path("/proc/self/io")


# why: decision 0056
class HangWatch:
    """Ends the process after some seconds without a sign of life. Counts its own wake-ups, not the
    clock: a process that was stopped and goes on has not hung."""

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
        when, way_on = " before the first step" if self.preparing else "", "nothing is lost"
        where = "" if self.log is None else f" and is in {self.log}"
        if self.log is not None and not self.preparing:
            resumed = f"`megatrain resume {self.log.parent}`"
            way_on = f"go on from the last checkpoint with {resumed}"
        sentence = (
            f"error: nothing has moved for {human_seconds(self.allowed_s)}{when} (hang_timeout); "
            f"every thread's stack follows{where}; {way_on}\n"
        )
        flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW
        # past logging and Python's streams, whose locks what hangs may hold
        for log in dict.fromkeys((self.log, None)):  # None: stderr
            with suppress(OSError):
                output = STDERR if log is None else os.open(log, flags)
                os.write(output, sentence.encode())
                faulthandler.dump_traceback(output, all_threads=True)
        os._exit(UNEXPECTED)


@contextmanager
def watchdog(timeout_s: float | None, log: Path | None = None) -> Iterator[HangWatch]:
    """Inside, end the process after `timeout_s` without a sign of life; None: never."""
    watch = HangWatch(timeout_s or 0.0, log)
    with nullcontext() if timeout_s is None else beside(watch.look, watch.ended, "watchdog"):
        yield watch


def _bytes_moved() -> int:
    """Read and written by this process so far, from files and sockets; 0 where nobody counts."""
    try:
        lines = COUNTED.read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))
