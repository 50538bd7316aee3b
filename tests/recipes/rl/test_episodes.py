"""Answers that call tools: their tokens and masks, what tools may do wrong, and runs of them."""

from __future__ import annotations

import json
import math
import random
import time
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from megatrain.config.sections import ToolsOptions
from megatrain.data.template import Scene, Template, Toolbox
from megatrain.engine.rollout import decode
from megatrain.engine.rollout.decode import Answer, AnswerRequest, answers
from megatrain.engine.rollout.draw import Draw
from megatrain.errors import RewardError
from megatrain.recipes.rl.episodes import Episodes
from megatrain.recipes.rl.judges import Group, Judges
from megatrain.recipes.rl.prompts import Prompt
from megatrain.recipes.rl.rollouts import lengths_of
from megatrain.recipes.signals import StopRequest
from tests.engine.test_rollout import by_key, logprobs, model_of, prompts
from tests.helpers.commands import tiny_tokenizer
from tests.helpers.support import plain_model, tiny_config

# tokens that end a turn which calls, and all that end one
CALLS, ENDS = {*range(5, 12)}, (*range(5, 15),)


class Replies:
    """Stands for a toolbox and for judges: tools take a moment, and say some tokens."""

    def __init__(self) -> None:
        self.threads, self.draws = ThreadPoolExecutor(4), random.Random(0)

    def read(self, ids: list[int], before: list[int]) -> tuple[dict[str, Any], list[Any]]:
        return {"role": "assistant", "content": str(ids)}, [ids] * (ids[-1] in CALLS)

    def call(self, key: int, number: int, calls: list[Any], *_: Any) -> Future[Any]:
        turn = {"role": "tool", "content": str([sum(calls[0]) % 90 + 7, 7, 8])}
        pause = self.draws.random() / 1000

        def reply() -> Any:
            time.sleep(pause)
            return [turn], 0

        return self.threads.submit(reply)

    def between(self, replies: list[dict[str, Any]]) -> str:
        return str(replies[0]["content"])

    def ids(self, text: str) -> list[int]:
        return list(json.loads(text))


@torch.no_grad()
def test_200_episodes_have_the_tokens_that_were_drawn_whatever_their_company(monkeypatch):
    model, most, draw = model_of("llama"), 40, Draw(seed=3, temperature=1.3, top_k=30)
    given = {n: Prompt(ids, "", {}, "") for n, ids in enumerate(prompts(25))}
    requests = [AnswerRequest(n, one.ids, range(8), most) for n, one in given.items()]
    runs = []
    for slots, asked in ((3, requests), (64, requests[::-1]), (None, requests[:2])):
        if slots is None:  # by transformers' generate
            monkeypatch.setattr(decode, "_TRIED", {model: "of a test"})
        stub: Any = Replies()
        episodes = Episodes(stub, stub, given, StopRequest(), most)

        def write(asked: Any, more: Any, slots: int | None = slots) -> Any:
            yield from answers(model, asked, draw, ENDS, slots=slots, more=more)

        runs.append(by_key(episodes.written(write, asked)))
    one, other, few = runs
    assert len(one) == 200 and [len(found) for found in runs] == [200, 200, 16]
    for which, answer in one.items():
        assert other[which].turns == answer.turns and other[which].mask == answer.mask
        assert which not in few or few[which].ids == answer.ids
    assert sum(len(answer.turns or ()) > 4 for answer in one.values()) > 20
    for (key, _), answer in one.items():
        check_episode(answer, most)
        expected = logprobs(model, given[key].ids, answer.ids, 1.3)
        drawn = [
            a == pytest.approx(b, abs=3e-3) for a, b in zip(answer.logprobs, expected, strict=True)
        ]
        assert [*map(int, drawn)] == answer.mask
        assert [math.isnan(x) for x in answer.logprobs] == [not x for x in answer.mask or ()]


def check_episode(answer: Answer, most: int) -> None:
    """Its turns are its tokens, those of the model with 1 and those of tools with 0 in the mask."""
    ids, mask = [], []
    for turn in answer.turns or ():
        own = json.loads(turn["content"])
        ids += own
        mask += [int(turn["role"] == "assistant")] * len(own)
    assert (answer.ids, answer.mask) == (ids, mask) and len(ids) <= most
    assert len(answer.logprobs) == len(answer.kept_mass or ()) == len(ids)
    last = json.loads((answer.turns or [{}])[-1]["content"])
    assert (answer.finish == "stop") == (last[-1] in ENDS)
    if answer.finish == "stop" and last[-1] in CALLS:
        assert len(ids) + 3 >= most  # no room behind what tools say


