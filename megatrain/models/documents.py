"""Documents that share a sequence: where they begin, and whether a mask keeps them apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def documents_of(positions: torch.Tensor) -> torch.Tensor:
    """Which document of its sequence each token belongs to, [batch, tokens]: another one begins where positions do not go on by one."""
    steps = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1)
    return (steps != 1).cumsum(-1)


def none_found(positions: torch.Tensor) -> None:
    """Of positions that the model itself counted."""


@contextmanager
def documents_known(find: Callable[[torch.Tensor], torch.Tensor | None]) -> Iterator[None]:
    """Have transformers ask `find` for the packed documents in positions. Its own search ends in a question to the GPU whether there are
    any, for whose answer the GPU stands still, once with every run of the model."""
    from transformers import masking_utils

    search = "find_packed_sequence_indices"
    found = getattr(masking_utils, search, None)
    if found is None:  # a release that does not search
        yield
        return
    setattr(masking_utils, search, find)
    try:
        yield
    finally:
        setattr(masking_utils, search, found)


def separates(mask: Any) -> bool:
    """Whether this is a mask [.., 4, 4] under which the last two tokens do not see the first two, and each sees itself."""
    if not isinstance(mask, torch.Tensor) or mask.ndim < 2 or mask.shape[-2:] != (4, 4):
        return False
    seen = mask if mask.dtype == torch.bool else mask == 0
    return bool(seen.diagonal(dim1=-2, dim2=-1).all()) and not bool(seen[..., 2:, :2].any())
