"""Mixtures of experts: what a dry run finds, against the same layers run for real."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from megatrain.engine.routing import balanced_on_meta
from megatrain.engine.verify import gradients_of
from megatrain.models.meta import blank_call
from megatrain.models.skeleton import Skeleton
from megatrain.models.trials.small import plain_gradients
from megatrain.planner.activations import BALANCED_BYTES
from megatrain.planner.cost.dry_run import shape_of
from megatrain.planner.cost.footprint import LiveBytes, call_peak_bytes
from megatrain.planner.cost.shape import ModelShape
from megatrain.settings import Settings
from tests.helpers.compare import apart
from tests.helpers.plain import named_gradients
from tests.helpers.support import MIXTURES, engine_of, full_batches, plain_model, tiny_config

ROWS, TOKENS = 2, 16


@pytest.mark.slow
@pytest.mark.parametrize("family", MIXTURES)
def test_layers_in_float32_take_the_bytes_of_a_real_run(family):
    skeleton = Skeleton(tiny_config(family), dtype=torch.float32)
    hidden, calls = skeleton.dry_call(ROWS, TOKENS)
    fused = skeleton.config._attn_implementation != "eager"
    for layer, call in zip(skeleton.layers, calls, strict=True):
        given = layer, tuple(hidden.shape), torch.float32, call
        dry = call_peak_bytes(*blank_call(*given), fused_attention=fused)
        real = call_peak_bytes(*blank_call(*given, device="cpu"), fused_attention=False)
        assert dry == real


@pytest.mark.slow
@pytest.mark.parametrize("family", MIXTURES)
def test_mixtures_are_planned_and_train_in_float32(family):
    skeleton, batches = Skeleton(tiny_config(family), dtype=torch.float32), full_batches(1)
    shape = shape_of(skeleton, TOKENS, [TOKENS])
    largest = max(p.nbytes for layer in skeleton.layers for p in layer.parameters())
    assert shape.layer.at(TOKENS) > largest, "a layer's working set holds all experts' gradient"
    plain = plain_model(skeleton.config, attention=skeleton.config._attn_implementation)
    with engine_of(tiny_config(family), weights=plain) as engine:
        engine.forward_backward(batches)
        ours = gradients_of(engine)
    plain_gradients(plain, batches)
    assert apart(ours, named_gradients(plain), of_largest=1e-6) == []


@pytest.mark.slow
def test_rows_that_no_grouped_kernel_takes_are_planned_and_train():
    """Those that do not begin at multiples of 16 bytes go through a loop over experts."""
    config = tiny_config("mixtral", intermediate_size=30)
    narrow = shape_of(Skeleton(config, dtype=torch.float32), TOKENS, [TOKENS])
    wide = shape_of(Skeleton(tiny_config("mixtral", intermediate_size=32)), TOKENS, [TOKENS])
    flops = [shape.cost.layers[0].expert_flops for shape in (narrow, wide)]
    assert flops[0] * 32 == flops[1] * 30
    plain: Any = plain_model(config)
    batches = full_batches(1)
    plain.config._experts_implementation = "eager"  # transformers' own grouped matmul raises
    with engine_of(config, weights=plain) as engine:
        engine.forward_backward(batches)
        ours = gradients_of(engine)
    plain_gradients(plain, batches)
    assert apart(ours, named_gradients(plain), of_largest=1e-6) == []


@cache
def balanced_shape(family: str, coefficient: float, tokens: int, **options: Any) -> ModelShape:
    dtype = torch.bfloat16 if options else torch.float32
    skeleton = Skeleton(tiny_config(family), dtype=dtype)
    with balanced_on_meta(skeleton, coefficient):
        return shape_of(skeleton, TOKENS, [tokens], **options)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "gpt-oss"])
def test_retained_layers_keep_the_logits_of_balanced_routers_as_planned(family):
    """The peak of a real step whose layers are all retained grows by what the dry run counts."""
    tokens, batches = 8 * TOKENS, full_batches(1, [(8, TOKENS)] * 3)

    def peak(coefficient: float) -> int:
        settings, live = Settings(head_chunk_tokens=7, retained=9), LiveBytes()
        config, balanced = tiny_config(family), dict[str, Any](router_aux_loss_coef=coefficient)
        with engine_of(config, settings=settings, **balanced) as engine, live:
            engine.forward_backward(batches)
        return live.peak

    shapes = [balanced_shape(family, coefficient, tokens) for coefficient in (0.0, 0.1)]
    logits = 4 * 4 * tokens * shapes[0].layers  # of 4 experts, in float32
    without, kept = (shape.retained[-1].at(tokens) for shape in shapes)
    assert kept - without == logits
    marks = BALANCED_BYTES * tokens  # whether a token is real
    # beside them some numbers of a layer, for each expert, in no plan
    assert peak(0.1) - peak(0.0) == pytest.approx(len(batches) * (logits + marks), abs=100)


@pytest.mark.slow
def test_routers_are_as_they_were_when_a_plan_is_made():
    skeleton = Skeleton(tiny_config("mixtral"), dtype=torch.float32)
    before = shape_of(skeleton, TOKENS, [TOKENS]).retained
    with balanced_on_meta(skeleton, 0.1):
        assert shape_of(skeleton, TOKENS, [TOKENS]).retained != before
    assert shape_of(skeleton, TOKENS, [TOKENS]).retained == before
