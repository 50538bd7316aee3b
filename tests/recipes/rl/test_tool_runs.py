"""Runs whose answers call tools, from the command line."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.config.sections import ToolsOptions
from megatrain.recipes.rl.judges import Group, Judges
from tests.helpers.commands import metrics_of, save_tiny_model, tiny_tokenizer, write_jsonl
from tests.helpers.pages import block, data_of
from tests.helpers.ranks import Started
from tests.recipes.same_run import CLOCK

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Each is one token, of which the model writes many.
CALLS = [
    '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>',
    '<tool_call>{"name": "up", "arguments": {"by": 1}}</tool_call>',
    '<tool_call>{"name": "up", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "up", ',
]
FILE = '''
def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: One.
        b: Another.
    """
    return a + b

class Counter:
    def reset(self, start, **row):
        self.count = start
        return f" From {start}."

    def up(self, by: int) -> int:
        """Count.

        Args:
            by: How far.
        """
        self.count += by
        return self.count

    def get_reward(self) -> float:
        return float(self.count)

def replies(completions, **columns):
    return [sum(turn["role"] == "tool" for turn in turns) / 9 for turns in completions]

def counted(environments, **columns):
    return [one.count / 10 for one in environments]
'''
CONFIG = """
model: model
method: grpo
data: {train: prompts.jsonl, eval: null}
train: {max_steps: 4, learning_rate: 0.01, warmup: 0, schedule: constant, seq_len: 1200}
grpo: {num_generations: 4, max_completion_length: 60}
rollout: {generation_batch_size: 8}
rewards: {functions: ["tools.py:replies"], processes: 2}
tools: {functions: ["tools.py:add"]}
checkpoint: {every: 2}
threads: 1
device: cpu
precision: float32
output: run
"""
ENVIRONMENT = ["tools.environment_factory=tools.py:Counter"]


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that often calls tools, and ends."""
    from transformers import AutoModelForCausalLM

    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(CALLS)
    tokenizer.chat_template, tokenizer.eos_token = TEMPLATE, "<|im_end|>"
    folder = save_tiny_model(tmp_path_factory.mktemp("caller") / "model", tokenizer, 2048)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer.convert_tokens_to_ids([*CALLS, "<|im_end|>"])
    with torch.no_grad():
        model.model.embed_tokens.weight += 1.0
        model.lm_head.weight[ids] += torch.tensor([6.0, 6.0, 4.0, 4.0, 6.5])[:, None] / 32
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def task(project: Path, caller: Path) -> Path:
    (project / "model").unlink()
    (project / "model").symlink_to(caller)
    (project / "tools.py").write_text(FILE)
    asked = [[{"role": "user", "content": f"Question {n}"}] for n in range(8)]
    rows = [{"prompt": turns, "start": n} for n, turns in enumerate(asked)]
    write_jsonl(project / "prompts.jsonl", rows)
    (project / "rl.yaml").write_text(CONFIG)
    return project


def answers_of(run: Path) -> dict[tuple[int, int], dict[str, Any]]:
    """Every answer in the journals of a run, by key and number, but for log-probabilities."""
    lines = [
        one for path in (run / "rollouts").glob("*.jsonl") for one in path.read_text().split("\n")
    ]
    found = [json.loads(line.rpartition(" ")[0]) for line in lines if line.startswith('{"key"')]
    return {(one["key"], one["number"]): {**one, "logprobs": None} for one in found if "ids" in one}


def fails() -> None:
    raise RuntimeError("the machine is gone")


def is_asked_to_stop() -> None:
    signal.raise_signal(signal.SIGTERM)


MORE = [
    "rollout.generation_batch_size=16",
    "grpo.num_iterations=2",
    "grpo.beta=0.1",
    "tools.max_tool_calling_iterations=2",
]
REWARDED = [
    "rewards.functions=[tools.py:replies, tools.py:counted]",
    "rewards.reward_weights=[1,2]",
]


@pytest.mark.parametrize(
    ("options", "how", "code"),
    [(MORE, fails, 1), ([*ENVIRONMENT, *REWARDED], is_asked_to_stop, 75)],
    ids=["tools", "environment"],
)
def test_a_run_that_stops_between_turns_goes_on_to_the_same_answers(
    megatrain, task, options, how, code, monkeypatch
):
    megatrain("train rl.yaml", *options, "output=whole", "checkpoint.keep=9")
    calls, whole = [], Judges.call

    def stopped(judges: Any, *args: Any) -> Any:
        calls.append(args)
        if len(calls) == 15:
            how()
        return whole(judges, *args)

    monkeypatch.setattr(Judges, "call", stopped)
    megatrain("train rl.yaml", *options, "checkpoint.keep=9", code=code)
    before = answers_of(task / "run")
    megatrain("resume run")
    wanted, found = answers_of(task / "whole"), answers_of(task / "run")
    assert wanted == {**found, **before} == found, "other answers, or one is written differently"
    for a, b in zip(metrics_of(task / "whole"), metrics_of(task / "run"), strict=True):
        # which rows are computed together, and so how sums round, follows from how long tools take
        figures = {n: v for n, v in a.items() if n not in CLOCK and isinstance(v, float)}
        assert {n: b[n] for n in figures} == pytest.approx(figures, rel=1e-3, abs=1e-5), a["step"]
    assert max(len(one["turns"]) for one in found.values()) >= 5
    turns = [turn for one in found.values() for turn in one["turns"]]
    assert {turn["content"].partition(":")[0] for turn in turns if turn["role"] == "tool"} > {"5"}
    lines = metrics_of(task / "run")
    assert all(line["tools/call_frequency"] > 1 for line in lines if "reward" in line)
    assert any(line["tools/failure_frequency"] > 0 for line in lines if "reward" in line)


def test_prompts_show_tools_and_answers_are_tried_and_evaluated(megatrain, task):
    options = [*ENVIRONMENT, "rewards.functions=[]", "data.eval=2", "rollout.eval_generations=2"]
    shown = megatrain("data rl.yaml --rows 1", *options).out
    assert '"name": "up"' in shown and '"name": "add"' in shown
    assert re.search(r"Question (\d) From \1\.", shown)
    found = megatrain("rollout rl.yaml --prompts 3 --json", *options).json
    assert found["names"] == ["Counter"] and found["tools/call_frequency"] > 0
    roles = {turn["role"] for one in found["answers"] for turn in one["answer"]}
    assert roles == {"assistant", "tool"}
    for one in found["answers"]:
        assert one["prompt"][-1]["content"].endswith(".")
    assert "Counter" in megatrain("rollout rl.yaml --prompts 1", *options).out
    megatrain("train rl.yaml", *options, "train.eval_every=2", "grpo.max_completion_length=90")
    last = [line for line in metrics_of(task / "run") if "eval_reward" in line][-1]
    assert last["eval_rewards/Counter/mean"] == last["eval_reward"] and last["step"] == 4
    assert "eval_tools/call_frequency" in last
    data = data_of((task / "run/report.html").read_text())
    table = block(data, "answers that step 4 learnt from")
    assert table["head"] == ["prompt", "answer", "Counter", "advantage"]
    called = re.compile(r"assistant: .*{'name': '\w+', 'arguments': .*}\ntool: ")
    assert any(called.search(row[1]) for row in table["rows"]), table["rows"]


REFUSED = {
    "tools.functions=[] tools.timeout_s=3": "tools.timeout_s: no tools are named",
    "tools.functions=[add]": "tools: add: is no FILE.py:NAME of a file here",
    "tools.functions=[absent.py:add]": "tools: absent.py:add: is no FILE.py:NAME of a file here",
    "tools.functions=[tools.py:absent]": "tools: tools.py:absent: ImportError: tools.py has no",
    "tools.functions=[tools.py:bare]": "tools: bare: Cannot generate JSON",
    "tools.functions=[tools.py:add,tools.py:add_again]": "tools: two tools are called alike",
    "rewards.functions=[]": "rewards.functions: is missing",
    "rewards.functions=[] tools.environment_factory=tools.py:Silent": "no get_reward rewards",
    "tools.environment_factory=tools.py:Whole": "tools: bare: Cannot generate JSON",
    "data.chat_template=chatml": "tools: the model's chat template leaves out tools",
    "method=sft": "belongs to method: grpo",
}


def test_what_cannot_call_tools_is_refused(megatrain, task):
    more = """
def bare(a): return a

def again(a: int) -> int:
    \"\"\"Add.

    Args:
        a: One.
    \"\"\"
    return a
again.__name__ = "add"
add_again = again

class Silent(Counter):
    get_reward = property()

class Whole(Counter):
    bare = classmethod(bare)
"""
    (task / "tools.py").write_text(FILE + more)
    for words, reason in REFUSED.items():
        assert reason in megatrain("train rl.yaml", *words.split(), code=2).err, words
    rows = [{"prompt": [{"role": "user", "content": "Question"}]}]
    write_jsonl(task / "prompts.jsonl", rows)
    reason = "prompts.jsonl:1: TypeError: Counter.reset() missing 1 required positional argument"
    assert reason in megatrain("train rl.yaml", *ENVIRONMENT, code=3).err
    write_jsonl(task / "prompts.jsonl", [{**rows[0], "environments": 1, "start": 1}])
    assert "'environments': reward func" in megatrain("train rl.yaml", *ENVIRONMENT, code=3).err
    write_jsonl(task / "prompts.jsonl", [{"prompt": "Question"}])
    assert "tools are called in turns; set" in megatrain("train rl.yaml", code=3).err
    assert megatrain("data rl.yaml data.prompts=chat --json").json["train"]["rows"] == 1


def test_the_examples_show_their_tools_and_reward_what_these_find(megatrain, task):
    (task / "examples").symlink_to(Path(__file__).parents[3] / "examples")
    subprocess.run([sys.executable, "examples/tools/rows.py", ".cache/tools"], check=True)
    given = ["model=model", "device=cpu", "precision=float32", "data.eval=null"]
    shown = {
        name: megatrain(f"data examples/tools/{name}.yaml --rows 1", *given).out
        for name in ("calculator", "library")
    }
    assert '"name": "calculate"' in shown["calculator"]
    assert "There are 4 documents: letter 1, letter 2, letter 3, letter 4." in shown["library"]
    row = json.loads(Path(".cache/tools/letters.jsonl").read_text().splitlines()[0])
    library = ToolsOptions(
        functions=("examples/tools/tools.py:calculate",),
        environment_factory="examples/tools/tools.py:Library",
    )
    with Judges((), tools=library, processes=1, rewarding=True) as judges:
        begins = row, judges.added(row)
        asked = [
            ("search", {"word": row["answer"]}, "letter 3"),
            ("read", {"name": "letter 3"}, row["documents"]["letter 3"]),
            ("answer", {"text": row["answer"]}, "Thank you."),
            ("calculate", {"expression": "(3 + 4) * -12 / 8"}, "-10.5"),
            ("calculate", {"expression": "open('x')"}, "Error: ValueError: only numbers"),
        ]
        calls = [{"function": {"name": name, "arguments": given}} for name, given, _ in asked]
        turns, _ = judges.call(0, 1, calls, begins, "").result()
        for turn, (_, _, wanted) in zip(turns, asked, strict=True):
            assert turn["content"].startswith(wanted)
        written = [[{"role": "assistant", "content": "x"}]] * 2
        group = {"prompt": row["prompt"], "completions": written, "completion_ids": [[1]] * 2}
        judges.submit(Group(key=0, **group, columns={}, where="", step=0, begins=begins))
        assert judges.result(0)["rewards"] == [[0.0, 1.0]]


@pytest.mark.slow
def test_two_ranks_write_the_answers_of_one(megatrain, task):
    line = f"train rl.yaml {' '.join(ENVIRONMENT)} rollout.generation_batch_size=16"
    megatrain(f"{line} output=alone checkpoint.keep=9")
    assert Started(2, f"{line} checkpoint.keep=9").wait() == [0, 0]
    assert answers_of(task / "alone") == answers_of(task / "run")
