"""The deferred update: the host updates blocks in forward order while the device already runs the next forward on those that are done.
Resident blocks are updated on the device itself, between two steps' computation.

Every reader of a block calls `wait_ready`, so no stale weight is ever seen and the result equals the serial order bit for bit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor

from megatrain.engine.gradients import Gradient
from megatrain.engine.streams import Compute, Event, Lane
from megatrain.errors import DivergedError, MegaTrainError
from megatrain.memory.layout import FlatLayout, part, round_up
from megatrain.memory.lease import Lease
from megatrain.memory.slab import Slab
from megatrain.memory.store import Store
from megatrain.optim import Optimizer, WholeTensors
from megatrain.optim.optimizer import RangeOptimizer, UpdateRange
from megatrain.optim.whole_tensors import TensorState

CHUNK_ELEMENTS = (
    1 << 20
)  # some 2 ms of one core: long enough to hide Python, short enough to spread a block evenly
CHUNK_MINIMUM = 1 << 16
CHUNKS_PER_THREAD = 4

Chunk = tuple[int, int, bool]  # start, stop, whether weights decay


def chunks(layout: FlatLayout, threads: int) -> list[Chunk]:
    """Pieces of a block: each inside one segment, enough of them to keep every thread busy to the end."""
    size = min(
        CHUNK_ELEMENTS,
        max(CHUNK_MINIMUM, round_up(-(-layout.numel // (CHUNKS_PER_THREAD * threads)), 1024)),
    )
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


class Spread:
    """One block's update on the host, by several threads: each takes pieces until none is left. `event` completes with the last thread.

    Args:
        update: of a range with and without decay.
        threads: how many will call `work`.
        failed: is told what stops one of them.
        leases: of what is updated, released by the last thread.
    """

    def __init__(
        self,
        pieces: Sequence[Chunk],
        update: Mapping[bool, UpdateRange],
        threads: int,
        event: Event,
        failed: Callable[[BaseException], None],
        leases: Sequence[Lease],
    ) -> None:
        self._pieces = iter(
            pieces
        )  # shared: taking the next is one bytecode, which no other thread interrupts
        self._update, self._event, self._failed, self._leases = update, event, failed, leases
        self._lock, self._at_work = threading.Lock(), threads
        self._error: BaseException | None = None

    def work(self) -> None:
        """Update pieces until there are no more, or one failed."""
        try:
            for start, stop, decay in self._pieces:
                self._update[decay](start, stop)
        except BaseException as error:  # noqa: BLE001  carried to whoever waits for the block
            self._error = error
            self._failed(error)
        with self._lock:
            self._at_work -= 1
            last = self._at_work == 0
        if last:
            try:
                for lease in self._leases:
                    lease.release()
            except BaseException as error:  # noqa: BLE001  as above
                self._error = self._error or error
                self._failed(error)
            finally:
                self._event.finish(self._error)


class Updater:
    """Applies finished gradients: of resident blocks on the device at once, of the others on the host, one block after another, each
    spread over a pool of threads. A thread that finds nothing left of a block goes on with the next; where whole tensors are updated, in
    stages, a block is complete before the next begins.

    Args:
        store: its arrays are updated in place.
        threads: of the pool.
        compute: the stream on which resident blocks are updated.
    """

    def __init__(self, store: Store, optimizer: Optimizer, threads: int, compute: Compute) -> None:
        self.store = store
        self.optimizer = optimizer
        self.compute = compute
        self._per = {state.name: state.per for state in optimizer.state_arrays}
        self._workspace: HostWorkspace | None = None
        if isinstance(
            optimizer, WholeTensors
        ):  # before threads are started: there may be no memory for it
            streamed = [
                layout for block, layout in enumerate(store.layouts) if not store.is_resident(block)
            ]
            self._workspace = HostWorkspace(
                optimizer.scratch(streamed).host, compute.device, threads
            )
        self.lane = Lane("update")
        self.delay: Callable[[int], None] | None = (
            None  # tests inject sleeps here: before each block's update
        )
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="megatrain-update")
        self._chunks = [chunks(layout, threads) for layout in store.layouts]
        self._first = [
            0,
            *accumulate(layout.numel for layout in store.layouts),
        ]  # number of each block's first element in the model
        self._done: dict[
            int, tuple[Event, Event]
        ] = {}  # of each block's last update: that it was begun, that it is done
        self._failure: BaseException | None = None  # of an update, in some thread of the pool
        self._given_up: BaseException | None = None

    def take_libraries(self) -> None:
        """Before the first update: the lane's thread takes what the matrix products of whole tensors keep of the GPU's memory."""
        workspace = self._workspace
        if workspace is not None:
            self.lane.submit(lambda _: workspace.take_libraries()).wait_host()

    def submit(
        self,
        gradient: Gradient,
        *,
        lr: float,
        step: int,
        grad_scale: float,
        check_finite: bool = False,
    ) -> None:
        """Queue the update of one block; of a resident one behind what the device has been asked to compute.

        Args:
            step: counts from 1, for the bias correction.
            grad_scale: the gradient is multiplied by it first (the clip factor).
            check_finite: refuse a gradient whose sum of squares is not finite, for updates that start before the norm is known. Of resident
                blocks nobody knows it that early: whoever learns of it later gives up.
        """
        if self.store.is_resident(gradient.block):
            self._update_on_device(gradient, lr, step, grad_scale)
            done = self.compute.record()
            self._done[gradient.block] = done, done
            return
        done, leases = (
            Event(),
            self._leases(gradient),
        )  # what lies on NVMe is read as early as staging buffers allow

        def job(_: Event) -> None:
            try:
                prepare_and_update()
            except BaseException as error:
                self._fail(error)
                raise

        def prepare_and_update() -> None:
            gradient.landed.synchronize()  # wait: the gradient may still be on its way down
            if self._failure is not None:
                raise self._failure
            if check_finite and not torch.isfinite(gradient.square_sum).item():
                raise diverged(f"the gradient of block {gradient.block}")
            if self.delay is not None:
                self.delay(gradient.block)
            if isinstance(self.optimizer, WholeTensors):
                self._update_tensors(self.optimizer, gradient, leases, lr, step, grad_scale)
                done.finish()
            else:
                self._update_on_host(gradient, leases, lr, step, grad_scale, done)

        self._done[gradient.block] = self.lane.submit(job), done

    def _update_tensors(
        self,
        optimizer: WholeTensors,
        gradient: Gradient,
        leases: Sequence[Lease],
        lr: float,
        step: int,
        grad_scale: float,
    ) -> None:
        """On the host: the lane's thread hands out stage after stage, and waits for each."""
        assert self._workspace is not None
        self._workspace.reset()
        for stage in optimizer.stages(
            self._tensors(gradient, leases),
            self._workspace,
            lr=lr,
            step=step,
            grad_scale=grad_scale,
        ):
            for piece in [self._pool.submit(piece) for piece in stage]:
                piece.result()
        for lease in leases:
            lease.release()

    def _tensors(self, gradient: Gradient, leases: Sequence[Lease]) -> list[TensorState]:
        """The tensors of a block with their part of every array that has them."""
        arrays = self._arrays(gradient, leases)
        layouts = {
            name: self.store.layout(name, gradient.block) for name in arrays if name != "grad"
        }
        layouts["grad"] = self.store.layouts[gradient.block]
        flats = {name: layouts[name].flats(array) for name, array in arrays.items()}
        return [
            TensorState(
                spec,
                {
                    name: of_tensor[spec.name]
                    for name, of_tensor in flats.items()
                    if spec.name in of_tensor
                },
            )
            for spec in self.store.layouts[gradient.block].tensors
        ]

    def _update_on_device(
        self, gradient: Gradient, lr: float, step: int, grad_scale: float
    ) -> None:
        leases = self._leases(gradient)
        if isinstance(self.optimizer, WholeTensors):
            for tensor in self._tensors(
                gradient, leases
            ):  # one after the other: temporaries are then of one tensor
                for stage in self.optimizer.stages(
                    [tensor],
                    InPlace(gradient.values.device),
                    lr=lr,
                    step=step,
                    grad_scale=grad_scale,
                ):
                    for piece in stage:
                        piece()
            return
        optimizer, arrays = cast(RangeOptimizer, self.optimizer), self._arrays(gradient, leases)
        for start, stop, decay in self._ranges(gradient.block):
            views = {
                name: array[part(self._per.get(name, "element"), start, stop)]
                for name, array in arrays.items()
            }
            first = self._first[gradient.block] + start
            optimizer.update(
                views,
                lr=lr,
                weight_decay=self._weight_decay(decay),
                step=step,
                grad_scale=grad_scale,
                first=first,
            )

    def _update_on_host(
        self,
        gradient: Gradient,
        leases: Sequence[Lease],
        lr: float,
        step: int,
        grad_scale: float,
        done: Event,
    ) -> None:
        """Hand the block out to the threads, behind what they still have to do."""
        arrays, pieces, first = (
            self._arrays(gradient, leases),
            self._chunks[gradient.block],
            self._first[gradient.block],
        )
        update = {
            decay: cast(RangeOptimizer, self.optimizer).updating(
                arrays,
                lr=lr,
                weight_decay=self._weight_decay(decay),
                step=step,
                grad_scale=grad_scale,
                first=first,
            )
            for decay in (False, True)
        }
        threads = max(1, min(self._threads, len(pieces)))  # a block without tensors is done, too
        spread = Spread(pieces, update, threads, done, self._fail, leases)
        for _ in range(threads):
            self._pool.submit(spread.work)

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self.store.stop(error)  # later updates never begin, and would keep what they were to get

    def _arrays(self, gradient: Gradient, leases: Sequence[Lease]) -> dict[str, torch.Tensor]:
        """All that an update of the block reads and writes, once it is there."""
        arrays = {"grad": gradient.values}
        for lease in leases:
            arrays |= lease.wait()
        return arrays

    def _leases(self, gradient: Gradient) -> list[Lease]:
        """Of all that an update of the block uses, but a gradient that is in memory."""
        names = [name for name in self.store.arrays if name not in ("grad", "grad_sum")]
        changed = self.store.lease(gradient.block, names, changes=True)
        return (
            [changed, self.store.lease(gradient.block, ["grad"])] if gradient.stored else [changed]
        )

    def _weight_decay(self, decay: bool) -> float:
        return self.optimizer.weight_decay if decay else 0.0

    def _ranges(self, block: int) -> list[Chunk]:
        """A block in as few ranges of equal hyper-parameters as can be: on the device each is one launch."""
        layout = self.store.layouts[block]
        if self.optimizer.weight_decay == 0:
            return [(0, layout.numel, False)]
        return [(segment.start, segment.stop, segment.decay) for segment in layout.segments()]

    def wait_ready(self, block: int) -> None:
        """Block the calling thread until the last queued update of `block` is done. Raises what stopped it, if anything did."""
        if block in self._done:
            begun, done = self._done[block]
            begun.wait_host()  # raises what stopped the lane: then this block's update never began
            done.synchronize()
        if self._given_up is not None:
            self.check()

    def is_ready(self, block: int) -> bool:
        """Whether the last queued update of `block` is over."""
        return block not in self._done or self._done[block][1].host.is_set()

    def give_up(self, error: BaseException) -> None:
        """From now on every wait and check raises `error`, or what stopped the updates before it: the weights are of two steps."""
        self._given_up = error

    @contextmanager
    def all_or_nothing(self, begun: Sequence[Gradient] | None = None) -> Iterator[None]:
        """If this is left by an exception, some blocks may have been updated and others not: then nothing may use the model again.

        `begun`: the gradients whose update was queued so far; while there is none, nothing is lost.
        """
        try:
            yield
        except BaseException as error:
            if begun is None or begun:
                self.give_up(
                    MegaTrainError(
                        f"the engine stopped in the middle of an update ({type(error).__name__}: {error}), so that its weights are of two "
                        "steps; resume from the last checkpoint"
                    )
                )
            raise

    def check(self) -> None:
        """Raise what stopped the updates, if anything did so far."""
        error = self.lane.error or self._failure or self._given_up
        if error is not None:
            raise error

    def close(self) -> None:
        self.lane.close()
        self._pool.shutdown()
        if self._workspace is not None:
            self._workspace.close()


