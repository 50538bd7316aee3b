"""A tiny model with a tokenizer and a chat template, a user's folder around it, and the command
line."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megatrain import cli
from megatrain.recipes import loop
from megatrain.recipes.signals import STOPS
from megatrain.recipes.state import Run
from tests.helpers.commands import (
    Answer,
    Command,
    Forker,
    make_project,
    save_tiny_model,
    tiny_tokenizer,
)
from tests.helpers.once import commands_are_short, runs_are_quick

BeforeStep = Callable[[int, Callable[[], object]], None]


@pytest.fixture(scope="session", autouse=True)
def once() -> Iterator[None]:
    with commands_are_short():
        yield


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    with runs_are_quick():
        yield


@pytest.fixture(autouse=True)
def signals_mean_what_they_do() -> Iterator[None]:
    """Also where the tests were started with some ignored, as by nohup or in the background."""
    ignored = [number for number in STOPS if signal.getsignal(number) == signal.SIG_IGN]
    for number in ignored:
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, default)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return tiny_tokenizer()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "model", tokenizer)


@pytest.fixture(scope="session")
def token_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokens")


@pytest.fixture
def project(
    tmp_path: Path, model_dir: Path, token_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """The user's folder, which is the current one while the test runs."""
    folder = make_project(tmp_path / "project", model_dir)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("MEGATRAIN_CACHE", str(token_cache))
    return folder


@pytest.fixture
def megatrain(project: Path, capfd: pytest.CaptureFixture[str]) -> Command:
    """megatrain("train cfg.yaml", "output=there", code=2) runs a command line in this process.

    It is split as a shell does; what follows is one argument each. The exit code must be `code`.
    """

    def run(line: str, *arguments: str, code: int = 0) -> Answer:
        capfd.readouterr()
        found = cli.main([*shlex.split(line), *arguments])
        answer = Answer(*capfd.readouterr())
        assert found == code, answer.err + answer.out
        return answer

    return run


@pytest.fixture(scope="session")
def forker(token_cache: Path) -> Iterator[Forker]:
    forker = Forker(token_cache)
    yield forker
    forker.close()


@pytest.fixture(scope="session")
def trained_once(
    tmp_path_factory: pytest.TempPathFactory, model_dir: Path, token_cache: Path
) -> Callable[..., Path]:
    """trained_once("train.max_steps=2", begin=write_rows): a user's folder whose run with these
    keys has come to its end, after `begin(folder)`. Tests only read it, or copy its run."""

    @cache
    def train(*keys: str, begin: Callable[[Path], object] | None = None) -> Path:
        folder = make_project(tmp_path_factory.mktemp("trained") / "project", model_dir)
        with runs_are_quick(), pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            patch.setenv("MEGATRAIN_CACHE", str(token_cache))
            if begin is not None:
                begin(folder)
            assert cli.main(["train", "cfg.yaml", *keys]) == 0
        return folder

    return train


@pytest.fixture(scope="session")
def finished_project(trained_once: Callable[..., Path]) -> Path:
    """A user's folder whose run has come to its end. Tests only read it."""
    return trained_once()


@pytest.fixture
def finished(finished_project: Path, project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run folder of a finished run, whose project is the current folder."""
    monkeypatch.chdir(finished_project)
    return finished_project / "run"


@pytest.fixture
def copied(finished_project: Path, project: Path) -> Path:
    """A finished run in this test's own project, to do anything with."""
    return Path(shutil.copytree(finished_project / "run", project / "run", symlinks=True))


def cut_back(run_dir: Path) -> Path:
    """Leave of a finished run what a kill after step 7 leaves."""
    for name in ("final", "checkpoint-10"):
        (run_dir / name).rename(run_dir.parent / f"lost-{name}")
    for name in ("last", "best"):
        (run_dir / name).unlink(missing_ok=True)
    (run_dir / "last").symlink_to("checkpoint-5")
    lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run_dir / "metrics.jsonl").write_text("".join(lines[:9]) + '{"step": 8, "lo')
    return run_dir


@pytest.fixture
def killed(copied: Path) -> Path:
    """A run in this test's own project that was killed after step 7 of 10: its last checkpoint is
    that of step 5. Whole it is that of `finished_project`."""
    return cut_back(copied)


@pytest.fixture
def before_step(monkeypatch: pytest.MonkeyPatch) -> BeforeStep:
    """before_step(3, action): calls it when step 3 begins, and no save is under way."""
    original = loop.train_step
    actions: dict[int, Callable[[], object]] = {}

    def train_step(run: Run, *rest: Any) -> None:
        action = actions.get(run.step + 1)
        if action is not None:
            if run.saving is not None:
                run.saving.written.exception()
            action()
        original(run, *rest)

    monkeypatch.setattr(loop, "train_step", train_step)
    return actions.__setitem__


@pytest.fixture
def stop_after(before_step: BeforeStep) -> Callable[[int], None]:
    """stop_after(5): SIGTERM arrives during step 5."""
    return lambda step: before_step(step, lambda: os.kill(os.getpid(), signal.SIGTERM))


@pytest.fixture
def absurd_from_step_4() -> Iterator[pytest.MonkeyPatch]:
    """The learning rate, until it is undone."""
    sane = Run.learning_rate.fget  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        absurd = property(lambda run: 1e30 if run.step >= 3 else sane(run))
        patch.setattr(Run, "learning_rate", absurd)
        yield patch
