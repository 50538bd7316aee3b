"""Directions of whole-tensor updates, of several ranks: each makes those of its share of a block,
and needs whole matrices to make them orthogonal.

The ranks gather a block's directions on the device. There each orthogonalises the matrices of which
it owns a part, and keeps that part. Where a matrix has several owners, all compute the same bits.

The gathers pass through the exchange's lane, in the order in which the computing thread asks for
them: of a resident block when it is updated, of another when the next sweep is about to need it.
Were they all asked for at once, the first block's weights would wait in that lane for the host's
update of the last block. Updates that begin in backward are asked for there.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatrain.engine.exchange import Exchange
from megatrain.engine.streams import Compute, Event
from megatrain.engine.workspace import HostWorkspace
from megatrain.errors import MegaTrainError
from megatrain.memory.layout import Span
from megatrain.optim.whole_tensors import DIRECTION_BYTES, TensorState
from megatrain.schedule import DIRECTIONS_AHEAD


class Directions:
    """Memory on the device in which ranks gather the directions of one block after another.

    Args:
        shares: elements that each rank has of every block's directions, or 0.
    """

    def __init__(self, exchange: Exchange, shares: Sequence[int], device: torch.device) -> None:
        self._exchange, self._shares, size = exchange, shares, exchange.world.size
        largest = max(shares)
        # zeros: what is gathered behind a short share is never read, and no NaN either
        self._share = torch.zeros(largest, dtype=torch.bfloat16, device=device)
        self._whole = torch.zeros(size * largest, dtype=torch.bfloat16, device=device)
        self.read: Event | None = None  # completes when the last block's were read
        self.slowest = exchange.slowest

    def of(self, block: int) -> Tensor:
        """Where a block's directions come together, from its first element on."""
        return self._whole[: self._exchange.world.size * self._shares[block]]

    def gather(self, block: int, mine: Tensor, ready: Event, read: Event | None) -> Event:
        """Queue it. ready: of this rank's share. read: the caller completes it, or sets `read`."""
        lane, whole, share = self._exchange.lane, self.of(block), self._share[: self._shares[block]]
        before, self.read = self.read, read

        def job(_: Event) -> None:
            lane.wait(ready)  # wait: this rank's share is being computed
            lane.wait(before)  # wait: the block before is still read from there
            share[: len(mine)].copy_(mine, non_blocking=True)
            self._exchange.gather(whole, share)

        return lane.submit(job)


@dataclass
class Turn:
    """The directions of one block in host RAM.

    Attributes:
        ready, read: completed by the update: this rank's share is there; what was gathered is no
            longer read.
        gathered: set to the event with which all ranks' are on the device, once asked for.
    """

    block: int
    mine: Tensor
    ready: Event = field(default_factory=Event)
    read: Event = field(default_factory=Event)
    gathered: Future[Event] = field(default_factory=Future)

    def fail(self, error: BaseException) -> None:
        """Let nobody wait for an update that does not go on."""
        for event in (self.ready, self.read):
            if not event.host.is_set():
                event.finish(error)


class Turns:
    """Those that are not yet asked for, in the order of updates."""

    def __init__(self, directions: Directions) -> None:
        self._directions = directions
        self._waiting: deque[Turn] = deque()
        self._lock = threading.Lock()

    def add(self, turn: Turn) -> None:
        self._waiting.append(turn)

    def ask(self, block: int | None = None) -> None:
        """Ask for those up to a block's and DIRECTIONS_AHEAD more, or for all; on all ranks at one
        place."""
        with self._lock:
            waiting, count = self._waiting, len(self._waiting)
            if block is not None:
                places = [place for place, turn in enumerate(waiting) if turn.block == block]
                count = min(count, places[0] + 1 + DIRECTIONS_AHEAD) if places else 0
            for _ in range(count):
                turn = waiting[0]
                asked = self._directions.gather(turn.block, turn.mine, turn.ready, turn.read)
                turn.gathered.set_result(asked)
                waiting.popleft()

    def close(self) -> None:
        """Updates whose turn has not come never end."""
        while self._waiting:
            error = MegaTrainError("the engine is closed")
            self._waiting.popleft().gathered.set_exception(error)


class SharedHostWorkspace(HostWorkspace):
    """For blocks in host RAM, one after another, of which this rank owns spans.

    Attributes:
        gathers: of the ranks, set before the first update.
    """

    gathers: Directions
    _turn: Turn | None
    _span: Span

    def turn(self, block: int, span: Span) -> Turn:
        """For the next update of a block."""
        assert self._slab is not None
        nbytes = DIRECTION_BYTES * span.numel
        return Turn(block, self._slab.bytes[:nbytes].view(torch.bfloat16))

    def begin(self, turn: Turn | None, span: Span) -> None:
        """With a block; without a turn nothing of it is made orthogonal."""
        self._turn, self._span = turn, span

    def directions(self, tensor: TensorState) -> Tensor:
        assert self._turn is not None
        return _of_share(self._turn.mine, tensor, self._span)

    def whole(self, tensor: TensorState, direction: Tensor) -> Tensor:
        assert self._turn is not None
        return tensor.spec.flat(self.gathers.of(self._turn.block))

    def replace(self, function: Callable[[Tensor], Tensor], tensors: Sequence[Tensor]) -> None:
        turn, span = self._turn, self._span
        if turn is None:
            return
        turn.ready.finish()
        gathered = turn.gathered.result()  # wait: until the next sweep asks for this block
        gathered.wait_host()
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            if self._stream is not None:
                self._stream.wait_event(gathered.cuda)  # wait: other ranks' are on their way
            for tensor in tensors:
                if self.delay is not None:
                    self.delay()
                tensor.copy_(function(tensor))
            mine = self.gathers.of(turn.block)[span.start : span.stop]
            turn.mine.copy_(mine, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()  # wait: the host reads next what comes down
        turn.read.finish()


class SharedInPlace:
    """For a resident block, of which this rank owns a span, on the stream that computes."""

    def __init__(self, gathers: Directions, block: int, span: Span, compute: Compute) -> None:
        self._gathers, self._block, self._span, self._compute = gathers, block, span, compute
        self._mine = torch.empty(span.numel, dtype=torch.bfloat16, device=compute.device)

    def directions(self, tensor: TensorState) -> Tensor:
        return _of_share(self._mine, tensor, self._span)

    def whole(self, tensor: TensorState, direction: Tensor) -> Tensor:
        return tensor.spec.flat(self._gathers.of(self._block))

    def replace(self, function: Callable[[Tensor], Tensor], tensors: Sequence[Tensor]) -> None:
        gathers, compute = self._gathers, self._compute
        gathered = gathers.gather(self._block, self._mine, compute.record(), None)
        compute.wait(gathered, gathers.slowest)  # wait: other ranks' are on their way
        for tensor in tensors:
            tensor.copy_(function(tensor))
        self._mine.copy_(gathers.of(self._block)[self._span.start : self._span.stop])
        gathers.read = compute.record()


def _of_share(mine: Tensor, tensor: TensorState, span: Span) -> Tensor:
    """What of a block's directions belongs to a tensor, both as far as they are here."""
    start = tensor.spec.offset + tensor.first - span.start
    return mine[start : start + tensor.numel]
