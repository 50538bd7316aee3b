"""`engine.logprobs`: every target's log-probability in one sweep, without whole logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.errors import DataError
from megatrain.settings import ALL, Settings
from tests.support import Batch, engine_of, full_batches, micro_batches, plain_model, tiny_config


def plain_logprobs(model: Any, batch: Batch) -> Tensor:
    """Log-probabilities [batch, tokens], of whole logits."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    labels = batch["labels"][:, 1:]
    with torch.no_grad():
        logits = model(**inputs, use_cache=False).logits[:, :-1].float()
    found = logits.log_softmax(-1).gather(2, labels.clamp(min=0)[:, :, None]).squeeze(2)
    values = torch.zeros(batch["labels"].shape)
    values[:, 1:] = found.where(labels != -100, 0.0)
    return values


SETTINGS = [Settings(head_chunk_tokens=4), Settings(resident=ALL, groups=3, head_chunk_tokens=100)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "settings", "pad_left"),
    [
        ("llama", SETTINGS[0], False),
        ("llama", SETTINGS[1], True),
        ("gemma2", SETTINGS[0], True),
        ("mixtral", SETTINGS[1], False),
        ("falcon-h1", SETTINGS[0], True),
        ("gpt2", SETTINGS[1], False),
    ],
)
def test_log_probabilities_are_those_of_the_whole_logits(family, pad_left, settings, device):
    config = tiny_config(family)
    model, batches = plain_model(config).eval(), micro_batches(3, pad_left=pad_left)
    with engine_of(config, weights=model, settings=settings, device=device) as engine:
        values = engine.logprobs(batches)
        loss, targets = engine.evaluate(batches).loss, engine.evaluate(batches).target_tokens
    for batch, found in zip(batches, values, strict=True):
        assert (found.dtype, found.device.type) == (torch.float32, "cpu")
        torch.testing.assert_close(found, plain_logprobs(model, batch), rtol=1e-4, atol=1e-4)
    assert -sum(float(found.sum()) for found in values) / targets == pytest.approx(loss, rel=1e-6)


def test_rows_without_targets_are_zeros():
    (batch,) = full_batches(5, [(2, 4)])
    labels = torch.full_like(batch["labels"], -100)
    labels[0, 0] = 5  # nothing predicts a row's first token
    with engine_of("llama") as engine:
        (values,) = engine.logprobs([batch | {"labels": labels}])
        assert engine.logprobs([]) == []
        with pytest.raises(DataError, match="input_ids and labels"):
            engine.logprobs([{"input_ids": batch["input_ids"]}])
    assert not values.any()


def test_a_position_may_have_several_tokens_and_a_last_one_its_next():
    config = tiny_config("qwen3")
    model: Any = plain_model(config).eval()
    batches = full_batches(3, [(2, config.max_position_embeddings), (1, 5)])
    targets = [
        (torch.tensor([63, 127, 127, 127, 4]), torch.tensor([5, 6, 7, 8, 9])),
        (torch.tensor([4]), torch.tensor([11])),
    ]
    with engine_of(config, weights=model) as engine:
        found = engine.score([{"input_ids": batch["input_ids"]} for batch in batches], targets)
    for batch, (index, tokens), (values, likeliest) in zip(batches, targets, found, strict=True):
        with torch.no_grad():
            logits = model(batch["input_ids"]).logits.flatten(0, 1)[index]
        expected = logits.log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)
        torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(likeliest, logits.argmax(-1) == tokens)
