"""Linear layers whose matrix products take fp8 operands: twice the arithmetic a second of bf16, on GPUs that have it.

The weights stay what they are, bf16 over an fp32 master; fp8 exists only for the length of one product. Its operands are
e4m3, with one fp32 scale for every row, found from the row's largest absolute value at that moment (dynamic scaling), so that nothing is
carried from step to step. Rows are those that a product sums along: backward quantises anew what it sums along the other axis.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from megatrain.memory.layout import round_up
from megatrain.models.fp8_kernels import quantize_both, quantize_columns

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max  # 448
SMALLEST_AMAX = 1e-30  # a row of zeros is divided by this; far below any gradient, and its inverse times 448 is still finite in fp32
ALIGNMENT = 16  # what the kernels ask of the dimension that is summed, and of an output's last
FIRST_CAPABILITY = (8, 9)  # Ada, before Hopper (9.0) and Blackwell

# Patterns of modules that are better left in bf16, or their outputs.
ROUTERS = ("*router*", "*gate")  # a small error chooses other experts
ATTENTION = ("*attn.*", "*attention.*")  # an eighth of a layer's products, if queries are grouped; half of the loss

Product = Literal["bfloat16", "fp8", "fp8_fast", "none"]
IN_FP8: frozenset[Product] = frozenset({"fp8", "fp8_fast"})
Quantized = tuple[Tensor, Tensor]  # e4m3 [n, k] and fp32 scales [n, 1]


@dataclass(frozen=True)
class Fp8Policy:
    """Which products of which linear layers take fp8 operands.

    `fp8_fast` keeps its sums in the tensor cores' shorter registers, where `fp8` moves them to fp32 ones every few additions; on the CPU
    both are the same. `none` computes nothing, for outputs that nobody reads.

    Attributes:
        output: y = x W^T.
        grad_input: dx = dy W.
        grad_weight: dW = dy^T x.
        keep: shell patterns of modules' paths inside a decoder layer that stay bf16.
        keep_output: and of those whose output stays bf16, but not its gradients.
        ends: of so many first and so many last decoder layers, all outputs stay bf16.
    """

    output: Product = "fp8_fast"
    grad_input: Product = "fp8"
    grad_weight: Product = "fp8"
    keep: tuple[str, ...] = ROUTERS
    keep_output: tuple[str, ...] = ATTENTION
    ends: int = 1

    def of_layer(self, index: int, count: int) -> Fp8Policy:
        """What it is for layer `index` of `count`."""
        return self if self.ends <= index < count - self.ends else replace(self, output="bfloat16")

    def of_module(self, name: str, module: nn.Module) -> Fp8Policy | None:
        """What it is for the module at path `name` of a decoder layer; None if that stays as it is."""
        if type(module) is not nn.Linear or any(fnmatchcase(name, pattern) for pattern in self.keep):
            return None
        if module.in_features % ALIGNMENT or module.out_features % ALIGNMENT:
            return None
        return replace(self, output="bfloat16") if any(fnmatchcase(name, pattern) for pattern in self.keep_output) else self

    @property
    def products_share(self) -> float:
        """Of a module's three products, the share with fp8 operands."""
        return sum(mode in IN_FP8 for mode in (self.output, self.grad_input, self.grad_weight)) / 3

    def share(self, layers: Sequence[nn.Module]) -> float:
        """Of the arithmetic of all linear modules in a model's decoder layers, the share in products with fp8 operands."""
        taken = everything = 0.0
        for index, layer in enumerate(layers):
            policy = self.of_layer(index, len(layers))
            for name, module in layer.named_modules():
                if isinstance(module, nn.Linear):
                    own = policy.of_module(name, module)
                    taken += own.products_share * module.weight.numel() if own else 0.0
                    everything += module.weight.numel()
        return taken / max(1.0, everything)


def fp8_supported(device: torch.device) -> bool:
    """Whether `device` multiplies fp8 matrices itself. On the CPU the same is computed in fp32, more slowly than in bf16: for tests."""
    return device.type == "cuda" and torch.cuda.is_available() and torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY


def apply_fp8(layer: nn.Module, policy: Fp8Policy) -> int:
    """Turn the linear modules of a bf16 decoder layer that `policy` takes into `Fp8Linear`s, in place; returns how many.

    Parameters and their names stay, so that streamed weights are bound as before.
    """
    policies = {module: own for name, module in layer.named_modules() if (own := policy.of_module(name, module))}
    for module, own in policies.items():
        module.__class__ = Fp8Linear
        module.policy = own
    return len(policies)


@contextmanager
def fp8_products(layers: Sequence[nn.Module], policy: Fp8Policy) -> Iterator[None]:
    """`apply_fp8` while the context lasts, to bf16 decoder layers."""
    changed = [module for layer in layers for module in layer.modules() if type(module) is nn.Linear]
    try:
        for layer in layers:
            apply_fp8(layer, policy)
        yield
    finally:
        for module in changed:
            module.__class__ = nn.Linear
            vars(module).pop("policy", None)


