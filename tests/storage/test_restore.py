"""A checkpoint is read once; if it turns out damaged, the one before is loaded."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from megatrain.errors import ConfigError, StorageError
from megatrain.storage.checkpoint import (
    Resumable,
    find_resumable,
    load_checkpoint,
    load_resumable,
    save_checkpoint,
)
from megatrain.storage.hashed_file import WrittenFile
from megatrain.storage.manifest import read_manifest
from megatrain.storage.safetensors import write_safetensors
from tests.helpers.files import flip

CHECKSUM = "does not match its checksum"


def bytes_read() -> int:
    """Bytes that this process has read from files, from the page cache too."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar:"))


def test_every_byte_is_read_once(run_dir, new_engine):
    engine = new_engine(vocab_size=20_000)  # beside which headers are small
    path = save_checkpoint(run_dir, 1, engine, None, {})
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    before = bytes_read()
    load_checkpoint(path, engine)
    assert size <= bytes_read() - before < 1.05 * size


@pytest.mark.parametrize(
    "file", ["model.safetensors", "optimizer/block-00001.safetensors", "state.json", "config.json"]
)
def test_a_checkpoint_that_turns_out_damaged_gives_way(run_dir, engine, save, caplog, file):
    engine.update(2)
    save(2)
    saved = engine.bits()
    engine.update(3)
    newest = save(3)
    flip(newest / file)
    engine.update(4)
    with caplog.at_level(logging.WARNING, logger="megatrain"):
        path, _ = load_resumable(run_dir, engine, Resumable(newest, ()))
    assert path == run_dir / "checkpoint-2"
    assert (engine.updates, engine.bits()) == (2, saved)
    (warning,) = caplog.messages
    assert f"checkpoint-3/{file}" in warning
    assert "checksum" in warning


def test_when_all_are_damaged_the_way_out_is_named(run_dir, engine, save):
    for step in (1, 2):
        flip(save(step) / "optimizer" / "block-00000.safetensors")
    words = r"no intact checkpoint to go on from; start again: megatrain train .*config\.yaml"
    with pytest.raises(StorageError, match=words):
        load_resumable(run_dir, engine, Resumable(run_dir / "checkpoint-2", ()))


def test_a_damaged_name_of_a_tensor_is_damage_and_no_other_model(run_dir, engine, new_engine, save):
    folder = save(1)
    file = folder / "optimizer" / "block-00001.safetensors"
    flip(file, file.read_bytes().index(b"exp_avg_sq"))
    with pytest.raises(StorageError, match=f"block-00001.safetensors: {CHECKSUM}"):
        load_checkpoint(folder, engine)
    flip(file, file.read_bytes().index(b"dxp_avg_sq"))
    with pytest.raises(ConfigError, match="parameters"):
        load_checkpoint(folder, new_engine(layers=3))


def test_a_drive_that_fails_is_not_taken_for_a_damaged_checkpoint(
    run_dir, engine, save, monkeypatch, caplog
):
    save(1, 2)
    error = StorageError("/nvme/swap: cannot read it: Input/output error (errno 5)")
    monkeypatch.setattr(engine.store, "lease", Mock(side_effect=error))
    with (
        caplog.at_level(logging.WARNING, logger="megatrain"),
        pytest.raises(StorageError, match="/nvme/swap: cannot read it"),
    ):
        load_resumable(run_dir, engine, find_resumable(run_dir, deep=False))
    assert caplog.messages == []


def test_a_file_without_tensors_is_checked_too(run_dir, engine, save):
    folder, name = save(1), "optimizer/block-00009.safetensors"
    path, manifest = folder / name, read_manifest(folder)
    written = write_safetensors(path, [], {"format": "pt", "step": "1"})
    files = manifest.files | {name: WrittenFile(path.name, written.nbytes, written.sha256)}
    (folder / "MANIFEST.json").write_bytes(replace(manifest, files=files).encode())
    load_checkpoint(folder, engine)
    flip(path, path.read_bytes().index(b'"pt"') + 1)
    with pytest.raises(StorageError, match=f"block-00009.safetensors: {CHECKSUM}"):
        load_checkpoint(folder, engine)
