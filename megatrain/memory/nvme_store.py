"""NVMe as the home of arrays: files, and a few staging buffers in host RAM that all users share.

A buffer holds one array of one block, and an array is in one buffer at most. Whoever asks for an
array that is in a buffer shares that buffer, so nobody sees an old value. Other requests wait for a
buffer that is unused and whose changes are on the drive. Every array has a queue, served in the
order of asking: a lease waits only for those that were asked for before, in every array alike.
"""

from __future__ import annotations

import errno
import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from megatrain.durable import bypass_cache
from megatrain.errors import StorageError, logger, storage_error
from megatrain.memory.layout import ArraySpec, round_up
from megatrain.memory.sizes import PAGE, stages
from megatrain.memory.slab import Slab

READ_BYTES = 16 << 20  # read at a time of an array that is read past the buffers

Key = tuple[str, int]  # array, block


# why: decision 0022
@dataclass
class _Buffer:
    """Room in host RAM for one array of any block."""

    memory: torch.Tensor  # bytes
    key: Key | None = None
    users: int = 0
    reading: bool = False
    writing: bool = False
    dirty: bool = False  # changed since it was last written
    turn: int = 0  # number of the lease that last got it: the smallest was unused for longest


@dataclass
class NvmeLease:
    """A request for arrays of a block, and then the buffers that hold them."""

    store: NvmeStore
    keys: tuple[Key, ...]
    changes: bool
    buffers: dict[Key, _Buffer] = field(default_factory=dict)
    released: bool = False

    def wait(self) -> dict[str, torch.Tensor]:
        """The arrays by name, once they were read, and with `changes` once an earlier change is on
        the drive; {} if the lease was released. Raises StorageError."""
        return self.store.wait(self)

    def release(self, *, changed: bool, soon: bool) -> None:
        """Give the buffers back. `soon`: write changes now, not only when a buffer is needed."""
        self.store.release(self, changed, soon)


_Queue = deque[tuple[NvmeLease, Key]]


