"""Activations between forward and backward, on the device or in host RAM: activation checkpoints
(inputs of recomputed layers), which a codec may keep in fewer bits, and what retained graphs saved.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Final, Literal

import torch
from torch import Tensor

from megatrain.engine.codecs import GroupScaled
from megatrain.engine.streams import Compute, Event, Lane
from megatrain.memory.layout import round_up
from megatrain.memory.slab import Slab, slabs_of
from megatrain.schedule import rings

TOUCHING_THREADS = 8  # for the first touch of host memory
ALIGNMENT = 64  # bytes, of tensors that travel together

Kept = Any  # what `save` returns
Kind = Literal["checkpoint", "graph"]
CHECKPOINT: Final = "checkpoint"  # of a recomputed layer
GRAPH: Final = "graph"  # what a retained layer's saved


class OnDevice:
    """Activation checkpoints stay on the device, or what a codec made of them. As `Offload`."""

    def __init__(self, codec: GroupScaled | None = None) -> None:
        self.codec = codec

    def begin_group(self, tokens: Sequence[int]) -> None: ...

    def save(self, tensors: Sequence[Tensor]) -> Kept:
        if not self.codec:
            return tensors
        (hidden,) = tensors
        flat = hidden.new_empty(self.codec.nbytes(hidden.numel()), dtype=torch.uint8)
        self.codec.encode(hidden, flat)
        return flat, hidden.shape, hidden.dtype

    def prefetch(self, kept: Iterable[Kept]) -> None: ...

    def restore(self, kept: Kept) -> Sequence[Tensor]:
        return [self.codec.decode(*kept)] if self.codec else kept

    def free(self, kept: Kept) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Extent:
    """The place of a contiguous tensor, or of its codes, in a stretch of bytes."""

    start: int
    nbytes: int
    shape: torch.Size
    dtype: torch.dtype
    codec: GroupScaled | None = None

    def write(self, tensor: Tensor, flat: Tensor) -> None:
        place = flat[self.start : self.start + self.nbytes]
        if self.codec:
            self.codec.encode(tensor, place)
        else:
            place.view(self.dtype).view(self.shape).copy_(tensor)

    def read(self, flat: Tensor) -> Tensor:
        """The tensor, in `flat` or decoded from it."""
        place = flat[self.start : self.start + self.nbytes]
        if self.codec:
            return self.codec.decode(place, self.shape, self.dtype)
        # With a version counter of its own: to a graph that saves it, transfers into the rest of a
        # ring must not look like changes of it.
        return place.view(self.dtype).view(self.shape).data


@dataclass
class Stretch:
    """A part of a ring. `free`: the event after which it may be overwritten, once that is known."""

    start: int
    flat: Tensor
    free: Event | None = None

    @property
    def stop(self) -> int:
        return self.start + self.flat.numel()


@dataclass
class HostCopy:
    """Tensors in host RAM. `stretch`, `arrived`: of their way back, once that was asked for."""

    kind: Kind
    places: Sequence[Extent]
    host: Tensor  # uint8
    landed: Event
    stretch: Stretch | None = None
    arrived: Event | None = None


class Ring:
    """Device memory handed out from front to end, again and again, and freed in the same order."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.flat = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self._given: deque[Stretch] = deque()

    def take(self, nbytes: int) -> tuple[Stretch, Event | None] | None:
        """The next `nbytes`, and the event after which they are free; None if that is not known."""
        start = round_up(self._given[-1].stop, ALIGNMENT) if self._given else 0
        if start + nbytes > self.flat.numel():
            start = 0
        stop, given = start + nbytes, enumerate(self._given, 1)
        overlap = (number for number, old in given if old.start < stop and start < old.stop)
        older = list(islice(self._given, max(overlap, default=0)))  # up to the last that overlaps
        if any(old.free is None for old in older):
            return None
        for _ in older:
            self._given.popleft()
        self._given.append(Stretch(start, self.flat[start:stop]))
        return self._given[-1], older[-1].free if older else None

    def give_back(self, event: Event) -> None:
        """Mark everything that was handed out as free after `event`."""
        for stretch in self._given:
            stretch.free = stretch.free or event


