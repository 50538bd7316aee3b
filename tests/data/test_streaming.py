"""Sets that are trained on while they are tokenised: the order is that of the rule, however many
shards there are, and the shards are those that are made without streaming."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest

from megatrain.data import cache as cached_sets
from megatrain.data import encoding, streaming, workers
from megatrain.data.build import AskedSet
from megatrain.data.encoding import RowOptions
from megatrain.data.loader import Loader
from megatrain.data.rows import Rows, permutation
from megatrain.data.streaming import Stream, load_stream
from megatrain.data.workers import forked
from megatrain.errors import DataError, MegaTrainError
from megatrain.world import World
from tests.data.test_shards import bytes_in, shard_folders
from tests.helpers.commands import conversation, wait_for
from tests.helpers.files import flip

ROWS, OF_SHARD, SEED = 100, 20, 3
Opened = tuple[Rows, "Rows | None", Stream]
Open = Callable[..., Opened]


def row(number: int) -> dict[str, Any]:
    return conversation(f"what is {number}?", f"it is {number}" + " and more" * (number % 7))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "BATCH_ROWS", 5)
    monkeypatch.setattr(cached_sets, "SHARD_ROWS", OF_SHARD)
    monkeypatch.setattr(streaming, "LOOKED_EVERY_S", 0.01)


@pytest.fixture
def tokenizer(make_tokenizer: Any) -> Any:
    return make_tokenizer()


@pytest.fixture
def options() -> RowOptions:
    return RowOptions(seq_len=60)


@pytest.fixture
def file(write_jsonl: Any) -> Path:
    return Path(write_jsonl([row(number) for number in range(ROWS)]))


@pytest.fixture
def open_in(file: Path, tokenizer: Any, options: RowOptions, tmp_path: Path) -> Open:
    """open_in("name", held_out=5): the file as a stream, in a cache of this name."""

    def open_(name: str, held_out: Any = None, given: Any = file, **more: Any) -> Opened:
        more = {"seed": SEED, "cache": tmp_path / name, **more}
        return load_stream(given, held_out, tokenizer, more.pop("options", options), **more)

    return open_


@pytest.fixture
def whole_cache(file: Path, tokenizer: Any, options: RowOptions, tmp_path: Path) -> Path:
    """The set as it is made without streaming."""
    AskedSet(file, tokenizer, options, tmp_path / "whole").rows()
    return tmp_path / "whole"


def loader_of(opened: Opened, **more: Any) -> Loader:
    rows, _, windows = opened
    size = {} if "tokens_per_step" in more else {"rows_per_step": 7}
    given = {"micro_batch_tokens": 200, "pad_id": 0, "seed": SEED, "epochs": None, "max_steps": 40}
    return Loader(rows, windows=windows, **{**given, **size, **more})


def texts(step: Any, tokenizer: Any) -> set[int]:
    """The numbers of a step's rows."""
    found = [tokenizer.decode(ids) for micro in step.micro_batches for ids in micro["input_ids"]]
    return {int(text.partition("what is ")[2].partition("?")[0]) for text in found}


def steps_of(loader: Loader) -> list[list[list[int]]]:
    return [[micro["input_ids"].tolist() for micro in step.micro_batches] for step in loader]


