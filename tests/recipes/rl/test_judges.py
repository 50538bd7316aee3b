"""Users' reward functions, rewarded in processes of their own, as TRL calls them."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatrain.config.sections import ToolsOptions
from megatrain.errors import ConfigError, RewardError
from megatrain.recipes.rl import judges as module
from megatrain.recipes.rl.judges import Group, Judges, judges_of
from tests.helpers.commands import children_of
from tests.helpers.trl_oracle import scored_by_trl

FUNCTIONS = """
from __future__ import annotations
import asyncio, os, subprocess, sys, time
from dataclasses import dataclass
import words  # beside this file
print("a function's file may print")

@dataclass
class Worth:
    of: float

def length(completions, **columns):
    print("and so may a function"); print("loudly", file=sys.stderr); os.write(1, b"to its file")
    return [len(words.text(one)) for one in completions]

def right(prompts, completions, completion_ids, answer, trainer_state, **columns):
    assert len(prompts) == len(completion_ids) == len(answer) and trainer_state.global_step == 0
    assert prompts[0] in ("2+2=", [{"role": "user", "content": "2+2="}])
    texts = map(words.text, completions)
    return [None if text == "?" else text == one for text, one in zip(texts, answer)]

session = None
async def later(completions, log_metric, log_extra, **columns):
    global session  # belongs to a loop, as a client's does
    session = session or asyncio.get_running_loop()
    await asyncio.sleep(0.001)
    assert session is asyncio.get_running_loop()
    log_metric("seen", len(completions)); log_metric("seen", 0)
    log_extra("text", [words.text(one) for one in completions[:1]])
    log_extra("text", [words.text(one) for one in completions[1:]])
    return [Worth(words.WORTH).of] * len(completions)

class Polite:
    def __call__(self, completions, **columns):
        import numpy
        return numpy.array([float("nan"), 0.25] * 99)[:len(completions)]
polite = Polite()

def few(completions, **columns): return [1.0]
def forgets(completions, **columns): completions
def fails(completions, **columns): raise KeyError("no such thing")
def exits(completions, **columns): sys.exit(3)
def hangs(completions, **columns): time.sleep(60)
def starts(completions, **columns): subprocess.run(["sleep", "60"])
def ends(completions, **columns): os._exit(3)
def infinite(completions, **columns): return [1.0, float("inf"), 0.5]
def texts(completions, **columns): return ["1.0", 2.0, 0.5]
def large(completions, log_extra, **columns):
    log_extra("all", ["x" * 9999] * len(completions)); return [1.0] * len(completions)
def lines(completions, log_extra, **columns):
    log_extra("one", ["x"]); return [1.0] * len(completions)
