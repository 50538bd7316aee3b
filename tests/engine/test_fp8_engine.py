"""Fp8 matmuls through the whole engine: near bfloat16, as exact in everything else, and refused
where they cannot be."""

from __future__ import annotations

import pytest

from megatrain.engine.engine import Engine
from megatrain.errors import ConfigError
from megatrain.models.transforms.fp8 import Fp8Linear
from megatrain.settings import Settings
from tests.helpers.runs import run
from tests.helpers.support import engine_of, full_batches, tiny_config

STEPS = [full_batches(seed, [(2, 16), (2, 16)]) for seed in range(4)]
SIZES = {"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 128}


def make(precision: str = "fp8", settings: Settings | None = None) -> Engine:
    return engine_of(tiny_config("llama", **SIZES), precision=precision, settings=settings)


def outputs(engine: Engine) -> list[set[str]]:
    """The way each layer's matmuls make their outputs."""
    return [
        {module.policy.output for module in layer.modules() if isinstance(module, Fp8Linear)}
        for layer in engine.skeleton.layers
    ]


@pytest.mark.slow
def test_losses_are_near_those_of_bfloat16_and_not_the_same():
    with make("bfloat16") as engine, make() as in_fp8:
        assert outputs(engine) == [set()] * 4
        # attention's projections are bf16 everywhere, but not their gradients
        ends, inner = {"bfloat16"}, {"bfloat16", "fp8_fast"}
        assert outputs(in_fp8) == [ends, inner, inner, ends]
        plain, fp8 = run(engine, STEPS), run(in_fp8, STEPS)
    assert fp8.losses == pytest.approx(plain.losses, rel=0.02)
    assert fp8.losses != plain.losses


def test_recomputation_leaves_out_an_fp8_product_that_nobody_needs():
    with make() as engine:
        assert engine.skeleton._skippable == [("mlp.down_proj",)] * 4


def test_a_model_without_a_layer_for_it_is_refused():
    with pytest.raises(ConfigError, match="fp8 suits no layer of this GPT2LMHeadModel; set prec"):
        engine_of("gpt2", precision="fp8")
