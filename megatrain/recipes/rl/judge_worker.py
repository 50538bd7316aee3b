"""A process that runs the reward functions, the tools and the environments of users' files.

Called as TRL's GRPOTrainer calls them: `f(prompts=, completions=, completion_ids=, **columns,
trainer_state=, log_extra=, log_metric=)`, with `environments=` where there are any, plain or async.
Imports no torch. An environment lives here for as long as its answer is written and judged.

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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
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
Episode = tuple[int, int]  # an answer: its prompt's key, and its number


def serve(file: int) -> None:
    """Answer tasks until the parent closes the socket: names of reward functions, of tools, and of
    an environment or None, then (method of `Files`, its arguments)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in PARENTS_SIGNALS:  # by a handler: what is ignored stays so in users' processes
        signal.signal(number, lambda *_: None)
    os.set_inheritable(file, False)
    connection = Connection(file)
    loop = asyncio.Runner()  # which stays: users keep sessions that belong to it
    with suppress(EOFError, OSError):
        rewards, tools, factory = (
            [_answered(connection, loaded, name) for name in names] for names in connection.recv()
        )
        files = Files(loop, rewards, tools, *factory)
        while True:
            _answered(connection, files.work, connection.recv_bytes())


def _answered(connection: Connection, work: Callable[..., Any], *arguments: Any) -> Any:
    """Send the answer of a piece of work, which is {} for a function; its result."""
    try:
        found = work(*arguments)
    except (Exception, SystemExit) as error:  # noqa: BLE001  whatever the user's module does
        found = {"error": reason_of(error)}
    connection.send_bytes(json.dumps(found if isinstance(found, dict) else {}).encode())
    return found


@dataclass
class Files:
    """Functions of users' files, and the environments that answers have here. Its methods are the
    tasks that the parent names."""

    loop: asyncio.Runner
    rewards: Sequence[Function]
    tools: Sequence[Function]
    factory: Function | None = None
    living: dict[Episode, Any] = field(default_factory=dict)
    spare: list[Any] = field(default_factory=list)  # made once, reset often

    def work(self, task: bytes) -> Any:
        name, *given = pickle.loads(task)
        return getattr(self, name)(*given)

    def describe(self) -> Answer:
        """The tools' schemas, and true if environments reward by themselves."""
        from transformers.utils.chat_template_utils import get_json_schema

        made = self.factory and self.factory()
        found = [*self.tools, *methods_of(made)]
        if len({one.__name__ for one in found}) < len(found):
            raise Fault("two tools are called alike; rename one")
        schemas = []
        for one in found:
            try:
                schemas.append(get_json_schema(one))
            except Exception as error:  # noqa: BLE001  hints that are missing, or of any kind
                raise Fault(f"{one.__name__}: {error}") from None
        return {"schemas": schemas, "rewards": hasattr(made, "get_reward")}

    def begin(self, episode: Episode | None, row: Mapping[str, Any], text: Any = None) -> Answer:
        """Reset an environment, for an answer if any, whose prompt has `text` of it; its text."""
        made = self.spare.pop() if self.spare or not self.factory else self.factory()
        found = settled(made.reset(**row), self.loop)
        if not isinstance(found, str | None):
            raise Fault(f"reset returned {found!r:.60} instead of a text or None")
        if episode is None:
            self.spare.append(made)
        elif found != text:
            raise Fault("reset returned another text than before; it must follow from the row")
        else:
            self.living[episode] = made
        return {"text": found}

    def reply(self, episode: Episode, calls: Sequence[tuple[str, Any]], most: int) -> Answer:
        """Results of calls, each a name and arguments, as texts of `most` characters; errors."""
        tools = {one.__name__: one for one in (*self.tools, *methods_of(self.living.get(episode)))}
        texts, errors = list[str](), list[str]()
        for name, arguments in calls:
            try:
                if self.factory and episode not in self.living:
                    raise Fault("the environment ended with its process")
                if not isinstance(arguments, dict):
                    raise Fault("a call is a JSON object of name and arguments")
                if name not in tools:
                    raise Fault(f"there is no tool {name[:REASON]}; there are {', '.join(tools)}")
                text = str(settled(tools[name](**arguments), self.loop))
            except (Exception, SystemExit) as error:  # noqa: BLE001  the model's doing, too
                text = f"Error: {reason_of(error)}"
                errors.append(text)
            cut = f"\nThe result is cut here, before {len(text) - most:,} more characters."
            texts.append(text if len(text) <= most else text[:most] + cut)
        return {"texts": texts, "errors": errors}

    def judge(self, number: int, call: Mapping[str, Any]) -> Answer:
        """Rewards by a function, or, behind these, by environments, whose answers are over then.
        None for all where an environment ended with its process."""
        made, by_function = [self.living.get(one) for one in call["episodes"]], self.rewards
        if number == len(self.rewards):
            self.spare += [self.living.pop(one) for one in call["episodes"] if one in self.living]
            by_function = [*by_function, rewards_of]
        if any(one is None for one in made):
            return {"rewards": [None] * len(made), "faults": []}
        environments = {"environments": made} if made else {}
        return rewarded(by_function[number], {**call, "more": environments}, self.loop)


