"""Shards of the token cache: the same rows whatever the shards and processes, and nothing but the
shard at hand is lost with a kill, a full disk or a flipped bit."""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.campaign import calls
from megatrain.data import cache as cached_sets
from megatrain.data import encoding, workers
from megatrain.data.build import AskedSet
from megatrain.data.cache import RowWriter
from megatrain.data.chat import Marked
from megatrain.data.encoding import Encoder, RowOptions
from megatrain.data.rows import TokenRows
from megatrain.data.samples import JUDGED, PAIRS, PLAIN
from megatrain.data.sources import Part
from megatrain.errors import DataError, StorageError
from megatrain.heartbeat import ending
from tests.data.test_cache_damage import contents
from tests.helpers.files import as_an_ordinary_user, flip
from tests.helpers.once import rows_are_encoded_in_workers

ROWS, BATCH, OF_SHARD = 100, 5, 20
KILLS = 6
Encode = Callable[..., TokenRows]
Bytes = dict[str, bytes]


def row(kind: str, number: int) -> dict[str, Any]:
    """A row; every ninth is bad, and others have turns and columns that are told of."""
    if number % 9 == 4:
        return {"prompt": f"what is {number}?"}
    said = f"it is {number}" + " and more" * (number % 23)
    if kind == PAIRS:
        answers = {"chosen": said, "rejected": f"no {number}"}
        margin = {"margin": number / 7} if number % 3 else {}
        return {"prompt": f"what is {number}?", **answers, **margin}
    if kind == JUDGED:
        return {"prompt": f"what is {number}?", "completion": said, "label": number % 2 == 0}
    turns = [{"role": "user", "content": f"what is {number}?", f"mood {number % 11}": "good"}]
    return {"messages": [*turns, {"role": "assistant", "content": said}], f"id {number % 60}": 1}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small batches and shards, and processes from the first batch on."""
    monkeypatch.setattr(encoding, "BATCH_ROWS", BATCH)
    monkeypatch.setattr(cached_sets, "SHARD_ROWS", OF_SHARD)
    monkeypatch.setattr(workers, "ALONE_ITEMS", 0)


of_every_kind = pytest.mark.parametrize("kind", [PLAIN, PAIRS, JUDGED])


@pytest.fixture
def kind() -> str:
    """Judged rows have every file that there is, and each shard goes on from the one before."""
    return JUDGED


@pytest.fixture
def encode_into(write_jsonl: Any, make_tokenizer: Any, tmp_path: Path, kind: str) -> Encode:
    """encode_into("name", processes=2): the same rows, in a cache of this name."""
    file, tokenizer = write_jsonl([row(kind, number) for number in range(ROWS)]), make_tokenizer()
    options = RowOptions(seq_len=40, kind=kind, on_bad_row="skip")

    def encode(name: str, **more: Any) -> TokenRows:
        return AskedSet(file, tokenizer, replace(options, **more), tmp_path / name).rows()

    return encode


def bytes_in(folder: Path) -> Bytes:
    """Of every file below the folder, by its path."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def shard_folders(cache: Path) -> list[Path]:
    (folder,) = cache.iterdir()
    return sorted(path for path in folder.iterdir() if path.is_dir())


# -- the same rows -------------------------------------------------------------------------------


@of_every_kind
def test_rows_and_counts_do_not_depend_on_shards(encode_into, monkeypatch, tmp_path):
    several = encode_into("several")
    assert len(shard_folders(tmp_path / "several")) == ROWS // OF_SHARD
    monkeypatch.setattr(cached_sets, "SHARD_ROWS", ROWS)
    one = encode_into("one")
    assert len(shard_folders(tmp_path / "one")) == 1
    assert contents(several) == contents(one)
    assert one.counts.bad == 11 and len(one.counts.first_bad) == 5
    assert one.counts.longest > 40 and one.counts.truncated > 0


def test_every_byte_is_the_same_in_several_processes(encode_into, tmp_path):
    assert contents(encode_into("one")) == contents(encode_into("more", processes=3))
    assert bytes_in(tmp_path / "one") == bytes_in(tmp_path / "more")


def test_a_shard_ends_by_its_bytes_too(encode_into, monkeypatch, tmp_path):
    rows = encode_into("rows")
    monkeypatch.setattr(cached_sets, "SHARD_LIMIT_BYTES", 2000)
    assert contents(encode_into("bytes")) == contents(rows)
    assert len(shard_folders(tmp_path / "bytes")) > ROWS // OF_SHARD


