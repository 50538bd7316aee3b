"""From files to tokenised rows: counts, refusals, cache, holding out, and mutated rows."""

from __future__ import annotations

import json
import os
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from datasets import Dataset

from megatrain.data import sources
from megatrain.data.build import AskedSet, load_data
from megatrain.data.encoding import RowOptions
from megatrain.data.rows import TokenRows, mix64, permutation
from megatrain.errors import DataError, StorageError
from tests.helpers.mutated import SEEDS, mutated_line

OPTIONS = RowOptions(seq_len=64)
SKIP = replace(OPTIONS, on_bad_row="skip")


def pair(number: int, answer: int | str = "") -> dict[str, Any]:
    return {"prompt": f"what is {number}?", "completion": f"it is {number}{answer}"}


def rows_of(data: TokenRows) -> list[tuple[list[int], list[bool]]]:
    return [(ids.tolist(), mask.tolist()) for ids, mask in map(data.row, range(len(data)))]


def test_rows_are_tokenised_in_order(encode, make_tokenizer):
    tokenizer = make_tokenizer()
    data = encode([pair(n) for n in range(600)], OPTIONS, tokenizer)  # more than one batch
    assert len(data) == data.counts.read == 600
    ids, mask = data.row(431)
    assert "what is 431?" in tokenizer.decode(ids)
    assert tokenizer.decode(ids[mask]) == "it is 431<|endoftext|>"
    assert data.lengths[431] == len(ids)
    assert data.target_counts[431] == mask.sum()


@pytest.mark.parametrize("make", [list, tuple, Dataset.from_list])
def test_rows_may_be_given(encode, make_tokenizer, cache, make):
    rows, other = [pair(n) for n in range(20)], [pair(n) for n in range(20, 25)]
    tokenizer = make_tokenizer()
    train, held = load_data(make(rows), make(other), tokenizer, OPTIONS, seed=0, cache=cache)
    assert isinstance(train, TokenRows) and isinstance(held, TokenRows)
    assert rows_of(train) == rows_of(encode(rows, OPTIONS, tokenizer))
    assert rows_of(held) == rows_of(encode(other, OPTIONS, tokenizer))
    share = load_data(make(rows), 0.1, tokenizer, OPTIONS, seed=0, cache=cache)[1]
    assert share is not None and len(share) == 2


@pytest.mark.parametrize("make", [list, Dataset.from_list])
def test_bad_rows_that_are_given_are_named_by_number(make_tokenizer, cache, make):
    given = make([pair(1), {"prompt": "x", "completion": None}, pair(2)])
    kind = type(given).__name__
    problem = rf"^{kind} row 2: field 'completion' is missing \(it is the only bad row of 3; "
    with pytest.raises(DataError, match=problem):
        load_data(given, None, make_tokenizer(), OPTIONS, seed=0, cache=cache)
    data = AskedSet(given, make_tokenizer(), SKIP, cache).rows()
    assert len(data) == 2
    assert data.counts.first_bad == [f"{kind} row 2: field 'completion' is missing"]


@pytest.mark.parametrize("given", [[], Dataset.from_list([])])
def test_nothing_given_is_refused(make_tokenizer, cache, given):
    for train, held in ((given, None), ([pair(1)], given)):
        with pytest.raises(DataError, match=f"{type(given).__name__}: holds no rows"):
            load_data(train, held, make_tokenizer(), OPTIONS, seed=0, cache=cache)


def test_truncation_is_counted_and_rows_left_without_target_are_dropped(encode, make_tokenizer):
    long = "y" * 90
    rows = [pair(1), {"prompt": "x", "completion": long}, {"prompt": long, "completion": "y"}]
    data = encode(rows, OPTIONS, make_tokenizer(None))
    whole = encode(rows, replace(OPTIONS, seq_len=None), make_tokenizer(None))
    assert len(data) == 2
    assert data.counts.truncated == 2
    assert data.counts.truncated_tokens == int((whole.lengths - 64).clip(0).sum())
    assert data.counts.without_target == 1
    assert data.lengths.max() == 64


