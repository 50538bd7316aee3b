"""The command line: what it calls, what it prints where, and how it ends."""

import errno
import json
import logging
import sys
from itertools import product
from pathlib import Path
from types import ModuleType

import pytest

from megatrain import cli, errors
from megatrain.config import load_config

CONFIG = "model: some/folder\ndata: {train: rows.jsonl}\n"


class Summary:
    """What a finished run hands back."""

    def __init__(self, exit_code: int = 0) -> None:
        self.exit_code = exit_code

    def to_dict(self) -> dict[str, object]:
        return {"steps": 3, "exit_code": self.exit_code}

    def render(self, console) -> None:
        console.print("3 steps")


class Plan:
    """A plan that fits unless `problem` says otherwise."""

    def __init__(self, problem: str = "") -> None:
        self.problem = problem
        self.fits = not problem

    def to_dict(self) -> dict[str, object]:
        return {"host_bytes": 5}

    def render(self, console) -> None:
        console.print("5 bytes")

    def check(self) -> None:
        if self.problem:
            raise errors.PlanError(self.problem)


class Recorder(ModuleType):
    """Stands for megatrain.recipes.run, .plan and .inspect: notes each call, and returns or raises
    what `answers` holds."""

    def __init__(self) -> None:
        super().__init__("megatrain.recipes.run")
        self.calls: list[tuple[object, ...]] = []
        self.answers: dict[str, object] = {
            "train": Summary(),
            "resume": Summary(),
            "plan": Plan(),
            "evaluate": {"eval_loss": 1.25, "rows": 4},
            "generate": "Paris.",
            "show_data": {"rows": 9},
            "export": Path("out"),
        }

    def call(self, name: str, *arguments: object) -> object:
        self.calls.append((name, *arguments))
        answer = self.answers[name]
        if isinstance(answer, BaseException):
            raise answer
        return answer


@pytest.fixture
def recipes(monkeypatch, tmp_path):
    """A recorder in place of the recipes and of export, in a folder with a config and a run."""
    recorder = Recorder()
    export = ModuleType("megatrain.storage.export")
    for name in recorder.answers:
        target = export if name == "export" else recorder
        setattr(target, name, lambda *given, name=name, **_: recorder.call(name, *given))
    package = ModuleType("megatrain.recipes")
    package.__path__ = [str(Path(cli.__file__).parents[1] / "recipes")]  # others are real
    package.run = package.plan = package.inspect = recorder  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatrain.recipes", package)
    for name in ("run", "plan", "inspect"):
        monkeypatch.setitem(sys.modules, f"megatrain.recipes.{name}", recorder)
    monkeypatch.setitem(sys.modules, "megatrain.storage.export", export)
    monkeypatch.setattr("megatrain.planner.plan.render", lambda plan, out, full: plan.render(out))
    monkeypatch.chdir(tmp_path)
    Path("cfg.yaml").write_text(CONFIG)
    Path("rows.jsonl").touch()
    Path("run").mkdir()
    Path("some/folder").mkdir(parents=True)
    return recorder


def test_train_hands_the_config_over_and_prints_the_summary(recipes, capsys):
    assert cli.main(["train", "cfg.yaml", "train.seed=4"]) == 0
    assert capsys.readouterr() == ("3 steps\n", "")
    assert cli.main(["train", "cfg.yaml", "--profile", "trace.json.gz"]) == 0
    timeline = ("train", load_config("cfg.yaml"), Path("trace.json.gz"))
    assert recipes.calls == [("train", load_config("cfg.yaml", ["train.seed=4"]), None), timeline]


def test_a_run_ends_with_the_code_of_its_summary(recipes, capsys):
    for command, code in product((["train", "cfg.yaml"], ["resume", "run"]), (0, 75, 130)):
        recipes.answers[command[0]] = Summary(code)
        assert cli.main([*command, "--json"]) == code
        assert json.loads(capsys.readouterr().out) == {"steps": 3, "exit_code": code}


def test_resume_hands_over_the_folder_and_overrides(recipes):
    assert cli.main(["resume", "run", "train.max_steps=9"]) == 0
    assert cli.main(["resume", "run", "--checkpoint", "9"]) == 0
    expected = [(["train.max_steps=9"], None), ([], "9")]
    assert recipes.calls == [("resume", Path("run"), *given) for given in expected]


