"""A set that is trained on while it is still being tokenised: `data.streaming`.

A process of its own makes the set in the token cache, as it is made without streaming; its shards
are the windows of an epoch. What rows a step has follows from the seed, the position and the shards
alone: who needs a shard that is not there waits for it.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import struct
import traceback
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatrain.data import cache as cached_sets
from megatrain.data.build import (
    AskedSet,
    Expected,
    held_out_beside,
    hold_out,
    ready,
    reason_to_refuse,
    source_reader,
)
from megatrain.data.encoding import Encoder, RowOptions
from megatrain.data.loader import Position
from megatrain.data.rows import PackedRows, Rows, TokenRows, pack
from megatrain.data.workers import ended, forked
from megatrain.errors import MegaTrainError
from megatrain.heartbeat import may_end_here

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megatrain.data.sources import Given

LOOKED_EVERY_S = 0.1
NICENESS = 10  # of the writer: what trains goes first
_STATE = "qq"  # of the writer: how often it gave a sign of life, and the rows that it has read
OPEN = 2  # windows that are kept: a step goes from one to the next

OnProgress = Callable[[int], None]

logger = logging.getLogger("megatrain")


def load_stream(
    train: Given,
    held_out: int | Given | None,
    tokenizer: PreTrainedTokenizerBase,
    options: RowOptions,
    *,
    seed: int,
    pack_to: int | None = None,
    cache: Path | None = None,
    on_progress: OnProgress | None = None,
    expected: Expected | None = None,
    at_once: bool = True,
) -> tuple[Rows, Rows | None, Stream]:
    """The first window's rows to train on, held-out rows, and all windows.

    Args as `load_data`, but for `held_out` and `expected`: a number of rows is held out of the
    first window, and rows of later ones that are equal to them or have their prompts are left out;
    the rows that a run has trained on are compared by the loader. Each window is packed by itself.

    at_once: false where another process makes the set: this one does once a shard is missing.

    Raises as `encode_source`, here for what comes up until the first window is there.
    """
    if pack_to is not None:
        options = replace(options, seq_len=None, train_on="all")
    asked = AskedSet.of(train, tokenizer, replace(options, streaming=True), cache)
    eos = Encoder(tokenizer).eos if pack_to is not None else 0

    def whole(rows: TokenRows) -> Rows:
        return rows if pack_to is None else PackedRows(rows, pack_to, eos)

    shards, held = Shards(asked, on_progress or (lambda _: None), at_once), None
    rows = shards.read(0)
    assert rows is not None, "a set without rows is refused by its writer"
    if (reason := reason_to_refuse(asked.source, rows.counts, asked.options)) is not None:
        raise reason
    rows = ready(rows, _notes(asked, rows), tokenizer, asked.options)
    if isinstance(held_out, int) and held_out:
        rows, held = hold_out(rows, held_out, seed)
    stream = Stream(shards, rows, held, whole)
    if not isinstance(held_out, int | None):
        read = source_reader(tokenizer, cache, on_progress)
        known = None if expected is None else expected.held_out
        held = held_out_beside(rows, held_out, options, read, whole, known)
    if pack_to is not None:
        pack(rows, pack_to, eos)  # raises for a first window without a block
    return stream.first, None if held is None else whole(held), stream


def _notes(asked: AskedSet, rows: TokenRows) -> list[str]:
    note = "what is said of rows, and the lengths that the plan goes by, are those of the first"
    return [*asked.source.notes, f"data.streaming: {note} {rows.counts.read:,} rows of the source"]


# why: decision 0091
@dataclass(frozen=True)
class Opened:
    """A window that was read once: the number of its rows, and their digest."""

    rows: int
    digest: str


class Stream:
    """The windows of a set, as the loader takes them: window n is shard n.

    first: the rows of the first. held: rows that were held out of it.
    """

    def __init__(
        self,
        shards: Shards,
        first: TokenRows,
        held: TokenRows | None,
        whole: Callable[[TokenRows], Rows],
    ) -> None:
        self._shards, self._whole, self.first = shards, whole, whole(first)
        self._open = dict[int, Rows]()
        self._opened = [Opened(len(self.first), self.first.digest)]
        self._hashes = self._contexts = np.zeros(0, np.uint64)  # that later windows may not have
        if held is not None:
            self._hashes = held.hashes[held.chosen]
            # a prompt with rows on both sides in the first window has them later, too
            asked = first.contexts[first.chosen]
            self._contexts = np.setdiff1d(held.contexts[held.chosen], asked)

    def window(self, number: int) -> Rows | None:
        """The rows of a window, once they are there; None behind the last one.

        Windows are opened in order the first time. Raises what the writer raised, if it was about
        this window or one before, and StorageError for a damaged one that nobody mends.
        """
        if number == 0:
            return self.first
        if number in self._open:
            return self._open[number]
        found = self._shards.read(number)
        if found is None:
            return None
        held = np.isin(found.hashes, self._hashes) | np.isin(found.contexts, self._contexts)
        rows = self._whole(found.choose(np.flatnonzero(~held)))
        if number == len(self._opened):
            self._opened.append(Opened(len(rows), rows.digest))
        for old in list(self._open)[: 1 - OPEN]:
            del self._open[old]
        self._open[number] = rows
        return rows

    def digest(self, windows: int | None) -> str:
        """A hash of the rows of the first windows, or of all. Waits for what is not there."""
        while windows is None or len(self._opened) < windows:
            if self.window(len(self._opened)) is None:
                break
        digests = " ".join(one.digest for one in self._opened[:windows])
        return hashlib.blake2b(digests.encode(), digest_size=8).hexdigest()

    def used(self, position: Position) -> str:
        """The share of the set that was trained on up to there, in words."""
        sizes = [one.rows for one in self._opened]
        windows = position.window + (position.index > 0)
        rows = sum(sizes[: position.window]) + position.index
        last = f"{_counted(rows, 'row')} of {_counted(windows, 'window')}"
        if position.epoch:
            epochs, all_windows = _counted(position.epoch, "epoch"), _counted(len(sizes), "window")
            words = f"{epochs} of all {sum(sizes):,} rows of {all_windows}"
            return f"{words}, and {last}" if rows else words
        if (total := self._shards.total) is None:
            return f"{last}; the set was not read to its end"
        return f"{last}, of {total:,} that the set has"

    def close(self) -> None:
        """End the writer: what it has finished stays."""
        self._shards.close()


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


class Shards:
    """The shards of a set in the cache, where a process makes those that are not there.

    on_progress: called with the rows that were read so far, while a shard is waited for.
    at_once: as in `load_stream`.
    total: the number of shards, once it is known.
    """

    def __init__(self, asked: AskedSet, on_progress: OnProgress, at_once: bool) -> None:
        self._asked, self._on_progress = asked, on_progress
        self._ends: list[int] = []  # of each shard that was read: rows of the source up to there
        self.total: int | None = None
        self._writer = Writer(asked)
        self.close = self._writer.close
        if at_once:
            self._writer.begin()

    def read(self, number: int) -> TokenRows | None:
        """The rows of a shard, once it is there; None behind the last one. Raises as `window`."""
        over = False
        while not self._is_behind(number):
            if (rows := self._find(number)) is not None:
                return rows
            if over:
                self._writer.check()
                raise cached_sets.unreadable(self._asked.folder / cached_sets.name_of(number))
            self._writer.begin()
            over = self._writer.is_over(LOOKED_EVERY_S)  # then all that it wrote is there
            may_end_here()
            if (read := self._writer.news()) is not None:
                self._on_progress(read)
        return None

    def _is_behind(self, number: int) -> bool:
        if self.total is None:
            self.total = len(cached_sets.listed_shards(self._asked.folder)) or None
        return self.total is not None and number >= self.total

    def _find(self, number: int) -> TokenRows | None:
        """The shard, whose bytes are compared with their hashes the first time."""
        asked, new = self._asked, number == len(self._ends)
        begins = self._ends[number - 1] if number else 0
        rows = cached_sets.load_shard(asked.folder, number, begins, asked.options.kind, check=new)
        if rows is None:
            return None
        rows = ready(rows, (), asked.tokenizer, asked.options)
        if new:
            self._ends.append(begins + rows.counts.read)
            if number and (
                bad := rows.counts.first_bad
            ):  # the first shard's are reported with the rest
                words = f"{rows.counts.bad:,} of the next {rows.counts.read:,} rows of the source"
                logger.warning(f"{words} are bad and skipped; the first: {bad[0]}")
        return rows


class Writer:
    """A process that makes a set after `begin`, and ends with this object at the latest.

    It is there from now on: later memory is pinned and CUDA runs.
    """

    def __init__(self, asked: AskedSet) -> None:
        self._state = mmap.mmap(-1, mmap.PAGESIZE)  # shared
        self._seen, self._begun, self._over = 0, False, False
        self._error: Exception | None = None
        self._ours, theirs = Pipe()
        try:
            child = forked(partial(self._serve, asked, theirs))
        except OSError as error:
            raise MegaTrainError(
                f"no process can be started to tokenise rows ({error.strerror}); allow more of "
                "them (ulimit -u), or remove data.streaming"
            ) from error
        finally:
            theirs.close()
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
                self._error = self._ours.recv()
            except (EOFError, OSError):
                self._error = MegaTrainError(
                    "the process that tokenises rows was ended from outside, perhaps because RAM "
                    "ran out; start again: what was done is kept"
                )
        return self._over

    def check(self) -> None:
        """Raise what ended it, if it did not end well."""
        if self._error is not None:
            raise self._error

    def news(self) -> int | None:
        """The rows that it has read, if it gave a sign of life since the last call."""
        signs, rows = struct.unpack_from(_STATE, self._state)
        if signs == self._seen:
            return None
        self._seen = signs
        return int(rows)

    def _serve(self, asked: AskedSet, connection: Connection) -> None:
        """The child: make what is not there, or not as it was written."""
        os.nice(NICENESS)
        logging.disable()  # the log and the terminal are the parent's
        connection.recv()
        found = None
        try:
            if cached_sets.cached_set(asked.cache, asked.key) is None:
                asked.make(self._note)
        except Exception as error:  # noqa: BLE001  the parent raises it
            if not isinstance(error, MegaTrainError):
                error.add_note("".join(traceback.format_exception(error)))
            found = error
        connection.send(found)

    def _note(self, rows: int) -> None:
        signs, _ = struct.unpack_from(_STATE, self._state)
        struct.pack_into(_STATE, self._state, 0, signs + 1, rows)


def _end(child: int, parent: int) -> None:
    if os.getpid() == parent:  # not a fork of it
        ended(child)
