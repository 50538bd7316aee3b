"""What modes forbid ends a command in one sentence that names it, as an ordinary user meets it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.files import as_an_ordinary_user

# (what has mode 0, command): exit code
FORBIDDEN = {
    ("model", "train cfg.yaml output=new"): 2,
    ("model", "plan cfg.yaml"): 2,
    ("model", "data cfg.yaml"): 2,
    ("model", "eval model --data rows.jsonl"): 2,
    ("model", "generate model hi"): 2,
    ("model", "verify model"): 2,
    ("cache", "train cfg.yaml output=new"): 7,
    ("cache", "data cfg.yaml"): 7,
    ("cache", "eval run"): 7,
    ("cache", "resume run train.max_steps=12"): 7,
    ("rows", "train cfg.yaml output=new data.train=rows"): 3,
    ("rows", "data cfg.yaml data.train=rows"): 3,
    ("rows", "data cfg.yaml data.train=rows:train"): 3,
    ("rows", "data cfg.yaml data.eval=rows"): 3,
    ("rows", "data cfg.yaml data.train=rows/more"): 3,
    ("rows/more", "data cfg.yaml data.train=rows"): 3,
    ("locked", "train cfg.yaml output=locked/new"): 7,
    ("locked", "plan cfg.yaml output=locked/new"): 7,
    ("locked", "export run locked/out"): 7,
    ("locked", "export locked/run out"): 7,
    ("locked", "resume locked/run"): 7,
    ("locked", "eval locked/run"): 2,
    ("locked", "generate locked/run hi"): 2,
    ("locked", "data cfg.yaml data.chat_template=locked/mine.jinja"): 2,
    ("run", "eval run"): 2,
    ("run", "plan cfg.yaml"): 7,
}


@pytest.fixture
def folders(copied: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project with all the folders of FORBIDDEN, which are readable again behind the test."""
    project = copied.parent
    (project / "model").unlink()
    shutil.copytree(model_dir, project / "model")
    for name in ("rows", "rows/more", "cache", "locked"):
        (project / name).mkdir()
    shutil.copy("rows.jsonl", "rows/train.jsonl")
    shutil.copy("rows.jsonl", "rows/more/train.jsonl")
    shutil.copytree(copied, "locked/run", symlinks=True)
    (project / "locked" / "mine.jinja").write_text("x")
    yield project
    for path in ("model", "rows", "cache", "locked", "run"):
        (project / path).chmod(0o700)
    (project / "rows/more").chmod(0o700)


@pytest.mark.slow
@pytest.mark.parametrize(("what", "command"), FORBIDDEN)
def test_a_folder_that_may_not_be_read_is_named(megatrain, folders, monkeypatch, what, command):
    if what == "cache":
        monkeypatch.setenv("MEGATRAIN_CACHE", str(folders / "cache"))
    (folders / what).chmod(0)
    with as_an_ordinary_user():
        done = megatrain(command, code=FORBIDDEN[what, command])
    (error,) = (line for line in done.err.splitlines() if line.startswith("error: "))
    assert "Permission denied" in error
    assert what in error
    assert "unexpected" not in error


@pytest.mark.slow
def test_a_resume_needs_no_model_folder_that_may_be_read(megatrain, folders):
    megatrain("train cfg.yaml output=mine train.max_steps=1")
    (folders / "model").chmod(0)
    with as_an_ordinary_user():
        done = megatrain("resume mine train.max_steps=2")
    assert "model: Permission denied" in done.err
    assert "; the checkpoint describes the model" in done.err