TOOLS = '''
import os, time

def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    print("a tool may print")
    return a + b

async def later(a: int) -> str:
    """Say it a little later.

    Args:
        a: A number.
    """
    return f"later {a}"

def fails() -> str:
    """Fail."""
    raise KeyError("nothing there")

def hangs() -> str:
    """Hang."""
    time.sleep(60)

def ends() -> str:
    """End the process."""
    os._exit(3)

def large() -> str:
    """Say much."""
    return "x" * 10_000_000

def halves() -> str:
    """Say what is no text."""
    return "a\\ud800b"

class Counter:
    def reset(self, start=0, **row):
        self.count = start
        return f" You begin at {start}." if start else None

    def increment(self, by: int) -> int:
        """Count.

        Args:
            by: How far.
        """
        self.count += by
        return self.count

    def hang(self) -> str:
        """Hang."""
        time.sleep(60)

    def get_reward(self) -> float:
        return float(self.count)

    def _hidden(self): raise AssertionError

class Restless(Counter):
    seen = 0
    def reset(self, **row):
        Restless.seen += 1
        return str(Restless.seen)

def counts(environments, completions, **columns):
    assert len(environments) == len(completions)
    return [one.count / 10 for one in environments]
'''


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    path = tmp_path / "tools.py"
    path.write_text(TOOLS)
    return path


def options(file: Path, *names: str, environment: str | None = None, **more: Any) -> ToolsOptions:
    given = {"functions": tuple(f"{file}:{name}" for name in names), "timeout_s": 1.0, **more}
    return ToolsOptions(**given, environment_factory=environment and f"{file}:{environment}")


def call(name: str, arguments: Any = None) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": {} if arguments is None else arguments}}


WRONG = {
    "fails": "Error: KeyError: 'nothing there', in line ",
    "hangs": "Error: took more than 1 seconds (tools.timeout_s)",
    "ends": "Error: ended its process with 3",
    "absent": "Error: there is no tool absent; there are add, later, fails, hangs, ends, large",
}


def test_a_tool_s_fault_is_a_sentence_that_the_model_reads(tools, caplog):
    names = ("add", "later", "fails", "hangs", "ends", "large", "halves")
    asked = options(tools, *names, max_result_characters=100)
    with Judges((), tools=asked, processes=1) as judges:
        schemas, rewarding = judges.described()
        assert [one["function"]["name"] for one in schemas] == [*names]
        assert not rewarding and judges.names == []
        for name, reason in WRONG.items():
            given = [call("add", {"a": 2, "b": 3}), call(name), call("later", {"a": 1})]
            turns, failures = judges.call(0, 0, given, None, "rows:1").result()
            assert [one["role"] for one in turns] == ["tool"] * 3
            said = [one["content"] for one in turns]
            assert said[1].startswith(reason)
            lives = name not in ("hangs", "ends")  # a process that ends says nothing of a turn
            assert [said[0], said[2]] == (["5", "later 1"] if lives else [said[1]] * 2)
            assert failures == (1 if lives else 3)
        for single, reason in (
            (call("add", {"a": 2}), "Error: TypeError: add() missing 1 required positional"),
            (call("add", [2, 3]), "Error: a call is a JSON object of name and arguments"),
            (call("add", {"a": 2, "b": 3, "c": object}), "Error: "),
        ):
            turns, failures = judges.call(1, 0, [single], None, "rows:1").result()
            assert turns[0]["content"].startswith(reason) and failures == 1
        turns, failures = judges.call(0, 0, [call("large"), call("halves")], None, "").result()
        cut = "The result is cut here, before 9,999,900 more characters."
        assert turns[0]["content"] == f"{'x' * 100}\n{cut}" and turns[1]["content"] == "a?b"
        assert failures == 0
    (record,) = caplog.records
    assert record.message.startswith(f"rows:1: {WRONG['fails']}")


