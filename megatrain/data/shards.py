"""Makes the shards of a set that are not in the cache yet.

A shard ends behind the batch with which it holds SHARD_ROWS rows of the source or
SHARD_LIMIT_BYTES of tokens, once every row before is written. So a set has the same
shards however often its making was interrupted, and however many processes tokenised it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from megatrain.data.cache import Making, RowWriter, listed_shards
from megatrain.data.encoding import (
    Encoded,
    EncodedBatch,
    RawBatch,
    RowReader,
    about_row,
    encode_batch,
)
from megatrain.data.rows import (
    Counts,
    IdArray,
    MaskArray,
    Tokens,
    cut_sides,
    measure_lengths,
    shortened,
    split,
)
from megatrain.data.samples import JUDGED, PLAIN
from megatrain.data.workers import Team
from megatrain.heartbeat import may_end_here

if TYPE_CHECKING:
    from megatrain.data.encoding import Encoder, RowOptions
    from megatrain.data.sources import Source

SHARD_ROWS = 50_000  # read from the source
SHARD_LIMIT_BYTES = 128 << 20  # of tokens and masks


_Kept = tuple[Encoded, tuple[Tokens, ...]]  # with its sequences as they are cut


class _BadRow(Exception):
    """A bad row was met that is to be refused."""


def make_shards(
    making: Making,
    source: Source,
    encoder: Encoder,
    options: RowOptions,
    on_progress: Callable[[int], None],
) -> tuple[Counts, int]:
    """Write the shards of a source that are not there; counts of all rows, and of all shards.

    From a bad row on that is to be refused nothing is written, but all rows are counted, unless
    they are streamed.
    """
    encode = partial(encode_batch, encoder=encoder, options=options)
    with Team(encode, options.processes, about_row) as team:
        work = _Work(making, RowReader(source, options, on_progress), team, options)
        work.run()
    counts = Counts(parts=[0] * max(1, len(source.parts)))
    for number in range(work.number):
        counts.add(making.shards[number].counts)
    counts.add(work.refused)
    if work.number:
        uncut = [making.shards[number].uncut for number in range(work.number)]
        measure_lengths(counts, np.concatenate(uncut))
    return counts, work.number


class _Work:
    """Goes through the source. `number` shards are there; `refused` counts the rows behind them of
    which one is bad."""

    def __init__(
        self,
        making: Making,
        reader: RowReader,
        team: Team[RawBatch, EncodedBatch],
        options: RowOptions,
    ) -> None:
        self._making, self._reader, self._team, self._options = making, reader, team, options
        self._listed = listed_shards(making.folder)
        self._before: _Answer | None = None
        self.number, self.refused = 0, Counts()

    def run(self) -> None:
        while not self.refused.bad and not self._is_complete() and self._reader.has_more():
            shard = self._making.shards.get(self.number)
            if shard is None or shard.begins != self._reader.rows:
                self._fill_gap()
            else:
                self._reader.skip(shard.counts.read)
                self._before = _Answer.read(shard.tail)
                self.number += 1

    def _is_complete(self) -> bool:
        """True if all shards that the set is known to have exist; then `number` counts them."""
        shards, listed = self._making.shards, self._listed
        owns = [shards[number].own for number in range(len(listed)) if number in shards]
        if not listed or owns != listed:
            return False
        self.number = len(listed)
        return True

    def _fill_gap(self) -> None:
        """Write shards up to the next one that is there."""
        rows = self._reader.rows
        shards = self._making.shards.items()
        later = (one.begins for number, one in shards if number > self.number)
        stop = min((begins for begins in later if begins > rows), default=None)
        encoded = self._team.map(self._reader.batches(stop))
        cutter = Cutter(self._options, self._before)
        try:
            for batch in encoded:
                rows += self._write_shard(chain([batch], encoded), cutter, rows)
        except _BadRow:
            self._reader.only_count = True
            rest = chain(encoded, self._team.map(self._reader.batches()))
            for batch in () if self._options.streaming else rest:
                self.refused.add(batch.counts)
        self._before = cutter.before

    def _write_shard(self, encoded: Iterator[EncodedBatch], cutter: Cutter, begins: int) -> int:
        """Write one shard; the number of rows that were read for it. Raises _BadRow."""
        counts = Counts()
        with self._making.new_shard(self.number) as writer:
            for batch in encoded:
                may_end_here()
                if batch.counts.bad and self._options.on_bad_row == "refuse":
                    self.refused = counts
                    counts.add(batch.counts)
                    raise _BadRow
                cutter.write(batch, writer, counts)
                full = counts.read >= SHARD_ROWS or writer.size >= SHARD_LIMIT_BYTES
                if full and cutter.is_between_rows:
                    break
            tail = None if cutter.before is None else cutter.before.about()
            writer.finish({"begins": begins, "counts": asdict(counts), "tail": tail})
        self.number += 1
        return counts.read


@dataclass(frozen=True)
class _Answer:
    """The answer of a judged row, which the next row's mismatch takes: tokens behind the prompt."""

    ids: IdArray
    mask: MaskArray

    @classmethod
    def of(cls, row: Encoded) -> _Answer:
        ids, mask = row.sides[0]
        return cls(ids[row.begins :].copy(), mask[row.begins :].copy())

    @classmethod
    def read(cls, about: dict[str, Any] | None) -> _Answer | None:
        """Read what `about` wrote into a shard."""
        if about is None:
            return None
        return cls(np.array(about["ids"], np.int32), np.array(about["mask"], np.bool_))

    def about(self) -> dict[str, list[int]]:
        return {"ids": self.ids.tolist(), "mask": self.mask.astype(np.int8).tolist()}


