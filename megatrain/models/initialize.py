"""Random weights for pre-training, by each family's own rule, one block at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from megatrain.models.anatomy import Block
from megatrain.models.skeleton import Skeleton

Write = Callable[[int, torch.Tensor], None]  # (block index, flat fp32 master on the device) -> None


def initialize(skeleton: Skeleton, seed: int, device: torch.device, write: Write) -> None:
    """Draw every block's fp32 weights on `device` with the model's own `_init_weights`, and hand each block to `write`.

    The same seed gives the same weights on the same device type. Leaves the caller's random state as it was.
    """
    devices = [device] if device.type == "cuda" else []
    for block in skeleton.anatomy.blocks:
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            torch.manual_seed(seed * 100_003 + block.index)
            flat = torch.zeros(block.layout.numel, dtype=torch.float32, device=device)
            draw(skeleton, block, flat)
            write(block.index, flat)


def draw(skeleton: Skeleton, block: Block, flat: torch.Tensor) -> None:
    """Fill `flat` [numel] with the block's initial weights: its modules' parameters are views of it while the model's rule runs."""
    views = block.layout.views(flat)
    owners = [(*skeleton.owner(name), view) for name, view in views.items()]
    before = [(module, leaf, module._parameters[leaf]) for module, leaf, _ in owners]
    modules: dict[int, nn.Module] = {}
    for module, leaf, view in owners:
        module._parameters[leaf] = nn.Parameter(view)
        modules[id(module)] = module
    try:
        for module in modules.values():
            skeleton.model._init_weights(module)  # type: ignore[operator]
    finally:
        for module, leaf, parameter in before:
            module._parameters[leaf] = parameter
