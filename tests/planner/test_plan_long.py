"""Plans of sequences that are too long for a layer at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from transformers import Qwen2Config

from megatrain.machine.hardware import GIB
from megatrain.machine.profile import typical
from megatrain.models.skeleton import Skeleton
from megatrain.planner.cost.dry_run import shape_of
from megatrain.planner.cost.shape import ModelShape, WorkingSet
from megatrain.planner.plan import Plan
from megatrain.planner.planning import make_plan
from tests.helpers.planned import H200_LARGE_HOST, JOB_7B, QWEN_SIZES

LONG, CHUNK = 524_288, 16_384
HIDDEN_STATES = LONG * 3584 * 2


def shape_at(tokens: int) -> ModelShape:
    config: Any = {**QWEN_SIZES["7B"], "num_hidden_layers": 28, "vocab_size": 152_064}
    skeleton = Skeleton(Qwen2Config(**config, max_position_embeddings=LONG))
    return shape_of(skeleton, tokens, [tokens], runs_on="cuda", layer_chunks=[CHUNK])


@pytest.fixture(scope="module")
def shape() -> ModelShape:
    return shape_at(LONG)


def plan_of(shape: ModelShape, **changes: Any) -> Plan:
    job = replace(JOB_7B, tokens_per_step=LONG, seq_len=LONG, compiled=False, **changes)
    return make_plan(job, shape, H200_LARGE_HOST, typical(H200_LARGE_HOST))


@pytest.mark.slow
def test_a_7b_layer_of_512k_tokens_takes_eleven_times_its_hidden_states(shape):
    """At the worst moment of attention's backward. What an MLP would take beside that is as long as
    a chunk."""
    assert shape.layer_bytes(LONG) > 28 * HIDDEN_STATES
    # allocated on an H200, of 2 and of 28 layers
    assert shape.layer_bytes(LONG, CHUNK) == pytest.approx(10.71 * HIDDEN_STATES, rel=0.002)


def test_it_fits_into_an_h200_only_in_chunks(shape):
    plan = plan_of(shape)
    assert plan.fits
    assert plan.choices.layer_chunk_tokens == CHUNK
    assert plan.choices.retained == plan.choices.retained_on_host == 0
    assert plan.gpu_bytes - plan.device["resident state"] < 90 * GIB
    assert plan.working_sets["layer, one micro-batch"] == shape.layer_bytes(LONG, CHUNK)
    assert not plan_of(shape, layer_chunk_tokens=0).fits


def test_a_chunk_is_shorter_than_a_micro_batch(shape):
    chunked = ((LONG, WorkingSet(((LONG, 1),))), *shape.layer_chunked)
    chosen = plan_of(replace(shape, layer_chunked=chunked)).choices.layer_chunk_tokens
    assert chosen is not None and chosen < LONG
