"""Targets are shifted as transformers shifts them, and sums over any cut of a batch add up to its
loss."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.loss.loss_utils import ForCausalLMLoss

from megatrain.losses import IGNORE, Targets, find_targets, next_token

VOCABULARY = 11


def random_batch(rows: int, tokens: int, masked: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(labels [rows, tokens] with a share of `masked`, logits [rows, tokens, VOCABULARY])."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(VOCABULARY, (rows, tokens), generator=generator)
    labels[torch.rand(rows, tokens, generator=generator) < masked] = IGNORE
    return labels, torch.randn(rows, tokens, VOCABULARY, generator=generator)


def logprobs_of(logits: Tensor, targets: Targets) -> Tensor:
    chosen = logits.flatten(0, 1)[targets.index].log_softmax(-1)
    return chosen.gather(1, targets.labels[:, None]).squeeze(1)


def test_position_t_predicts_token_t_plus_1_of_its_own_row():
    labels = torch.tensor([[1, 2, IGNORE, 4], [5, IGNORE, 7, 8]])
    targets = find_targets(labels)
    # the last position of a row predicts nothing, whatever the next row begins with
    assert targets.index.tolist() == [0, 2, 5, 6]
    assert targets.labels.tolist() == [2, 4, 7, 8]


@pytest.mark.parametrize("masked", [0.0, 0.5, 0.9])
def test_unequal_micro_batches_add_up_to_the_loss_of_transformers(masked):
    labels, logits = random_batch(7, 12, masked)
    sums, counts = torch.zeros(()), 0.0
    for rows in (slice(0, 1), slice(1, 5), slice(5, 7)):
        targets = find_targets(labels[rows])
        sums += next_token(logprobs_of(logits[rows], targets), targets)[0]
        counts += next_token.denominator({"labels": labels[rows]})
    torch.testing.assert_close(sums / counts, ForCausalLMLoss(logits, labels, VOCABULARY))


def test_chunks_hold_every_target_once_and_in_order():
    targets = find_targets(random_batch(3, 8, 0.2)[0])
    for size in (1, 3, 1000):
        parts = targets.chunks(size)
        assert all(0 < len(part) <= size for part in parts)
        assert torch.cat([part.index for part in parts]).equal(targets.index)
        assert torch.cat([part.labels for part in parts]).equal(targets.labels)


def test_rows_without_targets_lose_nothing():
    one_token = torch.tensor([[3], [4]])  # predicts nothing
    for labels in (one_token, *(torch.full(shape, IGNORE) for shape in [(2, 5), (3, 1), (1, 0)])):
        targets = find_targets(labels)
        assert len(targets) == 0
        assert targets.chunks(4) == []
        assert next_token.denominator({"labels": labels}) == 0
        assert next_token(torch.empty(0), targets)[0].item() == 0
