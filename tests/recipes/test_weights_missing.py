"""A folder that lacks some of its weights is refused before rows are read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.commands import metrics_of


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
COMMANDS = ("train cfg.yaml model=cut", "eval cut --data rows.jsonl")


@pytest.mark.parametrize("command", [*COMMANDS, "plan cfg.yaml model=cut", "plan cut"])
def test_a_missing_shard_is_named_before_rows_are_read(megatrain, project, cut, command):
    (cut / "b.safetensors").unlink()
    (project / "rows.jsonl").write_text("no row")
    assert megatrain(command, code=2).err.startswith(f"error: {ONE}")


@pytest.mark.parametrize("command", COMMANDS)
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
