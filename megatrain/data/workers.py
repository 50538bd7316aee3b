"""Worker processes that run third-party code on rows: chat templates and tokenizers, with limits.

Nothing inside a process stops one long operation, such as a power of large numbers. So rows are
encoded in processes of their own, with a timer for each row and a limit of memory that the kernel
keeps. Workers are forked from this process, hold none of its files and never outlive it, however
it ends. They ignore signals: a terminal and a scheduler send theirs to all processes of a job, and
the parent ends its workers.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import pickle
import resource
import signal
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fcntl import F_DUPFD_CLOEXEC, fcntl
from functools import partial
from itertools import chain, islice
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Generic, NoReturn, Self, TypeVar

import psutil

from megatrain.errors import DataError, MegaTrainError

ROW_LIMIT_S = 10.0  # of processor time for a row; rendering usually takes under a millisecond
LARGEST_BYTES = 1 << 30  # of memory for an item, beside what the worker holds when it begins
BYTES_PER_BYTE = 1000  # of memory in addition, for each byte of the item: offsets, lists of ids
ALONE_ITEMS = 4  # that one worker does: a small set is done before others have begun
WAITING = 2  # items for each worker that are in progress or done
PR_SET_PDEATHSIG = 1
IGNORED_SIGNALS = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2),
    *(signal.SIGXCPU, signal.SIGALRM),
)
PARALLELISM = "TOKENIZERS_PARALLELISM"  # of threads, which do not exist after a fork
ABOUT_TEMPLATE = ("the chat template", "for one conversation; name another (data.chat_template)")

Item = TypeVar("Item")
Result = TypeVar("Result")
About = tuple[str, str]  # an error's words before and after what the code does wrong

_row: memoryview | None = None  # number of the row in progress, shared with the parent of a worker


def begin_row(number: int, more_s: float = 0.0) -> None:
    """In a worker, start the timer of a row (ROW_LIMIT_S + `more_s`); elsewhere do nothing."""
    if _row is not None:
        _row[0] = number
        signal.setitimer(signal.ITIMER_PROF, ROW_LIMIT_S + more_s)


def fenced(run: Callable[[], Result], about: About = ABOUT_TEMPLATE) -> Result:
    """Call a function that runs a chat template, or what `about` names, in a worker. Raises
    DataError where it takes too much, or its error."""
    work: Callable[[None], Result] = lambda _: run()  # noqa: E731
    with Team(work, about=lambda *_: about) as team:
        (result,) = team.map([None])
    return result


@dataclass
class _Worker:
    pid: int  # 0: has ended
    connection: Connection
    row: memoryview


class Team(Generic[Item, Result]):
    """Does a piece of work for each of many items, in several workers once they are many. about: of
    an item and the number of its row, the words for an error. Use it in a `with` block, whose end
    ends the workers. Raises DataError for work that takes more time or memory than any should,
    MegaTrainError if a worker is killed from outside, and what the work raises."""

    def __init__(
        self,
        work: Callable[[Item], Result],
        processes: int = 1,
        about: Callable[[Item, int], About] = lambda *_: ABOUT_TEMPLATE,
    ) -> None:
        self._work, self.processes, self._about = work, processes, about
        self._workers: list[_Worker] = []
        self._idle = SimpleQueue[_Worker]()
        self._threads = ThreadPoolExecutor(processes, thread_name_prefix="megatrain-encode")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            if worker.pid:
                ended(worker.pid)
            worker.connection.close()
        self._threads.shutdown(cancel_futures=True)

    def map(self, items: Iterable[Item]) -> Iterator[Result]:
        """The result for each item, in order; a few items are taken ahead."""
        coming = iter(items)
        first = list(islice(coming, ALONE_ITEMS + 1))
        if not first:
            return
        for _ in range(len(self._workers), self.processes if len(first) > ALONE_ITEMS else 1):
            self._start()
        in_progress = deque[Future[Result]]()
        for item in chain(first, coming):
            in_progress.append(self._threads.submit(self._hand_over, item))
            if len(in_progress) == WAITING * len(self._workers):
                yield in_progress.popleft().result()
        while in_progress:
            yield in_progress.popleft().result()

    def _hand_over(self, item: Item) -> Result:
        worker = self._idle.get()
        try:
            worker.connection.send(item)
            result, error = worker.connection.recv()
        except (EOFError, OSError):
            raise self._reason(worker, item) from None
        finally:
            self._idle.put(worker)
        if isinstance(error, MemoryError):
            words = f"takes more than {LARGEST_BYTES / 2**30:g} GiB of memory"
            raise self._too_much(worker, item, words)
        if isinstance(error, SystemError):
            raise self._too_much(worker, item, f"fails ({error})")
        if error is not None:
            raise error
        found: Result = result
        return found

    def _reason(self, worker: _Worker, item: Item) -> MegaTrainError:
        """The error for a worker that has ended by itself."""
        pid, worker.pid = worker.pid, 0
        # 0: it ended with an earlier item, whose error is raised; waitpid(0) waits for any child
        code = _exit_code_of(pid) if pid else None
        if code == -signal.SIGKILL:
            return MegaTrainError(
                f"process {pid}, which encodes rows, was ended from outside, perhaps because RAM "
                "ran out; set data.processes: 1, or start again: what was done is kept"
            )
        late = code in (-signal.SIGPROF, None)  # None: SIGCHLD is ignored
        words = f"takes more than {ROW_LIMIT_S:g} s of computing"
        return self._too_much(worker, item, words if late else f"ends its process ({code})")

    def _too_much(self, worker: _Worker, item: Item, words: str) -> DataError:
        before, after = self._about(item, worker.row[0])
        return DataError(f"{before} {words} {after}")

    def _start(self) -> None:
        row = shared_numbers()
        pid, ours = start_child(partial(self._serve, row), "set data.processes: 1")
        self._workers.append(_Worker(pid, ours, row))
        self._idle.put(self._workers[-1])

    def _serve(self, row: memoryview, connection: Connection) -> NoReturn:
        """In a worker: work until it is killed."""
        global _row
        _row = row
        gc.freeze()  # garbage of the parent must not be collected here: its files are closed
        kept = Connection(fcntl(connection.fileno(), F_DUPFD_CLOEXEC, 3))
        _close_all_but(kept.fileno())
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        known = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
        while True:
            message = kept.recv_bytes()
            taken = psutil.Process().memory_info().vms
            most = min([taken + LARGEST_BYTES + BYTES_PER_BYTE * len(message), *known])
            resource.setrlimit(resource.RLIMIT_AS, (most, hard))
            begin_row(0)
            answer = outcome(lambda: self._work(pickle.loads(message)))  # noqa: B023
            signal.setitimer(signal.ITIMER_PROF, 0)
            kept.send(answer)


def outcome(work: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
    """In a child: the result of `work`, or the error that the parent is to raise."""
    try:
        return work(), None
    except MemoryError:
        return None, MemoryError()  # without the frames that hold the memory
    except Exception as error:  # noqa: BLE001
        if not isinstance(error, MegaTrainError):
            error.add_note("".join(traceback.format_exception(error)))
        return None, error
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001  a panic of a library in Rust is no Exception
        return None, SystemError(str(error)[:99])


def _close_all_but(number: int) -> None:
    """Locks, sockets and terminals are the parent's."""
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    for file in map(int, os.listdir("/dev/fd")):
        if file > 2 and file != number:
            with suppress(OSError):
                os.close(file)


