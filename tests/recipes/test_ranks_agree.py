"""What one rank alone finds or fails at, all know: none waits for another for ever."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from megatrain.config import load_config
from megatrain.data import rows
from megatrain.engine.engine import Engine
from megatrain.errors import ConfigError
from megatrain.heartbeat import total
from megatrain.recipes import doctor, run
from megatrain.recipes.model import describe_model
from megatrain.recipes.ranks import rendezvous
from megatrain.recipes.state import Run
from megatrain.world import World
from tests.helpers.commands import chat_rows, write_jsonl
from tests.helpers.files import flip
from tests.helpers.ranks import Started, run_ranks
from tests.recipes.test_rank_runs import SOON_S, at_steps, looked_after_often, silent_soon, train

__all__ = ["looked_after_often", "silent_soon"]  # fixtures


@pytest.fixture(autouse=True)
def imported(finished_project: Path) -> None:
    """What a run imports and finds out once, before ranks are forked."""


def patch(owner: Any, name: str, value: Any) -> None:
    """In a rank's own process."""
    pytest.MonkeyPatch().setattr(owner, name, value)


@pytest.mark.slow
def test_prompts_are_answered_by_all_and_written_once(project):
    (project / "prompts.txt").write_text("Count to 3.\n")
    keys = ("eval.prompts=prompts.txt", "eval.max_new_tokens=3", "train.max_steps=2")
    started = Started(2, train(*keys, "memory.replicated=0", "memory.resident=0"))
    assert started.wait(SOON_S) == [0, 0], "".join(started.said())
    assert len(Path("run/samples.jsonl").read_text().splitlines()) == 2


@pytest.mark.slow
def test_the_first_may_take_long_to_end_once_all_have_agreed_to_stop(project, silent_soon):
    def first(rank: int) -> None:
        whole = run.finish_run

        def asked_at_2(run: Run) -> None:
            if run.step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

        def slow(*given: Any, **more: Any) -> Any:
            found = whole(*given, **more)
            time.sleep(5.0)  # as a tracker on a slow network
            return found

        if rank == 0:
            patch(run, "finish_run", slow)
        else:
            at_steps(asked_at_2)

    started = Started(2, train(), first=first)
    assert started.wait(SOON_S) == [75, 75], started.said()
    assert started.errors() == [[], []]
    assert "megatrain resume run" in started.said()[0]


def differently(rank: int, what: str) -> None:
    if what == "rows" and rank == 1:
        patch(rows.TokenRows, "digest", "another")
    if what == "precision":
        chosen = "float32" if rank else "bfloat16"
        patch(doctor, "choose_precision", lambda *_: chosen)
    if what == "compile" and rank == 1:
        compared = rendezvous.check_alike

        def check(world, how, rows=()):
            compared(world, {**how, "compile": True}, rows)

        patch(rendezvous, "check_alike", check)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "code", "words"),
    [
        ("rows", 3, "have different rows: the source, or the token cache (MEGATRAIN_CACHE)"),
        ("compile", 2, "would train with compile "),
    ],
)
def test_what_hosts_decide_differently_is_refused(project, what, code, words):
    started = Started(2, train(), first=lambda rank: differently(rank, what))
    assert started.wait(SOON_S) == [code, code], "".join(started.said())
    (said,), nothing = started.errors()
    assert words in said and nothing == []


KEYS = {
    "train.learning_rate": 1e-4,
    "train.max_steps": 9,
    "train.seed": 3,
    "train.max_grad_norm": 0.01,
    "train.tokens_per_step": 128,
    "train.seq_len": 32,
    "train.schedule": "constant",
    "optimizer.weight_decay": 0.5,
    "optimizer.name": "lion",
    "checkpoint.every": 3,
    "data.train_on": "all",
    "method": "pretrain",
    "precision": "float32",
}


def test_each_difference_is_named(project, monkeypatch):
    """Of keys, versions, and parts of the model, on both ranks alike."""
    config = load_config("cfg.yaml")

    def refused(mine: Mapping[str, object], theirs: Mapping[str, object]) -> str:
        gathered = [("a", mine, ()), ("b", theirs, ())]
        monkeypatch.setattr(World, "all_gather", lambda *_: gathered)
        with pytest.raises(ConfigError) as caught:
            rendezvous.check_alike(World(1, 2), theirs)
        return str(caught.value)

    ours = rendezvous.told_of(config)
    for key, value in KEYS.items():
        more = {"data.train_on": "all"} if key == "method" else {}
        other = rendezvous.told_of(load_config("cfg.yaml", {key: value, **more}))
        assert f"would train with {key} " in refused(ours, other)
    for version in ("torch", "transformers", "megatrain", "Python"):
        assert f"{version} 9.9" in refused({**ours, version: "9.9"}, ours)
    elsewhere = {"output": "other", "data.train": "others.jsonl", "model": "there", "threads": 2}
    assert rendezvous.told_of(load_config("cfg.yaml", elsewhere)) == ours
    parts = []
    for change in ("nothing", "weights", "config.json", "tokenizer.json"):
        folder = Path(shutil.copytree("model", change))
        if change == "weights":
            (file,) = folder.glob("*.safetensors")
            flip(file, -1)
        elif change != "nothing":
            (folder / change).write_text((folder / change).read_text() + " ")
        parts.append(describe_model(str(folder)).digests)
    first, *changed = parts
    assert first == describe_model("model").digests
    for one, what in zip(changed, ("weights", "configuration", "tokenizer"), strict=True):
        assert f"would train with {what} " in refused(first, one)


