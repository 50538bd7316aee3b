"""From tokenised rows to those of a shard: cut, count, and give judged rows their mismatches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from megatrain.data import cuts
from megatrain.data.cuts import Row
from megatrain.data.encoding import Encoded, EncodedBatch
from megatrain.data.samples import JUDGED, PLAIN

if TYPE_CHECKING:
    from megatrain.data.build import DataOptions
    from megatrain.data.dataset import Counts, IdArray, MaskArray
    from megatrain.data.row_writer import RowWriter

Kept = tuple[Encoded, tuple[Row, ...]]  # with its sequences as they are cut


@dataclass(frozen=True)
class Answer:
    """What a judged row gives to the mismatch of the next one: its tokens behind the prompt."""

    ids: IdArray
    mask: MaskArray

    @classmethod
    def of(cls, row: Encoded) -> Answer:
        ids, mask = row.sides[0]
        return cls(ids[row.begins :].copy(), mask[row.begins :].copy())

    @classmethod
    def read(cls, about: dict[str, Any] | None) -> Answer | None:
        """That which a shard keeps, as `about` gives it."""
        if about is None:
            return None
        return cls(np.array(about["ids"], np.int32), np.array(about["mask"], np.bool_))

    def about(self) -> dict[str, list[int]]:
        return {"ids": self.ids.tolist(), "mask": self.mask.astype(np.int8).tolist()}


class Cutter:
    """Cuts rows and hands them to the writers of shards, in the source's order.

    before: the answer of the last judged row of the shard before.
    """

    def __init__(self, options: DataOptions, before: Answer | None = None) -> None:
        self._options, self.before = options, before
        self._first: Kept | None = None

    @property
    def is_between_rows(self) -> bool:
        """Whether all rows so far are written: the first judged row waits for the second."""
        return self._first is None

    def write(self, batch: EncodedBatch, writer: RowWriter, counts: Counts) -> None:
        """Write what of the batch is left, and count it in."""
        counts.add(batch.counts)
        writer.uncut.extend(batch.uncut)
        if self._options.kind == PLAIN:
            self._write_plain(batch, writer, counts)
            return
        rows = self._kept(batch, counts)
        for one, sides in self._with_mismatches(rows) if self._options.kind == JUDGED else rows:
            writer.add_sides(sides, one.prompt, one.value)
            counts.keep(one.part)

    def _write_plain(self, batch: EncodedBatch, writer: RowWriter, counts: Counts) -> None:
        """Write rows of one sequence; a long text is several."""
        seq_len, mode = self._options.seq_len, self._options.truncation_mode
        for one in batch.rows:
            if one.text:
                rows = cuts.split(*one.sides[0], seq_len, counts)
            else:
                rows = iter(cuts.cut(one.sides, seq_len, counts, mode) or ())
            for ids, mask in rows:
                if mask.any():
                    writer.add(ids, mask, joined=one.joined)
                    counts.keep(one.part)
                else:
                    counts.without_target += 1

    def _kept(self, batch: EncodedBatch, counts: Counts) -> Iterator[Kept]:
        """The rows of which each sequence has a target left, beside their cut sequences."""
        for one in batch.rows:
            sides = cuts.cut(
                one.sides, self._options.seq_len, counts, self._options.truncation_mode
            )
            if sides is None:
                continue
            if all(mask.any() for _, mask in sides):
                yield one, sides
            else:
                counts.without_target += 1

    def _with_mismatches(self, rows: Iterator[Kept]) -> Iterator[Kept]:
        """Each row with one more sequence, its own prompt before the answer of the row before it;
        the first takes that of the second. Nothing comes of a single row."""
        for row in rows:
            answer = Answer.of(row[0])
            if self._first is not None:
                yield self._mismatched(self._first, answer)
                self._first = None
            if self.before is None:
                self._first = row
            else:
                yield self._mismatched(row, self.before)
            self.before = answer

    def _mismatched(self, row: Kept, answer: Answer) -> Kept:
        one, sides = row
        prompt = one.prompt
        ids = np.concatenate([prompt, answer.ids])
        mask = np.concatenate([np.zeros(len(prompt), np.bool_), answer.mask])
        cut = cuts.shortened(ids, mask, self._options.seq_len, self._options.truncation_mode)
        return one, (*sides, cut)
