"""Rows that are longer than seq_len: what becomes of texts, what is warned of, and the advice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megatrain.data import rows
from megatrain.data.encoding import RowOptions
from megatrain.data.rows import Counts
from megatrain.data.show import describe, warnings
from tests.commands import conversation

OPTIONS = RowOptions(seq_len=64)


def text_of(length: int) -> str:
    return "".join(chr(97 + n % 26) for n in range(length))


def test_a_long_text_loses_no_target(encode):
    for length in [62, 63, 64, 65, 126, 127, 128, 1000]:
        rows = encode([{"text": text_of(length)}], OPTIONS)
        whole = encode([{"text": text_of(length)}], replace(OPTIONS, seq_len=None))
        targets = np.concatenate([ids[mask] for ids, mask in map(rows.row, range(len(rows)))])
        ids, mask = whole.row(0)
        assert targets.tolist() == ids[mask].tolist() == ids[1:].tolist()
        assert rows.lengths.max() <= 64
        assert len(rows) == -(-(len(ids) - 1) // 63), "each row but the last is full"
        assert rows.counts.truncated == rows.counts.without_target == 0
        said = "1 texts fill several rows each; method: pretrain packs texts" in describe(rows)
        assert said == (len(rows) > 1)
        assert warnings(rows) == []


@pytest.fixture
def lengths_of(encode, make_tokenizer) -> Callable[..., Counts]:
    """lengths_of([3, 90]): rows of so many tokens of question, with an answer of one before."""

    def run(*lengths: int) -> Any:
        rows = []
        for length in lengths:
            turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
            template = len(encode([{"messages": [*turns, turns[0]]}], OPTIONS).row(0)[0])
            question = {"role": "user", "content": "q" * (length - template + 1)}
            rows.append({"messages": [*turns, question]})
        found = encode(rows, OPTIONS, make_tokenizer())
        assert found.counts.longest == max(lengths)
        return found.counts

    return run


def test_a_cut_of_more_than_a_tenth_is_warned_of_just_above_it(lengths_of):
    at = lengths_of(64, 64, 64, 64, 64, 64, 64, 64, 120)  # 56 of 632
    assert at.truncated_tokens == 56
    assert at.warned == []
    below, above = lengths_of(*[60] * 7, 114), lengths_of(*[60] * 5, 114)
    assert (below.truncated_tokens / below.tokens < 0.1) == (below.warned == [])
    assert above.truncated_tokens / above.tokens > 0.1
    (line,) = above.warned
    assert line.startswith("1 rows are longer than train.seq_len 64: 12.1% of all tokens are cut")
    assert line.endswith("in 0 rows; a seq_len of 110 keeps 99% of the tokens, 114 keeps all")


@pytest.mark.parametrize("share", [0.0999, 0.1001])
def test_the_share_is_a_tenth(share):
    counts = Counts(
        tokens=10_000, truncated=1, truncated_tokens=round(share * 10_000), longest=2000
    )
    assert bool(rows.cut_warnings(counts, 64)) == (share > 0.1)
    assert rows.cut_warnings(counts, None) == []


def test_the_end_of_one_answer_is_worth_a_warning(encode):
    rows = [conversation("x", "y")] * 90 + [conversation("x", "y" * 53)]
    counts = encode(rows, OPTIONS).counts
    assert counts.cut_answers == counts.truncated == 1
    (line,) = counts.warned
    assert "the end of an answer in 1 rows; a seq_len of" in line
    assert line.endswith(f"of {counts.longest} keeps all"), "99% of the tokens are kept already"
    fits = encode(rows, replace(OPTIONS, seq_len=counts.longest)).counts
    assert fits.warned == []
    assert fits.truncated == 0


def test_the_advised_length_is_the_smallest_that_keeps_enough():
    for seed in range(20):
        lengths = np.random.default_rng(seed).integers(1, 2000, 60)
        counts = Counts()
        rows.measure_lengths(counts, lengths)
        kept = [np.minimum(lengths, size).sum() / lengths.sum() for size in range(1, 2001)]
        assert counts.enough == next(size for size, share in enumerate(kept, 1) if share >= 0.99)
