"""Batches in a reproducible order: a seeded shuffle, steps of so many real tokens, micro-batches of so many padded ones.

Micro-batches are padded rows, or sequences of one length that several rows share (`pack_to`). Either way a step has the same rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from megatrain.data.dataset import IndexArray, Rows
from megatrain.data.hashing import permutation
from megatrain.data.packing import best_fit
from megatrain.errors import DataError

if TYPE_CHECKING:
    import torch

STEPS_LOOKED_AT = 256  # to see how full sequences get
IGNORED = -100  # a label that is no target, as torch's cross entropy and transformers have it
MicroBatch = dict[str, "torch.Tensor"]


@dataclass(frozen=True)
class Position:
    """Where a loader stands: the next row is number `index` of epoch `epoch`'s shuffle; `step` steps were given out."""

    step: int = 0
    epoch: int = 0
    index: int = 0


@dataclass(frozen=True)
class StepBatch:
    """The rows of one optimizer step. `epoch` is where the data stands after the step."""

    micro_batches: list[MicroBatch]
    lengths: tuple[int, ...]  # real tokens of each row
    target_tokens: int
    epoch: float
    after: Position

    @property
    def tokens(self) -> int:
        """Real ones: padding is not counted."""
        return sum(self.lengths)

    @property
    def rows(self) -> int:
        return len(self.lengths)


