"""What tests show to vision-language models is seen, by plain transformers alone."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch.nn import functional

from megatrain.losses import IGNORE
from megatrain.models.trials.small import plain_model
from tests.helpers.multimodal import IMAGE, MULTIMODAL, multimodal_config, seeing_batch

FAST = ("gemma3", "mistral3", "llava-next", "qwen2.5-vl", "qwen3.5", "glm4v")
BLIND = {"llama4"}  # transformers 5.24 fails on its images
SLOW = [name for name in MULTIMODAL if name not in BLIND.union(FAST)]

TOWERS = r"visual|vision|tower"
PROJECTORS = r"projector|merger"


@pytest.mark.parametrize(
    "family", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_images_are_seen_and_their_tower_has_gradients(family):
    config = multimodal_config(family)
    model: Any = plain_model(config)
    batch = seeing_batch(config)
    labels = batch.pop("labels")
    logits = model(**batch, use_cache=False).logits
    assert logits.shape == (*labels.shape, config.get_text_config().vocab_size)
    assert logits.isfinite().all()
    loss = functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE
    )
    loss.backward()
    text = {id(one) for one in model.get_decoder().parameters()} | {id(model.lm_head.weight)}
    seeing = [name for name, one in model.named_parameters()
              if id(one) not in text and one.grad is not None and one.grad.any()]  # fmt: skip
    assert any(re.search(TOWERS, name) for name in seeing) and any(
        re.search(PROJECTORS, name) for name in seeing
    )
    with torch.no_grad():
        assert model(**batch, use_cache=False).logits.equal(logits)
        other = model(**batch | {"pixel_values": batch["pixel_values"].flip(-1)}).logits
    for row in range(len(labels)):
        last = (batch["input_ids"][row] == IMAGE).nonzero().max() + 1
        assert (other[row, last:] != logits[row, last:]).any(-1).all()
