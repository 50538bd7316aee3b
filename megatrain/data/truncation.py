"""Rows that are longer than `seq_len`: texts are split, anything else is cut or dropped, and that
is counted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from megatrain.data.rows import Counts, IdArray, IndexArray, MaskArray

CUT_SHARE = 0.1  # of all tokens; more of them cut off is worth a warning
_ENOUGH = 0.99  # of all tokens, which the advised seq_len keeps
KEEP_START, KEEP_END, DROP = TRUNCATION_MODES = ("keep_start", "keep_end", "drop")
Tokens = tuple[IdArray, MaskArray]


def split(ids: IdArray, mask: MaskArray, seq_len: int | None, counts: Counts) -> Iterator[Tokens]:
    """Split a text into rows of at most `seq_len` tokens.

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


def cut_sides(
    sides: Sequence[Tokens], seq_len: int | None, counts: Counts, mode: str = KEEP_START
) -> tuple[Tokens, ...] | None:
    """The sides of a row, each cut to `seq_len` tokens; None where the row is to be dropped.

    mode: one of TRUNCATION_MODES.
    """
    over = 0 if seq_len is None else sum(max(0, len(ids) - seq_len) for ids, _ in sides)
    if not over:
        return tuple(sides)
    if mode == DROP:
        counts.too_long += 1
        return None
    kept = tuple(shortened(ids, mask, seq_len, mode) for ids, mask in sides)
    counts.truncated += 1
    counts.truncated_tokens += over
    lost = sum(int(mask.sum()) for _, mask in sides) - sum(int(mask.sum()) for _, mask in kept)
    counts.cut_answers += lost > 0
    return kept


def shortened(ids: IdArray, mask: MaskArray, seq_len: int | None, mode: str) -> Tokens:
    """The first `seq_len` tokens, or the last of them, whose first is no target."""
    if seq_len is None or len(ids) <= seq_len:
        return ids, mask
    if mode != KEEP_END:
        return ids[:seq_len], mask[:seq_len]
    kept = mask[-seq_len:].copy()
    kept[0] = False
    return ids[-seq_len:], kept


def measure_lengths(counts: Counts, lengths: IndexArray) -> None:
    """Note all tokens, the longest row, and the seq_len that keeps _ENOUGH of the tokens.

    lengths: of the rows before they were cut, int64 [rows].
    """
    if not len(lengths):
        return
    ascending = np.sort(lengths)
    counts.tokens, counts.longest = int(ascending.sum()), int(ascending[-1])
    # what a seq_len of ascending[i] keeps: all of the rows up to i, and as much of each after it
    after = np.arange(len(ascending) - 1, -1, -1)
    kept = np.cumsum(ascending) + ascending * after
    place = int(np.searchsorted(kept, _ENOUGH * counts.tokens))
    # between two lengths each token of seq_len keeps one of every row that is longer
    longer = int(after[place]) + 1
    too_much = int((kept[place] - _ENOUGH * counts.tokens) // longer)
    counts.enough = int(ascending[place]) - too_much


def cut_warnings(counts: Counts, seq_len: int | None, mode: str = KEEP_START) -> list[str]:
    """A warning where the cuts take more than CUT_SHARE of the tokens, or a part of an answer."""
    share = counts.truncated_tokens / max(1, counts.tokens)
    if seq_len is None or not (counts.cut_answers or share > CUT_SHARE):
        return []
    advice, part = f"{counts.longest:,} keeps all", "beginning" if mode == KEEP_END else "end"
    if counts.enough > seq_len:
        advice = f"{counts.enough:,} keeps {_ENOUGH:.0%} of the tokens, {advice}"
    return [
        f"{counts.truncated:,} rows are longer than train.seq_len {seq_len:,}: {share:.1%} of all "
        f"tokens are cut off, and the {part} of an answer in {counts.cut_answers:,} rows; a "
        f"seq_len of {advice}"
    ]
