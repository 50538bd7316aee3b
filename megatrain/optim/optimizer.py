"""The contract of optimizers: what they declare, and updates of flat ranges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypedDict, Unpack, runtime_checkable

import torch
from torch import Tensor

from megatrain.memory.layout import Per


@dataclass(frozen=True)
class StateArray:
    """One array of optimizer state, zero before the first update.

    `per`: granularity of the array (memory/layout.py).
    """

    name: str
    dtype: torch.dtype
    per: Per = "element"


UpdateRange = Callable[[int, int], None]  # (start, stop) of the arrays it was made for


class StepOptions(TypedDict):
    """Options of an update that hold for all blocks.

    step: number of the update, from 1.
    grad_scale: multiplies the gradient first (the clip factor).
    """

    lr: float
    step: int
    grad_scale: float


class UpdateOptions(StepOptions):
    """Options of an update that hold for all elements of a range."""

    weight_decay: float


@runtime_checkable
class Optimizer(Protocol):
    """The declarations that all share. Store, planner and checkpoint read `state_arrays`.

    Attributes:
        whole_tensors: True for one that updates whole tensors in stages (Muon), False for one that
            updates any range of elements (RangeOptimizer).
    """

    name: ClassVar[str]
    whole_tensors: ClassVar[bool]

    @property
    def state_arrays(self) -> tuple[StateArray, ...]: ...

    @property
    def lr(self) -> float: ...

    @property
    def weight_decay(self) -> float: ...

    @property
    def arithmetic(self) -> float | None:
        """Compute-bound rate of one host thread, parameters/s; None: memory is always slower."""

    def compile(self) -> None:
        """Compile kernels, which would otherwise delay the first update by seconds."""


class RangeOptimizer(Optimizer, Protocol):
    """Updates any range of a block, element by element."""

    def update(
        self, views: dict[str, Tensor], *, first: int = 0, **options: Unpack[UpdateOptions]
    ) -> None:
        """Update one flat range in place.

        An element's result depends on that element and its number alone, so any cut into ranges
        gives the same bits; a range of zeros stays zero.

        Args:
            views: equally long, contiguous 1-D slices of "weight", "remainder" (bfloat16 precision
                only), "grad" and every array of `state_arrays`.
            first: number of the range's first element in the whole model.
        """

    def updating(
        self, arrays: dict[str, Tensor], *, first: int = 0, **options: Unpack[UpdateOptions]
    ) -> UpdateRange:
        """`update` of any range of CPU `arrays`, to be called from many threads at once.

        What ranges have in common is prepared here. A call takes microseconds of Python, in which
        it keeps the GIL from the thread that drives the device, and then releases it.
        """


@dataclass(frozen=True)
class Frozen:
    """No optimizer: an engine that only evaluates or generates keeps no optimizer state."""

    lr: float = 0.0
    weight_decay: float = 0.0

    name: ClassVar[str] = "frozen"
    state_arrays: ClassVar[tuple[StateArray, ...]] = ()
    whole_tensors: ClassVar[bool] = False
    arithmetic: ClassVar[None] = None

    def compile(self) -> None:
        pass

    def update(
        self, views: dict[str, Tensor], *, first: int = 0, **options: Unpack[UpdateOptions]
    ) -> None:
        raise AssertionError("an engine made for reading was asked to train")
