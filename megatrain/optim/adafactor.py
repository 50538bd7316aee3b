"""Adafactor (Shazeer and Stern, 2018, arXiv:1804.04235): the second moment as a row times a column, so that state is next to nothing.

As in torch.optim.Adafactor there is no first moment, the decay of the second grows with the steps, the rate is relative to the size of the
tensor's weights, and an update whose elements are larger than usual is scaled down as a whole. Tensors of one dimension are not factored.
Matrices of a tensor of three dimensions, as experts have them, are factored one by one; its sizes are those of the whole tensor.

Three passes: squares of gradients by row and column, and of weights; squares of the update; the update. A tensor of one dimension is a
matrix of one column here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from megatrain.errors import ConfigError
from megatrain.memory.layout import FlatLayout
from megatrain.optim.elementwise import check_range
from megatrain.optim.optimizer import StateArray
from megatrain.optim.whole_tensors import (
    DEVICE_PIECE,
    DEVICE_TEMPORARIES,
    HOST_PIECE,
    Scratch,
    Stage,
    TensorState,
    WholeTensors,
    Workspace,
    bits_of,
    gradient_of,
    read_master,
    write_master,
)

ROW, COLUMN = "exp_avg_sq_row", "exp_avg_sq_col"
LEAST_ROW_MEAN = float(torch.finfo(torch.float32).eps)  # eps1 where it is not given, as in torch for fp32 weights


@dataclass(frozen=True)
class Adafactor(WholeTensors):
    """Hyper-parameters of Adafactor; the meanings and defaults of torch's, whose `eps` is eps1 and eps2 here and whose `d` clip_threshold.

    `lr`: of step t, an update changes a tensor by at most min(lr, 1 / sqrt(t)) times max(eps2, the root mean square of its weights), as a
    root mean square. `beta2_decay`: the second moment's weight of a new gradient is t ** beta2_decay. `eps1`: the least mean of squares
    divided by, and its root the least root; None: that of float32 numbers. Raises ConfigError for a value out of range.
    """

    lr: float = 1e-2
    beta2_decay: float = -0.8
    eps1: float | None = None
    eps2: float = 1e-3
    clip_threshold: float = 1.0
    weight_decay: float = 0.0

    name: ClassVar[str] = "adafactor"
    arithmetic: ClassVar[float] = 1.5e9  # 1.1 to 1.7 measured, where AdamW makes 2.2 (docs/log.md)

    def __post_init__(self) -> None:
        check_range("lr", self.lr, 0.0, math.inf)
        check_range("eps2", self.eps2, 0.0, math.inf)
        check_range("weight_decay", self.weight_decay, 0.0, math.inf)
        if self.eps1 is not None:
            check_range("eps1", self.eps1, 1e-19, math.inf)  # its square must be a float32 number
        check_range("clip_threshold", self.clip_threshold, 1.0, math.inf)
        if not -math.inf < self.beta2_decay <= 0:
            raise ConfigError(f"optimizer.beta2_decay: {self.beta2_decay!r} is out of range; it must be 0 at most, such as -0.8")

    @property
    def state_arrays(self) -> tuple[StateArray, ...]:
        return StateArray(ROW, torch.float32, per="row"), StateArray(COLUMN, torch.float32, per="column")

    @property
    def passes_bytes(self) -> float:
        return 8.0  # weights are read twice and gradients three times, in bfloat16 precision

    def scratch(self, layouts: Sequence[FlatLayout]) -> Scratch:
        host = max((sum(_sums_bytes(spec.shape, HOST_PIECE) for spec in layout.tensors) for layout in layouts), default=0)
        device = max((_sums_bytes(spec.shape, DEVICE_PIECE) for layout in layouts for spec in layout.tensors), default=0)
        largest = max((_piece_numel(spec.shape, DEVICE_PIECE) for layout in layouts for spec in layout.tensors), default=0)
        return Scratch(host, device + DEVICE_TEMPORARIES * 4 * largest)

    def compile(self) -> None:
        """Load the kernels from Numba's cache or compile them."""
        from megatrain.optim import adafactor_kernels as kernels  # here: planning reads this class and need not wait for numba

        for split in (False, True):
            for kernel in (kernels.measure, kernels.weigh, kernels.apply):
                kernel(split)

    def stages(self, tensors: Sequence[TensorState], workspace: Workspace, *, lr: float, step: int, grad_scale: float) -> Iterator[Stage]:
        updates = [_Update(self, tensor, lr, step, grad_scale) for tensor in tensors if tensor.spec.numel]
        yield [piece for update in updates for piece in update.measure()]
        for update in updates:
            update.take_in()
        yield [piece for update in updates for piece in update.weigh()]
        yield [piece for update in updates for piece in update.apply()]


