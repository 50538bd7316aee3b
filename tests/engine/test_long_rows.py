"""Models whose rotary factors follow the longest sequence: a row's loss does not depend on the rows
beside it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megatrain.data.loader import Loader, StepBatch
from megatrain.data.micro_batches import Regime, collate, held_out_batches
from megatrain.data.rows import IdArray, MaskArray
from megatrain.engine.verify import gradients_of
from megatrain.models.family import regimes_of
from megatrain.models.trials.small import count_targets, plain_loss
from tests.compare import apart
from tests.data.test_loader import FakeRows, documents, row_numbers
from tests.support import VOCABULARY, Batch, engine_of, plain_model, tiny_config

LIMIT, SEQ_LEN, ALL_AT_ONCE = 16, 40, 10**6
FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 4.0, 8.0, 16.0]}
LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": LIMIT, "rope_theta": 1e4}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
MODELS = {
    "longrope": (
        "phi3",
        {"rope_parameters": LONGROPE | FACTORS, "original_max_position_embeddings": LIMIT},
        Regime(LIMIT),
    ),
    "dynamic": (
        "llama",
        {"rope_parameters": DYNAMIC, "max_position_embeddings": LIMIT},
        Regime(LIMIT, exact=True),
    ),
}


class RandomRows(FakeRows):
    """If a row's tokens are alike, positions make no difference."""

    def row(self, index: int) -> tuple[IdArray, MaskArray]:
        ids, mask = super().row(index)
        return np.random.default_rng(index).integers(3, VOCABULARY, len(ids)).astype(np.int32), mask


LENGTHS = np.array([5, 40, 16, 17, 30, 16, 30, 9, 3, 24])
NUMBERED, ROWS = FakeRows(LENGTHS), RandomRows(LENGTHS)
WAYS: dict[str, dict[str, Any]] = {
    "apart": {"micro_batch_tokens": SEQ_LEN},
    "together": {"micro_batch_tokens": ALL_AT_ONCE},
    "packed": {"micro_batch_tokens": SEQ_LEN, "pack_to": SEQ_LEN},
    "packed together": {"micro_batch_tokens": ALL_AT_ONCE, "pack_to": 2 * SEQ_LEN},
}


def config_of(kind: str) -> Any:
    family, changes, _ = MODELS[kind]
    return tiny_config(family, **changes)


@pytest.mark.parametrize("kind", MODELS)
def test_the_lengths_at_which_factors_change_are_known(kind):
    assert regimes_of(config_of(kind)) == (MODELS[kind][2],)
    assert regimes_of(tiny_config("llama")) == ()


def step_of(kind: str, rows: FakeRows = ROWS, **way: Any) -> StepBatch:
    regimes = regimes_of(config_of(kind))
    loader = Loader(rows, pad_id=0, seed=0, rows_per_step=len(rows), regimes=regimes, **way)
    (batch,) = loader
    (known,) = loader.step_tokens([loader.micro_batch_tokens])
    assert known[1] == sum(part["input_ids"].numel() for part in batch.micro_batches)
    assert known[3] == len(batch.micro_batches)
    return batch


def test_no_row_is_beside_one_of_another_kind():
    for kind in MODELS:
        for way in WAYS:
            (regime,), batch = regimes_of(config_of(kind)), step_of(kind, NUMBERED, **WAYS[way])
            lengths = LENGTHS.tolist()
            for part in batch.micro_batches:
                alone = StepBatch([part], (), 0.0, batch.after)
                rows = documents(alone) if "position_ids" in part else row_numbers(alone)
                assert len({regime.of(lengths[row]) for row in rows}) == 1
                longest = max(lengths[row] for row in rows)
                if "position_ids" in part:  # of the padding, too
                    assert int(part["position_ids"].max()) < max(longest, LIMIT)
            assert sum(batch.lengths) == sum(lengths)


def one_by_one(kind: str) -> tuple[float, int]:
    """By transformers, each row in a model that has seen no other."""
    total, rows = 0.0, [collate(ROWS, [[row]], pad_id=0) for row in range(len(ROWS))]
    for row in rows:
        with torch.no_grad():
            total += float(plain_loss(plain_model(config_of(kind)), row))
    targets = int(count_targets(rows))
    return total / targets, targets


def trained(kind: str, batches: list[Batch]) -> tuple[float, dict[str, torch.Tensor]]:
    with engine_of(config_of(kind)) as engine:
        loss = engine.forward_backward(batches).loss
        return loss, {name: grad.float() for name, grad in gradients_of(engine).items()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_rows_alone_together_padded_and_packed_have_the_same_loss(kind):
    expected, targets = one_by_one(kind)
    gradients: dict[str, torch.Tensor] = {}
    for way in WAYS.values():
        loss, found = trained(kind, step_of(kind, **way).micro_batches)
        assert loss == pytest.approx(expected, rel=2e-7)
        gradients = gradients or found
        assert apart(found, gradients, 1e-5) == []
    regimes = regimes_of(config_of(kind))
    with engine_of(config_of(kind)) as engine:
        for way in WAYS.values():
            held = held_out_batches(ROWS, pad_id=0, regimes=regimes, **way)
            result = engine.evaluate(list(held))
            assert result.loss == pytest.approx(expected, rel=2e-7)
            assert result.target_tokens == targets
