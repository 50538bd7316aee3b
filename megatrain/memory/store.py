"""All parameters and optimizer state of a model over the tiers: GPU memory, host RAM and NVMe.

The first blocks are on the device, where they need no transfer. The others are in host RAM, as a
few flat arrays per block cut from large slabs, or on NVMe.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import torch

from megatrain.memory.layout import ArraySpec, FlatLayout, Span, part
from megatrain.memory.nvme_store import READ_BYTES, NvmeLease, NvmeStore
from megatrain.memory.shared import SharedWeights
from megatrain.memory.slab import Slab, slabs_of
from megatrain.world import ALONE, World


class Store(AbstractContextManager["Store"]):
    """Owns the arrays of all blocks. New ones are zero. Use as a context manager, or `close` it.

    Args:
        layouts: one per block, in execution order.
        arrays: the arrays of the blocks in host RAM.
        resident: number of blocks on the device, the first ones, which have `resident_arrays`.
        on_nvme: by array name: the blocks that have the array on NVMe instead of in host RAM.
        threads: number of threads for the first touch of host memory.
        world: of whose ranks this one owns its share of every array, and no more.
        shares_weights: weights in host RAM are one copy, which the host's ranks have in common.
    """

    def __init__(
        self,
        layouts: Sequence[FlatLayout],
        arrays: Sequence[ArraySpec],
        *,
        device: torch.device,
        resident: int = 0,
        resident_arrays: Sequence[ArraySpec] = (),
        on_nvme: Mapping[str, Sequence[int]] | None = None,
        nvme_folders: Sequence[Path] = (),
        threads: int = 8,
        world: World = ALONE,
        shares_weights: bool = False,
    ) -> None:
        self.layouts, self.world = tuple(layouts), world
        # of every block, what this rank owns
        self.spans = [layout.span(world.place(), world.size) for layout in self.layouts]
        self.arrays = {spec.name: spec for spec in arrays}
        self.resident = resident
        pinned, far = device.type == "cuda", on_nvme or {}
        self.nvme: NvmeStore | None = None
        self.shared: SharedWeights | None = None
        self._arrays: dict[tuple[str, int], torch.Tensor] = {}  # on the device and in host RAM
        # called before a lease under which a block's arrays change: a save may still copy them
        self.before_change: Callable[[int], object] = lambda block: None
        self._slabs: list[Slab] = []
        with ExitStack() as opened:
            # first: a folder that lacks the space is found before host RAM is taken
            if any(far.values()):
                self.nvme = NvmeStore(
                    self.numel, arrays, far, nvme_folders, pinned=pinned, threads=threads
                )
                opened.callback(self.nvme.close)
            opened.callback(self._free)
            for name, spec in self.arrays.items():
                blocks = spec.among(range(resident, len(self.layouts)))
                in_ram = [block for block in blocks if block not in far.get(name, ())]
                if shares_weights and name == "weight" and in_ram:
                    self._share(spec, in_ram, pinned, threads)
                else:
                    self._place(spec, in_ram, pinned, threads)
            for spec in resident_arrays:
                for block in spec.among(range(resident)):
                    zeros = torch.zeros(self.numel(spec, block), dtype=spec.dtype, device=device)
                    self._arrays[spec.name, block] = zeros
            self._opened = opened.pop_all()  # until here a failure closes what is open

    def _place(self, spec: ArraySpec, blocks: Sequence[int], pinned: bool, threads: int) -> None:
        """Cut the array of these blocks from slabs in host RAM, of whole blocks each."""
        numels = [self.numel(spec, block) for block in blocks]
        if not sum(numels):  # all of them are frozen
            nothing = torch.empty(0, dtype=spec.dtype)
            self._arrays |= {(spec.name, block): nothing for block in blocks}
            return
        sizes, placed = [numel * spec.dtype.itemsize for numel in numels], iter(blocks)
        # touched: beside a GPU all host memory is taken now, not only what is pinned, so that no
        # later step pays for the first touch, or finds that memory is missing
        how: dict[str, bool] = {"pinned": pinned and spec.transferred, "touched": pinned}
        for slab, pieces in slabs_of(spec.name, sizes, **how, threads=threads):
            self._slabs.append(slab)
            for piece in pieces:
                self._arrays[spec.name, next(placed)] = piece.view(spec.dtype)

    def _share(self, spec: ArraySpec, blocks: Sequence[int], pinned: bool, threads: int) -> None:
        """Place the weights of these blocks in memory of all ranks, of which each owns its span."""
        layouts = {block: self.layouts[block] for block in blocks}
        self.shared = SharedWeights(layouts, spec.dtype, self.world, pinned=pinned, threads=threads)
        for block, layout in layouts.items():
            self._arrays[spec.name, block] = self.shared.share(block, layout)

    def _free(self) -> None:
        self._arrays.clear()  # a view that is held elsewhere keeps its slab's memory
        if self.shared is not None:
            self.shared.close()
        while self._slabs:
            self._slabs.pop().close()

    # -- what there is, and where ------------------------------------------------------------------

    def numel(self, spec: ArraySpec, block: int) -> int:
        """Elements of an array of a block here."""
        return self._span(spec, block, self.world.rank).numel

    def span(self, name: str, block: int, rank: int | None = None) -> Span:
        """The elements of a block's array that a rank owns; by default this rank."""
        return self._span(self.arrays[name], block, self.world.rank if rank is None else rank)

    def _span(self, spec: ArraySpec, block: int, rank: int) -> Span:
        layout = self.layouts[block]
        if self.world.is_alone:
            return Span(0, layout.of(spec).numel)
        owned = layout.span(self.world.place(rank), self.world.size)
        layout = layout if spec.whole else layout.trained
        found = part(spec.per, *owned.before(layout.numel))
        return Span(found.start, found.stop)

    def trained_span(self, block: int) -> Span:
        """This rank's share of a block's trained tensors."""
        return self.spans[block].before(self.layouts[block].trainable)

    def is_resident(self, block: int) -> bool:
        """True if the block is on the device."""
        return block < self.resident

    def is_on_nvme(self, name: str, block: int) -> bool:
        """True if the array is on NVMe, so that only a lease can bring it."""
        return self.nvme is not None and self.nvme.holds(name, block)

    def layout(self, name: str, block: int) -> FlatLayout:
        """The tensors of a block in its array `name`."""
        return self.layouts[block].of(self.arrays[name])

    @property
    def nbytes(self) -> int:
        """Bytes of host memory with staging buffers of NVMe and a part of what ranks share."""
        others = (tier.nbytes for tier in (self.nvme, self.shared) if tier is not None)
        return sum(others) + sum(slab.nbytes for slab in self._slabs)

    # -- access ------------------------------------------------------------------------------------

    def array(self, name: str, block: int) -> torch.Tensor:
        """The flat array `name` of a block that is not on NVMe: a view of the store's memory, 1-D,
        of `layout(name, block).numel` elements or this rank's share."""
        return self._arrays[name, block]

    def whole_in_ram(self, block: int) -> torch.Tensor | None:
        """All ranks' weights of a block, 1-D, where this host has them in one copy; else None."""
        return None if self.shared is None else self.shared.whole.get(block)

    def lease(
        self, block: int, names: Sequence[str], *, changes: bool = False, soon: bool = True
    ) -> Lease:
        """Access to flat arrays of a block, on whichever tier, until the lease is released.

        Reads from NVMe begin now. changes, soon: as in `Lease`.
        """
        if changes:
            self.before_change(block)
        far = [name for name in names if self.is_on_nvme(name, block)]
        in_memory = {name: self.array(name, block) for name in names if name not in far}
        on_nvme = self.nvme.lease(block, far, changes=changes) if self.nvme and far else None
        return Lease(in_memory, on_nvme, changes, soon)

    def pieces(self, name: str, block: int, start: int, numel: int) -> Iterator[torch.Tensor]:
        """The elements from `start` to `start + numel` that this rank owns, piece by piece.

        On the device are views of at most READ_BYTES; else they are on the CPU. Nobody may change
        the array meanwhile. All but the last are whole multiples of READ_BYTES.
        """
        span = self.span(name, block)
        stop = min(start + numel, span.stop) - span.start
        start = max(start, span.start) - span.start
        if start >= stop:
            return
        if self.nvme is not None and self.nvme.holds(name, block):
            yield from self.nvme.pieces(name, block, start, stop - start)
            return
        found = self.array(name, block)[start:stop]
        if found.is_cpu:
            yield found  # a view, without a copy
        else:
            yield from torch.split(found, READ_BYTES // found.itemsize)

    def whole(self, name: str, block: int) -> torch.Tensor:
        """An array of all ranks' shares, a copy on each. All call it at the same place."""
        if self.world.is_alone:
            return self.lasting(name, block)
        with self.world.together():
            mine = self.lasting(name, block)
        return self.world.whole(mine, self.span(name, block, 0).numel)

    def lasting(self, name: str, block: int) -> torch.Tensor:
        """An array on the CPU for longer than a lease: the store's own if in RAM, else a copy."""
        if not self.is_on_nvme(name, block):
            return self.array(name, block).cpu()
        with self.lease(block, [name]) as arrays:
            return arrays[name].clone()  # its buffer goes to another array after the lease

    # -- updates -----------------------------------------------------------------------------------

    def timed(self, wait: Callable[[], None]) -> dict[str, float]:
        """Call `wait`, for an update: its seconds by cause, those of the drive apart."""
        started, before = time.perf_counter(), self.nvme.waited_s if self.nvme else 0.0
        wait()
        seconds, on_nvme = time.perf_counter() - started, self.nvme.waited_s if self.nvme else 0.0
        return {"nvme": on_nvme - before, "update": seconds - (on_nvme - before)}

    def stop(self, error: BaseException) -> None:
        """Make every wait for arrays on NVMe raise `error`, now or later: an update failed."""
        if self.nvme is not None:
            self.nvme.stop(error)
        self.stop_waiting(error)

    def stop_waiting(self, error: BaseException) -> None:
        """No more waits for other ranks' updates: each raises `error`."""
        if self.shared is not None:
            self.shared.stop(error)

    def say_updated(self, block: int) -> None:
        """Tell ranks that read this one's weights that one more update of a block is done."""
        if self.shared is not None:
            self.shared.say_updated(block)

    def wait_for_others(self, block: int, updates: int) -> None:
        """Return once a block's weights have that many updates on all ranks, if in one copy."""
        if self.shared is not None:
            self.shared.wait_for_others(block, updates)

    def check(self) -> None:
        """Raise what stopped the transfers to and from NVMe, if anything did so far."""
        if self.nvme is not None:
            self.nvme.check()

    def close(self) -> None:
        self._opened.close()

    def __exit__(self, *_: object) -> None:
        self.close()


class Lease:
    """Arrays of a block by name, valid until `release`. As a context manager: waits, then releases.

    Args:
        changes: the holder writes to the arrays.
        soon: changes go to the drive at once, not only when another array needs the buffer.
    """

    def __init__(
        self,
        in_memory: Mapping[str, torch.Tensor],
        on_nvme: NvmeLease | None,
        changes: bool,
        soon: bool,
    ) -> None:
        self._in_memory, self._on_nvme = in_memory, on_nvme
        self._changes, self._soon = changes, soon

    def wait(self) -> dict[str, torch.Tensor]:
        """The arrays, once they are in memory. Raises StorageError."""
        return {**self._in_memory, **(self._on_nvme.wait() if self._on_nvme is not None else {})}

    def release(self, *, changed: bool | None = None) -> None:
        """Give the arrays back, even before they arrived; a second call does nothing. changed: keep
        the new values; default: `changes`."""
        on_nvme, self._on_nvme, self._in_memory = self._on_nvme, None, {}
        if on_nvme is not None:
            on_nvme.release(changed=self._changes if changed is None else changed, soon=self._soon)

    def __enter__(self) -> dict[str, torch.Tensor]:
        try:
            return self.wait()
        except BaseException:
            self.release(changed=False)  # `__exit__` is not called then
            raise

    def __exit__(self, *_: object) -> None:
        self.release()  # as changed, also after an error: part of the change may have been made
