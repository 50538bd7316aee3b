"""Passengers: the weights of a model that its forward on text alone never touches.

A folder of a model that sees holds a vision tower beside the language model. Nothing of that is
loaded, allocated or trained; its tensors go unchanged from the folder that is read into those that
are written (`storage/carried.py`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

NOT_YET = "images in the data are not supported yet"
# What a micro-batch of text may hold.
OF_TEXT = ("input_ids", "labels", "attention_mask", "position_ids")


@dataclass(frozen=True)
class Passengers:
    """What of a model is carried along.

    Attributes:
        names: of parameters and of buffers that belong to the weights.
        modules: paths of the largest modules that hold nothing else.
        nbytes: of all of them, in the dtype that the configuration states.
    """

    names: tuple[str, ...]
    modules: tuple[str, ...]
    nbytes: int


NOBODY = Passengers((), (), 0)


def passengers_of(model: nn.Module, names: Collection[str], dtype: torch.dtype) -> Passengers:
    """Describe the passengers of these names. dtype: of the folder that they are in."""
    own = weights_of(model)
    numel = sum({id(tensor): tensor.numel() for name, tensor in own.items() if name in names}.values())
    return Passengers(tuple(names), _modules(model, names), numel * dtype.itemsize)


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers that a folder holds, by name, every name of a shared one."""
    return model.state_dict(keep_vars=True)


def _modules(model: nn.Module, names: Collection[str]) -> tuple[str, ...]:
    """The largest modules whose weights are all among these; a single one where its module's
    others are not."""
    others = [name for name in weights_of(model) if name not in names]
    found: dict[str, None] = {}
    for name in names:
        parts = name.split(".")
        paths = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
        found[next(p for p in paths if not any(o.startswith(f"{p}.") for o in others))] = None
    return tuple(found)


def is_below(path: str, roots: Collection[str]) -> bool:
    """True if a module or tensor is one of these, or inside one."""
    return any(path == root or path.startswith(f"{root}.") for root in roots)


def drop_buffers(model: nn.Module, names: Collection[str]) -> None:
    """Take their memory from buffers of these names."""
    for path, module in model.named_modules():
        for leaf, buffer in module._buffers.items():
            if buffer is not None and (f"{path}.{leaf}" if path else leaf) in names:
                module._buffers[leaf] = buffer.to("meta")


def dtype_of(config: Any) -> torch.dtype:
    """The dtype that a folder's configuration states; float32 where it states none."""
    stated = config.dtype
    found = getattr(torch, stated, None) if isinstance(stated, str) else stated
    return found if isinstance(found, torch.dtype) else torch.float32
