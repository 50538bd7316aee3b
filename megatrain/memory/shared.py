"""One copy of a host's weights, which all its ranks map: each writes its share, and reads all.

The memory is a file without a name (memfd): it is gone when the last rank has ended, in whichever
way. Beside the weights it holds a number for each rank and block: of the updates that are done.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

import torch

from megatrain.errors import MegaTrainError
from megatrain.memory.layout import FlatLayout, round_up
from megatrain.memory.sizes import PAGE, shared_bytes, slab_bytes
from megatrain.memory.slab import PORTABLE, Slab
from megatrain.world import World

LOOKS_EVERY_S = 50e-6  # for another rank's update


class SharedWeights:
    """Flat weights of some blocks in one mapping. New ones are zero. All ranks of a host open it
    at the same place.

    Args:
        layouts: of these blocks, by number.
        pinned: register the mapping with CUDA in every rank, once each has touched its own share.
        threads: number of threads that touch it.

    Attributes:
        whole: by block: 1-D, all ranks' weights. Only elements of one's own span may be written.

    Raises:
        OutOfMemory: on all ranks, if one has no room for the mapping.
        MegaTrainError: the same, if one cannot open it.
    """

    def __init__(
        self,
        layouts: Mapping[int, FlatLayout],
        dtype: torch.dtype,
        world: World,
        *,
        pinned: bool,
        threads: int,
    ) -> None:
        self._world, self._places = world, {block: i for i, block in enumerate(layouts)}
        self._error: BaseException | None = None
        sizes = [layout.numel * dtype.itemsize for layout in layouts.values()]
        pages = [round_up(size, PAGE) for size in sizes]
        self._slab = _opened(world, shared_bytes(sizes, world.size))
        self._done = self._slab.numbers(sum(pages), world.size * len(sizes))
        pieces = torch.split(self._slab.bytes[: sum(pages)], pages)
        self.whole = {
            block: piece[:size].view(dtype)
            for block, piece, size in zip(layouts, pieces, sizes, strict=True)
        }
        if pinned:
            mine = [self.share(block, of).view(torch.uint8) for block, of in layouts.items()]
            with world.together():
                self._slab.touch(mine, threads)
            with world.together():  # behind all: it takes the pages that nobody has touched
                self._slab.pin(PORTABLE)

    def share(self, block: int, layout: FlatLayout) -> torch.Tensor:
        """A view of this rank's share of a block's weights."""
        span = layout.span(self._world.rank, self._world.size)
        return self.whole[block][span.start : span.stop]

    def say_updated(self, block: int) -> None:
        """Count an update of a block by this rank as done, if the block is here."""
        if (place := self._places.get(block)) is not None:
            self._done[self._world.rank * len(self._places) + place] += 1

    def wait_for_others(self, block: int, updates: int) -> None:
        """Return once every rank did that many updates of a block. Raises the error of `stop`."""
        if (place := self._places.get(block)) is None:
            return
        for rank in range(self._world.size):
            while self._error is None and self._done[rank * len(self._places) + place] < updates:
                time.sleep(LOOKS_EVERY_S)
        if self._error is not None:
            raise self._error

    def stop(self, error: BaseException) -> None:
        """Make every wait for other ranks, now or later, raise `error`. Own updates go on."""
        self._error = self._error or error

    @property
    def nbytes(self) -> int:
        """Bytes of host memory, divided by the ranks that have them in common."""
        return self._slab.nbytes // self._world.size

    def close(self) -> None:
        """Unpin and unmap; views keep the mapping alive. A second call does nothing."""
        self.stop(MegaTrainError("the weights' memory is closed"))
        self.whole = {}
        self._done.release()
        self._slab.close()


def _opened(world: World, nbytes: int) -> Slab:
    """Map a file that the first rank makes and the others find among its open files."""
    made, name = -1, "the weights of all ranks"
    try:
        with world.together():
            if world.is_first:
                made = os.memfd_create("megatrain-weights")
                os.ftruncate(made, slab_bytes(nbytes))
        found = f"/proc/{os.getpid()}/fd/{made}", os.fstat(made).st_ino if world.is_first else 0
        path, file = world.broadcast(found)
        with world.together():
            return _mapped(name, nbytes, path, file)
    finally:
        if made >= 0:
            os.close(made)


def _mapped(name: str, nbytes: int, path: str, file: int) -> Slab:
    """Map an open file of the first rank. file: its inode number."""
    remedy = "set memory.transport: gather"
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError as error:
        raise MegaTrainError(f"cannot open {name} ({error}); {remedy}") from error
    try:
        if os.fstat(descriptor).st_ino != file:  # of a process in another container
            raise MegaTrainError(f"ranks do not see each other's processes ({path}); {remedy}")
        return Slab(name, nbytes, descriptor=descriptor)
    finally:
        os.close(descriptor)
