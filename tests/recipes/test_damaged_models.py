"""Whoever reads a folder that has a MANIFEST.json checks what it reads."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import megatrain as mt
from megatrain.errors import StorageError
from tests.files import flip
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


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_so_does_an_engine(copied, file):
    flip(copied / "final" / file, FILES[file])
    with pytest.raises(StorageError, match=rf"final/{file}: does not match its checksum"):
        mt.Engine.from_pretrained("run/final", device="cpu")


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


def test_a_checked_folder_gives_the_same_weights(copied):
    with mt.Engine.from_pretrained("run/final", device="cpu") as engine:
        found = dict(engine.iter_weights())
        expected = load_file("run/final/model.safetensors")
        assert all(torch.equal(found[name], expected[name].to(found[name].dtype)) for name in found)


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


def test_a_resume_takes_the_checkpoint_before_one_with_such_a_file(
    megatrain, copied, finished_project
):
    shutil.rmtree(copied / "final")
    (copied / "checkpoint-10" / "special_tokens_map.json").write_text("{}")
    done = megatrain("resume run")
    assert "checkpoint-10/special_tokens_map.json: does not belong to this checkpoint" in done.err
    same_run(copied, finished_project / "run")


def test_what_nobody_reads_may_lie_beside_it(megatrain, copied):
    for name in ("notes.txt", "eval_results.json", "modeling.py"):
        (copied / "final" / name).write_text("{}")
    megatrain("generate run hi --max-new-tokens 1")
    done = megatrain("generate run/final hi --trust-remote-code", code=7)
    assert "final/modeling.py: does not belong to this checkpoint" in done.err