@pytest.mark.slow
def test_ranks_of_different_models_or_keys_are_refused_on_both(project):
    shutil.copytree("model", "other")
    (file,) = Path("other").glob("*.safetensors")
    flip(file, -1)
    for key, word in {"model=other": "weights", "train.max_steps=7": "train.max_steps"}.items():
        started = Started(2, [train(), train(key)])
        assert started.wait(SOON_S) == [2, 2], "".join(started.said())
        assert f"would train with {word} " in "".join(started.said())


@pytest.mark.slow
def test_the_precision_is_one_that_all_have(project):
    line = "train cfg.yaml device=cpu train.rows_per_step=6 train.max_steps=2"
    started = Started(2, line, first=lambda rank: differently(rank, "precision"))
    assert started.wait(SOON_S) == [0, 0], "".join(started.said())
    assert "float32 on cpu" in Path("run/train.log").read_text()


def test_hosts_wait_for_each_other_before_their_other_ranks_work():
    """With signs of life; the first rank of the second host takes long."""
    store, order = distributed.HashStore(), list[int]()  # type: ignore[attr-defined]
    worlds = [World(rank, 4, rank % 2, 2, store=store) for rank in range(4)]

    def work(rank: int) -> int:
        time.sleep(0.5 if rank == 2 else 0.0)
        order.append(rank)
        return rank

    before = total()
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda world: world.local_rank0_first(partial(work, world.rank)), worlds)
        assert [*found] == [0, 1, 2, 3]
    assert order[:2] == [0, 2]
    assert total() - before > 4


def test_shares_are_put_together_in_the_order_of_what_ranks_own(tmp_path):
    """Those of two hosts with two ranks each take turns."""

    def job(world: World) -> list[int]:
        return list(world.whole(torch.tensor([world.place()]), 1).tolist())

    assert run_ranks(4, job, tmp_path, hosts=2) == 4 * [[0, 1, 2, 3]]


@pytest.mark.slow
def test_those_of_a_host_work_one_by_one_and_show_that_they_live(tmp_path):
    def job(world: World) -> tuple[list[float], int]:
        file = str(tmp_path / "store")
        store = distributed.FileStore(file, world.size)  # type: ignore[attr-defined]
        before, worked = total(), list[float]()

        def work() -> None:
            worked.append(time.monotonic())
            time.sleep(0.5)
            worked.append(time.monotonic())

        replace(world, store=store).one_by_one(work)
        return worked, total() - before

    ((_, ended), lived), ((began, _), lived_too) = run_ranks(2, job, tmp_path)
    assert began >= ended
    assert min(lived, lived_too) > 4


@pytest.mark.slow
def test_sums_chosen_for_as_many_ranks_are_kept_for_no_other_number(project):
    def first(rank: int) -> None:
        made = run.get_ready

        def get_ready(*given: Any) -> Any:
            Path(f"kept-{rank}").write_text(json.dumps(given[-1]))
            return made(*given)

        patch(run, "get_ready", get_ready)

    keys = "train.groups=2", "train.schedule=constant"
    assert Started(3, train("train.max_steps=2", *keys)).wait() == [0, 0, 0]
    for steps, kept in {3: [], 4: ["sums_on_device"]}.items():
        started = Started(2, f"resume run train.max_steps={steps}", first=first)
        assert started.wait() == [0, 0], started.said()
        assert [[*json.loads(Path(f"kept-{rank}").read_text())] for rank in range(2)] == [kept] * 2


@pytest.mark.slow
def test_an_evaluation_takes_no_more_tokens_at_once_than_a_step(project):
    write_jsonl(project / "rows.jsonl", chat_rows(200))

    def first(rank: int) -> None:
        made = Engine.evaluate

        def evaluate(engine: Engine, batches: Any, *given: Any) -> Any:
            with open(f"tokens-{rank}", "a") as file:
                print(sum(batch["input_ids"].numel() for batch in batches), file=file)
            return made(engine, batches, *given)

        patch(Engine, "evaluate", evaluate)

    keys = "train.rows_per_step=null", "train.tokens_per_step=512", "train.micro_batch_tokens=64"
    started = Started(2, train(*keys, "train.max_steps=2", "data.eval=60"), first=first)
    assert started.wait(SOON_S) == [0, 0], started.said()
    found = [int(line) for rank in range(2) for line in Path(f"tokens-{rank}").read_text().split()]
    assert len(found) > 2 and 128 < max(found) <= 256 + 64


@pytest.mark.slow
def test_all_return_the_summary_of_the_first(project):
    def first(rank: int) -> None:
        whole = run.finish_run

        def kept(*given: Any, **more: Any) -> Any:
            found = whole(*given, **more)
            Path(f"summary-{rank}").write_text(json.dumps(found.to_dict()))
            return found

        patch(run, "finish_run", kept)

    started = Started(2, train("train.max_steps=3"), first=first)
    assert started.wait(SOON_S) == [0, 0], started.said()
    one, other = (json.loads(Path(f"summary-{rank}").read_text()) for rank in range(2))
    assert one == other
    assert (one["steps"], one["final_dir"]) == (3, "run/final")
    assert one["eval_loss_after"] < one["eval_loss_before"]
