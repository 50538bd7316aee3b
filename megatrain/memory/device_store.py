"""The computing device's own memory as the home of whole blocks: what lies here needs no transfer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from megatrain.memory.host_store import ArraySpec
from megatrain.memory.layout import FlatLayout


class DeviceStore:
    """Owns arrays of the first `count` blocks on `device`. New arrays are zero."""

    def __init__(self, layouts: Sequence[FlatLayout], arrays: Iterable[ArraySpec], *, count: int, device: torch.device) -> None:
        self.arrays = {spec.name: spec for spec in arrays}
        self._arrays = {
            (spec.name, block): torch.zeros(layouts[block].per(spec.per).numel, dtype=spec.dtype, device=device)
            for block in range(count)
            for spec in self.arrays.values()
        }

    def array(self, name: str, block: int) -> torch.Tensor:
        """The flat array `name` of a block: 1-D."""
        return self._arrays[name, block]

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that the store holds."""
        return sum(array.nbytes for array in self._arrays.values())

    def close(self) -> None:
        self._arrays.clear()
