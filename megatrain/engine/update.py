"""The deferred update: the host updates blocks in forward order while the device already runs the next forward on those that are done.
Resident blocks are updated on the device itself, between two steps' computation.

Every reader of a block calls `wait_ready`, so no stale weight is ever seen and the result equals the serial order bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from megatrain.engine.gradients import Gradient
from megatrain.engine.streams import Compute, Event, Lane
from megatrain.errors import DivergedError
from megatrain.memory.layout import FlatLayout, round_up
from megatrain.memory.store import Store
from megatrain.optim import Optimizer

CHUNK_ELEMENTS = 1 << 22  # about 10 ms of one core: long enough to hide Python, short enough to spread a block evenly
CHUNK_MINIMUM = 1 << 16


def chunks(layout: FlatLayout, threads: int) -> list[tuple[int, int, bool]]:
    """(start, stop, decay) pieces of a block: each inside one segment, enough of them to keep every thread busy to the end."""
    size = min(CHUNK_ELEMENTS, max(CHUNK_MINIMUM, round_up(-(-layout.numel // (2 * threads)), 1024)))
    return [
        (start, min(start + size, segment.stop), segment.decay)
        for segment in layout.segments()
        for start in range(segment.start, segment.stop, size)
    ]


def diverged(what: str) -> DivergedError:
    """The error for a gradient that turns out not to be finite when it is too late to skip the step."""
    return DivergedError(
        f"{what} is not finite and earlier blocks were already updated in this step; resume from the last checkpoint, with a lower "
        "learning rate or with max_grad_norm set (then such a step is skipped)"
    )


class Updater:
    """Applies finished gradients: of resident blocks on the device at once, of the others on the host, one block after another, each
    spread over a pool of threads.

    Args:
        store: its arrays are updated in place.
        threads: of the pool.
        compute: the stream on which resident blocks are updated.
    """

    def __init__(self, store: Store, optimizer: Optimizer, threads: int, compute: Compute) -> None:
        self.store = store
        self.optimizer = optimizer
        self.compute = compute
        self.lane = Lane("update")
        self.delay: Callable[[int], None] | None = None  # tests inject sleeps here: before each block's update
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="megatrain-adamw")
        self._chunks = [chunks(layout, threads) for layout in store.layouts]
        self._done: dict[int, Event] = {}
        self._given_up: BaseException | None = None

    def submit(self, gradient: Gradient, *, lr: float, step: int, grad_scale: float, check_finite: bool = False) -> Event:
        """Queue the update of one block; of a resident one behind what the device has been asked to compute.

        Args:
            step: counts from 1, for the bias correction.
            grad_scale: the gradient is multiplied by it first (the clip factor).
            check_finite: refuse a gradient whose sum of squares is not finite, for updates that start before the norm is known. Of resident
                blocks nobody knows it that early: whoever learns of it later gives up.
        """
        if self.store.is_resident(gradient.block):
            self._update_block(gradient, lr, step, grad_scale)
            event = self._done[gradient.block] = self.compute.record()
            return event

        def job(_: Event) -> None:
            gradient.landed.synchronize()  # wait: the gradient may still be on its way down
            if check_finite and not torch.isfinite(gradient.square_sum).item():
                raise diverged(f"the gradient of block {gradient.block}")
            if self.delay is not None:
                self.delay(gradient.block)
            self._update_block(gradient, lr, step, grad_scale)

        self._done[gradient.block] = event = self.lane.submit(job)
        return event

    def _update_block(self, gradient: Gradient, lr: float, step: int, grad_scale: float) -> None:
        arrays = {name: self.store.array(name, gradient.block) for name in self.store.arrays if name not in ("grad", "grad_sum")}
        arrays["grad"] = gradient.values

        def update(piece: tuple[int, int, bool]) -> None:
            start, stop, decay = piece
            views = {name: array[start:stop] for name, array in arrays.items()}
            weight_decay = self.optimizer.weight_decay if decay else 0.0
            self.optimizer.update(views, lr=lr, weight_decay=weight_decay, step=step, grad_scale=grad_scale)

        if gradient.values.is_cuda:
            for piece in self._ranges(gradient.block):
                update(piece)
        else:
            list(self._pool.map(update, self._chunks[gradient.block]))

    def _ranges(self, block: int) -> list[tuple[int, int, bool]]:
        """A block in as few ranges of equal hyper-parameters as can be: on the device each is one launch."""
        layout = self.store.layouts[block]
        if self.optimizer.weight_decay == 0:
            return [(0, layout.numel, False)]
        return [(segment.start, segment.stop, segment.decay) for segment in layout.segments()]

    def wait_ready(self, block: int) -> None:
        """Block the calling thread until the last queued update of `block` is done. Raises what stopped it, if anything did."""
        event = self._done.get(block)
        if event is not None:
            event.synchronize()
        if self._given_up is not None:
            self.check()

    def give_up(self, error: BaseException) -> None:
        """From now on every wait and check raises `error`, or what stopped the updates before it: the weights are of two steps."""
        self._given_up = error

    def check(self) -> None:
        """Raise what stopped the updates, if anything did so far."""
        error = self.lane.error or self._given_up
        if error is not None:
            raise error

    def close(self) -> None:
        self.lane.close()
        self._pool.shutdown()
