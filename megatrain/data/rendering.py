"""Limits on code that comes with a model: chat templates may compute for ever, or fill memory.

Nothing inside a process stops one long operation, such as a power of large numbers. So whatever
renders does it in a process of its own, with a timer and a limit of memory that the kernel keeps.
"""

from __future__ import annotations

import mmap
import os
import pickle
import re
import resource
import signal
import struct
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fcntl import F_DUPFD_CLOEXEC, fcntl
from functools import partial
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, Generic, NoReturn, Self, TypeVar

from megatrain.data.forking import ended, exit_code_of, forked
from megatrain.errors import DataError, MegaTrainError

GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")  # transformers' own tag
LONGEST_S = 10.0  # of computing, of one rendering; real ones take under a millisecond
EARNED_S = 0.25  # that each adds to what all may take: so much on average, and LONGEST_S more
LARGEST_BYTES = 1 << 30  # of memory, beside what the process begins with
LARGEST_CHARACTERS = 64 << 20  # of a conversation as text
BATCH, BATCH_BYTES = 256, 8 << 20  # of rows that are handed over at a time, at most
FAILED = 1  # exit code of the process
STATE = "qq"

A = TypeVar("A")
B = TypeVar("B")
T = TypeVar("T")


class TooMuch(DataError):
    """A template takes more time or memory than any should.

    number: of the argument, of those handed over together, at which it did.
    """

    def __init__(self, what: str, number: int = 0) -> None:
        self.number = number
        super().__init__(
            f"the chat template {what} for one conversation; name another (data.chat_template)"
        )


_left: float | None = None  # seconds that renderings may still take; None: not in a Fence


@contextmanager
def limited() -> Iterator[None]:
    """Around one rendering: in a Fence's process, one that takes too long ends that process."""
    global _left
    if _left is None:
        yield
        return
    signal.setitimer(signal.ITIMER_PROF, min(LONGEST_S, _left + EARNED_S))
    try:
        yield
    finally:
        _left = signal.setitimer(signal.ITIMER_PROF, 0)[0]


def fenced(work: Callable[[], T]) -> T:
    """What `work` returns or raises, in a process of its own. Raises TooMuch."""
    doing: Fence[None, T] = Fence(lambda _: work())
    with doing as fence:
        fence.put([pickle.dumps(None)])
        (found,) = fence.take()
    if isinstance(found, DataError):
        raise found
    return found


@dataclass(frozen=True)
class Handed(Generic[T]):
    """Something, and what of it is handed over; None: nothing."""

    item: T
    argument: bytes | None
    place: str


def worked_off(
    fence: Fence[Any, B], items: Iterable[Handed[T]]
) -> Iterator[tuple[T, B | DataError | None]]:
    """(item, what the fence makes or raises of it) in order; None where nothing is handed over.

    Its process works on the next items while the caller uses these. Raises DataError for the first
    that takes too much.
    """
    before: list[Handed[T]] = []
    for batch in _batches(items):
        done = _results(fence, before)
        if arguments := [one.argument for one in batch if one.argument is not None]:
            fence.put(arguments)
        yield from done
        before = batch
    yield from _results(fence, before)


def _batches(items: Iterable[Handed[T]]) -> Iterator[list[Handed[T]]]:
    batch: list[Handed[T]] = []
    size = 0
    for one in items:
        batch.append(one)
        size += len(one.argument or b"")
        if len(batch) == BATCH or size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _results(fence: Fence[Any, B], batch: list[Handed[T]]) -> list[tuple[T, B | DataError | None]]:
    handed = [one for one in batch if one.argument is not None]
    try:
        found = iter(fence.take() if handed else [])
    except TooMuch as error:
        raise DataError(f"{handed[error.number].place}: {error}") from error
    return [(one.item, None if one.argument is None else next(found)) for one in batch]


