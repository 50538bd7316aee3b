"""Pairs and judged rows in micro-batches: together, complete, and the same however they are cut."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch

from megatrain.data.loader import Loader, MicroBatch, StepBatch
from megatrain.data.micro_batches import Regime, cuts, least_micro_batch, micro_batches, runs_of
from megatrain.data.samples import JUDGED, PAIRS, PLAIN
from megatrain.errors import DataError
from megatrain.losses import IGNORE
from tests.data.test_loader import Broken, computed, fake_rows

PAD, WIDTH, ROWS = 0, 40, 57
LENGTHS = np.random.default_rng(0).integers(4, WIDTH + 1, (ROWS, 2))
REFERENCES = -np.random.default_rng(1).random((ROWS, 2)) * 100


@dataclass(frozen=True)
class Example:
    """What a micro-batch has of one sequence, found by `row_of`."""

    number: int  # 2 * row + side
    ids: list[int]
    targets: list[bool]
    answer: list[bool] | None
    value: float
    reference: float | None
    mismatched: bool | None


def examples(batch: MicroBatch) -> list[Example]:
    """Every example of a micro-batch in its order, whose tensors are checked on the way."""
    row_of, real, found = batch["row_of"], batch["input_ids"] != PAD, list[Example]()
    assert row_of.dtype == torch.int64
    assert row_of.shape == batch["input_ids"].shape
    count = len(batch["row_value"])
    for name, dtype in (("row_reference", torch.float64), ("row_mismatched", torch.bool)):
        assert name not in batch or (batch[name].dtype, batch[name].shape) == (dtype, (count,))
    for sequence, of in zip(real, row_of, strict=True):  # padding belongs to the example before it
        assert bool((of.diff() >= 0).all())
        length = int(sequence.sum())
        assert bool(sequence[:length].all())
        assert bool((of[length:] == of[length - 1]).all())
    for place in range(count):
        here = (row_of == place) & real
        ids = batch["input_ids"][here].tolist()
        assert len(set(ids)) == 1
        answer = batch["token_answer"][here].tolist() if "token_answer" in batch else None
        labels = batch["labels"][here].tolist()
        assert set(labels) <= {ids[0], IGNORE}
        targets = [label != IGNORE for label in labels]
        reference = float(batch["row_reference"][place]) if "row_reference" in batch else None
        mismatched = bool(batch["row_mismatched"][place]) if "row_mismatched" in batch else None
        value = float(batch["row_value"][place])
        found.append(Example(ids[0] - 1, ids, targets, answer, value, reference, mismatched))
    if "position_ids" in batch:
        for place in range(count):
            positions = batch["position_ids"][(row_of == place) & real]
            assert positions.tolist() == list(range(len(positions)))
    return found


def loader(kind: str, **changes: Any) -> Loader:
    asked: dict[str, Any] = {"micro_batch_tokens": 160, "pad_id": PAD, "seed": 0} | changes
    asked.setdefault("references", REFERENCES)
    if "rows_per_step" not in asked:
        asked.setdefault("tokens_per_step", 400)
    return Loader(asked.pop("rows", fake_rows(LENGTHS, kind)), **asked)


def of_step(batch: StepBatch) -> list[Example]:
    return [example for micro in batch.micro_batches for example in examples(micro)]


def in_order(found: Iterable[Example]) -> list[Example]:
    return sorted(found, key=lambda example: example.number)


PACKED = pytest.mark.parametrize("pack_to", [None, WIDTH, 64], ids=["padded", "packed", "roomy"])


@PACKED
@pytest.mark.parametrize("kind", [PAIRS, JUDGED])
def test_an_epoch_has_both_sequences_of_every_row_once(kind, pack_to):
    found = [one for batch in loader(kind, pack_to=pack_to) for one in of_step(batch)]
    assert [one.number for one in in_order(found)] == list(range(2 * ROWS))
    for one in found:
        row, side = divmod(one.number, 2)
        length = int(LENGTHS[row, side])
        assert len(one.ids) == length
        assert one.targets == [place >= max(1, length // 2) for place in range(length)]
        assert one.answer is None
        assert one.value == row
        assert one.reference == REFERENCES[row, side]
        assert one.mismatched == (side == 1 if kind == JUDGED else None)


@PACKED
def test_the_two_answers_of_a_pair_are_always_together(pack_to):
    for size in [2 * 64, 161, 200, 255, 400, 10**6]:
        for batch in loader(PAIRS, pack_to=pack_to, micro_batch_tokens=size):
            for micro in batch.micro_batches:
                numbers = [one.number for one in examples(micro)]
                assert numbers[1::2] == [number + 1 for number in numbers[::2]]
                assert all(number % 2 == 0 for number in numbers[::2])
                assert micro["input_ids"].numel() <= size


@pytest.mark.slow
@PACKED
@pytest.mark.parametrize("kind", [PAIRS, JUDGED])
def test_a_step_has_the_same_rows_however_it_is_cut(kind, pack_to):
    def steps(size: int, pack_to: int | None = pack_to) -> list[Any]:
        made = loader(kind, pack_to=pack_to, micro_batch_tokens=size)
        return [(in_order(of_step(one)), one.lengths, one.epoch, one.after) for one in made]

    expected = steps(10**6, None)
    for size in (128, 129, 200, 333, 1000):
        assert steps(size) == expected


@pytest.mark.parametrize("kind", [PAIRS, JUDGED])
def test_a_step_is_filled_with_what_is_trained_on(kind):
    rows, batches, trained = (
        fake_rows(LENGTHS, kind),
        list(loader(kind)),
        {PAIRS: 2, JUDGED: 1}[kind],
    )
    numbers = [[one.number for one in of_step(batch)] for batch in batches]
    for batch, mine in zip(batches, numbers, strict=True):
        of_rows = sorted({number // 2 for number in mine})
        assert sorted(batch.lengths) == sorted(
            rows.side_lengths[of_rows, :trained].ravel().tolist()
        )
        assert batch.tokens == rows.lengths[of_rows].sum() <= 400
    for batch, following in zip(batches, numbers[1:], strict=False):
        assert batch.tokens + max(rows.lengths[number // 2] for number in following) > 400
    (whole,) = loader(kind, tokens_per_step=int(rows.lengths.sum()))
    assert len(whole.lengths) == trained * ROWS


def test_mismatches_are_never_beside_rows_that_are_trained_on():
    for batch in loader(JUDGED):
        of_each = [set(micro["row_mismatched"].tolist()) for micro in batch.micro_batches]
        assert all(len(one) == 1 for one in of_each)
        kinds = [one.pop() for one in of_each]
        assert kinds == sorted(kinds)
        assert {False, True} == set(kinds)


def test_prompts_of_chosen_answers_may_be_targets_too():
    plain, more = (
        list(loader(PAIRS, prompts_too=prompts_too, pack_to=pack_to))
        for prompts_too, pack_to in ((False, None), (True, 64))
    )
    for one, other in zip(plain, more, strict=True):
        for before, after in zip(in_order(of_step(one)), in_order(of_step(other)), strict=True):
            assert after.answer == before.targets
            whole = [False] + [True] * (len(after.ids) - 1)
            assert after.targets == (before.targets if after.number % 2 else whole)
    for micro in more[0].micro_batches:
        assert micro["token_answer"].dtype == torch.bool
        padding = micro["input_ids"] == PAD
        assert not micro["token_answer"][padding].any()
        assert bool((micro["labels"][padding] == IGNORE).all())


def test_packed_pairs_share_sequences_and_long_ones_get_two():
    (batch,) = loader(PAIRS, pack_to=WIDTH, micro_batch_tokens=400, tokens_per_step=10**6)
    alone = shared = 0
    for micro in batch.micro_batches:
        of_sequences = [set(of[ids != PAD].tolist()) for of, ids in zip(
            micro["row_of"], micro["input_ids"], strict=True)]  # fmt: skip
        for one in of_sequences:
            if len(one) == 1:
                alone += 1
            else:
                shared += len(one)
                assert all((example ^ 1) in one for example in one), "pairs share a sequence"
    too_long = int((LENGTHS.sum(1) > WIDTH).sum())
    assert alone == 2 * too_long
    assert shared == 2 * (ROWS - too_long) > 0
    (roomy,) = loader(PAIRS, pack_to=400, micro_batch_tokens=10**6, tokens_per_step=10**6)
    (micro,) = roomy.micro_batches
    assert len(micro["input_ids"]) == -(-roomy.tokens // 400), "no fewer would hold them"


@PACKED
@pytest.mark.parametrize("kind", [PLAIN, PAIRS, JUDGED])
@pytest.mark.parametrize(
    "step", [{"tokens_per_step": 300}, {"rows_per_step": 9}, {"tokens_per_step": 10**6}]
)
def test_how_much_is_padded_is_known_before_any_row_is_read(kind, pack_to, step):
    lengths = LENGTHS[:, :1] if kind == PLAIN else LENGTHS
    asked = {"pack_to": pack_to, "epochs": 2, "rows": fake_rows(lengths, kind), **step}
    unread = {**asked, "rows": fake_rows(lengths, kind, Broken)}
    sizes = (128, 200, 1024)
    for size, most, mean, most_parts, mean_parts in loader(kind, **unread).step_tokens(sizes):
        run = list(loader(kind, **{**asked, "micro_batch_tokens": size}))
        full = [batch for batch in run if batch.epoch % 1] or run  # an epoch's last has the rest
        assert most == max(map(computed, run))
        assert mean == pytest.approx(fmean(map(computed, full)))
        assert most_parts == max(len(batch.micro_batches) for batch in run)
        assert mean_parts == pytest.approx(fmean(len(batch.micro_batches) for batch in full))


@PACKED
@pytest.mark.parametrize("kind", [PAIRS, JUDGED])
def test_held_out_rows_come_once_each_and_in_one_order(kind, pack_to):
    rows = fake_rows(LENGTHS, kind)
    more = {"references": REFERENCES, "prompts_too": kind == PAIRS}
    batches = list(micro_batches(rows, np.arange(20), 128, PAD, pack_to, **more))
    found = [one for batch in batches for one in examples(batch)]
    assert [one.number for one in in_order(found)] == list(range(40))
    assert all(one.reference is not None for one in found)
    without = next(micro_batches(rows, np.arange(20), 128, PAD))
    assert "row_reference" not in without
    assert "token_answer" not in without


@pytest.mark.parametrize(
    ("kind", "pack_to", "least", "words"),
    [
        (PAIRS, None, 2 * WIDTH, "the two sequences of a pair, 80 tokens with their padding, do"),
        (PAIRS, WIDTH, 2 * WIDTH, "the two sequences of a pair, 80 tokens with their padding, do"),
        (PAIRS, 2 * WIDTH, 2 * WIDTH, "the two sequences of a pair, 80 tokens with"),
        (JUDGED, None, WIDTH, "a row of 40 tokens does"),
        (PLAIN, None, WIDTH, "a row of 40 tokens does"),
    ],
)
def test_what_fits_no_micro_batch_is_refused(kind, pack_to, least, words):
    rows = fake_rows([[WIDTH], [4]] if kind == PLAIN else LENGTHS, kind)
    assert LENGTHS.max() == WIDTH
    assert least_micro_batch(rows, pack_to) == least
    words = rf"{words}.* fit a micro-batch of {least - 1}; set train\.micro_batch_tokens to {least}"
    with pytest.raises(DataError, match=words):
        loader(kind, rows=rows, micro_batch_tokens=least - 1, pack_to=pack_to)
    large = loader(kind, rows=rows, micro_batch_tokens=least, pack_to=pack_to)
    assert large.steps_total()
    large.micro_batch_tokens = least - 1
    with pytest.raises(DataError, match=words):
        large.batches_of(rows)


@PACKED
def test_pairs_of_another_regime_are_apart(pack_to):
    """By the longer answer: the shorter one is beside it, whatever its length."""
    regimes = (Regime(20),)
    for batch in loader(PAIRS, regimes=regimes, micro_batch_tokens=10**6, pack_to=pack_to):
        for micro in batch.micro_batches:
            found = examples(micro)
            pairs = zip(found[::2], found[1::2], strict=True)
            longer = [max(len(one.ids), len(other.ids)) for one, other in pairs]
            assert len({length <= 20 for length in longer}) == 1


def test_twos_are_never_cut():
    for twos in [0, 2, 6, 10]:
        for size in range(2, 40):
            parts = list(cuts([3] * 10, size, twos))
            assert [start for start, _ in parts] == [0, *(stop for _, stop in parts[:-1])]
            assert parts[-1][1] == 10
            assert all(stop >= twos or stop % 2 == 0 for _, stop in parts)
            if size >= 6:
                assert all((stop - start) * 3 <= size for start, stop in parts)


def test_no_row_is_lost_on_its_way_into_sequences():
    for kind, pack_to in itertools.product((PAIRS, JUDGED), (None, WIDTH, 64, 400)):
        runs = runs_of(LENGTHS, kind, pack_to, (Regime(10), Regime(30, exact=True)))
        numbers = [number for run in runs for members in run.examples for number in members]
        assert sorted(numbers) == list(range(2 * ROWS))
        for run in runs:
            flat = LENGTHS.reshape(-1)
            filled = [sum(int(flat[number]) for number in members) for members in run.examples]
            assert all(tokens <= width for tokens, width in zip(filled, run.lengths, strict=True))
