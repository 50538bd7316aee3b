"""The double-buffered sweep: blocks of weights pass through a few buffers on the device, just ahead
of the computation.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Protocol, final

import torch
from torch import Tensor

from megatrain.engine.streams import Compute, Event, Lane
from megatrain.heartbeat import beat
from megatrain.memory.store import Store
from megatrain.models.anatomy import Anatomy
from megatrain.schedule import slot_sizes, slots_of_blocks, uploads


class Updates(Protocol):
    """Deferred updates of weights. One is queued only when all uploads of its block have landed."""

    def wait_ready(self, block: int) -> None:
        """Return once a block's update is done. Every reader of its weights goes through it."""


class Slot:
    """A flat buffer on the device, whose parameters are views of `flat`."""

    def __init__(self, flat: Tensor, holds: int | None = None) -> None:
        # Uploads write through `target`, under a version counter of its own: graphs that are kept
        # while the slot is filled again, with the same weights, stay valid.
        self.flat, self.target = flat, flat.data
        self.holds = holds  # the block whose current weights are here or on their way
        # what the computation waits for, by the cause under which that counts; the last one
        # completes with the weights
        self.arrivals: tuple[tuple[str, Event], ...] = ()
        self.free: Event | None = None  # when the computation has last read, or zeroed, the slot

    @property
    def landed(self) -> Event | None:
        """Completes when nothing is on its way into the slot."""
        return self.arrivals[-1][1] if self.arrivals else None


class WeightSource(Protocol):
    """Brings the weights of blocks into slots."""

    numels: Sequence[int]  # elements that each block takes in a slot
    resident: int  # number of blocks, the first ones, that are read where they live
    own: int  # of the first ones that have slots of their own, where they stay until weights change

    def fetch(self, block: int, slot: Slot) -> None:
        """Queue what brings a block into `slot.target`, and set `slot.arrivals`.

        Nothing may be written there before `slot.free` and `slot.landed` are complete.
        """

    def forget(self) -> None:
        """Prepare for other weights in the store."""


@final
class StoredWeights:
    """Copies of the store's arrays: the weight source of one GPU."""

    own = 0

    def __init__(self, store: Store, upload: Lane, updates: Updates) -> None:
        self.store, self.lane, self.updates = store, upload, updates
        self.numels: Sequence[int] = [layout.numel for layout in store.layouts]
        self.resident = store.resident

    def fetch(self, block: int, slot: Slot) -> None:
        target = slot.target[: self.numels[block]]
        slot.arrivals = (("upload", self.copy(block, target, slot.free)),)

    def copy(
        self,
        block: int,
        target: Tensor,
        free: Event | None,
        whole: Tensor | None = None,
    ) -> Event:
        """Queue the upload of the store's array, or of `whole`, to the front of `target`."""

        def job(landed: Event) -> None:
            # wait: the host may still be updating this block
            landed.waited = self.store.timed(lambda: self.updates.wait_ready(block))
            self.lane.wait(free)  # wait: the computation may still read what is in this slot
            weight = self.store.array("weight", block) if whole is None else whole
            target[: len(weight)].copy_(weight, non_blocking=True)

        return self.lane.submit(job)

    def forget(self) -> None: ...


class Streamer:
    """Brings blocks to the device in a known order, as early as slots and updates allow."""

    def __init__(
        self,
        anatomy: Anatomy,
        store: Store,
        dtype: torch.dtype,
        compute: Compute,
        source: WeightSource,
    ) -> None:
        self.store, self.compute, self.source = store, compute, source
        tied, blocks = anatomy.embed_feeds_head, len(source.numels)
        sizes = slot_sizes(source.numels, source.resident, tied, source.own)
        self._slot_numbers = slots_of_blocks(blocks, source.resident, tied, source.own)
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

    def flat(self, block: int) -> Tensor:
        """The device memory, in parameters' dtype, where this block's weights land."""
        return self.slot_of[block].flat[: self.store.layouts[block].numel]

    def sweep(self, visits: Sequence[int]) -> Generator[int, None, None]:
        """Yield the blocks of `visits` in order, each with its weights in its slot, while following
        ones are on their way. The caller enqueues all computation on one before the next."""
        asked = uploads(tuple(visits), self._slot_numbers, self.source.own)
        for block, coming in zip(visits, asked, strict=True):
            # first: what follows travels while this block computes
            for wanted in coming:
                self._fetch(wanted, self.slot_of[wanted])
            slot = self.slot_of[block]
            for cause, event in slot.arrivals:
                self.compute.wait(event, cause)
            try:
                yield block
            finally:  # also when the sweep is abandoned
                # the next upload into this slot waits for this
                slot.free = read = self.compute.record()
                if block in self._also_reads:  # a tied head reads the embedding's slot
                    self._also_reads[block].free = read
                beat()

    def _fetch(self, block: int, slot: Slot) -> None:
        """Queue what brings a block into its slot, unless it is there already."""
        if slot.holds == block:
            return
        slot.holds = None  # nothing, if this is interrupted
        self.source.fetch(block, slot)
        slot.holds = block

    def invalidate(self) -> None:
        """Forget what was uploaded: the weights in the store change."""
        for slot in self.slots:
            slot.holds = None
        self.source.forget()
