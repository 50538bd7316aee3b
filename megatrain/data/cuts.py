"""Rows that are longer than `seq_len`: texts are split, anything else loses its end, and that is
counted."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megatrain.data.dataset import Counts, IdArray, IndexArray, MaskArray

CUT_SHARE = 0.1  # of all tokens; more of them cut off is worth a warning
ENOUGH = 0.99  # of all tokens, which the advised seq_len keeps
Row = tuple[IdArray, MaskArray]


def split(ids: IdArray, mask: MaskArray, seq_len: int | None, counts: Counts) -> Iterator[Row]:
    """As many rows of at most `seq_len` tokens as a text fills.

    Each begins with the last token of the one before, since its first is no target: together they
    have the text's targets.
    """
    if seq_len is None or len(ids) <= seq_len:
        yield ids, mask
        return
    counts.split_texts += 1
    for start in range(0, len(ids) - 1, seq_len - 1):
        flags = mask[start : start + seq_len].copy()
        flags[0] = False
        yield ids[start : start + seq_len], flags


def cut(ids: IdArray, mask: MaskArray, seq_len: int | None, counts: Counts) -> Iterator[Row]:
    """The first `seq_len` tokens of a row."""
    if seq_len is not None and len(ids) > seq_len:
        counts.truncated += 1
        counts.truncated_tokens += len(ids) - seq_len
        counts.cut_answers += bool(mask[seq_len:].any())
    yield ids[:seq_len], mask[:seq_len]


def measure(counts: Counts, lengths: IndexArray) -> None:
    """Note all tokens, the longest row, and the seq_len that keeps ENOUGH of the tokens.

    lengths: of the rows before they were cut, int64 [rows].
    """
    if not len(lengths):
        return
    ascending = np.sort(lengths)
    counts.tokens, counts.longest = int(ascending.sum()), int(ascending[-1])
    # what a seq_len of ascending[i] keeps: all of the rows up to i, and as much of each after it
    after = np.arange(len(ascending) - 1, -1, -1)
    kept = np.cumsum(ascending) + ascending * after
    place = int(np.searchsorted(kept, ENOUGH * counts.tokens))
    # between two lengths each token of seq_len keeps one of every row that is longer
    longer = int(after[place]) + 1
    too_much = int((kept[place] - ENOUGH * counts.tokens) // longer)
    counts.enough = int(ascending[place]) - too_much


def warnings(counts: Counts, seq_len: int | None) -> list[str]:
    """A warning where the cuts take more than CUT_SHARE of the tokens, or the end of an answer."""
    share = counts.truncated_tokens / max(1, counts.tokens)
    if seq_len is None or not (counts.cut_answers or share > CUT_SHARE):
        return []
    advice = f"{counts.longest:,} keeps all"
    if counts.enough > seq_len:
        advice = f"{counts.enough:,} keeps {ENOUGH:.0%} of the tokens, {advice}"
    return [
        f"{counts.truncated:,} rows are longer than train.seq_len {seq_len:,}: {share:.1%} of all "
        f"tokens are cut off, and the end of an answer in {counts.cut_answers:,} rows; a seq_len "
        f"of {advice}"
    ]
