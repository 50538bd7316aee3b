"""NVMe as the home of arrays: in files, with a few staging buffers in host RAM through which whoever uses an array shares it.

A buffer holds one array of one block, and an array lies in one buffer at most. Whoever wants one that is in a buffer shares it, so that
nobody sees an old value; others wait their turn for a buffer that nobody uses and whose changes are on the drive. Turns come in the order
of asking, for each array by itself; but those who only read weights have turns of their own, which come first, so that a sweep waits for
the updates of the blocks that it visits and not for all that were queued before. Nobody waits for ever, however few the buffers are:

- A reader who has a buffer gives it back without waiting for any update. Who asks for a block whose update is not over keeps his place, and
  with it holds back the readers behind him, but gets no buffer before he waits for it, which is after that update (`ahead=False`). So the
  readers who have buffers wait only for those of them who came before, in the lane that uploads.
- An update waits for a gradient that has landed, for those who came before it and for readers who have a buffer, never for one who has
  none.
- Who asks for several arrays takes his turn in all of them, a reader too: he might hold one while he waits for the other.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from megatrain.errors import StorageError
from megatrain.memory.host_store import ArraySpec
from megatrain.memory.layout import FlatLayout, round_up
from megatrain.memory.slab import Slab
from megatrain.memory.swap_files import Done, SwapFiles
from megatrain.nvme_tier import PAGE, READERS, stages, stages_for_updates

READ_BYTES = 16 << 20  # of an array that is read past the buffers

Key = tuple[str, int]  # array, block


@dataclass
class _Buffer:
    """Room in host RAM for one array of any block."""

    memory: torch.Tensor  # bytes
    key: Key | None = None
    users: int = 0
    readers: int = 0  # of the users, those with turns of their own
    reading: bool = False
    writing: bool = False
    dirty: bool = False  # changed since it was last written
    turn: int = 0  # when somebody last began to use it

    @property
    def changes(self) -> bool:
        """Whether it holds what is being changed, or was and is not on the drive yet."""
        return self.users > self.readers or self.dirty or self.writing


@dataclass
class NvmeLease:
    """What somebody asked for.

    Args:
        reads: its turn is one of the readers'.
        wanted: it may have its turn; from `wait` on at the latest.
    """

    store: NvmeStore
    keys: tuple[Key, ...]
    changes: bool
    fill: bool
    reads: bool
    wanted: bool
    buffers: dict[Key, _Buffer] = field(default_factory=dict)
    released: bool = False

    def wait(self) -> dict[str, torch.Tensor]:
        """The arrays, once they were read, and if they will be changed, once an earlier change of them is on the drive; none, if it was
        given back."""
        return self.store.wait(self)

    def release(self, *, changed: bool, soon: bool) -> None:
        """Give the buffers back. `soon`: changes are written at once, else when a buffer is wanted."""
        self.store.release(self, changed, soon)


class NvmeStore:
    """Owns arrays of some blocks on NVMe. New arrays are zero.

    Args:
        layouts: one per block.
        arrays: those that are kept here.
        blocks: of which blocks, by array name.
        folders: on one or several drives; each gets an equal share of the bytes.
        pinned: pin the buffers of transferred arrays for CUDA.

    Raises:
        StorageError: at once if a folder lacks the space; a transfer that fails stops this and every later wait.
    """

    def __init__(
        self,
        layouts: Sequence[FlatLayout],
        arrays: Sequence[ArraySpec],
        blocks: Mapping[str, Sequence[int]],
        folders: Sequence[Path],
        *,
        pinned: bool = False,
        threads: int = 8,
    ) -> None:
        self._specs = {spec.name: spec for spec in arrays if blocks.get(spec.name)}
        self._places: dict[Key, tuple[int, int]] = {}  # offset and bytes of each array, in whole pages
        self._numel = {(name, block): layouts[block].per(spec.per).numel for name, spec in self._specs.items() for block in blocks[name]}
        end = 0
        for block in sorted({block for name in self._specs for block in blocks[name]}):  # what is used together lies together
            for name in self._specs:
                if (name, block) in self._numel:
                    nbytes = max(
                        PAGE, round_up(self._numel[name, block] * self._specs[name].dtype.itemsize, PAGE)
                    )  # it may have no element
                    self._places[name, block] = end, nbytes
                    end += nbytes
        self._changed = threading.Condition()
        self._where: dict[Key, _Buffer] = {}
        self._queues: dict[str, deque[tuple[NvmeLease, Key]]] = {name: deque() for name in self._specs}
        self._readers: dict[str, deque[tuple[NvmeLease, Key]]] = {name: deque() for name in self._specs if name in READERS}
        self._most_changed = {name: stages_for_updates(name, len(blocks[name])) for name in self._specs}
        self._error: BaseException | None = None
        self._turn = 0
        self._waiting_since: list[float] = []
        self._waited_s = 0.0
        self._slabs: list[Slab] = []
        self._buffers: dict[str, list[_Buffer]] = {}
        self._files = SwapFiles(folders, end)
        try:
            for name, spec in self._specs.items():
                self._buffers[name] = self._make_buffers(spec, len(blocks[name]), pinned and spec.transferred, threads)
        except BaseException:
            self.close()
            raise

    def _make_buffers(self, spec: ArraySpec, blocks: int, pinned: bool, threads: int) -> list[_Buffer]:
        largest = max(nbytes for (name, _), (_, nbytes) in self._places.items() if name == spec.name)
        count = stages(spec.name, blocks)
        slab = Slab(f"staging of {spec.name}", count * largest, pinned=pinned, threads=threads)
        self._slabs.append(slab)
        return [_Buffer(slab.bytes[i * largest : (i + 1) * largest]) for i in range(count)]

    def holds(self, name: str, block: int) -> bool:
        return (name, block) in self._places

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that the buffers take."""
        return sum(slab.nbytes for slab in self._slabs)

    @property
    def waited_s(self) -> float:
        """Seconds so far in which somebody waited for arrays that he would change."""
        with self._changed:
            return self._waited_s + (time.perf_counter() - self._waiting_since[0] if self._waiting_since else 0.0)

    def stop(self, error: BaseException) -> None:
        """From now on every wait raises `error`, or what failed before: leases may be held by those who will never return them."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def close(self) -> None:
        """Finish what is on its way and give everything back."""
        self._files.close()
        self._where.clear()
        self._buffers.clear()
        while self._slabs:
            self._slabs.pop().close()

    # -- leases -----------------------------------------------------------------------------------------------------------------

    def lease(self, block: int, names: Sequence[str], *, changes: bool, fill: bool = True, ahead: bool = True) -> NvmeLease:
        """Ask for arrays of a block.

        Args:
            fill: read what they hold, unless all is overwritten.
            ahead: read as early as can be. False for a reader of what an update is about to change: no earlier than he waits.
        """
        reads = not changes and all(name in self._readers for name in names)
        lease = NvmeLease(self, tuple((name, block) for name in names), changes, fill, reads, wanted=ahead or not reads)
        with self._changed:
            for key in lease.keys:
                (self._readers if reads else self._queues)[key[0]].append((lease, key))
                self._serve(key[0])
        return lease

    def wait(self, lease: NvmeLease) -> dict[str, torch.Tensor]:
        with self._changed:
            if not lease.wanted:
                lease.wanted = True
                for name, _ in lease.keys:
                    self._serve(name)
            if not self._is_ready(lease):
                self._wait_timed(lease)
            self._check()
            return {} if lease.released else {key[0]: self._array(lease.buffers[key], key) for key in lease.keys}

    def _wait_timed(self, lease: NvmeLease) -> None:
        if not lease.changes:
            self._changed.wait_for(lambda: self._is_ready(lease))
            return
        self._waiting_since.append(time.perf_counter())
        try:
            self._changed.wait_for(lambda: self._is_ready(lease))
        finally:
            since = self._waiting_since.pop(0)  # of whoever began first: together they count as one
            now = time.perf_counter()
            self._waited_s += (min(self._waiting_since[0], now) if self._waiting_since else now) - since

    def _is_ready(self, lease: NvmeLease) -> bool:
        """Whether the lease can be used, or never will."""
        if self._error is not None or lease.released:
            return True
        buffers = [lease.buffers.get(key) for key in lease.keys]
        return all(buffer and not buffer.reading and not (lease.changes and buffer.writing) for buffer in buffers)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _array(self, buffer: _Buffer, key: Key) -> torch.Tensor:
        dtype = self._specs[key[0]].dtype
        return buffer.memory[: self._numel[key] * dtype.itemsize].view(dtype)

    def release(self, lease: NvmeLease, changed: bool, soon: bool) -> None:
        with self._changed:
            assert not lease.released
            lease.released = True
            for buffer in lease.buffers.values():
                buffer.users -= 1
                buffer.readers -= lease.reads
                buffer.dirty |= changed
                if soon and not buffer.users and buffer.dirty:
                    self._write(buffer)
            for name, _ in lease.keys:
                self._serve(name)

    # -- buffers, all under the lock ----------------------------------------------------------------------------------------------

    def _serve(self, name: str) -> None:
        """Give buffers to those whose turn it is, until there is none to give."""
        for queue in (self._readers.get(name), self._queues[name]):
            while queue and self._give(*queue[0]):
                queue.popleft()
        self._changed.notify_all()

    def _give(self, lease: NvmeLease, key: Key) -> bool:
        """Give whose turn it is a buffer. Returns whether the turn is over."""
        if lease.released:
            return True
        if not lease.wanted:
            return False
        buffer = self._where.get(key) or self._take(key[0], lease.reads)
        if buffer is None:
            return False
        if buffer.key != key:
            self._assign(buffer, key, lease.fill)
        self._turn += 1
        buffer.users, buffer.turn = buffer.users + 1, self._turn
        buffer.readers += lease.reads
        lease.buffers[key] = buffer
        return True

    def _take(self, name: str, reads: bool) -> _Buffer | None:
        """The buffer that nobody used for longest; None while there is none, or none that readers can spare."""
        idle = [buffer for buffer in self._buffers[name] if not (buffer.users or buffer.reading or buffer.writing)]
        clean = [buffer for buffer in idle if not buffer.dirty]
        spare = reads or sum(buffer.changes for buffer in self._buffers[name]) < self._most_changed[name]
        if clean and spare:
            return min(clean, key=lambda buffer: buffer.turn)
        dirty = [buffer for buffer in idle if buffer.dirty]
        if dirty:
            self._write(min(dirty, key=lambda buffer: buffer.turn))
        return None

    def _assign(self, buffer: _Buffer, key: Key, fill: bool) -> None:
        if buffer.key is not None:
            del self._where[buffer.key]
        buffer.key, self._where[key] = key, buffer
        if fill:
            buffer.reading = True
            self._move(self._files.read, buffer, key)

    def _write(self, buffer: _Buffer) -> None:
        assert buffer.key is not None and not buffer.writing
        buffer.writing, buffer.dirty = True, False
        self._move(self._files.write, buffer, buffer.key)

    def _move(self, transfer: Callable[[int, memoryview, Done], None], buffer: _Buffer, key: Key) -> None:
        offset, nbytes = self._places[key]

        def done(error: StorageError | None) -> None:
            self._arrived(buffer, error)

        try:
            transfer(offset, buffer.memory[:nbytes].numpy().data, done)
        except BaseException as error:  # how much of it began is not known: nobody may go on with that, or wait for it
            interrupted = StorageError("a transfer to or from NVMe was interrupted as it began; resume from the last checkpoint")
            self._error = self._error or (error if isinstance(error, Exception) else interrupted)
            self._changed.notify_all()
            raise

    def _arrived(self, buffer: _Buffer, error: StorageError | None) -> None:
        """A transfer is over; one that failed leaves nothing that anybody may go on with."""
        with self._changed:
            buffer.reading = buffer.writing = False
            self._error = self._error or error
            try:
                if buffer.key is not None:
                    self._serve(buffer.key[0])
            except BaseException as failed:  # noqa: BLE001  no thread can be started, say: whoever waits is told
                self._error = self._error or failed
                self._changed.notify_all()

    # -- reading past the buffers ---------------------------------------------------------------------------------------------------

    def pieces(self, name: str, block: int, start: int, numel: int) -> Iterator[torch.Tensor]:
        """`numel` elements from `start` on, piece by piece, for one who reads an array once while nobody changes it: takes no buffer."""
        key = name, block
        with self._changed:
            self._check()
            shared = self.lease(block, [name], changes=False) if key in self._where else None  # what it holds may not be on the drive yet
        if shared is not None:
            try:
                yield shared.wait()[name].narrow(0, start, numel)
            finally:
                shared.release(changed=False, soon=True)
            return
        dtype, (offset, _) = self._specs[name].dtype, self._places[key]
        room = Slab(f"reading {name}", READ_BYTES + 2 * PAGE, pinned=False, threads=1)
        for begin in range(start, start + numel, READ_BYTES // dtype.itemsize):
            count = min(READ_BYTES // dtype.itemsize, start + numel - begin)
            page, inside = divmod(begin * dtype.itemsize, PAGE)
            span = round_up(inside + count * dtype.itemsize, PAGE)
            self._read_now(offset + page * PAGE, room.bytes[:span])
            yield room.bytes[inside : inside + count * dtype.itemsize].view(dtype)

    def _read_now(self, offset: int, memory: torch.Tensor) -> None:
        over, failure = threading.Event(), []

        def done(error: StorageError | None) -> None:
            failure.append(error)
            over.set()

        self._files.read(offset, memory.numpy().data, done)
        over.wait()
        if failure[0] is not None:
            raise failure[0]
