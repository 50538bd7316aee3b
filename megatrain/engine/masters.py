"""Writing weights into a store from fp32 values."""

from __future__ import annotations

import torch

from megatrain.memory.store import Store
from megatrain.optim.split import CHUNK, split_master


def write_master(store: Store, block: int, master: torch.Tensor) -> None:
    """Set a block's weights from flat fp32 values [numel] on any device, of which a rank keeps its
    share; frozen ones have no remainder."""
    master = master[slice(*store.spans[block])]
    names = [name for name in ("weight", "remainder") if name in store.arrays]
    with store.lease(block, names, changes=True) as arrays:
        if "remainder" not in arrays:
            arrays["weight"].copy_(master)
            return
        # piece by piece: on a GPU both halves at once would need as much memory again
        weight, remainder = arrays["weight"], arrays["remainder"]
        for start in range(0, len(master), CHUNK):
            high, low = split_master(master[start : start + CHUNK])
            weight[start : start + CHUNK].copy_(high)
            trained = remainder[start : start + CHUNK]
            trained.copy_(low[: len(trained)])
