"""`eval run` evaluates the rows that the run held out, whatever has become of their source."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megatrain import cli
from tests.helpers.commands import (
    chat_rows,
    conversation,
    evaluations_of,
    make_project,
    write_jsonl,
)
from tests.helpers.once import runs_are_quick

HELD = [conversation(f"Count to {end}.", f"{end} (held)") for end in range(1, 5)]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Path:
    """The project of a short run with a cache of its own, and beside it the same untouched."""
    project = make_project(tmp_path_factory.mktemp("own") / "project", model_dir)
    with runs_are_quick(), pytest.MonkeyPatch.context() as patch:
        patch.chdir(project)
        patch.setenv("MEGATRAIN_CACHE", str(project / "cache"))
        assert cli.main(["train", "cfg.yaml", "train.max_steps=2"]) == 0
    shutil.copytree(project, project.parent / "untouched", symlinks=True)
    return project


@pytest.fixture
def own(kept: Path, project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of that run, always at the same place, as the run left it."""
    shutil.rmtree(kept)
    shutil.copytree(kept.parent / "untouched", kept, symlinks=True)
    monkeypatch.chdir(kept)
    monkeypatch.setenv("MEGATRAIN_CACHE", str(kept / "cache"))
    return kept / "run"


def edit(run_dir: Path, before: str, after: str) -> None:
    text = (run_dir / "config.yaml").read_text()
    assert text.count(before) == 1
    (run_dir / "config.yaml").write_text(text.replace(before, after))


def loss_of(run_dir: Path) -> float:
    return float(evaluations_of(run_dir)[-1]["eval_loss"])


@pytest.mark.parametrize("named", ["run", "run/checkpoint-2", "run/final"])
def test_rows_that_were_added_since_are_not_taken(megatrain, own, named):
    write_jsonl(Path("rows.jsonl"), chat_rows(75))
    done = megatrain(f"eval {named} --json")
    assert done.json["eval_loss"] == pytest.approx(loss_of(own), rel=1e-5)


def test_without_the_cache_others_are_refused(megatrain, own):
    write_jsonl(Path("rows.jsonl"), chat_rows(75))
    shutil.rmtree("cache")
    done = megatrain("eval run", code=3)
    assert "the training rows are not those of the checkpoint" in done.err
    assert "or name rows to evaluate on with --data" in done.err
    megatrain("eval run --data rows.jsonl")


def test_another_share_in_the_runs_config_is_said_and_not_taken(megatrain, own):
    edit(own, "eval: 8", "eval: 20")
    done = megatrain("eval run --json")
    assert done.json["eval_loss"] == pytest.approx(loss_of(own), rel=1e-5)
    assert "run/config.yaml: data.eval was changed from 8 to 20; rows are evaluated as" in done.err


def test_so_is_a_source_of_their_own(megatrain, project, monkeypatch):
    monkeypatch.setenv("MEGATRAIN_CACHE", str(project / "cache"))
    write_jsonl(project / "held.jsonl", HELD)
    megatrain("train cfg.yaml train.max_steps=2 data.eval=held.jsonl")
    write_jsonl(project / "held.jsonl", [conversation("2 + 2?", "4"), *HELD])
    write_jsonl(project / "rows.jsonl", chat_rows(61))
    done = megatrain("eval run --json")
    assert done.json["eval_loss"] == pytest.approx(loss_of(project / "run"), rel=1e-5)
    shutil.rmtree("cache")
    done = megatrain("eval run --json")
    assert "warning: they are not those that the run began with" in done.err


def test_a_final_alone_does_not_know_its_rows_and_says_so(megatrain, own):
    shutil.rmtree(own / "checkpoint-2")
    done = megatrain("eval run --json")
    assert "run/final: no checkpoint is left that says which rows were held out" in done.err
    assert done.json["eval_loss"] == pytest.approx(loss_of(own), rel=1e-5)


def test_columns_and_methods_come_along(megatrain, project):
    turns = [row["messages"] for row in chat_rows()]
    write_jsonl(
        project / "pairs.jsonl",
        [{"question": q["content"], "answer": a["content"]} for q, a in turns],
    )
    columns = "data.columns={prompt: question, completion: answer}"
    megatrain("train cfg.yaml train.max_steps=1 data.train=pairs.jsonl", columns)
    done = megatrain("eval run --json")
    assert done.json["eval_loss"] == pytest.approx(loss_of(project / "run"), rel=1e-5)


def test_an_untouched_run_says_nothing(megatrain, own):
    assert "warning" not in megatrain("eval run --json").err
