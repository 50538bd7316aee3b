"""A run folder that somebody else has prepared is not written through, and not trusted."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.files import as_an_ordinary_user
from tests.recipes.same_run import same_run

FILES = [".lock", "config.yaml.tmp", "metrics.jsonl", "train.log"]


@pytest.mark.parametrize("name", FILES)
def test_a_link_in_it_is_not_followed(megatrain, project, name):
    (project / "mine").write_text("precious")
    (project / "run").mkdir(0o700)
    (project / "run" / "config.resolved.yaml").write_text("")  # so that it is a run's
    (project / "run" / name).symlink_to(project / "mine")
    done = megatrain("train cfg.yaml", code=7)
    assert f"run/{name}" in done.err
    assert "symbolic link" in done.err
    assert (project / "mine").read_text() == "precious"


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
@pytest.mark.parametrize("command", ["train cfg.yaml", "resume run"])
def test_a_folder_that_others_may_write_in_is_refused(megatrain, copied, mode, command):
    if "train" in command:
        (copied / "config.resolved.yaml").unlink()  # a run's folder is told to be resumed
    copied.chmod(mode)
    done = megatrain(command, code=2)
    assert (
        "run: others may write in it; make it yours alone (chmod go-w run), or choose" in done.err
    )
    copied.chmod(mode & ~0o022)
    assert "others may write" not in megatrain(command, code=2 if "train" in command else 0).err


OF_A_RUN = {".lock", "train.log", "metrics.jsonl", "config.yaml", "config.resolved.yaml"}
OF_A_RUN |= {"env.json", "plan.json", "report.html", "last", "best", "proven", "final"}
OF_A_RUN |= {"checkpoint-1", "checkpoint-2"}


@pytest.fixture(params=[0, 4242])
def without_modes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run folder and all new files seem to be of one user, and everybody's to write: as on drvfs
    and vfat, and where FUSE is mounted so."""

    def seems(found: os.stat_result) -> os.stat_result:
        changed = {stat.ST_MODE: found.st_mode | 0o777, stat.ST_UID: request.param}
        return os.stat_result(changed.get(place, fact) for place, fact in enumerate(found))

    look, look_at = Path.stat, os.fstat

    def mounted(path: Path, **named: Any) -> os.stat_result:
        found = look(path, **named)
        return seems(found) if path == Path("run") else found

    monkeypatch.setattr(Path, "stat", mounted)
    monkeypatch.setattr(os, "fstat", lambda fd: seems(look_at(fd)))


@pytest.mark.slow
def test_where_modes_mean_nothing_a_run_begins_and_goes_on_and_that_is_said(
    megatrain, project, without_modes
):
    said = "warning: run: is on a file system without owners and modes: others may be able to"
    assert said in megatrain("train cfg.yaml train.max_steps=1").err
    assert said in megatrain("resume run train.max_steps=2").err
    assert {path.name for path in (project / "run").iterdir()} <= OF_A_RUN


def test_a_folder_of_another_user_is_refused(megatrain, project, monkeypatch):
    (project / "run").mkdir(0o700)
    os.chown(project / "run", 4242, 4242)
    done = megatrain("train cfg.yaml", code=2)
    assert "run: belongs to another user; choose another `output` folder" in done.err


def test_a_users_own_config_is_not_written_over(megatrain, project):
    """`output: .` beside a config of the name that a run gives its own."""
    (project / "cfg.yaml").rename("config.yaml")
    before = {path: path.read_bytes() for path in project.iterdir() if path.is_file()}
    for command in ("train", "plan"):
        done = megatrain(command, "config.yaml", "output=.", code=2)
        assert "command line: output: . holds config.yaml, which a run would write" in done.err
    assert {path: path.read_bytes() for path in project.iterdir() if path.is_file()} == before


