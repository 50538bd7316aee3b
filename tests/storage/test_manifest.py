"""Every damaged byte is found, and files of two steps are never read as one."""

from __future__ import annotations

import json
import logging
import random
import re
import shutil

import pytest
import torch
from safetensors.torch import save_file

from megatrain.errors import StorageError
from megatrain.storage.checkpoint import find_resumable, load_checkpoint, write_final
from megatrain.storage.export import export
from megatrain.storage.hashed_file import WrittenFile
from megatrain.storage.manifest import verify_checkpoint
from megatrain.storage.run_folder import checkpoints
from tests.helpers.files import as_an_ordinary_user, flip, forge, names


def damaged(draw: random.Random, files: dict[str, bytes]) -> tuple[str, str, bytes | None]:
    """A way to damage a file: (name, kind of damage, the bytes left or None for no file)."""
    name = draw.choice(sorted(files))
    data = files[name]
    position = draw.randrange(len(data))
    flipped, zeroed = bytearray(data), bytearray(data)
    flipped[position] ^= 1 << draw.randrange(8)
    zeroed[position : position + 512] = bytes(len(data[position : position + 512]))
    kinds = {
        "flipped": bytes(flipped),
        "truncated": data[:position],
        "extended": data + b"\0",
        "zeroed": bytes(zeroed),
        "removed": None,
        "swapped": files[draw.choice(sorted(files))],
    }
    what = draw.choices(list(kinds), weights=[8, 2, 1, 2, 1, 1])[0]
    return (name, what, kinds[what]) if kinds[what] != data else damaged(draw, files)


def test_every_damage_is_found_and_the_file_is_named(run_dir, engine, save):
    folder = save(1)
    paths = [path for path in folder.rglob("*") if path.is_file()]
    files = {str(path.relative_to(folder)): path.read_bytes() for path in paths}
    draw = random.Random(1)
    for _ in range(200):  # `make campaign` tries thousands
        name, what, data = damaged(draw, files)
        path, of_manifest = folder / name, name == "MANIFEST.json"
        if data is None:
            path.unlink()
        else:
            path.write_bytes(data)
        for look in (verify_checkpoint, lambda folder: load_checkpoint(folder, engine)):
            with pytest.raises(StorageError) as caught:
                look(folder)
            words = str(caught.value)
            assert name in words or (of_manifest and what == "removed"), (name, what)
            # wherever the damage is: a header that it spoils is not of another step or format
            if what in ("flipped", "zeroed"):
                assert "checksum" in words or of_manifest, words
        path.write_bytes(files[name])
    verify_checkpoint(folder)


def test_files_of_two_steps_are_refused_even_with_matching_hashes(run_dir, engine, save):
    for file in ["model.safetensors", "optimizer/block-00002.safetensors", "state.json"]:
        save(1, 2)
        shutil.copyfile(run_dir / "checkpoint-1" / file, run_dir / "checkpoint-2" / file)
        forge(run_dir / "checkpoint-2")
        with pytest.raises(StorageError, match=rf"{file}: is of step 1"):
            load_checkpoint(run_dir / "checkpoint-2", engine)


def test_a_manifest_cannot_name_files_outside(run_dir, engine, save):
    folder = save(1)
    forge(folder, files={"../../secret": WrittenFile("../../secret", 1, "")})
    with pytest.raises(StorageError, match="outside the checkpoint"):
        verify_checkpoint(folder)


def test_a_manifest_of_another_checkpoint_is_damage(run_dir, engine, save):
    newer = save(6, 9)
    shutil.copyfile(run_dir / "checkpoint-6" / "MANIFEST.json", newer / "MANIFEST.json")
    found = find_resumable(run_dir)
    assert found.path == run_dir / "checkpoint-6"
    assert "checkpoint-9/MANIFEST.json: is of step 6, not of this folder" in found.warnings[0]


def test_a_later_format_is_refused_as_such(run_dir, engine, save):
    path = save(1) / "MANIFEST.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 3}))
    with pytest.raises(StorageError, match="has format 3 and this release reads 2"):
        verify_checkpoint(path.parent)


def test_a_number_that_is_none_is_damage_and_the_next_checkpoint_is_taken(run_dir, engine, save):
    path = save(1, 2) / "MANIFEST.json"
    intact = path.read_text()
    for key in ("bytes", "step", "sequence"):
        for number in ("Infinity", "NaN", "1e999", "-1e400", '"x"', "null", "[]"):
            path.write_text(re.sub(rf'"{key}": \d+', f'"{key}": {number}', intact, count=1))
            found = find_resumable(run_dir)
            assert found.path == run_dir / "checkpoint-1", (key, number)
            (warning,) = found.warnings
            assert "checkpoint-2/MANIFEST.json: is damaged" in warning


@pytest.mark.parametrize("mode", [0o000, 0o400])
@pytest.mark.parametrize("what", ["checkpoint-2", "checkpoint-2/optimizer", "checkpoint-1"])
def test_what_cannot_be_read_is_damaged(run_dir, engine, save, what, mode):
    save(1, 2)
    unreadable = run_dir / what
    unreadable.chmod(mode)
    with as_an_ordinary_user():
        found = find_resumable(run_dir)
    intact = {"checkpoint-1": "checkpoint-2"}.get(what, "checkpoint-1")
    assert found.path == run_dir / intact
    assert str(unreadable) in found.warnings[0]
    with as_an_ordinary_user():
        save(3, keep=1)
    assert {path.name for path in checkpoints(run_dir)} == {"checkpoint-3"}


STRAYS = ["pytorch_model.bin", "modeling_evil.py", "adapter_config.json", "x/y.json", ".hidden"]


def test_stray_files_are_named_and_not_exported(run_dir, engine, save, tmp_path, caplog):
    folder = save(1)
    for name in STRAYS:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
    with caplog.at_level(logging.WARNING, logger="megatrain"):
        load_checkpoint(folder, engine)
        out = export(run_dir, tmp_path / "out")
    for name in STRAYS:
        assert sum(str(folder / name) in message for message in caplog.messages) == 2, name
    assert names(out) == {"config.json", "model.safetensors"}


def test_a_stray_weight_file_is_refused(run_dir, engine, save):
    folder = save(1)
    save_file({"a": torch.ones(1)}, folder / "model-00001-of-00002.safetensors")
    with pytest.raises(StorageError, match=r"model-00001-of-00002\.safetensors: does not belong"):
        verify_checkpoint(folder)


def test_a_damaged_checkpoint_gives_way_to_the_one_before_with_a_warning(run_dir, engine, save):
    save(1, 2, 3)
    (run_dir / "checkpoint-3" / "MANIFEST.json").unlink()
    flip(run_dir / "checkpoint-2" / "optimizer" / "block-00000.safetensors")
    found = find_resumable(run_dir)
    assert found.path == run_dir / "checkpoint-1"
    assert len(found.warnings) == 2
    assert "block-00000.safetensors: does not match its checksum" in " ".join(found.warnings)


def test_final_is_resumed_from_when_nothing_else_is_left(run_dir, engine, save):
    path = save(1)
    write_final(run_dir, full=True)
    shutil.rmtree(path)
    assert find_resumable(run_dir).path == run_dir / "final"
