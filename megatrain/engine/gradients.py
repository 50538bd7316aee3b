"""Weight gradients from backward to the optimizer: summed in fp32 on the device, measured there,
downloaded once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from megatrain.engine.products import Sum, add_gradients
from megatrain.engine.streams import Compute, Event, Lane
from megatrain.memory.layout import BLOCK_ALIGNMENT, FlatLayout
from megatrain.schedule import sum_buffers


@dataclass
class Buffer:
    """A flat device buffer and the event after which it may be overwritten."""

    flat: Tensor
    free: Event | None = None


@dataclass
class OpenSum:
    """The fp32 accumulator of a block that backward adds to: a view for each tensor by name.

    `arriving` completes when the sums of earlier groups have come back from the host.
    """

    buffer: Buffer
    sums: dict[str, Sum]
    arriving: Event | None = None


@dataclass(frozen=True)
class Gradient:
    """One block's finished gradient."""

    block: int
    # [numel] in the gradient's dtype on the host; of a resident block on the device, perhaps still
    # the fp32 accumulator, which the optimizer rounds
    values: Tensor
    landed: Event  # when `values` and `square_sum` are there
    square_sum: Tensor  # one fp32 element on the host


class GradientSink(ABC):
    """Receives the finished gradients of a step: gives each its landing place, and lists them."""

    def __init__(self) -> None:
        self.finished: list[Gradient] = []  # in the order in which backward finished them

    def begin_step(self) -> None:
        self.finished.clear()

    @abstractmethod
    def place(self, block: int) -> Tensor | None:
        """The memory [numel] where a block's gradient lands: on the host, or the device for a
        resident block. None leaves that in its fp32 accumulator."""

    def take(self, gradient: Gradient) -> None:
        """Receive a gradient that is computed, and whose download is queued."""
        self.finished.append(gradient)


