"""Fp8 linear layers: rounding, the three matmuls against a slow twin, which modules take part,
and training with them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from megatrain.engine.verify import gradients_of
from megatrain.models.transforms.fp8 import (
    FP8,
    FP8_MAX,
    Fp8Linear,
    Fp8Policy,
    apply_fp8,
    multiply,
    quantize,
)
from megatrain.optim import AdamW
from tests.helpers.compare import bits, distance
from tests.helpers.runs import train_engine
from tests.helpers.support import engine_of, full_batches, plain_model, tiny_config

ALL_FP8 = Fp8Policy(keep_output=(), ends=0)
HALF_STEP = 2.0**-4  # of e4m3: three bits behind the leading one
BF16_STEP = 2.0**-8


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def rounded(rows: torch.Tensor) -> torch.Tensor:
    """What is left of `rows` after quantising: fp32, row by row."""
    result = torch.empty(rows.shape)
    for row, out in zip(rows.float(), result, strict=True):
        scale = FP8_MAX / row.abs().max()
        out.copy_((row * scale).to(FP8).float() / scale)
    return result


def linear(policy: Fp8Policy | None = None, *, bias: bool = False) -> nn.Linear:
    """A random bf16 linear layer from 64 to 48; with a policy, in fp8."""
    parent = nn.Sequential(nn.Linear(64, 48, bias=bias, dtype=torch.bfloat16))
    if policy is not None:
        assert apply_fp8(parent, policy) == 1
    layer = parent[0]
    assert isinstance(layer, nn.Linear)
    layer.weight.data = random(48, 64, seed=1)
    return layer


def run(module: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(output, gradient of x, gradients of the parameters)."""
    x = x.clone().requires_grad_()
    y = module(x)
    return (y.detach(), *torch.autograd.grad(y, [x, *module.parameters()], dy))


# -- quantising ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1e-20, 1e-4, 1.0, 1e30])
def test_quantised_rows_are_near_at_any_size(size):
    rows = random(300, 64) * size
    values, scales = quantize(rows)
    assert values.dtype == FP8 and scales.dtype == torch.float32 and scales.shape == (300, 1)
    back = values.float() * scales
    amax = rows.abs().amax(1, keepdim=True).float()
    # every row uses the whole range
    assert torch.equal(values.float().abs().amax(1), torch.full((300,), FP8_MAX))
    smallest = amax / FP8_MAX * 2.0**-6  # below it e4m3's steps are equal
    bound = torch.maximum(rows.abs().float(), smallest) * HALF_STEP * 1.001
    assert ((back - rows).abs() <= bound).all()


def test_rows_have_scales_of_their_own():
    rows = torch.cat([random(1, 32) * 1e6, random(1, 32)])
    values, scales = quantize(rows)
    alone, scale = quantize(rows[1:])
    assert torch.equal(bits(values[1:].float()), bits(alone.float()))
    assert torch.equal(scales[1:], scale)


def test_zeros_stay_zeros():
    values, scales = quantize(torch.zeros(2, 16, dtype=torch.bfloat16))
    assert not values.float().any() and scales.isfinite().all() and (scales > 0).all()


def test_what_is_not_finite_shows_in_the_product():
    a, b = random(4, 32), random(16, 32)
    for bad in (float("inf"), float("-inf"), float("nan")):
        a[2, 5] = bad
        product = multiply(a, b, "fp8")
        assert not product[2].isfinite().any()
        assert product[[0, 1, 3]].isfinite().all()


# -- products --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["fp8", "fp8_fast"])
@pytest.mark.parametrize("k", [16, 64, 7, 33])
def test_a_product_is_that_of_the_rounded_rows(k, mode):
    a, b = random(21, k), random(32, k, seed=1)
    assert distance(multiply(a, b, mode), rounded(a) @ rounded(b).t()) < BF16_STEP


def test_all_three_products_equal_their_slow_twins():
    layer, x, dy = linear(Fp8Policy()), random(2, 9, 64), random(2, 9, 48, seed=3)
    y, dx, dw = run(layer, x, dy)
    weight, rows, grads = layer.weight.data, x.flatten(0, 1), dy.flatten(0, 1)
    assert distance(y.flatten(0, 1), rounded(rows) @ rounded(weight).t()) < BF16_STEP
    assert distance(dx.flatten(0, 1), rounded(grads) @ rounded(weight.t()).t()) < BF16_STEP
    assert distance(dw, rounded(grads.t()) @ rounded(rows.t()).t()) < BF16_STEP
    plain = run(linear(), x, dy)
    errors = [distance(ours, theirs) for ours, theirs in zip((y, dx, dw), plain, strict=True)]
    assert all(0.01 < error < 0.05 for error in errors), "it is fp8, and a fair approximation"


def test_biases_stay_out_of_it():
    layer, x, dy = linear(Fp8Policy(), bias=True), random(9, 64), random(9, 48, seed=3)
    layer.bias.data = random(48, seed=2)
    y, _, _, db = run(layer, x, dy)
    assert torch.equal(y, run(linear(Fp8Policy()), x, dy)[0] + layer.bias.data)
    assert distance(db, dy.sum(0)) < BF16_STEP


def test_an_output_in_bf16_leaves_gradients_in_fp8():
    x, dy = random(2, 8, 64), random(2, 8, 48, seed=3)
    plain, ours = (run(linear(policy), x, dy) for policy in (None, Fp8Policy(output="bfloat16")))
    assert [*map(torch.equal, ours, plain)] == [True, False, False]