NAMES = ["metrics.jsonl", "plan.json", "last", "final", "checkpoint-3", "checkpoint-3.tmp"]
NAMES += ["train.log", "env.json.tmp", "spike-3.safetensors", "tensorboard", "passengers"]
NAMES += ["bad-batch-3-rank-1.safetensors"]


@pytest.mark.parametrize("name", NAMES)
def test_what_a_run_would_write_over_is_refused(megatrain, project, name):
    folder = project / "mine"
    folder.mkdir(0o700)
    (folder / "notes.md").write_text("mine")
    (folder / name).write_text("mine")
    done = megatrain("train cfg.yaml output=mine", code=2)
    assert f"output: mine holds {name}, which a run would write, and is no run's folder" in done.err
    assert {path.name: path.read_text() for path in folder.iterdir()} == {
        "notes.md": "mine",
        name: "mine",
    }


OTHERS = ["checkpoint-final.tmp/x", "final_notes.tmp", "my.link.tmp", "passengers2.tmp", "a/b.yaml"]


@pytest.mark.parametrize("again", [False, True])
def test_what_else_lies_in_a_run_folder_stays(megatrain, project, again):
    (project / "run").mkdir(0o700)
    for name in OTHERS:
        (project / "run" / name).parent.mkdir(exist_ok=True)
        (project / "run" / name).write_text("mine")
    megatrain("train cfg.yaml train.max_steps=1")
    if again:
        megatrain("resume run train.max_steps=2")
    assert {(project / "run" / name).read_text() for name in OTHERS} == {"mine"}


def test_a_models_folder_is_no_runs(megatrain, project, model_dir):
    (project / "model").unlink()
    shutil.copytree(model_dir, project / "model")
    for command in ("train", "plan"):
        done = megatrain(command, "cfg.yaml", "output=model", code=2)
        assert "output: model holds config.json, so it would be taken for a model" in done.err


def test_a_start_that_failed_leaves_its_log_and_may_be_repeated(megatrain, project):
    good = (project / "rows.jsonl").read_text()
    (project / "rows.jsonl").write_text("{broken")
    megatrain("train cfg.yaml", code=3)
    assert {path.name for path in (project / "run").iterdir()} == {".lock", "train.log"}
    (project / "rows.jsonl").write_text(good)
    megatrain("train cfg.yaml train.max_steps=1")


@pytest.mark.parametrize("command", ["plan", "train"])
@pytest.mark.parametrize("place", ["rows.jsonl", "rows.jsonl/run"])
def test_a_file_is_no_folder_for_a_plan_either(megatrain, project, command, place):
    done = megatrain(command, "cfg.yaml", f"output={place}", code=7)
    assert f"{place}: cannot make the run folder: " in done.err
    assert "choose another `output`" in done.err


@pytest.mark.parametrize("name", ["last", "best", "proven"])
def test_a_folder_where_a_save_puts_a_link_is_noticed_before_training(megatrain, copied, name):
    (copied / name).unlink()
    (copied / name).mkdir()
    for command in ("resume run train.max_steps=12", "plan cfg.yaml", "train cfg.yaml"):
        if "train cfg" in command:
            (copied / "config.resolved.yaml").unlink()
        done = megatrain(command, code=7)
        assert f"run/{name}: is no link, and a save puts one there; move it away" in done.err


# -- permissions -----------------------------------------------------------------------------------

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


# -- folder removed --------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["moved", "replaced"])
def test_a_run_whose_folder_is_gone_ends_and_goes_on_where_it_is(
    megatrain, project, finished_project, before_step, how
):
    folder = project / "run"

    def act() -> None:
        if (project / "away").exists():
            return
        folder.rename(project / "away")
        if how == "replaced":
            folder.mkdir(0o700)

    before_step(8, act)
    done = megatrain("train cfg.yaml", code=7)
    assert "error: run: was removed or replaced while the run goes on; nothing is saved" in done.err
    assert not [*folder.glob("checkpoint*")]
    megatrain("resume away")
    same_run(project / "away", finished_project / "run")
