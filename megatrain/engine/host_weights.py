"""What a host keeps of all blocks' weights, so that they cross the network once a step.

Of several hosts' ranks each keeps what it and those that stand in for it have together: what it got
over the network in a step's first sweep. Later sweeps upload that, and gather on the host alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatrain.engine.streams import Event, Lane
from megatrain.memory.slab import Slab, slabs_of


class HostWeights:
    """Parts of blocks in host RAM, each with the event after which it is there.

    Args:
        numels: elements of every block's part, from block `first` on.
        pinned: for a GPU.
        threads: for the first touch of the memory.

    Attributes:
        first: blocks before it are not kept.
    """

    def __init__(
        self,
        numels: Sequence[int],
        dtype: torch.dtype,
        download: Lane,
        *,
        pinned: bool,
        threads: int,
        first: int = 0,
    ) -> None:
        self.first, self._download = first, download
        self._slabs: list[Slab] = []
        self._parts: list[torch.Tensor] = []
        self._there: dict[int, Event] = {}
        sizes, how = [numel * dtype.itemsize for numel in numels], {"pinned": pinned}
        try:
            for slab, pieces in slabs_of("weights", sizes, **how, threads=threads, touched=pinned):
                self._slabs.append(slab)
                self._parts += [piece.view(dtype) for piece in pieces]
        except BaseException:
            self.close()
            raise

    @property
    def nbytes(self) -> int:
        return sum(slab.nbytes for slab in self._slabs)

    def keep(self, block: int, part: torch.Tensor, ready: Event) -> Event:
        """Copy a block's part, which is on the device after `ready`, down."""
        target = self._parts[block - self.first]

        def job(_: Event) -> None:
            self._download.wait(ready)  # wait: it may still be on its way from other hosts
            target.copy_(part, non_blocking=True)

        self._there[block] = landed = self._download.submit(job)
        return landed

    def of(self, block: int) -> tuple[torch.Tensor, Event] | None:
        """A block's part and when it is there; None where it must come from the other hosts."""
        there = self._there.get(block)
        return None if there is None else (self._parts[block - self.first], there)

    def forget(self) -> None:
        """The weights have changed, or are about to."""
        self._there.clear()

    def close(self) -> None:
        self._parts.clear()
        while self._slabs:
            self._slabs.pop().close()
