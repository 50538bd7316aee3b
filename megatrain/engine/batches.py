"""Micro-batches: checked, moved to the device, cut into groups, and what is kept of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from megatrain.engine.activations.offload import Kept
from megatrain.engine.graphs import Graph
from megatrain.errors import ConfigError, DataError
from megatrain.losses import IGNORE, Targets, find_targets
from megatrain.models.anatomy import Anatomy
from megatrain.models.documents import boundaries_of
from megatrain.models.passengers import NO_IMAGES, OF_TEXT
from megatrain.models.recorder import LayerCall

Batch = Mapping[str, torch.Tensor]


@dataclass
class MicroBatch:
    """A micro-batch in flight.

    Attributes:
        number: its place in the step, however that is grouped: dropout seeds depend on it.
        hidden: the hidden states that forward has reached, [batch, tokens, hidden].
        kept: by layer: its activation checkpoint, or what its graph saved and is offloaded.
        graphs: by layer: the graph of a retained one.
        grad: gradient of the loss at the layer output that backward has reached.
        real: float32 [batch, tokens], 1 where a token is none that attention_mask hides, else 0,
            and the number of such tokens; only where somebody asked for it.
    """

    number: int
    inputs: dict[str, torch.Tensor]
    targets: Targets
    calls: list[LayerCall] = field(default_factory=list)
    hidden: torch.Tensor | None = None
    kept: dict[int, Kept] = field(default_factory=dict)
    graphs: dict[int, Graph] = field(default_factory=dict)
    grad: torch.Tensor | None = None
    real: torch.Tensor | None = None
    real_tokens: int = 0

    @property
    def tokens(self) -> int:
        return self.inputs["input_ids"].numel()


def count_targets(batches: Sequence[Batch], loss: Any, anatomy: Anatomy) -> float:
    """The loss's denominator over all micro-batches, which are checked first.

    Raises:
        DataError: a tensor is missing, misshapen or out of range, of which a GPU would die.
        ConfigError: `loss` is no `losses.Loss`, but a plain function, say.
    """
    if not isinstance(batches, (list, tuple)):
        raise DataError(
            f"micro_batches must be a list of dicts of tensors, not {type(batches).__name__}"
        )
    for number, batch in enumerate(batches):
        _check(batch, number, anatomy)
        length, longest = batch["input_ids"].shape[1], anatomy.max_positions
        if "position_ids" in batch and batch["position_ids"].numel():
            length = int(batch["position_ids"].max()) + 1
        if longest is not None and length > longest:
            raise DataError(
                f"micro-batch {number} has a sequence of {length} tokens, but the model reads "
                f"{longest}; cut it"
            )
    if not callable(loss) or not hasattr(loss, "denominator"):
        raise ConfigError(
            f"loss: {loss!r} has no denominator; give a loss of mt.losses, or an object like them"
        )
    return float(sum(loss.denominator(batch) for batch in batches))


def _check(batch: object, number: int, anatomy: Anatomy) -> None:
    if not isinstance(batch, Mapping):
        raise DataError(
            f"micro-batch {number} is {type(batch).__name__}; give a dict of tensors with "
            "input_ids and labels"
        )
    for name, values in batch.items():
        if not isinstance(values, torch.Tensor):
            found = type(values).__name__
            raise DataError(f"{name} of micro-batch {number} are {found}; give a tensor")
        if anatomy.passengers.multimodal and name not in OF_TEXT:
            raise DataError(f"micro-batch {number} has {name}: {NO_IMAGES}; leave it out")
    for name in ("input_ids", "labels"):
        if name not in batch:
            raise DataError(f"micro-batch {number} has no {name}; it needs input_ids and labels")
        values, wanted = batch[name], list(batch["input_ids"].shape)
        if values.dtype != torch.int64 or values.ndim != 2 or list(values.shape) != wanted:
            found = f"{list(values.shape)} {str(values.dtype).removeprefix('torch.')}"
            raise DataError(
                f"{name} of micro-batch {number} are {found}; they must be [rows, tokens] int64, "
                f"as input_ids: {wanted} int64"
            )
        known = (values >= 0) & (values < anatomy.vocab_size)
        strange = values[~(known | (values == IGNORE) if name == "labels" else known)]
        if len(strange):
            raise DataError(
                f"{name} of micro-batch {number} hold {int(strange[0])}, but the model's "
                f"vocabulary has {anatomy.vocab_size} tokens; use the tokenizer of this model"
            )


def only_trailing_padding(mask: torch.Tensor) -> bool:
    """True if a [batch, tokens] mask hides nothing but the ends of rows.

    The real tokens of a causal model never see those anyway.
    """
    falls = mask.ndim == 2 and bool((mask[:, 1:] <= mask[:, :-1]).all())
    return falls and bool((mask[:, 0] != 0).all())


def prepare(
    batch: Batch,
    number: int,
    device: torch.device,
    *,
    marks_real: bool = False,
    tells_documents: bool = False,
) -> MicroBatch:
    """Move a micro-batch to the device, without a mask that only hides trailing padding.

    Such a mask changes no real token and costs speed. With positions it stays: without a mask
    transformers takes a jump in them for the start of another document.

    Args:
        marks_real: say which tokens are no padding, too.
        tells_documents: say where documents begin, as the positions show it, too.
    """
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    mask = inputs.get("attention_mask")
    if mask is not None and "position_ids" not in inputs and only_trailing_padding(mask):
        del inputs["attention_mask"]
    if tells_documents and "position_ids" in inputs:
        inputs |= boundaries_of(inputs["position_ids"])
    moved = {name: value.to(device, non_blocking=True) for name, value in inputs.items()}
    # found on the CPU: the host would have to wait for a GPU to learn how many there are
    prepared = MicroBatch(number, moved, find_targets(batch["labels"]).to(device))
    if marks_real:
        ids = batch["input_ids"]
        plain = mask is not None and mask.shape == ids.shape  # models take others, too
        real = (mask != 0 if plain else torch.ones_like(ids)).float()  # type: ignore[union-attr]
        prepared.real_tokens = int(real.sum())
        prepared.real = real.to(device, non_blocking=True)
    return prepared


def cut(items: Sequence[MicroBatch], groups: int) -> list[Sequence[MicroBatch]]:
    """`items` in at most `groups` consecutive groups of as equal sizes as can be."""
    count = max(1, min(groups, len(items)))
    bounds = [round(i * len(items) / count) for i in range(count + 1)]
    return [items[start:stop] for start, stop in pairwise(bounds) if stop > start]
