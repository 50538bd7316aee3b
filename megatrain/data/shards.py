"""Makes the shards of a set that are not in the cache yet.

A shard ends behind the batch with which it holds SHARD_ROWS rows of the source or
SHARD_LIMIT_BYTES of tokens, once every row before is written. So a set has the same
shards however often its making was interrupted, and however many processes tokenised it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from megatrain.data.cache import Making, RowWriter
from megatrain.data.encoding import Encoded, Encoder, RowOptions, RowReader, about_row, encode_batch
from megatrain.data.rows import DROP, Counts, Tokens, measure_lengths, shortened, split
from megatrain.data.samples import JUDGED, PLAIN
from megatrain.data.sources import Source
from megatrain.data.workers import Team
from megatrain.heartbeat import may_end_here

SHARD_ROWS = 50_000  # read from the source
SHARD_LIMIT_BYTES = 128 << 20  # of tokens and masks
_Kept = tuple[Encoded, tuple[Tokens, ...]]  # with its sequences as they are cut


class _BadRow(Exception):
    """A bad row was met that is to be refused."""


def make_shards(making: Making, source: Source, encoder: Encoder, options: RowOptions) -> Counts:
    """Write the shards of a source that are not there; the counts of all rows. From a bad row on
    that is to be refused nothing is written, but all rows are counted, unless they are streamed."""
    reader, cutter, refused = RowReader(source, options), Cutter(options), Counts()
    for shard in making.shards:
        for _ in reader.batches(shard.counts.read):
            pass  # they need not be tokenised
        cutter.go_on_from(shard.tail)
    encode = partial(encode_batch, encoder=encoder, options=options)
    with Team(encode, options.processes, about_row) as team:
        encoded = team.map(reader.batches())
        try:
            for batch in encoded:
                _write_shard(making, chain([batch], encoded), cutter, refused)
        except _BadRow:
            reader.only_count = True
            for _, counts in () if options.streaming else encoded:
                refused.add(counts)
    counts = Counts(parts=[0] * max(1, len(source.parts)))
    for found in (*(shard.counts for shard in making.shards), refused):
        counts.add(found)
    if making.shards:
        measure_lengths(counts, np.concatenate([shard.uncut for shard in making.shards]))
    return counts


def _write_shard(
    making: Making, encoded: Iterator[tuple[list[Encoded], Counts]], cutter: Cutter, refused: Counts
) -> None:
    """Write one shard. Raises _BadRow, where `refused` gets the counts of what is not written."""
    counts, begins = Counts(), making.rows
    with making.new_shard() as writer:
        for rows, of_batch in encoded:
            may_end_here()
            counts.add(of_batch)
            if of_batch.bad and cutter.options.on_bad_row == "refuse":
                refused.add(counts)
                raise _BadRow
            cutter.write(rows, writer, counts)
            full = counts.read >= SHARD_ROWS or writer.size >= SHARD_LIMIT_BYTES
            if full and cutter.first is None:
                break
        writer.finish({"begins": begins, "counts": asdict(counts), "tail": cutter.tail()})


class Cutter:
    """Cuts rows and hands them to the writers of shards, in the source's order."""

    def __init__(self, options: RowOptions) -> None:
        self.options = options
        self._before: Tokens | None = None  # the answer of the last judged row
        self.first: _Kept | None = None  # judged row, which waits for the second

    def tail(self) -> dict[str, Any] | None:
        """The state that `go_on_from` takes for the next shard; JSON-able."""
        if self._before is None:
            return None
        ids, mask = self._before
        return {"ids": ids.tolist(), "mask": mask.astype(np.int8).tolist()}

    def go_on_from(self, tail: dict[str, Any] | None) -> None:
        if tail is not None:
            self._before = np.array(tail["ids"], np.int32), np.array(tail["mask"], np.bool_)

    def write(self, rows: list[Encoded], writer: RowWriter, counts: Counts) -> None:
        """Write what is left of the rows of a batch."""
        writer.uncut.extend(len(ids) for row in rows for ids, _ in row.sides)
        if self.options.kind == PLAIN:
            self._write_plain(rows, writer, counts)
            return
        kept = self._kept(rows, counts)
        for one, sides in self._with_mismatches(kept) if self.options.kind == JUDGED else kept:
            writer.add_sides(sides, one.prompt, one.value, one.pictures)
            counts.keep(one.part)

    def _write_plain(self, rows: list[Encoded], writer: RowWriter, counts: Counts) -> None:
        """Write rows of one sequence; a long text is several."""
        for one in rows:
            if one.text:
                cut = split(*one.sides[0], self.options.seq_len, counts)
            else:
                cut = iter(self._cut(one, counts) or ())
            for ids, mask in cut:
                if mask.any():
                    writer.add(ids, mask, one.joined, one.pictures)
                    counts.keep(one.part)
                else:
                    counts.without_target += 1

    def _cut(self, row: Encoded, counts: Counts) -> tuple[Tokens, ...] | None:
        """The sequences of a row, or those with less context, each cut to seq_len tokens; None
        where the row is to be dropped."""
        most, mode, sides = self.options.seq_len, self.options.truncation_mode, row.sides
        if most is None or all(len(ids) <= most for ids, _ in sides):
            return sides
        if mode == DROP:
            counts.too_long += 1
            return None
        kept = tuple(shortened(ids, mask, most, mode) for ids, mask in row.shorter or sides)
        counts.truncated += 1
        tokens, left = (sum(len(ids) for ids, _ in some) for some in (sides, kept))
        counts.truncated_tokens += tokens - left
        lost = sum(int(mask.sum()) for _, mask in sides) - sum(int(mask.sum()) for _, mask in kept)
        counts.cut_answers += lost > 0
        return kept

    def _kept(self, rows: list[Encoded], counts: Counts) -> Iterator[_Kept]:
        """The rows of which each sequence has a target left, beside their cut sequences."""
        for one in rows:
            sides = self._cut(one, counts)
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
            (ids, mask), begins = row[0].sides[0], row[0].begins
            answer = ids[begins:], mask[begins:]
            if self.first is not None:
                yield self._mismatched(self.first, answer)
                self.first = None
            if self._before is None:
                self.first = row
            else:
                yield self._mismatched(row, self._before)
            self._before = answer

    def _mismatched(self, row: _Kept, answer: Tokens) -> _Kept:
        (one, sides), (ids, mask) = row, answer
        ids = np.concatenate([one.prompt, ids])
        mask = np.concatenate([np.zeros(len(one.prompt), np.bool_), mask])
        cut = shortened(ids, mask, self.options.seq_len, self.options.truncation_mode)
        return one, (*sides, cut)
