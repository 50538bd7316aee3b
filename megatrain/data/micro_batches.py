"""The rows of a step in micro-batches: padded, one sequence each, or packed into sequences of one
length (`pack_to`).

A sequence that a row holds is an example, with a number: row * sides + side. The two examples of a
pair are always in one micro-batch. Mismatches of judged rows, which are not trained on, are in
micro-batches of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from megatrain.data.rows import IndexArray, Rows, TokenRows, best_fit
from megatrain.data.samples import JUDGED, PAIRS
from megatrain.errors import DataError
from megatrain.losses import IGNORE

MicroBatch = dict[str, torch.Tensor]
ReferenceArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class RowRun:
    """Sequences that may share a micro-batch, the longest first: tokens of each with its padding,
    if it is the first of its micro-batch, and its examples. The first `twos` are two by two."""

    lengths: list[int]
    examples: list[list[int]]
    twos: int = 0


def runs_of(
    side_lengths: IndexArray, kind: str, pack_to: int | None = None, regimes: Regimes = ()
) -> list[RowRun]:
    """Rows (lengths int64 [rows, sides]) as they enter micro-batches of whatever size. Pairs are
    alike by their longer side: the other is beside it."""
    if kind == PAIRS:
        return list(_runs_of_pairs(side_lengths, pack_to, regimes))
    sides = side_lengths.shape[1]
    return [
        run
        for side in range(sides)
        for run in _runs_of_one(side_lengths[:, side], sides, side, pack_to, regimes)
    ]


def _runs_of_one(
    lengths: IndexArray, sides: int, side: int, pack_to: int | None, regimes: Regimes
) -> Iterator[RowRun]:
    """Runs of one side of all rows."""
    order = np.argsort(-lengths, kind="stable")
    for run in alike(lengths[order].tolist(), regimes):
        members = order[run]
        numbers, tokens = members * sides + side, lengths[members].tolist()
        if pack_to is None:
            yield RowRun(tokens, numbers[:, None].tolist())
        else:
            packed = [numbers[places].tolist() for places in best_fit(tokens, pack_to)]
            yield RowRun([pack_to] * len(packed), packed)


def _runs_of_pairs(lengths: IndexArray, pack_to: int | None, regimes: Regimes) -> Iterator[RowRun]:
    longer = lengths.max(1)
    order = np.argsort(-longer, kind="stable")
    for run in alike(longer[order].tolist(), regimes):
        members = order[run]
        apart = members if pack_to is None else members[lengths[members].sum(1) > pack_to]
        sequences = [[2 * pair + side] for pair in apart.tolist() for side in (0, 1)]
        if pack_to is None:
            yield RowRun(np.repeat(longer[members], 2).tolist(), sequences, twos=len(sequences))
            continue
        twos = len(sequences)
        both = lengths.sum(1)
        together = members[both[members] <= pack_to]
        together = together[np.argsort(-both[together], kind="stable")]
        for places in best_fit(both[together].tolist(), pack_to):
            pairs = together[places].tolist()
            sequences.append([2 * pair + side for pair in pairs for side in (0, 1)])
        yield RowRun([pack_to] * len(sequences), sequences, twos)


def least_micro_batch(rows: Rows, pack_to: int | None = None) -> int:
    """Tokens, padding included, of the smallest micro-batch that any row fits."""
    if rows.kind != PAIRS:
        return int(rows.side_lengths.max())
    if pack_to is None:
        return 2 * int(rows.side_lengths.max())
    return pack_to if int(rows.lengths.max()) <= pack_to else 2 * pack_to


def check_longest(rows: Rows, micro_batch_tokens: int, pack_to: int | None = None) -> None:
    """Raises DataError if the longest row does not fit a micro-batch."""
    longest = least_micro_batch(rows, pack_to)
    if longest > micro_batch_tokens:
        what = f"a row of {longest} tokens does"
        if rows.kind == PAIRS:
            what = f"the two sequences of a pair, {longest} tokens with their padding, do"
        raise DataError(
            f"{what} not fit a micro-batch of {micro_batch_tokens}; "
            f"set train.micro_batch_tokens to {longest} or more, or a smaller train.seq_len"
        )


def micro_batches(
    rows: Rows,
    chosen: IndexArray,
    micro_batch_tokens: int,
    pad_id: int,
    pack_to: int | None = None,
    regimes: Regimes = (),
    references: ReferenceArray | None = None,
    prompts_too: bool = False,
) -> Iterator[MicroBatch]:
    """The chosen rows, longest first, in micro-batches of at most `micro_batch_tokens`, which
    `check_longest` looks at. references, prompts_too: as in `Loader`."""
    shortest_limit = min((regime.limit for regime in regimes), default=None)
    numbers = (chosen[:, None] * rows.sides + np.arange(rows.sides)).reshape(-1).tolist()
    for run in runs_of(rows.side_lengths[chosen], rows.kind, pack_to, regimes):
        for start, stop in cuts(run.lengths, micro_batch_tokens, run.twos):
            members = run.examples[start:stop]
            sequences = [[numbers[example] for example in examples] for examples in members]
            about = pad_id, pack_to, shortest_limit, references, prompts_too
            yield collate(rows, sequences, *about)


def cuts(
    lengths: Sequence[int], micro_batch_tokens: int, twos: int = 0
) -> Iterator[tuple[int, int]]:
    """[start, stop) of the micro-batches into which sequences, longest first, are cut; the first
    `twos` come in twos, which are never apart."""
    start = 0
    while start < len(lengths):
        stop = min(start + max(1, micro_batch_tokens // lengths[start]), len(lengths))
        if stop < twos and stop % 2:
            stop += 1 if stop == start + 1 else -1
        yield start, stop
        start = stop


def dealt(side_lengths: IndexArray, rank: int, ranks: int) -> IndexArray:
    """The rows of a step that one of several ranks computes, ascending, int64. Rows (lengths int64
    [rows, sides]) are dealt by length to and fro, so that ranks differ by a row at most and have
    about as many tokens each."""
    order = np.argsort(-side_lengths.max(1), kind="stable")
    rounds, place = np.divmod(np.arange(len(order)), ranks)
    owner = np.where(rounds % 2, ranks - 1 - place, place)
    return np.sort(order[owner == rank])


def counted_tokens(
    steps: Iterable[Sequence[Sequence[RowRun]]], full: Iterable[bool], micro_batch_tokens: int
) -> tuple[int, int, float, int, float]:
    """Padded tokens and micro-batches of steps (the rows of each, by ranks) on the rank that has
    most. Returns micro_batch_tokens; a step's padded tokens, at most and on average over the full
    steps; and its number of micro-batches, at most and on average."""
    found = []
    for step in steps:
        parts = [
            [
                (stop - start) * run.lengths[start]
                for run in of_rank
                for start, stop in cuts(run.lengths, micro_batch_tokens, run.twos)
            ]
            for of_rank in step
        ]
        found.append((max(map(sum, parts)), max(map(len, parts))))
    whole = [step for step, is_full in zip(found, full, strict=True) if is_full] or found
    tokens, parts_most = map(max, zip(*found, strict=True))
    mean_tokens, mean_parts = map(fmean, zip(*whole, strict=True))
    return micro_batch_tokens, tokens, mean_tokens, parts_most, mean_parts


def collate(
    rows: Rows,
    sequences: Sequence[Sequence[int]],
    pad_id: int,
    pack_to: int | None = None,
    limit: int | None = None,
    references: ReferenceArray | None = None,
    prompts_too: bool = False,
) -> MicroBatch:
    """input_ids and labels (not shifted, -100: no target), int64 [sequences, tokens] on the CPU, of
    sequences given as the numbers of their examples.

    Sequences are padded on the right, to `pack_to` tokens or else the longest. With `pack_to` there
    are position_ids, which restart with every row, with the padding behind the last one, and in it
    before they reach `limit`: models tell the rows of a sequence apart by it. Where there is
    padding, they have token_real, bool [sequences, tokens]; without `pack_to`, attention_mask.

    Of rows that are not plain, or have `references`, a loss also gets, of pairs the chosen first:
        row_of: of each token the example's number, of padding the last one's; int64, as input_ids.
        row_value, row_reference: of `TokenRows.values`, float32, and `references`, float64.
        row_mismatched: of judged rows, whether it is a mismatch; bool [examples].
        token_answer: where `prompts_too`, for which labels of chosen answers have the prompt as
            well, true for the tokens of answers; bool [sequences, tokens].
        `TokenRows.of_tokens`, by their names, float32 [sequences, tokens].
    """
    lengths = rows.side_lengths.reshape(-1)
    filled = np.array([sum(int(lengths[number]) for number in members) for members in sequences])
    shape = len(sequences), (width := pack_to or int(filled.max()))
    input_ids, labels = np.full(shape, pad_id, np.int64), np.full(shape, IGNORE, np.int64)
    positions, row_of, answers = (np.zeros(shape, kind) for kind in (np.int64, np.int64, np.bool_))
    example, (row, side) = 0, np.divmod(np.concatenate(sequences), rows.sides)
    for sequence, members in enumerate(sequences):
        start = 0
        for _ in members:
            ids, mask = rows.side(int(row[example]), int(side[example]))
            stop = start + len(ids)
            targets = mask | (prompts_too and side[example] == 0)
            input_ids[sequence, start:stop] = ids
            labels[sequence, start:stop] = np.where(targets, ids, IGNORE)
            labels[sequence, start] = IGNORE  # the row before would predict it
            answers[sequence, start + 1 : stop] = mask[1:]
            positions[sequence, start:stop] = np.arange(len(ids))
            row_of[sequence, start:] = example
            start, example = stop, example + 1
        positions[sequence, start:] = np.arange(width - start) % (limit or width)
    arrays: dict[str, npt.NDArray[Any]] = {"input_ids": input_ids, "labels": labels}
    if pack_to is not None:
        arrays["position_ids"] = positions
    if int(filled.min()) < width:
        real = np.arange(width) < filled[:, None]
        arrays |= {"token_real": real} if pack_to else {"attention_mask": real.astype(np.int64)}
    if references is not None:
        arrays |= {"row_of": row_of, "row_reference": references[row, side]}
    if rows.values is not None:
        arrays |= {"row_of": row_of, "row_value": rows.values[row]}
        arrays |= {"row_mismatched": side == 1} if rows.kind == JUDGED else {}
        arrays |= {"token_answer": answers} if prompts_too else {}
        arrays |= _of_tokens(rows, sequences, shape)
    of_images = _of_images(rows, sequences, input_ids)
    return {name: torch.from_numpy(array) for name, array in arrays.items()} | of_images


def _of_images(rows: Rows, sequences: Sequence[Sequence[int]], ids: IndexArray) -> MicroBatch:
    """Tensors that the model's forward takes for images of these sequences, if there are any."""
    if not isinstance(rows, TokenRows) or rows.images is None or rows.sight is None:
        return {}
    seen = [
        [one for number in members for one in rows.pictures(*divmod(number, rows.sides))]
        for members in sequences
    ]
    if not any(seen):
        return {}
    types = {name: torch.from_numpy(array) for name, array in rows.sight.types(ids).items()}
    return types | rows.sight.inputs(seen)


