"""Weight gradients that never exist by themselves: linear layers and embeddings add theirs straight
to an fp32 accumulator.

Autograd would make a gradient as large as the weight, rounded to bf16, for every chunk or
micro-batch, to be added afterwards: 12 bytes of memory traffic per element. A matmul that adds to
the accumulator moves 8, most of them while it computes; an embedding touches only its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from megatrain import cuda


@dataclass
class Sum:
    """The fp32 accumulator of one parameter's gradients, of the parameter's shape.

    `empty`: whatever `total` holds does not count.
    """

    total: Tensor
    empty: bool

    def add(self, gradient: Tensor) -> None:
        """Add a gradient of any dtype."""
        if self.empty:
            self.total.copy_(gradient)
        elif not added_as_vectors(self.total, gradient):
            self.total.add_(gradient)
        self.empty = False

    def add_product(self, a: Tensor, b: Tensor) -> None:
        """Add a @ b. On CUDA the product of bf16 matrices is neither rounded nor stored in between;
        on the CPU it is."""
        total, beta = self.total, 0 if self.empty else 1  # 0: nothing is read, not even a NaN
        if a.dtype == total.dtype:
            torch.addmm(total, a, b, beta=beta, out=total)
        elif total.is_cuda:
            torch.addmm(total, a, b, out_dtype=total.dtype, beta=beta, out=total)
        else:
            self.add(a @ b)
        self.empty = False

    def add_rows(self, index: Tensor, rows: Tensor) -> None:
        """Add rows[i] to row index[i], in an order that does not change from run to run."""
        self.fill()
        rows = rows.to(self.total.dtype)
        if not self.total.is_cuda:
            # threads would add to one row in any order: first sum what goes to each row
            index, place = index.unique(return_inverse=True)  # type: ignore[no-untyped-call]
            rows = torch.ops.aten.embedding_dense_backward(rows, place, len(index), -1, False)
        self.total.index_put_((index,), rows, accumulate=True)

    def fill(self) -> None:
        """Make an empty sum zero."""
        if self.empty:
            self.total.zero_()
        self.empty = False


@dataclass(frozen=True)
class LaterSum:
    """The sum of a name, which is found once there is a gradient for it."""

    find: Callable[[], Mapping[str, Sum]]
    name: str

    def add_product(self, a: Tensor, b: Tensor) -> None:
        self.find()[self.name].add_product(a, b)

    def add_rows(self, index: Tensor, rows: Tensor) -> None:
        self.find()[self.name].add_rows(index, rows)


def add_gradients(sums: Iterable[Sum], gradients: Iterable[Tensor | None]) -> None:
    """Add each parameter's gradient to its sum; None is zero, or was summed directly."""
    for into, gradient in zip(sums, gradients, strict=True):
        if gradient is not None:
            into.add(gradient)


ADD_SOURCE = r"""
struct __align__(16) Half8 { unsigned short x[8]; };
struct __align__(16) Float4 { float x[4]; };

extern "C" __global__ void add_bfloat16(Float4* total, const Half8* gradient, int n) {
    unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (unsigned int)n) return;
    Half8 g = gradient[i];
    Float4 low = total[2 * i], high = total[2 * i + 1];
    for (int k = 0; k < 4; ++k) {
        low.x[k] += __uint_as_float((unsigned int)g.x[k] << 16);
        high.x[k] += __uint_as_float((unsigned int)g.x[k + 4] << 16);
    }
    total[2 * i] = low; total[2 * i + 1] = high;
}
"""


def added_as_vectors(total: Tensor, gradient: Tensor) -> bool:
    """Add a bf16 gradient to an fp32 sum on the GPU; False if they do not suit vector loads.

    PyTorch's kernel for mixed dtypes takes twice as long.
    """
    if not total.is_cuda or (total.dtype, gradient.dtype) != (torch.float32, torch.bfloat16):
        return False
    count = cuda.vectors([total, gradient], 8)  # a thread's: 16 bytes of bf16 in one load
    if count is None:
        return False
    cuda.launch(ADD_SOURCE, "add_bfloat16", count, [total, gradient], [count])
    return True


# Rules of an embedding whose gradient autograd makes.
UNSUMMED_RULES = ("max_norm", "scale_grad_by_freq", "sparse")


class SummedLinear(torch.autograd.Function):
    """A linear layer whose weight's gradient goes to a Sum; for autograd the weight has none."""

    @staticmethod
    def forward(
        ctx: Any, into: Sum | LaterSum, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.into = into
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None, Tensor | None]:
        x, weight = ctx.saved_tensors
        rows = grads[0].flatten(0, -2)
        ctx.into.add_product(rows.T, x.flatten(0, -2))
        return None, grads[0] @ weight, None, rows.sum(0) if ctx.needs_input_grad[3] else None


class SummedEmbedding(torch.autograd.Function):
    """An embedding whose weight's gradient goes to a Sum; for autograd the weight has none."""

    @staticmethod
    def forward(
        ctx: Any, into: Sum | LaterSum, ids: Tensor, weight: Tensor, padding: int | None
    ) -> Tensor:
        ctx.save_for_backward(ids)
        # a token whose row has no gradient; negative ones count from the end
        ctx.padding = None if padding is None else padding % len(weight)
        ctx.into = into
        return functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None, None]:
        (ids,) = ctx.saved_tensors
        rows = grads[0]
        if ctx.padding is not None:
            rows = rows.masked_fill((ids == ctx.padding).unsqueeze(-1), 0)
        ctx.into.add_rows(ids.flatten(), rows.flatten(0, -2))
        return None, None, None, None


class SummingInto(TorchFunctionMode):
    """While active, linear layers and embeddings whose weight is one of `parameters` add its
    gradient to that parameter's sum, if it has one.

    Other uses of a parameter have their gradient from autograd, to be added by the caller. Not for
    compiled modules.
    """

    def __init__(self, parameters: Sequence[Tensor], sums: Sequence[Sum | LaterSum | None]) -> None:
        super().__init__()
        self._sums = {id(parameter): into for parameter, into in zip(parameters, sums, strict=True)}

    @classmethod
    def later(
        cls,
        parameters: Sequence[Tensor],
        names: Sequence[str],
        find: Callable[[], Mapping[str, Sum]],
        but: Collection[str] = (),
    ) -> SummingInto:
        """With sums by name that are found once there are gradients; none for names in `but`."""
        found = (None if name in but else LaterSum(find, name) for name in names)
        return cls(parameters, [*found])

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.linear:
            return self._linear(*args, **kwargs)
        if func is functional.embedding:
            return self._embedding(*args, **kwargs)
        return func(*args, **kwargs)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        into = self._sums.get(id(weight))
        if into is None:
            return functional.linear(input, weight, bias)
        return SummedLinear.apply(into, input, weight, bias)  # type: ignore[no-untyped-call]

    def _embedding(
        self, input: Tensor, weight: Tensor, padding_idx: int | None = None, **rules: Any
    ) -> Any:
        into = self._sums.get(id(weight))
        if into is None or any(rules.get(name) for name in UNSUMMED_RULES):
            return functional.embedding(input, weight, padding_idx, **rules)
        return SummedEmbedding.apply(into, input, weight, padding_idx)  # type: ignore[no-untyped-call]
