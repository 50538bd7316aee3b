"""Makes the shards of a set that are not in the cache yet.

Where a shard ends follows from the rows alone: behind the batch with which it holds SHARD_ROWS rows
of the source or SHARD_BYTES of tokens, once every row before is written. So a set has the same
shards however often its making was interrupted, and however many processes tokenised it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from megatrain.data import cuts
from megatrain.data.cache import Making, listed
from megatrain.data.dataset import Counts
from megatrain.data.encoding import Batch, EncodedBatch, Reader, encode_batches
from megatrain.data.rendering import Fence
from megatrain.data.workers import Team
from megatrain.data.writing import Answer, Cutter

if TYPE_CHECKING:
    from megatrain.data.build import DataOptions
    from megatrain.data.sources import Source
    from megatrain.data.tokenize import Encoder

SHARD_ROWS = 50_000  # read from the source
SHARD_BYTES = 128 << 20  # of tokens and masks


class _BadRow(Exception):
    """A bad row was met that is to be refused."""


def make_shards(
    making: Making,
    source: Source,
    encoder: Encoder,
    options: DataOptions,
    on_progress: Callable[[int], None],
) -> tuple[Counts, int]:
    """Write the shards of a source that are not there; counts of all rows, and of all shards.

    From a bad row on that is to be refused nothing is written, but all rows are counted, unless
    they are streamed.
    """
    with Fence(encoder.marks) as fence:
        encode = partial(encode_batches, fence=fence, encoder=encoder, options=options)
        with Team(encode, options.processes) as team:
            work = _Work(making, Reader(source, options, on_progress), team, options)
            work.run()
    counts = Counts(parts=[0] * max(1, len(source.parts)))
    for number in range(work.number):
        counts.add(making.shards[number].counts)
    counts.add(work.refused)
    if work.number:
        uncut = [making.shards[number].uncut for number in range(work.number)]
        cuts.measure(counts, np.concatenate(uncut))
    return counts, work.number


class _Work:
    """Goes through the source. `number` shards are there; `refused` counts the rows behind them of
    which one is bad."""

    def __init__(
        self, making: Making, reader: Reader, team: Team[Batch, EncodedBatch], options: DataOptions
    ) -> None:
        self._making, self._reader, self._team, self._options = making, reader, team, options
        self._listed = listed(making.folder)
        self._before: Answer | None = None
        self.number, self.refused = 0, Counts()

    def run(self) -> None:
        while not self.refused.bad and not self._is_complete() and self._reader.has_more():
            shard = self._making.shards.get(self.number)
            if shard is None or shard.begins != self._reader.rows:
                self._fill_gap()
            else:
                self._reader.skip(shard.counts.read)
                self._before = Answer.read(shard.tail)
                self.number += 1

    def _is_complete(self) -> bool:
        """Whether all shards that the set is known to have are there; if so, these are counted."""
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
                if batch.counts.bad and self._options.on_bad_row == "refuse":
                    self.refused = counts
                    counts.add(batch.counts)
                    raise _BadRow
                cutter.write(batch, writer, counts)
                full = counts.read >= SHARD_ROWS or writer.size >= SHARD_BYTES
                if full and cutter.is_between_rows:
                    break
            tail = None if cutter.before is None else cutter.before.about()
            writer.finish({"begins": begins, "counts": asdict(counts), "tail": tail})
        self.number += 1
        return counts.read
