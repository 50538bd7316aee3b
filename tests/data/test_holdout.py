"""What is held out: a reproducible choice, no copy and no question on both sides, and warnings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megatrain.data.build import hold_out, load_data
from megatrain.data.encoding import RowOptions
from megatrain.data.rows import TokenRows
from megatrain.data.show import describe, warnings
from megatrain.errors import DataError
from tests.data.test_build import pair, rows_of

OPTIONS = RowOptions(seq_len=64)


@pytest.mark.parametrize(("share", "expected"), [(0.1, 20), (7, 7), (0.0001, 1)])
def test_held_out_rows_are_never_trained(write_jsonl, make_tokenizer, cache, share, expected):
    file = write_jsonl([pair(n) for n in range(200)])

    def loaded(seed: int) -> tuple[TokenRows, TokenRows]:
        train, held = load_data(file, share, make_tokenizer(), OPTIONS, seed=seed, cache=cache)
        assert isinstance(train, TokenRows) and isinstance(held, TokenRows)
        return train, held

    train, held = loaded(seed=0)
    assert (len(train), len(held)) == (200 - expected, expected)
    assert not {str(row) for row in rows_of(train)} & {str(row) for row in rows_of(held)}
    assert loaded(seed=0)[1].digest == held.digest
    assert {loaded(seed=seed)[1].digest for seed in range(1, 4)} != {held.digest}


def test_copies_stay_on_one_side(encode):
    train, held = hold_out(encode([pair(n % 40) for n in range(120)], OPTIONS), 20, seed=3)
    assert len(held) == 18  # whole triples
    assert not set(train.hashes[train.chosen].tolist()) & set(held.hashes[held.chosen].tolist())


def test_what_cannot_be_held_out_is_refused(encode):
    data = encode([pair(1)] * 4, OPTIONS)
    for share in (4, 9, -1, 0.999):
        with pytest.raises(DataError, match=r"data\.eval"):
            hold_out(data, share, seed=0)
    with pytest.raises(DataError, match="all are copies"):
        hold_out(data, 2, seed=0)


@pytest.fixture
def load(write_jsonl, make_tokenizer, cache) -> Callable[..., Any]:
    """load(rows, held_out): lists of rows in files of their own, or a share or number."""

    def run(rows: list[Any], held_out: Any, seed: int = 0, **options: Any) -> Any:
        if isinstance(held_out, list):
            held_out = write_jsonl(held_out, "held.jsonl")
        file = write_jsonl(rows)
        return load_data(
            file, held_out, make_tokenizer(), OPTIONS, seed=seed, cache=cache, **options
        )

    return run


def test_a_question_of_too_many_rows_is_told_apart_by_its_answers(load):
    rows = [pair(1, n) for n in range(50)] + [pair(2 + n) for n in range(10)]
    train, held = load(rows, 6)
    assert len(held) == 6
    (line,) = train.counts.choices
    assert line.startswith("50 rows share their prompt with more rows than are held out (6); of")
    assert line in describe(train)
    assert not {str(row) for row in rows_of(train)} & {str(row) for row in rows_of(held)}


def test_equal_rows_in_both_sources_are_warned_of(load):
    train, held = load([pair(n) for n in range(9)], [pair(n) for n in range(7, 12)])
    assert (len(train), len(held)) == (9, 5)
    (line,) = warnings(train)
    assert line.startswith("2 of 5 held-out rows are trained on as well; the held-out loss looks")


def test_prompts_that_are_trained_on_with_other_answers_are_warned_of(load):
    rows = [pair(n) for n in range(9)]
    (line,) = warnings(load(rows, [pair(n, 1) for n in range(9)])[0])
    assert line.startswith(
        "9 of 9 held-out rows have a prompt that is trained on as well with other answers; the "
    )
    copied, asked = warnings(load(rows, [pair(1), pair(2, 1), pair(99)])[0])
    assert copied.startswith("1 of 3 held-out rows are trained on as well; ")
    assert asked.startswith("1 of 3 held-out rows have a prompt that is trained on")
    assert warnings(load(rows, [pair(99), pair(98)])[0]) == []


@pytest.mark.parametrize("options", [{}, {"pack_to": 8}])
def test_rows_that_are_all_trained_on_are_refused(load, options):
    words = (
        r"^data\.eval: all 3 held-out rows are rows of data\.train, too; name others, or a share"
    )
    with pytest.raises(DataError, match=words):
        load([pair(n) for n in range(9)], [pair(n) for n in (3, 3, 5)], **options)