class Fp8Linear(nn.Linear):
    """y = x W^T + b of x [..., in_features] bf16 and W [out_features, in_features] bf16. Made by `apply_fp8`."""

    policy: Fp8Policy

    def forward(self, input: Tensor) -> Tensor:
        modes = (self.output_mode(), self.policy.grad_input, self.policy.grad_weight)
        output: Tensor = LinearProducts.apply(input.flatten(0, -2), self.weight, *modes)  # type: ignore[no-untyped-call]
        if self.bias is not None:
            output = output + self.bias
        return output.view(*input.shape[:-1], self.out_features)

    def output_mode(self) -> Product:
        return self.policy.output


class Fp8LinearWithoutProduct(Fp8Linear):
    """Its gradients, and uninitialised memory for its output: for recomputation that does not need it."""

    def output_mode(self) -> Product:
        return "none"


class LinearProducts(torch.autograd.Function):
    """x [tokens, in], W [out, in] -> x W^T [tokens, out]; this and the two products of its gradients each in the mode asked for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, output: Product, grad_input: Product, grad_weight: Product) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.grad_input, ctx.grad_weight = grad_input, grad_weight
        return multiply(x, weight, output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        (x, weight), (dy,) = ctx.saved_tensors, grads
        dx = dw = None
        if ctx.needs_input_grad[0] and ctx.needs_input_grad[1] and {ctx.grad_input, ctx.grad_weight} <= IN_FP8:
            rows, columns = quantize_both_ways(dy)
            dx = multiply_fp8(rows, quantize(weight.t()), ctx.grad_input)
            dw = multiply_fp8(columns, quantized_columns(x), ctx.grad_weight)
        else:
            if ctx.needs_input_grad[0]:
                dx = multiply(dy, weight.t(), ctx.grad_input)
            if ctx.needs_input_grad[1]:
                dw = multiply(dy.t(), x.t(), ctx.grad_weight)
        return dx, dw, None, None, None


def multiply(a: Tensor, b: Tensor, mode: Product) -> Tensor:
    """a b^T [m, n] in bf16, of a [m, k] and b [n, k] in bf16 with any strides. For fp8, n is a multiple of 16. "none" computes nothing."""
    if mode == "none":
        return a.new_empty(len(a), len(b))
    if mode == "bfloat16":
        return a @ b.t()
    return multiply_fp8(quantize(_padded(a)), quantize(_padded(b)), mode)


def multiply_fp8(a: Quantized, b: Quantized, mode: Product) -> Tensor:
    """a b^T [m, n] in bf16, of operands [m, k] and [n, k]; k and n are multiples of 16. mode: "fp8" or "fp8_fast"."""
    (a8, a_scales), (b8, b_scales) = a, b
    if a8.device.type == "cpu":  # its kernel takes no scales by rows in some releases; this is the formula
        return ((a8.float() @ b8.float().t()) * a_scales * b_scales.t()).bfloat16()
    fast = mode == "fp8_fast"
    return torch._scaled_mm(a8, b8.t(), scale_a=a_scales, scale_b=b_scales.t(), out_dtype=torch.bfloat16, use_fast_accum=fast)


def quantize_both_ways(values: Tensor) -> tuple[Quantized, Quantized]:
    """(rows, columns) of [tokens, features]: as they are, and transposed, with zeros up to an aligned number of tokens."""
    if values.device.type == "cpu":
        return quantize(values), quantized_columns(values)
    straight, row_scales, turned, column_scales = quantize_both(values, round_up(len(values), ALIGNMENT))
    return (straight, row_scales), (turned, column_scales)


def quantized_columns(values: Tensor) -> Quantized:
    """Of [tokens, features], transposed, with zeros up to an aligned number of tokens."""
    if values.device.type == "cpu":
        return quantize(_padded(values.t()))
    turned, scales = quantize_columns(values, round_up(len(values), ALIGNMENT))
    return turned, scales


def _padded(rows: Tensor) -> Tensor:
    """With zeros after each row, up to an aligned width. Only where tokens are summed: other widths are aligned by the policy."""
    missing = round_up(rows.shape[1], ALIGNMENT) - rows.shape[1]
    return functional.pad(rows, (0, missing)) if missing else rows


def quantize(rows: Tensor) -> Quantized:
    """(e4m3 [n, k], fp32 scales [n, 1]), whose product is near `rows` [n, k]. The former is contiguous whatever the strides of `rows`.

    Plain operations, for torch.compile to fuse with what made `rows`. All of a row that holds an infinity or NaN becomes NaN.
    """
    amax = rows.abs().amax(dim=1, keepdim=True).float().clamp(min=SMALLEST_AMAX)
    scaled = rows * (FP8_MAX / amax)  # fp32; should it round to more than 448, the cast takes it back
    return scaled.to(FP8, memory_format=torch.contiguous_format), amax * (1 / FP8_MAX)  # GPUs multiply, where CPUs would divide