class Loader:
    """Iterates over StepBatch, from its position to the end of the run.

    Each epoch is shuffled anew by (seed, epoch). A step takes rows in that order until the next one would exceed `tokens_per_step`
    real tokens (one row at least), or takes `rows_per_step` rows. An epoch's last step is as small as what is left; no step mixes
    epochs. `epochs` may be a fraction; None repeats until `max_steps`. Within a step rows are sorted by length, longest first, and cut
    into right-padded micro-batches of rows x longest <= `micro_batch_tokens`, or packed into sequences of `pack_to` tokens.

    `position()` is a JSON-able dict of where the run stands after the last batch that was handed out; `restore` continues from it
    bit-identically and reads nothing of what was consumed, however many batches were being prepared.
    Raises DataError for rows that fit no micro-batch and for a position of other data or another seed.
    """

    def __init__(
        self,
        rows: Rows,
        *,
        micro_batch_tokens: int,
        pad_id: int,
        seed: int,
        pack_to: int | None = None,
        tokens_per_step: int | None = None,
        rows_per_step: int | None = None,
        epochs: float | None = 1,
        max_steps: int | None = None,
    ) -> None:
        assert (tokens_per_step is None) != (rows_per_step is None), (
            "one of tokens_per_step and rows_per_step"
        )
        assert epochs is not None or max_steps is not None, "a run needs an end"
        check_longest(rows, micro_batch_tokens)
        self._rows = rows
        self._tokens_per_step = tokens_per_step
        self._rows_per_step = rows_per_step
        self._micro_batch_tokens = micro_batch_tokens
        self._pad_id = pad_id
        self.pack_to = pack_to
        self._seed = seed
        self._epochs = math.inf if epochs is None else epochs
        self._max_steps = max_steps
        self._position = Position()
        self._order = _EpochOrder(rows, seed)

    def __iter__(self) -> Iterator[StepBatch]:
        """Batches from the position on; the next one is prepared by a thread while the caller works on this one."""
        with ThreadPoolExecutor(1, thread_name_prefix="megatrain-data") as thread:
            pending = self._prepare(thread, self._position)
            while pending is not None:
                batch = pending.result()
                pending = self._prepare(
                    thread, batch.after
                )  # a pure function of the position: preparing ahead changes nothing
                self._position = batch.after
                yield batch

    def position(self) -> dict[str, int | str]:
        """Where the run stands after the last batch handed out, with what identifies the data and the shuffle."""
        return {**asdict(self._position), "seed": self._seed, "data": self._rows.digest}

    def restore(self, position: Mapping[str, object]) -> None:
        """Continue from a saved position; the size of a step may differ from then. Raises DataError if it is not of this data."""
        if position.get("data") != self._rows.digest:
            raise DataError(
                "the training rows are not those of the checkpoint: the data, the tokenizer or how rows are cut has changed"
            )
        if position.get("seed") != self._seed:
            raise DataError(
                f"the checkpoint's rows were shuffled with train.seed {position.get('seed')}, not {self._seed}"
            )
        step, epoch, index = (position.get(name) for name in ("step", "epoch", "index"))
        if not (isinstance(step, int) and isinstance(epoch, int) and isinstance(index, int)):
            raise DataError(f"the checkpoint's data position is broken: {dict(position)}")
        if step < 0 or epoch < 0 or not 0 <= index < len(self._rows):
            raise DataError(
                f"the checkpoint's data position lies outside the data: {dict(position)}"
            )
        self._position = Position(step, epoch, index)

    def steps_total(self) -> int:
        """Steps of the whole run, those given out included: counted from the rows' lengths, nothing is read."""
        if self._max_steps is not None and self._epochs == math.inf:
            return self._max_steps
        position = self._position
        while not self._ended(position):
            limit = math.inf if self._max_steps is None else self._max_steps - position.step
            steps, index = self._steps_left_in_epoch(position, limit)
            position = self._normal(Position(position.step + steps, position.epoch, index))
        return position.step

    def step_tokens(self, sizes: Iterable[int]) -> list[tuple[int, int, float, int, float]]:
        """`counted`, for micro-batches of every size: the run's first STEPS_LOOKED_AT steps, from the lengths of their rows alone."""
        steps, full = self._first_steps()
        if self.pack_to is not None:
            steps = [[self.pack_to] * len(best_fit(lengths, self.pack_to)) for lengths in steps]
        return [counted(steps, full, size) for size in sizes]

    def _first_steps(self) -> tuple[list[list[int]], list[bool]]:
        """The lengths of the rows of each, longest first, and whether it is a full one: an epoch's last step is what is left."""
        steps, full, epoch = list[list[int]](), list[bool](), 0
        while epoch < self._epochs and len(steps) < STEPS_LOOKED_AT:
            (order, ends), rows, index = self._order.of(epoch), self._epoch_rows(epoch), 0
            while index < rows and len(steps) < STEPS_LOOKED_AT:
                stop = self._step_end(ends, index, rows)
                steps.append(np.sort(self._rows.lengths[order[index:stop]])[::-1].tolist())
                full.append(stop < rows)
                index = stop
            epoch += 1
        return steps, full

    def _prepare(self, thread: ThreadPoolExecutor, position: Position) -> Future[StepBatch] | None:
        return None if self._ended(position) else thread.submit(self._build, position)

    def _build(self, position: Position) -> StepBatch:
        order, ends = self._order.of(position.epoch)
        stop = self._step_end(ends, position.index, self._epoch_rows(position.epoch))
        chosen = order[position.index : stop]
        lengths = self._rows.lengths[chosen]
        after = self._normal(Position(position.step + 1, position.epoch, stop))
        return StepBatch(
            micro_batches=list(
                micro_batches(
                    self._rows, chosen, self._micro_batch_tokens, self._pad_id, self.pack_to
                )
            ),
            lengths=tuple(lengths.tolist()),
            target_tokens=int(self._rows.target_counts[chosen].sum()),
            epoch=position.epoch + stop / len(self._rows),
            after=after,
        )

    def _step_end(self, ends: IndexArray, index: int, epoch_rows: int) -> int:
        """One past the last row of the step that starts at `index`; `ends` are the running token counts of the epoch."""
        if self._rows_per_step is not None:
            return min(index + self._rows_per_step, epoch_rows)
        assert self._tokens_per_step is not None
        before = int(ends[index - 1]) if index else 0
        stop = int(np.searchsorted(ends, before + self._tokens_per_step, side="right"))
        return min(max(stop, index + 1), epoch_rows)

    def _steps_left_in_epoch(self, position: Position, limit: float) -> tuple[int, int]:
        """Steps from here to the epoch's end, at most `limit`, and the row they end at."""
        epoch_rows = self._epoch_rows(position.epoch)
        if self._rows_per_step is not None:
            steps = int(min(limit, -(-(epoch_rows - position.index) // self._rows_per_step)))
            return steps, min(position.index + steps * self._rows_per_step, epoch_rows)
        _, ends = _EpochOrder(self._rows, self._seed).of(
            position.epoch
        )  # its own: the thread may be using the other
        steps, index = 0, position.index
        while index < epoch_rows and steps < limit:
            index = self._step_end(ends, index, epoch_rows)
            steps += 1
        return steps, index

    def _epoch_rows(self, epoch: int) -> int:
        """Rows of this epoch that are trained on: all, or a share of them in a fraction of an epoch."""
        share = min(1.0, self._epochs - epoch)
        return max(0, min(len(self._rows), math.ceil(share * len(self._rows) - 1e-9)))

    def _normal(self, position: Position) -> Position:
        """The same position, with an epoch's end written as the start of the next. The end of a fraction of one stays there: the rest of
        its rows are still to come if the run is made longer."""
        if position.index < len(self._rows):
            return position
        return replace(position, epoch=position.epoch + 1, index=0)

    def _ended(self, position: Position) -> bool:
        out_of_steps = self._max_steps is not None and position.step >= self._max_steps
        return out_of_steps or position.index >= self._epoch_rows(position.epoch)


class _EpochOrder:
    """Remembers the shuffle of the last epoch asked for."""

    def __init__(self, rows: Rows, seed: int) -> None:
        self._rows = rows
        self._seed = seed
        self._epoch = -1
        self._order: IndexArray = np.zeros(0, np.int64)
        self._ends: IndexArray = np.zeros(0, np.int64)

    def of(self, epoch: int) -> tuple[IndexArray, IndexArray]:
        """The epoch's row order, int64 [rows], and the running count of tokens along it, int64 [rows]."""
        if epoch != self._epoch:
            self._order = permutation(len(self._rows), self._seed, epoch)
            self._ends = np.cumsum(self._rows.lengths[self._order])
            self._epoch = epoch
        return self._order, self._ends


def held_out_batches(
    rows: Rows,
    micro_batch_tokens: int,
    pad_id: int,
    limit: int | None = None,
    pack_to: int | None = None,
) -> Iterator[MicroBatch]:
    """Micro-batches over all rows once, or over the first `limit`, longest first, always in the same order.

    Raises DataError for a row that fits none.
    """
    check_longest(rows, micro_batch_tokens)
    chosen = np.arange(len(rows) if limit is None else min(limit, len(rows)))
    return micro_batches(rows, chosen, micro_batch_tokens, pad_id, pack_to)


def check_longest(rows: Rows, micro_batch_tokens: int) -> None:
    """Raises DataError if the longest row is longer than a micro-batch."""
    longest = int(rows.lengths.max())
    if longest > micro_batch_tokens:
        raise DataError(
            f"a row of {longest} tokens does not fit a micro-batch of {micro_batch_tokens}; "
            f"set train.micro_batch_tokens to {longest} or more, or a smaller train.seq_len"
        )


def micro_batches(
    rows: Rows, chosen: IndexArray, micro_batch_tokens: int, pad_id: int, pack_to: int | None = None
) -> Iterator[MicroBatch]:
    """The chosen rows, longest first, in micro-batches of rows x longest <= micro_batch_tokens, or of sequences that they share."""
    by_length = chosen[np.argsort(-rows.lengths[chosen], kind="stable")]
    if pack_to is not None:
        sequences = best_fit(rows.lengths[by_length].tolist(), pack_to)
        size = max(1, micro_batch_tokens // pack_to)
        for first in range(0, len(sequences), size):
            yield collate_packed(
                rows,
                [by_length[sequence].tolist() for sequence in sequences[first : first + size]],
                pack_to,
                pad_id,
            )
        return
    for start, stop in cuts(rows.lengths[by_length].tolist(), micro_batch_tokens):
        yield collate(rows, by_length[start:stop].tolist(), pad_id)


def cuts(lengths: Sequence[int], micro_batch_tokens: int) -> Iterator[tuple[int, int]]:
    """Where rows of these lengths, longest first, are cut into micro-batches: the first row of each, and one past its last."""
    start = 0
    while start < len(lengths):
        stop = min(start + max(1, micro_batch_tokens // lengths[start]), len(lengths))
        yield start, stop
        start = stop


def padded(lengths: Sequence[int], micro_batch_tokens: int) -> tuple[int, int]:
    """Tokens of those micro-batches, padding included, and how many there are."""
    sizes = [(stop - start) * lengths[start] for start, stop in cuts(lengths, micro_batch_tokens)]
    return sum(sizes), len(sizes)


def counted(
    steps: Iterable[Sequence[int]], full: Iterable[bool], micro_batch_tokens: int
) -> tuple[int, int, float, int, float]:
    """Steps of rows or sequences of these lengths, longest first, in micro-batches of so many tokens: that number; a step's tokens, padding
    included, at most, and of the full steps on average; and so a step's micro-batches."""
    found = [padded(lengths, micro_batch_tokens) for lengths in steps]
    whole = [step for step, is_full in zip(found, full, strict=True) if is_full] or found
    (tokens, parts), (mean_tokens, mean_parts) = (
        map(max, zip(*found, strict=True)),
        map(fmean, zip(*whole, strict=True)),
    )
    return micro_batch_tokens, tokens, mean_tokens, parts, mean_parts


def collate(rows: Rows, chosen: Sequence[int], pad_id: int) -> MicroBatch:
    """input_ids and labels (-100: no target, not shifted), int64 [rows, longest] on the CPU; attention_mask only where there is padding."""
    import torch

    found = [rows.row(index) for index in chosen]
    longest = max(len(ids) for ids, _ in found)
    input_ids = np.full((len(found), longest), pad_id, np.int64)
    labels = np.full((len(found), longest), IGNORED, np.int64)
    attention = np.zeros((len(found), longest), np.int64)
    for number, (ids, mask) in enumerate(found):
        input_ids[number, : len(ids)] = ids
        labels[number, : len(ids)] = np.where(mask, ids, IGNORED)
        attention[number, : len(ids)] = 1
    batch = {"input_ids": torch.from_numpy(input_ids), "labels": torch.from_numpy(labels)}
    if not attention.all():
        batch["attention_mask"] = torch.from_numpy(attention)
    return batch


def collate_packed(
    rows: Rows, sequences: Sequence[Sequence[int]], seq_len: int, pad_id: int
) -> MicroBatch:
    """input_ids, labels and position_ids, int64 [sequences, seq_len] on the CPU. Every row's positions begin anew, and so do those of the
    padding behind the last one: that is how models tell rows of a sequence apart."""
    import torch

    input_ids = np.full((len(sequences), seq_len), pad_id, np.int64)
    labels = np.full((len(sequences), seq_len), IGNORED, np.int64)
    positions = np.zeros((len(sequences), seq_len), np.int64)
    for number, members in enumerate(sequences):
        start = 0
        for ids, mask in map(rows.row, members):
            stop = start + len(ids)
            input_ids[number, start:stop] = ids
            labels[number, start:stop] = np.where(mask, ids, IGNORED)
            labels[number, start] = IGNORED  # the row before would predict it
            positions[number, start:stop] = np.arange(len(ids))
            start = stop
        positions[number, start:] = np.arange(seq_len - start)
    arrays = {"input_ids": input_ids, "labels": labels, "position_ids": positions}
    return {name: torch.from_numpy(array) for name, array in arrays.items()}
