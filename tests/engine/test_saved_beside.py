"""Checkpoints that are written while training goes on have the bits of those that it waited for."""

from __future__ import annotations

import time
from threading import Event
from typing import Any

import pytest

from megatrain.errors import OutOfMemory, StorageError
from megatrain.optim import AdamW
from megatrain.settings import ALL, Settings
from megatrain.storage import beside
from megatrain.storage.beside import Beside
from megatrain.storage.checkpoint import save_checkpoint
from megatrain.storage.manifest import read_manifest
from tests.helpers.support import engine_of, micro_batches

pytestmark = pytest.mark.usefixtures("deterministic")
CASES: dict[str, dict[str, Any]] = {
    "streamed": {"settings": Settings(head_chunk_tokens=7)},
    "half resident": {
        "settings": Settings(head_chunk_tokens=7, resident=2),
        "precision": "bfloat16",
    },
    "all resident": {"settings": Settings(head_chunk_tokens=7, resident=4)},
    "computed twice": {"settings": Settings(head_chunk_tokens=7, second_backward=ALL)},
    "unclipped": {"max_grad_norm": None, "precision": "bfloat16"},
    "frozen": {"freeze": ("model.embed*", "*.layers.0.*")},
    "int8": {"optimizer": AdamW(lr=1e-3, moments="int8")},
}


@pytest.mark.parametrize("case", CASES)
def test_a_save_beside_steps_has_the_bits_of_its_own_step(case, tmp_path, monkeypatch, device):
    """Each block is copied late, and nothing is written before two more steps are done."""
    copy, trained = Beside._copy, Event()

    def late(self, block):
        time.sleep(0.02)
        copy(self, block)

    monkeypatch.setattr(Beside, "_copy", late)

    def save(engine):
        assert trained.wait(60)
        return save_checkpoint(tmp_path / "beside", 1, engine, None, {"position": 7})

    with engine_of("llama", device=device, **CASES[case]) as engine:
        engine.train_step(micro_batches(0))
        now = save_checkpoint(tmp_path / "now", 1, engine, None, {"position": 7})
        saver = Beside(engine)
        saving = saver.save(save)
        for seed in (1, 2):
            engine.train_step(micro_batches(seed))
        trained.set()
        path, _ = saving.result()
        saver.close()
        left = save_checkpoint(tmp_path / "left", 3, engine, None, {})
    assert read_manifest(path).files == read_manifest(now).files
    with engine_of("llama", device=device, **CASES[case]) as engine:
        for seed in (0, 1, 2):
            engine.train_step(micro_batches(seed))
        alone = save_checkpoint(tmp_path / "alone", 3, engine, None, {})
    assert read_manifest(left).files == read_manifest(alone).files


def test_training_goes_on_where_there_is_no_memory_for_the_copies(monkeypatch):
    def fails(*_, **__):
        raise OutOfMemory("cannot reserve 3.0 GiB of host memory for copies for saves")

    monkeypatch.setattr(beside, "slabs_of", fails)
    with engine_of("llama") as engine:
        saver = Beside(engine)
        saving = saver.save(lambda still: pytest.fail("was called"))
        engine.train_step(micro_batches(0))
        with pytest.raises(StorageError, match="cannot reserve"):
            saving.result()
        assert not saver.usable
        saver.close()
