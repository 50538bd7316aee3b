"""Steps, micro-batches, counts, shuffles and resuming."""

from __future__ import annotations

import itertools
import json
from statistics import median_high
from typing import Any

import numpy as np
import pytest
import torch

from megatrain.data.loader import Loader, StepBatch
from megatrain.data.rows import Counts, IdArray, MaskArray, TokenRows
from megatrain.data.samples import KINDS, PLAIN
from megatrain.errors import DataError
from megatrain.losses import IGNORE as IGNORED

PAD = 0


def fake_rows(lengths: Any, kind: str = PLAIN, make: type[TokenRows] = TokenRows) -> TokenRows:
    """Sequence i is the number i + 1 as often as `lengths` (of rows, or rows and sides) says; the
    second half of it is target."""
    rows, flat = len(lengths), np.asarray(lengths).reshape(-1)
    offsets = np.concatenate([[0], np.cumsum(flat)])
    ids = np.repeat(np.arange(1, len(flat) + 1, dtype=np.int32), flat)
    mask = np.arange(len(ids)) >= np.repeat(offsets[:-1] + flat // 2, flat)
    targets = (flat - flat // 2).reshape(rows, -1)[:, : KINDS[kind].trained].sum(1)
    hashes, joined = np.arange(rows, dtype=np.uint64), np.zeros(rows, np.bool_)
    values = None if kind == PLAIN else np.arange(rows, dtype=np.float32)
    of_rows = (hashes, joined, hashes, np.arange(rows), Counts(), kind, values)
    return make(ids, mask, offsets, targets, *of_rows)


ROWS = fake_rows(np.random.default_rng(0).integers(2, 33, 101))


def loader(rows: TokenRows = ROWS, **changes: Any) -> Loader:
    asked: dict[str, Any] = {"micro_batch_tokens": 64, "pad_id": PAD, "seed": 0} | changes
    if "rows_per_step" not in asked:
        asked.setdefault("tokens_per_step", 100)
    return Loader(rows, **asked)


BY_TOKENS, BY_ROWS = {"tokens_per_step": 100}, {"rows_per_step": 7}
AT_ONCE: dict[str, Any] = {"tokens_per_step": 10**6}


def row_numbers(batch: StepBatch) -> list[int]:
    return [int(number) - 1 for micro in batch.micro_batches for number in micro["input_ids"][:, 0]]


def same(one: StepBatch, other: StepBatch) -> bool:
    pairs = zip(one.micro_batches, other.micro_batches, strict=True)
    return one.after == other.after and all(
        a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a) for a, b in pairs
    )


def test_an_epoch_gives_every_row_once():
    for settings in [BY_TOKENS, BY_ROWS, {"tokens_per_step": 1}, AT_ONCE]:
        batches = list(loader(**settings))
        assert sorted(number for batch in batches for number in row_numbers(batch)) == list(
            range(101)
        )
        assert batches[-1].epoch == 1.0
        assert len(batches) == loader(**settings).steps_total()


def test_steps_are_filled_with_real_tokens_until_the_next_row_would_not_fit():
    batches = list(loader())
    order = [number for batch in batches for number in row_numbers(batch)]
    assert order != sorted(order)
    for batch, following in itertools.pairwise(batches):
        assert batch.tokens <= 100
        assert batch.tokens + max(ROWS.lengths[row_numbers(following)]) > 100


def test_counts_are_of_real_tokens():
    for batch in loader():
        real = sum(int(ROWS.lengths[number]) for number in row_numbers(batch))
        assert batch.tokens == real
        assert len(batch.lengths) == len(row_numbers(batch))
        masked = 0
        for micro in batch.micro_batches:
            mask = micro.get("attention_mask", torch.ones_like(micro["input_ids"]))
            masked += int(mask.sum())
        assert real == masked


def test_micro_batches_fit_and_are_padded_on_the_right():
    padded = 0
    for batch in loader(tokens_per_step=300):
        widths = [micro["input_ids"].shape[1] for micro in batch.micro_batches]
        assert widths == sorted(widths, reverse=True)
        for micro in batch.micro_batches:
            ids, labels = micro["input_ids"], micro["labels"]
            assert ids.dtype == labels.dtype == torch.int64
            assert ids.numel() <= 64
            mask = micro.get("attention_mask")
            padded += mask is not None
            assert (mask is None) == bool((ids != PAD).all())
            for number, row in enumerate(ids):
                expected, targets = ROWS.row(int(row[0]) - 1)
                length, missing = len(expected), len(row) - len(expected)
                assert row.tolist() == expected.tolist() + [PAD] * missing
                wanted = np.where(targets, expected, IGNORED).tolist()
                assert labels[number].tolist() == wanted + [IGNORED] * missing
                if mask is not None:
                    assert mask[number].tolist() == [1] * length + [0] * missing
    assert padded


def test_epochs_are_shuffled_anew_and_alike_for_a_seed():
    first, second = (list(loader(epochs=2, seed=seed)) for seed in (0, 0))
    assert all(same(a, b) for a, b in zip(first, second, strict=True))
    halves = [
        [n for batch in first for n in row_numbers(batch) if epoch < batch.epoch <= epoch + 1]
        for epoch in (0, 1)
    ]
    assert sorted(halves[0]) == sorted(halves[1])
    assert halves[0] != halves[1]
    assert not same(first[0], next(iter(loader(seed=1))))


def test_a_saved_position_gives_the_identical_rest():
    sizes: list[dict[str, Any]] = [BY_TOKENS, BY_ROWS]
    for settings in sizes:
        for stop in [0, 1, 5, 16, 17, 30]:
            whole = list(loader(epochs=3, **settings))
            interrupted = loader(epochs=3, **settings)
            iterator = iter(interrupted)
            for _ in range(stop):
                next(iterator)
            saved = json.loads(json.dumps(interrupted.position()))
            resumed = loader(epochs=3, **settings)
            resumed.restore(saved)
            assert resumed.steps_total() == len(whole)
            rest = list(resumed)
            assert len(rest) == len(whole) - stop
            assert all(same(a, b) for a, b in zip(rest, whole[stop:], strict=True))


def test_resuming_reads_none_of_the_consumed_rows():
    interrupted = loader()
    iterator = iter(interrupted)
    for _ in range(10):
        next(iterator)
    read: list[int] = []

    class Watched(TokenRows):
        def side(self, index: int, side: int) -> tuple[IdArray, MaskArray]:
            read.append(index)
            return super().side(index, side)

    resumed = loader(fake_rows(ROWS.lengths, make=Watched))
    resumed.restore(interrupted.position())
    batch = next(iter(resumed))
    assert read[: len(batch.lengths)] == row_numbers(batch)
    assert len(read) < 40


def test_a_run_ends_at_max_steps_or_a_fraction_of_an_epoch():
    def steps(**asked: Any) -> int:
        made = len(list(loader(**asked)))
        assert made == loader(**asked).steps_total()
        return made

    assert steps(max_steps=5) == 5
    assert steps(max_steps=50, epochs=None) == 50
    assert steps(max_steps=10**9) == steps()
    steps(epochs=1.5, rows_per_step=10)
    part = list(loader(epochs=1.5, rows_per_step=10))
    assert sum(len(batch.lengths) for batch in part) == 101 + 51
    assert part[-1].epoch == pytest.approx(1 + 51 / 101)


@pytest.mark.parametrize("settings", [BY_TOKENS, {"rows_per_step": 10}])
def test_what_a_fraction_of_an_epoch_left_out_comes_when_the_run_is_made_longer(settings):
    part = loader(epochs=1.5, **settings)
    batches = list(part)
    longer = loader(epochs=2, **settings)
    longer.restore(json.loads(json.dumps(part.position())))
    rest = list(longer)
    seen = [number for batch in (*batches, *rest) for number in row_numbers(batch)]
    assert sorted(seen) == sorted([*range(101), *range(101)])
    assert longer.steps_total() == rest[-1].after.step


def test_the_rows_of_a_step_are_not_those_that_an_epoch_leaves():
    assert loader(rows_per_step=60).rows_of_a_step() == 60, "the second of two steps has 41"
    run = loader(epochs=1, tokens_per_step=100)
    assert run.rows_of_a_step() == median_high(len(row_numbers(batch)) for batch in run)


def test_an_ended_run_stays_ended():
    ended = loader()
    steps = len(list(ended))
    resumed = loader()
    resumed.restore(ended.position())
    assert list(resumed) == []
    assert resumed.steps_total() == steps


def test_positions_of_other_runs_are_refused():
    change: Any
    for change, words in [
        ({"data": "other"}, "not those of the checkpoint"),
        ({"seed": 7}, r"shuffled with train\.seed 7, not 0"),
        ({"index": "x"}, "broken"),
        ({"index": 10**6}, "outside the data"),
        ({"step": -1}, "outside the data"),
    ]:
        with pytest.raises(DataError, match=words):
            loader().restore({**loader().position(), **change})


def test_rows_to_come_are_those_that_are_handed_out():
    settings: Any
    for settings in [
        {"epochs": 0.3},
        {"epochs": 1},
        {"epochs": 1.2, "rows_per_step": 7},
        {"epochs": None, "max_steps": 3},
        {"epochs": 2, "max_steps": 9, "rows_per_step": 13},
    ]:
        asked, others = loader(**settings), loader(**settings)
        found = [row_numbers(batch) for batch in others]
        assert asked.rows_to_come().tolist() == sorted({row for rows in found for row in rows})
        next(iter(asked))
        assert asked.rows_to_come().tolist() == sorted({row for rows in found[1:] for row in rows})
        assert (
            asked.rows_to_come(from_start=True).tolist()
            == loader(**settings).rows_to_come().tolist()
        )
        assert others.rows_to_come().tolist() == []


class Broken(TokenRows):
    def side(self, index: int, side: int) -> tuple[IdArray, MaskArray]:
        raise OSError("the disk is gone")


def test_an_error_while_preparing_reaches_the_loop():
    with pytest.raises(OSError, match="the disk is gone"):
        next(iter(loader(fake_rows(ROWS.lengths, make=Broken))))


# -- sequence packing ----------------------------------------------------------------------------


def documents(batch: StepBatch) -> dict[int, int]:
    """Tokens by row number, found again in the sequences of a step, where every row has positions
    and targets of its own."""
    found: dict[int, int] = {}
    for micro in batch.micro_batches:
        assert {*micro} - {"token_real"} == {"input_ids", "labels", "position_ids"}
        sequences = zip(micro["input_ids"], micro["labels"], micro["position_ids"], strict=True)
        for ids, labels, positions in sequences:
            starts = [*(positions == 0).nonzero().flatten().tolist(), len(ids)]
            for start, stop in itertools.pairwise(starts):
                length, number = stop - start, int(ids[start]) - 1
                assert positions[start:stop].tolist() == list(range(length))
                if number == PAD - 1:
                    assert set(labels[start:stop].tolist()) == {IGNORED}
                    continue
                assert set(ids[start:stop].tolist()) == {number + 1}
                targets = [label != IGNORED for label in labels[start:stop].tolist()]
                assert targets == [place >= max(1, length // 2) for place in range(length)]
                assert number not in found
                found[number] = length
    return found


def test_a_packed_step_has_the_rows_of_a_padded_one():
    for padded, packed in zip(loader(), loader(pack_to=32), strict=True):
        lengths = {number: int(ROWS.lengths[number]) for number in row_numbers(padded)}
        assert documents(packed) == lengths
        assert (packed.lengths, packed.after) == (padded.lengths, padded.after)
        assert {micro["input_ids"].shape[1] for micro in packed.micro_batches} == {32}
        assert all(len(micro["input_ids"]) <= 2 for micro in packed.micro_batches)


def test_packed_sequences_are_nearly_full():
    (batch,) = loader(pack_to=64, micro_batch_tokens=256, **AT_ONCE)
    assert batch.tokens > 0.95 * computed(batch)
    assert {len(micro["input_ids"]) for micro in batch.micro_batches[:-1]} == {4}


def computed(batch: StepBatch) -> int:
    """Tokens, padding included."""
    return sum(micro["input_ids"].numel() for micro in batch.micro_batches)