def test_refusal_names_the_first_bad_row_and_how_many(encode, cache):
    rows = [pair(1), {"prompt": "x"}, 3, pair(2)]
    words = r"rows\.jsonl:2: field 'completion' is missing \(2 rows are bad of 4; .*bad_row: skip"
    with pytest.raises(DataError, match=words):
        encode(rows, OPTIONS)
    assert not [path for path in cache.rglob("*") if path.is_file()]
    data = encode(rows, SKIP)
    assert (len(data), data.counts.bad, data.counts.read) == (2, 2, 4)
    assert data.counts.first_bad[1].endswith("rows.jsonl:3: expected an object, found a number")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "holds no rows"),
        ([1, 2], r":1: expected an object, found a number \(all 2 rows are bad\)"),
        (
            [{"a": 1}],
            r"no known row format has the columns found \(a\); known formats are messages",
        ),
        ([{"input_ids": [1, 2], "labels": [-100, 2]}], "field 'input_ids': token ids are not read"),
        (
            [{"messages": [{"role": "user", "content": "hi"}]}],
            "no token to train on is left in 1 row",
        ),
        (
            [{"prompt": "x" * 90, "completion": "y"}],
            "64 cuts it off .rows cut: 1, dropped: 0",
        ),
    ],
)
def test_sets_with_nothing_to_train_on_are_refused(encode, rows, message):
    with pytest.raises(DataError, match=message):
        encode(rows, SKIP)


def test_ids_outside_the_vocabulary_are_refused_also_from_the_cache(encode):
    largest = encode([pair(1)], OPTIONS).counts.max_token_id
    encode([pair(1)], replace(OPTIONS, vocab_size=largest + 1))
    words = rf"rows\.jsonl:1: token .* has id {largest}, but the model knows {largest} tokens"
    with pytest.raises(DataError, match=words):
        encode([pair(1)], replace(OPTIONS, vocab_size=largest))


def test_a_named_format_and_a_named_column(encode, make_tokenizer):
    rows, tokenizer = [{**pair(1), "text": "hello", "body": "world"}], make_tokenizer()
    named = encode(rows, replace(OPTIONS, format="text"), tokenizer)
    assert tokenizer.decode(named.row(0)[0]) == "hello<|endoftext|>"
    column = encode(rows, replace(OPTIONS, text_field="body"), tokenizer)
    assert tokenizer.decode(column.row(0)[0]) == "world<|endoftext|>"
    with pytest.raises(DataError, match="field 'nothing' is missing"):
        encode(rows, replace(OPTIONS, text_field="nothing"), tokenizer)


def test_columns_of_other_names(encode, make_tokenizer):
    rows = [{"question": "what?", "answer": "that", "id": 1}]
    columns = {"prompt": "question", "completion": "answer"}
    tokenizer, options = make_tokenizer(), replace(OPTIONS, columns=columns)
    ours = encode([{"prompt": "what?", "completion": "that"}], OPTIONS, tokenizer)
    theirs = encode(rows, options, tokenizer)
    assert rows_of(theirs) == rows_of(ours)
    assert theirs.counts.unread == ["id"]
    with pytest.raises(DataError, match=r"data\.columns: {prompt: question}"):
        encode(rows, OPTIONS, tokenizer)
    with pytest.raises(
        DataError, match=r"'answer', which data\.columns\.completion names, is miss"
    ):
        encode([{"question": "what?"}], options, tokenizer)
    with pytest.raises(DataError, match=r"field 'prompt': data\.columns\.prompt names 'question'"):
        encode([{**rows[0], "prompt": "x"}], options, tokenizer)