class NvmeStore:
    """Owns arrays of some blocks on NVMe. New arrays are zero.

    Args:
        numel: elements of an array of a block.
        arrays: the arrays that a block may have.
        blocks: the blocks that have them here, by array name.
        folders: on one or several drives; each gets an equal share of the bytes.
        pinned: pin the buffers of transferred arrays for CUDA.
        threads: number of threads for the first touch of the buffers.

    Raises:
        StorageError: at once if a folder lacks the space. A transfer that fails makes this and
            every later wait raise.
    """

    def __init__(
        self,
        numel: Callable[[ArraySpec, int], int],
        arrays: Sequence[ArraySpec],
        blocks: Mapping[str, Sequence[int]],
        folders: Sequence[Path],
        *,
        pinned: bool = False,
        threads: int = 8,
    ) -> None:
        self._specs = {spec.name: spec for spec in arrays if blocks.get(spec.name)}
        self._numel = {
            (name, block): numel(spec, block)
            for name, spec in self._specs.items()
            for block in blocks[name]
        }
        self._places: dict[Key, tuple[int, int]] = {}  # (offset, bytes) in the files: whole pages
        end = 0
        # block by block: what an update uses together lies together
        for key in sorted(self._numel, key=lambda key: key[1]):
            # at least one element: an array without any has a place, too
            nbytes = round_up(max(self._numel[key], 1) * self._specs[key[0]].dtype.itemsize, PAGE)
            self._places[key] = end, nbytes
            end += nbytes
        # the lock of everything below; notified of all that a waiting lease may wait for
        self._changed = threading.Condition()
        self._where: dict[Key, _Buffer] = {}  # the buffer that an array is in
        self._queues = {name: _Queue() for name in self._specs}
        self._error: BaseException | None = None  # the first; from then on nothing can be used
        self._turn = 0  # counts the buffers granted
        self._waiting = 0  # leases with `changes` that are waited for now
        self._waiting_since, self._waited_s = 0.0, 0.0
        self._slabs: list[Slab] = []
        self._buffers: dict[str, list[_Buffer]] = {}
        self._files = SwapFiles(folders, end)
        try:
            for name, spec in self._specs.items():
                count, pin = stages(len(blocks[name])), pinned and spec.transferred
                # each of the size of the largest block's array
                largest = max(n for (array, _), (_, n) in self._places.items() if array == name)
                slab = Slab(f"staging of {name}", count * largest, pinned=pin, threads=threads)
                self._slabs.append(slab)
                memory = slab.bytes[: count * largest].view(count, largest)
                self._buffers[name] = [_Buffer(part) for part in memory]
        except BaseException:
            self.close()  # files and buffers that were made
            raise

    def holds(self, name: str, block: int) -> bool:
        return (name, block) in self._places

    @property
    def nbytes(self) -> int:
        """Bytes of host memory in buffers."""
        return sum(slab.nbytes for slab in self._slabs)

    @property
    def waited_s(self) -> float:
        """Seconds so far with a wait for a lease with `changes`; overlapping waits count once."""
        with self._changed:
            now = time.perf_counter()
            return self._waited_s + (now - self._waiting_since if self._waiting else 0.0)

    def stop(self, error: BaseException) -> None:
        """From now on every wait raises `error`, or an earlier one: leases may stay unreleased."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def close(self) -> None:
        """Finish the transfers under way and give everything back."""
        self._files.close()  # first: transfers read and write the buffers
        self._where.clear()
        self._buffers.clear()
        while self._slabs:
            self._slabs.pop().close()

    # -- leases -----------------------------------------------------------------------------------

    def lease(self, block: int, names: Sequence[str], *, changes: bool) -> NvmeLease:
        """Ask for arrays of a block, which are read as early as buffers allow."""
        keys = tuple((name, block) for name in names)
        lease = NvmeLease(self, keys, changes)
        # one lock over all: the order of asking is the order of turns, in every queue
        with self._changed:
            for key in keys:
                self._queues[key[0]].append((lease, key))
                self._serve(key[0])
        return lease

    def wait(self, lease: NvmeLease) -> dict[str, torch.Tensor]:
        with self._changed:
            self._wait_until_ready(lease)
            self.check()
            if lease.released:
                return {}
            arrays = {}
            for key in lease.keys:
                dtype = self._specs[key[0]].dtype
                memory = lease.buffers[key].memory[: self._numel[key] * dtype.itemsize]
                arrays[key[0]] = memory.view(dtype)
            return arrays

    def _wait_until_ready(self, lease: NvmeLease) -> None:
        timed = lease.changes and not self._is_ready(lease)
        if timed and not self._waiting:
            self._waiting_since = time.perf_counter()
        self._waiting += timed
        try:
            self._changed.wait_for(lambda: self._is_ready(lease))
        finally:
            self._waiting -= timed
            if timed and not self._waiting:
                self._waited_s += time.perf_counter() - self._waiting_since

    def _is_ready(self, lease: NvmeLease) -> bool:
        """True if the lease can be used, or never will be."""
        if self._error is not None or lease.released:
            return True
        buffers = [lease.buffers.get(key) for key in lease.keys]
        # wait: the read still fills the buffer; the write still reads what would be changed
        return all(
            buffer and not buffer.reading and not (lease.changes and buffer.writing)
            for buffer in buffers
        )

    def check(self) -> None:
        """Raise what stopped the transfers, if anything did so far."""
        if self._error is not None:
            raise self._error

    def release(self, lease: NvmeLease, changed: bool, soon: bool) -> None:
        with self._changed:
            assert not lease.released
            lease.released = True
            for buffer in lease.buffers.values():
                buffer.users -= 1
                buffer.dirty |= changed
                # the last user's release: a write must not read what another user still changes
                if soon and not buffer.users and buffer.dirty:
                    self._write(buffer)
            for name, _ in lease.keys:
                self._serve(name)  # its buffers, or its place in the queue, are free now

    # -- buffers, all under the lock --------------------------------------------------------------

    def _serve(self, name: str) -> None:
        """Grant an array's buffers to the leases whose turn it is, while there are free ones."""
        queue = self._queues[name]  # a lease that cannot be served holds back all behind it
        while queue and self._give(*queue[0]):
            queue.popleft()
        self._changed.notify_all()

    def _give(self, lease: NvmeLease, key: Key) -> bool:
        """Give a lease whose turn it is its buffer. Returns True if its turn is over."""
        if lease.released:  # before its turn: nobody waits for it
            return True
        buffer = self._where.get(key) or self._take(key[0])
        if buffer is None:  # the next release or end of a transfer serves the queue again
            return False
        if buffer.key != key:
            if buffer.key is not None:  # that array is on the drive: the buffer is clean
                del self._where[buffer.key]
            buffer.key, self._where[key] = key, buffer
            buffer.reading = True
            self._move(self._files.read, buffer, key)
        self._turn += 1
        buffer.users, buffer.turn = buffer.users + 1, self._turn
        lease.buffers[key] = buffer
        return True

    def _take(self, name: str) -> _Buffer | None:
        """The buffer unused for longest, of clean ones if there are any; None: none is free yet."""
        idle = [b for b in self._buffers[name] if not (b.users or b.reading or b.writing)]
        found = min(idle, key=lambda b: (b.dirty, b.turn), default=None)
        if found is not None and found.dirty:
            self._write(found)  # its end serves the queue again
            return None
        return found

    def _write(self, buffer: _Buffer) -> None:
        assert buffer.key is not None and not buffer.writing
        # clean from here on: a user that changes it waits for the end of the write
        buffer.writing, buffer.dirty = True, False
        self._move(self._files.write, buffer, buffer.key)

    def _move(
        self, transfer: Callable[[int, memoryview, Done], None], buffer: _Buffer, key: Key
    ) -> None:
        offset, nbytes = self._places[key]
        try:
            memory = buffer.memory[:nbytes].numpy().data
            transfer(offset, memory, partial(self._arrived, buffer))
        except BaseException as error:
            # how much of it began is not known: nobody may use the buffer, or wait for it
            self.stop(StorageError(f"a transfer to or from NVMe did not begin: {error!r}"))
            raise

    def _arrived(self, buffer: _Buffer, error: StorageError | None) -> None:
        """End of a transfer, on a thread of the files. After a failure nothing can be used."""
        with self._changed:
            buffer.reading = buffer.writing = False  # leases that are ready now are notified below
            self._error = self._error or error
            assert buffer.key is not None
            try:
                self._serve(buffer.key[0])
            except BaseException as failed:  # noqa: BLE001  no thread can be started, say
                self.stop(failed)  # nobody sees this thread's exception: every wait raises it

    # -- reading past the buffers -----------------------------------------------------------------

    def pieces(self, name: str, block: int, start: int, numel: int) -> Iterator[torch.Tensor]:
        """`numel` elements from element `start`, piece by piece, each in memory of its own.

        Nobody may change the array meanwhile. No buffer is held from one piece to the next: an
        update that is waited for in between may need it. Raises StorageError.
        """
        step = READ_BYTES // self._specs[name].dtype.itemsize
        for begin in range(start, start + numel, step):
            count = min(step, start + numel - begin)
            with self._changed:
                self.check()
                # an array in a buffer may not be on the drive yet
                in_buffer = (name, block) in self._where
                lease = self.lease(block, [name], changes=False) if in_buffer else None
            if lease is None:
                yield self._read(name, block, begin, count)
                continue
            try:
                piece = lease.wait()[name][begin : begin + count].clone()
            finally:
                lease.release(changed=False, soon=True)
            yield piece

    def _read(self, name: str, block: int, begin: int, count: int) -> torch.Tensor:
        """Elements of an array, past the buffers."""
        dtype, (offset, _) = self._specs[name].dtype, self._places[name, block]
        # whole pages, of which the piece may begin and end inside
        page, inside = divmod(begin * dtype.itemsize, PAGE)
        nbytes = inside + count * dtype.itemsize
        memory = Slab(f"reading {name}", nbytes, pinned=False, threads=1).bytes
        read: Future[StorageError | None] = Future()
        view = memory[: round_up(nbytes, PAGE)].numpy().data
        self._files.read(offset + page * PAGE, view, read.set_result)
        if error := read.result():  # wait: threads of the files fill the memory
            raise error
        return memory[inside:nbytes].view(dtype)


