"""fp8 products through the whole engine: near bfloat16, as exact in everything else, and refused where they cannot be."""

from __future__ import annotations

import pytest

from megatrain.errors import ConfigError
from megatrain.models.transforms.fp8 import Fp8Linear
from megatrain.settings import Settings
from tests.support import differing, engine_of, full_batches, state_of, tiny_config, train_engine

STEPS = [full_batches(seed, [(2, 16), (2, 16)]) for seed in range(4)]
SIZES = {"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 128}


def run(precision: str, settings: Settings | None = None, **changes):
    with engine_of(
        tiny_config("llama", **SIZES, **changes), precision=precision, settings=settings
    ) as engine:
        trace = train_engine(engine, STEPS)
        outputs = [
            {m.policy.output for m in layer.modules() if isinstance(m, Fp8Linear)}
            for layer in engine.skeleton.layers
        ]
        return trace, state_of(engine), outputs


def test_losses_are_near_those_of_bfloat16_and_not_the_same():
    plain, _, none = run("bfloat16")
    fp8, _, outputs = run("fp8")
    assert none == [set()] * 4
    ends, inner = (
        {"bfloat16"},
        {"bfloat16", "fp8_fast"},
    )  # attention's projections are bf16 everywhere, but not their gradients
    assert outputs == [ends, inner, inner, ends]
    assert fp8.losses == pytest.approx(plain.losses, rel=0.02)
    assert fp8.losses != plain.losses


def test_groups_and_retention_change_no_bit():
    whole, state, _ = run("fp8")
    again, other, _ = run("fp8", Settings(groups=2, resident=2, retained=3, head_chunk_tokens=7))
    assert again.norms == whole.norms
    assert differing(state, other) == []


def test_recomputation_leaves_out_an_fp8_product_that_nobody_needs():
    with engine_of(tiny_config("llama", **SIZES), precision="fp8") as engine:
        assert engine.skeleton._skippable == [("mlp.down_proj",)] * 4


def test_a_model_without_a_layer_for_it_is_refused():
    with pytest.raises(
        ConfigError, match="fp8 suits no layer of this GPT2LMHeadModel; set precision: bfloat16"
    ):
        engine_of(tiny_config("gpt2"), precision="fp8")
