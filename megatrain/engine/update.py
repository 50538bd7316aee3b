"""The deferred update: the host updates blocks in forward order while the device already runs the
next forward on those that are done.

Every reader of a block calls `wait_ready`, so no stale weight is ever seen and the result equals
the serial order bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, count
from typing import Unpack, cast

import torch

from megatrain.engine.gradients import Gradient
from megatrain.engine.streams import Compute, Event, Lane
from megatrain.errors import DivergedError, MegaTrainError
from megatrain.memory.layout import FlatLayout, Segment, Span, part, round_up
from megatrain.memory.store import Lease, Store
from megatrain.optim import Muon, Optimizer
from megatrain.optim.muon import HostWorkspace, InPlace, TensorState
from megatrain.optim.optimizer import Elementwise, StepOptions

# Few and large: each takes Python's lock, for which dozens of threads and the one that launches
# kernels queue. A thread that finds no more goes on with the next block. Elements, at most some 20
# to 60 ms of a core.
CHUNK_ELEMENTS = 1 << 23
CHUNK_MINIMUM = 1 << 16
CHUNKS_PER_THREAD = 2


def chunks(layout: FlatLayout, threads: int, span: Span) -> list[Segment]:
    """Pieces of a span of a block, counted from its start, each inside one segment, enough to keep
    every thread busy to the end."""
    even = round_up(-(-span.numel // (CHUNKS_PER_THREAD * threads)), 1024)
    size = min(CHUNK_ELEMENTS, max(CHUNK_MINIMUM, even))
    return [
        Segment(start, min(start + size, stop), decay)
        for first, stop, decay in segments_of(layout, span)
        for start in range(first, stop, size)
    ]


def segments_of(layout: FlatLayout, span: Span) -> list[Segment]:
    """The parts of a block's segments in a span, counted from its start."""
    return [
        Segment(max(start, span.start) - span.start, min(stop, span.stop) - span.start, decay)
        for start, stop, decay in layout.segments()
        if max(start, span.start) < min(stop, span.stop)
    ]


def diverged(what: str) -> DivergedError:
    """The error for a gradient that is not finite, found too late to skip the step."""
    return DivergedError(
        f"{what} is not finite and earlier blocks were already updated in this step: the weights "
        "are lost; with max_grad_norm set such a step is skipped"
    )


@dataclass(frozen=True)
class Update:
    """One block's update."""

    gradient: Gradient
    options: StepOptions
    lease: Lease  # of everything that the update uses but the gradient
    done: Event = field(default_factory=Event)  # when it is updated, or with what stopped that

    def arrays(self) -> dict[str, torch.Tensor]:
        """The arrays that the update reads and writes, by name. Waits for a slower tier."""
        arrays = {"grad": self.gradient.values, **self.lease.wait()}
        # without frozen tensors, which follow
        arrays["weight"] = arrays["weight"][: len(arrays["grad"])]
        return arrays


