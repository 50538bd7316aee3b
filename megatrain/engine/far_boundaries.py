"""Boundary activations on NVMe: in files, through a few pieces of pinned host RAM that are written behind and read ahead.

An equal share of every boundary lies there, so that the drive writes during all of forward and reads during all of backward. On its way
down it passes through the pieces part by part, and each is free again once it is on the drive. On the way back parts are read in the order
in which they are wanted, as pieces become free, and each is free again once the device has it. So any length of sequence needs the same few
pieces. They are one pool, and nobody waits in a circle: nothing is read while a part that was parked has no piece yet, so a write waits for
no read but one that the device is already taking; and the order of reading is the order of taking.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from megatrain.engine.streams import Event, Lane
from megatrain.errors import StorageError
from megatrain.memory.layout import round_up
from megatrain.memory.slab import Slab
from megatrain.memory.swap_files import SwapFiles
from megatrain.nvme_tier import PAGE, boundary_pages, boundary_room, boundary_share, boundary_staging

TOUCHING_THREADS = 8


@dataclass
class _Part:
    """Of what is parked here of a boundary, as much as one piece holds."""

    bytes: slice
    offset: int  # in the files
    written: bool = False
    reading: bool = False
    piece: torch.Tensor | None = None  # what was read, or is being read, until the device has it

    @property
    def nbytes(self) -> int:
        return int(self.bytes.stop - self.bytes.start)


class FarBoundaries:
    """Keeps a share of boundaries in files between forward and backward. Nothing is allocated before `begin`.

    Args:
        layers: as much as the inputs of so many recomputed layers are is kept here.
        folders: on one or several drives.
        planned: bytes of each micro-batch of the largest group that is to come; room for it is made at once. Empty: for those that come.
        varied: as many with as many bytes together may have others each.
        pinned: pin the staging pieces for CUDA.

    Raises:
        StorageError: from `begin`, if a folder lacks the space; from it and in the jobs of both lanes, once a transfer failed.
    """

    def __init__(
        self, layers: int, folders: Sequence[Path], planned: Sequence[int], varied: bool, pinned: bool, download: Lane, fetch: Lane
    ) -> None:
        self.layers, self.folders, self.planned, self.varied, self.pinned = layers, folders, planned, varied, pinned
        self.download, self.fetch = download, fetch
        self._behind = Lane("nvme")  # waits for copies to and from the device, and says what may follow
        self._changed = threading.Condition()
        self._free: list[torch.Tensor] = []
        self._without_piece = 0  # parts that were parked
        self._unwritten = 0  # and parts in a piece, on their way to the drive
        self._to_read: deque[_Part] = deque()
        self._ahead: deque[_Part] = deque()  # read, or on their way, and not taken
        self._error: BaseException | None = None
        self._files: SwapFiles | None = None
        self._slab: Slab | None = None
        self._reserved = self._piece_bytes = self._end = 0
        self._far, self._of = 0, 1  # the share, in layers

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return self._slab.nbytes if self._slab else 0

    def begin(self, sizes: Sequence[int], layers: int) -> None:
        """Make room for what comes here of the inputs of so many layers, of micro-batches of at most so many bytes each. What an abandoned
        step still wants is dropped, and what it did not come to send; no job that sends or brings may be queued."""
        with self._changed:
            self._to_read.clear()
            self._changed.wait_for(lambda: self._error or not (self._unwritten or any(part.reading for part in self._ahead)))
            self._check()
            self._free += [part.piece for part in self._ahead if part.piece is not None]
            self._ahead.clear()
            self._without_piece = 0
        self._end, self._far, self._of = 0, min(self.layers, layers), max(1, layers)
        needs = [self._need(group, varied) for group, varied in ((sizes, False), (self.planned, self.varied)) if group]
        nbytes, piece = (max(need) for need in zip(*needs, strict=True))
        if nbytes > self._reserved or piece > self._piece_bytes:
            self._renew(max(nbytes, self._reserved), max(piece, self._piece_bytes))

    def _need(self, sizes: Sequence[int], varied: bool) -> tuple[int, int]:
        """Bytes in files, and of a staging piece."""
        room, piece = boundary_room(sizes, self._far, self._of, varied), boundary_pages(max(sizes), self._far, self._of, varied)
        return room, boundary_staging(piece)[1]

    def _renew(self, nbytes: int, piece: int) -> None:
        self._behind.submit(lambda _: None).wait_host()  # wait: the device may still read a piece
        self._drop()
        self._files = SwapFiles(self.folders, nbytes)
        count, _ = boundary_staging(piece)
        self._slab = Slab("staging of boundary activations", count * piece, pinned=self.pinned, threads=TOUCHING_THREADS)
        self._free = [self._slab.bytes[i * piece : (i + 1) * piece] for i in range(count)]
        self._reserved, self._piece_bytes = nbytes, piece

    def _drop(self) -> None:
        self._free.clear()
        if self._files is not None:
            self._files.close()
        if self._slab is not None:
            self._slab.close()
        self._files, self._slab, self._reserved, self._piece_bytes = None, None, 0, 0

    def share(self, nbytes: int) -> int:
        """Bytes of a boundary that come here. What stays is whole pages."""
        return boundary_share(nbytes, self._far, self._of)

    def take(self, nbytes: int) -> Far:
        """A place for that of the next boundary, which must be sent there."""
        starts = range(0, nbytes, self._piece_bytes)
        parts = [_Part(slice(start, min(nbytes, start + self._piece_bytes)), self._end + start) for start in starts]
        self._end += round_up(nbytes, PAGE)
        with self._changed:
            self._without_piece += len(parts)
        return Far(self, parts)

    def expect(self, order: Iterable[Far]) -> None:
        """All that was parked, in the order in which it will be brought back: the first parts are read now."""
        with self._changed:
            assert not self._to_read and not self._ahead, "what was expected before was not all taken"
            self._to_read.extend(part for far in order for part in far.parts)
            self._read_ahead()

    def close(self) -> None:
        """Finish what is on its way and give everything back. No job of the lanes may be left."""
        with self._changed:
            self._to_read.clear()
        self._behind.close()
        self._drop()

    # -- jobs of the lanes --------------------------------------------------------------------------------------------------------

    def send(self, parts: Sequence[_Part], source: torch.Tensor, event: Event) -> None:
        for part in parts:
            piece = self._piece(event)
            piece[: part.nbytes].copy_(source[part.bytes], non_blocking=True)
            self._after(self.download.record(), partial(self._write, part, piece))

    def bring(self, parts: Sequence[_Part], target: torch.Tensor, event: Event) -> None:
        for part in parts:
            piece = self._filled(part, event)
            target[part.bytes].copy_(piece[: part.nbytes], non_blocking=True)
            self._after(self.fetch.record(), partial(self._give_back, piece))

    def _piece(self, event: Event) -> torch.Tensor:
        with self._changed:
            self._wait(lambda: bool(self._free), event)
            self._without_piece, self._unwritten = self._without_piece - 1, self._unwritten + 1
            return self._free.pop()

    def _filled(self, part: _Part, event: Event) -> torch.Tensor:
        with self._changed:
            self._wait(lambda: part.piece is not None and not part.reading, event)
            piece, part.piece = part.piece, None
            assert piece is not None
            assert self._ahead.popleft() is part, "taken out of order"
            return piece

    def _wait(self, ready: Callable[[], bool], event: Event) -> None:
        started = time.perf_counter()
        self._changed.wait_for(lambda: self._error is not None or ready())
        event.nvme_wait_s += time.perf_counter() - started
        self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    # -- behind them ----------------------------------------------------------------------------------------------------------------

    def _after(self, copied: Event, then: Callable[[], None]) -> None:
        def job(_: Event) -> None:
            try:
                copied.synchronize()
                then()
            except BaseException as error:  # noqa: BLE001  carried to whoever waits for a piece or a part
                with self._changed:
                    self._fail(error)

        self._behind.submit(job)

    def _write(self, part: _Part, piece: torch.Tensor) -> None:
        def done(error: StorageError | None) -> None:
            with self._changed:
                part.written, self._unwritten = True, self._unwritten - 1
                self._over(error, piece)

        assert self._files is not None
        self._files.write(part.offset, _pages(piece, part), done)

    def _give_back(self, piece: torch.Tensor) -> None:
        with self._changed:
            self._over(None, piece)

    def _over(self, error: StorageError | None, free: torch.Tensor | None) -> None:
        """A transfer is, under the lock. One that failed leaves nothing that anybody may go on with."""
        if free is not None:
            self._free.append(free)
        if error is not None:
            self._fail(error)
        self._read_ahead()
        self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self._changed.notify_all()

    def _read_ahead(self) -> None:
        """Begin to read what is wanted next, as far as there are pieces that nothing which was parked waits for. Under the lock."""
        while self._to_read and self._to_read[0].written and self._free and not self._without_piece and self._error is None:
            part = self._to_read.popleft()
            part.piece, part.reading = self._free.pop(), True
            self._ahead.append(part)
            try:
                assert self._files is not None
                self._files.read(part.offset, _pages(part.piece, part), partial(self._arrived, part))
            except BaseException as error:  # noqa: BLE001  no thread can be started, say: whoever waits is told
                self._fail(error)

    def _arrived(self, part: _Part, error: StorageError | None) -> None:
        with self._changed:
            part.reading = False
            self._over(error, None)


@dataclass(frozen=True)
class Far:
    """A place in files, uint8."""

    keeper: FarBoundaries
    parts: Sequence[_Part]

    @property
    def nbytes(self) -> int:
        return self.parts[-1].bytes.stop  # type: ignore[no-any-return]

    def send(self, source: torch.Tensor, event: Event) -> None:
        """In a job of the download lane, whose `event` notes how long it waited for the drive: the device's bytes leave."""
        self.keeper.send(self.parts, source, event)

    def bring(self, target: torch.Tensor, event: Event) -> None:
        """In a job of the fetch lane, after `expect`: they come back."""
        self.keeper.bring(self.parts, target, event)


def _pages(piece: torch.Tensor, part: _Part) -> memoryview:
    """What of a piece travels: O_DIRECT moves whole pages."""
    return piece[: round_up(part.nbytes, PAGE)].numpy().data