class Room:
    """Host RAM for one kind of activations, handed out from the front until the next `begin`. The
    first time it is taken slab by slab: the device computes while pages are touched and pinned."""

    def __init__(self, name: str, pinned: bool) -> None:
        self._made = partial(slabs_of, name, pinned=pinned, threads=TOUCHING_THREADS, touched=False)
        self._slabs: list[Slab] = []
        self.reserve(())

    def begin(self) -> None:
        """All of it is free again."""
        self._slab = self._used = 0

    def reserve(self, layers: Sequence[int]) -> None:
        """Be as large as what layers send, in this order; what was there is given back."""
        while self._slabs:
            self._slabs.pop().close()
        self.nbytes, self._coming = sum(layers), (slab for slab, _ in self._made(layers))
        self.begin()

    def take(self, nbytes: int) -> Tensor:
        """The next `nbytes`, of more memory if there is not enough."""
        while True:
            if self._slab == len(self._slabs):
                whole, self.nbytes = self.nbytes, 0  # until it is there: a failed room is made anew
                self._slabs.append(next(self._coming, None) or next(self._made([nbytes]))[0])
                self.nbytes = whole
            found = self._slabs[self._slab].bytes[self._used :][:nbytes]
            self._used += nbytes
            if len(found) == nbytes:
                return found
            self._slab, self._used = self._slab + 1, 0


