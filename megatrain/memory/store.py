"""All parameters and optimizer state of a model, over the tiers: the first blocks on the device, the others in host RAM or on NVMe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Protocol

import torch

from megatrain.memory.device_store import DeviceStore
from megatrain.memory.host_store import ArraySpec, HostStore
from megatrain.memory.layout import FlatLayout
from megatrain.memory.lease import Lease
from megatrain.memory.nvme_store import NvmeStore

PIECE_ELEMENTS = 1 << 24  # of what lies on the device, copied to the host at a time


class Arrays(Protocol):
    """What readers and writers of a store need of it."""

    @property
    def layouts(self) -> tuple[FlatLayout, ...]: ...
    @property
    def arrays(self) -> Mapping[str, ArraySpec]: ...

    def layout(self, name: str, block: int) -> FlatLayout:
        """Where the tensors of a block lie in its array `name`."""

    def lease(self, block: int, names: Sequence[str], *, changes: bool = False, fill: bool = True, soon: bool = True) -> Lease:
        """Flat arrays of a block for a while: 1-D, `layout(name, block).numel` elements, on whatever tier they lie. See `Lease`.

        `fill`: they are wanted with what they hold; all of them is overwritten otherwise.
        """

    def pieces(self, name: str, block: int, start: int, numel: int) -> Iterator[torch.Tensor]:
        """`numel` elements of an array from `start` on, piece by piece, on the CPU. Each piece is valid until the next is asked for."""


@dataclass(frozen=True)
class OnNvme:
    """What lies on NVMe: blocks by array name, and the folders."""

    blocks: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    folders: tuple[Path, ...] = ()


class Store:
    """Owns the arrays of all blocks. Use as a context manager, or `close` it.

    Args:
        layouts: one per block, in execution order.
        arrays: of the blocks in host RAM.
        first: the block from which on an array exists there, by name; `resident` where it is not named.
        resident: the first so many blocks live on the device.
        resident_arrays: of those.
        on_nvme: blocks whose arrays are not in host RAM but on a drive.
        threads: for the first touch of host memory.
    """

    def __init__(
        self,
        layouts: Sequence[FlatLayout],
        arrays: Sequence[ArraySpec],
        *,
        device: torch.device,
        first: Mapping[str, int] | None = None,
        resident: int = 0,
        resident_arrays: Sequence[ArraySpec] = (),
        on_nvme: OnNvme | None = None,
        threads: int = 8,
    ) -> None:
        self.layouts = tuple(layouts)
        self.arrays = {spec.name: spec for spec in arrays}
        self.resident = resident
        starts = dict.fromkeys(self.arrays, resident) | dict(first or {})
        pinned, far = device.type == "cuda", on_nvme or OnNvme()
        with ExitStack() as opened:
            self.nvme: NvmeStore | None = None
            if any(far.blocks.values()):
                self.nvme = NvmeStore(layouts, arrays, far.blocks, far.folders, pinned=pinned, threads=threads)
                opened.callback(self.nvme.close)
            self.host = HostStore(layouts, arrays, first=starts, elsewhere=far.blocks, pinned=pinned, threads=threads)
            opened.callback(self.host.close)
            self.device = DeviceStore(layouts, resident_arrays, count=resident, device=device)
            opened.callback(self.device.close)
            self._opened = opened.pop_all()

    def is_resident(self, block: int) -> bool:
        """Whether the block lives on the device."""
        return block < self.resident

    def layout(self, name: str, block: int) -> FlatLayout:
        """Where the tensors of a block lie in its array `name`."""
        return self.layouts[block].per(self.arrays[name].per)

    def array(self, name: str, block: int) -> torch.Tensor:
        """The flat array `name` of a block that is not on NVMe: 1-D, `layout(name, block).numel` elements, a view of the store's memory."""
        return (self.device if self.is_resident(block) else self.host).array(name, block)

    def is_on_nvme(self, name: str, block: int) -> bool:
        """Whether the array can only be had by a lease that waits for it."""
        return self.nvme is not None and self.nvme.holds(name, block)

    def lease(
        self, block: int, names: Sequence[str], *, changes: bool = False, fill: bool = True, soon: bool = True, ahead: bool = True
    ) -> Lease:
        """Arrays of a block, on whatever tier they lie; those on NVMe are asked for now. See `Arrays`, `Lease` and `NvmeStore.lease`."""
        far = [name for name in names if self.is_on_nvme(name, block)]
        here = {name: self.array(name, block) for name in names if name not in far}
        there = self.nvme.lease(block, far, changes=changes, fill=fill, ahead=ahead) if self.nvme is not None and far else None
        return Lease(here, there, changes=changes, soon=soon)

    def pieces(self, name: str, block: int, start: int, numel: int) -> Iterator[torch.Tensor]:
        """See `Arrays`. Nobody may change the array meanwhile."""
        if self.nvme is not None and self.nvme.holds(name, block):
            yield from self.nvme.pieces(name, block, start, numel)
            return
        part = self.array(name, block).narrow(0, start, numel)
        yield from [part] if part.is_cpu else (piece.cpu() for piece in torch.split(part, PIECE_ELEMENTS))

    def lasting(self, name: str, block: int) -> torch.Tensor:
        """An array on the CPU for longer than a lease lasts: the store's own if it lies in host RAM, else a copy."""
        if not self.is_on_nvme(name, block):
            return self.array(name, block).cpu()
        with self.lease(block, [name]) as arrays:
            return arrays[name].clone()

    @property
    def nvme_waited_s(self) -> float:
        """Seconds so far in which an update waited for what lies on NVMe."""
        return 0.0 if self.nvme is None else self.nvme.waited_s

    def stop(self, error: BaseException) -> None:
        """Updates have stopped in the middle: whoever waits for what lies on NVMe, now or later, gets `error`."""
        if self.nvme is not None:
            self.nvme.stop(error)

    def has(self, name: str) -> bool:
        return name in self.arrays

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that the store holds."""
        return self.host.nbytes + (0 if self.nvme is None else self.nvme.nbytes)

    def close(self) -> None:
        self._opened.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
