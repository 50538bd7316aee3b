"""Constants are computed with, never changed, and come out as they went in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.glm4_moe import modeling_glm4_moe as glm4
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from megatrain.engine.engine import Engine
from megatrain.engine.verify import Verdict, verify
from megatrain.models.skeleton import Skeleton
from megatrain.settings import Settings
from tests.compare import differing
from tests.support import CONSTANT, engine_of, known, micro_batches, tiny_config

OPTIONS: dict[str, Any] = {"device": "cpu", "settings": Settings(head_chunk_tokens=7)}


def values_of(engine: Engine) -> dict[str, Tensor]:
    return {name: engine.constants[name].detach().clone() for name in engine.constants}


@pytest.mark.parametrize("family", known(CONSTANT))
def test_every_family_computes_as_in_plain_pytorch_and_its_folder_comes_out_again(family):
    assert verify(Skeleton(tiny_config(family), dtype=torch.float32)) == Verdict("passed")


@pytest.mark.parametrize("family", known(CONSTANT))
def test_a_zeroed_constant_changes_the_loss(family):
    """Otherwise other tests would not see what is done to them."""
    with engine_of(family) as engine:
        batches = micro_batches(0)
        before, values = engine.evaluate(batches).loss, values_of(engine)
        kinds = {name.rpartition(".")[2] for name in values} - {"eps"}  # 1e-6, beside hidden states
        assert kinds
        for kind in kinds:
            for name in (name for name in values if name.endswith(kind)):
                engine.constants[name].zero_()
            assert engine.evaluate(batches).loss != before, kind
            for name, value in values.items():
                engine.constants[name].copy_(value)
        assert engine.evaluate(batches).loss == before


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "fp8"])
def test_steps_leave_them_alone(precision):
    with engine_of("deepseek-v32", precision=precision) as engine:
        assert engine.anatomy.parameters + 5 * 3 + 2 < sum(
            tensor.numel() for _, tensor in engine.iter_weights()
        )
        before = values_of(engine)
        for step in range(2):
            engine.train_step(micro_batches(step))
        engine.logits(torch.ones(1, 9, dtype=torch.long))
        assert differing(values_of(engine), before) == []


def test_they_begin_as_the_family_begins_them_by_the_seed():
    config = tiny_config("deepseek-v32", hidden_size=128)
    first, again, other = (
        Engine.from_config(config, seed=seed, precision="bfloat16", **OPTIONS) for seed in (1, 1, 2)
    )
    with first, again, other:
        found = values_of(first)
        assert differing(values_of(again), found) == []
        assert len(differing(values_of(other), found)) == 3 * 3  # the indexers' matrices
    for name, value in found.items():
        if name.endswith("bias"):
            assert not value.any(), name
        elif value.ndim == 1:
            assert bool((value == 1).all()), name
        else:
            assert float(value.float().std()) == pytest.approx(0.02, rel=0.3)


def test_a_table_that_the_family_computes_is_there_from_the_start():
    config = tiny_config("minimax")
    with Engine.from_config(config, precision="float32", **OPTIONS) as engine:
        slopes = engine.constants["model.layers.0.self_attn.slope_rate"]
        attention: Any = engine.skeleton.layers[0].self_attn
        assert torch.equal(slopes, attention.get_slope_rate())
        assert slopes.any()


# -- the self-check catches what is admitted wrongly -----------------------------------------------


def test_a_buffer_that_only_real_training_writes_fails(monkeypatch):
    """As a router's that balances its experts; this one does so where no probe looks."""
    forward = glm4.Glm4MoeTopkRouter.forward

    def balancing(router: Any, hidden: Tensor) -> Any:
        if router.training and not hidden.is_meta:
            with torch.no_grad():
                router.e_score_correction_bias += 1e-3
        return forward(router, hidden)

    monkeypatch.setattr(glm4.Glm4MoeTopkRouter, "forward", balancing)
    found = verify(Skeleton(tiny_config("glm4-moe", vocab_size=89), dtype=torch.float32))
    assert (found.state, found.stage) == ("failed", "steps")
    assert found.reason.endswith("e_score_correction_bias is changed by steps, and is taken for a "
                                 "constant")  # fmt: skip


def test_a_parameter_that_only_seems_idle_fails(monkeypatch):
    forward = LlamaRMSNorm.forward

    def without_weight(norm: Any, hidden: Tensor) -> Tensor:
        output: Tensor = hidden * 1.0 if hidden.is_meta else forward(norm, hidden)
        return output

    monkeypatch.setattr(LlamaRMSNorm, "forward", without_weight)
    found = verify(Skeleton(tiny_config("llama", vocab_size=89), dtype=torch.float32))
    assert (found.state, found.stage) == ("failed", "gradients")
    assert found.reason.endswith("layernorm.weight has a gradient, and is taken for a constant")
