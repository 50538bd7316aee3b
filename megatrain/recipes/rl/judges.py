"""Rewards of answers, and tools that these call: by users' functions in processes of their own,
with a time limit, and by reward models."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass
from itertools import chain
from multiprocessing import Pipe
from pathlib import Path
from threading import Lock, local
from time import monotonic
from typing import Any

from megatrain.config.fields import check_functions, is_function, judge_name
from megatrain.data.samples import Tool
from megatrain.errors import ConfigError, RewardError, logger
from megatrain.heartbeat import beat
from megatrain.machine.hardware import physical_cores
from megatrain.recipes.frozen import RewardModel
from megatrain.recipes.rl.judge_worker import Answer, Episode
from megatrain.reporting.metrics import StepMetrics

MOST_PROCESSES = 8
STARTS_WITHIN_S = 120.0  # a worker, with what the user's files import
MOST_BYTES = 1 << 28  # of one answer, with what a function logs
TEXT = 60  # characters of an answer that an error shows
# of metrics that functions may not take, or a line would have one for the other
OWN_NAMES = {*StepMetrics.__annotations__, "reward", "reward_std", "entropy", "kl"}
BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from megatrain.recipes.rl.judge_worker import serve; serve(int(sys.argv[2]))"
)

Beginning = tuple[Mapping[str, Any], str | None]  # of an environment: a row, and what it adds to it


@dataclass(frozen=True, kw_only=True)
class Group:
    """A prompt's answers as functions are given them. prompt, completions: texts, or turns."""

    key: int
    prompt: str | list[dict[str, Any]]
    completions: Sequence[Any]
    completion_ids: Sequence[Sequence[int]]
    columns: Mapping[str, Any]
    where: str
    step: int
    begins: Beginning | None = None


