"""A set that is trained on while it is still being tokenised: `data.streaming`.

A process of its own makes the set in the token cache, as it is made without streaming; its shards
are the windows of an epoch. What rows a step has follows from the seed, the position and the shards
alone: who needs a shard that is not there waits for it.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatrain.data.build import AskedSet, Expected, held_out_beside, hold_out
from megatrain.data.cache import listed_shards, load_shard, name_of, unreadable
from megatrain.data.encoding import Encoder, RowOptions
from megatrain.data.rows import PackedRows, Position, Rows, TokenRows, pack
from megatrain.data.samples import digest_of
from megatrain.data.workers import ended, outcome, shared_numbers, start_child
from megatrain.errors import MegaTrainError, logger, number_of
from megatrain.heartbeat import DATA_READ, beat, beats, ending, may_end_here

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megatrain.data.sources import Given

LOOKED_EVERY_S = 0.1
NICENESS = 10  # of the writer: what trains goes first


def load_stream(
    train: Given,
    held_out: int | Given | None,
    tokenizer: PreTrainedTokenizerBase,
    options: RowOptions,
    *,
    seed: int,
    pack_to: int | None = None,
    cache: Path | None = None,
    expected: Expected | None = None,
    at_once: bool = True,
) -> tuple[Rows, Rows | None, Stream]:
    """The first window's rows to train on, held-out rows, and all windows.

    Args as `load_data`, but for `held_out` and `expected`: a number of rows is held out of the
    first window, and rows of later ones that are equal to them or have their prompts are left out;
    the rows that a run has trained on are compared by the loader. Each window is packed by itself.

    at_once: false where another process makes the set: this one does once a shard is missing.

    Raises as `AskedSet.rows`, here for what comes up until the first window is there.
    """
    if pack_to is not None:
        options = replace(options, seq_len=None, train_on="all")
    options = replace(options, streaming=True)
    eos = Encoder(tokenizer).eos if pack_to is not None else 0

    def whole(rows: TokenRows) -> Rows:
        return rows if pack_to is None else PackedRows(rows, pack_to, eos)

    asked = AskedSet(train, tokenizer, options, cache)
    held_rows = held_out if isinstance(held_out, int) else 0
    stream = Stream(asked, whole, held_rows, seed, at_once)
    rows, held = stream.rows, stream.held
    if not isinstance(held_out, int | None):
        held = held_out_beside(rows, replace(asked, given=held_out), whole, expected)
    if pack_to is not None:
        pack(rows, pack_to, eos)  # raises for a first window without a block
    return stream.first, None if held is None else whole(held), stream


# why: decision 0091
class Stream:
    """The windows of a set, as the loader takes them: window n is shard n.

    Attributes:
        rows: of the first window, without those that are held out of it.
        held: rows that were.
        first: `rows`, packed if they are to be.
        total: the number of windows, once it is known.
    """

    def __init__(
        self,
        asked: AskedSet,
        whole: Callable[[TokenRows], Rows],
        held_rows: int,
        seed: int,
        at_once: bool,
    ) -> None:
        self._asked, self._whole = asked, whole
        self.total: int | None = None
        self._ends: list[int] = []  # of each shard that was read: rows of the source up to there
        self._open = dict[int, Rows]()  # the last two: a step goes from one to the next
        self._writer = Writer(asked)
        self.close = self._writer.close  # what the writer has finished stays
        if at_once:
            self._writer.begin()
        rows = self._read(0)
        assert rows is not None, "a set without rows is refused by its writer"
        if (reason := asked.reason_to_refuse(rows.counts)) is not None:
            raise reason
        note = "what is said of rows, and the lengths that the plan goes by, are those of the first"
        note = f"data.streaming: {note} {rows.counts.read:,} rows of the source"
        self.rows, self.held = asked.ready(rows, [*asked.source.notes, note]), None
        self._hashes = self._contexts = np.zeros(0, np.uint64)  # that later windows may not have
        if held_rows:
            self.rows, self.held = hold_out(self.rows, held_rows, seed)
            self._hashes = self.held.hashes[self.held.chosen]
            # a prompt with rows on both sides in the first window has them later, too
            trained = self.rows.contexts[self.rows.chosen]
            self._contexts = np.setdiff1d(self.held.contexts[self.held.chosen], trained)
        self.first = whole(self.rows)
        self._known = [(len(self.first), self.first.digest)]  # of each window that was read

    def window(self, number: int) -> Rows | None:
        """The rows of a window, once they are there; None behind the last one. They are opened in
        order the first time. Raises what the writer raised up to this window, and StorageError."""
        if number == 0 or number in self._open:
            return self._open[number] if number else self.first
        found = self._read(number)
        if found is None:
            return None
        held = np.isin(found.hashes, self._hashes) | np.isin(found.contexts, self._contexts)
        rows = self._whole(found.choose(np.flatnonzero(~held)))
        if number == len(self._known):
            self._known.append((len(rows), rows.digest))
        self._open = {**dict(list(self._open.items())[-1:]), number: rows}
        return rows

    def digest(self, windows: int | None) -> str:
        """A hash of the rows of the first windows, or of all. Waits for what is not there."""
        while windows is None or len(self._known) < windows:
            if self.window(len(self._known)) is None:
                break
        return digest_of(" ".join(digest for _, digest in self._known[:windows]), 8)

    def used(self, position: Position) -> str:
        """The share of the set that was trained on up to there, in words."""
        sizes = [rows for rows, _ in self._known]
        windows = position.window + (position.index > 0)
        rows = sum(sizes[: position.window]) + position.index
        last = f"{number_of(rows, 'row')} of {number_of(windows, 'window')}"
        if position.epoch:
            of_all = f"all {sum(sizes):,} rows of {number_of(len(sizes), 'window')}"
            return f"{number_of(position.epoch, 'epoch')} of {of_all}, and {last}"
        if self.total is None:
            return f"{last}; the set was not read to its end"
        return f"{last}, of {self.total:,} that the set has"

    def _read(self, number: int) -> TokenRows | None:
        """The rows of a shard, once it is there; None behind the last one. Raises as `window`."""
        over = False
        while True:
            self.total = self.total or len(listed_shards(self._asked.folder)) or None
            if self.total is not None and number >= self.total:
                return None
            if (rows := self._find(number)) is not None:
                return rows
            if over:
                raise self._writer.error or unreadable(self._asked.folder / name_of(number))
            self._writer.begin()
            over = self._writer.is_over(LOOKED_EVERY_S)  # then all that it wrote is there
            may_end_here()
            self._writer.pass_on()

    def _find(self, number: int) -> TokenRows | None:
        begins = self._ends[number - 1] if number else 0
        rows = load_shard(self._asked.folder, number, begins, self._asked.options.kind)
        if rows is None:
            return None
        rows = self._asked.ready(rows, ())
        if number == len(self._ends):
            self._ends.append(begins + rows.counts.read)
            bad = rows.counts.first_bad
            if number and bad:  # the first shard's are reported with the rest
                words = f"{rows.counts.bad:,} of the next {rows.counts.read:,} rows of the source"
                logger.warning(f"{words} are bad and skipped; the first: {bad[0]}")
        return rows


class Writer:
    """A process that makes a set after `begin`, and ends with this object at the latest. It is
    there from now on: later memory is pinned and CUDA runs. error: what ended it, if not well."""

    def __init__(self, asked: AskedSet) -> None:
        self._state = shared_numbers()  # its signs of life, and what it has read
        self._state[1] = beats(DATA_READ)
        self._seen, self._begun, self._over = self._state[:2].tolist(), False, False
        self.error: Exception | None = None
        child, self._ours = start_child(partial(self._serve, asked), "remove data.streaming")
        self.close = weakref.finalize(self, _end, child, os.getpid())

    def begin(self) -> None:
        if not self._begun:
            self._begun = True
            with suppress(OSError):  # it has died, which `is_over` finds
                self._ours.send(None)

    def is_over(self, seconds: float) -> bool:
        """True if it ends within `seconds`."""
        if not self._over and self._ours.poll(seconds):
            self._over = True
            try:
                self.error = self._ours.recv()
            except (EOFError, OSError):
                self.error = MegaTrainError(
                    "the process that tokenises rows was ended from outside, perhaps because RAM "
                    "ran out; start again: what was done is kept"
                )
        return self._over

    def pass_on(self) -> None:
        """Give signs of life for it, as many as it gave since the last call."""
        seen = self._state[:2].tolist()
        for what, now, before in zip(("", DATA_READ), seen, self._seen, strict=True):
            if now != before:
                beat(what, now - before)
        self._seen = seen

    def _serve(self, asked: AskedSet, connection: Connection) -> None:
        """The child: make what is not there, or not as it was written."""
        os.nice(NICENESS)
        logging.disable()  # the log and the terminal are the parent's
        connection.recv()
        with ending(self._note):
            connection.send(outcome(asked.make)[1])

    def _note(self) -> None:
        self._state[0] += 1
        self._state[1] = beats(DATA_READ)


def _end(child: int, parent: int) -> None:
    if os.getpid() == parent:  # not a fork of it
        ended(child)