def as_matrices(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """(matrices, rows, columns) of a tensor."""
    if len(shape) < 2:
        return 1, math.prod(shape), 1
    return math.prod(shape[:-2]), shape[-2], shape[-1]


def _rows_of_piece(shape: tuple[int, ...], piece: int) -> int:
    _, rows, columns = as_matrices(shape)
    return min(rows, max(1, piece // columns))


def _piece_numel(shape: tuple[int, ...], piece: int) -> int:
    return _rows_of_piece(shape, piece) * as_matrices(shape)[2]


def _sums_bytes(shape: tuple[int, ...], piece: int) -> int:
    """Of what is kept between the passes: sums and factors of rows, and of each piece's columns."""
    matrices, rows, columns = as_matrices(shape)
    pieces = matrices * -(-rows // _rows_of_piece(shape, piece))
    return 4 * (3 * matrices * rows + pieces * (columns + 4) + 3 * matrices * columns)


class _Update:
    """One tensor's: [matrices, rows, columns], in pieces of some rows of one matrix."""

    def __init__(self, optimizer: Adafactor, tensor: TensorState, lr: float, step: int, grad_scale: float) -> None:
        self.optimizer, self.lr, self.step, self.grad_scale = optimizer, lr, step, grad_scale
        self.split, self.decay = tensor.split, 1 - lr * optimizer.weight_decay if tensor.spec.decay else 1.0
        shape = as_matrices(tensor.spec.shape)
        matrices, rows, columns = shape
        self.factored = len(tensor.spec.shape) > 1
        self.weight, self.grad = tensor.view("weight").view(shape), tensor.view("grad").view(shape)
        self.remainder = tensor.view("remainder").view(shape) if self.split else None
        self.row, self.column = tensor.view(ROW).view(matrices, rows), tensor.view(COLUMN).view(matrices, columns)
        self.on_host = self.weight.is_cpu
        if self.on_host:
            self.grad = self.grad.to(self.weight.dtype)  # fp32 sums of a block that counts as resident; nothing otherwise
        height = _rows_of_piece(tensor.spec.shape, HOST_PIECE if self.on_host else DEVICE_PIECE)
        self.pieces = [(m, slice(r, min(r + height, rows))) for m in range(matrices) for r in range(0, rows, height)]
        device, count = self.weight.device, len(self.pieces)
        self.row_sq, self.column_sq = torch.empty((matrices, rows), device=device), torch.zeros((count, columns), device=device)
        self.weight_sq, self.update_sq = (torch.empty(count, dtype=torch.float64, device=device) for _ in range(2))
        self.rows = self.columns = self.rate = self.row_sq  # known after the first pass
        self.ceiling = 1 / (optimizer.eps1 or LEAST_ROW_MEAN)

    # -- first pass -----------------------------------------------------------------------------------------------------------

    def measure(self) -> Stage:
        return [lambda i=i, m=m, r=r: self._measure(i, m, r) for i, (m, r) in enumerate(self.pieces)]  # type: ignore[misc]

    def _measure(self, i: int, m: int, r: slice) -> None:
        if self.on_host:
            from megatrain.optim import adafactor_kernels as kernels

            sums = (self.row_sq[m, r], self.column_sq[i], self.weight_sq[i : i + 1])
            kernels.measure(self.split)(*self._weights(m, r), self._grad(m, r), np.float32(self.grad_scale), *(x.numpy() for x in sums))
            return
        squares = gradient_of(self.grad[m, r], self.weight, self.grad_scale).square_()
        self.row_sq[m, r], self.column_sq[i] = squares.sum(1), squares.sum(0)
        master = read_master(self.weight[m, r], self.remainder[m, r] if self.remainder is not None else None)
        self.weight_sq[i] = torch.linalg.vector_norm(master, dtype=torch.float32).double().square()

    def take_in(self) -> None:
        """The second moment's next estimate, and the rate."""
        matrices, rows = self.row.shape
        columns, new = self.column.shape[1], self.step**self.optimizer.beta2_decay
        self.row.lerp_(self.row_sq / columns, new)
        rows_of_mean_one = self.row
        if self.factored:
            self.column.lerp_(self.column_sq.view(matrices, -1, columns).sum(1) / rows, new)
            rows_of_mean_one = self.row / self.row.mean(1, keepdim=True).clamp_(min=self.optimizer.eps1 or LEAST_ROW_MEAN)
        self.rows = rows_of_mean_one.rsqrt()  # of the roots that are divided by, as factors: passes then only multiply
        self.columns = self.column.rsqrt() if self.factored else torch.ones_like(self.column)
        size = (self.weight_sq.sum() / self.weight.numel()).sqrt().clamp_(min=self.optimizer.eps2)
        self.rate = size * min(self.lr, self.step**-0.5)

    # -- second and third -----------------------------------------------------------------------------------------------------

    def weigh(self) -> Stage:
        return [lambda i=i, m=m, r=r: self._weigh(i, m, r) for i, (m, r) in enumerate(self.pieces)]  # type: ignore[misc]

    def _weigh(self, i: int, m: int, r: slice) -> None:
        if self.on_host:
            from megatrain.optim import adafactor_kernels as kernels

            kernels.weigh(self.split)(self._grad(m, r), *self._factors(m, r), self.update_sq[i : i + 1].numpy())
            return
        self.update_sq[i] = torch.linalg.vector_norm(self._update(m, r), dtype=torch.float32).double().square()

    def apply(self) -> Stage:
        size = (self.update_sq.sum() / self.weight.numel()).sqrt() if self.pieces else self.rate
        return [lambda m=m, r=r: self._apply(m, r, size) for m, r in self.pieces]  # type: ignore[misc]

    def _apply(self, m: int, r: slice, size: Tensor) -> None:
        step_size = self.rate / (size / self.optimizer.clip_threshold).clamp(min=1.0)
        if self.on_host:
            from megatrain.optim import adafactor_kernels as kernels

            scalars = (np.float32(self.decay), np.float32(-float(step_size)))
            kernels.apply(self.split)(*self._weights(m, r), self._grad(m, r), *self._factors(m, r), *scalars)
            return
        weight, remainder = self.weight[m, r], self.remainder[m, r] if self.remainder is not None else None
        master = read_master(weight, remainder).mul_(self.decay)
        write_master(master.sub_(self._update(m, r).mul_(step_size.float())), weight, remainder)

    # -- a piece's arrays -----------------------------------------------------------------------------------------------------

    def _update(self, m: int, r: slice) -> Tensor:
        """By torch, before clipping."""
        factor = (self.rows[m, r, None] * self.columns[m]).clamp_(max=self.ceiling)
        return gradient_of(self.grad[m, r], self.weight, self.grad_scale).mul_(factor)

    def _weights(self, m: int, r: slice) -> list[np.ndarray[tuple[int, ...], np.dtype[np.generic]]]:
        return [bits_of(x[m, r]).numpy() for x in (self.weight, self.remainder) if x is not None]

    def _grad(self, m: int, r: slice) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
        return bits_of(self.grad[m, r]).numpy()

    def _factors(self, m: int, r: slice) -> tuple[object, ...]:
        return np.float32(self.grad_scale), self.rows[m, r].numpy(), self.columns[m].numpy(), np.float32(self.ceiling)