def test_plan_prints_and_fits(recipes, capsys):
    assert cli.main(["plan", "cfg.yaml"]) == 0
    assert capsys.readouterr().out == "5 bytes\n"
    assert cli.main(["plan", "cfg.yaml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"host_bytes": 5}


def test_what_a_plan_logs_goes_to_stderr(recipes, capsys):
    logger, real = logging.getLogger("megatrain"), recipes.plan

    def plan(*arguments):
        logger.info("measuring the drive of /fast")
        return real(*arguments)

    recipes.plan = plan
    handlers = list(logger.handlers)
    assert cli.main(["plan", "cfg.yaml"]) == 0
    assert capsys.readouterr() == ("5 bytes\n", "measuring the drive of /fast\n")
    assert logger.handlers == handlers


def test_plan_that_does_not_fit_is_still_shown(recipes, capsys):
    problem = "needs 6 GiB of host RAM, 5 is available; set memory.host"
    recipes.answers["plan"] = Plan(problem)
    assert cli.main(["plan", "cfg.yaml"]) == 4
    assert capsys.readouterr() == ("5 bytes\n", "")  # its first line says so
    assert cli.main(["plan", "cfg.yaml", "--json"]) == 4
    out, err = capsys.readouterr()
    assert (json.loads(out), err) == ({"host_bytes": 5}, f"error: {problem}\n")


def test_data_shows_rows_or_counts(recipes, capsys):
    config = load_config("cfg.yaml")
    assert cli.main(["data", "cfg.yaml", "--rows", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"rows": 9}
    recipes.answers["show_data"] = None
    assert cli.main(["data", "cfg.yaml"]) == 0
    assert capsys.readouterr().out == ""
    assert cli.main(["data", "cfg.yaml", "--full"]) == 0
    options = [(5, True, False), (3, False, False), (3, False, True)]
    assert recipes.calls == [("show_data", config, *given) for given in options]


def test_eval_prints_the_loss(recipes, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("held.jsonl").write_text('{"text": "held out"}\n')
    assert cli.main(["eval", "run", "--data", "held.jsonl"]) == 0
    assert capsys.readouterr().out == "eval_loss: 1.25\nrows: 4\n"
    assert cli.main(["eval", "run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"eval_loss": 1.25, "rows": 4}
    assert recipes.calls == [("evaluate", "run", data, False) for data in ("held.jsonl", None)]


def test_export_prints_the_folder(recipes, capsys):
    options = ["--dtype", "float32", "--checkpoint", "best", "--format", "gguf"]
    assert cli.main(["export", "run", "out", *options]) == 0
    assert capsys.readouterr().out == "out\n"
    assert recipes.calls == [("export", Path("run"), Path("out"), "float32", "best", "gguf")]
    assert cli.main(["export", "run", "out", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"folder": "out"}


def test_generate_prints_the_answer(recipes, capsys):
    assert cli.main(["generate", "run", "Capital of France?", "--max-new-tokens", "7"]) == 0
    assert capsys.readouterr().out == "Paris.\n"
    greedy = {"temperature": 0.0, "top_p": None, "seed": None}
    about = "Capital of France?", "run", 7, greedy, None, False
    assert recipes.calls.pop() == ("generate", *about, ())
    line = "generate run France? --max-new-tokens 7 --image a.png --image b.png"
    assert cli.main(line.split()) == 0
    assert recipes.calls == [("generate", "France?", *about[1:], ["a.png", "b.png"])]


@pytest.mark.parametrize(
    ("piped", "terminal", "code"), [("Hi?", False, 0), (" \n", False, 2), ("", True, 2)]
)
def test_generate_reads_a_pipe_but_not_a_terminal(recipes, monkeypatch, piped, terminal, code):
    class Stdin:
        def isatty(self):
            return terminal

        def read(self):
            return piped

    monkeypatch.setattr(sys, "stdin", Stdin())
    assert cli.main(["generate", "run", "--json"]) == code
    assert [call[:4] for call in recipes.calls] == (
        [("generate", "Hi?", "run", 128)] if code == 0 else []
    )


NOWHERE = {
    "resume nowhere": "nowhere: no such folder; ",
    "export nowhere out": "nowhere: no such folder; ",
    "eval some/model --data rows.jsonl": "some/model: is no local folder",
    "generate some/model hi": "some/model: is no local folder",
    "plan some/model": "some/model: is no local folder",
    "bench some/model": "some/model: is no local folder",
    "train cfg.yaml model=some/model": "some/model: is no local folder",
    "data cfg.yaml model=some/model": "some/model: is no local folder",
    "plan qwen2.5-8b": "qwen2.5-8b: is no local folder or file; known shapes are qwen2.5-0.5b",
    "bench mine": "mine: is no local folder or file; known shapes are qwen2.5-0.5b",
}


def test_a_folder_or_model_that_is_nowhere_is_named_first(recipes, capsys):
    for line, words in NOWHERE.items():
        assert cli.main(line.split()) == 2
        assert capsys.readouterr().err.startswith(f"error: {words}")
        assert recipes.calls == []


ERRORS = [
    (errors.MegaTrainError, 1),
    (errors.ConfigError, 2),
    (errors.ModelError, 2),
    (errors.DataError, 3),
    (errors.RewardError, 3),
    (errors.PlanError, 4),
    (errors.OutOfMemory, 5),
    (errors.DivergedError, 6),
    (errors.StorageError, 7),
    (errors.DamagedError, 7),
    (errors.VerificationError, 8),
    (errors.ServerError, 9),
]


def test_every_error_class_has_a_row():
    classes = {error for error in vars(errors).values() if isinstance(error, type)}
    ours = {error for error in classes if issubclass(error, errors.MegaTrainError)}
    assert ours == {error for error, _ in ERRORS}


def test_errors_are_a_sentence_and_a_code(recipes, capsys):
    commands = (["train", "cfg.yaml"], ["plan", "cfg.yaml"], ["resume", "run"])
    for (error, code), command in product(ERRORS, commands):
        recipes.answers[command[0]] = error("rows.jsonl:7: not JSON; mend the line")
        assert cli.main(command) == code
        assert capsys.readouterr() == ("", "error: rows.jsonl:7: not JSON; mend the line\n")


FCNTL, NUMBA = (ModuleNotFoundError("No", name=name) for name in ("fcntl", "numba"))
UNEXPECTED: list[tuple[Exception, int, str]] = [
    (RuntimeError("a\nb"), 1, "unexpected RuntimeError: a b; run again with --debug"),
    (AssertionError(), 1, "unexpected AssertionError; run again with --debug"),
    (FCNTL, 2, "MegaTrain needs Linux (there is no fcntl); on"),
    (NUMBA, 1, "unexpected ModuleNotFoundError: No; run"),
    (MemoryError(), 5, "out of host memory"),
    (OSError(errno.ENOSPC, "No space", "runs/x"), 7, "runs/x: No space; free some space"),
    (OSError(errno.ENOMEM, "Cannot allocate memory"), 5, "out of host memory"),
    (OSError(errno.ENAMETOOLONG, "File name too long", "x"), 2, "x: is too long for the name of a"),
    (OSError(errno.ENOTDIR, "Not a directory", "runs/x"), 1, "unexpected NotADirectoryError"),
]


def test_unexpected_errors_are_one_sentence(recipes, capsys):
    for error, code, words in UNEXPECTED:
        recipes.answers["train"] = error
        assert cli.main(["train", "cfg.yaml"]) == code
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: {words}")


def test_ctrl_c_ends_with_130(recipes):
    recipes.answers["train"] = KeyboardInterrupt()
    assert cli.main(["train", "cfg.yaml"]) == 130


def test_debug_shows_the_traceback_anywhere_on_the_line(recipes, capsys):
    recipes.answers["train"] = ValueError("deep down")
    for line in ("--debug train cfg.yaml", "train cfg.yaml --debug", "train cfg.yaml"):
        assert cli.main(line.split()) == 1
        shown = "Traceback (most recent call last)" in (err := capsys.readouterr().err)
        assert shown == ("ValueError: deep down\n" in err) == ("--debug" in line)


def test_a_key_given_as_an_option_is_told_how_it_is_written(recipes, capsys):
    keys = "keys of the config are set as key=value, such as train.learning_rate=1e-5"
    commands = ("train cfg.yaml", "plan cfg.yaml", "bench tiny")
    for command, option in product(commands, ("--lr 1e-5", "--set train.seed=1")):
        assert cli.main([*command.split(), *option.split()]) == 2
        usage, error = capsys.readouterr().err.splitlines()
        assert usage.startswith(f"Usage: megatrain {command.split()[0]} ")
        assert error.startswith(f"error: No such option: {option.split()[0]}") and keys in error
        assert error.endswith(f"; see `megatrain {command.split()[0]} --help`")


def test_wrong_usage_is_an_error_as_any_other(recipes, capsys):
    for line in ["trian", "train", "export run", "data cfg.yaml --rows -1", "--no"]:
        assert (cli.main(line.split()), recipes.calls) == (2, [])
        said = capsys.readouterr().err
        assert "\nerror: " in said and "Error" not in said and "key=value" not in said
