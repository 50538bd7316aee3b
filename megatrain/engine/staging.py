"""Where finished gradients land on the host: in the store until the norm is known, or in a few buffers if they are applied at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import torch

from megatrain.engine.gradients import Gradient
from megatrain.engine.streams import Compute, Event, Lane
from megatrain.memory.lease import Lease
from megatrain.memory.slab import Slab
from megatrain.memory.store import Store

RING_BUFFERS = 3  # one downloads, one waits, one is being applied


Blocked = Callable[[], AbstractContextManager[None]]


@contextmanager
def blocked_by_updates(compute: Compute, store: Store) -> Iterator[None]:
    """While this thread waits for what updates use: what the computation loses by it, and how much of that is the drive's."""
    event, before = Event(), store.nvme_waited_s
    with compute.blocked("update", event):
        yield
        event.nvme_wait_s = store.nvme_waited_s - before


class GradientRing:
    """A few host buffers, used in turn.

    Args:
        numel: of the largest block.
        wait_ready: returns once the last queued update of a block is done.
        blocked: `blocked_by_updates` of the engine's computation and store.
    """

    def __init__(self, numel: int, dtype: torch.dtype, *, pinned: bool, wait_ready: Callable[[int], None], blocked: Blocked) -> None:
        self._slab = Slab("gradient staging", RING_BUFFERS * numel * dtype.itemsize, pinned=pinned, threads=1)
        whole = self._slab.bytes[: RING_BUFFERS * numel * dtype.itemsize].view(dtype)
        self._buffers = [whole[i * numel : (i + 1) * numel] for i in range(RING_BUFFERS)]
        self._users: list[int | None] = [None] * RING_BUFFERS
        self._turn = 0
        self._wait_ready, self._blocked = wait_ready, blocked

    def take(self, block: int, numel: int) -> torch.Tensor:
        """A buffer of `numel` elements for this block's gradient. Waits for the update that read the buffer last."""
        self._turn = (self._turn + 1) % RING_BUFFERS
        user = self._users[self._turn]
        if user is not None:
            with self._blocked():
                self._wait_ready(user)
        self._users[self._turn] = block
        return self._buffers[self._turn][:numel]

    def close(self) -> None:
        self._buffers.clear()
        self._slab.close()


class StoredGradients:
    """The store's gradients, which wait there until the norm is known. Those that it keeps on NVMe leave for it as soon as they landed.

    Args:
        ring: where streamed blocks' gradients go instead, if none are stored.
        one_group: resident blocks' gradients are rounded into the store; sums hold them otherwise.
    """

    def __init__(self, store: Store, ring: GradientRing | None, one_group: bool, blocked: Blocked) -> None:
        self.store, self._ring, self._one_group, self._blocked = store, ring, one_group, blocked
        self._leases: dict[int, Lease] = {}
        self._lane = Lane("stored-gradients") if store.nvme is not None else None

    def begin_step(self) -> None:
        """Give back what a step that failed has left."""
        while self._leases:
            self._leases.popitem()[1].release(changed=False)

    def destination(self, block: int) -> torch.Tensor | None:
        """Where a block's finished gradient goes; None if it stays where it was summed, to be applied there."""
        if self.store.is_resident(block):
            return self.store.array("grad", block) if self._ring is None and self._one_group else None
        if self._ring is not None:
            return self._ring.take(block, self.store.layouts[block].numel)
        if not self.store.is_on_nvme("grad", block):
            return self.store.array("grad", block)
        lease = self._leases[block] = self.store.lease(block, ["grad"], changes=True, fill=False)
        with self._blocked():
            return lease.wait()["grad"]

    def keep(self, pending: list[Gradient], gradient: Gradient) -> None:
        """Add the gradient to those that wait, as it can be had later: one on NVMe is not held in memory."""
        lease = self._leases.pop(gradient.block, None)
        if lease is None:
            pending.append(gradient)
            return

        def job(_: Event) -> None:
            try:
                gradient.landed.synchronize()
            except BaseException as error:
                self.store.stop(error)  # this lane will not release what others may wait for
                raise
            lease.release()

        assert self._lane is not None
        self._lane.submit(job)
        pending.append(replace(gradient, values=torch.empty(0), stored=True))

    def close(self) -> None:
        if self._lane is not None:
            self._lane.close()
