"""No optimizer: engines that only evaluate or generate need no optimizer state in host RAM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Unpack

from torch import Tensor

from megatrain.optim.optimizer import StateArray, UpdateOptions


@dataclass(frozen=True)
class Frozen:
    """Has no state and refuses to update."""

    lr: float = 0.0
    weight_decay: float = 0.0

    name: ClassVar[str] = "frozen"
    state_arrays: ClassVar[tuple[StateArray, ...]] = ()
    whole_tensors: ClassVar[bool] = False
    arithmetic: ClassVar[None] = None

    def compile(self) -> None:
        """Nothing to prepare."""

    def update(
        self, views: dict[str, Tensor], *, first: int = 0, **options: Unpack[UpdateOptions]
    ) -> None:
        raise AssertionError("an engine made for reading was asked to train")
