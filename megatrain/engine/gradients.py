"""Weight gradients from backward to the optimizer: summed in fp32 on the device, measured there,
downloaded once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from megatrain.engine.exchange import Exchange
from megatrain.engine.products import Sum, add_gradients
from megatrain.engine.streams import Compute, Event, Lane
from megatrain.memory.layout import BLOCK_ALIGNMENT, FlatLayout
from megatrain.schedule import sum_buffers


@dataclass
class Buffer:
    """A flat device buffer and the event after which it may be overwritten."""

    flat: torch.Tensor
    free: Event | None = None


@dataclass
class OpenSum:
    """The fp32 accumulator of a block that backward adds to: a view for each tensor by name.

    `arriving` completes when the sums of earlier groups have come back from the host: into this
    buffer, or of several ranks into `share`, where this rank's share is added up over groups.
    """

    buffer: Buffer
    sums: dict[str, Sum]
    arriving: Event | None = None
    share: Buffer | None = None


@dataclass(frozen=True)
class Gradient:
    """One block's finished gradient.

    Attributes:
        block: number of the block in execution order.
        values: [numel] in the gradient's dtype on the host. Of a resident block on the device,
            perhaps still the fp32 accumulator, which the optimizer rounds.
        landed: completes when `values` and `square_sum` are there.
        square_sum: sum of squares, one fp32 element on the host.
    """

    block: int
    values: torch.Tensor
    landed: Event
    square_sum: torch.Tensor


class GradientSink(ABC):
    """Receives the finished gradients of a step: gives each its landing place, and lists them."""

    def __init__(self) -> None:
        self.finished: list[Gradient] = []  # in the order in which backward finished them

    def begin_step(self) -> None:
        """Forget the gradients of the previous step."""
        self.finished.clear()

    @abstractmethod
    def place(self, block: int) -> torch.Tensor | None:
        """The memory where a block's finished gradient lands: [numel] in its dtype.

        On the host, or on the device for a resident block; None leaves a resident block's in its
        fp32 accumulator.
        """

    @abstractmethod
    def take(self, gradient: Gradient) -> None:
        """Receive a gradient that is computed, and whose download is queued."""


class Gradients:
    """Sums each block's gradient over the micro-batches of a step, in fp32, in their order.

    The order is the same wherever the sums live, so the number of groups does not change a bit. Not
    so of several ranks: they exchange sums that stay on the device once a step, and those that wait
    on the host once a group, of which only shares wait. Then bits depend on which block's stay.

    Args:
        layouts: of all blocks, in execution order. One of no elements is frozen: it has no sums.
        dtype: of the finished gradient: bf16 (rounded once, from the fp32 sum) or fp32.
        resident: number of first blocks that live on the device; their gradients do not leave it.
        own: blocks with an accumulator of their own for the whole step (`schedule.own_sums`); the
            others take turns in a ring.
        sink: receives the finished gradients.
        host_sums: returns a block's fp32 array on the host, if accumulators wait there between
            groups: whole ones, or a rank's share.
        exchange: of several ranks, each of which gets its share of the sum over all.
    """

    def __init__(
        self,
        layouts: Sequence[FlatLayout],
        dtype: torch.dtype,
        *,
        resident: int,
        own: Collection[int],
        compute: Compute,
        upload: Lane,
        download: Lane,
        sink: GradientSink,
        host_sums: Callable[[int], torch.Tensor] | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        self.layouts, self.resident = layouts, resident
        self.compute, self.upload, self.download = compute, upload, download
        self.sink, self.host_sums = sink, host_sums
        self.exchange = exchange
        self._exchanged: Event | None = None  # the last share of the step
        device, pinned = compute.device, compute.is_cuda
        numels = [layout.numel for layout in layouts]
        largest = max(numels)
        if exchange is not None:
            numels = [exchange.padded(block) for block in range(len(layouts))]
            largest = max(exchange.shares)
        self._own = {b: Buffer(torch.zeros(numels[b], device=device)) for b in own}
        passing = [numel for block, numel in enumerate(numels) if block not in self._own]
        # one is added to while another travels: to the host and back, or to other ranks
        travel = host_sums is not None or exchange is not None
        sizes = sum_buffers(passing, travel)
        self._ring = [Buffer(torch.zeros(size, device=device)) for size in sizes]
        shares = () if exchange is None or host_sums is None else exchange.shares
        passing = [share for block, share in enumerate(shares) if block not in self._own]
        sizes = sum_buffers(passing, travel)  # one for each of the ring
        self._shares = [Buffer(torch.zeros(size, device=device)) for size in sizes]
        # one: a gradient leaves while the next block's is computed
        self._staging = Buffer(torch.zeros(largest, dtype=dtype, device=device))
        self._square_sums = torch.zeros(len(layouts), device=device)
        self._square_sums_host = torch.zeros(len(layouts), pin_memory=pinned)
        # these land with their gradients, for updates that start before the norm is known
        self._landed_square_sums = torch.zeros(len(layouts), pin_memory=pinned)
        self._turn = 0  # counts the buffers taken from the ring
        self._open: dict[int, OpenSum] = {}
        self._sums_landed: dict[int, Event] = {}  # of accumulators that wait on the host
        self._started: set[int] = set()  # blocks that an earlier group, or this one, added to
        self._only_measured = False

    def begin_step(self, *, only_measured: bool = False) -> None:
        """Forget the sums of the previous step, or of its first backward.

        only_measured: finished gradients count in the norm and are dropped; the sink gets none.
        """
        self._only_measured = only_measured
        self._started.clear()
        self._sums_landed.clear()
        self._open.clear()  # of a step that was abandoned

    def open(self, block: int) -> None:
        """Make the block's sum ready to be added to: empty in the step's first group, else what the
        groups before have left."""
        if block in self._open or not self.layouts[block].numel:
            return  # a tied embedding is opened by the head and closed by embed
        buffer, share = self._own.get(block), None
        travels, later = buffer is None, block in self._started
        if buffer is None:
            self._turn += 1
            buffer = self._ring[self._turn % len(self._ring)]
            share = self._shares[self._turn % len(self._ring)] if self._shares else None
        layout, fresh = self.layouts[block], not later or share is not None
        flat = buffer.flat[: layout.numel]
        sums = {name: Sum(view, fresh) for name, view in layout.views(flat).items()}
        opened = self._open[block] = OpenSum(buffer, sums, share=share)
        if fresh:
            leaves = self.exchange.slowest if self.exchange else "download"
            self.compute.wait(buffer.free, leaves)  # wait: what it held before still leaves
            # the padding: sums write tensors alone, and another block's values may lie between
            for start, stop in layout.gaps():
                flat[start:stop].zero_()
        if later and travels:
            opened.arriving = self._fetch_sum(block, share or buffer)
        self._started.add(block)

    def _fetch_sum(self, block: int, buffer: Buffer) -> Event:
        assert self.host_sums is not None
        source, free, written = self.host_sums(block), buffer.free, self._sums_landed[block]

        def job(_: Event) -> None:
            self.upload.wait(free)  # wait: another block's sum still leaves this buffer
            self.upload.wait(written)  # wait: this sum may still be on its way down
            buffer.flat[: len(source)].copy_(source, non_blocking=True)

        buffer.free = self.upload.submit(job)
        return buffer.free

    def add(self, block: int, gradients: dict[str, torch.Tensor | None]) -> None:
        """Add one micro-batch's gradients by tensor name to the block's open sum; None is zero."""
        sums = self.sums(block)
        add_gradients([sums[name] for name in gradients], gradients.values())

    def sums(self, block: int) -> dict[str, Sum]:
        """The open sums of a block's tensors by name, to be added to by what is computed next."""
        if not self.layouts[block].numel:
            return {}
        opened = self._open[block]
        if opened.share is None:
            # wait: earlier groups' sums are on their way
            self.compute.wait(opened.arriving, "upload")
            opened.arriving = None
        return opened.sums

    def close(self, block: int, *, last_group: bool) -> None:
        """The block's backward of this group is complete, on this rank.

        In the last group, round, measure and download its gradient, and hand it to the sink.
        """
        if not self.layouts[block].numel:
            return
        for open_sum in self.sums(block).values():
            open_sum.fill()
        opened = self._open.pop(block)
        buffer = opened.buffer
        flat = buffer.flat[: self.layouts[block].numel]
        if last_group and self.exchange is not None:
            self._share_out(block, opened, self.exchange)
        elif opened.share is not None and self.exchange is not None:
            self._put_by(block, opened, opened.share, self.exchange)
        elif last_group and self._only_measured:
            self._square_sums[block] = square_sum(self._rounded(block, flat))
        elif last_group:
            self.sink.take(self._finish(block, flat, buffer))
        elif block not in self._own:
            assert self.host_sums is not None
            buffer.free = self._sums_landed[block] = self._send((flat, self.host_sums(block)))

    def _finish(self, block: int, total: torch.Tensor, buffer: Buffer) -> Gradient:
        """Measure the gradient as it will be applied, rounded, and send it on its way."""
        target, scalar = self.sink.place(block), self._landed_square_sums[block : block + 1]
        if block < self.resident:
            values = total if target is None else target.copy_(total)
            applied = self._rounded(block, total) if target is None else values
            self._square_sums[block] = square_sum(applied)
            return Gradient(block, values, self.compute.record(), scalar)
        assert target is not None
        finished = self._rounded(block, total)
        self._square_sums[block] = square_sum(finished)
        buffer.free = self.compute.record()  # from here on only the staging buffer is read
        landed = self._send((finished, target), (self._square_sums[block : block + 1], scalar))
        self._staging.free = landed
        return Gradient(block, target, landed, scalar)

    def _summed(
        self, block: int, opened: OpenSum, exchange: Exchange
    ) -> Callable[[], torch.Tensor]:
        """For a job of the exchange: this rank's share of the sum over all ranks and all groups so
        far, in fp32. Valid until the next one."""
        ready, lane, span = self.compute.record(), exchange.lane, exchange.trained_span(block)
        total, share, arriving = opened.buffer.flat[: exchange.padded(block)], None, opened.arriving
        if opened.share is not None:
            share, there = opened.share.flat[: span.numel], arriving or opened.share.free

        def summed() -> torch.Tensor:
            lane.wait(ready)  # wait: the sum must have been computed
            found = exchange.summed(total)[: span.numel]
            if share is None:
                return found
            lane.wait(there)  # wait: earlier groups' come up, or another block's still leaves
            return share.copy_(found) if arriving is None else share.add_(found)

        return summed

    def _put_by(self, block: int, opened: OpenSum, share: Buffer, exchange: Exchange) -> None:
        """Add this group's sum over all ranks to this rank's share, which waits on the host."""
        assert self.host_sums is not None
        target, summed = self.host_sums(block), self._summed(block, opened, exchange)
        self._exchanged = opened.buffer.free = exchange.lane.submit(lambda _: summed())
        copied = share.flat[: len(target)], target
        share.free = self._sums_landed[block] = self._send(copied, after=self._exchanged)

    def _share_out(self, block: int, opened: OpenSum, exchange: Exchange) -> None:
        """Give every rank its share of the sum over all; measure, and send this rank's on its way.

        The sum of squares is of the whole gradient, the same on every rank and as of one alone.
        """
        lane, rows = exchange.lane, self.layouts[block].numel // BLOCK_ALIGNMENT
        summed, square = self._summed(block, opened, exchange), self._square_sums[block : block + 1]
        staging = self._staging
        mine, free = staging.flat[: exchange.trained_span(block).numel], staging.free

        def job(_: Event) -> None:
            found = summed()
            lane.wait(free)  # wait: an earlier gradient still leaves this buffer
            mine.copy_(found)
            norms = exchange.all_norms(row_norms(mine), block)
            square.copy_(sum_of_squares(norms[:rows]))

        self._exchanged = opened.buffer.free = staging.free = shared = lane.submit(job)
        if opened.share is not None:
            opened.share.free = shared
        if self._only_measured:
            return
        target, scalar = self.sink.place(block), self._landed_square_sums[block : block + 1]
        if target is None:  # a resident block that is updated at once, on the stream that computes
            self.compute.wait(shared, exchange.slowest)
            self.sink.take(Gradient(block, mine, shared, scalar))
            staging.free = self.compute.record()
            return
        landed = self._send((mine, target), (square, scalar), after=shared)
        staging.free = landed
        self.sink.take(Gradient(block, target, landed, scalar))

    def _rounded(self, block: int, total: torch.Tensor) -> torch.Tensor:
        """`total` in the gradients' dtype, in the staging buffer."""
        # wait: an earlier gradient still leaves it
        self.compute.wait(self._staging.free, "download")
        return self._staging.flat[: total.numel()].copy_(total)

    def _send(
        self, *copies: tuple[torch.Tensor, torch.Tensor], after: Event | None = None
    ) -> Event:
        """Download what was computed so far, or is there after an event, each (source, target)."""
        ready = after or self.compute.record()

        def job(_: Event) -> None:
            self.download.wait(ready)  # wait: the gradient must have been computed
            for source, target in copies:
                target.copy_(source, non_blocking=True)

        return self.download.submit(job)

    def norm(self, finished: Sequence[Gradient]) -> float:
        """Global L2 norm of the finished gradients as they will be applied.

        Waits for the computation only, not for downloads.
        """
        if self.exchange is not None:
            # wait: all ranks' shares are being measured
            self.compute.wait(self._exchanged, self.exchange.slowest)
        for gradient in finished:
            gradient.landed.wait_host()  # raises what a download failed with, before any update
            if self.exchange is not None and gradient.block < self.resident:
                # wait: it is copied on another stream, and the update on this one reads it
                self.compute.wait(gradient.landed, "download")
        self._square_sums_host.copy_(self._square_sums, non_blocking=True)
        self.compute.synchronize()  # wait: the sums of squares must have been computed
        return float(self._square_sums_host.double().sum().sqrt())


def square_sum(flat: torch.Tensor) -> torch.Tensor:
    """Sum of squares of a flat array of any dtype, an fp32 scalar.

    Rows first, so that no long chain of additions loses digits.
    """
    return sum_of_squares(row_norms(flat))


def row_norms(flat: torch.Tensor) -> torch.Tensor:
    """The fp32 norm of every BLOCK_ALIGNMENT elements."""
    rows = flat.view(-1, BLOCK_ALIGNMENT)
    norms: torch.Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32)
    return norms


def sum_of_squares(norms: torch.Tensor) -> torch.Tensor:
    """Of all rows, from their norms."""
    return norms.double().square().sum().float()
