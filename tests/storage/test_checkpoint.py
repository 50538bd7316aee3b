"""Checkpoints come back bit for bit, and load in transformers as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from megatrain.errors import ConfigError
from megatrain.optim import AdamW
from megatrain.storage.checkpoint import load_checkpoint, save_checkpoint


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_every_array_and_the_state_come_back_bit_for_bit(run_dir, new_engine, precision):
    state = {"position": [3, 14], "loss": 0.1 + 0.2, "name": "é", "none": None, "rng": [2**63, -1]}
    source, target = new_engine(precision=precision), new_engine(precision=precision)
    source.update(7)
    path = save_checkpoint(run_dir, 7, source, None, state)
    target.update(1)
    assert load_checkpoint(path, target) == state
    assert (target.updates, target.bits()) == (7, source.bits())


def test_a_save_waits_for_each_blocks_update(run_dir, engine):
    engine.update(5)
    assert len(engine.pending) == 4
    path = save_checkpoint(run_dir, 5, engine, None, {})
    saved = load_file(path / "model.safetensors")
    for block in engine.anatomy.blocks:
        for name, view in block.layout.views(engine.store.array("weight", block.index)).items():
            assert torch.equal(saved[name], view), name
    assert not engine.pending


def test_a_failed_update_is_not_saved(run_dir, engine, monkeypatch):
    def poisoned(block: int) -> None:
        raise RuntimeError(f"update of block {block} failed")

    monkeypatch.setattr(engine, "wait_ready", poisoned)
    with pytest.raises(RuntimeError, match="update of block"):
        save_checkpoint(run_dir, 1, engine, None, {})
    assert not any(run_dir.iterdir())


def test_gradients_are_not_saved(run_dir, engine, save):
    path = save(1)
    block = load_file(path / "optimizer" / "block-00001.safetensors")
    assert {name.split("/")[0] for name in block} == {"remainder", "exp_avg", "exp_avg_sq"}
    tensors = [t for file in path.rglob("*.safetensors") for t in load_file(file).values()]
    on_disk = sum(tensor.nbytes for tensor in tensors)
    assert on_disk == 12 * engine.anatomy.parameters


def test_transformers_loads_the_folder_as_it_is(run_dir, engine, save):
    model = transformers.AutoModelForCausalLM.from_pretrained(save(3))
    assert model.dtype == torch.bfloat16
    expected: dict[str, torch.Tensor] = {}
    for block in engine.anatomy.blocks:
        expected |= block.layout.views(engine.store.array("weight", block.index))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name])


def test_another_engine_is_refused_in_a_sentence(save, new_engine, monkeypatch):
    path = save(1)
    others: list[tuple[dict[str, Any], str]] = [
        ({"precision": "float32"}, "precision 'bfloat16' and this run has 'float32'"),
        ({"layers": 3}, "parameters 5456 and this run has"),
    ]
    for other, message in others:
        with pytest.raises(ConfigError, match=message):
            load_checkpoint(path, new_engine(**other))
    monkeypatch.setattr(AdamW, "name", "lion")
    with pytest.raises(ConfigError, match="optimizer 'adamw' and this run has 'lion'"):
        load_checkpoint(path, new_engine())