class Cutter:
    """Cuts rows and hands them to the writers of shards, in the source's order.

    before: the answer of the last judged row of the shard before.
    """

    def __init__(self, options: RowOptions, before: _Answer | None = None) -> None:
        self._options, self.before = options, before
        self._first: _Kept | None = None

    @property
    def is_between_rows(self) -> bool:
        """True if all rows so far are written: the first judged row waits for the second."""
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
                rows = split(*one.sides[0], seq_len, counts)
            else:
                rows = iter(cut_sides(one.sides, seq_len, counts, mode) or ())
            for ids, mask in rows:
                if mask.any():
                    writer.add(ids, mask, joined=one.joined)
                    counts.keep(one.part)
                else:
                    counts.without_target += 1

    def _kept(self, batch: EncodedBatch, counts: Counts) -> Iterator[_Kept]:
        """The rows of which each sequence has a target left, beside their cut sequences."""
        for one in batch.rows:
            sides = cut_sides(
                one.sides, self._options.seq_len, counts, self._options.truncation_mode
            )
            if sides is None:
                continue
            if all(mask.any() for _, mask in sides):
                yield one, sides
            else:
                counts.without_target += 1

    def _with_mismatches(self, rows: Iterator[_Kept]) -> Iterator[_Kept]:
        """Each row with one more sequence, its own prompt before the answer of the row before it;
        the first takes that of the second. Nothing comes of a single row."""
        for row in rows:
            answer = _Answer.of(row[0])
            if self._first is not None:
                yield self._mismatched(self._first, answer)
                self._first = None
            if self.before is None:
                self._first = row
            else:
                yield self._mismatched(row, self.before)
            self.before = answer

    def _mismatched(self, row: _Kept, answer: _Answer) -> _Kept:
        one, sides = row
        prompt = one.prompt
        ids = np.concatenate([prompt, answer.ids])
        mask = np.concatenate([np.zeros(len(prompt), np.bool_), answer.mask])
        cut = shortened(ids, mask, self._options.seq_len, self._options.truncation_mode)
        return one, (*sides, cut)
