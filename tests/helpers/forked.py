"""`python -m MODULE` in a process that is forked from the tests': it need not import anything."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch


class Forked:
    """As much of `subprocess.Popen` as those who start a module ask for."""

    stdin = stdout = stderr = None

    def __init__(
        self,
        command: Sequence[str],
        *,
        cwd: Any = None,
        env: Mapping[str, str] | None = None,
        stdout: Any = None,
        stderr: Any = None,
        **_: Any,
    ) -> None:
        context: Any = multiprocessing.get_context("fork")
        given = command, cwd, env, stdout, stderr
        self._process = context.Process(target=_run, args=given)
        self._process.start()
        self.pid: int = self._process.pid
        with suppress(OSError):  # whichever of the two comes first
            os.setpgid(self.pid, self.pid)

    @property
    def returncode(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("forked", timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


def _run(
    command: Sequence[str], cwd: Any, env: Mapping[str, str] | None, stdout: Any, stderr: Any
) -> None:
    module, *arguments = command[command.index("-m") + 1 :]
    os.setpgid(0, 0)
    signal.set_wakeup_fd(-1)  # of whoever forks, who may be in the middle of a loop
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    asyncio.set_event_loop_policy(None)
    torch.set_num_threads(1)
    os.chdir(cwd or ".")
    os.environ |= env or {}
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, file in ((1, stdout), (2, stderr)):
        if file is not None:
            os.dup2(file.fileno(), number)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(n, "r" if n == 0 else "w") for n in range(3))
    sys.argv = [module, *arguments]
    warnings.resetwarnings()  # of the tests' they are errors
    warnings.simplefilter("ignore")
    code: Any = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    if isinstance(code, str):
        sys.stderr.write(f"{code}\n")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))