def step(completions, trainer_state, **columns): return [trainer_state.global_step] * len(completions)
"""  # noqa: E501
WORDS = "WORTH = 0.5\ndef text(one): return one if isinstance(one, str) else one[0]['content']"
GOOD = ("length", "right", "later", "polite")
TEXTS = ["4", "five", "?"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "words.py").write_text(WORDS)
    path = tmp_path / "json.py"  # a name that is taken
    path.write_text(FUNCTIONS)
    return path


def group(key: int = 0, is_chat: bool = False, **changes: Any) -> Group:
    texts: list[Any] = TEXTS
    if is_chat:
        texts = [[{"role": "assistant", "content": text}] for text in TEXTS]
    given = {
        "prompt": [{"role": "user", "content": "2+2="}] if is_chat else "2+2=",
        "completions": texts,
        "completion_ids": [[3, 4]] * len(TEXTS),
        "columns": {"answer": "4", "source": f"row {key}"},
        "where": f"rows.jsonl:{key + 1}",
        "step": 0,
    }
    return Group(key=key, **{**given, **changes})


def in_python(file: Path) -> list[Any]:
    """The functions, imported here."""
    sys.path.insert(0, str(file.parent))
    try:
        spec = importlib.util.spec_from_file_location("rewards_of_a_test", file)
        assert spec is not None and spec.loader is not None
        made = sys.modules["rewards_of_a_test"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(made)
    finally:
        sys.path.remove(str(file.parent))
        sys.modules.pop("words", None)
    return [getattr(made, name) for name in GOOD]


@pytest.mark.parametrize("is_chat", [False, True], ids=["texts", "turns"])
def test_rewards_are_those_that_trl_computes(file, is_chat, tmp_path):
    groups = [group(key, is_chat) for key in range(3)]
    rows = [{"prompt": g.prompt, **g.columns} for g in groups for _ in g.completions]
    completions = [one for g in groups for one in g.completions]
    theirs = in_python(file)
    _, trainer = scored_by_trl(tmp_path, rows, completions, theirs, num_generations=3)
    wanted = [trainer._logs["rewards"][name] for name in ("length", "right", "later", "Polite")]
    names = [f"{file}:{name}" for name in GOOD]
    with Judges(names, processes=2) as judges:
        for one in reversed(groups):
            judges.submit(one)
        found = [judges.result(one.key) for one in groups]
    assert judges.names == [*GOOD]
    ours = np.concatenate([np.array(one["rewards"], float) for one in found], 1)
    ours[3] = np.array(([math.nan, 0.25] * 9)[:9])  # which sees three at a time
    np.testing.assert_array_equal(ours, np.array(wanted))
    assert [one["logged"] for one in found] == [{"seen": 1.5}] * 3  # means of 3 and 0
    assert [one["extra"] for one in found] == [{"text": TEXTS}] * 3
    assert trainer._metrics["train"]["seen"] == [4.5]
    assert [*trainer._logs["extra"]["text"]] == TEXTS * 3


FAULTS = {
    "few": "returned 1 rewards for 3 answers (answer 1: '4')",
    "forgets": "returned None instead of a list (answer 1: '4')",
    "fails": "KeyError: 'no such thing', in line 41 (answer 1: '4')",
    "exits": "SystemExit: 3, in line 42 (answer 1: '4')",
    "hangs": "took more than 0.3 seconds (rewards.timeout_s) (answer 1: '4')",
    "starts": "took more than 0.3 seconds (rewards.timeout_s) (answer 1: '4')",
    "ends": "ended its process with 3 (answer 1: '4')",
    "infinite": "returned inf, which is no finite number (answer 2: 'five')",
    "texts": "returned '1.0', which is no finite number (answer 1: '4')",
    "large": "logged more than 0 MiB, or broke its connection (answer 1: '4')",
    "lines": "logged 1 values of 'one' for 3 answers (answer 1: '4')",
}


def test_what_fails_is_told_or_counted_as_none(file, caplog, monkeypatch):
    monkeypatch.setattr(module, "MOST_BYTES", 9999)
    names = [f"{file}:{name}" for name in FAULTS]
    for name, reason in zip(names, FAULTS.values(), strict=True):
        with Judges([name], timeout_s=0.3, processes=1) as judges:
            judges.submit(group())
            with pytest.raises(RewardError) as caught:
                judges.result(0)
        mend = "mend it, or set rewards.on_bad_reward: none"
        assert str(caught.value) == f"{name}: rows.jsonl:1: {reason}; {mend}"
        assert caught.value.exit_code == 3
    names = [*names, f"{file}:length"]
    with Judges(names, timeout_s=0.3, processes=1, on_bad_reward="none") as judges:
        for key in (0, 1):  # by the processes that took the place of those that ended
            judges.submit(group(key))
        found = [judges.result(key)["rewards"] for key in (0, 1)]
    partly = {"infinite": [1.0, None, 0.5], "texts": [None, 2.0, 0.5]}
    assert found == [[*(partly.get(name, [None] * 3) for name in FAULTS), [1.0, 4.0, 1.0]]] * 2
    assert judges.failed == {**dict.fromkeys(names, 2), names[-1]: 0}
    assert len(caplog.records) == len(FAULTS)


def test_a_row_that_no_process_can_be_handed_and_answers_without_rewards(file, caplog):
    with Judges([f"{file}:right"], processes=1) as judges:
        for key, source in enumerate((threading.Lock(), "row")):
            judges.submit(group(key, columns={"answer": "4", "source": source}))
        with pytest.raises(RewardError, match="its row cannot be handed to a process \\(cannot"):
            judges.result(0)
        assert judges.result(1)["rewards"] == [[1.0, 0.0, None]]
    assert "rows.jsonl:2: no function rewards one of its answers" in caplog.text


def test_what_cannot_be_imported_is_told_at_once(file, tmp_path):
    (tmp_path / "broken.py").write_text("import os\nimport nothing_like_it")
    (tmp_path / "wrong.py").write_text("x = (")
    (tmp_path / "quits.py").write_text("raise SystemExit('no')")
    for name, reason in {
        f"{file}:nowhere": "has no function nowhere",
        f"{tmp_path}/broken.py:f": "No module named 'nothing_like_it', in line 2",
        f"{tmp_path}/wrong.py:f": r"SyntaxError: '\(' was never closed \(wrong.py, line 1\)",
        f"{tmp_path}/quits.py:f": "SystemExit: no",
        f"{tmp_path}/absent.py:f": "no such file",
    }.items():
        options = {"functions": (name,), "timeout_s": 1.0, "processes": 1, "on_bad_reward": "none"}
        config = SimpleNamespace(
            rewards=SimpleNamespace(**options),
            tools=ToolsOptions(),
            where=lambda key: f"c.yaml: {key}",
        )
        with (
            ExitStack() as stack,
            pytest.raises(ConfigError, match=f"^c.yaml: rewards.functions: .*{reason}"),
        ):
            judges_of(config, stack, None, rewarding=False)


def test_many_groups_and_what_functions_print(file, tmp_path, capfd):
    log = tmp_path / "log"
    with Judges([f"{file}:length"], processes=2, log=log) as judges:
        long = group(999, completions=["x" * 2_000_000] * 3)
        for key in range(200):
            judges.submit(group(key))
        judges.submit(long)
        assert [judges.result(key)["rewards"] for key in range(200)] == [[[1.0, 4.0, 1.0]]] * 200
        assert judges.result(999)["rewards"] == [[2e6] * 3]
        assert len(judges._all) <= 2
    assert capfd.readouterr() == ("", "")
    assert {"a function's file may print", "loudly"} <= {*log.read_text().splitlines()}


def test_workers_end_with_their_judges_also_those_at_work(file, caplog, capfd):
    names = [f"{file}:starts", f"{file}:length"]
    with Judges(names, processes=2, on_bad_reward="none") as judges:
        for key in range(9):
            judges.submit(group(key))
        while len(sleeping := [*map(children_of, pids(judges))]) < 2 or not all(sleeping):
            time.sleep(0.01)
        workers = [*pids(judges), *(pid for one in sleeping for pid in one)]
        began = time.monotonic()
    assert time.monotonic() - began < 20
    for pid in workers:
        assert is_gone(pid)
    assert caplog.text == "" and capfd.readouterr() == ("", "")


def pids(judges: Judges) -> list[int]:
    return [worker._process.pid for worker in [*judges._all]]


def is_gone(pid: int) -> bool:
    """Whether a process ends at once, or waits for whoever inherited it to see that."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with suppress(FileNotFoundError, ProcessLookupError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                time.sleep(0.01)
                continue
        return True
    return False


