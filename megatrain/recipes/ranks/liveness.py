"""Signs of life of ranks: a thread looks for them, and ends this process when another has died.

A collective cannot be interrupted, and the library would wait for ten minutes. So every rank writes
a sign of life into the store each second, and its last words when it fails. Another rank's last
words, or its silence, end this process within seconds, with the reason.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, suppress
from dataclasses import astuple, dataclass
from datetime import timedelta
from typing import TypeVar

from megatrain.errors import UNEXPECTED, MegaTrainError, exit_code_of, logger, printable
from megatrain.heartbeat import beside
from megatrain.recipes.signals import STDERR, all_stop, early_request
from megatrain.reporting.progress import IN_FILE
from megatrain.world import World

BEATS_EVERY_S = 1.0
SILENT_S = 12.0  # without a sign of life a rank is dead
LEAVES_WITHIN_S = 3.0  # of each other, if all were asked to stop before the first step
STORE_TIMEOUT = timedelta(seconds=10)
T = TypeVar("T")


class OtherFailed(MegaTrainError):
    """Another rank has failed, which ends this one."""

    def __init__(self, sentence: str, exit_code: int) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code


@dataclass(frozen=True)
class LastWords:
    """The failure of a rank, in its own words or in those of the rank `by`, which noticed."""

    rank: int
    host: str
    sentence: str
    by: int
    exit_code: int = UNEXPECTED

    @classmethod
    def read(cls, said: str) -> LastWords:
        """Read what `say` wrote; nobody has failed with exit code 0."""
        rank, host, sentence, by, code = json.loads(said)
        return cls(rank, host, sentence, by, code or UNEXPECTED)

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} {self.sentence}"


def started(work: Callable[[], T], name: str) -> Future[T]:
    """Begin `work`, which may never return, in a thread that keeps no process alive."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(work())
        except (RuntimeError, ValueError) as error:
            answer.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return answer


def sign_of_life(rank: int, host: str, left: int | None = None) -> tuple[str, str]:
    """(key, value) in the store: when, where, and of a rank that has left its exit code."""
    return f"beat/{rank}", f"{time.monotonic()} {host} {'' if left is None else left}"


