"""The contract of optimizers that update whole tensors, as making a matrix orthogonal needs all of it.

Such an update comes in stages. The pieces of a stage may run at once, from many threads, and a stage begins when the one before is
complete; what lies between two stages runs in one thread. So a tensor of any size keeps all threads busy. Pieces follow from shapes alone,
and any number of threads gives the same bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from megatrain.memory.layout import FlatLayout, TensorSpec
from megatrain.optim.optimizer import StateArray
from megatrain.optim.split import join_master, split_master

HOST_PIECE = 1 << 20  # elements: some milliseconds of one core
DEVICE_PIECE = 1 << 24  # elements: temporaries of 64 MiB
DEVICE_TEMPORARIES = 4  # of fp32, that a piece on the device has at a time

Piece = Callable[[], None]
Stage = Sequence[Piece]


@dataclass(frozen=True)
class TensorState:
    """A tensor of a block with all that its update reads and writes: "weight", "remainder" (bfloat16 precision only), "grad", and of the
    optimizer's arrays those that have this tensor. `flats` are 1-D, each with its padding."""

    spec: TensorSpec
    flats: dict[str, Tensor]

    @property
    def split(self) -> bool:
        """Whether the master weight lies in two halves."""
        return "remainder" in self.flats


class Workspace(Protocol):
    """Memory and arithmetic that a stage borrows."""

    def directions(self, numel: int) -> Tensor:
        """A flat bfloat16 tensor beside the weights, until the block's update is complete."""

    def replace(self, function: Callable[[Tensor], Tensor], tensors: Sequence[Tensor]) -> None:
        """Each of these parts of `directions` becomes `function` of it, computed where matrix products are fast."""


@dataclass(frozen=True)
class Scratch:
    """Bytes that updates need beyond state, at most: in host RAM for the directions of a block, and where matrix products are fast."""

    host: int
    device: int


class WholeTensors(ABC):
    """An optimizer that updates whole tensors. Its hyper-parameters are those of a frozen dataclass, as in AdamW."""

    name: ClassVar[str]
    arithmetic: ClassVar[float | None] = None  # as `Optimizer.arithmetic`
    lr: float
    weight_decay: float

    @property
    @abstractmethod
    def state_arrays(self) -> tuple[StateArray, ...]: ...

    @abstractmethod
    def compile(self) -> None:
        """Prepare whatever the first update would otherwise pay for."""

    @abstractmethod
    def stages(
        self,
        tensors: Sequence[TensorState],
        workspace: Workspace,
        *,
        lr: float,
        step: int,
        grad_scale: float,
    ) -> Iterator[Stage]:
        """Update these tensors in place, when the pieces of all stages were run. Padding stays zero.

        A float32 gradient beside bfloat16 weights is rounded to bfloat16 first. `step` counts updates from 1, `grad_scale` multiplies the
        gradient first. CUDA tensors are updated on the current stream, by a stage's pieces in their order. Weight decay applies where the
        tensor's `spec` says so.
        """

    @abstractmethod
    def scratch(self, layouts: Sequence[FlatLayout]) -> Scratch:
        """What updating any of these blocks takes."""

    @property
    @abstractmethod
    def passes_bytes(self) -> float:
        """Memory traffic of a parameter's update beyond reading and writing its state once, and reading its gradient."""

    @abstractmethod
    def product_flops(self, layout: FlatLayout) -> float:
        """Of the matrix products in a block's update."""


# -- where a piece is computed by torch -----------------------------------------------------------------------------------------------


def gradient_of(grad: Tensor, weight: Tensor, grad_scale: float) -> Tensor:
    """The fp32 gradient as it is applied: rounded to the weight's type, then scaled."""
    return grad.to(weight.dtype).float() * grad_scale


def read_master(weight: Tensor, remainder: Tensor | None) -> Tensor:
    """A new fp32 tensor."""
    return weight.float().clone() if remainder is None else join_master(weight, remainder)


def write_master(master: Tensor, weight: Tensor, remainder: Tensor | None) -> None:
    """Contiguous tensors of one shape."""
    if remainder is None:
        weight.copy_(master)
    else:
        split_master(master, (weight, remainder))


def bits_of(tensor: Tensor) -> Tensor:
    """A CPU tensor as Numba reads it: bfloat16, which it lacks, as int16."""
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