# -- what updates of whole tensors borrow -------------------------------------------------------------------------------------------

# What whole-tensor updates borrow: memory beside the weights, and, for matrix products, the device.
#
# Orthogonalising takes some hundred operations an element, which no host has to spare. So where there is a GPU, directions of
# blocks in host RAM go up as bfloat16, are orthogonalised on a stream of their own, and come down: 4 bytes a parameter on the bus.


class InPlace:
    """For blocks that live on the device: on its current stream, in memory that its allocator lends."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def directions(self, numel: int) -> Tensor:
        return torch.empty(numel, dtype=torch.bfloat16, device=self._device)

    def replace(self, function: Callable[[Tensor], Tensor], tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            tensor.copy_(function(tensor))


class HostWorkspace:
    """For blocks in host RAM, one after another.

    Args:
        nbytes: of the largest block's directions.
        device: a GPU computes the products there; on the CPU, this thread and torch's own do.
        threads: for the first touch.
    """

    def __init__(self, nbytes: int, device: torch.device, threads: int) -> None:
        self._device = device
        self._stream: Any = None
        if device.type == "cuda" and nbytes:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.delay: Callable[[], None] | None = (
            None  # tests inject sleeps here: on the stream, before every tensor
        )
        self._slab = (
            Slab(
                "directions of the update", nbytes, pinned=self._stream is not None, threads=threads
            )
            if nbytes
            else None
        )
        self._taken = 0

    def take_libraries(self) -> None:
        """In the thread that will call `replace`: let cuBLAS take its workspace for that thread and this stream now, and not amid the first
        step's activations (as `computing.take_workspaces` does for the computing stream)."""
        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                ones = torch.ones(1, 64, 64, dtype=torch.bfloat16, device=self._device)
                torch.bmm(ones, ones)

    def reset(self) -> None:
        """The block before is complete: its directions may be overwritten."""
        self._taken = 0

    def directions(self, numel: int) -> Tensor:
        assert self._slab is not None
        start, self._taken = self._taken, self._taken + 2 * numel
        return self._slab.bytes[start : self._taken].view(torch.bfloat16)

    def replace(self, function: Callable[[Tensor], Tensor], tensors: Sequence[Tensor]) -> None:
        """Returns when they are computed and, on CUDA, have come down."""
        if self._stream is None:
            for tensor in tensors:
                tensor.copy_(function(tensor))
            return
        with torch.cuda.stream(self._stream):
            for tensor in tensors:
                if self.delay is not None:
                    self.delay()
                arrived = tensor.to(self._device, non_blocking=True)
                tensor.copy_(
                    function(arrived), non_blocking=True
                )  # behind the upload on the same stream, which has read it by then
        self._stream.synchronize()  # wait: the host reads next what comes down

    def close(self) -> None:
        if self._slab is not None:
            self._slab.close()
