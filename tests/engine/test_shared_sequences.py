"""Rows that share a sequence are trained on as if each were alone, in every family that tells them apart; the others are known."""

from __future__ import annotations

import pytest
import torch

from megatrain.data.loader import collate, collate_packed
from megatrain.models.documents import documents_of
from megatrain.models.skeleton import Skeleton
from tests.data.test_loader import FakeRows
from tests.support import FAMILIES, MORE_FAMILIES, engine_of, gradients_of, tiny_config

LENGTHS = [7, 5, 4, 3, 2]
SEQUENCES = [[0, 1], [2, 3, 4]]  # of 12 and 9 tokens, in 13
# These count positions otherwise, or make masks of their own: their rows would see each other.
TOGETHER = {"opt", "opt-projected", "falcon-7b", "falcon-7b-untied", "falcon-rw", "falcon-40b"}
ROWS = FakeRows(torch.tensor(LENGTHS).numpy())


@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES])
def test_rows_apart_and_together_have_the_same_gradients(family):
    if not Skeleton(tiny_config(family)).separates_documents():
        assert family in TOGETHER
        return
    gradients = []
    for batch in (collate(ROWS, range(5), pad_id=0), collate_packed(ROWS, SEQUENCES, 13, pad_id=0)):
        with engine_of(tiny_config(family)) as engine:
            result = engine.forward_backward([batch])
            gradients.append((result.loss, gradients_of(engine)))
    (apart, apart_gradients), (together, together_gradients) = gradients
    assert together == pytest.approx(apart, rel=1e-6)
    largest = max(float(gradient.norm()) for gradient in apart_gradients.values())
    for name, gradient in apart_gradients.items():
        assert (
            float((together_gradients[name] - gradient).norm())
            < 1e-5 * float(gradient.norm()) + 1e-6 * largest
        ), name


def test_documents_are_numbered_where_positions_begin_anew():
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [5, 6, 7, 8, 9, 10]])
    assert documents_of(positions).tolist() == [[0, 0, 0, 1, 1, 2], [0] * 6]