class Judges(AbstractContextManager["Judges"]):
    """Judges groups while others are written. Workers start when they are first needed, and none
    outlives this process.

    judges: functions, as `FILE.py:NAME`, and reward models.
    on_bad_reward: "refuse" or "none".
    tools: the config's section; None: there are none. With tools all that concerns a prompt is done
        in one process, where the environments of its answers live. rewarding: these reward them.
    log: a file to which the workers' output is added; None: it is dropped.
    """

    def __init__(
        self,
        judges: Sequence[str | RewardModel],
        *,
        timeout_s: float = 60.0,
        processes: int | None = None,
        on_bad_reward: str = "refuse",
        tools: Any = None,
        rewarding: bool = False,
        log: Path | None = None,
    ) -> None:
        self.functions, self.tools = [one for one in judges if isinstance(one, str)], tools
        self.models = {n: one for n, one in enumerate(judges) if isinstance(one, RewardModel)}
        self.environment: str = (tools and tools.environment_factory) or ""
        environments = [self.environment] if self.environment else []
        self.files = [self.functions, [*(tools.functions if tools else ())], environments]
        self._begun, self._warned = set[Episode](), False
        named = [one if isinstance(one, str) else one.folder for one in judges]
        self.names = list(map(judge_name, named + environments * rewarding))
        self._scores = defaultdict[int, dict[int, list[float]]](dict)
        self.timeout_s, self.on_bad_reward = timeout_s, on_bad_reward
        self.failed = dict.fromkeys((*self.functions, *environments), 0)  # calls
        count = processes or min(MOST_PROCESSES, physical_cores())
        lanes = (1 for _ in range(count)) if tools else (count,)  # threads of each
        self._lanes = [ThreadPoolExecutor(n, thread_name_prefix="megatrain-judge") for n in lanes]
        self._own, self._log = local(), log  # each thread has a worker
        self._lock, self._closed, self._silent = Lock(), False, False
        self._all: set[Worker] = set()
        self._groups: dict[int, tuple[Group, Future[list[Answer]]]] = {}

    def __exit__(self, *_: object) -> None:
        """End all workers, also those at work."""
        with self._lock:  # none starts after that
            self._closed = True
            for worker in self._all:
                worker.kill()
        for lane in self._lanes:
            lane.shutdown(cancel_futures=True)
        for worker in self._all:
            worker.close()

    def check(self) -> None:
        """Import all functions, in a worker. Raises RewardError."""
        if self.functions or self.tools:
            self._lanes[0].submit(self._worker).result()

    def described(self) -> tuple[tuple[Tool, ...], bool]:
        """The tools' schemas, and true if environments reward answers. Raises RewardError."""
        found = self._lanes[0].submit(self._told, ("describe",), "", STARTS_WITHIN_S).result()
        return tuple(found["schemas"]), found["rewards"]

    def added(self, row: Mapping[str, Any]) -> Any:
        """The text that an environment adds to a row's prompt, or None. Raises RewardError."""
        return self._lanes[0].submit(self._told, ("begin", None, row)).result()["text"]

    def call(self, key: int, *about: Any) -> Future[tuple[list[dict[str, Any]], int]]:
        """The tools' turns that reply to an answer's calls, and the number of those that failed.
        about: its number, the calls, and `begins` and `where` of its prompt."""
        return self._lane(key).submit(self._replies, key, *about)

    def _lane(self, key: int) -> ThreadPoolExecutor:
        return self._lanes[key % len(self._lanes)]

    def submit(self, group: Group) -> None:
        self._groups[group.key] = group, self._lane(group.key).submit(self._ask, group)

    def score(self, keys: Sequence[int]) -> None:
        """Have reward models score groups that were submitted, all at once."""
        for place, model in self.models.items() if keys else ():
            found = model.scores([self._groups[key][0] for key in keys])
            for key, scores in zip(keys, found, strict=True):
                self._scores[key][place] = scores

    def result(self, key: int) -> dict[str, Any]:
        """The judgement of a group that was submitted, once it is there: rewards [functions]
        [answers], None where a function gave none; by name what functions `logged` of the group,
        and as `extra` of each answer; and its texts. Raises RewardError."""
        (group, part), extra = self._groups.pop(key), dict[str, Any]()
        while not wait([part], 1.0).done:
            beat()
        rewards, logged = [one["rewards"] for one in part.result()], defaultdict[str, Any](list)
        for found in part.result():
            extra |= found.get("extra", {})
            for name, values in found.get("metrics", {}).items():
                logged[name] += values
        for place, scores in self._scores.pop(key, {}).items():
            rewards.insert(place, scores)
        self._warn_if_silent(group, rewards)
        means = {name: sum(values) / len(values) for name, values in logged.items()}
        texts = {"prompt": group.prompt, "completions": group.completions}
        return {"rewards": rewards, "logged": means, "extra": extra, **texts}

    def _worker(self) -> Worker:
        """This thread's, started where it has none that lives. Raises RewardError."""
        worker: Worker | None = getattr(self._own, "worker", None)
        # what there is to read before a task is its end
        if worker is not None and not worker.broken and not worker.connection.poll():
            return worker
        with self._lock:
            if self._closed:
                raise CancelledError
            if worker is not None:
                self._all.discard(worker)
                worker.close()
            worker = self._own.worker = Worker(self.files, self._log)
            self._all.add(worker)
        worker.load()
        return worker

    def _asked(self, *about: Any) -> Answer:
        """In a thread: a worker's answer. about: as `Worker.ask` has it."""
        answer = self._worker().ask(*about)
        if self._closed:
            raise CancelledError  # the worker was ended on purpose
        return answer

    def _told(self, task: tuple[Any, ...], about: str = "", seconds: float | None = None) -> Answer:
        """In a thread: a worker's answer about tools. Raises RewardError."""
        answer = self._asked(task, seconds or self.tools.timeout_s, "(tools.timeout_s)")
        if "error" in answer:
            raise RewardError(f"{about}{answer['error']}")
        return answer

    def _begin(self, episode: Episode, begins: Beginning | None, where: str) -> None:
        """In a thread: reset an answer's environment, once."""
        if begins is not None and episode not in self._begun:
            self._begun.add(episode)
            self._told(("begin", episode, *begins), f"{self.environment}: {where}: ")

    def _replies(
        self, key: int, number: int, calls: list[Any], begins: Beginning | None, where: str
    ) -> tuple[list[dict[str, Any]], int]:
        """In a thread: as `call`."""
        self._begin((key, number), begins, where)
        asked = [(one["function"]["name"], one["function"]["arguments"]) for one in calls]
        task = "reply", (key, number), asked, self.tools.max_result_characters
        try:
            answer = self._told(task, "Error: ")
        except RewardError as error:  # of a process that was ended
            answer = dict.fromkeys(("texts", "errors"), [str(error)] * len(calls))
        if answer["errors"] and not self._warned:
            self._warned = True
            logger.warning(
                f"{where}: {answer['errors'][0]}; the model reads that, here and where a tool "
                "fails again"
            )
        texts = [one.encode(errors="replace").decode() for one in answer["texts"]]  # no half pairs
        turns = [
            {"role": "tool", "name": name, "content": text}
            for (name, _), text in zip(asked, texts, strict=True)
        ]
        return turns, len(answer["errors"])

    def _ask(self, group: Group) -> list[Answer]:
        """In a thread: what each function answers. Raises RewardError, or counts failures."""
        answers, count = list[Answer](), len(group.completions)
        episodes = [(group.key, number) for number in range(count)] if group.begins else []
        call = {
            "own": {
                "prompts": [group.prompt] * count,
                "completions": group.completions,
                "completion_ids": group.completion_ids,
            },
            "columns": {name: [value] * count for name, value in group.columns.items()},
            "state": {"global_step": group.step},
            "episodes": episodes,
        }
        for episode in episodes:
            self._begin(episode, group.begins, group.where)
        asked = [*self.functions, *[self.environment] * bool(episodes)]
        for number, function in enumerate(asked):
            answer = self._asked(("judge", number, call), self.timeout_s, "(rewards.timeout_s)")
            if taken := OWN_NAMES.intersection(answer.get("metrics", ())):
                answer = {"error": f"logs {min(taken)!r}, which the run logs itself; rename it"}
            faults = [(0, answer["error"])] if "error" in answer else answer["faults"]
            if faults:
                self._fail(function, group, *faults[0])
            answers.append({"rewards": [None] * count, **answer})
        self._begun -= {*episodes}
        return answers[: len(self.names) - len(self.models)]

    def _fail(self, function: str, group: Group, number: int, reason: str) -> None:
        """Raise RewardError, or count the call and warn of the first."""
        answer = group.completions[number]
        text = answer if isinstance(answer, str) else " ".join(str(x["content"]) for x in answer)
        about = f"{function}: {group.where}: {reason} (answer {number + 1}: {text[:TEXT]!r})"
        if self.on_bad_reward == "refuse":
            raise RewardError(f"{about}; mend it, or set rewards.on_bad_reward: none")
        with self._lock:
            self.failed[function] += 1
            first = self.failed[function] == 1
        if first:
            logger.warning(f"{about}; its rewards are None, here and where it fails again")

    def _warn_if_silent(self, group: Group, rewards: list[Any]) -> None:
        rewarded = (any(x is not None for x in of) for of in zip(*rewards, strict=True))
        if not self._silent and not all(rewarded):
            self._silent = True
            words = "no function rewards one of its answers, whose advantage is 0"
            logger.warning(f"{group.where}: {words}, here and where that comes again")


