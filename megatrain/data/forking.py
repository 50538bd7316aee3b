"""Processes that are forked from this one, and never outlive it.

None of them outlives its parent, however that ends. They heed no signal: a terminal and a scheduler
send theirs to all processes of a job, and it is for the parent to end them.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

PR_SET_PDEATHSIG = 1
IGNORED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGXCPU,
    signal.SIGALRM,
)
PARALLELISM = "TOKENIZERS_PARALLELISM"  # of threads, which are not there after a fork


def forked(serve: Callable[[], object]) -> int:
    """Number of a new process that does `serve`, and ends. Raises OSError."""
    with _calm():
        parent, child = os.getpid(), os.fork()
        if child == 0:
            try:
                _depend_on(parent)
                serve()
            finally:
                os._exit(0)  # before anything of the parent is flushed or closed
    return child


def ended(child: int) -> int | None:
    """End a process, if it has not; its exit code, None where SIGCHLD is ignored."""
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)  # it has nothing to lose, and may never end
    return exit_code_of(child)


def exit_code_of(child: int) -> int | None:
    """Wait for a process that ends; its exit code, None where SIGCHLD is ignored."""
    try:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    except ChildProcessError:
        return None


def _depend_on(parent: int) -> None:
    """In a child: end with the parent, and heed no signal."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)  # it ended before that
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)


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
