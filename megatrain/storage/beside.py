"""Saves beside training: checkpoints are written from copies, while steps go on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from copy import copy
from pathlib import Path
from threading import Event, get_native_id
from typing import Any

import torch

from megatrain.errors import OutOfMemory, StorageError
from megatrain.memory.slab import Slab, slabs_of
from megatrain.memory.store import Store
from megatrain.storage.checkpoint import Checkpointable, saved_arrays
from megatrain.storage.passthrough import Passthrough

TOUCHING_THREADS = 4  # beside the steps that go on

_Held = dict[tuple[str, int], torch.Tensor]  # by array and block


def yield_to_others() -> None:
    """Let this thread, and those that it starts, run when no other wants the core."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, get_native_id(), 19)


# why: decision 0006
class Beside:
    """RAM for a copy of an engine's saved arrays, which a thread takes from now on, and saves from
    it. Of an engine of one rank, without drives. `close` it before the engine."""

    def __init__(self, engine: Checkpointable) -> None:
        self._engine, self._store = engine, engine.store
        self._trained = [b for b, layout in enumerate(engine.store.layouts) if layout.trainable]
        self._held, self._slabs = _Held(), list[Slab]()
        self._stream: Any = None  # beside what the steps compute
        self._worker = ThreadPoolExecutor(1, "megatrain-save", yield_to_others)
        self._room = self._worker.submit(self._take_room)

    def _take_room(self) -> None:
        for name in saved_arrays(self._engine):
            blocks = self._store.arrays[name].among(self._trained)
            arrays = [self._store.array(name, block) for block in blocks]
            device = next((array.device for array in arrays if array.is_cuda), None)
            if device is not None and self._stream is None:
                self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            placed = zip(blocks, arrays, strict=True)
            with nullcontext() if device is None else torch.cuda.device(device):
                slabs = slabs_of(
                    "copies for saves",
                    [array.nbytes for array in arrays],
                    pinned=device is not None,
                    threads=TOUCHING_THREADS,
                    touched=True,
                )
                for slab, pieces in slabs:
                    self._slabs.append(slab)
                    for piece, (block, array) in zip(pieces, placed, strict=False):
                        self._held[name, block] = piece.view(array.dtype)

    @property
    def usable(self) -> bool:
        """False once it is known that there is no room."""
        return not self._room.done() or self._room.exception() is None

    def save(self, write: Callable[[Checkpointable], Path]) -> Future[tuple[Path, Passthrough]]:
        """Call `write` in a thread, with the engine as it is now. No update of a block begins
        before the block is copied. One at a time.

        Returns:
            What `write` does, and what the engine is to carry along from then on, or StorageError,
            also where there is no room for the copy.
        """
        copied = {block: Event() for block in self._trained}
        still: Any = copy(self._engine)
        still.store, still.wait_ready = _Still(self._store, self._held), lambda block: None

        def work() -> tuple[Path, Passthrough]:
            try:
                self._room.result()
                for block, event in copied.items():
                    self._copy(block)
                    event.set()
            except OutOfMemory as error:
                raise StorageError(str(error)) from error
            finally:
                for event in copied.values():
                    event.set()
            return write(still), still.passthrough

        self._store.before_change = lambda block: copied[block].wait()
        return self._worker.submit(work)

    def _copy(self, block: int) -> None:
        self._engine.wait_ready(block)
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            for (name, of), held in self._held.items():
                if of == block:
                    held.copy_(self._store.array(name, block), non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()

    def close(self) -> None:
        self._worker.shutdown()
        self._held.clear()
        for slab in self._slabs:
            slab.close()


class _Still:
    """A store whose copied arrays stay as they are."""

    def __init__(self, store: Store, held: _Held) -> None:
        self._store, self._held = store, held

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def pieces(self, name: str, block: int, start: int, numel: int) -> Iterator[torch.Tensor]:
        held = self._held.get((name, block))
        if held is None:  # nothing of it is trained
            yield from self._store.pieces(name, block, start, numel)
        else:
            yield held[start : start + numel]
