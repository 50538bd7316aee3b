"""Activations between forward and backward: on the device, or in host RAM, sent down and fetched
back beside the computation.

These are the activation checkpoints (layers' inputs) of recomputed layers, which a codec may keep
in fewer bits, and in host RAM what a retained layer's graph saved.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Final, Literal

import torch

from megatrain.engine.codecs import GroupScaled
from megatrain.engine.streams import Compute, Event, Lane
from megatrain.memory.layout import round_up
from megatrain.memory.slab import Slab
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

    def begin_group(self, tokens: Sequence[int], layers: int, graphs: int = 0) -> None: ...

    def save(self, hidden: torch.Tensor) -> Kept:
        if self.codec is None:
            return hidden
        nbytes = self.codec.nbytes(hidden.numel())
        flat = torch.empty(nbytes, dtype=torch.uint8, device=hidden.device)
        self.codec.encode(hidden, flat)
        return flat, hidden.shape, hidden.dtype

    def prefetch(self, kept: Iterable[Kept]) -> None: ...

    def restore(self, kept: Kept) -> torch.Tensor:
        hidden: torch.Tensor = kept if self.codec is None else self.codec.decode(*kept)
        return hidden

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

    def write(self, tensor: torch.Tensor, flat: torch.Tensor) -> None:
        if self.codec:
            self.codec.encode(tensor, self._part(flat))
        else:
            self._view(flat).copy_(tensor)

    def read(self, flat: torch.Tensor) -> torch.Tensor:
        """The tensor, in `flat` or decoded from it.

        A view has a version counter of its own: to a graph that saves it, transfers into the rest
        of a ring must not look like changes of it.
        """
        if self.codec:
            return self.codec.decode(self._part(flat), self.shape, self.dtype)
        return self._view(flat).data

    def _part(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self.start : self.start + self.nbytes]

    def _view(self, flat: torch.Tensor) -> torch.Tensor:
        return self._part(flat).view(self.dtype).view(self.shape)


@dataclass
class Stretch:
    """A part of a ring. `free`: the event after which it may be overwritten, once that is known."""

    start: int
    flat: torch.Tensor
    free: Event | None = None

    @property
    def stop(self) -> int:
        return self.start + self.flat.numel()


@dataclass
class HostCopy:
    """Tensors in host RAM. `stretch`, `arrived`: of their way back, once that was asked for."""

    kind: Kind
    places: tuple[Extent, ...]
    host: torch.Tensor  # uint8
    landed: Event
    stretch: Stretch | None = None
    arrived: Event | None = None


class Ring:
    """Device memory handed out from front to end, again and again, and freed in the same order."""

    def __init__(self, flat: torch.Tensor) -> None:
        self.flat = flat  # uint8
        self._given: deque[Stretch] = deque()

    def take(self, nbytes: int) -> tuple[Stretch, Event | None] | None:
        """The next `nbytes`, and the event after which they are free.

        None if it is not known of all of them when they will be.
        """
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
    """Host RAM for one kind of activations, handed out from the front until the next `begin`."""

    def __init__(self, name: str, pinned: bool) -> None:
        self.name, self.pinned = name, pinned
        self._slabs: list[Slab] = []
        self._slab = self._used = 0

    def begin(self) -> None:
        """All of it is free again."""
        self._slab = self._used = 0

    @property
    def nbytes(self) -> int:
        return sum(slab.nbytes for slab in self._slabs)

    def take(self, nbytes: int) -> torch.Tensor:
        """The next `nbytes`, of more memory if there is not enough."""
        slabs = self._slabs
        while self._slab < len(slabs) and self._used + nbytes > slabs[self._slab].nbytes:
            self._slab, self._used = self._slab + 1, 0
        if self._slab == len(slabs):
            self._add(nbytes)
        self._used += nbytes
        return slabs[self._slab].bytes[self._used - nbytes : self._used]

    def renew(self, nbytes: int) -> None:
        """Replace the memory by `nbytes` in one piece."""
        self.close()
        if nbytes:
            self._add(nbytes)

    def _add(self, nbytes: int) -> None:
        slab = Slab(self.name, nbytes, pinned=self.pinned, threads=TOUCHING_THREADS)
        self._slabs.append(slab)

    def close(self) -> None:
        while self._slabs:
            self._slabs.pop().close()


class Offload:
    """Activations wait in host RAM, and come back in the order in which backward needs them.

    Copies go through rings of device memory (schedule.rings), which the compute stream fills and
    reads: memory that the computation frees never waits for a transfer. All that is sent belongs
    to one accumulation group.

    Args:
        row: bytes of a token's activation checkpoint, as it is kept.
        codec: encodes checkpoints into a ring, and decodes them out of one; what graphs saved
            travels as it is.
    """

    _down: Ring
    _up: dict[Kind, Ring]
    _largest: dict[Kind, int]  # bytes of the pieces that rings were made for

    def __init__(
        self,
        row: int,
        compute: Compute,
        download: Lane,
        fetch: Lane,
        codec: GroupScaled | None = None,
    ) -> None:
        self.row, self.codec = row, codec
        self.compute, self.download, self.fetch = compute, download, fetch
        self._checkpoints = Room("activation checkpoints", compute.is_cuda)
        self._graphs = Room("retained activations", compute.is_cuda)
        self._tokens = self._layers = 0  # of the group, and those whose graphs have no room yet
        self._of_group = 1.0, 0  # micro-batches, and layers that send their graphs
        self._drop_rings()
        self._expected: deque[HostCopy] = deque()
        self._last_down = self._last_up = compute.record()

    def begin_group(self, tokens: Sequence[int], layers: int, graphs: int = 0) -> None:
        """Make room for the checkpoints of `layers` layers and what the graphs of `graphs` save.

        On the device for the largest micro-batch, in host RAM for all. Memory stays if it suffices.

        Args:
            tokens: of each micro-batch of the group.
        """
        # behind everything that an abandoned step has queued, whether or not it noted the events
        self._last_down = self.download.submit(lambda _: None)
        self._last_up = self.fetch.submit(lambda _: None)
        self._down.give_back(self._last_down)
        self._of_group = len(tokens), graphs
        # without micro-batches there is nothing to keep
        self._make_rings(CHECKPOINT, max(tokens, default=0) * self.row)
        computed = self.compute.record()
        for ring in self._up.values():
            ring.give_back(computed)  # what an abandoned step has asked for
        self._tokens, self._layers = sum(tokens), graphs
        self._expected.clear()
        self._checkpoints.begin()
        self._graphs.begin()
        self._make_room(self._checkpoints, layers * sum(tokens) * self.row)

    def _make_rings(self, kind: Kind, nbytes: int) -> None:
        """Rings for pieces of a kind, of `nbytes` at most."""
        largest = self._largest | {kind: max(self._largest[kind], round_up(nbytes, ALIGNMENT))}
        need = rings(*self._of_group, largest[CHECKPOINT], largest[GRAPH])
        if largest == self._largest and self._down.flat.numel() >= need.down:
            return
        self._settle()
        self._drop_rings()  # first: there may be no room for both
        device = self.compute.device
        down, checkpoints, graphs = (
            Ring(torch.zeros(each, dtype=torch.uint8, device=device)) for each in need
        )
        self._down, self._up = down, {CHECKPOINT: checkpoints, GRAPH: graphs}
        made = self.compute.record()
        # wait: zeros must be there before what is fetched
        self.fetch.submit(lambda _: self.fetch.wait(made))
        self._largest = largest  # last: after a failure the rings are made again

    def _drop_rings(self) -> None:
        nothing = torch.empty(0, dtype=torch.uint8, device=self.compute.device)
        self._down, self._up = Ring(nothing), {CHECKPOINT: Ring(nothing), GRAPH: Ring(nothing)}
        self._largest = {CHECKPOINT: 0, GRAPH: 0}

    def _make_room(self, room: Room, nbytes: int) -> None:
        if room.nbytes < nbytes:
            self._settle()
            room.renew(nbytes)

    def _settle(self) -> None:
        """Wait for all transfers, an abandoned step's too: their memory is about to go."""
        self._last_down.synchronize()
        self._last_up.synchronize()

    def save(self, hidden: torch.Tensor) -> HostCopy:
        """Send a checkpoint to the host. The caller lets go of it: its memory may be used again as
        soon as what was computed so far is done."""
        nbytes = self.codec.nbytes(hidden.numel()) if self.codec else hidden.nbytes
        place = Extent(0, nbytes, hidden.shape, hidden.dtype, self.codec)
        return self._send(CHECKPOINT, [hidden], [place], nbytes)

    def save_graph(self, tensors: Sequence[torch.Tensor], tokens: int) -> HostCopy:
        """Send what the graph of a micro-batch of `tokens` tokens saved, contiguous tensors.

        The first graph of a group sizes the host buffer for all of them.
        """
        places, nbytes = [], 0
        for tensor in tensors:
            places.append(Extent(nbytes, tensor.nbytes, tensor.shape, tensor.dtype))
            nbytes += round_up(tensor.nbytes, ALIGNMENT)
        self._make_rings(GRAPH, nbytes)
        if self._layers:
            of_layer = round_up(nbytes * self._tokens // tokens, ALIGNMENT)
            self._make_room(self._graphs, of_layer * self._layers)
            self._layers = 0
        return self._send(GRAPH, tensors, places, nbytes)

    def _send(
        self, kind: Kind, tensors: Sequence[torch.Tensor], places: Sequence[Extent], nbytes: int
    ) -> HostCopy:
        room = self._checkpoints if kind == CHECKPOINT else self._graphs
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
        return HostCopy(kind, tuple(places), host, landed)

    def prefetch(self, kept: Iterable[HostCopy]) -> None:
        """Start to fetch what will be restored, in this order, as far as its ring has room."""
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
            job = partial(self._bring, sent, free)
            sent.arrived = self._last_up = self.fetch.submit(job)

    def _bring(self, sent: HostCopy, free: Event | None, _: Event) -> None:
        self.fetch.wait(free)  # wait: the computation may still read what was there
        self.fetch.wait(sent.landed)  # wait: this may still be on its way down
        assert sent.stretch is not None
        sent.stretch.flat[: sent.host.numel()].copy_(sent.host, non_blocking=True)

    def restore(self, sent: HostCopy) -> torch.Tensor:
        """A checkpoint on the device, valid until `free`."""
        (hidden,) = self.restore_graph(sent)
        return hidden

    def restore_graph(self, sent: HostCopy) -> list[torch.Tensor]:
        """Tensors that were sent, on the device, valid until `free`; in the order of `prefetch`."""
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
        self._checkpoints.close()
        self._graphs.close()
        self._drop_rings()


Checkpoints = OnDevice | Offload
