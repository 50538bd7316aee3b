"""Rows that share a sequence are trained on as if each were alone, in every kind of family that
tells them apart; the others are known."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatrain.data.micro_batches import collate
from megatrain.engine.verify import gradients_of
from megatrain.models.recorder import documents_of
from megatrain.models.skeleton import Skeleton
from megatrain.settings import Settings
from tests.compare import apart
from tests.data.test_loader import FakeRows
from tests.support import KINDS, RECURRENT, engine_of, tiny_config

CPU = torch.device("cpu")
SEQUENCES = [[0, 1], [2, 3, 4]]
# These count positions otherwise, or make masks of their own: their rows would see each other.
TOGETHER = {"opt-projected", "falcon-7b", "falcon-rw", "falcon-40b"}
TOGETHER |= {"bloom", *RECURRENT}  # these have masks that say otherwise


def check(model: Any, lengths: list[int], seq_len: int, share: float, **options: Any) -> None:
    """That loss and gradients are those of rows apart; two of them share one sequence."""
    rows, found = FakeRows(torch.tensor(lengths).numpy()), []
    separate = collate(rows, [[row] for row in range(5)], pad_id=0)
    together = collate(rows, SEQUENCES, pad_id=0, pack_to=seq_len)
    for batch in (separate, together):
        with engine_of(model, **options) as engine:
            loss = engine.forward_backward([batch]).loss
            found.append((loss, {n: g.float() for n, g in gradients_of(engine).items()}))
    (expected_loss, expected), (loss, gradients) = found
    assert loss == pytest.approx(expected_loss, rel=share / 10)
    assert apart(gradients, expected, share) == []


@pytest.mark.slow
@pytest.mark.parametrize("family", [*KINDS, *RECURRENT])
def test_rows_apart_and_together_have_the_same_gradients(family):
    if Skeleton(tiny_config(family)).separates_documents(CPU):
        check(family, [7, 5, 4, 3, 2], 13, 1e-5)
    else:
        assert family in TOGETHER


@pytest.mark.cuda
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(("precision", "share"), [("float32", 1e-5), ("bfloat16", 0.05)])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt-neox"])
def test_with_whichever_attention_kernel_takes_a_mask_too(family, precision, share, compiled):
    settings = Settings(head_chunk_tokens=64, compile=compiled, retained=1)
    config = tiny_config(family, max_position_embeddings=128)
    options = {"precision": precision, "settings": settings, "device": "cuda"}
    check(config, [70, 50, 40, 30, 20], 128, share, **options)


def test_documents_are_numbered_where_positions_begin_anew():
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [5, 6, 7, 8, 9, 10]])
    assert documents_of(positions).tolist() == [[0, 0, 0, 1, 1, 2], [0] * 6]
