"""The planner's view of a model."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen2MoeConfig

from megatrain.models.skeleton import Skeleton
from megatrain.models.transforms.fp8 import Fp8Linear
from megatrain.planner.cost.footprint import layer_peak_bytes
from megatrain.planner.cost.shape import ModelShape, WorkingSet, shape_of

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
}


def shape(layers: int = 2, tied: bool = False, **kwargs: Any) -> ModelShape:
    config = LlamaConfig(**SIZES, num_hidden_layers=layers, tie_word_embeddings=tied)
    return shape_of(Skeleton(config, dtype=torch.bfloat16), 32, [32, 64, 128], **kwargs)


def test_working_set_is_exact_at_points_and_never_below_a_convex_curve_between_them() -> None:
    working_set = WorkingSet(((10, 100), (20, 150), (40, 350)))
    assert [working_set.at(n) for n in (10, 20, 40)] == [100, 150, 350]
    assert working_set.at(15) == 125
    assert working_set.at(30) == 250
    assert working_set.at(50) == 450  # the last line goes on
    assert working_set.at(1) == 100  # below the first point: its own bytes are the bound
    assert WorkingSet(((10, 100),)).at(25) == 250


def test_parameters_and_blocks() -> None:
    untied, tied = shape(), shape(tied=True)
    layer = (
        64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 176 + 2 * 64
    )  # q, o, k, v, gate, up, down, two norms
    assert untied.parameters == 2 * layer + 2 * 96 * 64 + 64
    assert tied.parameters == untied.parameters - 96 * 64
    assert len(untied.block_numel) == 4
    assert tied.tied
    assert not untied.tied


def test_working_sets_do_not_depend_on_depth() -> None:
    shallow, deep = shape(layers=2), shape(layers=6)
    assert (shallow.layer, shallow.embed, shallow.head, shallow.calls) == (
        deep.layer,
        deep.embed,
        deep.head,
        deep.calls,
    )


def test_head_chunk_by_hand() -> None:
    tokens, vocab, hidden = 512, 96, 64
    # the worst moment is the loss's backward: bf16 logits are gone, fp32 copies of logits,
    # log-probabilities and their gradient are not
    logits = vocab * tokens
    assert shape().head.at(tokens) >= 3 * 4 * logits
    assert (
        shape().head.at(tokens)
        <= 3 * 4 * logits + 16 * tokens * hidden + 2 * vocab * hidden + 2**12
    )


def test_padded_rows_bring_masks() -> None:
    plain, padded = shape(), shape(padded=True)
    assert (
        padded.calls.at(128) == plain.calls.at(128) + 4 * 32 * 32
    )  # four rows' boolean masks, shared by the layers
    assert padded.layer.at(128) > plain.layer.at(128)


def test_layers_share_a_sliding_mask_when_padded() -> None:
    config = MistralConfig(**SIZES, num_hidden_layers=4, sliding_window=16)
    padded = shape_of(Skeleton(config), 32, [64], padded=True)
    assert (
        padded.calls.at(64) < 4 * 2 * 32 * 32 + 2 * 32 * 16 * 4
    )  # less than a mask for each layer


def test_a_bound_skeleton_is_refused() -> None:
    skeleton = Skeleton(LlamaConfig(**SIZES, num_hidden_layers=1))
    block = skeleton.anatomy.blocks[1]
    skeleton.bind(block, torch.zeros(block.layout.numel, dtype=torch.bfloat16))
    with pytest.raises(AssertionError, match="not bound"):
        shape_of(skeleton, 32, [32])


@pytest.mark.parametrize(("dtype", "eager"), [(torch.bfloat16, False), (torch.float32, True)])
def test_whether_graphs_hold_their_inputs(dtype: torch.dtype, eager: bool) -> None:
    """An eager norm computes with its input in float32: a copy, or the input itself. Compiled, the
    copy is recomputed."""
    config = LlamaConfig(**SIZES, num_hidden_layers=2)
    assert shape_of(Skeleton(config, dtype=dtype), 32, [32], compiled=True).graphs_keep_inputs == (
        eager,
        True,
        True,
    )


def test_retained_bytes_add_up_layer_by_layer() -> None:
    kinds = Qwen2MoeConfig(
        **SIZES, num_hidden_layers=3, num_experts=4, moe_intermediate_size=32, mlp_only_layers=[0]
    )
    mixed = shape_of(Skeleton(kinds), 32, [32, 64])
    last, before, first = (
        mixed.retained_bytes(64, n) - mixed.retained_bytes(64, n - 1) for n in (1, 2, 3)
    )
    assert last == before != first
    assert mixed.retained_bytes(64, 0) == 0
    assert mixed.retained_bytes(64, 3) == pytest.approx(
        2 * mixed.retained_bytes(32, 3), rel=1e-4
    )  # experts count their tokens


def test_retained_bytes_are_the_graphs_less_their_outputs() -> None:
    tokens, hidden = 64, 64
    skeleton = Skeleton(LlamaConfig(**SIZES, num_hidden_layers=2))
    _, calls = skeleton.dry_call(2, 32)
    footprint = layer_peak_bytes(skeleton.layers[0], (2, 32, hidden), torch.bfloat16, calls[0])
    assert shape().retained_bytes(tokens, 1) == footprint.saved_bytes - tokens * hidden * 2


def test_compiled_layers_retain_less() -> None:
    compiled = shape(compiled=True)
    assert compiled.retained_bytes(64, 2) == shape().retained_bytes(64, 2)
    assert compiled.retained_bytes(64, 2, compiled=True) < 0.8 * compiled.retained_bytes(64, 2)
    assert shape().retained_bytes(64, 2, compiled=True) == shape().retained_bytes(
        64, 2
    )  # not asked about, so the larger figure


def test_cheap_retention_leaves_out_the_norms_outputs_and_the_mlp_s_middle() -> None:
    compiled = shape(compiled=True)
    full, cheap = (
        compiled.retained_bytes(64, 2, compiled=True),
        compiled.retained_bytes(64, 2, compiled=True, cheap=True),
    )
    assert full - cheap == 2 * 64 * 2 * (2 * 64 + 176)  # of two layers, 64 tokens in bf16
    assert compiled.retained_bytes(64, 2, cheap=True) == compiled.retained_bytes(
        64, 2
    )  # eager layers keep their graphs whole
    assert shape().retained_bytes(64, 2, compiled=True, cheap=True) == shape().retained_bytes(64, 2)


def test_products_in_fp8_need_what_was_measured_on_a_gpu() -> None:
    """Four layers of 7.6B's shape, 16k tokens at once: the layers' share of an H200's peak."""
    config = Qwen2Config(
        **{
            **SIZES,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
        }
    )
    skeleton = Skeleton(config, dtype=torch.bfloat16)
    in_bf16, in_fp8, on_cpu = (
        shape_of(
            skeleton, 1024, [16_384], runs_on=device, compiled=True, fp8=fp8, layer_chunks=[4096]
        )
        for device, fp8 in (("cuda", False), ("cuda", True), ("cpu", True))
    )
    assert in_fp8.compiled is not None
    assert in_bf16.compiled is not None
    assert in_fp8.compiled.recomputed.at(16_384) / 2**20 == pytest.approx(4310, rel=0.01)
    assert in_fp8.compiled.last.at(16_384) / 2**20 == pytest.approx(
        4146, rel=0.015
    )  # benchmarks.peak: its outputs stay in bf16
    assert (
        in_bf16.compiled.recomputed.at(16_384)
        < in_fp8.compiled.recomputed.at(16_384)
        < in_fp8.layer_bytes(16_384)
    )
    assert in_fp8.layer_bytes(16_384, 4096) > in_bf16.layer_bytes(16_384, 4096)
    assert on_cpu.layer == shape_of(skeleton, 1024, [16_384], compiled=True).layer
    assert in_fp8.cost == in_bf16.cost
    assert not any(
        isinstance(module, Fp8Linear) for layer in skeleton.layers for module in layer.modules()
    )
