"""A checkpoint is read once, and one that turns out damaged on the way gives way to the one before."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatrain.checkpoint import save_checkpoint
from megatrain.errors import ConfigError, StorageError
from megatrain.restore import load_checkpoint, load_resumable

Save = Callable[..., Path]


def flip(path: Path, position: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def bytes_read() -> int:
    """By this process, from files, whoever caches them."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar:"))


def test_every_byte_is_read_once(run_dir: Path, new_engine: Any) -> None:
    engine = new_engine(vocab_size=20_000)  # beside which headers are small
    path = save_checkpoint(run_dir, 1, engine, None, {})
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    before = bytes_read()
    load_checkpoint(path, engine)
    assert size <= bytes_read() - before < 1.05 * size


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer/block-00001.safetensors", "state.json", "config.json"])
def test_a_checkpoint_that_turns_out_damaged_gives_way(
    run_dir: Path, engine: Any, save: Save, caplog: pytest.LogCaptureFixture, file: str
) -> None:
    engine.update(2)
    save(2)
    saved = engine.bits()
    engine.update(3)
    newest = save(3)
    flip(newest / file)
    engine.update(4)
    with caplog.at_level(logging.WARNING, logger="megatrain"):
        path, _ = load_resumable(run_dir, engine, first=newest)
    assert path == run_dir / "checkpoint-2"
    assert (engine.updates, engine.bits()) == (2, saved)
    (warning,) = caplog.messages
    assert f"checkpoint-3/{file}" in warning
    assert "checksum" in warning


def test_when_all_are_damaged_the_way_out_is_named(run_dir: Path, engine: Any, save: Save) -> None:
    for step in (1, 2):
        flip(save(step) / "optimizer" / "block-00000.safetensors")
    with pytest.raises(StorageError, match=r"has no intact checkpoint to go on from; start again: megatrain train .*config\.yaml"):
        load_resumable(run_dir, engine, first=run_dir / "checkpoint-2")


def test_a_damaged_name_of_a_tensor_is_damage_and_no_other_model(run_dir: Path, engine: Any, new_engine: Any, save: Save) -> None:
    folder = save(1)
    file = folder / "optimizer" / "block-00001.safetensors"
    flip(file, file.read_bytes().index(b"exp_avg_sq"))
    with pytest.raises(StorageError, match=r"block-00001\.safetensors: does not match its checksum"):
        load_checkpoint(folder, engine)
    flip(file, file.read_bytes().index(b"dxp_avg_sq"))
    with pytest.raises(ConfigError, match="parameters"):
        load_checkpoint(folder, new_engine(layers=3))
