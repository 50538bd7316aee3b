"""Sequence packing: whole rows for fine-tuning, documents in blocks for pre-training."""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatrain.data.rows import Counts, IdArray, IndexArray, MaskArray, PlainRows, TokenRows
from megatrain.errors import DataError


@dataclass(frozen=True, eq=False)
class PackedRows(PlainRows):
    """Blocks of `seq_len` tokens over concatenated documents.

    The last block holds the rest, if that is two tokens or more. Every token but a block's first is
    a target, document starts included. Attention is not cut at document borders; each document ends
    with the end-of-sequence token, and so does a piece of one whose next piece is not there: it was
    held out. Blocks are gathered when asked for; nothing is copied ahead.
    """

    documents: TokenRows
    seq_len: int
    eos: int

    @property
    def counts(self) -> Counts:
        return self.documents.counts

    @cached_property
    def _ends(self) -> IndexArray:
        return np.cumsum(self.documents.lengths + self._broken)

    @cached_property
    def _broken(self) -> MaskArray:
        """Pieces that the next row does not go on with, bool [documents]."""
        chosen = self.documents.chosen
        followed = np.append(chosen[1:] == chosen[:-1] + 1, False)
        broken: MaskArray = self.documents.joined[chosen] & ~followed
        return broken

    @property
    def _tokens(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    @property
    def remainder(self) -> int:
        """Tokens after the last whole block."""
        return self._tokens % self.seq_len

    def __len__(self) -> int:
        return self._tokens // self.seq_len + (self.remainder >= 2)

    @cached_property
    def lengths(self) -> IndexArray:
        lengths = np.full(len(self), self.seq_len, np.int64)
        if self.remainder >= 2:
            lengths[-1] = self.remainder
        return lengths

    @property
    def target_counts(self) -> IndexArray:
        return self.lengths - 1

    @cached_property
    def digest(self) -> str:
        breaks = np.flatnonzero(self._broken).tolist()
        made_of = f"{self.documents.digest} {self.seq_len} {breaks}"
        return hashlib.blake2b(made_of.encode(), digest_size=8).hexdigest()

    def row(self, index: int) -> tuple[IdArray, MaskArray]:
        start = index * self.seq_len
        stop = start + int(self.lengths[index])
        first = int(np.searchsorted(self._ends, start, side="right"))
        pieces, place = [], start
        while place < stop:
            ids, _ = self.documents.row(first)
            if self._broken[first]:
                ids = np.append(ids, np.int32(self.eos))
            begin = int(self._ends[first]) - len(ids)
            pieces.append(ids[place - begin : stop - begin])
            place, first = place + len(pieces[-1]), first + 1
        mask = np.ones(stop - start, np.bool_)
        mask[0] = False
        return np.concatenate(pieces), mask


def pack(documents: TokenRows, seq_len: int, eos: int) -> PackedRows:
    """Blocks of `seq_len` tokens. Raises DataError if the documents hold fewer than two tokens."""
    assert seq_len >= 2, "a block of one token has nothing to predict"
    packed = PackedRows(documents, seq_len, eos)
    if not len(packed):
        raise DataError("the documents hold fewer than two tokens; there is nothing to train on")
    return packed


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Numbers of the rows packed into each sequence of `capacity` tokens; none may be longer.

    Each row goes where it leaves the least room, which works best with the longest rows first.
    """
    sequences: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, number of the sequence), ascending
    for number, length in enumerate(lengths):
        assert length <= capacity, (length, capacity)
        place = bisect_left(room, (length, -1))
        if place == len(room):
            sequences.append([])
            left, sequence = capacity, len(sequences) - 1
        else:
            left, sequence = room.pop(place)
        sequences[sequence].append(number)
        insort(room, (left - length, sequence))
    return sequences
