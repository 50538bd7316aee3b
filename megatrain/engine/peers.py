"""The processes that compute a step together, as the engine asks them: here there is one alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from megatrain.engine.objective import Objective
from megatrain.engine.ranks.context_parallel import ContextParallel
from megatrain.losses import Tally
from megatrain.losses.targets import Answers

T = TypeVar("T")


class Peers:
    """One process alone. `ranks.sums.RankPeers` takes its place with several GPUs, where all call
    these methods at the same place.

    Attributes:
        several: there are others.
        context_parallel: shares sequences with other ranks.
    """

    several = False
    context_parallel: ContextParallel | None = None

    def number(self, local: int) -> int:
        """The number of this process's micro-batch `local` among those of all."""
        return local

    def all_gather(self, mine: T) -> list[T]:
        """Every process's value."""
        return [mine]

    def broadcast(self, value: T) -> T:
        """The first process's value; those of others are ignored."""
        return value

    def agreed(self, objective: Objective, batches: Sequence[Mapping[str, Tensor]]) -> Objective:
        """The objective over all processes' micro-batches, of which `batches` are this one's."""
        return objective

    def total(self, objective: Objective, found: Tally[Tensor]) -> Tally[Tensor]:
        """The sums of all processes. Waits for the device, unless there is one alone."""
        return found

    def answers(self, own: Mapping[int, Answers], device: torch.device) -> Answers:
        """All processes' examples in the order of micro-batches. own: this one's, by number."""
        return Answers.joined([*own.values()])
