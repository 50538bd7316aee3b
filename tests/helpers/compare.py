"""How far tensors are from each other: bit for bit, and by their norms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def bits(tensor: Tensor) -> Tensor:
    """The bit patterns, so that NaN equals NaN and 0 differs from -0."""
    as_integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(as_integers[tensor.element_size()])


def differing(a: Mapping[Any, Tensor], b: Mapping[Any, Tensor]) -> list[Any]:
    """Keys whose tensors are not bit for bit the same."""
    assert a.keys() == b.keys()
    return [key for key in a if not torch.equal(bits(a[key]), bits(b[key]))]


def distance(a: Tensor, b: Tensor) -> float:
    """Relative L2 distance."""
    a, b = a.detach().double().cpu(), b.detach().double().cpu()
    return float((a - b).norm() / b.norm().clamp(min=1e-12))


def apart(
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    share: float = 1e-5,
    of_largest: float | None = None,
) -> list[str]:
    """Names and distances of tensors that differ, in the L2 norm, by more than a share of the
    expected one.

    `of_largest` (default: a tenth of `share`) is a share of the largest tensor's norm that is
    allowed besides: some gradients are zero but for rounding.
    """
    assert found.keys() == expected.keys()
    of_largest = share / 10 if of_largest is None else of_largest
    norms = {name: float(tensor.detach().double().norm()) for name, tensor in expected.items()}
    largest = max(norms.values())
    distances = {name: distance(found[name], tensor) for name, tensor in expected.items()}
    return [
        f"{name}: {far:.1e}"
        for name, far in distances.items()
        if far * norms[name] > share * norms[name] + of_largest * largest
    ]
