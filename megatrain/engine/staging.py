"""Host staging for gradients that are applied as soon as they arrive, so that no model-sized gradient exists."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatrain.memory.slab import Slab

RING_BUFFERS = 3  # one downloads, one waits, one is being applied


class GradientRing:
    """A few host buffers, used in turn.

    Args:
        numel: of the largest block.
        wait_ready: returns once the last queued update of a block is done.
    """

    def __init__(self, numel: int, dtype: torch.dtype, *, pinned: bool, wait_ready: Callable[[int], None]) -> None:
        self._slab = Slab("gradient staging", RING_BUFFERS * numel * dtype.itemsize, pinned=pinned, threads=1)
        whole = self._slab.bytes[: RING_BUFFERS * numel * dtype.itemsize].view(dtype)
        self._buffers = [whole[i * numel : (i + 1) * numel] for i in range(RING_BUFFERS)]
        self._users: list[int | None] = [None] * RING_BUFFERS
        self._turn = 0
        self._wait_ready = wait_ready

    def take(self, block: int, numel: int) -> torch.Tensor:
        """A buffer of `numel` elements for this block's gradient. Waits for the update that read the buffer last."""
        self._turn = (self._turn + 1) % RING_BUFFERS
        user = self._users[self._turn]
        if user is not None:
            self._wait_ready(user)
        self._users[self._turn] = block
        return self._buffers[self._turn][:numel]

    def close(self) -> None:
        self._buffers.clear()
        self._slab.close()
