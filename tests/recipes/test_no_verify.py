"""--no-verify: files are not compared with their hashes, all else is, and that is said."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import megatrain as mt
from megatrain.errors import DamagedError
from tests.commands import files_of, steps_of

SAID = "warning: --no-verify: files are not compared with their hashes; damage goes unnoticed"


def change_a_weight(folder: Path) -> None:
    """The lowest bit of the last value of its weights."""
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)


@pytest.fixture
def damaged(copied: Path) -> Path:
    """A run folder with a changed weight, in the last checkpoint and the final model."""
    change_a_weight(copied / "checkpoint-10")
    if (copied / "final" / "model.safetensors").stat().st_nlink == 1:
        change_a_weight(copied / "final")
    return copied


READERS = {
    "eval": "eval run",
    "generate": "generate run hello --max-new-tokens 1",
    "export": "export run out",
    "train": "train cfg.yaml model=run/final output=other train.max_steps=1",
}


@pytest.mark.parametrize("reader", READERS)
def test_damage_that_only_hashes_show_is_read(megatrain, damaged, reader):
    assert "does not match its checksum" in megatrain(READERS[reader], code=7).err
    shutil.rmtree("other", ignore_errors=True)
    done = megatrain(READERS[reader], "--no-verify")
    assert done.err.count(SAID) == 1


def test_a_resume_takes_the_newest_checkpoint_as_it_is(megatrain, damaged):
    shutil.rmtree(damaged / "final")
    assert "checkpoint-10/model.safetensors: does not match" in megatrain("resume run").err
    change_a_weight(damaged / "checkpoint-10")
    done = megatrain("resume run --no-verify train.max_steps=12")
    assert done.err.count(SAID) == 1
    assert SAID.removeprefix("warning: ") in (damaged / "train.log").read_text()
    assert "resuming from run/checkpoint-10" in done.err
    assert steps_of(damaged)[-1]["step"] == 12


def test_a_finished_run_is_finished(megatrain, damaged):
    before = files_of(damaged)
    assert "nothing is left to train" in megatrain("resume run --no-verify").err
    assert files_of(damaged) == before


@pytest.mark.parametrize("command", ["eval run", "export run out"])
def test_sizes_are_looked_at_all_the_same(megatrain, damaged, command):
    for folder in ("final", "checkpoint-10"):
        path = damaged / folder / "config.json"
        path.write_bytes(path.read_bytes() + b" ")
    assert "config.json: " in megatrain(command, "--no-verify", code=7).err


def test_in_python(damaged):
    with pytest.raises(DamagedError):
        mt.evaluate(damaged)
    assert mt.evaluate(damaged, verify=False)["eval_loss"] > 0
    with pytest.raises(DamagedError):
        mt.export(damaged, "out")
    assert mt.export(damaged, "out", verify=False).is_dir()