def judged(judges: Judges, key: int, begins: Any, count: int = 2) -> dict[str, Any]:
    group = Group(
        key=key,
        prompt=[{"role": "user", "content": "Count."}],
        completions=[[{"role": "assistant", "content": "x"}]] * count,
        completion_ids=[[1]] * count,
        columns={},
        where="rows:1",
        step=0,
        begins=begins,
    )
    judges.submit(group)
    return judges.result(key)


def test_an_environment_is_an_answer_s_own_until_it_is_judged(tools, caplog):
    asked = options(tools, "add", environment="Counter")
    with Judges([f"{tools}:counts"], tools=asked, processes=2, rewarding=True) as judges:
        schemas, rewarding = judges.described()
        names = [one["function"]["name"] for one in schemas]
        assert (
            rewarding
            and names == ["add", "hang", "increment"]
            and judges.names == ["counts", "Counter"]
        )
        assert judges.added({"start": 7, "prompt": "x"}) == " You begin at 7."
        assert judges.added({}) is None
        for key in (0, 1, 2):
            begins = {"start": key}, f" You begin at {key}." if key else None
            for number, by in ((0, 10), (1, 20), (0, 30)):
                turns, _ = judges.call(
                    key, number, [call("increment", {"by": by})], begins, ""
                ).result()
                assert turns[0]["content"] == str(key + {10: 10, 20: 20, 30: 40}[by])
            rewards = judged(judges, key, begins, 3)["rewards"]  # the third has called nothing
            assert rewards == [
                [(key + n) / 10 for n in (40, 20, 0)],
                [key + n for n in (40, 20, 0)],
            ]
        assert judged(judges, 2, ({"start": 2}, " You begin at 2."))["rewards"] == [
            [0.2] * 2,
            [2] * 2,
        ], "it begins anew"
        for name, reason in (
            ("hang", "Error: took more than 1 seconds (tools.timeout_s)"),
            ("increment", "Error: the environment ended with its process"),
        ):
            turns, failures = judges.call(4, 0, [call(name)], ({}, None), "rows:1").result()
            assert (turns[0]["content"], failures) == (reason, 1)
        assert judged(judges, 4, ({}, None))["rewards"] == [[None, None]] * 2
        assert judged(judges, 4, ({}, None))["rewards"] == [[0, 0]] * 2
    assert "rows:1: no function rewards one of its answers" in caplog.text
    with Judges((), tools=options(tools, environment="Restless"), processes=1) as judges:
        text = judges.added({})
        with pytest.raises(RewardError, match="rows:1: reset returned another text than before"):
            judges.call(0, 0, [call("increment", {"by": 1})], ({}, text), "rows:1").result()


def qwen_tokenizer() -> Any:
    """With Qwen3's chat template, as TRL has a copy of it."""
    import trl

    tokenizer = tiny_tokenizer()
    folder = Path(trl.__file__).parent / "chat_templates"
    tokenizer.chat_template = (folder / "qwen3.jinja").read_text()
    tokenizer.eos_token = "<|im_end|>"
    return tokenizer


def next_turn(tokenizer: Any, before: list[int]) -> list[int]:
    """Tokens of a turn, which follow from those before it."""
    draws = random.Random(str(before))
    text = draws.choice(["", "<think>\nTwo numbers.\n</think>\n\n"])
    for _ in range(draws.choice([0, 1, 1, 1, 2])):
        numbers = {"a": draws.randint(0, 9), "b": draws.randint(0, 9)}
        called = json.dumps({"name": "add", "arguments": numbers})
        text += f"<tool_call>\n{called}\n</tool_call>\n"
    text = text.strip() if "call" in text else f"{text}It is {draws.randint(0, 99)}."
    return list(tokenizer(f"{text}<|im_end|>", add_special_tokens=False).input_ids)


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
CONTENTS = {
    f"see {CALL}\n\nDone.<|im_end|>": ("see Done.", 1),
    f"first {CALL} then {CALL}": ("first then ", 2),
    f"let me look {CALL}<|endoftext|>": ("let me look ", 1),
    "hello<|endoftext|>": ("hello", 0),
    "hi <think>x</think> there": ("hi there", 0),
}


def test_a_turn_s_content_is_all_that_is_neither_thought_nor_call():
    tokenizer = qwen_tokenizer()
    box = Toolbox(Template(tokenizer), tokenizer, ())
    for text, (content, count) in CONTENTS.items():
        said, calls = box.read(box.ids(text), [])
        assert (said["content"], len(calls)) == (content, count), text