@pytest.mark.parametrize("processes", [1, 2])
def test_bad_rows_are_refused_in_the_same_words(encode_into, monkeypatch, tmp_path, processes):
    words = r"rows\.jsonl:5: field '\w+' is missing: .*\(11 rows are bad of 100; mend them"
    words = words.replace(": .*", ".*")
    for size in (OF_SHARD, BATCH):  # of which the first shard is finished before
        monkeypatch.setattr(cached_sets, "SHARD_ROWS", size)
        with pytest.raises(DataError, match=words):
            encode_into("refused", processes=processes, on_bad_row="refuse")
        assert not bytes_in(tmp_path / "refused")


@pytest.mark.parametrize("processes", [1, 2])
def test_files_keep_the_format_of_their_first_row_in_every_batch(
    make_tokenizer, write_jsonl, tmp_path, processes
):
    """A later row that has also the columns of another format is read by the file's."""
    first = [{"prompt": f"a {n}", "completion": "b"} for n in range(40)]
    turns = [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]
    second = [{"messages": turns}] * 40
    both = [{**one, **two} for one, two in zip(first, second, strict=True)]
    files = write_jsonl([*first, *both], "a.jsonl"), write_jsonl([*second, *both], "b.jsonl")
    parts = [Part(str(file)) for file in files]
    options = RowOptions(seq_len=40, processes=processes)
    rows = AskedSet(parts, make_tokenizer(), options, tmp_path / "cache").rows()
    assert rows.counts.parts == [80, 80]
    assert set(rows.counts.wrapped.values()) == {80}
    assert set(rows.counts.unread) == {"messages", "prompt", "completion"}


def test_the_first_judged_rows_mismatch_may_come_late(make_tokenizer, write_jsonl, tmp_path):
    """Its shard waits for the second row, which is in another batch."""
    good = [row(JUDGED, number) for number in (0, 1, 2)]
    rows = [good[0], *[{"prompt": "x"}] * 70, good[1], *[{"prompt": "x"}] * 70, good[2]]
    file, options = write_jsonl(rows), RowOptions(40, kind=JUDGED, on_bad_row="skip")
    found = AskedSet(file, make_tokenizer(), options, tmp_path / "cache").rows()
    alone = write_jsonl(good, "alone.jsonl")
    assert found.digest == AskedSet(alone, make_tokenizer(), options, tmp_path / "1").rows().digest
    assert (len(found), len(shard_folders(tmp_path / "cache"))) == (3, 5)


def test_small_sets_start_one_worker(encode_into, monkeypatch):
    monkeypatch.setattr(workers, "ALONE_ITEMS", ROWS // BATCH)
    started, fork = list[int](), workers.forked

    def counted(serve: Callable[[], object]) -> int:
        started.append(fork(serve))
        return started[-1]

    monkeypatch.setattr(workers, "forked", counted)
    with rows_are_encoded_in_workers():
        encode_into("alone", processes=8)
    assert len(started) == 1


# -- what is lost --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_killed_at_random_moments_the_set_is_the_same_byte_for_byte(
    encode_into, tmp_path, processes
):
    encode_into("whole")
    draw, cache, kept = random.Random(processes), tmp_path / "killed", 0

    def act() -> None:
        encode_into("killed", processes=processes)

    kills = 0
    for _ in range(KILLS):
        kills += calls.killed_before(draw.randrange(5, 120), act)
        now = len([path for path in cache.glob("*/*/shard.json") if path.stat().st_size])
        assert now >= kept, "a finished shard is never lost"
        kept = now
    assert kills > 1 and kept
    act()
    assert bytes_in(cache) == bytes_in(tmp_path / "whole")
    assert not multiprocessing.active_children()


def test_what_is_there_is_not_tokenised_again(encode_into, monkeypatch, tmp_path):
    rows = []
    encode = Encoder.encode

    def counting(encoder: Encoder, texts: Sequence[Marked], lossy: set[int]) -> list[Any]:
        rows.append(len(texts))
        if sum(rows) > 70:
            raise KeyboardInterrupt
        return encode(encoder, texts, lossy)

    monkeypatch.setattr(Encoder, "encode", counting)
    with pytest.raises(KeyboardInterrupt):
        encode_into("cache")
    assert len(shard_folders(tmp_path / "cache")) == 3
    rows[:] = [-1000]
    encode_into("cache")
    assert sum(rows) + 1000 == (ROWS - 3 * OF_SHARD) * 9 // 10, "every ninth row is bad"
    assert contents(encode_into("cache")) == contents(encode_into("whole"))


