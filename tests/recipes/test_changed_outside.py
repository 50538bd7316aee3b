"""What is changed behind a run's back, between its two halves: each change is without effect, taken
and said, or refused, and always named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.constants import HF_HUB_CACHE

from megatrain import cli
from megatrain.storage.checkpoint import read_about
from tests.helpers.commands import chat_rows, conversation, make_project, steps_of, write_jsonl
from tests.helpers.files import flip
from tests.helpers.once import runs_are_quick
from tests.recipes.same_run import same_run

Change = Callable[[Path], object]
HELD = [conversation(f"Count to {end}.", f"{end} (held)") for end in range(1, 5)]


@pytest.fixture(scope="module")
def halves(
    tmp_path_factory: pytest.TempPathFactory, model_dir: Path, token_cache: Path
) -> tuple[Path, Path]:
    """(a project with a model and held-out rows of its own whose run was killed after step 7, the
    same but whole)."""
    folder = tmp_path_factory.mktemp("changed")
    project = make_project(folder / "project", model_dir)
    (project / "model").unlink()
    shutil.copytree(model_dir, project / "model")
    write_jsonl(project / "held.jsonl", HELD)
    with runs_are_quick(), pytest.MonkeyPatch.context() as patch:
        patch.chdir(project)
        patch.setenv("MEGATRAIN_CACHE", str(token_cache))
        assert cli.main(["train", "cfg.yaml", "data.eval=held.jsonl"]) == 0
    shutil.copytree(project, folder / "whole", symlinks=True)
    for name in ("final", "checkpoint-10"):
        shutil.rmtree(project / "run" / name)
    shutil.copytree(project, folder / "untouched", symlinks=True)
    return project, folder / "whole" / "run"


@pytest.fixture
def stopped(halves: tuple[Path, Path], project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stopped run's project, always at the same place, as the run left it."""
    folder, _ = halves
    shutil.rmtree(folder)
    shutil.copytree(folder.parent / "untouched", folder, symlinks=True)
    monkeypatch.chdir(folder)
    return folder


def edit(file: str, before: str, after: str) -> Change:
    """Replace text that the file has once."""

    def apply(project: Path) -> None:
        text = (project / file).read_text()
        assert text.count(before) == 1, f"{file}: {before}"
        (project / file).write_text(text.replace(before, after))

    return apply


def set_in(file: str, **values: object) -> Change:
    def apply(project: Path) -> None:
        known = json.loads((project / file).read_text())
        (project / file).write_text(json.dumps(known | values))

    return apply


def asked(before: str, after: str) -> Change:
    return edit("run/config.yaml", before, after)


def remove(name: str) -> Change:
    def apply(project: Path) -> None:
        path = project / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return apply


