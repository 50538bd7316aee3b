"""The double-buffered sweep: blocks of weights travel through a few fixed buffers on the device, just ahead of the computation."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence

import torch

from megatrain.engine.streams import Compute, Event, Lane
from megatrain.memory.host_store import HostStore
from megatrain.models.anatomy import Anatomy
from megatrain.models.skeleton import flat_alias

LAYER_SLOTS = 2  # double buffering: one computes while the other fills


class Slot:
    """A flat buffer on the device. Parameters are views of `flat`; uploads write through `target`, the same memory under a version
    counter of its own, so that graphs retained over a re-fill with the same weights stay valid."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.flat = torch.zeros(numel, dtype=dtype, device=device)
        self.target = flat_alias(self.flat)
        self.holds: int | None = None  # the block whose current weights are here or on their way
        self.landed: Event | None = None
        self.free: Event | None = None  # completes when the computation has last read, or first zeroed, this slot


def slot_sizes(anatomy: Anatomy) -> tuple[list[int], list[int]]:
    """(elements of each slot, slot index of each block).

    Layers alternate between LAYER_SLOTS slots. The embedding and the head share an edge slot, being needed one after the other, unless
    they are tied: then the embedding stays in its slot from the first layer to the head, and the head's own tensors get a small one.
    """
    numels = [block.layout.numel for block in anatomy.blocks]
    count = min(LAYER_SLOTS, anatomy.layers)
    sizes = [max(numels[1:-1])] * count
    of_layers = [i % count for i in range(anatomy.layers)]
    if anatomy.embed_feeds_head:
        return [*sizes, numels[0], numels[-1]], [count, *of_layers, count + 1]
    return [*sizes, max(numels[0], numels[-1])], [count, *of_layers, count]


class Streamer:
    """Brings blocks to the device in a known order, each into its slot, as early as the slot and the block's update allow.

    Args:
        wait_ready: blocks the calling thread until a block's deferred update is done. Every reader of weights goes through it.
    """

    def __init__(
        self, anatomy: Anatomy, store: HostStore, dtype: torch.dtype, compute: Compute, upload: Lane, wait_ready: Callable[[int], None]
    ) -> None:
        self.store = store
        self.compute = compute
        self.upload = upload
        self.wait_ready = wait_ready
        sizes, self._slot_index = slot_sizes(anatomy)
        self.slots = [Slot(size, dtype, compute.device) for size in sizes]
        for slot in self.slots:
            slot.free = compute.record()
        self._also_reads = {anatomy.head.index: self.slot_of(0)} if anatomy.embed_feeds_head else {}

    def slot_of(self, block: int) -> Slot:
        return self.slots[self._slot_index[block]]

    def flat(self, block: int) -> torch.Tensor:
        """The device memory, in parameters' dtype, where this block's weights land."""
        return self.slot_of(block).flat[: self.store.layouts[block].numel]

    def sweep(self, visits: Sequence[int]) -> Generator[int, None, None]:
        """Yield the blocks of `visits` in order, each with its weights in its slot, while the following ones are on their way.

        Whoever iterates enqueues all computation on a block before asking for the next.
        """
        fetched = 0
        for position, block in enumerate(visits):
            fetched = self._fetch_ahead(visits, position, fetched)
            slot = self.slot_of(block)
            self.compute.wait(slot.landed, "upload")
            try:
                yield block
            finally:  # also when the sweep is abandoned
                slot.free = read = self.compute.record()  # the next upload into this slot waits for this
                if block in self._also_reads:
                    self._also_reads[block].free = read

    def _fetch_ahead(self, visits: Sequence[int], position: int, fetched: int) -> int:
        """Request blocks in the order of their visits until one needs a slot that a visit still to come reads first."""
        while fetched < len(visits):
            block = visits[fetched]
            slot = self.slot_of(block)
            if any(self.slot_of(earlier) is slot and earlier != block for earlier in visits[position:fetched]):
                break
            self._fetch(block, slot)
            fetched += 1
        return fetched

    def _fetch(self, block: int, slot: Slot) -> None:
        if slot.holds == block:
            return
        source = self.store.array("weight", block)
        target = slot.target[: source.numel()]
        free, slot.holds = slot.free, None  # nothing, if this is interrupted

        def job(event: Event) -> None:
            started = time.perf_counter()
            self.wait_ready(block)  # wait: the host may still be updating this block
            event.update_wait_s = time.perf_counter() - started
            self.upload.wait(free)  # wait: the computation may still read what lies in this slot
            target.copy_(source, non_blocking=True)

        slot.landed = self.upload.submit(job)
        slot.holds = block

    def invalidate(self) -> None:
        """Forget what the slots hold: the weights in the store have changed or are about to."""
        for slot in self.slots:
            slot.holds = None