PIECE_BYTES = 8 << 20  # of a transfer: consecutive ones lie in different folders
QUEUE_DEPTH = 16  # pieces on their way at a time, in each folder

Done = Callable[[StorageError | None], None]
Move = Callable[[int, list[memoryview], int], int]


class _File(NamedTuple):
    descriptor: int
    folder: Path


def _failed(folder: Path, doing: str, error: OSError) -> StorageError:
    advice = "free space there, check the drive, or change memory.nvme"
    return storage_error(folder, error, f"{doing} the run's files there", advice)


class SwapFiles:
    """`nbytes` of addresses, striped over a file per folder. Zero at first; owned until `close`.
    Raises StorageError where space is lacking, which is reserved at once."""

    def __init__(self, folders: Sequence[Path], nbytes: int) -> None:
        share = round_up(-(-round_up(nbytes, PIECE_BYTES) // len(folders)), PIECE_BYTES)
        with ExitStack() as opened:
            self._files = [_open(folder, share, opened) for folder in folders]
            self._pool = ThreadPoolExecutor(
                QUEUE_DEPTH * len(folders), thread_name_prefix="megatrain-nvme"
            )
            opened.callback(self._pool.shutdown)
            self._opened = opened.pop_all()

    def read(self, offset: int, memory: memoryview, done: Done) -> None:
        """Fill `memory` from `offset` on, in whole pages; a thread calls `done(None or error)`."""
        self._transfer("read", os.preadv, offset, memory, done)

    def write(self, offset: int, memory: memoryview, done: Done) -> None:
        """Write `memory` from `offset` on, as `read` does. It must not change until `done`."""
        self._transfer("write", os.pwritev, offset, memory, done)

    def _transfer(
        self, doing: str, move: Move, offset: int, memory: memoryview, done: Done
    ) -> None:
        pieces, begin = [], 0
        while begin < len(memory):
            # consecutive pieces are in different folders: all drives work on one transfer
            stripe, inside = divmod(offset + begin, PIECE_BYTES)
            end = min(len(memory), begin + PIECE_BYTES - inside)
            row, column = divmod(stripe, len(self._files))
            pieces.append((self._files[column], memory[begin:end], row * PIECE_BYTES + inside))
            begin = end
        lock, left = threading.Lock(), len(pieces)
        failure: StorageError | None = None

        def job(file: _File, view: memoryview, at: int) -> None:
            nonlocal left, failure
            error = _whole(doing, move, file, view, at)
            with lock:
                failure, left = failure or error, left - 1
                last = left == 0
            if last:  # wait: the other pieces have moved
                done(failure)

        for piece in pieces:
            self._pool.submit(job, *piece)

    def close(self) -> None:
        """Finish the transfers under way, and give the space back."""
        self._opened.close()


def _whole(doing: str, move: Move, file: _File, view: memoryview, at: int) -> StorageError | None:
    """Move all of `view`. A short transfer is continued from a whole page, as O_DIRECT demands."""
    moved = 0
    while moved < len(view):
        try:
            count = move(file.descriptor, [view[moved:]], at + moved)
        except OSError as error:  # not for EINTR: Python itself tries again
            return _failed(file.folder, doing, error)
        progress = count if moved + count == len(view) else count - count % PAGE
        if not progress:
            words = f"only {count} of {len(view) - moved} bytes were moved"
            return _failed(file.folder, doing, OSError(errno.EIO, words))
        moved += progress
    return None


def _open(folder: Path, nbytes: int, opened: ExitStack) -> _File:
    """A file without a name, its space reserved. Raises StorageError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115  `opened` closes it
        opened.enter_context(file)
        os.posix_fallocate(file.fileno(), 0, nbytes)  # now: no later step finds the drive full
    except OSError as error:
        raise _failed(folder, f"reserve {nbytes / 2**30:.2f} GiB for", error) from error
    if not bypass_cache(file.fileno()):
        logger.warning(
            f"{folder}: this file system has no direct access (O_DIRECT); "
            "its page cache takes host RAM as well"
        )
    return _File(file.fileno(), folder)
