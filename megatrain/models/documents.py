"""Documents packed into one sequence: where they begin, and masks that keep them apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def documents_of(positions: torch.Tensor) -> torch.Tensor:
    """[batch, tokens]: the number of each token's document in its sequence.

    A document begins where positions do not go on by one.
    """
    steps = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1)
    return (steps != 1).cumsum(-1)


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
