"""The layers' inputs between forward and backward: where they lie, or in host RAM, sent down and fetched back beside the computation.

What a retained layer's graph saved may wait in host RAM beside them. A codec may keep inputs in fewer bits, here or there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from megatrain.engine.activations.codecs import Codec
from megatrain.engine.streams import Compute, Event, Lane
from megatrain.memory.layout import round_up
from megatrain.memory.slab import Slab
from megatrain.schedule import rings

TOUCHING_THREADS = 8  # for the first touch of host memory
ALIGNMENT = 64  # bytes, of tensors that travel together

Kept = Any  # what `Boundaries.park` returns


class Boundaries(Protocol):
    """Keeps hidden states [batch, tokens, hidden] of one group of micro-batches at a time."""

    def begin_group(self, tokens: Sequence[int], layers: int, graphs: int = 0) -> None:
        """Make room for the inputs of `layers` layers and what `graphs` more saved, of micro-batches of so many tokens each."""

    def park(self, hidden: torch.Tensor) -> Kept:
        """Keep a boundary. The caller lets go of it."""

    def expect(self, kept: Iterable[Kept]) -> None:
        """All that is kept, in the order in which it will be taken."""

    def take(self, kept: Kept) -> torch.Tensor:
        """The boundary on the device, valid until `release`."""

    def release(self, kept: Kept) -> None:
        """What was computed so far has read what was taken; it is not needed again."""

    def close(self) -> None:
        """Give memory back; no transfer may be under way."""


class OnDevice:
    """Boundaries stay where they are; or what a codec made of them does."""

    def __init__(self, codec: Codec | None = None) -> None:
        self.codec = codec

    def begin_group(self, tokens: Sequence[int], layers: int, graphs: int = 0) -> None: ...

    def park(self, hidden: torch.Tensor) -> Kept:
        if self.codec is None:
            return hidden
        place = Place.of(hidden, self.codec)
        flat = torch.empty(place.nbytes, dtype=torch.uint8, device=hidden.device)
        place.write(hidden, flat)
        return place, flat

    def expect(self, kept: Iterable[Kept]) -> None: ...

    def take(self, kept: Kept) -> torch.Tensor:
        if self.codec is None:
            hidden: torch.Tensor = kept
            return hidden
        place: Place = kept[0]
        return place.read(kept[1])

    def release(self, kept: Kept) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Place:
    """Where in a stretch of bytes a contiguous tensor lies, or what a codec made of it."""

    start: int
    nbytes: int
    shape: torch.Size
    dtype: torch.dtype
    codec: Codec | None = None

    @classmethod
    def of(cls, hidden: torch.Tensor, codec: Codec | None) -> Place:
        """At the beginning."""
        return cls(
            0,
            codec.nbytes(hidden.numel()) if codec else hidden.nbytes,
            hidden.shape,
            hidden.dtype,
            codec,
        )

    def write(self, tensor: torch.Tensor, flat: torch.Tensor) -> None:
        if self.codec:
            self.codec.encode(tensor, self._part(flat))
        else:
            self._view(flat).copy_(tensor)

    def read(self, flat: torch.Tensor) -> torch.Tensor:
        """What lies there, with a version counter of its own: transfers into the rest of a ring must not look like changes of it to a
        graph that saves it. What was encoded is a tensor of its own altogether."""
        return (
            self.codec.decode(self._part(flat), self.shape, self.dtype)
            if self.codec
            else self._view(flat).data
        )

    def _part(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self.start : self.start + self.nbytes]

    def _view(self, flat: torch.Tensor) -> torch.Tensor:
        return self._part(flat).view(self.dtype).view(self.shape)


@dataclass
class Parked:
    """Tensors in host RAM, and, once they were asked for, on their way back."""

    places: tuple[Place, ...]
    host: torch.Tensor  # uint8
    landed: Event
    stretch: Stretch | None = None
    arrived: Event | None = None


@dataclass
class Stretch:
    """A part of a ring, and the event after which it may be overwritten; None while that is not known."""

    start: int
    flat: torch.Tensor
    free: Event | None = None

    @property
    def stop(self) -> int:
        return self.start + self.flat.numel()


class Ring:
    """Device memory given out from the front to the end and then again, freed in the same order."""

    def __init__(self, flat: torch.Tensor) -> None:
        self.flat = flat  # uint8
        self._given: deque[Stretch] = deque()

    def take(self, nbytes: int) -> tuple[Stretch, Event | None] | None:
        """The next `nbytes`, and the event after which they are free; None if somebody still uses some of them."""
        start = round_up(self._given[-1].stop, ALIGNMENT) if self._given else 0
        if start + nbytes > self.flat.numel():
            start = 0
        reused = [
            number
            for number, old in enumerate(self._given)
            if old.start < start + nbytes and start < old.stop
        ]
        older = [self._given[number] for number in range(reused[-1] + 1 if reused else 0)]
        if any(old.free is None for old in older):
            return None
        for _ in older:
            self._given.popleft()
        self._given.append(Stretch(start, self.flat[start : start + nbytes]))
        return self._given[-1], older[-1].free if older else None

    def give_back(self, event: Event) -> None:
        """Nobody will use what was given out after `event`."""
        for stretch in self._given:
            stretch.free = stretch.free or event


class Room:
    """Host RAM for one kind of what is parked. It is given out from the front on, and all at once is free again."""

    def __init__(self, name: str, pinned: bool) -> None:
        self.name, self.pinned = name, pinned
        self._slabs: list[Slab] = []
        self._slab = self._used = 0

    def begin(self) -> None:
        self._slab = self._used = 0

    @property
    def nbytes(self) -> int:
        return sum(slab.nbytes for slab in self._slabs)

    def take(self, nbytes: int) -> torch.Tensor:
        """The next `nbytes`; more memory, if there was less than was needed."""
        while (
            self._slab < len(self._slabs) and self._used + nbytes > self._slabs[self._slab].nbytes
        ):
            self._slab, self._used = self._slab + 1, 0
        if self._slab == len(self._slabs):
            self._slabs.append(
                Slab(self.name, nbytes, pinned=self.pinned, threads=TOUCHING_THREADS)
            )
        self._used += nbytes
        return self._slabs[self._slab].bytes[self._used - nbytes : self._used]

    def renew(self, nbytes: int) -> None:
        """So much in one piece, instead of what there was."""
        self.close()
        self._slabs = (
            [Slab(self.name, nbytes, pinned=self.pinned, threads=TOUCHING_THREADS)]
            if nbytes
            else []
        )

    def close(self) -> None:
        for slab in self._slabs:
            slab.close()
        self._slabs = []


class Offload:
    """What is parked waits in host RAM, and comes back in the order in which backward needs it.

    Copies go through rings of device memory, filled and read on the computing stream: memory that the computation frees never waits for a
    transfer.

    Args:
        row: bytes of a token's boundary, as it is kept.
        codec: of boundaries, which are encoded into a ring and decoded out of one; graphs travel as they are.
    """

    _down: Ring
    _up: Ring
    _last_down: Event
    _last_up: Event

    def __init__(
        self, row: int, compute: Compute, download: Lane, fetch: Lane, codec: Codec | None = None
    ) -> None:
        self.row, self.codec = row, codec
        self.compute, self.download, self.fetch = compute, download, fetch
        self._boundaries = Room("boundary activations", compute.is_cuda)
        self._graphs = Room("retained activations", compute.is_cuda)
        self._tokens = self._layers = 0  # of the group; and those whose graphs are parked
        self._largest = 0  # piece that the rings were made for
        self._counts = rings(1, 0)
        self._drop_rings()
        self._expected: deque[Parked] = deque()

    def begin_group(self, tokens: Sequence[int], layers: int, graphs: int = 0) -> None:
        """Make room for boundaries: on the device for the largest micro-batch, in host RAM for all. What is there stays, if enough."""
        # Behind all that an abandoned step had queued, whether or not it came to note the events of that.
        self._last_down, self._last_up = (
            lane.submit(lambda _: None) for lane in (self.download, self.fetch)
        )
        self._down.give_back(self._last_down)
        self._counts = rings(len(tokens), graphs)
        self._make_rings(max(tokens) * self.row)
        self._up.give_back(self.compute.record())  # what an abandoned step had asked for
        self._tokens, self._layers = sum(tokens), graphs
        self._expected.clear()
        self._boundaries.begin()
        self._graphs.begin()
        self._make_room(self._boundaries, layers * sum(tokens) * self.row)

    def _make_rings(self, largest: int) -> None:
        """On the device, for pieces of so many bytes."""
        nbytes, device, (leaving, coming) = (
            round_up(largest, ALIGNMENT),
            self.compute.device,
            self._counts,
        )
        if self._largest >= nbytes and self._down.flat.numel() >= leaving * nbytes:
            return
        self._settle()
        nbytes = max(nbytes, self._largest)
        self._drop_rings()  # first: there may be no room for both
        self._down, self._up = (
            Ring(torch.zeros(count * nbytes, dtype=torch.uint8, device=device))
            for count in (leaving, coming)
        )
        self._largest, made = nbytes, self.compute.record()
        self.fetch.submit(
            lambda _: self.fetch.wait(made)
        )  # wait: zeros must be there before what is fetched

    def _drop_rings(self) -> None:
        nothing = torch.empty(0, dtype=torch.uint8, device=self.compute.device)
        self._down, self._up, self._largest = Ring(nothing), Ring(nothing), 0

    def _make_room(self, room: Room, nbytes: int) -> None:
        if room.nbytes < nbytes:
            self._settle()
            room.renew(nbytes)

    def _settle(self) -> None:
        """Wait for all transfers, an abandoned step's too."""
        for event in (self._last_down, self._last_up):
            event.synchronize()

    def park(self, hidden: torch.Tensor) -> Parked:
        """Send a boundary to the host; its device memory may be used again as soon as what was computed so far is done."""
        place = Place.of(hidden, self.codec)
        return self._send([hidden], [place], place.nbytes, self._boundaries)

    def park_all(self, tensors: Sequence[torch.Tensor], tokens: int) -> Parked:
        """Send what a graph of so many tokens saved, contiguous. The first one of a group shows how much room all will need."""
        places, nbytes = [], 0
        for tensor in tensors:
            places.append(Place(nbytes, tensor.nbytes, tensor.shape, tensor.dtype))
            nbytes += round_up(tensor.nbytes, ALIGNMENT)
        self._make_rings(nbytes)
        if self._layers:
            self._make_room(
                self._graphs, round_up(nbytes * self._tokens // tokens, ALIGNMENT) * self._layers
            )
            self._layers = 0
        return self._send(tensors, places, nbytes, self._graphs)

    def _send(
        self, tensors: Sequence[torch.Tensor], places: Sequence[Place], nbytes: int, room: Room
    ) -> Parked:
        given = self._down.take(nbytes)
        assert given is not None, "every stretch has its event once its download is queued"
        stretch, free = given
        self.compute.wait(free, "download")  # wait: what was sent before still leaves this stretch
        for tensor, place in zip(tensors, places, strict=True):
            place.write(tensor, stretch.flat)
        ready, host = self.compute.record(), room.take(nbytes)

        def job(_: Event) -> None:
            self.download.wait(ready)  # wait: all must be in the ring
            host.copy_(stretch.flat, non_blocking=True)

        stretch.free = self._last_down = landed = self.download.submit(job)
        return Parked(tuple(places), host, landed)

    def expect(self, kept: Iterable[Parked]) -> None:
        """What is parked, in the order in which it will be taken; the first start on their way back now."""
        self._expected = deque(kept)
        self._ask()

    def _ask(self) -> None:
        """Fetch what comes next, as far as there is room."""
        while self._expected and (given := self._up.take(self._expected[0].host.numel())):
            parked, (stretch, free) = self._expected.popleft(), given
            parked.stretch = stretch
            parked.arrived = self._last_up = self.fetch.submit(
                partial(self._bring, parked, stretch.flat, free)
            )

    def _bring(self, parked: Parked, target: torch.Tensor, free: Event | None, _: Event) -> None:
        self.fetch.wait(free)  # wait: the computation may still read what lay there
        self.fetch.wait(parked.landed)  # wait: this may still be on its way down
        target.copy_(parked.host, non_blocking=True)

    def take(self, parked: Parked) -> torch.Tensor:
        """A boundary, on the device: valid until `release`."""
        (hidden,) = self.take_all(parked)
        return hidden

    def take_all(self, parked: Parked) -> list[torch.Tensor]:
        """What was parked, on the device: valid until `release`. All is taken in the order that `expect` was told."""
        assert parked.stretch is not None, "taken out of order"
        self.compute.wait(parked.arrived, "upload")
        return [place.read(parked.stretch.flat) for place in parked.places]

    def release(self, parked: Parked) -> None:
        """What was computed so far has read it; the next one may come into its place."""
        assert parked.stretch is not None
        parked.stretch.free = self.compute.record()
        self._ask()

    def close(self) -> None:
        self._boundaries.close()
        self._graphs.close()
        self._drop_rings()
