"""Collectives of ranks: shares of weights become whole blocks, whole sums become shares.

One lane issues all collectives, in the order in which the computing thread asks for them. That
order follows from the plan alone, so it is the same on every rank, and each collective waits for
the same one on the others. The lane gathers the shares of a block once this rank's is up (upload)
and the slot is no longer read (compute); it adds up sums once compute has made this rank's, to what
upload has brought of earlier groups where that waits on the host. With several hosts, download
copies down what has come over the network, and upload waits for that before it brings it up again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatrain.engine.streams import Compute, Lane
from megatrain.machine.hardware import reach_each_other
from megatrain.memory.layout import BLOCK_ALIGNMENT, FlatLayout, Span
from megatrain.settings import Settings
from megatrain.world import World, gather_whole, scatter_sum, trade_parts


# why: decision 0094
class Exchange:
    """Collectives of a world of several ranks, for jobs of `lane`.

    With several hosts each is two: among ranks in the same place on their hosts, over the network,
    and among the ranks of a host. Sums go the other way.

    Args:
        wire: dtype of sums between hosts: fp32, or bf16, to which each host's is rounded once.

    Attributes:
        slowest: cause of waits for sums: exchange, or network.
    """

    def __init__(
        self,
        world: World,
        layouts: Sequence[FlatLayout],
        compute: Compute,
        wire: torch.dtype = torch.float32,
    ) -> None:
        self.world, self.wire, self.device = world, wire, compute.device
        self.lane = Lane("exchange", compute.device)
        self.shares = [layout.share(world.size) for layout in layouts]
        spans = (layout.span(world.place(), world.size) for layout in layouts)
        self._trained = [s.before(of.trainable) for s, of in zip(spans, layouts, strict=True)]
        whole = world.size * max(self.shares)
        # one buffer for all blocks: the lane runs one collective at a time
        self._received = torch.empty(whole, dtype=torch.float32, device=compute.device)
        # one norm for each row of BLOCK_ALIGNMENT elements
        self._norms = torch.empty(whole // BLOCK_ALIGNMENT, device=compute.device)
        self.slowest = "exchange" if world.across is None else "network"

    def padded(self, block: int) -> int:
        """Elements of a block with whole shares for all ranks."""
        return self.world.size * self.shares[block]

    def trained_span(self, block: int) -> Span:
        """This rank's share of a block's trained tensors, which are the first ones."""
        return self._trained[block]

    def gather(self, whole: Tensor, share: Tensor) -> None:
        """Fill `whole` with every rank's `share`, in the order of `World.place`."""
        # across hosts first: each rank's part crosses the network once
        if self.world.across is not None:
            share = self.gather_across(whole, share)
        if self.world.local is not None:
            self.gather_here(whole, share)

    def part(self, whole: Tensor) -> Tensor:
        """The part of `whole` that this rank and those in its place on other hosts own together."""
        part: Tensor = whole.view(self.world.local_size, -1)[self.world.local_rank]
        return part

    def gather_across(self, whole: Tensor, share: Tensor) -> Tensor:
        """Fill this rank's `part` of `whole`, which is returned, over the network."""
        part = self.part(whole)
        gather_whole(part, share, self.world.across)
        return part

    def gather_here(self, whole: Tensor, part: Tensor) -> None:
        """Fill `whole` with the parts of this host's ranks, of which this one's may be there."""
        gather_whole(whole, part, self.world.local)

    def summed(self, total: Tensor) -> Tensor:
        """This rank's share of the fp32 sum of all ranks' `total` [ranks x share], in the order of
        ranks: of each host, then over hosts. Valid until the next call."""
        received = self._received[: len(total)]
        # on the host first: 1 / local_size of the bytes then crosses the network
        if self.world.local is not None:
            total, received = _added_up(total, received, self.world.local_size, self.world.local)
        if self.world.across is not None:
            total = self.summed_across(total, received[: len(total)])
        return total

    def summed_across(self, total: Tensor, received: Tensor) -> Tensor:
        """This rank's share of the sum of all hosts' `total`, perhaps in `received`."""
        given = total, received, self.world.hosts, self.world.across
        return _added_up(*given)[0] if self.wire == total.dtype else _rounded(*given, self.wire)

    def all_norms(self, mine: Tensor, block: int) -> Tensor:
        """The norms of all rows of a block, from those of this rank's share."""
        rows = self.shares[block] // BLOCK_ALIGNMENT
        # the last ranks own less, or nothing; collectives want equal parts
        padded = torch.nn.functional.pad(mine, (0, rows - len(mine)))
        whole = self._norms[: rows * self.world.size]
        self.gather(whole, padded)
        return whole

    def close(self) -> None:
        self.lane.close()


def _added_up(total: Tensor, received: Tensor, ranks: int, group: Any) -> tuple[Tensor, Tensor]:
    """One of `ranks` parts of the sum over a group, and what of `received` is free again."""
    if ranks == 2 and total.is_cuda:  # a sum of two has one order, so the library may add
        part = received[: len(total) // 2]
        scatter_sum(part, total, group=group)
        return part, received[len(part) :]
    # on CPUs always: gloo's reduce_scatter sends twice as much
    trade_parts(received, total, group)
    first, *others = received.view(ranks, -1)
    return _sum(first, others), received[len(first) :]


def _rounded(total: Tensor, received: Tensor, ranks: int, group: Any, wire: torch.dtype) -> Tensor:
    """As `_added_up`, in the 16 bits of `wire`."""
    # this rank's own part, too: nobody's counts for more
    sent, found = received.view(wire).view(2, -1)
    sent.copy_(total)
    trade_parts(found, sent, group)
    first, *others = found.view(ranks, -1)
    return _sum(received[: len(first)].copy_(first), others)  # over what was sent


def _sum(total: Tensor, others: Sequence[Tensor]) -> Tensor:
    """Add to `total` in place, in fp32 and in their order."""
    for other in others:
        total += other
    return total


def peer_devices(world: World, device: torch.device) -> bool:
    """True if the GPUs of one host's ranks reach each other's memory. All ranks call it."""
    if world.is_alone or device.type != "cuda":
        return True
    uuids = world.all_gather(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    return all(world.all_gather(reach_each_other(uuids)))


def shares_weights(settings: Settings, world: World, device: torch.device) -> bool:
    """True if the ranks of a host have one copy of its weights in common. All ranks call it."""
    if world.is_alone or world.hosts > 1 or settings.transport == "gather":
        return False
    return settings.transport == "read" or not peer_devices(world, device)