async def rewards_of(environments: Sequence[Any], **_: Any) -> list[Any]:
    """The rewards that environments give, None where they have none to give."""
    given = [getattr(one, "get_reward", lambda: None)() for one in environments]
    return [await one if inspect.isawaitable(one) else one for one in given]


def methods_of(environment: Any) -> list[Function]:
    """Its public methods, which are tools, but for those that this process calls."""
    named = inspect.getmembers(type(environment), lambda one: hasattr(one, "__code__"))
    own = ("reset", "get_reward")
    return [getattr(environment, name) for name, _ in named if name[0] != "_" and name not in own]


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

    call: its own arguments; columns, by name; state, of trainer_state; more.
    """
    metrics, extra = defaultdict[str, list[float]](list), defaultdict[str, list[Any]](list)

    def log_extra(column: str, values: Sequence[Any]) -> None:
        extra[str(column)].extend(map(_plain, values))

    def log_metric(name: str, value: SupportsFloat) -> None:
        metrics[str(name)].append(float(value))

    own = {"log_extra": log_extra, "log_metric": log_metric, **call["more"]}
    own["trainer_state"] = SimpleNamespace(**call["state"])
    count = len(call["own"]["completions"])
    try:
        given = settled(function(**{**call["columns"], **call["own"], **own}), loop)
        rewards, faults = numbers(given, count)
        for column, values in extra.items():
            if len(values) != count:
                raise Fault(f"logged {len(values)} values of {column!r} for {count} answers")
    except (Exception, SystemExit) as error:  # noqa: BLE001  a user's code may ask Python to end
        return {"error": reason_of(error)}
    return {"rewards": rewards, "faults": faults, "metrics": dict(metrics), "extra": dict(extra)}


def settled(given: Any, loop: asyncio.Runner) -> Any:
    """A result of a function, awaited if it is async."""

    async def whole() -> Any:
        return await given

    return loop.run(whole()) if inspect.isawaitable(given) else given


def numbers(given: Any, count: int) -> tuple[list[float | None], list[tuple[int, str]]]:
    """Rewards as numbers, None for one that is None or nan; and (number of the answer, reason) of
    those that are neither. Raises Fault."""
    if given is None:
        raise Fault("returned None instead of a list")
    if len(values := [*given]) != count:
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
    others = (__file__, "<frozen", str(Path(asyncio.__file__).parent))
    traced = traceback.extract_tb(error.__traceback__)
    frames = [one for one in traced if not one.filename.startswith(others)]
    lines = [one.lineno for one in frames if one.filename == frames[0].filename]
    return f"{words}, in line {lines[-1]}" if lines else words
