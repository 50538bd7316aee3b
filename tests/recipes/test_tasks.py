"""Tasks of lm-evaluation-harness: the same figures as its own `hf` backend, on any model and in the
middle of a run, which goes on as if nothing had been."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import megatrain as mt
from megatrain.recipes import tasks as recipe
from megatrain.recipes.judging import greater_is_better
from megatrain.recipes.tasks import TaskOptions, load_tasks, run_tasks
from tests.commands import metrics_of, steps_of
from tests.compare import differing
from tests.tasks import TASKS, write_tasks

pytest.importorskip("lm_eval")

ALL = ",".join(TASKS)
ASK = ("eval.include_path=tasks", "eval.tasks=[counting, letters]")


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

    found = load_tasks(options, "test")
    results: Any = simple_evaluate(
        model=HFLM(pretrained=folder, dtype="float32", device="cpu", batch_size=3),
        tasks=list(found.loaded),
        task_manager=found.manager,
        limit=options.limit,
        num_fewshot=options.num_fewshot,
        apply_chat_template=options.apply_chat_template,
        fewshot_as_multiturn=options.apply_chat_template,
    )
    return results["results"]  # type: ignore[no-any-return]


HOW: dict[str, dict[str, Any]] = {
    "plain": {},
    "shots": {"num_fewshot": 2, "limit": 4},
    "chat": {"apply_chat_template": True},
}


@pytest.mark.filterwarnings("ignore")  # of lm-eval's own
@pytest.mark.parametrize("how", HOW)
def test_figures_are_those_of_the_hf_backend(how, megatrain, monkeypatch):
    from lm_eval.models.huggingface import HFLM

    from megatrain.recipes.harness import EngineLM

    options = TaskOptions(tuple(TASKS), include_path=Path("tasks"), **HOW[how])
    ours, theirs = Requests(monkeypatch, EngineLM), Requests(monkeypatch, HFLM)
    given = [f"--{name.replace('_', '-')} {value}" for name, value in HOW[how].items()]
    line = f"--tasks {ALL} --include-path tasks {' '.join(given).replace(' True', '')}"
    found = megatrain(f"eval model {line} --json").json["results"]
    expected = of_hf_backend(options)
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


@pytest.mark.filterwarnings("ignore")
def test_answers_are_the_same_where_weights_have_no_room(megatrain, monkeypatch):
    ask = "eval model --tasks answers --include-path tasks --json"
    from megatrain.recipes.harness import EngineLM

    said = Requests(monkeypatch, EngineLM).answers
    expected = megatrain(ask).json
    monkeypatch.setattr("megatrain.engine.reading.has_room", lambda *given: False)
    assert megatrain(ask).json == expected
    texts = said["generate_until"]
    assert texts[:6] == texts[6:] and any(texts) and not any("5" in text for text in texts)


def test_the_command_prints_a_table(megatrain):
    done = megatrain("eval model --tasks counting,letters --include-path tasks --limit 3")
    head, *rows = [line.split() for line in done.out.splitlines()[1:]]
    assert head == ["task", "n-shot", "documents", "filter", "metric", "value", "stderr"]
    assert [row[:5] for row in rows] == [
        [task, "0", "3", "none", metric]
        for task, metric in (("counting", "acc"), ("counting", "acc_norm"), ("letters", "acc"))
    ]
    assert "Tokenizing" not in done.err, "no bar, where it is no terminal"


def test_python_has_them_too(megatrain, project):
    found = mt.evaluate("model", tasks="letters", include_path="tasks", limit=4)
    assert found["checkpoint"] == "model" and found["results"]["letters"]["n-samples"] == 4
    assert (
        megatrain("eval model --tasks letters --include-path tasks --limit 4 --json").json == found
    )


@pytest.mark.parametrize(
    ("group", "names"),
    [("both", {"both"}), ("pair", {"counting", "letters"}), ("letters", {"letters"})],
)
def test_a_group_has_its_own_figure_or_those_of_its_tasks(group, names):
    found = load_tasks(TaskOptions((group,), include_path=Path("tasks")), "test")
    assert found.asked == names
    assert {f"eval_{name}_acc" for name in names} <= found.higher_is_better().keys()


@pytest.mark.parametrize(
    ("metric", "given", "greater"),
    [
        ("eval_loss", "auto", False),
        ("eval_loss", True, True),
        ("eval_rewards/accuracies", "auto", True),
        ("eval_text_word_perplexity", "auto", False),
        ("eval_text_word_perplexity_strict", "auto", False),
        ("eval_text_accuracy", "auto", True),
    ],
)
def test_which_way_is_better(metric, given, greater):
    keys = {"metric": metric, "greater_is_better": given}
    config = mt.load_config({"model": "m", "data": {"train": "d"}, "checkpoint": keys})
    of_tasks = {"eval_text_word_perplexity": False, "eval_text_acc": False}
    assert greater_is_better(config, of_tasks) == greater


def test_tasks_at_the_end_of_a_run(megatrain, project):
    done = megatrain("train cfg.yaml train.max_steps=4 precision=float32 --json", *ASK)
    *others, last = metrics_of(project / "run")
    assert last["step"] == 4 and set(last) - {"step", "eval_s"} == {
        "eval_counting_acc", "eval_counting_acc_norm", "eval_letters_acc",
    }  # fmt: skip
    assert not [row for row in others if "eval_letters_acc" in row]
    assert done.json["figures"]["eval_letters_acc"] == last["eval_letters_acc"]
    again = megatrain("eval run --tasks counting --include-path tasks --json").json["results"]
    assert again["counting"]["acc,none"] == last["eval_counting_acc"]


def test_tasks_and_prompts_at_every_evaluation_change_no_bit(megatrain, project):
    few = "train.eval_every=2 train.max_steps=4"
    plain = megatrain(f"train cfg.yaml output=plain {few}")
    (project / "prompts.txt").write_text("Count to 3.\n\nCount to 4.\n")
    each = ("eval.tasks_at=evaluations", "eval.prompts=prompts.txt", "eval.max_new_tokens=4")
    asked = megatrain(f"train cfg.yaml {few}", *ASK, *each)
    assert "letters acc" in asked.err and "letters" not in plain.err
    weights = [load_file(project / run / "final" / "model.safetensors") for run in ("plain", "run")]
    assert differing(*weights) == []
    losses = [[row["loss"] for row in steps_of(project / run)] for run in ("plain", "run")]
    assert losses[0] == losses[1]
    found = [row for row in metrics_of(project / "run") if "eval_loss" in row]
    assert [row["step"] for row in found if "eval_letters_acc" in row] == [0, 2, 4]


def test_the_best_may_be_that_of_a_task(megatrain, project, monkeypatch):
    """Figures 3, 5, 4, 4 of steps 0 to 3: patience counts them, and more is better."""
    scores = iter([3.0, 5.0, 4.0, 4.0])

    def scripted(*given: Any, **named: Any) -> recipe.TaskResults:
        values = {("letters", "acc", "none"): next(scores)}
        return recipe.TaskResults(values, {}, {}, {}, {}, frozenset({"letters"}))

    monkeypatch.setattr("megatrain.recipes.examination.run_tasks", scripted)
    by_task = ("checkpoint.metric=eval_letters_acc", "checkpoint.patience=2", "train.eval_every=1")
    each = ("eval.tasks_at=evaluations", "checkpoint.keep=1", "checkpoint.every=null")
    done = megatrain("train cfg.yaml --json", *ASK, *by_task, *each)
    assert (done.json["best_step"], done.json["best_metric"]) == (1, "eval_letters_acc")
    assert done.json["best_value"] == 5.0 and done.json["steps"] == 3
    assert (project / "run" / "best").readlink() == Path("checkpoint-1")


def test_a_task_that_fails_later_does_not_end_a_run(megatrain, project, monkeypatch):
    def fails(tasks: Any, engine: Any, *given: Any, **named: Any) -> Any:
        if engine.updates:
            raise mt.errors.DataError("letters: gone")
        return run_tasks(tasks, engine, *given, **named)

    monkeypatch.setattr("megatrain.recipes.examination.run_tasks", fails)
    done = megatrain("train cfg.yaml train.max_steps=2", *ASK, "eval.tasks_at=evaluations")
    assert "step 2: letters: gone; training goes on without these figures" in done.err
    assert "eval_letters_acc" not in metrics_of(project / "run")[-1]


OF_RUN = "train cfg.yaml eval.include_path=tasks eval.tasks"
REFUSED = {
    "eval model --tasks lettres --include-path tasks": (
        "--tasks: lettres: lm-eval has no such task; did you mean letters?"
    ),
    "eval model --tasks letters --include-path none": "--tasks: none: no such folder of tasks",
    "eval model --tasks letters --data rows.jsonl": "--data: excludes --tasks",
    "eval model --tasks ,": "--tasks: names no task",
    "eval model --limit 3": "--limit: has no effect without --tasks",
    "eval model --tasks letters --include-path tasks --limit 0": "--tasks: limit must be above 0",
    f"{OF_RUN}=[lettres]": "eval.tasks: lettres: lm-eval has no such task; did you mean letters?",
    f"{OF_RUN}=[letters] eval.tasks_at=evaluations checkpoint.metric=eval_letters_f1": (
        "checkpoint.metric: evaluations of this run have no eval_letters_f1; they have eval_loss, "
        "eval_letters_acc"
    ),
    f"{OF_RUN}=[letters] checkpoint.metric=eval_letters_acc": (
        "checkpoint.metric: its task is run at the end alone; set eval.tasks_at: evaluations"
    ),
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
