"""Muon (Jordan et al., 2024, kellerjordan.github.io/posts/muon): orthogonalised momentum.

Muon updates hidden matrices: those inside decoder layers, each expert's by itself. AdamW updates
the rest: embedding, LM head, norms and biases. As in torch.optim.Muon, momentum is a running mean;
the direction (by default Nesterov's) is rounded to bfloat16 and orthogonalised by a few steps of a
quintic Newton-Schulz iteration. The array `exp_avg` holds the first moments of both; only AdamW's
tensors have an `exp_avg_sq`.

An update comes in stages. The pieces of a stage may run at once, from many threads; a stage begins
when the one before is complete, and what lies between two stages runs in one thread. So a matrix of
any size keeps all threads busy. Pieces follow from shapes alone, so the number of threads does not
change a bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple, Unpack

import numpy as np
import torch
from torch import Tensor

from megatrain.errors import ConfigError
from megatrain.memory.layout import ArraySpec, FlatLayout, TensorSpec
from megatrain.memory.slab import Slab
from megatrain.optim.adamw import AdamW
from megatrain.optim.optimizer import (
    Optimizer,
    StepOptions,
    UpdateOptions,
    check_range,
    numpy_of,
)
from megatrain.optim.split import join_master, split_master

HOST_PIECE = 1 << 20  # elements: some milliseconds of one core
DEVICE_PIECE = 1 << 24  # elements: temporaries of 64 MiB
DIRECTION_BYTES = 2  # of an element: directions are bfloat16
DEVICE_TEMPORARIES = 4  # of fp32, that a piece on the device has at a time
# why: decision 0021
LEAST_NORM = 1e-7  # of a direction, which is divided by its norm
AT_ONCE = 1 << 26  # elements of several experts' matrices that are orthogonalised together
PRODUCT_BUFFERS = 4  # of a matrix: the one that arrived, the one that leaves, two of the iteration
RATES = {
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
}

Piece = Callable[[], None]
Stage = Sequence[Piece]


class TensorState(NamedTuple):
    """A tensor of a block, with all that its update reads and writes. flats: "weight", "remainder"
    (bfloat16 precision only), "grad" and its state; 1-D, with padding."""

    spec: TensorSpec
    flats: dict[str, Tensor]


class InPlace:
    """Directions of blocks on the device: on its current stream, in memory of its allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def directions(self, tensor: TensorState) -> Tensor:
        return torch.empty(tensor.spec.numel, dtype=torch.bfloat16, device=self._device)

    def replace(self, function: Callable[[Tensor], Tensor], tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            tensor.copy_(function(tensor))


class HostWorkspace(InPlace):
    """For blocks in host RAM, one after another.

    Orthogonalising takes some hundred operations an element, which no host can spare. So where
    there is a GPU, directions go up as bfloat16, are orthogonalised on a stream of their own and
    come down: 4 bytes a parameter on the bus.

    Args:
        nbytes: of the largest block's directions.
        device: computes the matmuls; without a GPU the calling thread does, with torch's own.
        threads: number of threads for the first touch of the memory.
    """

    def __init__(self, nbytes: int, device: torch.device, threads: int) -> None:
        super().__init__(device)
        self._stream: Any = None
        if device.type == "cuda" and nbytes:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # tests inject sleeps here: on the stream, before every tensor
        self.delay: Callable[[], None] | None = None
        pinned = self._stream is not None
        self._slab = Slab("directions of the update", nbytes, pinned=pinned, threads=threads)
        self._taken = 0  # bytes

    def take_libraries(self) -> None:
        """Let cuBLAS take its workspace for this stream and this thread, which will call `replace`,
        now, not amid the activations (engine/components.py: take_workspaces)."""
        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                ones = torch.ones(1, 64, 64, dtype=torch.bfloat16, device=self._device)
                torch.bmm(ones, ones)

    def reset(self) -> None:
        """The block before is complete: its directions may be overwritten."""
        self._taken = 0

    def directions(self, tensor: TensorState) -> Tensor:
        start, self._taken = self._taken, self._taken + DIRECTION_BYTES * tensor.spec.numel
        return self._slab.bytes[start : self._taken].view(torch.bfloat16)

    def replace(self, function: Callable[[Tensor], Tensor], tensors: Sequence[Tensor]) -> None:
        """Returns when they are computed and, with a GPU, have come down."""
        if self._stream is None:
            super().replace(function, tensors)
            return
        with torch.cuda.stream(self._stream):
            for tensor in tensors:
                if self.delay is not None:
                    self.delay()
                arrived = tensor.to(self._device, non_blocking=True)
                # on one stream: the upload has read the tensor before this overwrites it
                tensor.copy_(function(arrived), non_blocking=True)
        self._stream.synchronize()  # wait: the host reads next what comes down

    def close(self) -> None:
        self._slab.close()


class Scratch(NamedTuple):
    """The most bytes that an update needs beside the state: `host` for a block's directions,
    `device` where matmuls are fast."""

    host: int
    device: int


@dataclass(frozen=True)
class Muon:
    """Hyper-parameters of Muon, with torch's meanings, and of AdamW for what is no hidden matrix.

    lr: of hidden matrices.
    adamw_lr: of the rest, by the same schedule; None: `lr`.
    adjust_lr_fn: how a matrix's rate follows from its shape: "match_rms_adamw" (Liu et al., 2025,
        arXiv:2502.16982: updates as large as AdamW's usually are, so AdamW's rates serve) or
        "original" (Jordan's, torch's default; rates about 0.02).
    ns_coefficients, ns_steps: of the Newton-Schulz iteration.
    betas, eps: AdamW's.

    Raises ConfigError for a value out of range.
    """

    lr: float = 1e-5
    adamw_lr: float | None = None
    momentum: float = 0.95
    nesterov: bool = True
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    ns_steps: int = 5
    adjust_lr_fn: str = "match_rms_adamw"
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    name: ClassVar[str] = "muon"
    whole_tensors: ClassVar[bool] = True
    arithmetic: ClassVar[float | None] = None

    def __post_init__(self) -> None:
        check_range("momentum", self.momentum, 0.0, 1.0)
        if self.adamw_lr is not None:
            check_range("adamw_lr", self.adamw_lr, 0.0, math.inf)
        coefficients: Any = self.ns_coefficients  # a list where it comes from YAML
        if not isinstance(coefficients, (tuple, list)) or len(coefficients) != 3:
            raise ConfigError(
                "optimizer.ns_coefficients: expected three numbers such as "
                f"(3.4445, -4.775, 2.0315), not {coefficients!r}"
            )
        for number, value in enumerate(coefficients):
            check_range(f"ns_coefficients[{number}]", value, -100.0, 100.0)
        object.__setattr__(self, "ns_coefficients", tuple(coefficients))
        steps: Any = self.ns_steps
        if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps < 100:
            raise ConfigError(
                f"optimizer.ns_steps: {steps!r} is out of range; "
                "it must be a whole number from 1 to 99"
            )
        if self.adjust_lr_fn not in RATES:
            raise ConfigError(
                f"optimizer.adjust_lr_fn: {self.adjust_lr_fn!r} is none of {', '.join(RATES)}"
            )
        object.__setattr__(self, "betas", self.adamw.betas)

    @property
    def adamw(self) -> AdamW:
        """The optimizer of the rest. Raises ConfigError for one of its values out of range."""
        return AdamW(lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay)

    @property
    def state_arrays(self) -> tuple[ArraySpec, ...]:
        second = ArraySpec("exp_avg_sq", torch.float32, per="unhidden")
        return ArraySpec("exp_avg", torch.float32), second

    @property
    def passes_bytes(self) -> float:
        """Memory traffic of a parameter's update, in bytes, beyond one read and write of its state
        and one read of its gradient."""
        return 8.0  # directions are written and read, by the host and by the bus

    def product_flops(self, layout: FlatLayout) -> float:
        """FLOPs of the matmuls in a block's update."""
        matrices = (_matrices(spec.shape) for spec in _hidden(layout))
        # an iteration computes x x^T, the square of that, and its product with x
        flops = (
            self.ns_steps * count * (4.0 * short * short * long + 2.0 * short**3)
            for count, short, long in matrices
        )
        return sum(flops, 0.0)

    def scratch(self, layouts: Sequence[FlatLayout]) -> Scratch:
        """Memory that suffices for the update of any of these blocks."""
        hidden = [_hidden(layout) for layout in layouts]
        specs = [spec for of_block in hidden for spec in of_block]
        host = max((sum(spec.numel for spec in of_block) for of_block in hidden), default=0)
        # a whole tensor's direction, of a block that lives on the device
        largest = max((spec.numel for spec in specs), default=0)
        products = max((_product_bytes(spec.shape) for spec in specs), default=0)
        computing = max(products, DEVICE_TEMPORARIES * 4 * min(DEVICE_PIECE, largest))
        return Scratch(DIRECTION_BYTES * host, computing + DIRECTION_BYTES * largest)

    def compile(self) -> None:
        """Load the kernels from Numba's cache or compile them."""
        from megatrain.optim import kernels  # late: planning need not load numba

        self.adamw.compile()
        for split in (False, True):
            kernels.muon_direction_kernel(split)
            kernels.muon_update_kernel(split)

    def stages(
        self, tensors: Sequence[TensorState], workspace: InPlace, **options: Unpack[StepOptions]
    ) -> Iterator[Stage]:
        """Stages which, once all their pieces were run, have updated these tensors in place. A
        float32 gradient beside bfloat16 weights is rounded to bfloat16 first. CUDA tensors are
        updated on the current stream, if a stage's pieces are run in order. Weight decay applies
        where a tensor's `spec` says so. Padding stays zero."""
        lr, step, grad_scale = options["lr"], options["step"], options["grad_scale"]
        hidden = [
            _Update(self, tensor, workspace, lr, grad_scale)
            for tensor in tensors
            if tensor.spec.hidden
        ]
        rest = [tensor for tensor in tensors if not tensor.spec.hidden]
        adamw_lr = (
            lr if self.adamw_lr is None else (lr / self.lr if self.lr else 0.0) * self.adamw_lr
        )
        beside = [
            piece for tensor in rest for piece in self._adamw(tensor, adamw_lr, step, grad_scale)
        ]
        direct = [partial(update.direct, part) for update in hidden for part in update.pieces]
        yield [*direct, *beside]
        workspace.replace(self.orthogonal, [part for update in hidden for part in update.parts()])
        yield [partial(update.apply, part) for update in hidden for part in update.pieces]

    def _adamw(self, tensor: TensorState, lr: float, step: int, grad_scale: float) -> Stage:
        """AdamW's update of a tensor with its padding, which stays zero."""
        adamw, flats = self.adamw, tensor.flats
        decay = self.weight_decay if tensor.spec.decay else 0.0
        options = UpdateOptions(lr=lr, weight_decay=decay, step=step, grad_scale=grad_scale)
        if flats["weight"].is_cuda:
            return [lambda: adamw.update(flats, **options)]
        update, numel = adamw.updating(flats, **options), flats["weight"].numel()
        starts = range(0, numel, HOST_PIECE)
        return [partial(update, start, min(start + HOST_PIECE, numel)) for start in starts]

    def orthogonal(self, matrices: Tensor) -> Tensor:
        """Nearly the closest orthogonal matrices to bfloat16 `matrices` [count, rows, columns];
        their singular values end between 0.7 and 1.2."""
        upright = matrices.shape[1] > matrices.shape[2]
        x = matrices.mT if upright else matrices
        x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=LEAST_NORM)
        a, b, c = self.ns_coefficients
        for _ in range(self.ns_steps):
            gram = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return x.mT if upright else x


