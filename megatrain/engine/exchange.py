"""What ranks exchange: shares of weights become whole blocks, whole sums become shares.

One thread issues all collectives, in the order in which the computing thread asks for them. That
order follows from the plan alone, so it is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import distributed

from megatrain.engine.streams import Compute, Lane
from megatrain.memory.layout import BLOCK_ALIGNMENT, FlatLayout, Span
from megatrain.world import World, gather_whole


class Exchange:
    """Collectives of a world of several ranks, for jobs of `lane`.

    Args:
        layouts: of all blocks.
    """

    def __init__(self, world: World, layouts: Sequence[FlatLayout], compute: Compute) -> None:
        self.world, self.lane = world, Lane("exchange", compute.device)
        self.shares = [layout.share(world.size) for layout in layouts]
        spans = (layout.span(world.rank, world.size) for layout in layouts)
        self._trained = [s.before(of.trainable) for s, of in zip(spans, layouts, strict=True)]
        whole = world.size * max(self.shares)
        self._received = torch.empty(whole, dtype=torch.float32, device=compute.device)
        self._norms = torch.empty(whole // BLOCK_ALIGNMENT, device=compute.device)

    def padded(self, block: int) -> int:
        """Elements of a block with whole shares for all ranks."""
        return self.world.size * self.shares[block]

    def trained_span(self, block: int) -> Span:
        """What this rank owns of a block's trained tensors, which are the first ones."""
        return self._trained[block]

    def gather(self, whole: torch.Tensor, share: torch.Tensor) -> None:
        """Fill `whole` with every rank's `share`, one behind the other, of any dtype."""
        # as bytes: not every library knows every dtype
        parts = whole.view(torch.uint8), share.view(torch.uint8)
        gather_whole(*parts, group=self.world.devices)

    def summed(self, total: torch.Tensor) -> torch.Tensor:
        """This rank's share of the sum of all ranks' `total` [ranks x share], in fp32, added in the
        order of ranks. Valid until the next call."""
        received = self._received[: len(total)]
        parts = received.view(torch.uint8), total.view(torch.uint8)
        distributed.all_to_all_single(*parts, group=self.world.devices)
        first: torch.Tensor
        first, *others = received.view(self.world.size, -1)
        for other in others:
            first += other
        return first

    def all_norms(self, mine: torch.Tensor, block: int) -> torch.Tensor:
        """The norms of all rows of a block, from those of this rank's share."""
        rows = self.shares[block] // BLOCK_ALIGNMENT
        padded = torch.nn.functional.pad(mine, (0, rows - len(mine)))
        whole = self._norms[: rows * self.world.size]
        self.gather(whole, padded)
        return whole

    def close(self) -> None:
        self.lane.close()
