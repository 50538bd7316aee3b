"""Helpers for files of reward functions, such as `from megatrain.rewards import last_number`.

Imports Python's own library alone, as code that is tried out runs in a process of this very file.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import re
import resource
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from types import ModuleType

NUMBER = re.compile(
    r"(?:(?<![\w).])[-+])?"  # a sign, unless it subtracts
    r"(?:\d{1,3}(?:,\d{3})+(?![\d,]\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
    r"(?:[eE][-+]?\d+)?"
)
MOST_FILE_BYTES = 1 << 24  # of each file that tried code writes
CLONE_NEWUSER, CLONE_NEWNET, PR_SET_PDEATHSIG = 0x10000000, 0x40000000, 1


def last_number(text: str) -> float | None:
    """The last number of a text, such as 1234.5 of "$1,234.50."; None if it has none."""
    found = NUMBER.findall(text)
    number = float(found[-1].replace(",", "")) if found else math.inf
    return number if math.isfinite(number) else None


def matches(text: str, pattern: str) -> bool:
    """True if the whole text, without the space around it, matches a regular expression, in which
    a dot stands for line ends, too."""
    return re.fullmatch(pattern, text.strip(), re.DOTALL) is not None


def boxed(text: str) -> str | None:
    r"""The content of the last \boxed{...} that is closed, with the braces in it; None if there is
    none."""
    for begin in reversed([found.end() for found in re.finditer(r"\\boxed\s*{", text)]):
        depth = 1
        for brace in re.finditer(r"(?<!\\)[{}]", text[begin:]):
            depth += 1 if brace[0] == "{" else -1
            if depth == 0:
                return text[begin : begin + brace.start()].strip()
    return None


def math_answer(text: str, answer: str) -> bool | None:
    """True if a text's final answer equals `answer` as mathematics, by math-verify; None if that
    cannot read `answer`. Both may be LaTeX. Raises ModuleNotFoundError without the extra."""
    try:
        from math_verify import parse, verify
    except ModuleNotFoundError as error:
        words = "math_answer needs math-verify; pip install 'megatrain[math]'"
        raise ModuleNotFoundError(words) from error
    # its own limits are signals, which only the main thread gets
    seconds = 5 if threading.current_thread() is threading.main_thread() else None
    is_marked = "$" in answer or "\\boxed" in answer  # else all of it is LaTeX
    wanted = parse(answer if is_marked else f"${answer}$", parsing_timeout=seconds)
    if not wanted:
        return None
    found = parse(text, parsing_timeout=seconds)
    return bool(verify(wanted, found, timeout_seconds=seconds))


def run_code(
    source: str, tests: str | Sequence[str], timeout_s: float = 10.0, memory_mib: int = 512
) -> float:
    """The share of `tests`, pieces of Python that raise nothing, that hold after `source` ran.

    Both run in a process with an empty environment, in a folder that is removed, with limits of
    time, memory, processes and the size of files, and without a network where the kernel lets
    anybody have namespaces. Tests that are not reached in time do not hold. This is a fence against
    accidents, not a jail: code that wants to can read files, and what root runs can start
    processes; keep code that you do not trust in a container.
    """
    pieces = [tests] if isinstance(tests, str) else [*tests]
    if not pieces:
        raise ValueError("run_code needs a test")
    token = secrets.token_hex(16)  # code that prints "passed" has not
    limits = {"NPROC": 0, "FSIZE": MOST_FILE_BYTES, "CORE": 0}
    limits |= {"CPU": math.ceil(timeout_s) + 1, "AS": memory_mib << 20}
    task = {"token": token, "source": source, "tests": pieces, "limits": limits}
    # libraries of arrays would start threads, which are processes to the kernel's limit
    environment = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder, TemporaryFile() as held:
        child = subprocess.Popen(
            [sys.executable, "-I", "-B", Path(__file__).resolve()],
            stdin=subprocess.PIPE,
            stdout=held,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env=environment,
            start_new_session=True,
        )
        try:
            with suppress(subprocess.TimeoutExpired):
                child.communicate(json.dumps(task).encode(), timeout_s)
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)  # also what it started
            child.wait()
        held.seek(0)
        lines = set(held.read().decode(errors="replace").splitlines())
    return sum(f"{token} {number}" in lines for number in range(len(pieces))) / len(pieces)


def _try_out() -> None:
    """In the child: run the code of standard input, and print the numbers of tests that hold."""
    task = json.loads(sys.stdin.buffer.read())
    held = os.fdopen(os.dup(1), "w", buffering=1)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    if sys.platform == "linux":
        kernel = ctypes.CDLL(None)
        kernel.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # who asked may be ended at a time limit
        kernel.unshare(CLONE_NEWUSER | CLONE_NEWNET)  # where that is forbidden, nothing happens
    for name, limit in task["limits"].items():
        with suppress(ValueError, OSError):  # above a limit that is set already
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    module = sys.modules["solution"] = ModuleType("solution")  # dataclasses look it up
    with suppress(BaseException):
        exec(compile(task["source"], "solution.py", "exec"), module.__dict__)
        for number, test in enumerate(task["tests"]):
            with suppress(BaseException):
                exec(compile(test, f"test {number}", "exec"), {**module.__dict__})
                held.write(f"{task['token']} {number}\n")
    os._exit(0)  # whatever threads and handlers the code has left


if __name__ == "__main__":
    _try_out()
