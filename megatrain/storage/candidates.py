"""The tensors of a model folder or a GGUF file, as they are on their way into the arrays."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from megatrain.errors import ModelError
from megatrain.models.initialize import NewHead
from megatrain.models.pretrained import UNUSABLE, ModelSource, read_model_config
from megatrain.models.quantised import quantisation_in
from megatrain.storage.dequantise import Dequantised, dequantised
from megatrain.storage.safetensors_reader import StoredTensor, open_shards, read_chunks

logger = logging.getLogger("megatrain")


@dataclass(frozen=True)
class Candidate:
    """A tensor of the source. `chunks(start, stop)` yields (first element, flat values) in order:
    of all of it by default, else at least of those elements.

    stored: where it lies in a safetensors file; None for other sources and quantised tensors.
    quantised: how those are read.
    """

    where: str  # file and name, for error messages
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: Callable[..., Iterable[tuple[int, torch.Tensor]]]
    stored: StoredTensor | None = None
    quantised: Dequantised | None = None


def open_folder(source: ModelSource) -> dict[str, Candidate]:
    """What a model folder holds, by the headers of its files.

    Raises ModelError and StorageError, as `open_shards` and `dequantised`.
    """
    stored, how = open_shards(source.path), quantisation_in(source.path)
    found = {}
    if how is not None:
        quantised, stored = dequantised(stored, how)
        for name, q in quantised.items():
            found[name] = Candidate(q.values.where, q.dtype, q.shape, q.chunks, quantised=q)
    for name, t in stored.items():
        found[name] = Candidate(t.where, t.dtype, t.shape, partial(read_chunks, t), t)
    return found


def say_dequantised(
    candidates: Mapping[str, Candidate], dtype: torch.dtype, source: ModelSource
) -> None:
    """Tell that weights are read otherwise than a folder has them, and kept in `dtype`."""
    how = quantisation_in(source.path)
    if how is not None and any(c.quantised is not None for c in candidates.values()):
        nbytes = sum(math.prod(c.shape) for c in candidates.values()) * dtype.itemsize
        logger.info(
            f"{source.path}: its {how.method} weights are dequantised when they are read; all are "
            f"{str(dtype).removeprefix('torch.')} from then on, {nbytes / 1e9:.3g} GB"
        )


def read_gguf(source: ModelSource) -> dict[str, Candidate]:
    """The tensors of a GGUF file, all of them in RAM, de-quantised to fp32 by transformers.

    Its `from_pretrained` would do the same, but wants the accelerate package only to read a file.
    """
    from transformers import AutoModelForCausalLM

    config, file = read_model_config(source), source.file
    try:
        from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

        with torch.device("meta"):
            names = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
        read: Any = load_gguf_checkpoint
        tensors = read(str(file), return_tensors=True, model_to_load=names)["tensors"]
    except UNUSABLE as error:
        raise ModelError(
            f"{file}: this GGUF file cannot be read ({error}); "
            "name the Hugging Face folder of the model instead"
        ) from error
    return {
        name: Candidate(f"{file}: {name}", t.dtype, tuple(t.shape), partial(_whole, t))
        for name, t in tensors.items()
    }


def _whole(tensor: torch.Tensor, *_: int) -> list[tuple[int, torch.Tensor]]:
    return [(0, tensor.reshape(-1))]


def with_head(
    candidates: Mapping[str, Candidate], head: NewHead | None, source: ModelSource
) -> dict[str, Candidate]:
    """The tensors of a language model's folder, and those that its classifier has besides, without
    those that this has no use for. What that comes to is said."""
    if head is None:
        return dict(candidates)
    found = {name: c for name, c in candidates.items() if name not in head.unused}
    drawn = {name: values for name, values in head.drawn.items() if name not in found}
    for name, values in drawn.items():
        whole = partial(_whole, values)
        found[name] = Candidate(name, values.dtype, tuple(values.shape), whole)
    if drawn:
        logger.info(f"{source.file}: has no {listed(sorted(drawn))}, which is drawn at random")
    if unused := sorted(candidates.keys() & head.unused):
        logger.info(f"{source.file}: {listed(unused)} is not used: a reward model has another head")
    return found


def listed(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more tensors"
