"""Random weights for pre-training, by each family's own rule, one block at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from megatrain.heartbeat import may_end_here
from megatrain.models.anatomy import Block
from megatrain.models.meta import lent
from megatrain.models.skeleton import Skeleton

Write = Callable[[int, torch.Tensor], None]  # (block index, flat fp32 master on the device) -> None


def initialize(skeleton: Skeleton, seed: int, device: torch.device, write: Write) -> None:
    """Draw every block's fp32 weights on `device` by the model's `_init_weights`; `write` each.

    One seed gives the same weights on one device type. The caller's random state stays as it was.
    """
    devices = [device] if device.type == "cuda" else []
    for block in skeleton.anatomy.blocks:
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            torch.manual_seed((seed * 100_003 + block.index) % 2**63)  # any integer may be a seed
            flat = torch.zeros(block.layout.numel, dtype=torch.float32, device=device)
            draw(skeleton, block, flat)
            write(block.index, flat)
            may_end_here()
            del flat  # before the next one is there


def draw(skeleton: Skeleton, block: Block, flat: torch.Tensor) -> None:
    """Fill `flat` [numel], which its parameters view meanwhile, with the block's weights.

    Its constants are filled where they are.
    """
    views = block.layout.views(flat)
    with lent([skeleton.owner(name) for name in views], list(map(nn.Parameter, views.values()))):
        for path in modules_of(skeleton, block):
            module, _ = skeleton.owner(f"{path}." if path else "")
            skeleton.model._init_weights(module)  # type: ignore[operator]


def modules_of(skeleton: Skeleton, block: Block) -> list[str]:
    """Paths of the modules whose parameters are all the block's, or that own one; inner ones first.

    transformers' order. GPT-2's attention, for one, scales its last matrix down afterwards.
    """
    names = [tensor.name for tensor in (*block.layout.tensors, *block.constants.tensors)]
    others = (other for other in skeleton.anatomy.blocks if other is not block)
    elsewhere = [tensor.name for other in others for tensor in other.layout.tensors]
    paths = {name.rpartition(".")[0]: None for name in names}  # a dict, for its order
    for path in list(paths):
        while path := path.rpartition(".")[0]:
            if path not in paths and not any(name.startswith(f"{path}.") for name in elsewhere):
                paths[path] = None
    return sorted(paths, key=lambda path: -path.count("."))
