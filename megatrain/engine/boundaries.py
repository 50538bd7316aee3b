"""The layers' inputs between forward and backward: where they lie, or in host RAM, sent down and fetched back beside the computation."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megatrain.engine.gradients import Buffer
from megatrain.engine.streams import Compute, Event, Lane
from megatrain.memory.slab import Slab

TOUCHING_THREADS = 8
BUFFERS = 2  # on the device, in either direction: one travels while the other is filled or read


Kept = Any  # what `Boundaries.park` returns


class Boundaries(Protocol):
    """Keeps hidden states [batch, tokens, hidden] of one group of micro-batches at a time."""

    def begin_group(self, tokens: Sequence[int], layers: int) -> None:
        """Make room for the inputs of `layers` layers, of micro-batches of so many tokens each."""

    def park(self, hidden: torch.Tensor) -> Kept:
        """Keep a boundary. The caller lets go of it."""

    def expect(self, boundaries: Iterable[Kept]) -> None:
        """All kept boundaries in the order in which they will be taken."""

    def take(self, kept: Kept) -> torch.Tensor:
        """The boundary on the device, valid until `release`."""

    def release(self, kept: Kept) -> None:
        """What was computed so far has read the boundary; it is not needed again."""

    def close(self) -> None:
        """Give memory back; no transfer may be under way."""


class OnDevice:
    """Boundaries stay where they are."""

    def begin_group(self, tokens: Sequence[int], layers: int) -> None: ...

    def park(self, hidden: torch.Tensor) -> Kept:
        return hidden

    def expect(self, boundaries: Iterable[Kept]) -> None: ...

    def take(self, kept: Kept) -> torch.Tensor:
        hidden: torch.Tensor = kept
        return hidden

    def release(self, kept: Kept) -> None: ...

    def close(self) -> None: ...


@dataclass
class Parked:
    """A boundary [batch, tokens, hidden] in host RAM, and, once it was asked for, on its way back."""

    shape: torch.Size
    host: torch.Tensor
    landed: Event
    buffer: Buffer | None = None
    arrived: Event | None = None


class Offload:
    """Boundaries wait in host RAM, and come back in the order in which backward needs them.

    Copies go through a few device buffers, filled and emptied on the computing stream: memory that the computation frees never waits for a
    transfer.
    """

    def __init__(self, width: int, dtype: torch.dtype, compute: Compute, download: Lane, fetch: Lane) -> None:
        self.width, self.dtype = width, dtype
        self.compute, self.download, self.fetch = compute, download, fetch
        self._slab: Slab | None = None
        self._used = 0
        self._down: list[Buffer] = []
        self._up: list[Buffer] = []
        self._sent = self._asked = 0
        self._last_down: Event | None = None
        self._last_up: Event | None = None
        self._expected: deque[Parked] = deque()

    def begin_group(self, tokens: Sequence[int], layers: int) -> None:
        """Make room: on the device for the largest micro-batch, in host RAM for all. What is there stays, if it is enough."""
        largest, nbytes = max(tokens) * self.width, sum(tokens) * layers * self.width * self.dtype.itemsize
        if not self._down or self._down[0].flat.numel() < largest:
            self._down, self._up = (
                [Buffer(torch.zeros(largest, dtype=self.dtype, device=self.compute.device), self.compute.record()) for _ in range(BUFFERS)]
                for _ in range(2)
            )
        if self._slab is None or self._slab.nbytes < nbytes:
            for event in (self._last_down, self._last_up):
                if event is not None:
                    event.synchronize()  # wait: transfers of an abandoned step may still use the old one
            self.close()
            self._slab = Slab("boundary activations", nbytes, pinned=self.compute.is_cuda, threads=TOUCHING_THREADS)
        self._used = 0
        self._expected.clear()

    def park(self, hidden: torch.Tensor) -> Parked:
        """Send a boundary to the host; its device memory may be used again as soon as what was computed so far is done."""
        host = self._take(hidden.numel())
        buffer = self._down[self._sent % BUFFERS]
        self._sent += 1
        self.compute.wait(buffer.free, "download")  # wait: an earlier boundary still leaves this buffer
        staged = buffer.flat[: hidden.numel()]
        staged.view(hidden.shape).copy_(hidden)
        ready = self.compute.record()

        def job(_: Event) -> None:
            self.download.wait(ready)  # wait: the boundary must be in the buffer
            host.copy_(staged, non_blocking=True)

        buffer.free = self._last_down = landed = self.download.submit(job)
        return Parked(hidden.shape, host, landed)

    def _take(self, elements: int) -> torch.Tensor:
        assert self._slab is not None
        whole = self._slab.bytes[: self._slab.nbytes].view(self.dtype)
        self._used += elements
        return whole[self._used - elements : self._used]

    def expect(self, boundaries: Iterable[Parked]) -> None:
        """The parked boundaries in the order in which they will be taken; the first start on their way back now."""
        self._expected = deque(boundaries)
        for _ in range(BUFFERS):
            self._ask()

    def _ask(self) -> None:
        if not self._expected:
            return
        parked = self._expected.popleft()
        buffer = parked.buffer = self._up[self._asked % BUFFERS]
        self._asked += 1
        free, landed, host = buffer.free, parked.landed, parked.host
        target = buffer.flat[: host.numel()]

        def job(_: Event) -> None:
            self.fetch.wait(free)  # wait: the computation may still read the boundary that this buffer held
            self.fetch.wait(landed)  # wait: this boundary may still be on its way down
            target.copy_(host, non_blocking=True)

        parked.arrived = self._last_up = self.fetch.submit(job)

    def take(self, parked: Parked) -> torch.Tensor:
        """The boundary, on the device: valid until `release`. Boundaries are taken in the order that `expect` was told."""
        assert parked.buffer is not None, "taken out of order"
        self.compute.wait(parked.arrived, "upload")
        return parked.buffer.flat[: parked.host.numel()].view(parked.shape)

    def release(self, parked: Parked) -> None:
        """What was computed so far has read the boundary; the next one may come into its place."""
        assert parked.buffer is not None
        parked.buffer.free = self.compute.record()
        self._ask()

    def close(self) -> None:
        if self._slab is not None:
            self._slab.close()
            self._slab = None
