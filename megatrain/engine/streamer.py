"""The double-buffered sweep: blocks of weights pass through a few fixed buffers on the device, just
ahead of the computation.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from typing import Protocol

import torch

from megatrain.engine.exchange import Exchange
from megatrain.engine.host_weights import HostWeights
from megatrain.engine.streams import Compute, Event, Lane
from megatrain.heartbeat import beat
from megatrain.memory.store import Store
from megatrain.models.anatomy import Anatomy
from megatrain.schedule import SHARE_BUFFERS, slot_sizes, slots_of_blocks, uploads


class Updates(Protocol):
    """Deferred updates of weights. One is queued only when all uploads of its block have landed."""

    def wait_ready(self, block: int) -> None:
        """Return once a block's update is done. Every reader of its weights goes through it."""


class Slot:
    """A flat buffer on the device, whose parameters are views of `flat`.

    Uploads write through `target`, the same memory under a version counter of its own. So graphs
    that are kept while the slot is filled again, with the same weights, stay valid.

    Attributes:
        holds: the block whose current weights are here or on their way.
        landed: completes with the upload of that block.
        uploaded: of several ranks, the same of what this one uploads, before others' arrives.
        crossed: of several hosts, with what has crossed the network; None if nothing has.
        kept: completes when the host's RAM has that.
        free: completes when the computation has last read, or first zeroed, the slot.
    """

    def __init__(self, flat: torch.Tensor, holds: int | None = None) -> None:
        self.flat, self.target = flat, flat.data
        self.holds = holds
        self.landed: Event | None = None
        self.uploaded: Event | None = None
        self.crossed: Event | None = None
        self.kept: Event | None = None
        self.free: Event | None = None