class Worker:
    """A process of `judge_worker.py`, in a session of its own, without a GPU."""

    def __init__(self, files: Sequence[Sequence[str]], log: Path | None) -> None:
        self.files, self.broken = files, False
        self.connection, theirs = Pipe()
        file = theirs.fileno()
        command = [sys.executable, "-c", BOOT, json.dumps([*map(str, sys.path)]), str(file)]
        with theirs, nullcontext(subprocess.DEVNULL) if log is None else log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[file],
                start_new_session=True,  # a terminal's Ctrl-C is the parent's
            )

    def load(self) -> None:
        """Import the functions. Raises RewardError."""
        self.connection.send(self.files)
        for function in chain(*self.files):
            if error := self._answer(STARTS_WITHIN_S, "to be imported").get("error"):
                self.kill()
                raise RewardError(f"{function}: {error}")

    def ask(self, task: Any, seconds: float, about: str) -> Answer:
        """The answer to a task, or an error in its place; a worker that gives none is ended. about:
        the key of the limit."""
        try:
            data = pickle.dumps(task)
        except Exception as error:  # noqa: BLE001  whatever the row's objects raise
            return {"error": f"its row cannot be handed to a process ({error})"}
        with suppress(OSError):  # `_answer` tells why
            self.connection.send_bytes(data)
        return self._answer(seconds, about)

    def _answer(self, seconds: float, about: str) -> Answer:
        deadline = monotonic() + seconds
        try:
            while not self.connection.poll(max(0.0, deadline - monotonic())):
                if monotonic() >= deadline:
                    self.kill()
                    return {"error": f"took more than {seconds:g} seconds {about}"}
            return dict(json.loads(self.connection.recv_bytes(MOST_BYTES)))
        except (EOFError, ConnectionError):
            self.broken = True
            with suppress(subprocess.TimeoutExpired):
                return {"error": f"ended its process with {self._process.wait(1.0)}"}
            return {"error": "closed its process' connection"}
        except (OSError, ValueError):
            self.kill()
            return {"error": f"logged more than {MOST_BYTES >> 20} MiB, or broke its connection"}

    def kill(self) -> None:
        """End the process and what it started."""
        self.broken = True
        if self._process.returncode is None:  # else its number may be another's
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        self._process.wait()
        self.connection.close()


def judges_of(config: Any, stack: ExitStack, log: Path | None, rewarding: bool) -> Judges:
    """The judges that a config names, which the stack closes: functions are imported once, and
    reward models read. rewarding: so do environments. Raises ConfigError."""
    check_functions(config)
    rewards = config.rewards
    found = [
        one if is_function(one) else RewardModel.open(one, config, stack)
        for one in rewards.functions
    ]
    judges = Judges(
        found,
        timeout_s=rewards.timeout_s,
        processes=None if rewards.processes == "auto" else rewards.processes,
        on_bad_reward=rewards.on_bad_reward,
        tools=config.tools if config.tools.files else None,
        rewarding=rewarding,
        log=log,
    )
    stack.enter_context(judges)
    try:
        judges.check()
    except RewardError as error:
        raise ConfigError(f"{config.where('rewards.functions')}: {error}") from None
    return judges
