"""Experts computed over rows in their own order, against transformers' loop over experts."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

from megatrain.models.implementations import use_grouped_rows

TOKENS, HIDDEN, EXPERTS, EACH = 24, 32, 6, 3
SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": 16,
    "moe_intermediate_size": 16,
    "moe_latent_size": None,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "hidden_act": "silu",
    "mlp_hidden_act": "relu2",
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "moe_hidden_size": HIDDEN,
    "post_norm_eps": 1e-5,
}
# plain; with biases, matrices the other way round and columns in turns; without a gate
CLASSES: list[Any] = [MixtralExperts, GptOssExperts, NemotronHExperts]
if find_spec(
    "transformers.models.muse_spark"
):  # normed behind the second matrix; of later releases
    muse_spark = import_module("transformers.models.muse_spark.modeling_muse_spark")
    CLASSES.append(muse_spark.MuseSparkExperts)


def computed(kind: Any, dtype: torch.dtype, ours: bool, chosen: torch.Tensor) -> list[torch.Tensor]:
    """The output and the gradients of hidden states, weights and parameters."""
    config = SimpleNamespace(**SIZES, _experts_implementation="eager")
    if ours:
        use_grouped_rows(config)
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()

    experts = kind(config)
    for parameter in experts.parameters():
        parameter.data = drawn(*parameter.shape).detach() / 4
    hidden, weights = drawn(TOKENS, HIDDEN), drawn(TOKENS, EACH)
    out = experts(hidden, chosen, weights)
    leaves = [hidden, weights, *experts.parameters()]
    return [out, *torch.autograd.grad(out, leaves, drawn(TOKENS, HIDDEN).detach())]


def chosen_of(most: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.stack([torch.randperm(most, generator=generator)[:EACH] for _ in range(TOKENS)])


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("most", [EXPERTS, EACH])  # the latter leaves experts without a row
def test_outputs_and_gradients_are_those_of_a_loop(kind, most):
    chosen = chosen_of(most)
    found, expected = (computed(kind, torch.float32, ours, chosen) for ours in (True, False))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", CLASSES)
def test_bfloat16_is_as_near_to_float32_as_transformers(kind):
    chosen = chosen_of(EXPERTS)
    exact = computed(kind, torch.float32, False, chosen)
    ours, theirs = (computed(kind, torch.bfloat16, which, chosen) for which in (True, False))
    for true, one, other in zip(exact, ours, theirs, strict=True):
        off, usual = (float((x.float() - true).detach().norm()) for x in (one, other))
        assert off <= 1.3 * usual + 1e-3 * float(true.detach().norm())
