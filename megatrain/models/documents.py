"""Documents packed into one sequence: where they begin, and masks that keep them apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from megatrain.models.recorder import LayerCall

# Names that transformers gives to what kernels of recurrences take.
BEGINNINGS, NUMBERS = "cu_seq_lens_q", "seq_idx"


def documents_of(positions: torch.Tensor) -> torch.Tensor:
    """[batch, tokens]: the number of each token's document in its sequence.

    A document begins where positions do not go on by one.
    """
    steps = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1)
    return (steps != 1).cumsum(-1)


def boundaries_of(positions: torch.Tensor) -> dict[str, torch.Tensor]:
    """Offsets at which the documents of sequences [batch, tokens] begin, as kernels take it, in
    int32.

    cu_seq_lens_q [documents + 1] has their beginnings where all sequences lie end to end, and the
    number of tokens; seq_idx [batch, tokens] the number of each token's document among all.
    """
    documents = documents_of(positions)
    begins = torch.diff(documents, prepend=documents[:, :1] - 1, dim=-1).flatten()
    end = begins.new_tensor([begins.numel()])
    beginnings = torch.cat([begins.nonzero().flatten(), end])
    numbers = (begins.cumsum(0) - 1).view_as(positions)
    return {BEGINNINGS: beginnings.int(), NUMBERS: numbers.int()}


def told(calls: list[LayerCall], masked: Sequence[bool], shape: torch.Size) -> list[LayerCall]:
    """Calls of layers as they keep documents apart: by the mask that they get, or by kernels.

    Args:
        calls: with what `boundaries_of` found.
        masked: for each layer, whether its mask separates documents.
        shape: [batch, tokens].

    Kernels take the beginnings of documents in one sequence only. So sequences are laid end to end
    where there is no mask. (Masks of such a sequence would grow with its square.)
    """
    known: dict[int, torch.Tensor] = {}  # layers go on sharing what they share

    def flat(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[:2] != shape:
            return tensor
        return known.setdefault(id(tensor), tensor.flatten(0, 1).unsqueeze(0))

    def of_layer(call: LayerCall, by_mask: bool) -> LayerCall:
        if by_mask:
            given = {name: value for name, value in call.kwargs.items() if name != BEGINNINGS}
            return LayerCall(call.args, given)
        args, kwargs = pytree.tree_map_only(torch.Tensor, flat, (call.args, call.kwargs))
        return LayerCall(args, kwargs, end_to_end=True)

    return list(map(of_layer, calls, masked))


def none_found(positions: torch.Tensor) -> None:
    """The answer for positions that the model itself counted: nothing is packed."""


@contextmanager
def documents_known(find: Callable[[torch.Tensor], torch.Tensor | None]) -> Iterator[None]:
    """Have transformers ask `find` for the documents of positions; its own search stalls GPUs."""
    from transformers import masking_utils

    search = "find_packed_sequence_indices"
    found = getattr(masking_utils, search, None)  # releases before it do not search
    if found is None:
        yield
        return
    setattr(masking_utils, search, find)
    try:
        yield
    finally:
        setattr(masking_utils, search, found)


def separates(mask: Any) -> bool:
    """True for a mask [.., 4, 4] in which the last two tokens see themselves, not the first two."""
    if not isinstance(mask, torch.Tensor) or mask.ndim < 2 or mask.shape[-2:] != (4, 4):
        return False
    seen = mask if mask.dtype == torch.bool else mask == 0
    return bool(seen.diagonal(dim1=-2, dim2=-1).all()) and not bool(seen[..., 2:, :2].any())
