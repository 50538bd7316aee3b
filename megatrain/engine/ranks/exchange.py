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
from torch import Tensor, distributed

from megatrain.engine.streams import Compute, Lane
from megatrain.machine.hardware import reach_each_other
from megatrain.memory.layout import FlatLayout, Span
from megatrain.memory.sizes import BLOCK_ALIGNMENT, exchange_bytes
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
        self.world, self.wire, self.compute = world, wire, compute
        self.lane = Lane("exchange", compute.device)
        self.shares = [layout.share(world.size) for layout in layouts]
        spans = (layout.span(world.place(), world.size) for layout in layouts)
        self._trained = [s.before(of.trainable) for s, of in zip(spans, layouts, strict=True)]
        whole = world.size * max(self.shares)
        # one buffer for all blocks: the lane runs one collective at a time
        size = exchange_bytes(whole)
        self._scratch = torch.empty(size // 4, dtype=torch.float32, device=compute.device)
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
        ranks: of each host, then over hosts. It is in `total`, which is overwritten."""
        # on the host first: 1 / local_size of the bytes then crosses the network
        if self.world.local is not None:
            total = _add_up(total, self._scratch, self.world.local)
        return total if self.world.across is None else self.summed_across(total)

    def summed_across(self, total: Tensor) -> Tensor:
        """This rank's share of the sum of all hosts' `total`, in it."""
        return _add_up(total, self._scratch.view(self.wire), self.world.across)

    def all_norms(self, mine: Tensor, block: int) -> Tensor:
        """The norms of all rows of a block, from those of this rank's share."""
        rows = self.shares[block] // BLOCK_ALIGNMENT
        # the last ranks own less, or nothing; collectives want equal parts
        padded = torch.nn.functional.pad(mine, (0, rows - len(mine)))
        whole = self._norms[: rows * self.world.size]
        self.gather(whole, padded)
        return whole

    def swap(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
        """Give ranks that share sequences their parts of what is sent, one tensor after another."""

        def trade() -> None:
            for theirs, ours in zip(received, sent, strict=True):
                trade_parts(theirs, ours, self.world.sharing)

        # wait: what is sent may still be computed
        swapped = self.lane.after([self.compute.record()], trade)
        # wait: nothing that is sent or received may be read, or its memory used again, before
        self.compute.wait(swapped, "exchange")

    def close(self) -> None:
        self.lane.close()


def _add_up(total: Tensor, scratch: Tensor, group: Any) -> Tensor:
    """This rank's part of the fp32 sum over a group, in the place of its own part. Sent in pieces
    through `scratch`, and rounded to its dtype, this rank's own part, too: none counts for more."""
    rank, ranks = distributed.get_rank(group), distributed.get_world_size(group)
    parts = total.view(ranks, -1)
    mine: Tensor = parts[rank]
    if ranks == 2 and total.is_cuda and scratch.dtype == total.dtype:
        scatter_sum(mine, total, group=group)  # a sum of two has one order: the library may add
        return mine
    # on CPUs always: gloo's reduce_scatter sends twice as much
    step = len(scratch) // (2 * ranks * BLOCK_ALIGNMENT) * BLOCK_ALIGNMENT
    for piece, place in zip(torch.split(parts, step, 1), torch.split(mine, step), strict=True):
        halves = scratch.view(2, -1)[:, : piece.numel()]
        sent, (first, *others) = halves[0].view_as(piece).copy_(piece), halves[1].view_as(piece)
        trade_parts(halves[1], sent, group)
        place.copy_(first)
        for other in others:
            place += other  # in fp32
    return mine


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
