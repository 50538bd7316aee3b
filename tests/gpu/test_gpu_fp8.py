"""On CUDA: fp8 products by the GPU's own units agree with the CPU's, eager and compiled."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatrain.models.transforms.fp8 import (
    Fp8Policy,
    apply_fp8,
    fp8_supported,
    multiply,
    quantize,
    quantize_both_ways,
    quantized_columns,
)
from tests.helpers.compare import bits, distance
from tests.helpers.support import plain_model, tiny_config

pytestmark = pytest.mark.skipif(
    not fp8_supported(torch.device("cuda")), reason="this GPU has no fp8 units"
)
BF16_STEP = 2.0**-8


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize(
    "rows",
    [random(33, 64), random(64, 33).t(), torch.zeros(4, 16).bfloat16()],
    ids=["rows", "columns", "zeros"],
)
def test_quantising_is_the_same_to_the_bit(rows):
    values, scales = quantize(rows)
    on_gpu, gpu_scales = quantize(rows.cuda())
    assert torch.equal(on_gpu.cpu().view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(bits(gpu_scales.cpu()), bits(scales))


def with_one(value: float) -> Tensor:
    matrix = random(257, 144)
    matrix[3, 5] = value
    return matrix


@pytest.mark.parametrize(
    "gradient",
    [
        random(33, 64),
        random(300, 272),
        random(64, 4096).t(),
        torch.zeros(20, 32).bfloat16(),
        with_one(float("nan")),
        with_one(float("inf")),
    ],
    ids=["small", "tiles", "transposed", "zeros", "nan", "infinity"],
)
def test_rows_and_columns_at_once_are_those_one_by_one(gradient):
    """All bits, and what is not finite where it would be."""
    found, expected = quantize_both_ways(gradient.cuda()), quantize_both_ways(gradient)
    for (values, scales), (wanted, wanted_scales) in zip(found, expected, strict=True):
        for ours, theirs in ((values, wanted), (scales, wanted_scales)):
            pair = (x.cpu().float().nan_to_num(nan=1e38, posinf=2e38) for x in (ours, theirs))
            assert torch.equal(*pair)
        assert values.is_contiguous()
    for alone, together in zip(quantized_columns(gradient.cuda()), found[1], strict=True):
        assert torch.equal(alone.view(torch.uint8), together.view(torch.uint8))


@pytest.mark.parametrize(("mode", "allowed"), [("fp8", BF16_STEP), ("fp8_fast", 4 * BF16_STEP)])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 16, 16), (21, 48, 33), (300, 512, 4096), (512, 576, 16384)]
)
def test_products_are_the_cpus(m, n, k, mode, allowed):
    a, b = random(m, k), random(n, k, seed=1)
    assert distance(multiply(a.cuda(), b.cuda(), mode).cpu(), multiply(a, b, mode)) < allowed


class OneLayer(nn.Module):
    """A decoder layer with all matmuls in fp8, or none, called with fixed rotary embeddings."""

    def __init__(self, fp8: bool = True) -> None:
        super().__init__()
        config = tiny_config("qwen2", num_hidden_layers=1)
        model: Any = plain_model(config, dtype=torch.bfloat16, device="cuda")
        self.layer: Any = model.model.layers[0]
        assert not fp8 or apply_fp8(self.layer, Fp8Policy(keep_output=())) == 7
        self.positions = tuple(random(3, 11, 8, seed=seed).cuda() for seed in (4, 5))

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.layer(hidden, position_embeddings=self.positions)
        return output


def run(module: nn.Module, hidden: Tensor) -> tuple[Tensor, ...]:
    hidden = hidden.cuda().requires_grad_()
    output = module(hidden)
    given, dy = [hidden, *module.parameters()], random(3, 11, 32, seed=3).cuda()
    return output.detach(), *torch.autograd.grad(output, given, dy)


def test_a_compiled_layer_is_near_the_eager_one():
    """Values near a tie round the other way, so each is held against the layer in bf16."""
    eager = OneLayer()
    compiled, exact = copy.deepcopy(eager), OneLayer(fp8=False)
    compiled.layer.compile()
    hidden = random(3, 11, 32)
    found, expected, truth = run(compiled, hidden), run(eager, hidden), run(exact, hidden)
    errors = [
        (distance(a, c), distance(b, c)) for a, b, c in zip(found, expected, truth, strict=True)
    ]
    assert all(a < 1.5 * b + BF16_STEP for a, b in errors), errors
    assert all(map(torch.equal, found, run(compiled, hidden)))


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_compiled_layer_hides_nothing_that_is_not_finite(bad):
    compiled = OneLayer()
    compiled.layer.compile()
    hidden = random(3, 11, 32)
    hidden[1, 4, 7] = bad
    output, grad_hidden, *grads = run(compiled, hidden)
    assert not output[1, 4].isfinite().any() and output[0].isfinite().all()
    assert not grad_hidden[1, 4].isfinite().any()
    assert not any(grad.isfinite().all() for grad in grads if grad.ndim == 2)