@dataclass(eq=False)
class Offload:
    """Activations wait in host RAM, and come back in the order in which backward needs them.

    Copies go through rings of device memory (schedule.rings), which the compute stream fills and
    reads: memory that the computation frees never waits for a transfer. All that is sent belongs
    to one accumulation group.
    """

    rows: Sequence[int]  # bytes a token that each recomputed layer keeps
    graphs: int  # layers whose graphs send what they saved
    compute: Compute
    download: Lane
    fetch: Lane
    codec: GroupScaled | None = None  # of checkpoints; what graphs saved travels as it is
    _down: Ring = field(init=False)
    _up: dict[Kind, Ring] = field(init=False)
    _largest: dict[Kind, int] = field(init=False)  # bytes of the pieces that rings were made for

    def __post_init__(self) -> None:
        names = ((CHECKPOINT, "activation checkpoints"), (GRAPH, "retained activations"))
        self._rooms = {kind: Room(name, self.compute.is_cuda) for kind, name in names}
        self._tokens = self._micro_batches = self._layers = 0  # of the group; graphs without room
        self._drop_rings()
        self._expected: deque[HostCopy] = deque()
        self._last_down = self._last_up = self.compute.record()

    def begin_group(self, tokens: Sequence[int]) -> None:
        """Make room for what layers keep of micro-batches of so many tokens: on the device for the
        largest, in host RAM for all. Memory stays if it suffices."""
        # behind everything that an abandoned step has queued, whether or not it noted the events
        self._last_down = self.download.submit(lambda _: None)
        self._last_up = self.fetch.submit(lambda _: None)
        self._down.give_back(self._last_down)
        self._micro_batches, self._tokens, self._layers = len(tokens), sum(tokens), self.graphs
        # without micro-batches there is nothing to keep
        self._make_rings(CHECKPOINT, max(tokens, default=0) * max(self.rows, default=0))
        for ring in self._up.values():
            ring.give_back(self.compute.record())  # what an abandoned step has asked for
        self._expected.clear()
        for room in self._rooms.values():
            room.begin()
        self._make_room(CHECKPOINT, [sum(tokens) * row for row in self.rows])

    def _make_rings(self, kind: Kind, nbytes: int) -> None:
        """Rings for pieces of a kind, of `nbytes` at most."""
        largest = self._largest | {kind: max(self._largest[kind], round_up(nbytes, ALIGNMENT))}
        need = rings(self._micro_batches, self.graphs, largest[CHECKPOINT], largest[GRAPH])
        if largest == self._largest and self._down.flat.numel() >= need.down:
            return
        self._settle()
        self._drop_rings()  # first: there may be no room for both
        self._set_rings(need)
        # wait: zeros must be there before what is fetched
        self.fetch.after([self.compute.record()], lambda: None)
        self._largest = largest  # last: after a failure the rings are made again

    def _drop_rings(self) -> None:
        self._set_rings((0, 0, 0))
        self._largest = dict.fromkeys(self._up, 0)

    def _set_rings(self, sizes: Iterable[int]) -> None:
        self._down, checkpoints, graphs = (Ring(each, self.compute.device) for each in sizes)
        self._up = {CHECKPOINT: checkpoints, GRAPH: graphs}

    def _make_room(self, kind: Kind, layers: Sequence[int]) -> None:
        """Host RAM for what layers send of a kind, if there was less."""
        room = self._rooms[kind]
        if room.nbytes < sum(layers):
            self._settle()
            room.reserve(layers)

    def _settle(self) -> None:
        """Wait for all transfers, an abandoned step's too: their memory is about to go."""
        self._last_down.synchronize()
        self._last_up.synchronize()

    def save(self, tensors: Sequence[Tensor]) -> HostCopy:
        """Send a layer's input and what its attention keeps to the host; their memory is free."""
        return self._send(CHECKPOINT, tensors, self.codec)

    def save_graph(self, tensors: Sequence[Tensor], tokens: int) -> HostCopy:
        """Send what the graph of a micro-batch of `tokens` tokens saved, contiguous tensors."""
        return self._send(GRAPH, tensors, None, tokens)

    def _send(
        self, kind: Kind, tensors: Sequence[Tensor], codec: GroupScaled | None, tokens: int = 0
    ) -> HostCopy:
        places, nbytes = list[Extent](), 0
        for tensor in tensors:
            start = round_up(nbytes, ALIGNMENT)
            nbytes = start + (codec.nbytes(tensor.numel()) if codec else tensor.nbytes)
            places.append(Extent(start, nbytes - start, tensor.shape, tensor.dtype, codec))
        self._make_rings(kind, nbytes)
        if tokens and self._layers:  # a group's first graph sizes the host buffer for all of them
            of_layer = round_up(nbytes * self._tokens // tokens, ALIGNMENT)
            self._make_room(kind, [of_layer * self._layers])  # one slab: other layers may send more
            self._layers = 0
        given = self._down.take(nbytes)
        assert given is not None, "every stretch has its event once its download is queued"
        stretch, free = given
        self.compute.wait(free, "download")  # wait: what was sent before still leaves this stretch
        for tensor, place in zip(tensors, places, strict=True):
            place.write(tensor, stretch.flat)
        # wait: all must be in the ring
        ready, host = self.compute.record(), self._rooms[kind].take(nbytes)
        landed = self.download.after([ready], lambda: host.copy_(stretch.flat, non_blocking=True))
        stretch.free = self._last_down = landed
        return HostCopy(kind, places, host, landed)

    def prefetch(self, kept: Iterable[HostCopy]) -> None:
        """Start to fetch what will be restored, in this order."""
        self._expected = deque(kept)
        self._ask()

    def _ask(self) -> None:
        """Fetch what comes next, as far as its ring has room."""
        while self._expected:
            sent = self._expected[0]
            given = self._up[sent.kind].take(self._largest[sent.kind])
            if given is None:
                return
            self._expected.popleft()
            sent.stretch, free = given
            # wait: the computation may still read what was there, and this be on its way down
            bring = partial(sent.stretch.flat[: sent.host.numel()].copy_, sent.host, True)
            sent.arrived = self._last_up = self.fetch.after([free, sent.landed], bring)

    def restore(self, sent: HostCopy) -> Sequence[Tensor]:
        """Tensors that were sent, on the device until `free`; in the order of `prefetch`."""
        assert sent.stretch is not None, "restored out of order"
        self.compute.wait(sent.arrived, "upload")  # wait: it is on its way up
        return [place.read(sent.stretch.flat) for place in sent.places]

    def free(self, sent: HostCopy) -> None:
        """Let another come into its place once everything computed so far has read it."""
        assert sent.stretch is not None
        sent.stretch.free = self.compute.record()
        self._ask()

    def close(self) -> None:
        """Free the memory; no transfer may be under way."""
        for room in self._rooms.values():
            room.reserve(())
        self._drop_rings()


Checkpoints = OnDevice | Offload