def _of_tokens(
    rows: TokenRows, sequences: Sequence[Sequence[int]], shape: tuple[int, int]
) -> dict[str, npt.NDArray[Any]]:
    """Numbers of tokens where these lie in the sequences, 0 elsewhere."""
    found = {name: np.zeros(shape, np.float32) for name in rows.of_tokens}
    for sequence, members in enumerate(sequences if found else ()):
        start = 0
        for number in members:
            span = rows.span(*divmod(number, rows.sides))
            stop = start + span.stop - span.start
            for name, values in rows.of_tokens.items():
                found[name][sequence, start:stop] = values[span]
            start = stop
    return found


@dataclass(frozen=True)
class Regime:
    """Sequences of up to `limit` tokens are alike, as are longer ones, if `exact` of one length."""

    limit: int
    exact: bool = False

    def of(self, length: int) -> int:
        """A number that sequences which may be together share."""
        return 0 if length <= self.limit else length if self.exact else 1


Regimes = tuple[Regime, ...]


def alike(lengths: Sequence[int], regimes: Regimes) -> list[slice]:
    """The runs of lengths, which descend or ascend, that may share a micro-batch."""
    if not regimes:
        return [slice(0, len(lengths))]
    runs, start = [], 0
    for _, run in groupby([regime.of(length) for regime in regimes] for length in lengths):
        stop = start + len(list(run))
        runs.append(slice(start, stop))
        start = stop
    return runs
