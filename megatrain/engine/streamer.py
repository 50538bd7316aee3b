"""The double-buffered sweep: blocks of weights travel through a few fixed buffers on the device, just ahead of the computation."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from functools import partial
from typing import Protocol

import torch

from megatrain.engine.streams import Compute, Event, Lane
from megatrain.memory.store import Store
from megatrain.models.anatomy import Anatomy
from megatrain.schedule import slot_sizes, slots_of_blocks, uploads


class Updates(Protocol):
    """What may still change weights. An update is queued only when everything that was fetched of its block has landed."""

    def wait_ready(self, block: int) -> None:
        """Block the calling thread until a block's deferred update is done. Every reader of weights goes through it."""

    def is_ready(self, block: int) -> bool:
        """Whether that update is over."""


class Slot:
    """A flat buffer on the device. Parameters are views of `flat`; uploads write through `target`, the same memory under a version
    counter of its own, so that graphs retained over a re-fill with the same weights stay valid."""

    def __init__(self, flat: torch.Tensor, home_of: int | None = None) -> None:
        self.flat = flat
        self.target = flat.data
        self.holds = home_of  # the block whose current weights are here or on their way
        self.landed: Event | None = None
        self.free: Event | None = (
            None  # completes when the computation has last read, or first zeroed, this slot
        )


class Streamer:
    """Brings blocks to the device in a known order, each into its slot, as early as the slot and the block's update allow.

    releases: gives back, behind each upload, what it read out of NVMe's staging; it must outlive `upload`. None where nothing lies on NVMe.
    """

    def __init__(
        self,
        anatomy: Anatomy,
        store: Store,
        dtype: torch.dtype,
        compute: Compute,
        upload: Lane,
        updates: Updates,
        releases: Lane | None = None,
    ) -> None:
        self.store = store
        self.compute = compute
        self.upload = upload
        self.updates = updates
        numels = [block.layout.numel for block in anatomy.blocks]
        tied = anatomy.embed_feeds_head
        sizes = slot_sizes(numels, store.resident, tied)
        self._slot_numbers = slots_of_blocks(len(numels), store.resident, tied)
        self.slots = [
            Slot(torch.zeros(size, dtype=dtype, device=compute.device))
            for size in (*sizes.layers, *sizes.edges)
        ]
        for slot in self.slots:
            slot.free = compute.record()
        homes = [
            Slot(store.array("weight", block), home_of=block) for block in range(store.resident)
        ]
        self._slot_of = [
            homes[block] if number is None else self.slots[number]
            for block, number in enumerate(self._slot_numbers)
        ]
        self._also_reads = {anatomy.head.index: self.slot_of(0)} if anatomy.embed_feeds_head else {}
        self._releases = releases

    def slot_of(self, block: int) -> Slot:
        return self._slot_of[block]

    def flat(self, block: int) -> torch.Tensor:
        """The device memory, in parameters' dtype, where this block's weights land."""
        return self.slot_of(block).flat[: self.store.layouts[block].numel]

    def sweep(self, visits: Sequence[int]) -> Generator[int, None, None]:
        """Yield the blocks of `visits` in order, each with its weights in its slot, while the following ones are on their way.

        Whoever iterates enqueues all computation on a block before asking for the next.
        """
        asked = uploads(tuple(visits), self._slot_numbers)
        for block, coming in zip(visits, asked, strict=True):
            for wanted in coming:
                self._fetch(wanted, self.slot_of(wanted))
            slot = self.slot_of(block)
            self.compute.wait(slot.landed, "upload")
            try:
                yield block
            finally:  # also when the sweep is abandoned
                slot.free = read = (
                    self.compute.record()
                )  # the next upload into this slot waits for this
                if block in self._also_reads:
                    self._also_reads[block].free = read

    def _fetch(self, block: int, slot: Slot) -> None:
        if slot.holds == block:
            return
        target = slot.target[: self.store.layouts[block].numel]
        free, slot.holds = slot.free, None  # nothing, if this is interrupted

        def job(event: Event) -> None:
            try:
                copy(event)
            finally:  # by this lane, which nobody interrupts
                if self._releases is not None:
                    self._releases.submit(partial(release, event))

        def copy(event: Event) -> None:
            started, nvme = time.perf_counter(), self.store.nvme_waited_s
            self.updates.wait_ready(block)  # wait: the host may still be updating this block
            ready, event.nvme_wait_s = time.perf_counter(), self.store.nvme_waited_s - nvme
            event.update_wait_s = ready - started - event.nvme_wait_s
            arrays = lease.wait()
            event.nvme_wait_s += time.perf_counter() - ready
            self.upload.wait(free)  # wait: the computation may still read what lies in this slot
            if arrays:  # else whoever asked was interrupted, and wants nothing
                target.copy_(arrays["weight"], non_blocking=True)

        def release(landed: Event, _: Event) -> None:
            try:
                landed.synchronize()  # wait: the copy may still read the staging buffer
            except BaseException as error:
                self.store.stop(error)  # this lane will not release what others may wait for
                raise
            lease.release()

        lease = self.store.lease(
            block, ["weight"], ahead=self.updates.is_ready(block)
        )  # then it is read while others travel
        try:
            slot.landed = self.upload.submit(job)
        except BaseException:
            lease.release()  # or readers would wait behind it for ever
            raise
        slot.holds = block

    def invalidate(self) -> None:
        """Forget what has travelled into the slots: the weights in the store have changed or are about to."""
        for slot in self.slots:
            slot.holds = None
