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
            torch.manual_seed((seed * 100_003 + block.index) % 2**63)  # any integer may be a seed
            flat = torch.zeros(block.layout.numel, dtype=torch.float32, device=device)
            draw(skeleton, block, flat)
            write(block.index, flat)
            del flat  # before the next one is there


def draw(skeleton: Skeleton, block: Block, flat: torch.Tensor) -> None:
    """Fill `flat` [numel] with the block's initial weights: its modules' parameters are views of it while the model's rule runs."""
    views = block.layout.views(flat)
    owners = [(*skeleton.owner(name), view) for name, view in views.items()]
    before = [(module, leaf, module._parameters[leaf]) for module, leaf, _ in owners]
    for module, leaf, view in owners:
        module._parameters[leaf] = nn.Parameter(view)
    try:
        for path in modules_of(skeleton, block):
            module, _ = skeleton.owner(f"{path}." if path else "")
            skeleton.model._init_weights(module)  # type: ignore[operator]
    finally:
        for module, leaf, parameter in before:
            module._parameters[leaf] = parameter


def modules_of(skeleton: Skeleton, block: Block) -> list[str]:
    """Paths of the modules that own the block's parameters and of all that contain nothing else, inner before outer, as transformers goes.

    Some rules are about an outer module: GPT-2's attention scales the last of its matrices down.
    """
    names = [tensor.name for tensor in block.layout.tensors]
    elsewhere = [tensor.name for other in skeleton.anatomy.blocks if other is not block for tensor in other.layout.tensors]
    paths = {name.rpartition(".")[0]: None for name in names}  # a dict, for its order
    for path in list(paths):
        while path := path.rpartition(".")[0]:
            if path not in paths and not any(name.startswith(f"{path}.") for name in elsewhere):
                paths[path] = None
    return sorted(paths, key=lambda path: -path.count("."))
