"""Passes over logits [n, vocab]: compiled into one kernel, or a few rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

# The fp32 copy of the rows that an unfused softmax takes at a time: an L2 cache's worth.
FP32_TEMPORARY_BYTES = 32 << 20


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as one kernel, compiled at its first call, and for other numbers of rows."""
    # Variants are not timed against each other: to time one that writes over the logits, torch
    # would save these in pinned host RAM, up to 4 GiB that are never given back.
    return torch.compile(function, options={"triton.autotune_pointwise": False})


def pieces(logits: Tensor, fused: bool = False) -> Iterator[slice]:
    """Slices of rows whose fp32 copy fits FP32_TEMPORARY_BYTES; all rows, without one, if fused."""
    step = max(1, len(logits) if fused else FP32_TEMPORARY_BYTES // (4 * logits.shape[-1]))
    return (slice(start, start + step) for start in range(0, len(logits), step))
