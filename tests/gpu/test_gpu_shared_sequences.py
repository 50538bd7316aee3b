"""On CUDA: rows that share a sequence are trained on as if each were alone, with whichever attention kernel takes a mask."""

from __future__ import annotations

import pytest
import torch

from megatrain.data.loader import collate, collate_packed
from megatrain.settings import Settings
from tests.data.test_loader import FakeRows
from tests.support import engine_of, gradients_of, tiny_config

ROWS = FakeRows(torch.tensor([70, 50, 40, 30, 20]).numpy())
SEQUENCES = [[0, 1], [2, 3, 4]]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(("precision", "allowed"), [("float32", 1e-5), ("bfloat16", 0.05)])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt-neox"])
def test_rows_apart_and_together_have_the_same_gradients(family, precision, allowed, compiled):
    gradients = []
    for batch in (
        collate(ROWS, range(5), pad_id=0),
        collate_packed(ROWS, SEQUENCES, 128, pad_id=0),
    ):
        settings = Settings(head_chunk_tokens=64, compile=compiled, retained=1)
        config = tiny_config(family, max_position_embeddings=128)
        with engine_of(config, device="cuda", precision=precision, settings=settings) as engine:
            result = engine.forward_backward([batch])
            gradients.append((result.loss, gradients_of(engine)))
    (apart, apart_gradients), (together, together_gradients) = gradients
    assert together == pytest.approx(apart, rel=allowed / 10)
    largest = max(float(gradient.float().norm()) for gradient in apart_gradients.values())
    for name, gradient in apart_gradients.items():
        off = float((together_gradients[name].float() - gradient.float()).norm())
        assert off < allowed * float(gradient.float().norm()) + allowed / 10 * largest, name
