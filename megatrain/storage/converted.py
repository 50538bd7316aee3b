"""The weights of a checkpoint in another dtype, piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import torch

from megatrain.errors import ModelError
from megatrain.optim.split import join_master
from megatrain.storage.safetensors_reader import StoredTensor, read_chunks, read_header
from megatrain.storage.safetensors_writer import TensorSource


def converted(
    checkpoint: Path, stored: Mapping[str, StoredTensor], dtype: torch.dtype
) -> list[TensorSource]:
    """The weights in another dtype: float32 exactly, from the remainders; bfloat16 by rounding."""
    if dtype == torch.bfloat16:
        return [TensorSource(t.name, dtype, t.shape, partial(_rounded, t)) for t in stored.values()]
    files = sorted((checkpoint / "optimizer").glob("*.safetensors"))
    states = {name: t for path in files for name, t in read_header(path).tensors.items()}
    lost = [name for name in stored if f"remainder/{name}" not in states]
    if lost:
        raise ModelError(
            f"{checkpoint}: has no remainder of {lost[0]}, so its float32 master is unknown; "
            "export it as bfloat16"
        )
    return [
        TensorSource(name, dtype, t.shape, partial(_joined, t, states[f"remainder/{name}"]))
        for name, t in stored.items()
    ]


def _rounded(stored: StoredTensor) -> Iterator[torch.Tensor]:
    """bfloat16, to nearest even."""
    for _, values in read_chunks(stored):
        yield values.to(torch.bfloat16)


def _joined(weight: StoredTensor, remainder: StoredTensor) -> Iterator[torch.Tensor]:
    for (_, high), (_, low) in zip(read_chunks(weight), read_chunks(remainder), strict=True):
        yield join_master(high, low)
