"""All parameters and optimizer state of a model, over the tiers: the first blocks on the device, the others in host RAM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Protocol

import torch

from megatrain.memory.device_store import DeviceStore
from megatrain.memory.host_store import ArraySpec, HostStore
from megatrain.memory.layout import FlatLayout


class Arrays(Protocol):
    """What readers and writers of a store need of it."""

    @property
    def layouts(self) -> tuple[FlatLayout, ...]: ...
    @property
    def arrays(self) -> Mapping[str, ArraySpec]: ...

    def layout(self, name: str, block: int) -> FlatLayout:
        """Where the tensors of a block lie in its array `name`."""

    def array(self, name: str, block: int) -> torch.Tensor:
        """The flat array `name` of a block: 1-D, `layout(name, block).numel` elements, on whatever tier it lies."""


class Store:
    """Owns the arrays of all blocks. Use as a context manager, or `close` it.

    Args:
        layouts: one per block, in execution order.
        arrays: of the blocks in host RAM.
        first: the block from which on an array exists there, by name; `resident` where it is not named.
        resident: the first so many blocks live on the device.
        resident_arrays: of those.
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
        threads: int = 8,
    ) -> None:
        self.layouts = tuple(layouts)
        self.arrays = {spec.name: spec for spec in arrays}
        self.resident = resident
        starts = dict.fromkeys(self.arrays, resident) | dict(first or {})
        self.host = HostStore(layouts, arrays, first=starts, pinned=device.type == "cuda", threads=threads)
        try:
            self.device = DeviceStore(layouts, resident_arrays, count=resident, device=device)
        except BaseException:
            self.host.close()
            raise

    def is_resident(self, block: int) -> bool:
        """Whether the block lives on the device."""
        return block < self.resident

    def layout(self, name: str, block: int) -> FlatLayout:
        """Where the tensors of a block lie in its array `name`."""
        return self.layouts[block].per(self.arrays[name].per)

    def array(self, name: str, block: int) -> torch.Tensor:
        """The flat array `name` of a block: 1-D, `layout(name, block).numel` elements, a view of the store's memory on its tier."""
        return (self.device if self.is_resident(block) else self.host).array(name, block)

    def has(self, name: str) -> bool:
        return name in self.arrays

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that the store holds."""
        return self.host.nbytes

    def close(self) -> None:
        self.device.close()
        self.host.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
