"""Unused weights: those of a model that its forward on text alone never touches.

A folder of a model that sees holds a vision tower beside the language model. Nothing of that is
loaded, allocated or trained; its tensors go unchanged from the folder that is read into those that
are written (`storage/passthrough.py`).
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megatrain.data.samples import NO_IMAGES as NO_IMAGES
from megatrain.models.constants import kept_tensors

# What a micro-batch of text may hold.
OF_TEXT = ("input_ids", "labels", "attention_mask", "position_ids")


# why: decision 0068
@dataclass(frozen=True)
class UnusedWeights:
    """The weights of a model that are copied unchanged.

    Attributes:
        names: of parameters and of buffers that belong to the weights.
        modules: paths of the largest modules that hold nothing else.
        nbytes: of all of them, in the dtype that the configuration states.
        multimodal: the configuration describes more than a language model.
    """

    names: tuple[str, ...]
    modules: tuple[str, ...]
    nbytes: int
    multimodal: bool = False


NOBODY = UnusedWeights((), (), 0)


def without_source(who: UnusedWeights) -> str:
    """The sentence that refuses a model whose unused weights are nowhere."""
    return (
        f"{listed(who.modules)} {are(who.modules)} carried along from a folder with weights, and "
        "there is none: train this model from its weights, or a language model from its own "
        "configuration"
    )


def listed(names: Collection[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def are(names: Collection[str]) -> str:
    return "is" if len(names) == 1 else "are"


def find_unused_weights(model: nn.Module, names: Collection[str], config: Any) -> UnusedWeights:
    """Describe the unused weights of these names. config: of the folder that they are in."""
    mine = {id(tensor): tensor for name, tensor in kept_tensors(model).items() if name in names}
    nbytes = sum(tensor.numel() for tensor in mine.values()) * dtype_of(config).itemsize
    multimodal = bool(mine) and bool(parts_of(config))  # a text's configuration has parts, too
    return UnusedWeights(tuple(names), _modules(model, names), nbytes, multimodal)


def _modules(model: nn.Module, names: Collection[str]) -> tuple[str, ...]:
    """The largest modules whose weights are all among these; a single one where its module's
    others are not."""
    others = [name for name in kept_tensors(model) if name not in names]
    found: dict[str, None] = {}
    for name in names:
        parts = name.split(".")
        paths = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
        found[next(p for p in paths if not any(o.startswith(f"{p}.") for o in others))] = None
    return tuple(found)


def is_below(path: str, roots: Collection[str]) -> bool:
    """True if a module or tensor is one of these, or inside one."""
    return any(path == root or path.startswith(f"{root}.") for root in roots)


def parts_of(config: Any) -> dict[str, Any]:
    """The configurations inside a configuration, by key: of text, of a vision tower."""
    from transformers import PretrainedConfig

    return {key: part for key, part in vars(config).items() if isinstance(part, PretrainedConfig)}


def poison(model: nn.Module, names: Collection[str], device: torch.device | str = "cpu") -> None:
    """Put NaN in the place of weights: whatever computes with them shows. It takes no memory."""
    for path, module in model.named_modules(remove_duplicate=False):
        held: dict[str, Any] = module._parameters | module._buffers
        for leaf, tensor in held.items():
            if tensor is None or (f"{path}.{leaf}" if path else leaf) not in names:
                continue
            value = math.nan if tensor.is_floating_point() else 0
            one = torch.full((), value, dtype=tensor.dtype, device=device).expand(tensor.shape)
            if leaf in module._buffers:
                module._buffers[leaf] = one
            else:
                module._parameters[leaf] = nn.Parameter(one, tensor.requires_grad)


def dtype_of(config: Any) -> torch.dtype:
    """The dtype that a folder's configuration states; float32 where it states none."""
    stated = config.dtype
    found = getattr(torch, stated, None) if isinstance(stated, str) else stated
    return found if isinstance(found, torch.dtype) else torch.float32
