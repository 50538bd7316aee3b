"""A skeleton as transformers' own model, for as long as something reads it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from megatrain.models.probe import replace_all
from megatrain.models.skeleton import Skeleton


@contextmanager
def whole(skeleton: Skeleton, flats: Sequence[torch.Tensor]) -> Iterator[Any]:
    """Inside, the family's own model, its layers in their places, in evaluation mode.

    flats: its weights, by block, on the device. The parameters that the blocks have otherwise are
        theirs again afterwards.
    """
    skeleton.set_training(False)
    skeleton.forget_lengths()
    blocks, bound = skeleton.anatomy.blocks, []
    for block in blocks:
        places = [skeleton.owner(spec.name) for spec in block.layout.tensors]
        bound.append([module._parameters[leaf] for module, leaf in places])
    try:
        for block, flat in zip(blocks, flats, strict=True):
            skeleton.bind(block, flat)
        replace_all(skeleton.stack, skeleton.layers)
        yield skeleton.model
    finally:
        replace_all(skeleton.stack, skeleton.recorders)
        for block, parameters in zip(blocks, bound, strict=True):
            skeleton.place(block, parameters)