def test_a_killed_worker_is_replaced_and_none_outlives_its_parent(file):
    with Judges([f"{file}:length"], processes=1) as judges:
        for key in range(2):
            judges.submit(group(key))
            assert judges.result(key)["rewards"] == [[1.0, 4.0, 1.0]]
            if key == 0:
                os.kill(pids(judges)[0], 15)  # a scheduler's, which is the parent's
                judges.submit(group(7))
                judges.result(7)
                killed = pids(judges)[0]
                os.kill(killed, 9)
                assert is_gone(killed)
    code = f"""
from megatrain.recipes.rl.judges import Group, Judges
judges = Judges(['{file}:hangs'], processes=1)
judges.submit(Group(key=0, prompt='', completions=['a'], completion_ids=[[1]], columns={{}},
    where='', step=0))
import time
while not judges._all or not (worker := [*judges._all][0]).connection: time.sleep(0.01)
time.sleep(0.3)
print(worker._process.pid, flush=True)
time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    with parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        assert not Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].startswith(" Z")
        parent.kill()
    assert is_gone(worker)


def test_a_worker_imports_little():
    heavy = {"torch", "transformers", "numpy", "pydantic", "numba", "megatrain.config"}
    code = "import sys, megatrain.recipes.rl.judge_worker, megatrain.rewards; "
    code += f"assert not {heavy!r} & sys.modules.keys(), sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