class Streamer:
    """Brings blocks to the device in a known order, each into its slot, as early as the slot and
    the block's update allow.

    exchange: of several ranks. Each uploads its share of a block, and gathers the others'; or it
        uploads the whole block, where all are in one copy in host RAM.
    kept: of several hosts, what this one keeps of weights until they change.
    replicated: of several ranks, number of blocks, the first ones, that have slots of their own and
        so stay until weights change.
    """

    def __init__(
        self,
        anatomy: Anatomy,
        store: Store,
        dtype: torch.dtype,
        compute: Compute,
        upload: Lane,
        updates: Updates,
        exchange: Exchange | None = None,
        kept: HostWeights | None = None,
        replicated: int = 0,
    ) -> None:
        self.store, self.compute, self.upload, self.updates = store, compute, upload, updates
        self._exchange, self.kept = exchange, kept
        numels = [block.layout.numel for block in anatomy.blocks]
        if exchange is not None:
            numels = [exchange.padded(block) for block in range(len(numels))]
        self._numels = numels
        tied = anatomy.embed_feeds_head
        # of several ranks, each has its share alone of a resident block
        whole, self._replicated = (store.resident, 0) if exchange is None else (0, replicated)
        sizes = slot_sizes(numels, whole, tied, self._replicated)
        self._slot_numbers = slots_of_blocks(len(numels), whole, tied, self._replicated)
        self.slots = [
            Slot(torch.zeros(size, dtype=dtype, device=compute.device))
            for size in (*sizes.layers, *sizes.edges, *sizes.own)
        ]
        for slot in self.slots:
            slot.free = compute.record()  # the zeros are there
        # a resident block is read where it lives
        self.slot_of = [
            Slot(store.array("weight", block), block) if number is None else self.slots[number]
            for block, number in enumerate(self._slot_numbers)
        ]
        self._also_reads = {anatomy.head.index: self.slot_of[0]} if tied else {}
        # on their way into slots, in turn
        shares = [
            exchange.shares[block]
            for block in range(len(numels))
            if exchange is not None and store.whole_in_ram(block) is None
        ]
        share, new = max(shares, default=0), compute.device
        self._shares = [
            Slot(torch.empty(share, dtype=dtype, device=new)) for _ in range(SHARE_BUFFERS)
        ]

    def flat(self, block: int) -> torch.Tensor:
        """The device memory, in parameters' dtype, where this block's weights land."""
        return self.slot_of[block].flat[: self.store.layouts[block].numel]

    def sweep(self, visits: Sequence[int]) -> Generator[int, None, None]:
        """Yield the blocks of `visits` in order, each with its weights in its slot, while the
        following ones are on their way.

        The caller enqueues all computation on a block before it asks for the next.
        """
        asked = uploads(tuple(visits), self._slot_numbers, self._replicated)
        for block, coming in zip(visits, asked, strict=True):
            for wanted in coming:
                self._fetch(wanted, self.slot_of[wanted])
            slot = self.slot_of[block]
            self.compute.wait(slot.uploaded, "upload")
            self.compute.wait(slot.crossed, "network")
            self.compute.wait(slot.landed, "exchange" if slot.uploaded else "upload")
            try:
                yield block
            finally:  # also when the sweep is abandoned
                # the next upload into this slot waits for this
                slot.free = read = self.compute.record()
                if block in self._also_reads:
                    self._also_reads[block].free = read
                beat()

    def _fetch(self, block: int, slot: Slot) -> None:
        """Queue the upload of a block into its slot, unless it is there already."""
        if slot.holds == block:
            return
        if self.kept is not None and (part := self.kept.of(block)):
            slot.holds = None  # nothing, if this is interrupted
            self._bring(block, slot, *part)
            slot.holds = block
            return
        target, free = slot.target[: self._numels[block]], slot.free
        whole, share = self.store.whole_in_ram(block), None
        if self._exchange is not None and whole is None:
            share = self._shares[0]
            self._shares.reverse()
            target, free = share.target[: self._exchange.shares[block]], share.free
        slot.holds = None  # nothing, if this is interrupted

        def job(landed: Event) -> None:
            started, nvme_s = time.perf_counter(), self.store.nvme_waited_s
            self.updates.wait_ready(block)  # wait: the host may still be updating this block
            landed.nvme_wait_s = self.store.nvme_waited_s - nvme_s  # of the update
            landed.update_wait_s = time.perf_counter() - started - landed.nvme_wait_s
            self.upload.wait(free)  # wait: the computation may still read what is in this slot
            weight = self.store.array("weight", block) if whole is None else whole
            target[: len(weight)].copy_(weight, non_blocking=True)

        landed = self.upload.submit(job)
        slot.uploaded, slot.landed = None, landed
        if share is not None:
            slot.landed = self._gather(block, slot, share, landed)
        slot.holds = block

    def _gather(self, block: int, slot: Slot, share: Slot, uploaded: Event) -> Event:
        """Queue the exchange of all ranks' shares of a block, into its slot."""
        exchange, free = self._exchange, slot.free
        assert exchange is not None
        whole, mine = slot.target[: self._numels[block]], share.target[: exchange.shares[block]]
        slot.uploaded = uploaded
        if self.kept is not None:
            share.free = self._cross(block, slot, whole, mine)
            return self._gather_here(slot, whole, share.free)

        def job(_: Event) -> None:
            exchange.lane.wait(uploaded)  # wait: this rank's share is on its way up
            exchange.lane.wait(free)  # wait: the computation may still read what is in this slot
            exchange.gather(whole, mine)

        share.free = exchange.lane.submit(job)
        return share.free

    # -- of several hosts --------------------------------------------------------------------------

    def _cross(self, block: int, slot: Slot, whole: torch.Tensor, share: torch.Tensor) -> Event:
        """Queue what crosses the network, which this host keeps if the slot does not."""
        exchange, kept, uploaded, before = self._exchange, self.kept, slot.uploaded, busy(slot)
        assert exchange is not None and kept is not None

        def job(_: Event) -> None:
            exchange.lane.wait(uploaded)  # wait: this rank's share is on its way up
            for event in before:
                exchange.lane.wait(event)  # wait: what is in this slot may still be used
            exchange.gather_across(whole, share)

        slot.crossed = crossed = exchange.lane.submit(job)
        if block >= kept.first:
            slot.kept = kept.keep(block, exchange.part(whole), crossed)
        return crossed

    def _bring(self, block: int, slot: Slot, source: torch.Tensor, there: Event) -> None:
        """Queue the upload of what this host has kept of a block, and the exchange on it."""
        exchange, before = self._exchange, busy(slot)
        assert exchange is not None
        whole = slot.target[: self._numels[block]]
        part = exchange.part(whole)

        def job(_: Event) -> None:
            self.upload.wait(there)  # wait: it may still be on its way down
            for event in before:
                self.upload.wait(event)  # wait: what is in this slot may still be used
            part.copy_(source, non_blocking=True)

        slot.crossed, slot.uploaded = None, self.upload.submit(job)
        slot.landed = self._gather_here(slot, whole, slot.uploaded)

    def _gather_here(self, slot: Slot, whole: torch.Tensor, ready: Event) -> Event:
        """Queue the exchange of this host's parts of a block, in its slot. ready: with this
        rank's."""
        exchange = self._exchange
        assert exchange is not None
        if exchange.world.local is None:
            return ready

        def job(_: Event) -> None:
            exchange.lane.wait(ready)  # wait: this rank's part may be on its way up
            exchange.gather_here(whole, exchange.part(whole))

        return exchange.lane.submit(job)

    def invalidate(self) -> None:
        """Forget what was uploaded: the weights in the store have changed or are about to."""
        for slot in self.slots:
            slot.holds = None
        if self.kept is not None:
            self.kept.forget()


def busy(slot: Slot) -> tuple[Event | None, ...]:
    """What ends before another lane writes to a slot: it may be read, copied, or written to by a
    sweep that was abandoned."""
    return slot.free, slot.kept, slot.landed