# why: decision 0006
class Updater:
    """Applies finished gradients to the store's arrays, one block after another.

    Resident blocks are updated on `compute` at once. Of the others each is spread over a pool of
    threads. A thread that finds nothing left of a block goes on with the next; where whole tensors
    are updated in stages, a block is complete before the next begins.
    """

    def __init__(self, store: Store, optimizer: Optimizer, threads: int, compute: Compute) -> None:
        self.store, self.optimizer, self.compute = store, optimizer, compute
        self.layouts = [layout.trained for layout in store.layouts]
        self._by_range = cast(Elementwise, optimizer)
        self._whole = cast(Muon, optimizer) if optimizer.whole_tensors else None
        self._workspace: HostWorkspace | None = None
        if self._whole is not None:  # before threads are started: there may be no memory for it
            scratch = self._whole.scratch(store.layouts[store.resident :])
            self._workspace = HostWorkspace(scratch.host, compute.device, threads)
        self._per = {array.name: array.per for array in optimizer.state_arrays}
        self.lane = Lane("update")
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="megatrain-update")
        self._spans = spans = [store.trained_span(block) for block in range(len(self.layouts))]
        self._chunks = [
            chunks(of, threads, span) for of, span in zip(self.layouts, spans, strict=True)
        ]
        # number in the model of the first element that is updated here, of each block
        begins = [0, *accumulate(layout.numel for layout in self.layouts)]
        self._first = [begin + span.start for begin, span in zip(begins, spans, strict=False)]
        self._done: dict[int, Event] = {}  # of each block's last update
        self._begun = [0] * len(spans)  # updates of each block on the host
        self._failure: BaseException | None = None  # of an update; later ones never begin
        self._given_up: BaseException | None = None

    def take_libraries(self) -> None:
        """Let the lane's thread take what matmuls keep of GPU memory, before the first update."""
        workspace = self._workspace
        if workspace is not None:
            self.lane.submit(lambda _: workspace.take_libraries()).wait_host()

    def submit(
        self, gradient: Gradient, *, check_finite: bool = False, **options: Unpack[StepOptions]
    ) -> None:
        """Queue the update of one block; a resident one's behind what the device has to compute.

        check_finite: refuse a gradient that is not finite, for updates that start before the norm
            is known. A resident block's is not known that early: `give_up` then.
        """
        # leased now: arrays on a slower tier are read as early as staging buffers allow
        names = [name for name in self.store.arrays if name not in ("grad", "grad_sum")]
        lease = self.store.lease(gradient.block, names, changes=True)
        update = Update(gradient, options, lease)
        if self.store.is_resident(gradient.block):
            self._update_on_device(update)
            self._done[gradient.block] = self.compute.record()
            return
        self.lane.submit(lambda _: self._begin(update, check_finite))
        self._done[gradient.block] = update.done
        self._begun[gradient.block] += 1

    def _begin(self, update: Update, check_finite: bool) -> None:
        """Start an update in the lane's thread."""
        gradient = update.gradient
        try:
            gradient.landed.synchronize()  # wait: it may still be on its way down
            if self._failure is not None:
                raise self._failure
            if check_finite and not torch.isfinite(gradient.square_sum).item():
                raise diverged(f"the gradient of block {gradient.block}")
            if self._whole is not None:
                self._update_whole(update, self._whole)
            else:
                self._hand_out(update)
        except BaseException as error:  # noqa: BLE001  carried to the thread that waits
            self._fail(error)
            update.done.finish(error)

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self.store.stop(error)  # or readers would wait for leases of updates that never begin

    def _update_whole(self, update: Update, optimizer: Muon) -> None:
        """Update whole tensors stage by stage in the pool, and wait for each."""
        assert self._workspace is not None
        self._workspace.reset()
        for stage in optimizer.stages(self._tensors(update), self._workspace, **update.options):
            for piece in [self._pool.submit(piece) for piece in stage]:
                piece.result()  # wait: a stage reads what the one before has written
        self._finish(update)

    def _hand_out(self, update: Update) -> None:
        """Hand the block out to the pool, behind what that still has to do."""
        optimizer, block, arrays = self._by_range, update.gradient.block, update.arrays()
        rules = {
            decay: optimizer.updating(
                arrays,
                first=self._first[block],
                weight_decay=optimizer.weight_decay if decay else 0.0,
                **update.options,
            )
            for decay in (False, True)
        }
        # one at least, which finishes a block without tensors
        threads = max(1, min(self._threads, len(self._chunks[block])))
        # shared by the threads: taking the next is one bytecode, which no other interrupts
        pieces, leaving = iter(self._chunks[block]), count(1)
        errors: list[BaseException] = []

        def work() -> None:
            try:
                for start, stop, decay in pieces:
                    rules[decay](start, stop)
            except BaseException as error:  # noqa: BLE001  carried to the thread that waits
                errors.append(error)
                self._fail(error)
            if next(leaving) == threads:  # the last one
                self._finish(update, *errors)

        for _ in range(threads):
            self._pool.submit(work)

    def _finish(self, update: Update, *errors: BaseException) -> None:
        """Release the block's arrays and complete `done`, with the first error if any."""
        try:
            update.lease.release()
            if not errors:
                self.store.say_updated(update.gradient.block)
        except BaseException as error:  # noqa: BLE001  carried to the thread that waits
            errors = (*errors, error)
            self._fail(error)
        finally:
            update.done.finish(errors[0] if errors else None)

    def _update_on_device(self, update: Update) -> None:
        if self._whole is not None:
            place = InPlace(self.compute.device)
            for tensor in self._tensors(update):  # one by one: temporaries are then of one
                for stage in self._whole.stages([tensor], place, **update.options):
                    for piece in stage:
                        piece()
            return
        optimizer, block, arrays = self._by_range, update.gradient.block, update.arrays()
        span = self._spans[block]
        ranges = segments_of(self.layouts[block], span)
        if optimizer.weight_decay == 0:  # each range is a launch: one is enough
            ranges = [Segment(0, span.numel, False)]
        for start, stop, decay in ranges:
            optimizer.update(
                {
                    name: array[part(self._per.get(name, "element"), start, stop)]
                    for name, array in arrays.items()
                },
                first=self._first[block] + start,
                weight_decay=optimizer.weight_decay if decay else 0.0,
                **update.options,
            )

    def _tensors(self, update: Update) -> list[TensorState]:
        """The tensors of a block, each with its part of every array that has it."""
        block, trained = update.gradient.block, self.layouts[update.gradient.block]
        found: dict[str, dict[str, torch.Tensor]] = {spec.name: {} for spec in trained.tensors}
        for name, array in update.arrays().items():
            of_state = name not in ("grad", "weight")
            layout = self.store.layout(name, block) if of_state else trained
            for tensor, flat in layout.flats(array).items():
                found[tensor][name] = flat
        return [TensorState(spec, found[spec.name]) for spec in trained.tensors]

    def wait_ready(self, block: int) -> None:
        """Return once all updates of the weights of `block` are done. Raises what stopped them."""
        if block in self._done:
            self._done[block].synchronize()
            self.store.wait_for_others(block, self._begun[block])
        if self._given_up is not None:
            self.check()

    def give_up(self, error: BaseException) -> None:
        """Let every wait and check raise `error`, or an earlier one: weights are of two steps."""
        self._given_up = error

    @contextmanager
    def all_or_nothing(self, begun: Sequence[Gradient] | None = None) -> Iterator[None]:
        """Give up if an exception leaves this: some blocks may be updated and others not.

        begun: the gradients whose update was queued so far; while there is none, nothing is lost.
        """
        try:
            yield
        except BaseException as error:
            if begun is None or begun:
                self.give_up(
                    MegaTrainError(
                        "the engine stopped in the middle of an update "
                        f"({type(error).__name__}: {error}), so that its weights are of two "
                        "steps; resume from the last checkpoint"
                    )
                )
            raise

    def check(self) -> None:
        """Raise what stopped the updates, if anything did so far."""
        error = self._failure or self._given_up
        if error is not None:
            raise error

    def close(self) -> None:
        self.lane.close()  # first: its jobs hand blocks out to the pool
        self._pool.shutdown()
        if self._workspace is not None:
            self._workspace.close()
