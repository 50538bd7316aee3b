"""Steps, micro-batches, counts, shuffles and resuming."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch

from megatrain.data.dataset import Counts, IdArray, IndexArray, MaskArray
from megatrain.data.loader import Loader, Position, StepBatch, held_out_batches
from megatrain.errors import DataError
from megatrain.losses import IGNORE as IGNORED

PAD = 0


@dataclass
class FakeRows:
    """Row i is its own number, 1-based, `lengths[i]` times; the second half of it is target."""

    lengths: IndexArray
    counts: Counts = field(default_factory=Counts)
    digest: str = "fake"

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def target_counts(self) -> IndexArray:
        return self.lengths - self.lengths // 2

    def row(self, index: int) -> tuple[IdArray, MaskArray]:
        length = int(self.lengths[index])
        return np.full(length, index + 1, np.int32), np.arange(length) >= length // 2


ROWS = FakeRows(np.random.default_rng(0).integers(2, 33, 101))


def loader(rows: FakeRows = ROWS, **changes: Any) -> Loader:
    settings: dict[str, Any] = {
        "micro_batch_tokens": 64,
        "pad_id": PAD,
        "seed": 0,
        "tokens_per_step": 100,
        **changes,
    }
    if settings.get("rows_per_step"):
        settings["tokens_per_step"] = None
    return Loader(rows, **settings)


def row_numbers(batch: StepBatch) -> list[int]:
    return [int(number) - 1 for micro in batch.micro_batches for number in micro["input_ids"][:, 0]]


def same(one: StepBatch, other: StepBatch) -> bool:
    pairs = zip(one.micro_batches, other.micro_batches, strict=True)
    return one.after == other.after and all(
        a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a) for a, b in pairs
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"tokens_per_step": 100},
        {"rows_per_step": 7},
        {"tokens_per_step": 1},
        {"tokens_per_step": 10**6},
    ],
)
def test_an_epoch_gives_every_row_once(settings: dict[str, Any]):
    batches = list(loader(**settings))
    assert sorted(number for batch in batches for number in row_numbers(batch)) == list(range(101))
    assert batches[-1].epoch == 1.0
    assert len(batches) == loader(**settings).steps_total()


def test_steps_are_filled_with_real_tokens_until_the_next_row_would_not_fit():
    batches = list(loader())
    order = [number for batch in batches for number in row_numbers(batch)]
    assert order != sorted(order)
    for batch, following in itertools.pairwise(batches):
        assert batch.tokens <= 100
        assert batch.tokens + max(ROWS.lengths[row_numbers(following)]) > 100


def test_counts_are_of_real_tokens_and_targets():
    for batch in loader():
        real = sum(int(ROWS.lengths[number]) for number in row_numbers(batch))
        assert batch.tokens == real
        assert len(batch.lengths) == len(row_numbers(batch))
        assert batch.target_tokens == sum(
            int((micro["labels"] != IGNORED).sum()) for micro in batch.micro_batches
        )
        masks = [
            micro.get("attention_mask", torch.ones_like(micro["input_ids"]))
            for micro in batch.micro_batches
        ]
        assert sum(int(mask.sum()) for mask in masks) == real


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
                length = len(expected)
                assert row.tolist() == expected.tolist() + [PAD] * (len(row) - length)
                wanted = np.where(targets, expected, IGNORED).tolist() + [IGNORED] * (
                    len(row) - length
                )
                assert labels[number].tolist() == wanted
                if mask is not None:
                    assert mask[number].tolist() == [1] * length + [0] * (len(row) - length)
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


@pytest.mark.parametrize("settings", [{"tokens_per_step": 100}, {"rows_per_step": 7}])
@pytest.mark.parametrize("stop", [0, 1, 5, 16, 17, 30])
def test_a_saved_position_gives_the_identical_rest(settings: dict[str, Any], stop: int):
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

    class Watched(FakeRows):
        def row(self, index: int) -> tuple[IdArray, MaskArray]:
            read.append(index)
            return super().row(index)

    resumed = loader(Watched(ROWS.lengths))
    resumed.restore(interrupted.position())
    batch = next(iter(resumed))
    assert read[: len(batch.lengths)] == row_numbers(batch)
    assert len(read) < 40


def test_a_run_ends_at_max_steps_or_a_fraction_of_an_epoch():
    assert len(list(loader(max_steps=5))) == loader(max_steps=5).steps_total() == 5
    assert (
        len(list(loader(max_steps=50, epochs=None)))
        == loader(max_steps=50, epochs=None).steps_total()
        == 50
    )
    assert len(list(loader(max_steps=10**9))) == loader(max_steps=10**9).steps_total()
    part = list(loader(epochs=1.5, rows_per_step=10))
    assert sum(len(batch.lengths) for batch in part) == 101 + 51
    assert len(part) == loader(epochs=1.5, rows_per_step=10).steps_total()
    assert part[-1].epoch == pytest.approx(1 + 51 / 101)


@pytest.mark.parametrize("settings", [{"tokens_per_step": 100}, {"rows_per_step": 10}])
def test_what_a_fraction_of_an_epoch_left_out_comes_when_the_run_is_made_longer(
    settings: dict[str, Any],
):
    part = loader(epochs=1.5, **settings)
    seen = [n for batch in part for n in row_numbers(batch)]
    longer = loader(epochs=2, **settings)
    longer.restore(json.loads(json.dumps(part.position())))
    rest = list(longer)
    assert sorted(seen + [n for batch in rest for n in row_numbers(batch)]) == sorted(
        [*range(101), *range(101)]
    )
    assert longer.steps_total() == rest[-1].after.step


def test_an_ended_run_stays_ended():
    ended = loader()
    steps = len(list(ended))
    resumed = loader()
    resumed.restore(ended.position())
    assert list(resumed) == []
    assert resumed.steps_total() == steps


def test_positions_of_other_runs_are_refused():
    good = loader().position()
    changes: list[tuple[dict[str, Any], str]] = [
        ({"data": "other"}, "not those of the checkpoint"),
        ({"seed": 7}, r"shuffled with train\.seed 7, not 0"),
        ({"index": "x"}, "broken"),
        ({"index": 10**6}, "outside the data"),
        ({"step": -1}, "outside the data"),
    ]
    for change, message in changes:
        with pytest.raises(DataError, match=message):
            loader().restore({**good, **change})


def test_a_row_that_fits_no_micro_batch_is_refused():
    longest = int(ROWS.lengths.max())
    with pytest.raises(
        DataError,
        match=rf"a row of {longest} tokens does not fit a micro-batch of 8; set train\.micro_batch_tokens",
    ):
        loader(micro_batch_tokens=8)
    with pytest.raises(DataError, match="does not fit"):
        held_out_batches(ROWS, 8, PAD)


def test_held_out_batches_hold_every_row_once():
    found = [
        int(number) - 1
        for micro in held_out_batches(ROWS, 64, PAD)
        for number in micro["input_ids"][:, 0]
    ]
    assert sorted(found) == list(range(101))


def test_an_error_while_preparing_reaches_the_loop():
    class Broken(FakeRows):
        def row(self, index: int) -> tuple[IdArray, MaskArray]:
            raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        next(iter(loader(Broken(ROWS.lengths))))


# -- rows that share sequences --------------------------------------------------------------------------------------------------------


def documents(batch: StepBatch) -> dict[int, int]:
    """Tokens by row number, found again in the sequences of a step, where every row has positions and targets of its own."""
    found: dict[int, int] = {}
    for micro in batch.micro_batches:
        assert set(micro) == {"input_ids", "labels", "position_ids"}
        for ids, labels, positions in zip(
            micro["input_ids"], micro["labels"], micro["position_ids"], strict=True
        ):
            starts = [*(positions == 0).nonzero().flatten().tolist(), len(ids)]
            for start, stop in itertools.pairwise(starts):
                assert positions[start:stop].tolist() == list(range(stop - start))
                number = int(ids[start]) - 1
                if number == PAD - 1:
                    assert set(labels[start:stop].tolist()) == {IGNORED}
                    continue
                assert set(ids[start:stop].tolist()) == {number + 1}
                targets = [label != IGNORED for label in labels[start:stop].tolist()]
                assert targets == [
                    place >= max(1, (stop - start) // 2) for place in range(stop - start)
                ]
                assert number not in found
                found[number] = stop - start
    return found


def test_a_packed_step_has_the_rows_of_a_padded_one():
    for padded, packed in zip(loader(), loader(pack_to=32), strict=True):
        assert documents(packed) == {
            number: int(ROWS.lengths[number]) for number in row_numbers(padded)
        }
        assert (packed.lengths, packed.after) == (padded.lengths, padded.after)
        assert {micro["input_ids"].shape[1] for micro in packed.micro_batches} == {32}
        assert all(len(micro["input_ids"]) <= 2 for micro in packed.micro_batches)


def test_packed_sequences_are_nearly_full():
    (batch,) = loader(pack_to=64, micro_batch_tokens=256, tokens_per_step=10**6)
    room = sum(micro["input_ids"].numel() for micro in batch.micro_batches)
    assert batch.tokens > 0.95 * room
    assert [len(micro["input_ids"]) for micro in batch.micro_batches[:-1]] == [4] * (
        len(batch.micro_batches) - 1
    )


@pytest.mark.parametrize("pack_to", [None, 32], ids=["padded", "packed"])
@pytest.mark.parametrize(
    "settings", [{"tokens_per_step": 100}, {"rows_per_step": 7}, {"tokens_per_step": 10**6}]
)
def test_how_much_is_padded_is_known_before_any_row_is_read(
    settings: dict[str, Any], pack_to: int | None
):
    unread = FakeRows(ROWS.lengths)
    unread.row = lambda index: pytest.fail("a row was read")  # type: ignore[method-assign]
    sizes = (32, 48, 64, 1024)
    for size, most, mean, most_parts, mean_parts in loader(
        unread, pack_to=pack_to, epochs=3, **settings
    ).step_tokens(sizes):
        run = list(loader(pack_to=pack_to, epochs=3, **{**settings, "micro_batch_tokens": size}))
        full = [
            batch for batch in run if batch.epoch % 1
        ] or run  # an epoch's last has what is left
        assert most == max(map(computed, run))
        assert mean == pytest.approx(fmean(map(computed, full)))
        assert most_parts == max(len(batch.micro_batches) for batch in run)
        assert mean_parts == pytest.approx(fmean(len(batch.micro_batches) for batch in full))


def computed(batch: StepBatch) -> int:
    """Tokens, padding included."""
    return sum(micro["input_ids"].numel() for micro in batch.micro_batches)


def test_held_out_rows_are_packed_once_each():
    batches = list(held_out_batches(ROWS, 64, PAD, limit=20, pack_to=32))
    assert sorted(documents(StepBatch(batches, (), 0, 0.0, Position()))) == list(range(20))
