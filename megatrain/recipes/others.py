"""What becomes of the other ranks: a thread looks, and ends this one when another has died.

Whoever waits for a collective cannot be interrupted, and the library would wait for ten minutes.
So every rank leaves a sign of life in the launcher's store each second, and its last words when it
fails. Another one's last words, or its silence, end this process within seconds, with the reason.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import psutil

from megatrain.errors import UNEXPECTED, MegaTrainError, exit_code_of, printable
from megatrain.recipes.launch import LAUNCHER
from megatrain.recipes.meeting import LOOKS_EVERY_S, launcher_keeps_store
from megatrain.recipes.signals import STDERR, all_stop, early_request
from megatrain.reporting.progress import IN_FILE
from megatrain.world import World

BEATS_EVERY_S = 1.0
SILENT_S = 12.0  # without a sign of life a rank is dead
LEAVES_WITHIN_S = 3.0  # of each other, if all were asked to stop before the first step
STORE_TIMEOUT = timedelta(seconds=10)
T = TypeVar("T")

logger = logging.getLogger("megatrain")


class OtherFailed(MegaTrainError):
    """Another rank has failed, which ends this one."""

    def __init__(self, sentence: str, exit_code: int) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code


@dataclass(frozen=True)
class LastWords:
    """What a rank has said when it failed, or what another says of one that could not.

    by: which rank says it.
    """

    rank: int
    host: str
    sentence: str
    by: int
    exit_code: int = UNEXPECTED

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} {self.sentence}"


class Others:
    """Signs of life of all ranks, in a store of their own.

    Attributes:
        ended: nobody is looked after any more.
    """

    def __init__(self, world: World, store: Any, host: str) -> None:
        self.world, self._store, self.host = world, store, host
        self.ended = threading.Event()
        self._seen: dict[int, tuple[str, float]] = {}
        self._awake_s, self._looked = 0.0, time.monotonic()
        self._launcher = int(os.environ.get(LAUNCHER, "0"))
        self._unreachable = False
        self._first: tuple[str, psutil.Process | None] = ("the first host", None)

    @classmethod
    @contextmanager
    def watched(cls, world: World, host: str) -> Iterator[Others]:
        """With a thread that looks. All ranks call it, as soon as they have met: each has left a
        `sign_of_life` in the world's store.

        Raises RuntimeError if the store is gone already.
        """
        others = cls(world, world.store.clone(), host)
        others._store.set_timeout(STORE_TIMEOUT)
        others._first = others._whoever_is_first()
        thread = threading.Thread(target=others._look, name="megatrain-others", daemon=True)
        thread.start()
        try:
            yield others
        finally:
            others.ended.set()
            thread.join()

    def leave(self, exit_code: int) -> None:
        """This rank has come to its end, and is not to be missed. The first one holds the store: it
        goes last."""
        self.ended.set()
        with suppress(RuntimeError):
            self._store.set(f"left/{self.world.rank}", str(exit_code))
            if self.world.is_first:
                self._wait_for_all()

    def _wait_for_all(self) -> None:
        """Until all have left, have read why they end, or have had the time to find out."""
        names = [f"left/{rank}" for rank in range(self.world.size)]
        until = time.monotonic() + SILENT_S + 4 * BEATS_EVERY_S
        while not self._store.check(names) and time.monotonic() < until:
            if self._store.check(["failed"]):
                self.let_read()
                return
            time.sleep(LOOKS_EVERY_S)

    def say(self, words: LastWords) -> LastWords:
        """Leave last words, for the others to find, if they are the first; returns those."""
        mine = json.dumps(astuple(words))
        with suppress(RuntimeError):
            return LastWords(
                *json.loads(self._asked(lambda: self._store.compare_set("failed", "", mine)))
            )
        return words

    def _asked(self, ask: Callable[[], T]) -> T:
        """What the store answers. Raises RuntimeError if it does not: a network that is cut says
        nothing, and the library would wait for ever."""
        answers: list[T] = []

        def wait() -> None:
            with suppress(RuntimeError):
                answers.append(ask())

        if not self._unreachable:
            thread = threading.Thread(target=wait, name="megatrain-store", daemon=True)
            thread.start()
            for seconds in (STORE_TIMEOUT.total_seconds(), BEATS_EVERY_S):
                thread.join(seconds)  # twice: the first time runs out where SIGSTOP held this rank
            self._unreachable = not answers
        if self._unreachable:
            raise RuntimeError("the store does not answer")
        return answers[0]

    def failed(self) -> LastWords | None:
        """The last words of the first rank that failed, or what can be said of one that died."""
        began = time.monotonic()
        with suppress(RuntimeError):
            return self._asked(self._found)
        (host, process), found = self._first, f"is gone, or cannot be reached from {self.host}"
        # it holds the store; one that is there was stopped by a signal, and would never end
        if process:
            found = "is gone"
            if time.monotonic() - began > STORE_TIMEOUT.total_seconds() / 2:
                found = "does not answer"
                with suppress(psutil.Error):
                    process.kill()
        # of each host one rank says so
        return LastWords(0, host, found, max(1, self.world.rank - self.world.local_rank))

    def _found(self) -> LastWords | None:
        if self._store.check(["failed"]):
            return LastWords(*json.loads(self._store.get("failed")))
        return self._silent()

    def _whoever_is_first(self) -> tuple[str, psutil.Process | None]:
        """Its host; its process, if that is here and holds the store."""
        _, host, process = self._store.get("beat/0").decode().split()
        if self._is_here(0, host) and not self.world.is_first and not launcher_keeps_store():
            with suppress(psutil.Error):
                return host, psutil.Process(int(process))
        return host, None

    def _is_here(self, rank: int, host: str) -> bool:
        """Whether that rank is on this host, where its process can be seen. Others may have the
        same name."""
        each = self.world.local_size
        return host == self.host and rank // each == self.world.rank // each

    def _silent(self) -> LastWords | None:
        """A rank whose process is gone, or of which nothing was heard for too long."""
        now, world = self._awake(), self.world
        self._store.set(*sign_of_life(world.rank, self.host))
        for rank in range(world.size):
            if rank == world.rank:
                continue
            said = self._store.get(f"beat/{rank}").decode()
            before, since = self._seen.get(rank, ("", now))
            if said != before:
                since = now
            self._seen[rank] = said, since
            _, host, process = said.split()
            here, silent = self._is_here(rank, host), now - since > SILENT_S
            if self._store.check([f"left/{rank}"]):
                code = int(self._store.get(f"left/{rank}"))
                # it was asked to stop, and this one was not, or waits for it where nobody can end
                over = silent or _ends_with_others(now - since)
                if code and over and not all_stop():
                    return LastWords(rank, host, "was stopped", world.rank, code)
            elif here and not _lives(int(process)):
                return LastWords(rank, host, f"(process {process}) has died", world.rank)
            elif silent:
                if here:  # stopped by a signal, perhaps: a launcher would wait for it
                    with suppress(OSError):
                        os.kill(int(process), signal.SIGKILL)
                silence = f"has said nothing for {SILENT_S:.0f} s"
                return LastWords(rank, host, silence, world.rank)
        return None

    def _awake(self) -> float:
        """Seconds in which this rank was not stopped: where all were, as by a scheduler, none is
        silent because this one goes on first."""
        now = time.monotonic()
        self._awake_s += min(now - self._looked, 2 * BEATS_EVERY_S)
        self._looked = now
        return self._awake_s

    def _look(self) -> None:
        """The thread."""
        asked = False
        while not self.ended.wait(BEATS_EVERY_S):
            found = self.failed()
            if found is not None and not self.ended.is_set():
                self._end(found)
            if self._launcher and os.getppid() != self._launcher and not asked:
                asked = True
                os.kill(os.getpid(), signal.SIGTERM)  # nobody is left who would pass signals on

    def _end(self, found: LastWords) -> None:
        """Say what happened, if that is on this rank, and leave at once."""
        found = self.say(found)
        asked = early_request()
        known = asked is not None and asked.came() and found.exit_code == asked.exit_code
        if speaks(self.world, found) and not known:
            with suppress(Exception):
                os.write(STDERR, f"error: {printable(str(found))}\n".encode())
        log_last(found)
        self.let_read()
        os._exit(found.exit_code)

    def let_read(self) -> None:
        """The store goes with the first rank: the others read the reason in it before."""
        if self.world.is_first:
            time.sleep(2 * BEATS_EVERY_S)


def sign_of_life(rank: int, host: str) -> tuple[str, str]:
    """The name under which a store has it, and the sign: when, where, and which process."""
    return f"beat/{rank}", f"{time.monotonic()} {host} {os.getpid()}"


def log_last(found: LastWords) -> None:
    """Into train.log, past a lock that another thread may hold for good."""
    say = partial(logger.error, str(found), extra={IN_FILE: True})
    thread = threading.Thread(target=say, daemon=True)
    thread.start()
    thread.join(1.0)


def speaks(world: World, found: LastWords) -> bool:
    """Whether this rank shows what happened to another: who found out, or the first one."""
    by_itself = found.by == found.rank
    return world.rank == (0 if by_itself else found.by) and found.rank != world.rank


def end_of(error: BaseException, others: Others) -> BaseException:
    """What a rank raises that ends with this error, after its last words.

    A collective fails at once when another rank has died: then that is the reason. One rank alone
    tells the user.
    """
    others.ended.set()  # nobody else may end it in the middle of this
    world = others.world
    if isinstance(error, SystemExit) or not isinstance(error, Exception):
        return error
    code, sentence = exit_code_of(error)
    found = LastWords(world.rank, others.host, f"stopped: {sentence}", world.rank, code)
    if isinstance(error, RuntimeError):  # of torch.distributed, perhaps
        until = time.monotonic() + SILENT_S + 2 * BEATS_EVERY_S
        while (seen := others.failed()) is None and time.monotonic() < until:
            time.sleep(BEATS_EVERY_S / 4)
        found = seen or found
    found = others.say(found)
    if isinstance(error, RuntimeError) and found.rank != world.rank:
        code = found.exit_code
        others.let_read()
        return OtherFailed(str(found), code) if speaks(world, found) else SystemExit(code)
    time.sleep(2 * BEATS_EVERY_S)  # the others read it before a launcher stops them
    return error if world.is_first else SystemExit(code)


def _ends_with_others(left_s: float) -> bool:
    """Whether this rank has not begun to train, so nothing is lost if it ends as one that was asked
    to stop, and has left so long ago. If it was asked, too, it may be about to leave by itself."""
    request = early_request()
    return request is not None and (not request.came() or left_s > LEAVES_WITHIN_S)


def _lives(process: int) -> bool:
    try:
        return psutil.Process(process).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False
