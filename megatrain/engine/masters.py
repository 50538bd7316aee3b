"""Writing weights into a store from fp32 values."""

from __future__ import annotations

import torch

from megatrain.memory.store import Store
from megatrain.optim.split import CHUNK, split_master


def write_master(store: Store, block: int, master: torch.Tensor) -> None:
    """Set a block's weights from flat fp32 values [numel] on any device. Frozen ones are rounded to
    the weights' dtype, as PyTorch rounds."""
    names = [name for name in ("weight", "remainder") if name in store.arrays]
    with store.lease(block, names, changes=True) as arrays:
        trainable = store.layouts[block].trainable
        arrays["weight"][trainable:].copy_(master[trainable:])
        arrays["weight"], master = arrays["weight"][:trainable], master[:trainable]
        if "remainder" not in arrays:
            arrays["weight"].copy_(master)
            return
        # piece by piece: on a GPU both halves at once would need as much memory again
        targets = [torch.split(array, CHUNK) for array in arrays.values()]
        for piece, *into in zip(torch.split(master, CHUNK), *targets, strict=True):
            for target, half in zip(into, split_master(piece), strict=True):
                target.copy_(half)
