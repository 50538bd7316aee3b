"""The work of a model's parts, against counts by hand and speeds measured on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import GptOssConfig, LlamaConfig, Qwen2Config

from megatrain.engine.ranks.context_parallel import AllToAll
from megatrain.models.skeleton import Skeleton
from megatrain.planner.cost.dry_run import shape_of
from megatrain.planner.cost.footprint import LiveBytes
from megatrain.planner.cost.shape import BlockCost, ModelShape
from megatrain.planner.cost.work import FUSED_BACKWARD_KERNELS, tally
from tests.helpers.multimodal import multimodal_config, seeing_batch
from tests.helpers.planned import QWEN_SIZES, sizes
from tests.helpers.support import KINDS, plain_model, tiny_config

TOKENS = 32
SIZES: Any = {**sizes(64, 176, 4, 2), "vocab_size": 96}
MATRICES = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 176  # q, o, k, v, gate, up, down of one layer


def shape(config: Any, attention: str = "auto", tokens: int = TOKENS, **more: Any) -> ModelShape:
    skeleton = Skeleton(config, attention=attention)
    return shape_of(skeleton, tokens, [tokens], runs_on="cuda", **more)


@pytest.fixture(scope="module")
def llama() -> ModelShape:
    return shape(LlamaConfig(**SIZES, num_hidden_layers=2))


@pytest.fixture(scope="module")
def compiled() -> ModelShape:
    return shape(LlamaConfig(**SIZES, num_hidden_layers=2), compiled=True)


def test_products_by_hand(llama):
    layer = llama.cost.layers[0]
    assert layer.forward.matmul_flops == 2 * MATRICES
    assert layer.backward.matmul_flops == 4 * MATRICES
    assert layer.skippable_flops == 2 * 64 * 176
    assert llama.cost.head.forward.matmul_flops == 2 * 64 * 96
    assert llama.cost.head.skippable_flops == 0
    assert llama.cost.embed.forward.matmul_flops == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "columns", "pairs"),
    [("sdpa", 4 * 64, TOKENS * (TOKENS + 1) // 2), ("eager", 64, TOKENS * TOKENS)],
)
def test_causal_attention_counts_half_where_a_kernel_skips_it(attention, columns, pairs):
    layer = shape(LlamaConfig(**SIZES, num_hidden_layers=1), attention=attention).cost.layers[0]
    assert layer.forward.attention_flops == 4 * columns * pairs // TOKENS
    assert layer.backward.attention_flops == 2 * layer.forward.attention_flops
    assert layer.forward.matmul_flops == 2 * MATRICES


def test_a_mixture_counts_a_token_s_own_experts():
    few, many = (
        shape(tiny_config("mixtral", num_local_experts=n)).cost.layers[0].forward.matmul_flops
        for n in (4, 8)
    )
    assert many - few == 2 * 4 * 32  # the router's four columns more


def test_parameters_of_idle_experts_are_not_active():
    mixture = shape(tiny_config("mixtral", num_local_experts=8))
    layers, expert = 3, 3 * 32 * 64
    assert all(layer.expert_parameters == 8 * expert for layer in mixture.cost.layers)
    assert all(layer.expert_flops == 2 * 2 * expert for layer in mixture.cost.layers)
    assert mixture.idle_parameters == layers * (8 - 2) * expert
    assert mixture.active_parameters == mixture.parameters - mixture.idle_parameters


@pytest.mark.slow
def test_nothing_is_said_of_compilation_unless_asked(llama, compiled):
    for eager, fused in zip(llama.cost.layers, compiled.cost.layers, strict=True):
        one_way, back = eager.forward, eager.backward
        assert one_way.compiled.bytes == one_way.eager.bytes == fused.forward.eager.bytes
        assert one_way.compiled.kernels == one_way.eager.kernels
        assert one_way.eager.bytes > 2 * fused.forward.compiled.bytes
        assert back.eager.kernels == fused.backward.eager.kernels
        assert back.eager.kernels > 2 * fused.backward.compiled.kernels
    assert compiled.cost.head == llama.cost.head


def test_a_compiled_loss_moves_the_logits_twice_each_way(llama):
    head, logits = llama.cost.head, 2 * SIZES["vocab_size"]
    assert head.forward.compiled.bytes == head.backward.compiled.bytes == 2 * logits
    assert head.forward.eager.bytes > 3 * head.forward.compiled.bytes


def test_cheap_retention_adds_traffic_and_no_products(llama, compiled):
    layer, eager = compiled.cost.layers[0], llama.cost.layers[0]
    # what was left out is written again, at least
    assert 2 * (2 * 64 + 176) < layer.cheap_bytes < layer.backward.compiled.bytes
    assert eager.cheap_bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize("family", KINDS)
def test_every_family_has_its_work(family):
    found = shape(tiny_config(family))
    assert (found.active_parameters == found.parameters) == (family != "mixtral")
    work = found.cost
    for block in (work.embed, *work.layers, work.head):
        for one_way in (block.forward, block.backward):
            assert min(one_way.eager.bytes, one_way.eager.kernels) > 0
    for block in (*work.layers, work.head):
        assert 0 <= block.skippable_flops < block.forward.matmul_flops
    assert all(layer.forward.attention_flops > 0 for layer in work.layers)


def test_operations_by_hand():
    x, weight = (torch.empty(8, 8, device="meta", requires_grad=True) for _ in range(2))
    bias = torch.empty(8, device="meta", requires_grad=True)

    def forward() -> torch.Tensor:
        return (x @ weight).t().relu() + bias

    ahead, back = tally(forward, [x], [weight, bias], fused=False, runs_on="cpu")
    matrix = 8 * 8 * 4
    assert (ahead.matmul_flops, ahead.attention_flops) == (2 * 8**3, 0)
    assert (ahead.bytes, ahead.kernels) == (2 * matrix + (2 * matrix + 8 * 4), 3)  # relu; add
    # sum for the bias; relu's; two products
    assert (back.bytes, back.kernels) == ((matrix + 8 * 4) + 3 * matrix, 4)


@pytest.mark.parametrize(("runs_on", "columns"), [("cpu", 4), ("cuda", 64)])
def test_fused_attention_is_no_traffic_and_counts_whole_tiles_on_cuda(runs_on, columns):
    query, key, value = (
        torch.empty(1, 2, 8, 4, device="meta", requires_grad=True) for _ in range(3)
    )

    def forward() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    ahead, back = tally(forward, [query, key, value], [], fused=True, runs_on=runs_on)
    assert ahead.attention_flops == 4 * 2 * columns * (8 * 9 // 2)
    assert (ahead.bytes, ahead.kernels) == (0, 1)
    assert (back.bytes, back.kernels) == (0, FUSED_BACKWARD_KERNELS)


# -- measured on one H200: TFLOP/s as 6 x the layer's parameters x tokens, 32k tokens, cuDNN -----

PRODUCTS, MEMORY = 700e12, 3.3e12  # FLOP/s and bytes/s that it sustains
ATTENTION = {1024: 311e12, 8192: 540e12}  # FLOP/s by sequence length, measured at 1k, 4k and 16k
MEASURED = [
    ("7B", 1024, "eager", 409, 542),
    ("14B", 8192, "compiled", 403, 530),
    ("1.8B", 1024, "compiled", 423, 550),
]


def seconds_per_token(work: BlockCost, kind: str, seq_len: int) -> tuple[float, float]:
    """Forward and backward, one after another what a layer asks of the GPU."""
    forward, backward = (
        one_way.matmul_flops / PRODUCTS
        + one_way.attention_flops / ATTENTION[seq_len]
        + getattr(one_way, kind).bytes / MEMORY
        for one_way in (work.forward, work.backward)
    )
    return forward, backward


@pytest.mark.slow
@pytest.mark.parametrize(("size", "seq_len", "kind", "recomputed", "retained"), MEASURED)
def test_the_work_of_a_layer_gives_its_measured_speed(size, seq_len, kind, recomputed, retained):
    config: Any = {**QWEN_SIZES[size], "vocab_size": 96, "num_hidden_layers": 1}
    found = shape(Qwen2Config(**config), tokens=seq_len, compiled=kind == "compiled")
    forward, backward = seconds_per_token(found.cost.layers[0], kind, seq_len)
    flops = 6 * found.block_numel[1] / 1e12
    assert flops / (2 * forward + backward) == pytest.approx(recomputed, rel=0.05)
    assert flops / (forward + backward) == pytest.approx(retained, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(("attention", "padded"), [("sdpa", True), ("eager", False)])
def test_a_piece_of_a_sequence_costs_its_share_of_the_whole_one(attention, padded):
    def found(tokens: int = TOKENS, **more: Any) -> tuple[ModelShape, BlockCost]:
        config = LlamaConfig(**SIZES, num_hidden_layers=1)
        of_model = shape(config, attention, tokens, padded=padded, **more)
        return of_model, of_model.cost.layers[0]

    (alone, _), (whole, of_whole) = found(), found(2 * TOKENS)
    two, three = (found(trade=AllToAll(0, ranks, lambda *_: None)) for ranks in (2, 3))
    flops, heads, tokens = of_whole.forward.attention_flops, 6 / 4, 3 / 2
    assert (two[1].forward.attention_flops, two[1].keys) == (flops, of_whole.keys)
    assert three[1].forward.attention_flops == pytest.approx(heads * tokens * flops, rel=0.05)
    assert two[0].calls.at(TOKENS) == whole.calls.at(2 * TOKENS)
    assert alone.layer.at(TOKENS) < two[0].layer.at(TOKENS) < three[0].layer.at(TOKENS)


@pytest.mark.slow
def test_layers_with_and_without_a_window_are_told_apart_where_no_mask_tells_them():
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    others: dict[str, Any] = heads | {"vocab_size": 64, "sliding_window": 8}
    config = GptOssConfig(
        num_hidden_layers=2, hidden_size=32, intermediate_size=32, num_local_experts=8, **others
    )
    window, whole = shape_of(Skeleton(config), 64, [64], runs_on="cuda").cost.layers
    assert (window.keys, whole.keys) == (2 * 8 + 1, 64 + 1)  # two blocks, or all, and the sink
    assert window.forward.attention_flops < whole.forward.attention_flops


@pytest.mark.parametrize("family", ["gemma3", "llava-next", "qwen3-vl"])
def test_an_image_costs_what_its_tower_computes_and_keeps(family):
    config = multimodal_config(family)
    row = seeing_batch(config, rows=1)
    del row["labels"]
    skeleton = Skeleton(config, dtype=torch.float32, image_row=row)
    model: Any = plain_model(config)

    def flops(**given: Any) -> int:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(**given)
        total: Any = counter.get_total_flops()
        return int(total)

    def peak(times: int) -> int:
        rows = {name: torch.cat([value] * times) for name, value in row.items()}
        with skeleton.zeros(), torch.enable_grad(), LiveBytes() as live:
            hidden = skeleton.embed(rows)[0]
            wanted = [
                skeleton.model.get_parameter(name) for name in sorted(skeleton.findings.seeing)
            ]
            torch.autograd.grad(hidden, wanted, torch.ones_like(hidden), allow_unused=True)
        return int(live.peak)

    kept = peak(4) - peak(2)
    found = shape_of(skeleton, 16, [16]).images
    assert found is not None
    tokens = row["input_ids"].numel()
    expected = flops(**row) - flops(input_ids=row["input_ids"])
    assert tokens * found.flops(tokens) == pytest.approx(3 * expected, rel=0.2)
    assert peak(4) - peak(2) < kept  # layers of towers run again
    needs = found.working_bytes + found.kept_bytes + 4 * config.get_text_config().hidden_size
    assert 2 * tokens * needs == pytest.approx(peak(4) - peak(2), rel=0.3)
    skeleton = Skeleton(config, dtype=torch.float32, image_row=row)
    skeleton.freeze(skeleton.findings.towers)
    frozen = shape_of(skeleton, 16, [16]).images
    assert frozen is not None and frozen.work.backward.matmul_flops == 0
    assert frozen.kept_bytes < found.kept_bytes
    assert frozen.gradient_bytes < found.gradient_bytes
