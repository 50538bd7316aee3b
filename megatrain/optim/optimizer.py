"""What an optimizer declares, and the one thing it does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from megatrain.memory.layout import Per


@dataclass(frozen=True)
class StateArray:
    """One array of optimizer state, zero before the first update. `per`: what there is one element for (memory/layout.py)."""

    name: str
    dtype: torch.dtype
    per: Per = "element"


UpdateRange = Callable[[int, int], None]  # (start, stop) of the arrays it was made for


class Optimizer(Protocol):
    """What all have in common. Store, planner and checkpoint read `state_arrays`."""

    name: ClassVar[str]

    @property
    def state_arrays(self) -> tuple[StateArray, ...]: ...

    @property
    def lr(self) -> float: ...

    @property
    def weight_decay(self) -> float: ...

    @property
    def arithmetic(self) -> float | None:
        """Parameters/s that one thread of the host could update if memory had no limit; None: memory always takes longer."""

    def compile(self) -> None:
        """Prepare whatever the first `update` would otherwise pay for."""


class RangeOptimizer(Optimizer, Protocol):
    """One that updates every element by itself, and so any range of a block. Others update whole tensors (whole_tensors.py)."""

    def update(self, views: dict[str, Tensor], *, lr: float, weight_decay: float, step: int, grad_scale: float, first: int = 0) -> None:
        """Update one flat range in place.

        `views`: equally long, contiguous 1-D slices of "weight", "remainder" (bfloat16 precision only), "grad" and
        every array of `state_arrays`. `step` counts updates from 1. `grad_scale` multiplies the gradient first (the clip
        factor). `first` is the number of the range's first element in the whole model. An element's result depends on that
        element and its number alone, so any cut into ranges gives the same bits; a range of zeros stays zero.
        """

    def updating(
        self, arrays: dict[str, Tensor], *, lr: float, weight_decay: float, step: int, grad_scale: float, first: int = 0
    ) -> UpdateRange:
        """`update` of any range of CPU `arrays`, to be called from many threads at once.

        What ranges have in common is prepared here. A call takes microseconds of Python, in which it keeps the GIL from the thread that
        drives the device, and then releases it.
        """
