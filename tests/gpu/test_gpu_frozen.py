"""A teacher on a GPU gives what it gives on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatrain.engine.verify import gradients_of
from megatrain.losses import Distillation
from megatrain.optim.optimizer import Frozen
from megatrain.recipes.frozen import taught
from megatrain.settings import Settings
from tests.helpers.support import engine_of, full_batches, plain_model, tiny_config


def distilled(device: str, tied: bool) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of a streamed student under a streamed teacher."""
    sizes = ({"hidden_size": 32}, {"hidden_size": 48})
    configs = [tiny_config("llama", tie_word_embeddings=tied, **size) for size in sizes]
    models = [plain_model(config, seed=seed) for seed, config in enumerate(configs)]
    loss, batches = Distillation(0.3, 2.0), full_batches(0)
    options: dict[str, Any] = {"max_grad_norm": 1e9, "device": device}
    options["settings"] = Settings(head_chunk_tokens=4)
    student = engine_of(configs[0], weights=models[0], **options)
    loss.teacher = engine_of(configs[1], weights=models[1], optimizer=Frozen(), **options)
    with student, loss.teacher, taught(loss, batches) as given:
        found = student.forward_backward(given, loss).loss
        return found, {name: one.cpu() for name, one in gradients_of(student).items()}


@pytest.mark.parametrize("tied", [False, True])
def test_a_teacher_s_divergence_and_gradients_are_those_of_the_cpu(tied):
    (loss, gradients), (expected, wanted) = distilled("cuda", tied), distilled("cpu", tied)
    assert loss == pytest.approx(expected, rel=1e-4)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, wanted[name], atol=1e-5, rtol=1e-3)
