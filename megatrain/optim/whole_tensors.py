"""The contract of optimizers that update whole tensors, as orthogonalising a matrix needs it whole.

Such an update comes in stages. The pieces of a stage may run at once, from many threads. A stage
begins when the one before is complete; what lies between two stages runs in one thread. So a tensor
of any size keeps all threads busy. Pieces follow from shapes alone, so the number of threads does
not change a bit.

Several ranks, each of which has a share of every tensor, cannot use such an optimizer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, Unpack

from torch import Tensor

from megatrain.errors import ConfigError
from megatrain.memory.layout import FlatLayout, TensorSpec
from megatrain.optim.optimizer import Optimizer, StateArray, StepOptions
from megatrain.optim.split import join_master, split_master

HOST_PIECE = 1 << 20  # elements: some milliseconds of one core
DEVICE_PIECE = 1 << 24  # elements: temporaries of 64 MiB
DIRECTION_BYTES = 2  # of an element: directions are bfloat16
DEVICE_TEMPORARIES = 4  # of fp32, that a piece on the device has at a time

Piece = Callable[[], None]
Stage = Sequence[Piece]


@dataclass(frozen=True)
class TensorState:
    """A tensor of a block, with everything that its update reads and writes.

    `flats`: "weight", "remainder" (bfloat16 precision only), "grad", and those of the optimizer's
    arrays that have this tensor; 1-D, each with its padding.
    """

    spec: TensorSpec
    flats: dict[str, Tensor]

    @property
    def split(self) -> bool:
        """True if the master weight is stored in two halves."""
        return "remainder" in self.flats


class Workspace(Protocol):
    """Memory and matmuls that a stage borrows."""

    def directions(self, tensor: TensorState) -> Tensor:
        """A flat bfloat16 tensor on the weights' device, until the block's update is complete."""

    def replace(self, function: Callable[[Tensor], Tensor], tensors: Sequence[Tensor]) -> None:
        """Replace each of `tensors`, parts of `directions`, by `function` of it, computed where
        matmuls are fast."""


@dataclass(frozen=True)
class Scratch:
    """The most bytes that an update needs beside the state.

    `host`: in host RAM, for a block's directions. `device`: where matmuls are fast.
    """

    host: int
    device: int


class WholeTensors(ABC):
    """An optimizer that updates whole tensors: a frozen dataclass of hyper-parameters, as AdamW."""

    name: ClassVar[str]
    whole_tensors: ClassVar[bool] = True
    arithmetic: ClassVar[float | None] = None  # as `Optimizer.arithmetic`
    lr: float
    weight_decay: float

    @property
    @abstractmethod
    def state_arrays(self) -> tuple[StateArray, ...]: ...

    @abstractmethod
    def compile(self) -> None:
        """As `Optimizer.compile`."""

    @abstractmethod
    def stages(
        self, tensors: Sequence[TensorState], workspace: Workspace, **options: Unpack[StepOptions]
    ) -> Iterator[Stage]:
        """Stages which, once all their pieces were run, have updated these tensors in place.

        A float32 gradient beside bfloat16 weights is rounded to bfloat16 first. CUDA tensors are
        updated on the current stream, if a stage's pieces are run in order. Weight decay applies
        where a tensor's `spec` says so. Padding stays zero.
        """

    @abstractmethod
    def scratch(self, layouts: Sequence[FlatLayout]) -> Scratch:
        """Enough for the update of any of these blocks."""

    @property
    @abstractmethod
    def passes_bytes(self) -> float:
        """Memory traffic of a parameter's update, in bytes, beyond one read and write of its state
        and one read of its gradient."""

    @abstractmethod
    def product_flops(self, layout: FlatLayout) -> float:
        """FLOPs of the matmuls in a block's update."""


def check_ranks(optimizer: Optimizer, ranks: int) -> None:
    """Raise ConfigError for an optimizer of whole tensors on several ranks."""
    if optimizer.whole_tensors and ranks > 1:
        raise ConfigError(
            f"optimizer.name: {optimizer.name} needs whole matrices, of which each of {ranks} GPUs "
            "has a part; use adamw or lion, or one GPU"
        )


# -- pieces that torch computes --------------------------------------------------------------------


def gradient_of(grad: Tensor, weight: Tensor, grad_scale: float) -> Tensor:
    """The fp32 gradient as it is applied: rounded to the weight's type, then scaled."""
    return grad.to(weight.dtype).float() * grad_scale


def read_master(weight: Tensor, remainder: Tensor | None) -> Tensor:
    """The master weight, a new fp32 tensor."""
    return weight.float().clone() if remainder is None else join_master(weight, remainder)


def write_master(master: Tensor, weight: Tensor, remainder: Tensor | None) -> None:
    """Write the fp32 `master` to its halves, or to `weight` alone; contiguous, of one shape."""
    if remainder is None:
        weight.copy_(master)
    else:
        split_master(master, (weight, remainder))
