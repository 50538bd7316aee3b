"""The weight source of several GPUs: each rank uploads its share of a block and gathers those of
others, or uploads the whole block where the host has one copy for all ranks.

With several hosts each rank keeps what it got over the network in a step's first sweep, so that
weights cross the network once a step. Later sweeps upload that, and gather on the host alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from megatrain.engine.ranks.exchange import Exchange
from megatrain.engine.streamer import Slot, StoredWeights
from megatrain.engine.streams import Event, Lane
from megatrain.memory.sizes import SHARE_BUFFERS
from megatrain.memory.slab import Slab, slabs_of
from megatrain.memory.store import Store
from megatrain.settings import Settings


# why: decision 0101
@final
class GatheredWeights:
    """The weight source of a rank. No block is read where it lives: there each rank has its share.

    Attributes:
        own: number of blocks, the first ones, that stay whole until weights change.
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
        self.numels: Sequence[int] = [*map(exchange.padded, range(len(exchange.shares)))]
        alone = copies.store.whole_in_ram
        shares = [share for n, share in enumerate(exchange.shares) if alone(n) is None]
        size, device = max(shares, default=0), exchange.compute.device
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

    def _gather(self, slot: Slot, whole: Tensor, mine: Tensor, uploaded: Event) -> Event:
        """Queue the exchange of all ranks' shares of a block, into its slot."""
        # wait: this rank's share is on its way up; the computation may still read the slot
        before = uploaded, slot.free
        return self.exchange.lane.after(before, lambda: self.exchange.gather(whole, mine))

    # -- of several hosts --------------------------------------------------------------------------

    def _cross(self, block: int, slot: Slot, whole: Tensor, mine: Tensor, uploaded: Event) -> Event:
        """Queue what crosses the network, which this host keeps if the slot does not."""
        exchange, kept = self.exchange, self.kept
        assert kept is not None
        # wait: this rank's share is on its way up; what is in this slot may still be used
        before = uploaded, *self._busy(slot)
        crossed = exchange.lane.after(before, lambda: exchange.gather_across(whole, mine))
        if block >= kept.first:
            self._kept[slot] = kept.keep(block, exchange.part(whole), crossed)
        return crossed

    def _bring(self, slot: Slot, whole: Tensor, source: Tensor, there: Event) -> None:
        """Queue the upload of what this host has kept of a block, and the exchange on it."""
        part = self.exchange.part(whole)
        # wait: it may still be on its way down; what is in this slot may still be used
        before = there, *self._busy(slot)
        uploaded = self._copies.lane.after(before, lambda: part.copy_(source, non_blocking=True))
        slot.arrivals = ("upload", uploaded), ("exchange", self._gather_here(whole, uploaded))

    def _gather_here(self, whole: Tensor, ready: Event) -> Event:
        """Queue the exchange of this host's parts of a block, after this rank's is `ready`."""
        exchange = self.exchange
        if exchange.world.local is None:
            return ready
        # wait: this rank's part may be on its way up
        gather = exchange.gather_here
        return exchange.lane.after([ready], lambda: gather(whole, exchange.part(whole)))

    def _busy(self, slot: Slot) -> tuple[Event | None, ...]:
        """Events before which no other lane may write to a slot: it may be read, copied, or written
        to by a sweep that was abandoned."""
        return slot.free, self._kept.get(slot), slot.landed


class HostWeights:
    """This rank's parts of streamed weights in host RAM, each with the event after which it is
    there. Blocks before `first` are not kept."""

    def __init__(
        self, store: Store, settings: Settings, dtype: torch.dtype, download: Lane
    ) -> None:
        self.first, self._download, world = settings.replicated, download, store.world
        self._slabs: list[Slab] = []
        self._parts: list[Tensor] = []
        self._there: dict[int, Event] = {}
        numels = [world.hosts * of.share(world.size) for of in store.layouts[self.first :]]
        sizes, pinned = [numel * dtype.itemsize for numel in numels], download.stream is not None
        how: dict[str, Any] = {"pinned": pinned, "touched": pinned}
        try:
            for slab, pieces in slabs_of("weights", sizes, **how, threads=settings.update_threads):
                self._slabs.append(slab)
                self._parts += [piece.view(dtype) for piece in pieces]
        except BaseException:
            self.close()
            raise

    @property
    def nbytes(self) -> int:
        return sum(slab.nbytes for slab in self._slabs)

    def keep(self, block: int, part: Tensor, ready: Event) -> Event:
        """Copy a block's part, which is on the device after `ready`, down."""
        target = self._parts[block - self.first]
        # wait: it may still be on its way from other hosts
        landed = self._download.after([ready], lambda: target.copy_(part, non_blocking=True))
        self._there[block] = landed
        return landed

    def of(self, block: int) -> tuple[Tensor, Event] | None:
        """A block's part and when it is there; None where it must come from the other hosts."""
        there = self._there.get(block)
        return None if there is None else (self._parts[block - self.first], there)

    def forget(self) -> None:
        self._there.clear()

    def close(self) -> None:
        self._parts.clear()
        while self._slabs:
            self._slabs.pop().close()
