"""The planner's view of a model."""

from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen2Config, Qwen2MoeConfig

from megatrain.models.skeleton import Skeleton
from megatrain.models.transforms.fp8 import Fp8Linear
from megatrain.planner.cost.dry_run import shape_of
from megatrain.planner.cost.shape import ModelShape, WorkingSet
from tests.helpers.planned import QWEN_SIZES, sizes
from tests.helpers.support import RECURRENT, tiny_config

SIZES: Any = {**sizes(64, 176, 4, 2), "vocab_size": 96}


@cache
def shape(layers: int = 2, tied: bool = False, **kwargs: Any) -> ModelShape:
    config = LlamaConfig(**SIZES, num_hidden_layers=layers, tie_word_embeddings=tied)
    return shape_of(Skeleton(config, dtype=torch.bfloat16), 32, [32, 64, 128], **kwargs)


def test_working_set_is_exact_at_points_and_never_below_a_convex_curve_between_them():
    working_set = WorkingSet(((10, 100), (20, 150), (40, 350)))
    assert [working_set.at(n) for n in (10, 20, 40)] == [100, 150, 350]
    assert working_set.at(15) == 125
    assert working_set.at(30) == 250
    assert working_set.at(50) == 450  # the last line goes on
    assert working_set.at(1) == 100  # below the first point: its own bytes are the bound
    assert WorkingSet(((10, 100),)).at(25) == 250


def test_parameters_and_blocks():
    untied, tied = shape(), shape(tied=True)
    # q, o, k, v, gate, up, down, two norms
    layer = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 176 + 2 * 64
    assert untied.parameters == 2 * layer + 2 * 96 * 64 + 64
    assert tied.parameters == untied.parameters - 96 * 64
    assert len(untied.block_numel) == 4
    assert (untied.tied, tied.tied) == (False, True)


def test_working_sets_do_not_depend_on_depth():
    shallow, deep = shape(layers=2), shape(layers=6)
    for name in ("layer", "embed", "head", "calls"):
        assert getattr(shallow, name) == getattr(deep, name)


def test_head_chunk_by_hand():
    tokens, vocab, hidden = 512, 96, 64
    # the worst moment is the loss's backward: bf16 logits are gone, fp32 copies of logits,
    # log-probabilities and their gradient are not
    logits = 3 * 4 * vocab * tokens
    rest = 16 * tokens * hidden + 2 * vocab * hidden + 2**12
    assert logits <= shape().head.at(tokens) <= logits + rest


def test_padded_rows_bring_masks():
    plain, padded = shape(), shape(padded=True)
    # four rows' boolean masks, shared by the layers
    assert padded.calls.at(128) == plain.calls.at(128) + 4 * 32 * 32
    assert padded.layer.at(128) > plain.layer.at(128)


@pytest.mark.slow
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", RECURRENT)
def test_layers_with_buffers_and_with_masks_by_place_are_counted(family, padded):
    found = shape_of(Skeleton(tiny_config(family)), 8, [16], padded=padded)
    assert all(layer.forward.matmul_flops > 0 for layer in found.cost.layers)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "eager"), [(torch.bfloat16, False), (torch.float32, True)])
def test_whether_graphs_hold_their_inputs(dtype, eager):
    """An eager norm computes with its input in float32: a copy, or the input itself. Compiled, the
    copy is recomputed."""
    skeleton = Skeleton(LlamaConfig(**SIZES, num_hidden_layers=2), dtype=dtype)
    found = shape_of(skeleton, 32, [32], compiled=True).graphs_keep_inputs
    assert found == (eager, True, True)


def test_retained_bytes_add_up_layer_by_layer():
    experts: Any = {"num_experts": 4, "moe_intermediate_size": 32, "mlp_only_layers": [0]}
    config = Qwen2MoeConfig(**SIZES, **experts, num_hidden_layers=3)
    mixed = shape_of(Skeleton(config), 32, [32, 64])
    kept = [mixed.retained_bytes(64, n) for n in range(4)]
    last, before, first = (more - less for less, more in pairwise(kept))
    assert kept[0] == 0
    assert last == before != first
    # experts count their tokens
    assert kept[3] == pytest.approx(2 * mixed.retained_bytes(32, 3), rel=1e-4)


@pytest.mark.slow
def test_compiled_layers_retain_less_and_cheaply_retained_ones_less_yet():
    """Cheap retention leaves out the norms' outputs and the MLP's middle."""

    def retained(found: ModelShape, **how: bool) -> int:
        return found.retained_bytes(64, 2, **how)

    eager, compiled = shape(), shape(compiled=True)
    assert retained(compiled) == retained(compiled, cheap=True) == retained(eager)
    full = retained(compiled, compiled=True)
    assert full < 0.8 * retained(eager)
    # of two layers, 64 tokens in bf16
    assert full - retained(compiled, compiled=True, cheap=True) == 2 * 64 * 2 * (2 * 64 + 176)
    # not asked about, so the larger figure
    assert retained(eager, compiled=True) == retained(eager)
    assert retained(eager, compiled=True, cheap=True) == retained(eager)


@pytest.mark.slow
def test_products_in_fp8_need_what_was_measured_on_a_gpu():
    """Four layers of 7.6B's shape, 16k tokens at once: the layers' share of an H200's peak."""
    tokens, sizes_7b = 16_384, {**SIZES, **QWEN_SIZES["7B"], "num_hidden_layers": 4}
    skeleton = Skeleton(Qwen2Config(**sizes_7b), dtype=torch.bfloat16)

    def found(fp8: bool) -> ModelShape:
        how: Any = {"runs_on": "cuda", "compiled": True, "layer_chunks": [4096]}
        return shape_of(skeleton, 1024, [tokens], fp8=fp8, **how)

    in_bf16, in_fp8 = found(False), found(True)
    assert in_fp8.compiled is not None
    assert in_bf16.compiled is not None
    needed = in_fp8.compiled.recomputed.at(tokens)
    assert needed / 2**20 == pytest.approx(4310, rel=0.01)
    # benchmarks.peak: its outputs stay in bf16
    assert in_fp8.compiled.last.at(tokens) / 2**20 == pytest.approx(4146, rel=0.015)
    assert in_bf16.compiled.recomputed.at(tokens) < needed < in_fp8.layer_bytes(tokens)
    assert in_fp8.layer_bytes(tokens, 4096) > in_bf16.layer_bytes(tokens, 4096)
    assert in_fp8.cost == in_bf16.cost
    modules = (module for layer in skeleton.layers for module in layer.modules())
    assert not any(isinstance(module, Fp8Linear) for module in modules)
