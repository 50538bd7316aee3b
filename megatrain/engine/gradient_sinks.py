"""The sinks of finished gradients: stored until the global norm is known, or applied at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch

from megatrain.engine.gradients import Gradient, GradientSink
from megatrain.engine.streams import Compute, Event
from megatrain.engine.update import Updater
from megatrain.memory.slab import Slab
from megatrain.memory.store import Store
from megatrain.schedule import LANDING_BUFFERS


@final
class StoredGradients(GradientSink):
    """Gradients wait in the store's arrays until the norm is known.

    Args:
        store: has an array "grad" for every block.
        one_group: resident blocks' gradients are rounded into the store. With several groups they
            stay in their accumulators.
    """

    def __init__(self, store: Store, *, one_group: bool) -> None:
        super().__init__()
        self.store, self._one_group = store, one_group

    def place(self, block: int) -> torch.Tensor | None:
        if self.store.is_resident(block) and not self._one_group:
            return None
        return self.store.array("grad", block)

    def take(self, gradient: Gradient) -> None:
        self.finished.append(gradient)


class GradientRing:
    """A few host buffers in turn, each of the largest streamed block's gradient.

    Args:
        numel: elements of the largest block.
        pinned: register the memory with CUDA.
    """

    def __init__(self, numel: int, dtype: torch.dtype, *, pinned: bool) -> None:
        nbytes = LANDING_BUFFERS * numel * dtype.itemsize
        self._slab = Slab("gradient staging", nbytes, pinned=pinned, threads=1)
        self.buffers = list(self._slab.bytes[:nbytes].view(dtype).view(LANDING_BUFFERS, numel))
        self._users: list[int | None] = [None] * LANDING_BUFFERS
        self._turn = 0

    def take(self, block: int) -> tuple[torch.Tensor, int | None]:
        """(the next buffer, the block whose update must be done before it is overwritten)."""
        self._turn = (self._turn + 1) % LANDING_BUFFERS
        user, self._users[self._turn] = self._users[self._turn], block
        return self.buffers[self._turn], user

    def close(self) -> None:
        self.buffers.clear()
        self._slab.close()


@final
class AppliedGradients(GradientSink):
    """Each block is updated as soon as its gradient has landed: without clipping, or in the second
    pass of two-pass clipping.

    Args:
        store: its "grad" array does not exist.
        compute: accounts for waits.
        ring: landing buffers of streamed blocks.
        updater: knows when a landing buffer has been read.

    Attributes:
        apply: queues the update of a block, with the step's learning rate and clip factor.
    """

    def __init__(
        self, store: Store, compute: Compute, ring: GradientRing, updater: Updater
    ) -> None:
        super().__init__()
        self.store, self.compute, self.ring, self.updater = store, compute, ring, updater
        self.apply: Callable[[Gradient], None] | None = None  # set for each step

    def place(self, block: int) -> torch.Tensor | None:
        if self.store.is_resident(block):
            return None  # it is updated where its accumulator is
        buffer, user = self.ring.take(block)
        if user is not None:
            event = Event()
            with self.compute.blocked("update", event):
                # wait: that update still reads this buffer
                event.waited = self.store.timed(lambda: self.updater.wait_ready(user))
        return buffer[: self.store.trained_span(block).numel]

    def take(self, gradient: Gradient) -> None:
        assert self.apply is not None
        self.finished.append(gradient)  # first: an update that was begun must be known of
        self.apply(gradient)
