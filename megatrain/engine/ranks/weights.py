"""The weight source of several GPUs: each rank uploads its share of a block and gathers those of
others, or uploads the whole block where the host has one copy for all ranks.

With several hosts each rank keeps what it got over the network in a step's first sweep, so that
weights cross the network once a step. Later sweeps upload that, and gather on the host alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch

from megatrain.engine.ranks.exchange import Exchange
from megatrain.engine.streamer import Slot, StoredWeights
from megatrain.engine.streams import Event, Lane
from megatrain.memory.sizes import SHARE_BUFFERS
from megatrain.memory.slab import Slab, slabs_of


# why: decision 0101
@final
class GatheredWeights:
    """The weight source of a rank. No block is read where it lives: there each rank has its share.

    Args:
        replicated: number of blocks, the first ones, that stay whole until weights change.
        kept: with several hosts, what this one keeps of weights.
    """

    resident = 0

    def __init__(
        self,
        copies: StoredWeights,
        exchange: Exchange,
        dtype: torch.dtype,
        replicated: int = 0,
        kept: HostWeights | None = None,
    ) -> None:
        self._copies, self.exchange, self.own, self.kept = copies, exchange, replicated, kept
        self.numels = [exchange.padded(block) for block in range(len(exchange.shares))]
        shares = [
            share
            for block, share in enumerate(exchange.shares)
            if copies.store.whole_in_ram(block) is None
        ]
        size, device = max(shares, default=0), exchange.device
        # on their way into slots, in turn
        self._shares = [
            Slot(torch.empty(size, dtype=dtype, device=device)) for _ in range(SHARE_BUFFERS)
        ]
        # of slots: completes when the host's RAM has the part that crossed the network
        self._kept: dict[Slot, Event] = {}

    def fetch(self, block: int, slot: Slot) -> None:
        target = slot.target[: self.numels[block]]
        if self.kept is not None and (part := self.kept.of(block)):
            self._bring(slot, target, *part)
            return
        # the host has one copy: each rank uploads all of it, and nothing is exchanged
        if (whole := self._copies.store.whole_in_ram(block)) is not None:
            slot.arrivals = (("upload", self._copies.copy(block, target, slot.free, whole)),)
            return
        share = self._shares[0]
        self._shares.reverse()  # the other one is still being gathered
        mine = share.target[: self.exchange.shares[block]]
        uploaded = self._copies.copy(block, mine, share.free)
        if self.kept is None:
            share.free = landed = self._gather(slot, target, mine, uploaded)
            slot.arrivals = ("upload", uploaded), ("exchange", landed)
            return
        share.free = crossed = self._cross(block, slot, target, mine, uploaded)
        landed = self._gather_here(target, crossed)
        slot.arrivals = ("upload", uploaded), ("network", crossed), ("exchange", landed)

    def forget(self) -> None:
        if self.kept is not None:
            self.kept.forget()

    def _gather(
        self, slot: Slot, whole: torch.Tensor, mine: torch.Tensor, uploaded: Event
    ) -> Event:
        """Queue the exchange of all ranks' shares of a block, into its slot."""
        exchange, free = self.exchange, slot.free

        def job(_: Event) -> None:
            exchange.lane.wait(uploaded)  # wait: this rank's share is on its way up
            exchange.lane.wait(free)  # wait: the computation may still read what is in this slot
            exchange.gather(whole, mine)

        return exchange.lane.submit(job)

    # -- of several hosts --------------------------------------------------------------------------

    def _cross(
        self, block: int, slot: Slot, whole: torch.Tensor, mine: torch.Tensor, uploaded: Event
    ) -> Event:
        """Queue what crosses the network, which this host keeps if the slot does not."""
        exchange, kept, before = self.exchange, self.kept, self._busy(slot)
        assert kept is not None

        def job(_: Event) -> None:
            exchange.lane.wait(uploaded)  # wait: this rank's share is on its way up
            for event in before:
                exchange.lane.wait(event)  # wait: what is in this slot may still be used
            exchange.gather_across(whole, mine)

        crossed = exchange.lane.submit(job)
        if block >= kept.first:
            self._kept[slot] = kept.keep(block, exchange.part(whole), crossed)
        return crossed

    def _bring(self, slot: Slot, whole: torch.Tensor, source: torch.Tensor, there: Event) -> None:
        """Queue the upload of what this host has kept of a block, and the exchange on it."""
        lane, part, before = self._copies.lane, self.exchange.part(whole), self._busy(slot)

        def job(_: Event) -> None:
            lane.wait(there)  # wait: it may still be on its way down
            for event in before:
                lane.wait(event)  # wait: what is in this slot may still be used
            part.copy_(source, non_blocking=True)

        uploaded = lane.submit(job)
        slot.arrivals = ("upload", uploaded), ("exchange", self._gather_here(whole, uploaded))

    def _gather_here(self, whole: torch.Tensor, ready: Event) -> Event:
        """Queue the exchange of this host's parts of a block, in its slot. ready: with this
        rank's."""
        exchange = self.exchange
        if exchange.world.local is None:
            return ready

        def job(_: Event) -> None:
            exchange.lane.wait(ready)  # wait: this rank's part may be on its way up
            exchange.gather_here(whole, exchange.part(whole))

        return exchange.lane.submit(job)

    def _busy(self, slot: Slot) -> tuple[Event | None, ...]:
        """Events before which no other lane may write to a slot: it may be read, copied, or written
        to by a sweep that was abandoned."""
        return slot.free, self._kept.get(slot), slot.landed


class HostWeights:
    """Parts of blocks in host RAM, each with the event after which it is there.

    Args:
        numels: elements of every block's part, from block `first` on.
        pinned: for a GPU.
        threads: for the first touch of the memory.

    Attributes:
        first: blocks before it are not kept.
    """

    def __init__(
        self,
        numels: Sequence[int],
        dtype: torch.dtype,
        download: Lane,
        *,
        pinned: bool,
        threads: int,
        first: int = 0,
    ) -> None:
        self.first, self._download = first, download
        self._slabs: list[Slab] = []
        self._parts: list[torch.Tensor] = []
        self._there: dict[int, Event] = {}
        sizes, how = [numel * dtype.itemsize for numel in numels], {"pinned": pinned}
        try:
            for slab, pieces in slabs_of("weights", sizes, **how, threads=threads, touched=pinned):
                self._slabs.append(slab)
                self._parts += [piece.view(dtype) for piece in pieces]
        except BaseException:
            self.close()
            raise

    @property
    def nbytes(self) -> int:
        return sum(slab.nbytes for slab in self._slabs)

    def keep(self, block: int, part: torch.Tensor, ready: Event) -> Event:
        """Copy a block's part, which is on the device after `ready`, down."""
        target = self._parts[block - self.first]

        def job(_: Event) -> None:
            self._download.wait(ready)  # wait: it may still be on its way from other hosts
            target.copy_(part, non_blocking=True)

        self._there[block] = landed = self._download.submit(job)
        return landed

    def of(self, block: int) -> tuple[torch.Tensor, Event] | None:
        """A block's part and when it is there; None where it must come from the other hosts."""
        there = self._there.get(block)
        return None if there is None else (self._parts[block - self.first], there)

    def forget(self) -> None:
        """The weights have changed, or are about to."""
        self._there.clear()

    def close(self) -> None:
        self._parts.clear()
        while self._slabs:
            self._slabs.pop().close()