def test_a_frozen_weight_costs_no_gradient():
    layer, x = linear(Fp8Policy()), random(3, 64).requires_grad_()
    layer.weight.requires_grad_(False)
    layer(x).sum().backward()
    assert layer.weight.grad is None and x.grad is not None


# -- which modules ---------------------------------------------------------------------------------


def test_the_ends_outputs_stay_bf16():
    def outputs(policy: Fp8Policy, count: int) -> list[str]:
        return [policy.of_layer(index, count).output for index in range(count)]

    assert outputs(Fp8Policy(), 4) == ["bfloat16", "fp8_fast", "fp8_fast", "bfloat16"]
    assert outputs(Fp8Policy(ends=0), 2) == ["fp8_fast"] * 2
    assert outputs(Fp8Policy(ends=2), 3) == ["bfloat16"] * 3


def test_who_takes_part():
    for name, module, output in (
        ("self_attn.q_proj", nn.Linear(32, 16), "bfloat16"),
        ("attention.dense", nn.Linear(32, 16), "bfloat16"),
        ("mlp.gate_proj", nn.Linear(32, 16), "fp8_fast"),
        ("mlp.gate", nn.Linear(32, 16), None),
        ("mlp.shared_expert_gate", nn.Linear(32, 16), None),
        ("block_sparse_moe.router.layer", nn.Linear(32, 16), None),
        ("mlp.up_proj", nn.Linear(24, 16), None),
        ("mlp.up_proj", nn.Linear(16, 24), None),
        ("norm", nn.LayerNorm(16), None),
        ("proj", type("Scaled", (nn.Linear,), {})(32, 16), None),
    ):
        own = Fp8Policy().of_module(name, module)
        assert (own.output if own else None) == output


def test_its_share_of_a_models_products():
    layers = [nn.ModuleDict({"mlp": nn.Linear(32, 48), "gate": nn.Linear(32, 16)})] * 4
    assert Fp8Policy().share(layers) == pytest.approx((2 + 2 * 2 / 3) / 4 * 48 / 64)
    assert ALL_FP8.share([]) == 0
    assert ALL_FP8.share(layers) == pytest.approx(48 / 64)


@pytest.mark.parametrize(
    ("family", "count"), [("llama", 7), ("qwen3", 7), ("gpt-neox", 4), ("gpt2", 0)]
)
def test_parameters_keep_their_names_and_stay_the_same(family, count):
    with engine_of(family, precision="bfloat16") as engine:
        layer = engine.skeleton.layers[1]
        before = dict(layer.named_parameters())
        assert apply_fp8(layer, ALL_FP8) == count
        assert sum(isinstance(module, Fp8Linear) for module in layer.modules()) == count
        after = dict(layer.named_parameters())
        assert list(before) == list(after) and all(before[name] is after[name] for name in before)


# -- whole models ----------------------------------------------------------------------------------


def fp8_engine(policy: Fp8Policy | None):
    engine = engine_of("llama", precision="bfloat16", optimizer=AdamW(lr=3e-3))
    if policy is not None:
        for layer in engine.skeleton.layers:
            assert apply_fp8(layer, policy) == 7
    return engine


def test_streamed_layers_without_an_fp8_product_are_bit_for_bit_the_same():
    with fp8_engine(None) as plain, fp8_engine(Fp8Policy(output="bfloat16")) as ours:
        losses = [train_engine(engine, [full_batches(0)]).losses for engine in (plain, ours)]
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_gradients_are_near_and_training_ends_where_bf16_ends():
    with fp8_engine(None) as plain, fp8_engine(ALL_FP8) as ours:
        for engine in (plain, ours):
            engine.forward_backward(full_batches(0))
        expected, found = (
            torch.cat([g.flatten() for g in gradients_of(engine).values()])
            for engine in (plain, ours)
        )
        # large weights on few values: fp8's 3% a matmul grow through three layers
        assert 0.01 < distance(found, expected) < 0.6
        steps = [full_batches(0, [(2, 8)])] * 30
        for engine in (plain, ours):
            engine.step(0.0)
            losses = train_engine(engine, steps).losses
            assert losses[-1] < 0.01 * losses[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # traced
def test_compilers_can_trace_it():
    config = tiny_config("llama", num_hidden_layers=1)
    model: Any = plain_model(config, dtype=torch.bfloat16)
    layer = model.model.layers[0]
    assert apply_fp8(layer, ALL_FP8) == 7
    positions = tuple(random(2, 5, 8, seed=seed) for seed in (4, 5))
    x, dy = random(2, 5, 32), random(2, 5, 32, seed=3)

    def both(module: nn.Module) -> tuple[torch.Tensor, ...]:
        return run(_Called(module, positions), x, dy)

    expected = both(layer)
    traced = copy.deepcopy(layer)
    traced.compile(backend="aot_eager", fullgraph=True)
    assert all(map(torch.equal, both(traced), expected))


class _Called(nn.Module):
    """A decoder layer that is called with these rotary embeddings."""

    def __init__(self, layer: nn.Module, positions: tuple[torch.Tensor, ...]) -> None:
        super().__init__()
        self.layer, self.positions = layer, positions

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(hidden, position_embeddings=self.positions)
        return output