@pytest.mark.parametrize("bad", [(1,), (0, 3), (1, 2, 4)])
def test_a_flipped_bit_costs_its_shard_and_those_behind_it(
    encode_into, monkeypatch, tmp_path, caplog, bad
):
    before = contents(encode_into("cache"))
    folders, whole = shard_folders(tmp_path / "cache"), bytes_in(tmp_path / "cache")
    for number in bad:
        flip(folders[number] / random.Random(number).choice(["ids.bin", "hashes.npy"]))
    made = list[int]()
    new_shard = cached_sets.Making.new_shard

    def noted(making: cached_sets.Making) -> AbstractContextManager[RowWriter]:
        made.append(len(making.shards))
        return new_shard(making)

    monkeypatch.setattr(cached_sets.Making, "new_shard", noted)
    assert contents(encode_into("cache")) == before
    assert made == list(range(bad[0], len(folders)))
    said = f"{folders[0].parent}: the tokenised rows are damaged; they are made again"
    assert caplog.messages == [said]
    assert bytes_in(tmp_path / "cache") == whole


def test_a_lost_list_of_shards_costs_no_shard(encode_into, monkeypatch, tmp_path):
    before = contents(encode_into("cache"))
    (folder,) = (tmp_path / "cache").iterdir()
    (folder / "set.json").rename(folder / "set.json.new")  # as a kill leaves it
    monkeypatch.setattr(Encoder, "encode", interrupted)
    assert contents(encode_into("cache")) == before


def test_a_shard_of_another_place_is_made_anew(encode_into, tmp_path):
    before = contents(encode_into("cache"))
    folders, whole = shard_folders(tmp_path / "cache"), bytes_in(tmp_path / "cache")
    folders[1].rename(folders[1].with_name("away"))
    folders[3].rename(folders[1])
    folders[1].with_name("away").rename(folders[3])
    assert contents(encode_into("cache")) == before
    assert bytes_in(tmp_path / "cache") == whole


@pytest.mark.parametrize("processes", [1, 2])
def test_a_full_disk_costs_the_shard_at_hand(encode_into, monkeypatch, tmp_path, processes):
    monkeypatch.setattr(cached_sets, "SHARD_LIMIT_BYTES", 1500)
    encode_into("whole")
    fsync, calls_left = os.fsync, iter(range(30))

    def full(fd: int) -> None:
        if next(calls_left, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StorageError, match=r"tokenised rows here: No space left"):
            encode_into("full", processes=processes)
    assert shard_folders(tmp_path / "full")
    assert all((shard / "shard.json").exists() for shard in shard_folders(tmp_path / "full"))
    encode_into("full", processes=processes)
    assert bytes_in(tmp_path / "full") == bytes_in(tmp_path / "whole")


def test_a_read_only_cache_is_read_and_not_completed(encode_into, tmp_path):
    rows = encode_into("cache")
    (folder,) = (tmp_path / "cache").iterdir()
    folder.chmod(0o500)
    with as_an_ordinary_user():
        assert contents(encode_into("cache")) == contents(rows)
        flip(folder / "00002" / "mask.bin")
        with pytest.raises(StorageError, match="set MEGATRAIN_CACHE to another folder"):
            encode_into("cache")
    folder.chmod(0o700)
    assert contents(encode_into("cache")) == contents(rows)


# -- several at once -----------------------------------------------------------------------------


@pytest.mark.slow
def test_several_processes_make_one_set(encode_into, tmp_path):
    encode_into("whole")
    children = []
    for _ in range(3):
        child = os.fork()
        if child == 0:
            try:
                encode_into("shared")
                os._exit(0)
            finally:
                os._exit(1)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    assert bytes_in(tmp_path / "shared") == bytes_in(tmp_path / "whole")


def test_a_set_that_another_process_made_meanwhile_is_used(encode_into, monkeypatch):
    before = contents(encode_into("cache"))
    first, look = iter([None]), cached_sets.cached_set  # it is not there yet when it is looked for
    monkeypatch.setattr("megatrain.data.build.cached_set", lambda at: next(first, look(at)))
    monkeypatch.setattr("megatrain.data.build.make_shards", None)  # it would be made again
    assert contents(encode_into("cache")) == before


def test_who_waits_may_be_stopped(encode_into, write_jsonl, make_tokenizer, tmp_path, caplog):
    encode_into("cache")
    (folder,) = (tmp_path / "cache").iterdir()
    with (
        cached_sets.making_set(folder),
        caplog.at_level(logging.INFO),
        pytest.raises(KeyboardInterrupt),
        ending(interrupted),
        cached_sets.making_set(folder),
    ):
        raise AssertionError("it is made twice at once")
    assert caplog.text.count("another process makes these rows; waiting for it") == 1


def interrupted(*_: Any, **named: Any) -> None:
    raise KeyboardInterrupt
