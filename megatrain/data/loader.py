"""Batches in a reproducible order: a seeded shuffle, cut into steps by the number of real tokens or
of rows, and every step into micro-batches.

A micro-batch is padded rows, one to a sequence, or sequences of one length into which rows are
packed (`pack_to`). Either way a step has the same rows.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from functools import lru_cache
from itertools import islice, pairwise
from statistics import median_high
from typing import Any

import numpy as np

from megatrain.data.micro_batches import MicroBatch as MicroBatch
from megatrain.data.micro_batches import (
    ReferenceArray,
    Regimes,
    RowRun,
    check_longest,
    counted_tokens,
    dealt,
    micro_batches,
    runs_of,
)
from megatrain.data.rows import IndexArray, Position, Rows, check_digest, permutation
from megatrain.data.samples import KINDS
from megatrain.data.streaming import Stream
from megatrain.errors import DataError
from megatrain.heartbeat import ending
from megatrain.world import ALONE, World

STEPS_LOOKED_AT = 256  # to see how full sequences get


@dataclass(frozen=True)
class StepBatch:
    """The rows of one optimizer step. `epoch` is where the data stands after the step: of windows,
    whose number is not known, the epochs that are over."""

    micro_batches: list[MicroBatch]  # of this rank; the rest is of all
    lengths: tuple[int, ...]  # real tokens of each sequence that is trained on: two of a pair
    epoch: float
    after: Any
    metrics: Mapping[str, float] = field(default_factory=dict)  # of answers that were written
    spent_s: Mapping[str, float] = field(default_factory=dict)  # on writing and judging them

    @property
    def tokens(self) -> int:
        """Real tokens that are trained on, without padding."""
        return sum(self.lengths)


class _Left(BaseException):
    """Nobody wants the batch any more."""


@dataclass(eq=False)
class Loader:
    """Iterates over StepBatch, from its position to the end of the run.

    Each epoch is shuffled by (seed, epoch). A step takes rows in that order until the next one
    would exceed `tokens_per_step` real tokens (one row at least), or takes `rows_per_step` rows. An
    epoch's last step is as small as what is left; no step mixes epochs. `epochs` may be a fraction;
    None repeats until `max_steps`. Within a step rows are sorted by length, longest first, and cut
    into right-padded micro-batches of rows x longest <= `micro_batch_tokens`, or packed into
    sequences of `pack_to` tokens. Rows that are not alike by `regimes` are never together. Pairs
    count as two sequences, which are always together, and go by the longer one.

    Of rows that are not plain, micro-batches say more: see `collate`. `references` are
    log-probabilities of each sequence, float64 [rows, sides]; `prompts_too` makes the prompts of
    chosen answers targets as well.

    Of several ranks each computes some of a step's rows (`dealt`), in micro-batches of its own;
    those that share sequences have the same.

    Of a set that comes in `windows`, `rows` are those of the first. Windows come in order, each
    shuffled by (seed, epoch, window), and a step goes on in the next one, in micro-batches of its
    own. `max_steps` alone ends the run.

    `position()` is a JSON-able dict of where the run stands after the last batch handed out;
    `restore` continues from it bit-identically and reads no row that was consumed.

    Raises DataError for rows that fit no micro-batch.
    """

    rows: Rows
    _: KW_ONLY
    windows: Stream | None = None
    micro_batch_tokens: int
    pad_id: int
    seed: int
    pack_to: int | None = None
    tokens_per_step: int | None = None
    rows_per_step: int | None = None
    epochs: float | None = 1
    max_steps: int | None = None
    regimes: Regimes = ()
    references: ReferenceArray | None = None
    prompts_too: bool = False
    world: World = ALONE

    def __post_init__(self) -> None:
        sizes = (self.tokens_per_step, self.rows_per_step)
        assert sizes.count(None) == 1, "a step is sized in tokens or in rows"
        assert self.epochs is not None or self.max_steps is not None, "a run needs an end"
        assert self.epochs is None or self.windows is None, "how long is an epoch?"
        check_longest(self.rows, self.micro_batch_tokens, self.pack_to)
        self._position = Position()
        self._order = lru_cache(maxsize=1)(self._order_of)
        self._size = self.rows_per_step or self.tokens_per_step or 0

    def __iter__(self) -> Iterator[StepBatch]:
        return self.batches()

    def batches(
        self, result: Callable[[Future[StepBatch]], StepBatch] = Future.result
    ) -> Iterator[StepBatch]:
        """Batches from the position on; a thread prepares the next while the caller uses this.
        result: waits for a batch; what it raises ends all, as closing the iterator does."""
        left = threading.Event()

        def end() -> None:
            if left.is_set():
                raise _Left

        thread = ThreadPoolExecutor(1, thread_name_prefix="megatrain-data")
        with ending(end), thread:
            try:
                pending = self._prepare(thread, self._position)
                while pending is not None:
                    batch = result(pending)
                    # a pure function of the position: preparing ahead changes nothing
                    pending = self._prepare(thread, batch.after)
                    self._position = batch.after
                    yield batch
            finally:
                left.set()

    def position(self) -> dict[str, int | str]:
        """The run's position after the last batch handed out, and what identifies its order."""
        data = self._digest(self._position)
        return {**asdict(self._position), "seed": self.seed, "data": data}

    def used(self) -> str:
        """The share of the windows that was trained on, in words; empty for a whole set."""
        return "" if self.windows is None else self.windows.used(self._position)

    def _digest(self, position: Position) -> str:
        if self.windows is None:
            return self.rows.digest
        return self.windows.digest(position.opened)

    def restore(self, position: Mapping[str, object]) -> None:
        """Continue from a saved position; the size of a step may differ from then. Raises DataError
        if it is of other data or another seed, or broken."""
        numbers = [position.get(name) for name in ("step", "epoch", "index", "window")]
        words = f"lies outside the data, or is broken: {dict(position)}"
        outside = DataError(f"the checkpoint's data position {words}")
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise outside
        place = Position(*numbers)  # type: ignore[arg-type]
        check_digest(self._digest(place), position.get("data"))
        if (seed := position.get("seed")) != self.seed:
            shuffled = f"were shuffled with train.seed {seed}, not {self.seed}"
            raise DataError(f"the checkpoint's rows {shuffled}")
        rows = self._window(place.window)
        # an epoch of windows may be at its end, which is found when the next step is asked for
        if place.index >= (len(rows) if rows else int(self.windows is not None)):
            raise outside
        self._position = place

    def steps_total(self) -> int:
        """Steps of the whole run, those handed out included, from the lengths of rows alone."""
        if self.epochs is None:
            assert self.max_steps is not None
            return self.max_steps
        total = self._position.step
        for _, _, after in self._stretches(self._position):
            total = after.step
        return total

    def steps_of_epoch(self) -> float:
        """Steps of a whole epoch, by the first one."""
        share = self._epoch_rows(0) / len(self.rows)  # below 1 where the run is shorter
        return sum(1 for _ in self._step_ends(Position())) / share

    def rows_of_a_step(self) -> int:
        """Median number over the run's first steps; the last step of an epoch has what is left."""
        ends = [0, *islice(self._step_ends(Position()), STEPS_LOOKED_AT)]
        return median_high(stop - start for start, stop in pairwise(ends))

    def rows_to_come(self, *, from_start: bool = False) -> IndexArray:
        """Ascending numbers of the rows trained on from the position, or the start, to the end."""
        found = [np.arange(0)]
        for begins, stop, _ in self._stretches(Position() if from_start else self._position):
            found.append(self._order(begins.epoch)[0][begins.index : stop])
            if len(found[-1]) == len(self.rows):
                break  # no further epoch has others
        return np.unique(np.concatenate(found))

    def _stretches(self, position: Position) -> Iterator[tuple[Position, int, Position]]:
        """(beginning, one past the last row, position after) of the rows of each epoch to come."""
        while not self._ended(position):
            left = None if self.max_steps is None else self.max_steps - position.step
            stops = list(islice(self._step_ends(position), left))
            begins, position = position, self._after(position, len(stops), stops[-1])
            yield begins, stops[-1], position

    def batches_of(
        self,
        rows: Rows,
        limit: int | None = None,
        references: ReferenceArray | None = None,
        chosen: IndexArray | None = None,
    ) -> Iterator[MicroBatch]:
        """Any rows once, the first `limit` or the `chosen` numbers, always in the same order, in
        micro-batches like those that are trained on. Raises DataError for a row that fits none."""
        check_longest(rows, self.micro_batch_tokens, self.pack_to)
        chosen = np.arange(len(rows))[:limit] if chosen is None else chosen
        about = self.micro_batch_tokens, self.pad_id, self.pack_to, self.regimes
        return micro_batches(rows, chosen, *about, references, self.prompts_too)

    def step_tokens(self, sizes: Iterable[int]) -> list[tuple[int, int, float, int, float]]:
        """`counted` for micro-batches of every size, over the run's first STEPS_LOOKED_AT steps."""
        steps, full = self._first_steps()
        return [counted_tokens(steps, full, size) for size in sizes]

    def _first_steps(self) -> tuple[list[list[list[RowRun]]], list[bool]]:
        """The rows of each by ranks, and whether it is full; always from the start."""
        steps, full, epoch = list[list[list[RowRun]]](), list[bool](), 0
        ranks = self.world.dp_size
        while self._epoch_rows(epoch) and len(steps) < STEPS_LOOKED_AT:
            order, stops = self._order(epoch)[0], self._step_ends(Position(epoch=epoch))
            for start, stop in pairwise([0, *islice(stops, STEPS_LOOKED_AT - len(steps))]):
                lengths = self.rows.side_lengths[order[start:stop]]
                parts = [lengths[dealt(lengths, rank, ranks)] for rank in range(ranks)]
                about = self.rows.kind, self.pack_to, self.regimes
                steps.append([runs_of(part, *about) for part in parts if len(part)])
                full.append(stop < self._epoch_rows(epoch))
            epoch += 1
        return steps, full

    def _prepare(self, thread: ThreadPoolExecutor, position: Position) -> Future[StepBatch] | None:
        return None if self._ended(position) else thread.submit(self._build, position)

    def _build(self, position: Position) -> StepBatch:
        trained, found, lengths = KINDS[self.rows.kind].trained, list[MicroBatch](), list[int]()
        if self.windows is None:
            stop = next(self._step_ends(position))
            parts = [(self.rows, self._order(position.epoch)[0][position.index : stop])]
            epoch, after = position.epoch + stop / len(self.rows), self._after(position, 1, stop)
        else:
            parts, after = self._across_windows(position)
            epoch = float(after.epoch)
        for rows, chosen in parts:
            lengths += rows.side_lengths[chosen, :trained].ravel().tolist()
            own = dealt(rows.side_lengths[chosen], self.world.dp_rank, self.world.dp_size)
            found += micro_batches(
                *(rows, chosen[own], self.micro_batch_tokens, self.pad_id, self.pack_to),
                *(self.regimes, self.references, self.prompts_too),
            )
        return StepBatch(found, tuple(lengths), epoch, after)

    def _across_windows(self, position: Position) -> tuple[list[tuple[Rows, IndexArray]], Position]:
        """The rows of the step at `position`, by windows, and the position after it."""
        parts, left = list[tuple[Rows, IndexArray]](), self._size
        at = replace(position, step=position.step + 1)
        while left > 0:
            rows = self._window(at.window)
            if rows is None:
                at = replace(at, epoch=at.epoch + 1, window=0, index=0)
                if parts:
                    break  # no step mixes epochs
                continue
            order, ends = self._order(at.epoch, at.window)
            stop = self._step_end(ends, at.index, left, at_least=0 if parts else 1)
            if stop > at.index:
                parts.append((rows, order[at.index : stop]))
                left -= int(ends[stop] - ends[at.index])
            if stop < len(rows):
                at = replace(at, index=stop)
                break
            at = replace(at, window=at.window + 1, index=0)
        return parts, at

    def _window(self, number: int) -> Rows | None:
        if self.windows is not None:
            return self.windows.window(number)
        return None if number else self.rows

    def _step_end(self, ends: IndexArray, index: int, size: int, at_least: int = 1) -> int:
        """One past the last row of a step that begins with row `index` and has room for `size`."""
        stop = int(np.searchsorted(ends, ends[index] + size, side="right")) - 1
        return min(max(index + at_least, stop), len(ends) - 1)

    def _step_ends(self, position: Position) -> Iterator[int]:
        """One past the last row of each step from `position` to the end of its epoch."""
        ends, rows = self._order(position.epoch)[1], self._epoch_rows(position.epoch)
        index = position.index
        while index < rows:
            index = min(self._step_end(ends, index, self._size), rows)
            yield index

    def _order_of(self, epoch: int, window: int = 0) -> tuple[IndexArray, IndexArray]:
        """The epoch's rows in order, or the window's in it, int64 [rows]; and the running count
        before each row, and behind all, of what steps are sized in: tokens or rows, int64."""
        rows = self._window(window) if window else self.rows
        assert rows is not None
        order = permutation(len(rows), self.seed, epoch, window)
        sizes = np.ones_like(order) if self.rows_per_step else rows.lengths[order]
        return order, np.concatenate([[0], np.cumsum(sizes)])

    def _epoch_rows(self, epoch: int) -> int:
        """Rows of this epoch that are trained on: all, or a share in a fraction of an epoch."""
        share = 1.0 if self.epochs is None else min(1.0, self.epochs - epoch)
        return max(0, min(len(self.rows), math.ceil(share * len(self.rows) - 1e-9)))

    def _after(self, position: Position, steps: int, index: int) -> Position:
        """The position `steps` further on, at row `index`. The end of a fraction of an epoch stays:
        the rest of its rows come if the run is made longer."""
        epochs, index = divmod(index, len(self.rows))
        return Position(position.step + steps, position.epoch + epochs, index)

    def _ended(self, position: Position) -> bool:
        if self.max_steps is not None and position.step >= self.max_steps:
            return True
        return self.windows is None and position.index >= self._epoch_rows(position.epoch)
