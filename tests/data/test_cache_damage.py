"""The cache of tokenised rows: damage is found and mended, it is private, and it is on the disk
before it has its name."""

from __future__ import annotations

import json
import logging
import os
import pwd
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatrain.data.build import AskedSet
from megatrain.data.encoding import RowOptions
from megatrain.data.rows import TokenRows, default_cache
from megatrain.errors import ConfigError

OPTIONS = RowOptions(seq_len=64)
SHARD = {"ids.bin", "mask.bin", "shard.json"}
SHARD |= {f"{name}.npy" for name in ("offsets", "targets", "hashes", "contexts", "joined", "uncut")}
SHARD |= {"images.bin", "image-offsets.npy"}
FILES = {"set.json", *(f"00000/{name}" for name in SHARD)}
ROUNDS = 6  # of some twenty corruptions each
Start = Callable[[], TokenRows]


def row(number: int) -> dict[str, str]:
    return {"prompt": f"what is {number}?", "completion": f"it is {number}"}


@pytest.fixture
def start(write_jsonl, make_tokenizer, cache) -> Start:
    """What a run does at its start: read the rows, or take them from the cache."""
    file, tokenizer = write_jsonl([row(n) for n in range(5)]), make_tokenizer()
    return lambda: AskedSet(file, tokenizer, OPTIONS, cache).rows()


def contents(rows: TokenRows) -> list[object]:
    of_tokens = (rows.ids, rows.mask, rows.offsets)
    arrays = (*of_tokens, rows.targets, rows.hashes, rows.contexts, rows.joined)
    of_sides = (rows.of_rows, rows.mismatches)  # as bytes: a margin may be NaN
    return [
        *(rows.counts, rows.digest, rows.kind),
        *(np.asarray(array).tolist() for array in arrays),
        *(np.asarray(array).tobytes() for array in of_sides),
    ]


def files_in(folder: Path) -> set[str]:
    """Of a set of one shard."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def corrupt(path: Path, draw: random.Random) -> bool:
    """Flip bits, cut, lengthen, overwrite, or remove a file, or put another in its place.

    Returns whether it is another than before.
    """
    before = path.read_bytes()
    data = bytearray(before or b"?")
    place = draw.randrange(len(data))
    match draw.choice(["flip", "flip", "cut", "more", "zeros", "remove", "other", "digit"]):
        case "flip":
            data[place] ^= 1 << draw.randrange(8)
        case "cut":
            del data[place:]
        case "more":
            data += data[:8]
        case "zeros":
            data[place:] = bytes(len(data) - place)
        case "remove":
            path.unlink()
            return True
        case "other":
            data[:] = draw.choice([b"", b"{}", b"[]", b"null", b"[" * 10_000, b'{"own": 1}'])
        case "digit":  # JSON stays JSON, an array stays an array
            data = bytearray(before.replace(b"5", b"4"))
    path.write_bytes(data)
    return data != before


@pytest.mark.usefixtures("a_shard_for_each_row")
def test_every_corruption_is_mended_or_changes_nothing(write_jsonl, make_tokenizer, cache, caplog):
    """Of a set of many shards, most lose a file or have one that is damaged, and every other time
    so is the set's own: those are named, and what is read is as it was."""
    file, tokenizer = write_jsonl([row(n) for n in range(25)]), make_tokenizer()

    def start():
        return AskedSet(file, tokenizer, OPTIONS, cache).rows()

    draw, damages = random.Random(0), 0
    expected = contents(start())
    (folder,) = cache.iterdir()
    places = sorted(path for path in folder.iterdir() if path.is_dir())
    for number in range(ROUNDS):
        files = [draw.choice(sorted(place.iterdir())) for place in draw.sample(places, 20)]
        files += [folder / "set.json"] if number % 2 else []
        changed = [file for file in files if corrupt(file, draw)]
        # a set without its own file is one whose making was interrupted
        there = bool(changed) and (folder / "set.json").exists()
        caplog.clear()
        assert contents(start()) == expected
        said = f"{folder}: the tokenised rows are damaged; they are made again"
        assert caplog.messages == [said] * there
        assert list(cache.iterdir()) == [folder]
        damages += len(changed)
    assert damages > 0.8 * 20 * ROUNDS  # the others changed nothing: a 5 that was not there


def test_an_intact_cache_is_used_without_a_word(start, cache, caplog):
    with caplog.at_level(logging.WARNING):
        start()
        (folder,) = cache.iterdir()
        before = (folder / "00000" / "ids.bin").stat()
        start()
    assert (folder / "00000" / "ids.bin").stat() == before
    assert caplog.text == ""
    assert files_in(folder) == FILES
    about = json.loads((folder / "00000" / "shard.json").read_text())
    assert set(about["blake2b"]) == SHARD - {"shard.json"}
    assert json.loads((folder / "set.json").read_text())["shards"] == [about["own"]]


def test_only_its_owner_can_read_it(start, cache):
    before = os.umask(0)
    try:
        start()
    finally:
        os.umask(before)
    (folder,) = cache.iterdir()
    folders = [folder, folder / "00000"]
    assert {one.stat().st_mode & 0o777 for one in folders} == {0o700}
    assert {(folder / file).stat().st_mode & 0o777 for file in FILES} == {0o600}


def test_every_file_is_on_the_disk_before_the_set_has_its_name(start, cache, monkeypatch):
    synced, fsync, rename = list[str](), os.fsync, os.rename

    def noting_fsync(fd: int) -> None:
        fsync(fd)
        synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)

    def noting_rename(source: str, target: str) -> None:
        rename(source, target)
        synced.append("renamed")

    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(os, "rename", noting_rename)
    start()
    (folder,) = cache.iterdir()
    *files, description, shard, of_set, own, renamed, again, of_cache = synced
    assert {*files, description} == SHARD and description == "shard.json"
    assert (shard, of_set, own, renamed) == ("00000", folder.name, "set.json.new", "renamed")
    assert (again, of_cache) == (folder.name, "cache")


def test_without_a_home_the_cache_needs_a_name(monkeypatch):
    for name in ("MEGATRAIN_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(
        pwd, "getpwuid", {}.__getitem__
    )  # a user id without a name, as in containers
    with pytest.raises(ConfigError, match="set MEGATRAIN_CACHE to a folder"):
        default_cache()
