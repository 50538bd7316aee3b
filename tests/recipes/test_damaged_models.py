"""Whoever reads a folder that has a MANIFEST.json checks what it reads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import megatrain as mt
from megatrain.errors import DamagedError, StorageError
from tests.helpers.commands import files_of, metrics_of, steps_of
from tests.helpers.files import flip
from tests.recipes.same_run import same_run

COMMANDS = {
    "eval": "eval run",
    "generate": "generate run hi",
    "train": "train cfg.yaml model=run/final output=next train.max_steps=1",
    "export": "export run out --checkpoint final",
    "verify": "verify run/final",
}
FILES = {"model.safetensors": -1, "config.json": 40, "tokenizer.json": 99}


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_names_the_file(megatrain, copied, command, file):
    flip(copied / "final" / file, FILES[file])
    done = megatrain(COMMANDS[command], code=7)
    assert f"final/{file}: does not match its checksum" in done.err


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_a_resume_takes_the_checkpoint_before(megatrain, copied, finished_project, file):
    for folder in ("checkpoint-10", "final"):
        flip(copied / folder / file, FILES[file])
    done = megatrain("resume run")
    assert f"checkpoint-10/{file}: does not match its checksum" in done.err
    same_run(copied, finished_project / "run")


def test_a_value_that_damage_made_nan_is_damage(megatrain, copied):
    path = copied / "final" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-2:] = b"\xff\xff"
    path.unlink()
    path.write_bytes(data)
    assert "does not match its checksum" in megatrain("eval run", code=7).err


def test_what_was_edited_on_purpose_is_read_once_its_manifest_is_gone(megatrain, copied):
    shutil.copytree(copied / "final", "mine")
    config = json.loads((copied / "final" / "config.json").read_text())
    (copied.parent / "mine" / "config.json").write_text(json.dumps(config | {"rope_theta": 5.0}))
    done = megatrain("generate mine hi", code=7)
    assert "if it was changed on purpose, remove mine/MANIFEST.json" in done.err
    (copied.parent / "mine" / "MANIFEST.json").unlink()
    megatrain("generate mine hi --max-new-tokens 1")


def test_every_file_is_read_to_its_end(copied):
    """A tensor that no model has would be skipped, its bytes are checked all the same."""
    path = copied / "final" / "model.safetensors"
    tensors = load_file(path)
    path.unlink()
    save_file(tensors, path, {"format": "pt", "step": "10", "more": "x"})
    with pytest.raises(StorageError, match="does not match its checksum"):
        mt.Engine.from_pretrained("run/final", device="cpu")


# what transformers would read beside what was saved, or instead
STRAYS = {
    "special_tokens_map.json": '{"eos_token": "<|im_start|>"}',
    "additional_chat_templates/default.jinja": "{{ messages[0].content }}",
    "added_tokens.json": "{}",
    "model-00001-of-00002.safetensors": "",
}


@pytest.mark.parametrize("file", STRAYS)
@pytest.mark.parametrize("command", [*COMMANDS, "plan"])
def test_a_file_that_was_put_into_it_is_read_by_none(megatrain, copied, command, file):
    stray = copied / "final" / file
    stray.parent.mkdir(exist_ok=True)
    stray.write_text(STRAYS[file])
    done = megatrain(COMMANDS.get(command, "plan cfg.yaml model=run/final"), code=7)
    assert f"final/{file}: does not belong to this checkpoint; remove it" in done.err


# -- weights missing -------------------------------------------------------------------------------


@pytest.fixture
def cut(project: Path, model_dir: Path) -> Path:
    """A model folder of two shards."""
    folder = project / "cut"
    shutil.copytree(model_dir, folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    placed: dict[str, str] = {}
    for file, held in {"a.safetensors": names[:4], "b.safetensors": names[4:]}.items():
        save_file({name: tensors[name] for name in held}, folder / file)
        placed |= dict.fromkeys(held, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    return folder


ONE = "cut/model.safetensors.index.json: names 2 shards, 1 is missing (b.safetensors); download it "
BOTH = "cut/model.safetensors.index.json: names 2 shards, 2 are missing (a.safetensors); download i"
MISSING_COMMANDS = ("train cfg.yaml model=cut", "eval cut --data rows.jsonl")


@pytest.mark.parametrize("command", [*MISSING_COMMANDS, "plan cfg.yaml model=cut", "plan cut"])
def test_a_missing_shard_is_named_before_rows_are_read(megatrain, project, cut, command):
    (cut / "b.safetensors").unlink()
    (project / "rows.jsonl").write_text("no row")
    assert megatrain(command, code=2).err.startswith(f"error: {ONE}")


@pytest.mark.parametrize("command", MISSING_COMMANDS)
def test_so_are_all_of_them(megatrain, cut, command):
    for shard in cut.glob("*.safetensors"):
        shard.unlink()
    assert megatrain(command, code=2).err.startswith(f"error: {BOTH}")
    (cut / "model.safetensors.index.json").unlink()
    assert "has neither model.safetensors nor" in megatrain(command, code=2).err


def test_a_plan_needs_none_and_random_weights_do_not_either(megatrain, project, cut):
    (cut / "b.safetensors").unlink()
    config = ("model={config: cut, init: random}", "train.max_steps=1", "data.eval=null")
    megatrain("train cfg.yaml", *config)
    assert len(metrics_of(project / "run")) == 1
    (cut / "a.safetensors").unlink()
    megatrain("plan cfg.yaml model=cut")
    megatrain("plan cut train.seq_len=64 train.tokens_per_step=256")


# -- no verify -------------------------------------------------------------------------------------

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
