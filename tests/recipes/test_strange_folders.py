"""A run folder that somebody else has prepared is not written through, and not trusted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatrain.storage import run_folder

FILES = [".lock", "config.yaml.tmp", "metrics.jsonl", "train.log"]


@pytest.mark.parametrize("name", FILES)
def test_a_link_in_it_is_not_followed(megatrain, project, name):
    (project / "mine").write_text("precious")
    (project / "run").mkdir(0o700)
    (project / "run" / name).symlink_to(project / "mine")
    done = megatrain("train cfg.yaml", code=7)
    assert f"run/{name}" in done.err
    assert "symbolic link" in done.err
    assert (project / "mine").read_text() == "precious"


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
@pytest.mark.parametrize("command", ["train cfg.yaml", "resume run"])
def test_a_folder_that_others_may_write_in_is_refused(megatrain, copied, mode, command):
    copied.chmod(mode)
    done = megatrain(command, code=2)
    assert (
        "run: others may write in it; make it yours alone (chmod go-w run), or choose" in done.err
    )
    copied.chmod(mode & ~0o022)
    assert "others may write" not in megatrain(command, code=2 if "train" in command else 0).err


def test_a_folder_of_another_user_is_refused(megatrain, project, monkeypatch):
    (project / "run").mkdir(0o700)
    os.chown(project / "run", 4242, 4242)
    done = megatrain("train cfg.yaml", code=2)
    assert "run: belongs to another user; choose another `output` folder" in done.err


def test_a_link_to_a_folder_of_ones_own_is_fine(tmp_path):
    (tmp_path / "large-disk").mkdir(0o755)
    (tmp_path / "run").symlink_to("large-disk")
    with run_folder.run_lock(tmp_path / "run"):
        assert Path(tmp_path / "large-disk" / ".lock").is_file()
