"""Processes forked from one that has loaded everything and computed nothing: each is there in
milliseconds, and what becomes of it harms nobody else."""

from __future__ import annotations

import os
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedWriter, FileIO, TextIOWrapper
from pathlib import Path
from typing import IO, TextIO

from megatrain.errors import exit_code_of

AS = resource.RLIMIT_AS
MORE_BYTES = 8 << 30  # of address space than is taken: a case that asks for more is wrong


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit code (negative: the signal; None: it hung), and all it said."""

    code: int | None
    words: str


class Child:
    """A process that runs `action`, in a process group of its own.

    Exit code: what `action` returns, or that of an error, as a command's.
    """

    def __init__(self, action: Callable[[], int | None]) -> None:
        # its output goes to a file: a pipe may fill up, and grandchildren would hold it open
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self.id = os.fork()
        if self.id == 0:
            _become(action, self._output.fileno())

    def kill(self) -> None:
        """As the kernel does when memory is out. It may have ended already."""
        os.kill(self.id, signal.SIGKILL)

    def wait(self, limit_s: float) -> Ended:
        """Its end; after `limit_s` it is ended, with all of its group."""
        with self._output:
            began = os.pidfd_open(self.id)
            try:
                hung = not select.select([began], [], [], limit_s)[0]
            finally:
                os.close(began)
            if hung:
                self.kill()  # it may not lead its group yet
                with suppress(ProcessLookupError):
                    os.killpg(self.id, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(os.waitpid(self.id, 0)[1])
            self._output.seek(0)
            words = self._output.read().decode(errors="replace")
        return Ended(None if hung else code, words)


def _stream(fd: int) -> TextIO:
    return TextIOWrapper(BufferedWriter(FileIO(fd, "w", closefd=False)), "utf-8")


def _become(action: Callable[[], int | None], output: int) -> None:
    """The rest of a child's life."""
    code = 1
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout, sys.stderr = (_stream(fd) for fd in (1, 2))
        code = action() or 0
    except BaseException as error:  # noqa: BLE001  a child must not go on as its parent
        code, _ = exit_code_of(error) if isinstance(error, Exception) else (1, "")
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def in_child(action: Callable[[], int | None], limit_s: float = 60) -> Ended:
    return Child(action).wait(limit_s)


def start(folder: Path, *arguments: str, first: Callable[[], object] | None = None) -> Child:
    """A megatrain command in `folder`, with a cache there; `first` runs in its process before."""

    def run() -> int:
        from megatrain import cli

        os.chdir(folder)
        os.environ["MEGATRAIN_CACHE"] = str(folder / "cache")
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most, allowed = pages * resource.getpagesize() + MORE_BYTES, resource.getrlimit(AS)[1]
        most = most if allowed == resource.RLIM_INFINITY else min(most, allowed)
        resource.setrlimit(AS, (most, most))
        if first is not None:
            first()
        return cli.main(arguments)

    return Child(run)


def command(folder: Path, *arguments: str, limit_s: float = 60) -> Ended:
    """Run a megatrain command to its end."""
    return start(folder, *arguments).wait(limit_s)


def wait_until(condition: Callable[[], bool], child: Child, limit_s: float = 60) -> None:
    """Return when the condition holds or the child has ended."""
    end = time.monotonic() + limit_s
    while not condition() and time.monotonic() < end:
        if os.waitid(os.P_PID, child.id, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return
        time.sleep(0.005)