def shared_numbers() -> memoryview:
    """Zeros, int64, in memory that processes forked from now on share."""
    return memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("q")


def start_child(serve: Callable[[Connection], object], otherwise: str) -> tuple[int, Connection]:
    """Start a process that calls `serve` with one end of a pipe; its pid and the other end.

    otherwise: the remedy, apart from larger limits, that the MegaTrainError names if none can be.
    """
    ours, theirs = Pipe()
    try:
        return forked(partial(serve, theirs)), ours
    except OSError as error:
        raise MegaTrainError(
            f"no process can be started to encode rows ({error.strerror}); allow more processes or "
            f"memory (ulimit -u, ulimit -v), or {otherwise}"
        ) from error
    finally:
        theirs.close()


def forked(serve: Callable[[], object]) -> int:
    """Start a process that calls `serve` and ends; its pid. Raises OSError."""
    with _calm():
        parent, child = os.getpid(), os.fork()
        if child == 0:
            try:  # it ends with the parent, and ignores signals
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() == parent:  # which may have ended before that
                    for number in IGNORED_SIGNALS:
                        signal.signal(number, signal.SIG_IGN)
                    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED_SIGNALS)
                    serve()
            finally:
                os._exit(0)  # before anything of the parent is flushed or closed
    return child


def ended(child: int) -> int | None:
    """Kill a process, if it has not ended; its exit code, None where SIGCHLD is ignored."""
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)  # it has nothing to lose, and may never end
    return _exit_code_of(child)


def _exit_code_of(child: int) -> int | None:
    """Wait for a process that ends; its exit code, None where SIGCHLD is ignored."""
    try:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    except ChildProcessError:
        return None


@contextmanager
def _calm() -> Iterator[None]:
    """Inside, forked processes run no handler of this one, and tokenizers' threads are off."""
    before = os.environ.get(PARALLELISM)
    os.environ[PARALLELISM] = "false"
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
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