class Fence(Generic[A, B]):
    """Does `work` on pickled arguments in a process of its own, from the first `put` on.

    That has none of this one's files, renders under `limited`, and ends with a `with` block. A fork
    of this process has one of its own.
    """

    def __init__(self, work: Callable[[A], B]) -> None:
        self._work = work
        self._of = self._child = 0  # the process that uses it, and the one that works for that
        self._waits = False  # for results
        self._ours: Connection | None = None
        self._state: mmap.mmap | None = None  # shared: number of the argument, no memory is left

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def put(self, arguments: Sequence[bytes]) -> None:
        """Hand over arguments, once the results of those before were taken."""
        if self._waits or self._of != os.getpid():  # a caller gave up; or this is a fork
            self._end()
        if not self._child:
            self._start()
        assert self._ours is not None
        self._waits = True
        try:
            self._ours.send_bytes(pickle.dumps(arguments))
        except OSError:
            self._has_ended()

    def take(self) -> list[B | DataError]:
        """The results of the arguments in order, of which a DataError is one. Raises TooMuch."""
        assert self._ours is not None
        try:
            found: list[B | DataError] = pickle.loads(self._ours.recv_bytes())
        except (EOFError, OSError):
            self._has_ended()
        self._waits = False
        for one in found:
            if isinstance(one, Exception) and not isinstance(one, DataError):
                raise one
        return found

    def _start(self) -> None:
        self._state = mmap.mmap(-1, mmap.PAGESIZE)
        self._ours, theirs = Pipe()
        try:
            self._child = forked(partial(self._serve, theirs))
        except OSError as error:
            raise MegaTrainError(
                "a chat template needs a process of its own, which cannot be started: "
                f"{error.strerror}; allow more processes or memory (ulimit -u, ulimit -v)"
            ) from error
        finally:
            theirs.close()
        self._of = os.getpid()

    def _end(self) -> int | None:
        """End the process, if it is one of ours; its exit code."""
        child = self._child if self._of == os.getpid() else 0
        if self._ours is not None:
            self._ours.close()
        self._ours, self._child, self._waits = None, 0, False
        return ended(child) if child else None

    def _has_ended(self) -> NoReturn:
        """Raise what is to be said of a process that has ended by itself."""
        child, self._child, state = self._child, 0, self._state
        code = exit_code_of(child)
        self._end()
        assert state is not None
        number, out_of_memory = struct.unpack_from(STATE, state)
        if out_of_memory:
            raise TooMuch(f"takes more than {LARGEST_BYTES / 2**30:g} GiB of memory", number)
        if code in (-signal.SIGPROF, None):
            raise TooMuch(f"takes more than {LONGEST_S:g} s of computing", number)
        if code == -signal.SIGKILL:
            raise MegaTrainError(
                f"process {child}, which renders chat templates, was ended from outside, perhaps "
                "because RAM ran out; start again: what was done is kept"
            )
        raise TooMuch(f"ends its process ({code})", number)

    def _serve(self, connection: Connection) -> NoReturn:
        """The child: works until it is killed, or nobody asks any more."""
        try:
            kept = Connection(fcntl(connection.fileno(), F_DUPFD_CLOEXEC, 3))
            _close_all_but(kept.fileno())
            _limit()
            while True:
                kept.send_bytes(pickle.dumps(self._done(kept.recv_bytes())))
        except MemoryError:
            assert self._state is not None
            struct.pack_into("q", self._state, struct.calcsize("q"), True)
        finally:
            os._exit(FAILED)

    def _done(self, request: bytes) -> list[B | Exception]:
        results: list[B | Exception] = []
        state = self._state
        assert state is not None
        for number, argument in enumerate(pickle.loads(request)):
            struct.pack_into("q", state, 0, number)
            try:
                results.append(self._work(pickle.loads(argument)))
            except MemoryError:
                raise
            except Exception as error:  # noqa: BLE001  `take` raises it
                if not isinstance(error, MegaTrainError):
                    error.add_note("".join(traceback.format_exception(error)))
                results.append(error)
        return results


def _close_all_but(number: int) -> None:
    """Locks, sockets and terminals are the parent's."""
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    for file in map(int, os.listdir("/dev/fd")):
        if file > 2 and file != number:
            with suppress(OSError):
                os.close(file)


def _limit() -> None:
    """Of the process from here on."""
    global _left
    _left = LONGEST_S
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    with suppress(OSError):  # not Linux: time alone is limited
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        known = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
        most = min([pages * mmap.PAGESIZE + LARGEST_BYTES, *known])
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))