def _hidden(layout: FlatLayout) -> list[TensorSpec]:
    """Tensors that are updated by an orthogonal direction."""
    return [spec for spec in layout.trained.tensors if spec.hidden]


def _matrices(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """(matrices, shorter, longer side) of a hidden tensor."""
    return math.prod(shape[:-2]), min(shape[-2:]), max(shape[-2:])


def _experts_at_once(shape: tuple[int, ...]) -> int:
    count, short, long = _matrices(shape)
    return min(count, max(1, AT_ONCE // (short * long)))


def _product_bytes(shape: tuple[int, ...]) -> int:
    """Device bytes of orthogonalising the matrices that are taken together."""
    _, short, long = _matrices(shape)
    return 2 * _experts_at_once(shape) * (PRODUCT_BUFFERS * short * long + 3 * short * short)


class _Update:
    """The update of one hidden tensor."""

    def __init__(
        self, optimizer: Muon, tensor: TensorState, workspace: InPlace, lr: float, grad_scale: float
    ) -> None:
        self.optimizer, self.spec, self.grad_scale = optimizer, tensor.spec, grad_scale
        self.decay = 1 - lr * optimizer.weight_decay if tensor.spec.decay else 1.0
        self.minus_step_size = -lr * RATES[optimizer.adjust_lr_fn](*tensor.spec.shape[-2:])
        numel = tensor.spec.numel
        flats = {name: flat[:numel] for name, flat in tensor.flats.items()}
        self.weight, self.grad, self.exp_avg = (flats[n] for n in ("weight", "grad", "exp_avg"))
        self.remainder = flats.get("remainder")
        self.direction = workspace.directions(tensor)
        self.on_host = self.weight.is_cpu
        if self.on_host:
            # rounds the fp32 accumulators of a resident block, else changes nothing
            self.grad = self.grad.to(self.weight.dtype)
        size = HOST_PIECE if self.on_host else DEVICE_PIECE
        self.pieces = [slice(at, min(at + size, numel)) for at in range(0, numel, size)]

    def direct(self, part: slice) -> None:
        momentum = self.optimizer.momentum
        exp_avg, grad, direction = self.exp_avg[part], self.grad[part], self.direction[part]
        if self.on_host:
            from megatrain.optim import kernels

            nesterov = 1 - momentum if self.optimizer.nesterov else 0.0
            scalars = map(np.float32, (self.grad_scale, 1 - momentum, nesterov))
            kernel = kernels.muon_direction_kernel(self.remainder is not None)
            kernel(*map(numpy_of, (exp_avg, grad, direction)), *scalars)
            return
        # as it is applied: rounded to the weight's type, then scaled
        gradient = grad.to(self.weight.dtype).float() * self.grad_scale
        exp_avg.lerp_(gradient, 1 - momentum)
        direction.copy_(gradient.lerp_(exp_avg, momentum) if self.optimizer.nesterov else exp_avg)

    def parts(self) -> list[Tensor]:
        """The direction as matrices [count, rows, columns] that are orthogonalised together."""
        matrices = self.direction.view(-1, *self.spec.shape[-2:])
        return list(torch.split(matrices, _experts_at_once(self.spec.shape)))

    def apply(self, part: slice) -> None:
        weight, direction = self.weight[part], self.direction[part]
        remainder = self.remainder[part] if self.remainder is not None else None
        if self.on_host:
            from megatrain.optim import kernels

            low = None if remainder is None else numpy_of(remainder)
            scalars = np.float32(self.decay), np.float32(self.minus_step_size)
            kernel = kernels.muon_update_kernel(remainder is not None)
            kernel(numpy_of(weight), low, numpy_of(direction), *scalars)
            return
        master = weight if remainder is None else join_master(weight, remainder)
        master.mul_(self.decay).add_(direction.float(), alpha=self.minus_step_size)
        if remainder is not None:
            split_master(master, (weight, remainder))


def check_one_rank(optimizer: Optimizer, ranks: int) -> None:
    """Raise ConfigError for an optimizer of whole tensors on several ranks."""
    if optimizer.whole_tensors and ranks > 1:
        raise ConfigError(
            f"optimizer.name: {optimizer.name} needs whole matrices, of which each of {ranks} GPUs "
            "has a part; use adamw or lion, or one GPU"
        )