@dataclass(eq=False)
class Gradients:
    """Sums each block's gradient over the micro-batches of a step, in fp32, in their order.

    The order is the same wherever the sums live, so the number of groups does not change a bit.
    With several GPUs a subclass takes its place, which exchanges sums.

    Args:
        layouts: of all blocks. One of no elements is frozen: it has no sums.
        dtype: of the finished gradient: bf16 (rounded once, from the fp32 sum) or fp32.
        resident: number of first blocks that live on the device; their gradients do not leave it.
        own: blocks with an accumulator of their own for the whole step (`schedule.own_sums`); the
            others take turns in a ring.
        host_sums: a block's fp32 array on the host, if accumulators wait there between groups.
        numels, largest: elements of accumulators and the largest gradient, if not the layouts'.
    """

    leaves_by = "download"  # how a sum leaves its buffer: the cause of waits for that
    travels = False  # one sum is added to while another is on its way

    layouts: Sequence[FlatLayout]
    dtype: torch.dtype
    _: KW_ONLY
    resident: int
    own: Collection[int]
    compute: Compute
    upload: Lane
    download: Lane
    sink: GradientSink
    host_sums: Callable[[int], Tensor] | None = None
    numels: Sequence[int] = ()
    largest: int = 0

    def __post_init__(self) -> None:
        count, device, pinned = len(self.layouts), self.compute.device, self.compute.is_cuda
        numels = self.numels or [layout.numel for layout in self.layouts]
        self._own = {b: Buffer(torch.zeros(numels[b], device=device)) for b in self.own}
        self._ring = self._in_turn(numels)
        # one: a gradient leaves while the next block's is computed
        largest = self.largest or max(numels)
        self._staging = Buffer(torch.zeros(largest, dtype=self.dtype, device=device))
        self._square_sums = torch.zeros(count, device=device)
        self._square_sums_host = torch.zeros(count, pin_memory=pinned)
        # these land with their gradients, for updates that start before the norm is known
        self._landed_square_sums = torch.zeros(count, pin_memory=pinned)
        self._turn = 0  # counts the buffers taken from the ring
        self._open: dict[int, OpenSum] = {}
        self._sums_landed: dict[int, Event] = {}  # of accumulators that wait on the host
        self._started: set[int] = set()  # blocks that an earlier group, or this one, added to
        self._only_measured: Collection[int] = ()

    def _in_turn(self, numels: Sequence[int]) -> list[Buffer]:
        """Buffers that blocks without one of their own pass through."""
        passing = [numel for block, numel in enumerate(numels) if block not in self.own]
        sizes = sum_buffers(passing, self.travels or self.host_sums is not None)
        return [Buffer(torch.zeros(size, device=self.compute.device)) for size in sizes]

    def begin_step(self, *, only_measured: Collection[int] = ()) -> None:
        """Forget earlier sums. only_measured: blocks that the norm counts; the sink gets none."""
        self._only_measured = only_measured
        self._started.clear()
        self._sums_landed.clear()
        self._open.clear()  # of a step that was abandoned

    def open(self, block: int) -> None:
        """Make a block's sum ready: empty in the step's first group, else as earlier ones left."""
        if block in self._open or not self.layouts[block].numel:
            return  # a tied embedding is opened by the head and closed by embed
        buffer = self._own.get(block)
        in_turn, later = buffer is None, block in self._started
        if buffer is None:
            self._turn += 1
            buffer = self._ring[self._turn % len(self._ring)]
        self._open[block] = self._begin(block, buffer, in_turn, later)
        self._started.add(block)

    def _begin(self, block: int, buffer: Buffer, in_turn: bool, later: bool) -> OpenSum:
        """A block's open sum. in_turn: in a buffer of the ring. later: a group has added to it."""
        opened = self._sums_in(block, buffer, empty=not later)
        if later and in_turn:
            opened.arriving = self._fetch_sum(block, buffer)
        return opened

    def _sums_in(self, block: int, buffer: Buffer, *, empty: bool) -> OpenSum:
        layout = self.layouts[block]
        flat = buffer.flat[: layout.numel]
        if empty:
            # wait: what the buffer held before still leaves
            self.compute.wait(buffer.free, self.leaves_by)
            # the padding: sums write tensors alone, and another block's values may lie between
            for start, stop in layout.gaps():
                flat[start:stop].zero_()
        return OpenSum(buffer, {name: Sum(v, empty) for name, v in layout.views(flat).items()})

    def _fetch_sum(self, block: int, buffer: Buffer) -> Event:
        """Queue the way back of an accumulator that waits on the host."""
        assert self.host_sums is not None
        source = self.host_sums(block)
        target = buffer.flat[: len(source)]
        # wait: another block's sum still leaves this buffer; this one may be on its way down
        before = buffer.free, self._sums_landed[block]
        buffer.free = self.upload.after(before, lambda: target.copy_(source, non_blocking=True))
        return buffer.free

    def add(self, block: int, gradients: Sequence[Tensor | None]) -> None:
        """Add a micro-batch's gradients, in layout order, to open sums; None is zero."""
        add_gradients([*self.sums(block).values()], gradients)

    def sums(self, block: int) -> dict[str, Sum]:
        """The open sums of a block's tensors by name, to be added to by what is computed next."""
        if not self.layouts[block].numel:
            return {}
        opened = self._open[block]
        self.compute.wait(opened.arriving, "upload")  # wait: earlier groups' sums are on their way
        opened.arriving = None
        return opened.sums

    def close(self, block: int, *, last_group: bool) -> None:
        """End a block's backward of a group; of the last one, hand its gradient to the sink."""
        if not self.layouts[block].numel:
            return
        for open_sum in self.sums(block).values():
            open_sum.fill()
        opened = self._open.pop(block)
        if last_group:
            self._finish(block, opened)
        elif block not in self._own:
            self._put_by(block, opened)

    def _put_by(self, block: int, opened: OpenSum) -> None:
        """Let a sum wait on the host for the next group."""
        assert self.host_sums is not None
        target = self.host_sums(block)
        landed = self._send((opened.buffer.flat[: len(target)], target))
        opened.buffer.free = self._sums_landed[block] = landed

    def _finish(self, block: int, opened: OpenSum) -> None:
        """Measure the gradient as it will be applied, rounded, and send it on its way."""
        total = opened.buffer.flat[: self.layouts[block].numel]
        if block in self._only_measured:
            self._square_sums[block] = square_sum(self._rounded(total))
            return
        target, scalar = self.sink.place(block), self._landed_square_sums[block : block + 1]
        if block < self.resident:
            values = total if target is None else target.copy_(total)
            applied = self._rounded(total) if target is None else values
            self._square_sums[block] = square_sum(applied)
            self.sink.take(Gradient(block, values, self.compute.record(), scalar))
            return
        assert target is not None
        finished = self._rounded(total)
        self._square_sums[block] = square_sum(finished)
        opened.buffer.free = self.compute.record()  # from here on only the staging buffer is read
        landed = self._send((finished, target), (self._square_sums[block : block + 1], scalar))
        self._staging.free = landed
        self.sink.take(Gradient(block, target, landed, scalar))

    def _rounded(self, total: Tensor) -> Tensor:
        """`total` in the gradients' dtype, in the staging buffer."""
        # wait: an earlier gradient still leaves it
        self.compute.wait(self._staging.free, "download")
        return self._staging.flat[: total.numel()].copy_(total)

    def _send(self, *copies: tuple[Tensor, Tensor], after: Event | None = None) -> Event:
        """Download what was computed so far, or is there after an event, each (source, target)."""

        def copy() -> None:
            for source, target in copies:
                target.copy_(source, non_blocking=True)

        # wait: the gradient must have been computed
        return self.download.after([after or self.compute.record()], copy)

    def norm(self, finished: Sequence[Gradient]) -> float:
        """Global L2 norm of finished gradients as they will be applied. Waits for no download."""
        for gradient in finished:
            gradient.landed.wait_host()  # raises what a download failed with, before any update
        self._square_sums_host.copy_(self._square_sums, non_blocking=True)
        self.compute.synchronize()  # wait: the sums of squares must have been computed
        return float(self._square_sums_host.double().sum().sqrt())


def square_sum(flat: Tensor) -> Tensor:
    """Sum of squares of a flat array of any dtype, an fp32 scalar."""
    return sum_of_squares(row_norms(flat))


def row_norms(flat: Tensor) -> Tensor:
    """The fp32 norm of every BLOCK_ALIGNMENT elements: no long chain of additions loses digits."""
    rows = flat.view(-1, BLOCK_ALIGNMENT)
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32)
    return norms


def sum_of_squares(norms: Tensor) -> Tensor:
    """The sum of squares of all rows, from their norms."""
    return norms.double().square().sum().float()
