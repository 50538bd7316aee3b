"""Processes that tokenise batches of rows, forked from this one.

They do what this process would do, and hand the results back in order; nothing else of them can be
seen. None of them outlives its parent, however that ends. They heed no signal: a terminal and a
scheduler send theirs to all processes of a job, and it is for the parent to end them.
"""

from __future__ import annotations

import ctypes
import os
import signal
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import islice
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import SimpleQueue
from types import TracebackType
from typing import Generic, NoReturn, Self, TypeVar

from megatrain.errors import MegaTrainError

ALONE_BATCHES = 4  # which this process does alone: a small set is done before others had begun
WAITING = 2  # batches for each process that are under way or done
PR_SET_PDEATHSIG = 1
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGXCPU)
IGNORED += (signal.SIGUSR2, signal.SIGALRM)
PARALLELISM = "TOKENIZERS_PARALLELISM"  # of threads, which are not there after a fork

Given = TypeVar("Given")
Done = TypeVar("Done")


class Team(Generic[Given, Done]):
    """Does a piece of work for each of many batches, in several processes once they are many.

    Use it in a `with` block, whose end ends the processes. Raises MegaTrainError if one of them is
    killed from outside, and what the work raises.
    """

    def __init__(self, work: Callable[[Given], Done], processes: int) -> None:
        self._work, self._processes = work, processes
        self._alone = ALONE_BATCHES
        self._children: list[tuple[int, Connection]] = []
        self._idle = SimpleQueue[tuple[int, Connection]]()
        self._threads = ThreadPoolExecutor(processes, thread_name_prefix="megatrain-tokenise")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        for child, connection in self._children:
            with suppress(ProcessLookupError, ChildProcessError):  # gone where SIGCHLD is ignored
                os.kill(child, signal.SIGKILL)  # it has nothing to lose
                os.waitpid(child, 0)
            connection.close()
        self._threads.shutdown(cancel_futures=True)

    def map(self, batches: Iterable[Given]) -> Iterator[Done]:
        """The result for each batch, in order; a few batches are taken ahead."""
        coming = iter(batches)
        if self._processes == 1:
            yield from map(self._work, coming)
            return
        for batch in islice(coming, self._alone):
            self._alone -= 1
            yield self._work(batch)
        under_way = deque[Future[Done]]()
        for batch in coming:
            if not self._children:
                self._fork()
            under_way.append(self._threads.submit(self._hand_over, batch))
            if len(under_way) == WAITING * self._processes:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()

    def _hand_over(self, batch: Given) -> Done:
        """Have one of the processes do it."""
        child, connection = self._idle.get()
        try:
            connection.send(batch)
            done, error = connection.recv()
        except (EOFError, OSError) as lost:
            raise MegaTrainError(
                f"process {child}, which tokenises rows, was ended from outside, perhaps because "
                "RAM ran out; set data.processes: 1, or start again: what was done is kept"
            ) from lost
        finally:
            self._idle.put((child, connection))
        if error is not None:
            raise error
        result: Done = done
        return result

    def _fork(self) -> None:
        with _calm():
            for _ in range(self._processes):
                ours, theirs = Pipe()
                parent, child = os.getpid(), _forked(self._processes)
                if child == 0:
                    try:
                        self._serve(theirs, parent)
                    finally:
                        os._exit(0)
                theirs.close()
                self._children.append((child, ours))
                self._idle.put((child, ours))

    def _serve(self, connection: Connection, parent: int) -> NoReturn:
        """In a child: work until the parent has ended."""
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)  # it ended before that
        for number in IGNORED:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
        while True:
            batch = connection.recv()
            answer: tuple[Done | None, Exception | None]
            try:
                answer = (self._work(batch), None)
            except Exception as error:  # noqa: BLE001  the parent raises it
                answer = (None, error)
            connection.send(answer)


def _forked(processes: int) -> int:
    """`os.fork()`. Raises MegaTrainError."""
    try:
        return os.fork()
    except OSError as error:
        raise MegaTrainError(
            f"no {processes} processes can be started to tokenise rows ({error.strerror}); set "
            "data.processes: 1"
        ) from error


@contextmanager
def _calm() -> Iterator[None]:
    """Inside, forked processes run no handler of this one, and tokenizers' threads are off."""
    before = os.environ.get(PARALLELISM)
    os.environ[PARALLELISM] = "false"
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns of threads; the child needs no lock that one of ours may hold
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        if before is None:
            del os.environ[PARALLELISM]
        else:
            os.environ[PARALLELISM] = before