def test_who_is_asked_to_stop_waits_for_no_tool():
    anyone: Any = Replies()
    stop = StopRequest()
    anyone.threads, stop.signal = Mock(submit=lambda _: Future()), 15

    def write(asked: Any, more: Any) -> Any:
        yield Answer(asked[0].key, 0, [min(CALLS)], [-1.0], None, "stop")
        assert more(True) == []

    given = {0: Prompt([1], "", {}, "")}
    asked = [AnswerRequest(0, [1], (0,), 9)]
    assert [*Episodes(anyone, anyone, given, stop, 9).written(write, asked)] == []


@pytest.mark.parametrize(("most", "turns"), [(400, None), (400, 2), (1000, 1), (150, None)])
def test_episodes_are_those_that_trl_makes_of_the_same_turns(tools, tmp_path, most, turns):
    asked = [[{"role": "user", "content": f"Question {number}?"}] for number in range(24)]
    theirs = trained_by_trl(tmp_path, asked, most, turns)
    prompt_ids, ids, masks, completions, logprobs, *_ = theirs._generate([[*one] for one in asked])
    tokenizer = qwen_tokenizer()

    def write(requests: Any, more: Any) -> Any:
        while requests:
            for one in requests:
                found = next_turn(tokenizer, [*one.ids])
                cut: Any = "length" if len(found) > one.most else "stop"
                found = found[: one.most]
                yield Answer(one.key, 0, found, [-1.0] * len(found), None, cut)
            requests = more(True)

    with Judges((), tools=options(tools, "add", timeout_s=30.0), processes=2) as judges:
        box = Toolbox(Template(tokenizer), tokenizer, *judges.described())
        assert box.suits()
        texts = [box.template.render(Scene(tuple(one), tools=box.schemas), True) for one in asked]
        own = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
        assert own == prompt_ids
        given = {
            n: Prompt(ids, one, {}, "") for n, (ids, one) in enumerate(zip(own, asked, strict=True))
        }
        requests = [AnswerRequest(n, one.ids, (0,), most) for n, one in given.items()]
        about = box, judges, given, StopRequest(), most, turns
        found = by_key(Episodes(*about).written(write, requests))
    ours = [found[n, 0] for n in range(len(asked))]
    assert [one.turns for one in ours] == completions
    assert [one.ids for one in ours] == ids and [one.mask for one in ours] == masks
    known = [[0.0 if math.isnan(x) else x for x in one.logprobs] for one in ours]
    assert known == logprobs
    assert max(len(one.turns or ()) for one in ours) > 2
    told = theirs._metrics["train"]
    called = sum(one.calls for one in ours) / len(ours)
    assert told["tools/call_frequency"] == [pytest.approx(called)]
    lengths = lengths_of(ours)
    for name in lengths:
        assert told[name] == [pytest.approx(lengths[name])], name


def trained_by_trl(folder: Path, asked: list[Any], most: int, turns: int | None) -> Any:
    """A trainer whose model writes those turns."""
    import datasets
    import trl

    tokenizer, held = qwen_tokenizer(), dict[str, Any]()
    exec(TOOLS, held)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made: Any = trl.GRPOTrainer(
            model=plain_model(
                tiny_config("llama", vocab_size=len(tokenizer), max_position_embeddings=9999)
            ),
            args=trl.GRPOConfig(
                output_dir=str(folder),
                report_to="none",
                use_cpu=True,
                bf16=False,
                num_generations=2,
                per_device_train_batch_size=2,
                max_completion_length=most,
                max_tool_calling_iterations=turns,
            ),
            reward_funcs=[lambda completions, **_: [0.0] * len(completions)],
            train_dataset=datasets.Dataset.from_list([{"prompt": one} for one in asked]),
            processing_class=tokenizer,
            tools=[held["add"]],
        )

    def single(prompt_ids: list[list[int]], *_: Any, **__: Any) -> Any:
        found = [next_turn(tokenizer, ids)[:most] for ids in prompt_ids]
        return found, [[-1.0] * len(ids) for ids in found]

    made._generate_single_turn = single
    made._sync_tool_dicts = [{"add": held["add"]}] * len(asked)
    made._async_tool_dicts = [{}] * len(asked)
    made.model.train()
    return made
