"""Random weights for pre-training, by each family's own rule, one block at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from megatrain.heartbeat import may_end_here
from megatrain.models.constants import Block
from megatrain.models.family import build_model
from megatrain.models.meta import lent
from megatrain.models.names import reverted
from megatrain.models.pretrained import as_language_model
from megatrain.models.skeleton import Skeleton

Write = Callable[[int, torch.Tensor], None]  # (block index, flat fp32 master on the device) -> None


def initialize(skeleton: Skeleton, seed: int, device: torch.device, write: Write) -> None:
    """Draw every block's fp32 weights by the model's `_init_weights`; `write` each."""
    devices = [device] if device.type == "cuda" else []
    for block in skeleton.anatomy.blocks:
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            torch.manual_seed(_seed_of(block, seed))
            flat = torch.zeros(block.layout.numel, dtype=torch.float32, device=device)
            draw(skeleton, block, flat)
            write(block.index, flat)
            may_end_here()
            del flat  # before the next one is there


def draw(skeleton: Skeleton, block: Block, flat: torch.Tensor) -> None:
    """Fill `flat` [numel] with the block's weights, and its constants where they are."""
    views = block.layout.views(flat)
    with lent([skeleton.owner(name) for name in views], list(map(nn.Parameter, views.values()))):
        for path in modules_of(skeleton, block):
            module, _ = skeleton.owner(f"{path}." if path else "")
            skeleton.model._init_weights(module)  # type: ignore[operator]


def modules_of(skeleton: Skeleton, block: Block) -> list[str]:
    """Paths of the modules whose parameters are all the block's, or that own one; inner ones first.
    transformers' order. GPT-2's attention, for one, scales its last matrix down afterwards."""
    names = [tensor.name for tensor in (*block.layout.tensors, *block.constants.tensors)]
    others = (other for other in skeleton.anatomy.blocks if other is not block)
    elsewhere = [tensor.name for other in others for tensor in other.layout.tensors]
    paths = {name.rpartition(".")[0]: None for name in names}  # a dict, for its order
    for path in list(paths):
        while path := path.rpartition(".")[0]:
            if path not in paths and not any(name.startswith(f"{path}.") for name in elsewhere):
                paths[path] = None
    return sorted(paths, key=lambda path: -path.count("."))


def _seed_of(block: Block, seed: int) -> int:
    return (seed * 100_003 + block.index) % 2**63  # any integer may be a seed


@dataclass(frozen=True)
class NewHead:
    """The tensors that a classifier has beside its language model."""

    drawn: Mapping[str, torch.Tensor]  # fp32, by name: those that the language model's folder lacks
    unused: frozenset[str]  # names in it that the classifier has no use for


def new_head(skeleton: Skeleton, seed: int) -> NewHead:
    """The head of a classifier, drawn on the CPU by the model's `_init_weights`."""
    config, anatomy = skeleton.config, skeleton.anatomy
    model = build_model(as_language_model(config), config._attn_implementation, skeleton.dtype)
    theirs, blocks = model.state_dict(), anatomy.blocks
    shapes = {t.name: t.shape for block in blocks for t in block.layout.tensors}
    constants = {t.name for block in blocks for t in block.constants.tensors}
    own = {*shapes, *constants, *anatomy.unused_weights.names}
    others = {name: tensor for name, tensor in theirs.items() if name not in own}
    drawn = {name: torch.zeros(shape) for name, shape in shapes.items() if name not in theirs}
    places = [skeleton.owner(name) for name in drawn]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(_seed_of(anatomy.head, seed))  # not CUDA's
        with lent(places, list(map(nn.Parameter, drawn.values()))):
            for module in dict.fromkeys(module for module, _ in places):
                skeleton.model._init_weights(module)  # type: ignore[operator]
    return NewHead(drawn, frozenset([*others, *reverted(model, others)]))
