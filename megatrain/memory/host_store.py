"""Host RAM as the home of parameters and optimizer state: a few flat arrays per block, in large slabs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

import torch

from megatrain.memory.layout import FlatLayout, Per, round_up
from megatrain.memory.lease import Lease
from megatrain.memory.slab import Slab

SLAB_BYTES = 16 << 30  # larger mappings register no faster, and one failure should name a piece that a person can picture
PAGE = 4096


@dataclass(frozen=True)
class ArraySpec:
    """One array that every block has. Transferred arrays are pinned when the store serves a GPU."""

    name: str
    dtype: torch.dtype
    transferred: bool = False
    per: Per = "element"  # of the block's layout


class HostStore:
    """Owns arrays of blocks in host RAM. Use as a context manager, or `close` it.

    Args:
        layouts: one per block, in execution order.
        arrays: the arrays of each block. New arrays are zero.
        first: the block from which on arrays are kept here; a mapping gives some arrays a first block of their own.
        elsewhere: of some arrays blocks that are not kept here nevertheless.
        pinned: pin transferred arrays for CUDA, and take all memory at once: no step then pays for it, or finds that it is not there.
        threads: for the first touch.
    """

    def __init__(
        self,
        layouts: Sequence[FlatLayout],
        arrays: Iterable[ArraySpec],
        *,
        first: Mapping[str, int] | int = 0,
        elsewhere: Mapping[str, Collection[int]] | None = None,
        pinned: bool = False,
        threads: int = 8,
    ) -> None:
        self.layouts = tuple(layouts)
        self.arrays = {spec.name: spec for spec in arrays}
        self._slabs: list[Slab] = []
        self._views: dict[tuple[str, int], torch.Tensor] = {}
        try:
            for spec in self.arrays.values():
                start = first if isinstance(first, int) else first.get(spec.name, 0)
                absent = (elsewhere or {}).get(spec.name, ())
                blocks = [block for block in range(start, len(self.layouts)) if block not in absent]
                self._place(spec, blocks, pinned, threads)
        except BaseException:
            self.close()
            raise

    def _place(self, spec: ArraySpec, blocks: Sequence[int], pinned: bool, threads: int) -> None:
        """Cut the array of these blocks into slabs at block boundaries."""
        numels = [self.layouts[block].per(spec.per).numel for block in blocks]
        sizes = [round_up(numel * spec.dtype.itemsize, PAGE) for numel in numels]
        start = 0
        while start < len(sizes):
            stop = start + 1
            while stop < len(sizes) and sum(sizes[start : stop + 1]) <= SLAB_BYTES:
                stop += 1
            slab = Slab(spec.name, sum(sizes[start:stop]), pinned=pinned and spec.transferred, threads=threads, touched=pinned)
            self._slabs.append(slab)
            offset = 0
            for number in range(start, stop):
                nbytes = numels[number] * spec.dtype.itemsize
                self._views[spec.name, blocks[number]] = slab.bytes[offset : offset + nbytes].view(spec.dtype)
                offset += sizes[number]
            start = stop

    def array(self, name: str, block: int) -> torch.Tensor:
        """The flat array `name` of a block: 1-D, `layout(name, block).numel` elements, a view of the store's memory."""
        return self._views[name, block]

    def lease(self, block: int, names: Sequence[str], *, changes: bool = False, fill: bool = True, soon: bool = True) -> Lease:
        """Arrays of a block, which are here anyway."""
        return Lease({name: self.array(name, block) for name in names})

    def pieces(self, name: str, block: int, start: int, numel: int) -> Iterator[torch.Tensor]:
        """`numel` elements of an array from `start` on, as they lie here."""
        yield self.array(name, block).narrow(0, start, numel)

    def layout(self, name: str, block: int) -> FlatLayout:
        """Where the tensors of a block lie in its array `name`."""
        return self.layouts[block].per(self.arrays[name].per)

    def has(self, name: str) -> bool:
        return name in self.arrays

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that the store holds."""
        return sum(slab.nbytes for slab in self._slabs)

    def close(self) -> None:
        self._views.clear()
        while self._slabs:
            self._slabs.pop().close()

    def __enter__(self) -> HostStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