class Liveness:
    """Signs of life of all ranks, each of which has left one in the world's store. `ended`: nobody
    is looked after any more."""

    def __init__(self, world: World, host: str) -> None:
        """Raises RuntimeError if the store is gone already."""
        self.world, self.host, self._store = world, host, world.store.clone(STORE_TIMEOUT)
        self._seen = [("0 unknown", 0.0)] * world.size  # signs, and when each came
        self._first_host = self._signs()[0].split()[1]
        self.ended, self._signing, self._has_left = threading.Event(), threading.Lock(), False
        self._awake_s, self._looked = 0.0, time.monotonic()
        self._unreachable = False

    def watched(self) -> AbstractContextManager[None]:
        """Inside, a thread looks after the other ranks."""
        return beside(self._look, self.ended, "liveness")

    def leave(self, exit_code: int) -> None:
        """End without being missed. The first rank, which may hold the store, goes last."""
        self.ended.set()
        with suppress(RuntimeError):
            self._sign(exit_code)
            if self.world.is_first:
                until = time.monotonic() + SILENT_S + LEAVES_WITHIN_S
                while time.monotonic() < until:
                    if all(len(sign.split()) == 3 for sign in self._signs()):
                        return
                    if self._store.check(["failed"]):
                        time.sleep(2 * BEATS_EVERY_S)
                        return
                    time.sleep(BEATS_EVERY_S / 20)

    def _sign(self, left: int | None = None) -> None:
        """Write a sign of life, or the last one, which no look that is under way writes over."""
        with self._signing:
            if not self._has_left:
                self._has_left = left is not None
                self._store.set(*sign_of_life(self.world.rank, self.host, left))

    def say(self, words: LastWords) -> LastWords:
        """Write last words into the store; returns the first that anybody has written."""
        mine = json.dumps(astuple(words))
        with suppress(RuntimeError):
            return LastWords.read(self._answer(lambda: self._store.first("failed", mine)))
        return words

    def failed(self) -> LastWords | None:
        """The last words of the first rank that failed, or those about one that is silent."""
        with suppress(RuntimeError):
            return self._answer(self._found)
        found = f"has died, was stopped, or cannot be reached from {self.host}"
        # of each host one rank says so
        by = max(1, self.world.rank - self.world.local_rank)
        return LastWords(0, self._first_host, found, by)

    def speaks(self, found: LastWords) -> bool:
        """True on the rank that shows the failure of another: the first, but for its own death."""
        return self.world.rank == (0 if found.rank else found.by) and found.rank != self.world.rank

    def _answer(self, ask: Callable[[], T]) -> T:
        """Answer of the store. Raises RuntimeError without one: a network that is cut says nothing,
        and the library would wait for ever."""
        if not self._unreachable:
            answer = started(ask, "megatrain-store")
            # twice: the first time runs out where SIGSTOP held this rank
            wait([answer], STORE_TIMEOUT.total_seconds())
            wait([answer], BEATS_EVERY_S)
            if answer.done():
                return answer.result()
            self._unreachable = True
        raise RuntimeError("the store does not answer")

    def _found(self) -> LastWords | None:
        if (said := self._store.get("failed")) is not None:
            return LastWords.read(said)
        now, world = self._awake(), self.world
        self._sign()
        for rank, sign in enumerate(self._signs()):
            before, since = self._seen[rank]
            since = since if sign == before else now
            self._seen[rank] = sign, since
            _, host, *left = sign.split()
            if rank == world.rank:
                continue
            if left:
                # it was asked to stop, and this one was not, or waits for it where nobody can end
                code, over = int(left[0]), now - since > LEAVES_WITHIN_S
                if code and over and not all_stop():
                    return LastWords(rank, host, "was stopped", world.rank, code)
            elif now - since > SILENT_S:
                return LastWords(rank, host, f"has said nothing for {SILENT_S:.0f} s", world.rank)
        return None

    def _signs(self) -> list[str]:
        """The last sign of every rank; the one before, if a stranger has written over it."""
        found = self._store.get_all([f"beat/{rank}" for rank in range(self.world.size)])
        return [sign or before for sign, (before, _) in zip(found, self._seen, strict=True)]

    def _awake(self) -> float:
        """Seconds in which this rank was not stopped: where all were, as by a scheduler, none is
        silent because this one goes on first."""
        now = time.monotonic()
        self._awake_s += min(now - self._looked, 2 * BEATS_EVERY_S)
        self._looked = now
        return self._awake_s

    def _look(self) -> None:
        while not self.ended.wait(BEATS_EVERY_S):
            found = self.failed()
            if found is not None and not self.ended.is_set():
                self._end(found)

    def _end(self, found: LastWords) -> None:
        """Show the reason, if this rank does, and leave at once."""
        found, asked = self.say(found), early_request()
        known = asked is not None and asked.came() and found.exit_code == asked.exit_code
        if self.speaks(found) and not known:
            with suppress(OSError):
                os.write(STDERR, f"error: {printable(str(found))}\n".encode())
        logger.error(str(found), extra={IN_FILE: True})
        if self.world.is_first:
            time.sleep(2 * BEATS_EVERY_S)
        os._exit(found.exit_code)


def end_of(error: BaseException, alive: Liveness) -> BaseException:
    """Leave last words; returns the exception that ends this rank. A collective fails at once when
    another rank has died: then that is the reason. One rank alone shows it."""
    alive.ended.set()  # nobody else may end it in the middle of this
    if isinstance(error, SystemExit) or not isinstance(error, Exception):
        return error
    world, (code, sentence) = alive.world, exit_code_of(error)
    found = LastWords(world.rank, alive.host, f"stopped: {sentence}", world.rank, code)
    if isinstance(error, RuntimeError):  # of torch.distributed, perhaps
        until = time.monotonic() + SILENT_S + 2 * BEATS_EVERY_S
        while (seen := alive.failed()) is None and time.monotonic() < until:
            time.sleep(BEATS_EVERY_S / 4)
        found = seen or found
    found = alive.say(found)
    if isinstance(error, RuntimeError) and found.rank != world.rank:
        code, error = found.exit_code, OtherFailed(str(found), found.exit_code)
    time.sleep(2 * BEATS_EVERY_S)  # before a launcher stops the others
    shown = alive.speaks(found) if found.rank != world.rank else world.is_first
    return error if shown else SystemExit(code)
