"""Linear layers whose matmuls take fp8 operands: twice as fast as bf16 on GPUs with fp8 units.

Weights stay bf16 over an fp32 master; fp8 exists only for the length of one matmul. Operands are
e4m3 with one fp32 scale per row, from the row's largest absolute value at that moment (dynamic
scaling: no state between steps). Rows lie along the summed dimension, so backward quantises anew
what it sums along the other one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from megatrain import cuda
from megatrain.machine.datasheets import FIRST_FP8
from megatrain.memory.layout import round_up

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max  # 448
# A row of zeros is divided by this: far below any gradient, and 448 over it is finite in fp32.
SMALLEST_AMAX = 1e-30
ALIGNMENT = 16  # the kernels need multiples of it for the summed dimension and an output's last

# Patterns of modules of which everything, or the output, is better left in bf16.
ROUTERS = ("*router*", "*gate")  # a small error chooses other experts
# With grouped queries an eighth of a layer's matmul FLOPs, but half of the loss in quality.
ATTENTION = ("*attn.*", "*attention.*")

Mode = Literal["bfloat16", "fp8", "fp8_fast", "none"]
Quantized = tuple[Tensor, Tensor]  # e4m3 [n, k] and fp32 scales [n, 1]


# why: decision 0012
@dataclass(frozen=True)
class Fp8Policy:
    """The policy of matmuls with fp8 operands, by linear layer: of outputs, y = x W^T, as gradients
    dx = dy W and dW = dy^T x are always `fp8`. `fp8_fast` accumulates in the tensor cores' shorter
    registers; `fp8` moves partial sums to fp32 ones every few additions. On the CPU both are the
    same. `none` computes nothing."""

    output: Mode = "fp8_fast"
    keep_output: tuple[str, ...] = ATTENTION  # shell patterns of paths in a layer that stay bf16
    ends: int = 1  # outputs of this many first and last decoder layers stay bf16

    def of_layer(self, index: int, count: int) -> Fp8Policy:
        """The policy for layer `index` of `count`."""
        return self if self.ends <= index < count - self.ends else replace(self, output="bfloat16")

    def of_module(self, name: str, module: nn.Module) -> Fp8Policy | None:
        """The policy for the module at path `name` of a decoder layer; None if it stays bf16."""
        if type(module) is not nn.Linear or _matches(name, ROUTERS):
            return None
        if not module.weight.requires_grad:  # a constant, and read as it is
            return None
        if module.in_features % ALIGNMENT or module.out_features % ALIGNMENT:
            return None
        return replace(self, output="bfloat16") if _matches(name, self.keep_output) else self

    def share(self, layers: Sequence[nn.Module]) -> float:
        """The share of the linear modules' FLOPs in a model's decoder layers that runs in fp8."""
        taken = everything = 0.0
        for index, layer in enumerate(layers):
            policy = self.of_layer(index, len(layers))
            for name, module in layer.named_modules():
                if isinstance(module, nn.Linear):
                    everything += module.weight.numel()
                    if own := policy.of_module(name, module):
                        taken += (2 + (own.output != "bfloat16")) / 3 * module.weight.numel()
        return taken / max(1.0, everything)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def fp8_supported(device: torch.device) -> bool:
    """True if `device` has fp8 units. The CPU computes the same in fp32, slowly, for tests."""
    on_gpu = device.type == "cuda" and torch.cuda.is_available()
    return on_gpu and torch.cuda.get_device_capability(device) >= FIRST_FP8


def apply_fp8(layer: nn.Module, policy: Fp8Policy) -> int:
    """Replace the linear modules of a bf16 layer that `policy` takes; returns their number."""
    taken = 0
    for name, module in list(layer.named_modules()):
        if isinstance(module, nn.Linear) and (own := policy.of_module(name, module)):
            layer.set_submodule(name, Fp8Linear(module, own))
            taken += 1
    return taken


@contextmanager
def fp8_matmuls(layers: Sequence[nn.Module], policy: Fp8Policy) -> Iterator[None]:
    """`apply_fp8` inside the context."""
    modules = [(layer, *named) for layer in layers for named in layer.named_modules()]
    before = [entry for entry in modules if type(entry[2]) is nn.Linear]
    try:
        for layer in layers:
            apply_fp8(layer, policy)
        yield
    finally:
        for layer, name, module in before:
            layer.set_submodule(name, module)


class Fp8Linear(nn.Linear):
    """y = x W^T + b of x [..., in_features] bf16 and W [out_features, in_features] bf16. Shares the
    dictionaries of a bf16 module: a parameter bound to one is bound to the other."""

    def __init__(self, linear: nn.Linear, policy: Fp8Policy) -> None:
        vars(self).update(vars(linear))
        self.policy = policy
        self.output = policy.output  # "none" where recomputation leaves it out

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = LinearMatmuls.apply(input.flatten(0, -2), self.weight, self.output)  # type: ignore[no-untyped-call]
        if self.bias is not None:
            output = output + self.bias
        return output.view(*input.shape[:-1], self.out_features)


class LinearMatmuls(torch.autograd.Function):
    """x [tokens, in], W [out, in] -> x W^T [tokens, out] in this mode, with gradients in fp8."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, output: Mode) -> Tensor:
        ctx.save_for_backward(x, weight)
        return multiply(x, weight, output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (x, weight), (dy,) = ctx.saved_tensors, grads
        dx = dw = None
        if all(ctx.needs_input_grad[:2]):
            rows, columns = quantize_both_ways(dy)
            dx = multiply_fp8(rows, quantize(weight.t()), "fp8")
            dw = multiply_fp8(columns, quantized_columns(x), "fp8")
        elif ctx.needs_input_grad[0]:
            dx = multiply(dy, weight.t(), "fp8")
        elif ctx.needs_input_grad[1]:
            dw = multiply(dy.t(), x.t(), "fp8")
        return dx, dw, None


def multiply(a: Tensor, b: Tensor, mode: Mode) -> Tensor:
    """a b^T [m, n] in bf16, of bf16 a [m, k] and b [n, k] with any strides. fp8 needs 16 | n."""
    if mode == "none":
        return a.new_empty(len(a), len(b))
    if mode == "bfloat16":
        return a @ b.t()
    return multiply_fp8(quantize(_padded(a)), quantize(_padded(b)), mode)


def multiply_fp8(a: Quantized, b: Quantized, mode: Mode) -> Tensor:
    """a b^T [m, n] in bf16, of operands [m, k] and [n, k]; k and n are multiples of 16."""
    (a8, a_scales), (b8, b_scales) = a, b
    if a8.device.type == "cpu":  # some releases' kernel takes no scales per row; same formula
        return ((a8.float() @ b8.float().t()) * a_scales * b_scales.t()).bfloat16()
    return torch._scaled_mm(
        a8,
        b8.t(),
        scale_a=a_scales,
        scale_b=b_scales.t(),
        out_dtype=torch.bfloat16,
        use_fast_accum=mode == "fp8_fast",
    )


def quantize_both_ways(values: Tensor) -> tuple[Quantized, Quantized]:
    """[tokens, features] by row, and as `quantized_columns`."""
    if values.device.type == "cpu":
        return quantize(values), quantized_columns(values)
    padded = round_up(len(values), ALIGNMENT)
    straight, row_scales, turned, column_scales = quantize_both(values, padded)
    return (straight, row_scales), (turned, column_scales)


def quantized_columns(values: Tensor) -> Quantized:
    """[tokens, features] transposed, padded with zeros to an aligned number of tokens."""
    if values.device.type == "cpu":
        return quantize(_padded(values.t()))
    return quantize_columns(values, round_up(len(values), ALIGNMENT))  # type: ignore[no-any-return]


def _padded(rows: Tensor) -> Tensor:
    """Rows padded to an aligned width. Only sums over tokens need it: features are aligned."""
    missing = round_up(rows.shape[1], ALIGNMENT) - rows.shape[1]
    return functional.pad(rows, (0, missing)) if missing else rows


def quantize(rows: Tensor) -> Quantized:
    """(e4m3 [n, k], fp32 scales [n, 1]), whose product is near `rows` [n, k]. Contiguous whatever
    the strides of `rows`. A row with an infinity or NaN becomes NaN. Plain operations, which
    torch.compile fuses with what made `rows`."""
    amax = rows.abs().amax(dim=1, keepdim=True).float().clamp(min=SMALLEST_AMAX)
    # fp32; should it round to more than 448, the cast takes it back
    scaled = rows * (FP8_MAX / amax)
    # GPUs multiply, where CPUs would divide
    return scaled.to(FP8, memory_format=torch.contiguous_format), amax * (1 / FP8_MAX)


# -- kernels ---------------------------------------------------------------------------------------

TILE = 128  # rows and columns of the matrix that one block of threads takes
SOURCE = Path(__file__).with_name("fp8.cu").read_text()
BOTH, COLUMNS = (f"#define ROWS {of_rows}\n{SOURCE}" for of_rows in (1, 0))

# Each is one operator, which a compiler leaves whole. `padded` and k are multiples of 16, `padded`
# is at least n, and zeros follow the n values of a column. The bits are those of fp8.quantize.


@torch.library.custom_op("megatrain::quantize_both", mutates_args=(), device_types="cuda")
def quantize_both(values: Tensor, padded: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """bf16 [n, k] -> e4m3 [n, k], fp32 scales [n, 1], e4m3 [k, padded], fp32 scales [k, 1]."""
    by_row, by_column = _scaled(values, *values.shape), _scaled(values, values.shape[1], padded)
    _run(values, by_column, padded, by_row)
    return *by_row, *by_column


@torch.library.custom_op("megatrain::quantize_columns", mutates_args=(), device_types="cuda")
def quantize_columns(values: Tensor, padded: int) -> tuple[Tensor, Tensor]:
    """bf16 [n, k] -> e4m3 [k, padded], fp32 scales [k, 1]."""
    by_column = _scaled(values, values.shape[1], padded)
    _run(values, by_column, padded)
    return by_column


@quantize_both.register_fake
def _both_on_meta(values: Tensor, padded: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return *_scaled(values, *values.shape), *_scaled(values, values.shape[1], padded)


@quantize_columns.register_fake
def _columns_on_meta(values: Tensor, padded: int) -> tuple[Tensor, Tensor]:
    return _scaled(values, values.shape[1], padded)


def _scaled(like: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Uninitialised e4m3 [rows, columns] and fp32 scales [rows, 1]."""
    values = like.new_empty((rows, columns), dtype=torch.float8_e4m3fn)
    return values, like.new_empty((rows, 1), dtype=torch.float32)


def _run(
    values: Tensor,
    by_column: tuple[Tensor, Tensor],
    padded: int,
    by_row: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Write the fp8 form of `values` by column, and that by row if there is memory for it."""
    rows, columns = values.shape
    values = values.contiguous()
    if values.data_ptr() % 16:  # kernels load vectors
        values = values.clone()
    # bits of the largest absolute values found so far; without rows, theirs are not looked at
    of_columns = of_rows = torch.zeros(columns, dtype=torch.int32, device=values.device)
    if by_row is not None:
        of_rows = torch.zeros(rows, dtype=torch.int32, device=values.device)
    source = COLUMNS if by_row is None else BOTH
    across = -(-columns // TILE) * cuda.THREADS
    threads = -(-rows // TILE) * across
    cuda.launch(source, "maxima", threads, [of_rows, of_columns, values], (rows, columns))
    threads = -(-padded // TILE) * across
    tensors = [*(by_row or by_column), *by_column, values, of_rows, of_columns]
    cuda.launch(source, "quantize", threads, tensors, (rows, columns, padded))
