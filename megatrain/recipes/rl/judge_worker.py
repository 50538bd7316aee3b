"""A process that runs the reward functions of users' files.

Called as TRL's GRPOTrainer calls them: `f(prompts=, completions=, completion_ids=, **columns,
trainer_state=, log_extra=, log_metric=)`, plain or async. Imports no torch.

A worker is handed pickled tasks and answers in JSON, so that the parent never builds an object of
the user's making. What functions print goes to the worker's standard output, which is the parent's
choice.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib.util
import inspect
import json
import math
import os
import pickle
import signal
import sys
import traceback
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, SupportsFloat

PR_SET_PDEATHSIG = 1
REASON = 300  # characters of an error that are told
# A terminal and a scheduler send theirs to all processes of a job; the parent ends its workers.
PARENTS_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

Function = Callable[..., Any]
Answer = dict[str, Any]  # rewards, faults, metrics and extra of one call, or error


def serve(file: int) -> None:
    """Answer tasks until the parent closes the socket: names of functions, then (number of a
    function, what it judges)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in PARENTS_SIGNALS:  # by a handler: what is ignored stays so in users' processes
        signal.signal(number, lambda *_: None)
    os.set_inheritable(file, False)
    connection = Connection(file)
    loop = asyncio.Runner()  # which stays: users keep sessions that belong to it
    with suppress(EOFError, OSError):
        functions = [_answered(connection, loaded, name) for name in connection.recv()]
        while True:
            task = connection.recv_bytes()
            _answered(connection, _work, functions, task, loop)


def _answered(connection: Connection, work: Callable[..., Any], *arguments: Any) -> Any:
    """Send the answer of a piece of work, which is {} for a function; its result."""
    try:
        found = work(*arguments)
    except (Exception, SystemExit) as error:  # noqa: BLE001  whatever the user's module does
        found = {"error": reason_of(error)}
    answer = found if isinstance(found, dict) else {}
    connection.send_bytes(json.dumps(answer).encode())
    return found


def _work(functions: Sequence[Function], task: bytes, loop: asyncio.Runner) -> Answer:
    number, call = pickle.loads(task)
    return rewarded(functions[number], call, loop)


def loaded(name: str) -> Function:
    """The function of `FILE.py:NAME`."""
    file, _, function = name.rpartition(":")
    path = Path(file).absolute()
    known = sys.modules.get(path.stem)
    own = known is None or getattr(known, "__file__", None) == str(path)
    title = path.stem if own else str(path)  # a file called json.py must not be everybody's json
    if title not in sys.modules:
        spec = importlib.util.spec_from_file_location(title, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{file} is no Python file")
        if str(path.parent) not in sys.path:
            sys.path.insert(0, str(path.parent))  # modules beside it
        sys.modules[title] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[title])
    found: Function | None = getattr(sys.modules[title], function, None)
    if not callable(found):
        raise ImportError(f"{file} has no function {function}")
    return found


class Fault(Exception):
    """A function's answer that is none, in a sentence's words."""


def rewarded(function: Function, call: Mapping[str, Any], loop: asyncio.Runner) -> Answer:
    """The answer of a function, plain or async.

    call: prompts, completions, completion_ids; columns, by name; state, of trainer_state.
    """
    metrics, extra = defaultdict[str, list[float]](list), defaultdict[str, list[Any]](list)

    def log_extra(column: str, values: Sequence[Any]) -> None:
        extra[str(column)].extend(map(_plain, values))

    def log_metric(name: str, value: SupportsFloat) -> None:
        metrics[str(name)].append(float(value))

    own = {name: call[name] for name in ("prompts", "completions", "completion_ids")}
    own["trainer_state"] = SimpleNamespace(**call["state"])
    own |= {"log_extra": log_extra, "log_metric": log_metric}
    count = len(call["completions"])
    try:
        given = function(**{**call["columns"], **own})
        if inspect.isawaitable(given):
            given = loop.run(_settled(given))
            if isinstance(given, BaseException):
                raise given
        rewards, faults = numbers(given, count)
        for column, values in extra.items():
            if len(values) != count:
                raise Fault(f"logged {len(values)} values of {column!r} for {count} answers")
    except (Exception, SystemExit) as error:  # noqa: BLE001  a user's code may ask Python to end
        return {"error": reason_of(error)}
    return {"rewards": rewards, "faults": faults, "metrics": dict(metrics), "extra": dict(extra)}


async def _settled(given: Awaitable[Any]) -> Any:
    """The result, or the error that it ends with, so that no frames of the loop are in that."""
    try:
        return await given
    except (Exception, SystemExit) as error:  # noqa: BLE001
        return error


def numbers(given: Any, count: int) -> tuple[list[float | None], list[tuple[int, str]]]:
    """Rewards as numbers, None for one that is None or nan; and (number of the answer, reason) of
    those that are neither. Raises Fault."""
    if given is None:
        raise Fault("returned None instead of a list")
    values = [*given]
    if len(values) != count:
        raise Fault(f"returned {len(values)} rewards for {count} answers")
    rewards, faults = list[float | None](), []
    for number, value in enumerate(values):
        found = math.inf
        if not isinstance(value, str | bytes):
            with suppress(TypeError, ValueError, OverflowError):
                found = math.nan if value is None else float(value)
        rewards.append(found if math.isfinite(found) else None)
        if math.isinf(found):  # nan is none, as in TRL
            faults.append((number, f"returned {value!r:.60}, which is no finite number"))
    return rewards, faults


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, str | int | float) else str(value)


def reason_of(error: BaseException) -> str:
    """An error in one line, and the line of the user's file."""
    if isinstance(error, Fault):
        return str(error)
    words = " ".join(f"{type(error).__name__}: {error}".split())[:REASON]
    frames = [
        one
        for one in traceback.extract_tb(error.__traceback__)
        if one.filename != __file__ and not one.filename.startswith("<frozen")
    ]
    lines = [one.lineno for one in frames if one.filename == frames[0].filename]
    return f"{words}, in line {lines[-1]}" if lines else words