HAS_CHANGED = "has changed since this run began; the checkpoint's is used"
FROM_CACHE = "the data has changed, is read otherwise or is gone since the run began; its rows come"
# what changes nothing but the words: the run goes on bit for bit
NO_EFFECT: dict[str, tuple[list[Change], list[str]]] = {
    "the model's files": (
        [
            set_in(
                "model/config.json",
                num_attention_heads=8,
                rope_parameters={"rope_type": "default", "rope_theta": 100.0},
            ),
            set_in("model/tokenizer.json", pre_tokenizer=None),
            edit(
                "model/chat_template.jinja", "{% for m in messages %}", "{% for m in messages %}x"
            ),
            set_in("model/generation_config.json", temperature=0.1),
        ],
        [
            f"model: its configuration {HAS_CHANGED}",
            f"model: its tokenizer {HAS_CHANGED}",
            f"model: its chat template {HAS_CHANGED}",
            f"model: its generation settings {HAS_CHANGED.replace('has', 'have', 1)}",
        ],
    ),
    "a broken config.json": (
        [edit("model/config.json", '"model_type":', "")],
        [f"configuration {HAS_CHANGED}"],
    ),
    "no config.json": ([remove("model/config.json")], ["model: has no config.json"]),
    "the run's files": (
        [
            set_in("run/env.json", packages={"torch": "1.0"}),
            edit("run/config.resolved.yaml", "seed: 0", "seed: 1"),
            lambda project: write_jsonl(project / "rows.jsonl", chat_rows(61)),
            asked("method: sft", "# a comment\nmethod: sft"),
        ],
        [
            "other versions than the run has used may round otherwise: ",
            "resuming from run/checkpoint-5",
            FROM_CACHE,
        ],
    ),
    "files that are gone": (
        [remove("run/env.json"), remove("run/config.resolved.yaml"), remove("rows.jsonl")],
        [
            "env.json: cannot be read, so other versions of libr",
            "resuming from run/checkpoint-5",
            FROM_CACHE,
        ],
    ),
}
# what is taken: the warnings, and the last step then
TAKEN: dict[str, tuple[list[Change], list[str], int]] = {
    "what the steps are": (
        [
            asked("learning_rate: 0.01", "learning_rate: 0.5"),
            asked("tokens_per_step: 256", "tokens_per_step: 512"),
            asked("weight_decay: 0.0", "weight_decay: 0.5"),
        ],
        [
            "train.learning_rate changed from 0.01 to 0.5: the schedule jumps to the new rate",
            "train.tokens_per_step changed from 256 to 512: steps differ in size",
            "optimizer.weight_decay changed from 0.0 to 0.5: the update differs",
        ],
        10,
    ),
    "length and a choice of the planner": (
        [
            asked("max_steps: 10", "max_steps: 7"),
            asked("micro_batch_tokens: auto", "micro_batch_tokens: 64"),
        ],
        [
            "train.max_steps changed from 10 to 7: the schedule is stretched",
            "train.micro_batch_tokens changed from 256 to 64",
        ],
        7,
    ),
}
# what is refused
REFUSED: dict[str, tuple[Change, int, str]] = {
    "seed": (asked("seed: 0", "seed: 1"), 2, "train.seed: cannot change from 0 to 1 in a resumed"),
    "method": (asked("method: sft", "method: pretrain"), 2, "data.train_on: method: pretrain"),
    "broken YAML": (asked("method: sft", "method: [sft"), 2, "run/config.yaml:"),
    "no config": (remove("run/config.yaml"), 2, "run: is not a run folder (no config.yaml)"),
    "state": (
        lambda project: flip(project / "run" / "checkpoint-5" / "state.json"),
        7,
        "run/checkpoint-5/state.json: does not match its checksum",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", NO_EFFECT)
def test_without_effect_and_said(megatrain, halves, stopped, what):
    changes, sentences = NO_EFFECT[what]
    for change in changes:
        change(stopped)
    said = megatrain("resume run").err
    assert [words for words in sentences if words not in said] == []
    same_run(stopped / "run", halves[1])


@pytest.mark.slow
@pytest.mark.parametrize("what", TAKEN)
def test_taken_and_said(megatrain, stopped, what):
    changes, sentences, last = TAKEN[what]
    for change in changes:
        change(stopped)
    said = megatrain("resume run").err
    assert [words for words in sentences if f"warning: {words}" not in said] == []
    assert steps_of(stopped / "run")[-1]["step"] == last


@pytest.mark.parametrize("what", REFUSED)
def test_refused(megatrain, stopped, what):
    change, code, words = REFUSED[what]
    change(stopped)
    assert words in megatrain("resume run", code=code).err


@pytest.mark.parametrize(
    ("rows", "words"), [(61, "rows are not those of the"), (0, "no such file")]
)
def test_without_the_cache_other_rows_are_refused(megatrain, stopped, monkeypatch, rows, words):
    monkeypatch.setenv("MEGATRAIN_CACHE", str(stopped / "cache"))
    file = stopped / "rows.jsonl"
    write_jsonl(file, chat_rows(rows)) if rows else file.unlink()
    assert words in megatrain("resume run", code=3).err


OTHERS = [conversation(f"Count to {end}.", f"{end} (others)") for end in range(1, 5)]


CHANGES: dict[str, Callable[[Path], object]] = {
    "gone": Path.unlink,
    "others": lambda file: write_jsonl(file, OTHERS),
}


@pytest.mark.parametrize("change", CHANGES)
def test_held_out_rows_come_from_the_cache_as_training_rows_do(megatrain, halves, stopped, change):
    CHANGES[change](stopped / "held.jsonl")
    done = megatrain("resume run")
    assert f"held-out rows: {FROM_CACHE}" in done.err
    same_run(stopped / "run", halves[1])


def test_without_the_cache_held_out_rows_may_be_others_and_that_is_said(
    megatrain, stopped, monkeypatch
):
    monkeypatch.setenv("MEGATRAIN_CACHE", str(stopped / "cache"))
    write_jsonl(stopped / "held.jsonl", OTHERS)
    done = megatrain("resume run")
    assert "warning: held-out rows: they are not those that the run began with" in done.err


def test_without_the_cache_held_out_rows_that_are_gone_are_refused_with_the_way_on(
    megatrain, stopped, monkeypatch
):
    monkeypatch.setenv("MEGATRAIN_CACHE", str(stopped / "cache"))
    (stopped / "held.jsonl").unlink()
    done = megatrain("resume run", code=3)
    assert "held.jsonl: no such file" in done.err
    assert "to go on without them, or with others, set data.eval" in done.err
    write_jsonl(stopped / "others.jsonl", OTHERS)
    done = megatrain("resume run data.eval=others.jsonl")
    assert "are not those" not in done.err, "these were asked for"


def test_a_checkpoint_that_does_not_name_its_held_out_rows(megatrain, stopped, monkeypatch):
    def without_rows(checkpoint: Path) -> dict[str, Any]:
        about = read_about(checkpoint)
        about["state"].pop("held_out")
        return about

    monkeypatch.setattr("megatrain.recipes.run.read_about", without_rows)
    megatrain("resume run")


@pytest.mark.parametrize("place", ["/", "with the same names"])
def test_a_resume_may_be_started_elsewhere(megatrain, halves, stopped, monkeypatch, place):
    here = stopped.parent / "elsewhere" if place != "/" else Path("/")
    if place != "/":
        shutil.rmtree(here, ignore_errors=True)
        (here / "model").mkdir(parents=True)
        (here / "rows.jsonl").write_text("{}")
    monkeypatch.chdir(here)
    megatrain("resume", str(stopped / "run"))
    same_run(stopped / "run", halves[1])


def in_hub_cache(name: str, commit: str, folder: Path) -> Path:
    """Put a model into the hub's cache as its newest commit; returns its config.json."""
    repo = Path(HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    shutil.copytree(folder, repo / "snapshots" / commit)
    (repo / "refs").mkdir(exist_ok=True)
    (repo / "refs" / "main").write_text(commit)
    return repo / "snapshots" / commit / "config.json"


@pytest.fixture
def cached() -> Iterator[str]:
    """The name of a model on the hub whose cache is removed after the test."""
    yield "cached/model"
    shutil.rmtree(Path(HF_HUB_CACHE) / "models--cached--model")


@pytest.mark.slow
def test_a_new_commit_on_the_hub_is_said_and_not_taken(
    megatrain, finished_project, project, cached
):
    in_hub_cache(cached, "a" * 40, project / "model")
    megatrain(f"train cfg.yaml model={cached}")
    for name in ("final", "checkpoint-10"):
        shutil.rmtree(project / "run" / name)
    config = in_hub_cache(cached, "b" * 40, project / "model")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rms_norm_eps": 0.1}))
    done = megatrain("resume run")
    for what in ("commit", "configuration"):
        assert f"{cached}: its {what} {HAS_CHANGED}" in done.err
    same_run(project / "run", finished_project / "run")


NAMES = ["*.jsonl", "{path: rows.jsonl, weight: 1}", "rows:train"]