def test_the_cache_is_used_and_follows_what_it_depends_on(
    write_jsonl, make_tokenizer, cache, monkeypatch
):
    file = write_jsonl([pair(n) for n in range(5)])
    first = AskedSet(file, make_tokenizer(), OPTIONS, cache).rows()
    written = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
    again = AskedSet(file, make_tokenizer(), OPTIONS, cache).rows()
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*")} == written
    assert rows_of(again) == rows_of(first)
    assert isinstance(again.ids, np.memmap)
    AskedSet(file, make_tokenizer(None), OPTIONS, cache).rows()
    AskedSet(file, make_tokenizer(), replace(OPTIONS, train_on="all"), cache).rows()
    write_jsonl([pair(9)])
    assert len(AskedSet(file, make_tokenizer(), OPTIONS, cache).rows()) == 1
    assert len(list(cache.iterdir())) == 4
    before = file.stat()
    file.write_text(file.read_text().replace("9", "8"))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))  # as git, tar and rsync set it
    changed = AskedSet(file, make_tokenizer(), OPTIONS, cache).rows()
    monkeypatch.setattr(sources, "HASHED_WHOLE", 0)  # of a large file both ends
    monkeypatch.setattr(sources, "ENDS", 4)
    assert rows_of(AskedSet(file, make_tokenizer(), OPTIONS, cache).rows()) == rows_of(changed)
    assert rows_of(changed) != rows_of(first) and len(list(cache.iterdir())) == 6


def test_rows_given_in_python_are_named_by_what_is_read_of_them():
    nulls = [{"prompt": "x", "completion": "y", "limit": None}]
    rows, table = [{"prompt": "x", "completion": "y"}], Dataset.from_list(nulls)
    names = [sources.name_of_rows(given) for given in (nulls, rows, table)]
    assert names[0] != names[1] == names[2]


def test_a_cache_that_cannot_be_read_back_is_a_storage_error(
    write_jsonl, make_tokenizer, cache, monkeypatch
):
    def fail(*_: Any, **named: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(np, "memmap", fail)
    with pytest.raises(StorageError, match="cannot be read back after it was written; check the d"):
        AskedSet(write_jsonl([pair(1)]), make_tokenizer(), OPTIONS, cache).rows()


def test_a_cache_that_cannot_be_written_is_a_storage_error(write_jsonl, make_tokenizer, tmp_path):
    (tmp_path / "file").write_text("in the way")
    file, cache = write_jsonl([pair(1)]), tmp_path / "file" / "cache"
    with pytest.raises(StorageError, match="set MEGATRAIN_CACHE to another folder"):
        AskedSet(file, make_tokenizer(), OPTIONS, cache).rows()


def test_shuffles_are_the_same_on_every_machine():
    assert permutation(8, seed=0, epoch=0).tolist() == [4, 5, 7, 1, 2, 3, 6, 0]
    assert sorted(permutation(1000, 5, 2).tolist()) == list(range(1000))
    assert permutation(1000, 5, 2).tolist() != permutation(1000, 5, 3).tolist()
    ranks = [np.argsort(permutation(9999, seed, 0)) for seed in (0, 1, 2, 7)]
    for seed, rows in zip((1, 2, 7), ranks[1:], strict=True):  # not those of 0, some rows further
        assert abs(np.corrcoef(ranks[0][seed:], rows[:-seed])[0, 1]) < 0.04
    assert len(np.unique(mix64(np.arange(10_000, dtype=np.uint64), 7))) == 10_000


@pytest.mark.parametrize("number", range(len(SEEDS)))
@pytest.mark.parametrize("templated", [True, False])
def test_mutated_rows_are_bad_or_trainable_and_never_crash(
    number, templated, make_tokenizer, tmp_path, cache
):
    rng, file = random.Random(number), tmp_path / "mutated.jsonl"
    lines = [mutated_line(SEEDS[number], rng) for _ in range(1000)]
    file.write_bytes(b"\n".join([json.dumps(SEEDS[number]).encode(), *lines]))
    tokenizer = make_tokenizer() if templated else make_tokenizer(None)
    options = replace(SKIP, seq_len=200)
    if not templated and number < 3:
        with pytest.raises(DataError, match="no chat template"):
            AskedSet(file, tokenizer, options, cache).rows()
        return
    data = AskedSet(file, tokenizer, options, cache).rows()
    kept = data.counts.read - data.counts.bad - data.counts.without_target
    assert kept == len(data) or (data.counts.split_texts and kept < len(data))
    assert data.counts.bad > 100
    assert len(data) > 20
    assert data.target_counts.min() >= 1  # no row whose loss is 0 / 0
    assert data.lengths.max() <= 200
    assert not any(mask[0] for _, mask in map(data.row, range(len(data))))