def test_the_order_is_that_of_the_rule(open_in, tokenizer):
    """Windows in order, each shuffled by (seed, epoch, window); steps go on in the next window, and
    end with an epoch."""
    expected = []
    for epoch in range(3):
        order = list(
            chain.from_iterable(
                window * OF_SHARD + permutation(OF_SHARD, SEED, epoch, window)
                for window in range(ROWS // OF_SHARD)
            )
        )
        expected += [set(order[start : start + 7]) for start in range(0, ROWS, 7)]
    found = list(loader_of(open_in("cache")))
    assert [texts(step, tokenizer) for step in found] == expected[:40]
    assert [found[at].epoch for at in (0, 14, 15, 29, 39)] == [0, 1, 1, 2, 2]
    assert permutation(9, 1, 2, 3).tolist() != permutation(9, 1, 2, 4).tolist()


def test_steps_by_tokens_are_full_across_windows(open_in):
    loader = loader_of(open_in("cache"), tokens_per_step=300)
    steps, longest = list(loader), int(loader.rows.lengths.max())
    short = [step.tokens for step in steps if step.tokens < 300 - longest]
    assert len(short) <= steps[-1].epoch, "only an epoch's last step is"
    assert max(step.tokens for step in steps) <= 300


@pytest.mark.slow
@pytest.mark.parametrize("there", [1, ROWS // OF_SHARD])
def test_the_order_does_not_depend_on_the_shards_that_are_there(
    open_in, whole_cache, tmp_path, there
):
    shutil.copytree(whole_cache, tmp_path / "some")
    folders = shard_folders(tmp_path / "some")
    for folder in folders[there:]:
        shutil.rmtree(folder)
    if there < len(folders):
        (folders[0].parent / "set.json").unlink()
    assert steps_of(loader_of(open_in("some"))) == steps_of(loader_of(open_in("none")))
    for name in ("some", "none"):
        assert bytes_in(tmp_path / name) == bytes_in(whole_cache)


@pytest.mark.slow
def test_a_set_of_one_window_has_the_order_that_it_has_without_streaming(
    open_in, file, tokenizer, options, monkeypatch, tmp_path
):
    monkeypatch.setattr(cached_sets, "SHARD_ROWS", ROWS)
    rows = AskedSet(file, tokenizer, options, tmp_path / "whole").rows()
    loader = loader_of(open_in("one"))
    assert steps_of(loader) == steps_of(loader_of((rows, None, None)))  # type: ignore[arg-type]
    assert loader.used() == "2 epochs of all 100 rows of 1 window, and 70 rows of 1 window"


@pytest.mark.slow
@pytest.mark.parametrize("stop", [0, 3, 15])
def test_a_saved_position_gives_the_identical_rest(open_in, stop):
    whole = steps_of(loader_of(open_in("cache")))
    loader = loader_of(open_in("cache"))
    for _ in islice(loader, stop):
        pass
    saved = json.loads(json.dumps(loader.position()))
    resumed = loader_of(open_in("another"))
    resumed.restore(saved)
    assert steps_of(resumed) == whole[stop:]


@pytest.mark.slow
def test_changed_data_is_found_if_it_was_trained_on(open_in, write_jsonl):
    loader = loader_of(open_in("cache"))
    for _ in islice(loader, 5):
        pass
    assert loader.used().startswith("35 rows of 2")
    rows = [row(number) for number in range(ROWS)]
    longer = write_jsonl([*rows[:40], *rows[60:], *rows], "longer.jsonl")
    loader_of(open_in("cache", given=longer)).restore(loader.position())
    rows[39] = row(1000)
    changed = loader_of(open_in("cache", given=write_jsonl(rows, "changed.jsonl")))
    with pytest.raises(DataError, match="rows are not those of the checkpoint"):
        changed.restore(loader.position())


def test_a_number_of_rows_is_held_out_of_the_first_window(open_in, write_jsonl):
    """Later rows that are equal to them, or answer the same, are not trained on."""
    copies = [row(number) for number in range(OF_SHARD)]
    others = [conversation(f"what is {number}?", "who knows") for number in range(OF_SHARD)]
    file = write_jsonl([*copies, *copies, *others], "copies.jsonl")
    rows, held, windows = open_in("cache", held_out=4, given=file)
    assert held is not None
    sizes = [len(window) for n in range(3) if (window := windows.window(n)) is not None]
    assert (len(held), sizes) == (4, [16, 16, 16])
    assert len(rows) == 16 and windows.window(3) is None


def test_rows_of_another_source_are_held_out(open_in, write_jsonl):
    other = write_jsonl([row(number) for number in (*range(3), *range(500, 505))], "held.jsonl")
    rows, held, _ = open_in("cache", held_out=other)
    assert held is not None
    assert (len(rows), len(held)) == (OF_SHARD, 8)
    assert "3 of 8 held-out rows are trained on as well" in " ".join(rows.counts.warned)


def test_each_window_is_packed_by_itself(open_in, file, tokenizer, tmp_path, write_jsonl):
    documents = write_jsonl([{"text": f"number {n} " * (n % 9 + 1)} for n in range(ROWS)])
    options = RowOptions(seq_len=None, train_on="all")
    whole = AskedSet(documents, tokenizer, options, tmp_path / "whole").rows()
    opened = open_in("cache", given=documents, options=options, pack_to=32)
    tokens = 0
    for step in loader_of(opened, max_steps=200):
        tokens += step.tokens
        assert max(step.lengths) <= 32
        if step.epoch:
            break
    windows = ROWS // OF_SHARD
    assert 0 <= int(whole.lengths.sum()) - tokens <= windows, "one token is no block"


def test_a_bad_row_ends_the_run_where_its_window_is_needed(open_in, write_jsonl, tmp_path):
    rows = [row(number) for number in range(ROWS)]
    rows[52] = {"prompt": "and?"}
    batches = iter(loader_of(open_in("cache", given=write_jsonl(rows, "bad.jsonl"))))
    assert len(list(islice(batches, 5))) == 5, "of two windows"
    with pytest.raises(DataError, match=r"bad\.jsonl:53: .*\(mend them, or set data.on_bad"):
        next(batches)
    assert len(shard_folders(tmp_path / "cache")) == 2


def test_bad_rows_of_later_windows_are_skipped_and_told_of(open_in, options, write_jsonl, caplog):
    rows = [row(number) for number in range(ROWS)]
    rows[52] = {"prompt": "and?"}
    skipping = replace(options, on_bad_row="skip")
    opened = open_in("cache", given=write_jsonl(rows, "bad.jsonl"), options=skipping)
    for step in loader_of(opened):
        if step.epoch:
            break
    assert "1 of the next 20 rows of the source are bad and skipped; the first: " in caplog.text
    assert caplog.text.count("bad.jsonl:53") == 1


@pytest.mark.slow
def test_a_writer_that_is_killed_is_told_of(open_in, monkeypatch, tmp_path):
    write = cached_sets._write_shard

    def killed(making: Any, *rest: Any) -> None:
        if len(making.shards) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        write(making, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(cached_sets, "_write_shard", killed)
        loader = loader_of(open_in("cache"))
        with pytest.raises(MegaTrainError, match="process that tokenises rows was ended from outs"):
            list(loader)
    assert len(steps_of(loader_of(open_in("cache")))) == 40


@pytest.mark.slow
def test_a_rank_that_misses_a_shard_makes_it(open_in, monkeypatch, tmp_path):
    """As long as there is none to miss it makes nothing."""

    def never(*_: Any) -> None:
        time.sleep(60)

    write = cached_sets._write_shard
    with monkeypatch.context() as patch:
        patch.setattr(
            cached_sets, "_write_shard", lambda *at: (never if at[0].shards else write)(*at)
        )
        first = open_in("cache")
    second = open_in("cache", at_once=False)
    first[2].close()
    assert len(shard_folders(tmp_path / "cache")) == 1
    assert steps_of(loader_of(second)) == steps_of(loader_of(open_in("another")))


def test_who_leaves_does_not_wait_for_a_window(open_in, monkeypatch):
    write = cached_sets._write_shard

    def slow(making: Any, *rest: Any) -> None:
        time.sleep(10 if making.shards else 0)
        write(making, *rest)

    monkeypatch.setattr(cached_sets, "_write_shard", slow)
    batches, began = loader_of(open_in("cache")).batches(), time.monotonic()
    assert len([*islice(batches, 2)]) == 2, "and the next goes on in the second window"
    batches.close()  # type: ignore[attr-defined]
    assert time.monotonic() - began < 9


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_step_has_the_same_rows_for_any_number_of_ranks(open_in, tokenizer, ranks):
    opened = open_in("cache")
    alone = [*loader_of(opened)]
    of_ranks = [[*loader_of(opened, world=World(rank, ranks))] for rank in range(ranks)]
    for whole, *parts in zip(alone, *of_ranks, strict=True):
        rows = [texts(part, tokenizer) for part in parts]
        assert sum(map(len, rows)) == len(set().union(*rows)) == len(texts(whole, tokenizer))
        assert set().union(*rows) == texts(whole, tokenizer)
        assert {(part.lengths, part.after) for part in parts} == {(whole.lengths, whole.after)}


@pytest.mark.slow
def test_a_damaged_shard_is_mended_while_the_others_are_used(open_in, whole_cache, tmp_path):
    expected = steps_of(loader_of(open_in("other")))
    shutil.copytree(whole_cache, tmp_path / "damaged")
    flip(shard_folders(tmp_path / "damaged")[2] / "ids.bin")
    opened = open_in("damaged")
    assert steps_of(loader_of(opened)) == expected

    def is_whole() -> bool:
        with suppress(FileNotFoundError):  # its writer may still rename the last file
            return bytes_in(tmp_path / "damaged") == bytes_in(whole_cache)
        return False

    wait_for(is_whole)


@pytest.mark.slow
def test_the_writer_ends_with_its_stream(open_in, monkeypatch):
    children = list[int]()

    def noted(work: Callable[[], object]) -> int:
        children.append(forked(work))
        return children[-1]

    monkeypatch.setattr(workers, "forked", noted)
    opened = open_in("cache")
    opened[2].close()
    with pytest.raises(ProcessLookupError):
        os.kill(children[0], 0)
    del opened
    open_in("again")
    with pytest.raises(ProcessLookupError):
        os.kill(children[1], 0)


def test_the_first_window_says_so(open_in):
    rows, _, _ = open_in("cache")
    assert rows.counts.choices == [
        "data.streaming: what is said of rows, and the lengths that the plan goes by, are those of "
        "the first 20 rows of the source"
    ]
    assert rows.counts.read == OF_SHARD and rows.counts.tokens > 0


def test_a_set_without_rows_is_refused(open_in, write_jsonl):
    with pytest.raises(DataError, match="holds no rows"):
        open_in("cache", given=write_jsonl([], "none.jsonl"))
    silent = [{"messages": row(number)["messages"][:1]} for number in range(ROWS)]
    with pytest.raises(DataError, match="no token to train on is left in 20 rows"):
        open_in("cache", given=write_jsonl(silent, "no.jsonl"))


@pytest.mark.slow
def test_a_set_of_the_hub_is_read_as_a_stream(open_in, file, monkeypatch, whole_cache, tmp_path):
    import datasets

    load = datasets.load_dataset_builder
    asked = []

    def builder(name: str, config: str | None) -> Any:
        asked.append((name, config))
        return load("json", data_files={"train": str(file)}, cache_dir=str(tmp_path / "hub"))

    monkeypatch.setattr(datasets, "load_dataset_builder", builder)
    monkeypatch.setattr(datasets, "load_dataset", None)
    rows, _, windows = open_in("cache", given="owner/name:some:train")
    assert asked == [("owner/name", "some")]
    assert not list((tmp_path / "hub").rglob("*.arrow"))
    assert steps_of(loader_of((rows, None, windows))) == steps_of(loader_of(open_in("file")))
