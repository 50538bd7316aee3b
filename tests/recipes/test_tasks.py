"""Tasks of lm-evaluation-harness: the same figures as its own `hf` backend."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import megatrain as mt
from megatrain.recipes.tasks import TaskOptions, load_tasks
from tests.helpers.commands import OF_PARTS
from tests.helpers.tasks import TASKS, write_tasks

pytest.importorskip("lm_eval")

ALL = ",".join(TASKS)


@pytest.fixture(autouse=True)
def tasks(project: Path) -> Path:
    return write_tasks(project / "tasks")


class Requests:
    """What a class of lm-eval's models answered, by kind of request."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: type) -> None:
        self.answers: dict[str, list[Any]] = {}
        for name in ("loglikelihood", "loglikelihood_rolling", "generate_until"):
            monkeypatch.setattr(kind, name, self.noting(name, getattr(kind, name)))

    def noting(self, name: str, original: Any) -> Any:
        def answer(*given: Any, **named: Any) -> list[Any]:
            found = original(*given, **named)
            self.answers.setdefault(name, []).extend(found)
            return list(found)

        return answer


def of_hf_backend(options: TaskOptions, folder: str = "model") -> dict[str, dict[str, Any]]:
    """lm-eval's own results with its own model class, batches of 3."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    model = HFLM(pretrained=folder, dtype="float32", device="cpu", batch_size=3)
    results: Any = simple_evaluate(model=model, **load_tasks(options, "test"))
    return results["results"]  # type: ignore[no-any-return]


HOW: dict[str, dict[str, Any]] = {
    "plain": {},
    "shots": {"num_fewshot": 2, "limit": 4},
    "chat": {"num_fewshot": 1, "apply_chat_template": True},
    "penalty": {},  # of repetitions, in the model's own settings
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of lm-eval's own
@pytest.mark.parametrize("how", HOW)
def test_figures_are_those_of_the_hf_backend(how, megatrain, monkeypatch):
    from lm_eval.models.huggingface import HFLM

    from megatrain.recipes.harness import EngineLM

    folder = "model"
    if how == "penalty":
        folder = "own"
        shutil.copytree("model", folder)
        settings = Path(folder, "generation_config.json")
        known = json.loads(settings.read_text()) if settings.exists() else {}
        settings.unlink(missing_ok=True)
        settings.write_text(json.dumps({**known, "repetition_penalty": 9.0}))
    options = TaskOptions(tuple(TASKS), include_path=Path("tasks"), **HOW[how])
    ours = Requests(monkeypatch, EngineLM)
    given = [f"--{name.replace('_', '-')} {value}" for name, value in HOW[how].items()]
    line = f"--tasks {ALL} --include-path tasks {' '.join(given).replace(' True', '')}"
    found = megatrain(f"eval {folder} {line} --json").json["results"]
    theirs = Requests(monkeypatch, HFLM)  # of which ours is one
    expected = of_hf_backend(options, folder)
    for kind, answers in ours.answers.items():
        for mine, own in zip(answers, theirs.answers[kind], strict=True):
            if kind == "generate_until":
                assert mine == own
            else:
                values = [one if isinstance(one, tuple) else (one, None) for one in (mine, own)]
                assert values[0][0] == pytest.approx(values[1][0], abs=1e-4, rel=2e-6)
                assert values[0][1] == values[1][1]
    assert {kind: len(answers) for kind, answers in ours.answers.items()} == {
        kind: len(answers) for kind, answers in theirs.answers.items()
    }
    for task, row in expected.items():
        for name, value in row.items():
            if "," in name and value != "N/A":
                assert found[task][name] == pytest.approx(float(value), rel=1e-5), (task, name)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_answers_are_the_same_where_weights_have_no_room(megatrain, monkeypatch):
    ask = "eval model --tasks answers --include-path tasks --json"
    from megatrain.recipes.harness import EngineLM

    said = Requests(monkeypatch, EngineLM).answers
    expected = megatrain(ask).json
    monkeypatch.setattr("megatrain.engine.inference.has_room", lambda *given: False)
    assert megatrain(ask).json == expected
    texts = said["generate_until"]
    assert texts[:6] == texts[6:] and any(texts) and not any("5" in text for text in texts)


def test_the_command_prints_a_table(megatrain):
    done = megatrain("eval model --tasks counting,letters --include-path tasks --limit 3")
    assert done.out.startswith("checkpoint: model\nprecision: float32\n")
    head, *rows = [line.split() for line in done.out.splitlines()[2:]]
    assert head == ["task", "n-shot", "documents", "metric", "value", "stderr"]
    assert [row[:4] for row in rows] == [
        [task, "0", "3", metric]
        for task, metric in (("counting", "acc"), ("counting", "acc_norm"), ("letters", "acc"))
    ]
    assert "Tokenizing" not in done.err, "no bar, where it is no terminal"


def test_a_template_that_takes_parts_only_gets_them_here_too(megatrain, monkeypatch):
    from megatrain.recipes.harness import EngineLM

    shutil.copytree("model", "of-parts")
    Path("of-parts/chat_template.jinja").write_text(OF_PARTS)
    said, found = Requests(monkeypatch, EngineLM).answers, []
    for model in ("model", "of-parts"):
        asked = f"eval {model} --tasks letters --include-path tasks --limit 3"
        megatrain(asked, "--apply-chat-template")
        found.append(
            (said.pop("loglikelihood"), megatrain(f"generate {model} hi --max-new-tokens 4").out)
        )
    assert found[0] == found[1]


def test_python_has_them_too(megatrain, project):
    found = mt.evaluate("model", tasks="letters", include_path="tasks", limit=4)
    assert found["checkpoint"] == "model" and found["results"]["letters"]["n-samples"] == 4
    assert (
        megatrain("eval model --tasks letters --include-path tasks --limit 4 --json").json == found
    )


def test_a_group_has_figures_of_its_own(megatrain):
    found = megatrain("eval model --tasks both --include-path tasks --limit 2 --json").json
    assert found["results"].keys() == {"both", "counting", "letters"}


REFUSED = {
    "eval model --tasks lettres --include-path tasks": (
        "--tasks: lettres: lm-eval has no such task; did you mean letters?"
    ),
    "eval model --tasks letters --include-path none": "--tasks: none: no such folder of tasks",
    "eval model --tasks letters --data rows.jsonl": "--data: excludes --tasks",
    "eval model --tasks ,": "--tasks: names no task",
    "eval model --limit 3": "--limit: has no effect without --tasks",
    "eval model --tasks letters --include-path tasks --limit 0": "--tasks: limit must be above 0",
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_cannot_be_is_refused(megatrain, line, monkeypatch):
    from lm_eval import tasks

    def of_the_folder_alone(**given: Any) -> Any:
        return manager(**given | {"include_defaults": False})

    manager = tasks.TaskManager  # to find all of lm-eval's takes seconds
    monkeypatch.setattr(tasks, "TaskManager", of_the_folder_alone)
    done = megatrain(line, code=2)
    assert REFUSED[line] in done.err.splitlines()[-1], done.err


def test_a_broken_task_is_rejected_data(megatrain, project):
    (project / "tasks" / "counts.jsonl").unlink()
    done = megatrain("eval model --tasks letters --include-path tasks", code=3)
    assert done.err.splitlines()[-1].startswith("error: --tasks: letters: ")
