"""Weights: how often the rows of each source occur in an epoch."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from megatrain.data.build import load_data, shares_of_sources
from megatrain.data.encoding import RowOptions
from megatrain.data.rows import TokenRows
from megatrain.data.sources import Part
from megatrain.errors import DataError

OPTIONS = RowOptions(seq_len=64)


@pytest.fixture
def load(write_jsonl, make_tokenizer, cache):
    """load(weights, held_out): 30 rows of a.jsonl and 7 of b.jsonl, and what is held out."""

    def run(*weights, held_out=None, seed=0):
        parts = []
        for (name, count), weight in zip({"a": 30, "b": 7}.items(), weights, strict=True):
            rows = [{"prompt": f"what is {n}?", "completion": f"{name} {n}"} for n in range(count)]
            parts.append(Part(str(write_jsonl(rows, f"{name}.jsonl")), weight))
        return load_data(parts, held_out, make_tokenizer(), OPTIONS, seed=seed, cache=cache)

    return run


def of_each(rows: TokenRows) -> list[int]:
    return np.bincount(rows.chosen >= 30, minlength=2).tolist()  # type: ignore[no-any-return]


def test_without_weights_a_list_is_its_parts(load):
    rows, _ = load(None, None)
    assert rows.chosen.tolist() == list(range(37))
    assert rows.counts.parts == [30, 7]


@pytest.mark.parametrize(
    ("weights", "expected"), [((1, 1), [30, 30]), ((0.2, 0.8), [30, 120]), ((30, 1), [210, 7])]
)
def test_weights_are_shares_of_the_rows(load, weights, expected):
    rows, _ = load(*weights)
    assert of_each(rows) == expected
    times = np.bincount(rows.chosen)
    for part in (times[:30], times[30:]):
        assert 1 <= part.min() <= part.max() <= part.min() + 1, "each as often as the others"
    assert rows.counts.choices[1].endswith(f"each of its 7 rows {expected[1] / 7:.3g} times")
    assert (load(*weights, seed=1)[0].digest == rows.digest) == all(
        n % 7 == 0 for n in expected[1:]
    )


def test_no_copy_of_a_held_out_row_is_trained_on(load):
    rows, held = load(1, 1, held_out=6)
    assert len(held) == 6
    assert not set(held.chosen) & set(rows.chosen)
    assert len(set(of_each(rows))) == 1


def test_a_source_of_which_nothing_is_left_is_refused(load):
    with pytest.raises(DataError, match=r"\.jsonl: no row of it is left to train on"):
        load(1, 1, held_out=36)  # one row of 37 is left


@pytest.mark.parametrize("weight", [1e-9, 1e-6, 1e-3])
def test_weights_that_repeat_rows_beyond_reason_are_refused(load, weight):
    with pytest.raises(DataError, match=r"b\.jsonl: by its weight each of its rows is [0-9,]+ tim"):
        load(weight, 1)


def test_shares_are_within_a_row():
    for seed in range(20):
        draw = np.random.default_rng(seed)
        sizes = draw.integers(1, 1000, 5).tolist()
        weights = [Fraction(float(weight)) for weight in draw.random(5) + 0.01]
        found = shares_of_sources(sizes, weights)
        for rows, size, weight in zip(found, sizes, weights, strict=True):
            assert rows >= size
            assert abs(rows - sum(found) * weight / sum(weights)) <= 1
