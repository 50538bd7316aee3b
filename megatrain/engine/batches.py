"""Micro-batches: checked, moved to the device, cut into groups, and what is kept of each while it is in flight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from megatrain.engine.activations.offload import Kept
from megatrain.engine.graphs import Graph
from megatrain.errors import ConfigError, DataError
from megatrain.losses import IGNORE, Targets, find_targets
from megatrain.models.recorder import LayerCall

Batch = Mapping[str, torch.Tensor]


@dataclass
class MicroBatch:
    """A micro-batch in flight.

    `kept[i]` is the input of layer i, for its recomputation; `graphs[i]` the graph of a layer i that is retained.
    """

    number: int  # in the step, whatever the grouping: dropout seeds depend on it
    inputs: dict[str, torch.Tensor]
    targets: Targets
    calls: list[LayerCall] = field(default_factory=list)
    hidden: torch.Tensor | None = None  # where forward has got to: [batch, tokens, hidden]
    kept: dict[int, Kept] = field(default_factory=dict)
    graphs: dict[int, Graph] = field(default_factory=dict)
    grad: torch.Tensor | None = (
        None  # of the loss with respect to the layer output that backward has reached
    )

    @property
    def tokens(self) -> int:
        return self.inputs["input_ids"].numel()


def check_batches(batches: object, vocabulary: int) -> None:
    """Raise DataError for a micro-batch whose tensors are missing, misshapen or out of range, which a GPU would answer by dying."""
    if not isinstance(batches, (list, tuple)):
        raise DataError(
            f"micro_batches must be a list of dicts of tensors, not {type(batches).__name__}"
        )
    for number, batch in enumerate(batches):
        if not isinstance(batch, Mapping):
            raise DataError(
                f"micro-batch {number} is {type(batch).__name__}; give a dict of tensors with input_ids and "
                "labels"
            )
        for name, values in batch.items():
            if not isinstance(values, torch.Tensor):
                raise DataError(
                    f"{name} of micro-batch {number} are {type(values).__name__}; give a tensor"
                )
        for name in ("input_ids", "labels"):
            if name not in batch:
                raise DataError(
                    f"micro-batch {number} has no {name}; it needs input_ids and labels"
                )
            values, wanted = batch[name], list(batch["input_ids"].shape)
            if values.dtype != torch.int64 or values.ndim != 2 or list(values.shape) != wanted:
                found = f"{list(values.shape)} {str(values.dtype).removeprefix('torch.')}"
                raise DataError(
                    f"{name} of micro-batch {number} are {found}; they must be [rows, tokens] int64, as input_ids: {wanted} int64"
                )
            known = (values >= 0) & (values < vocabulary)
            strange = values[~(known | (values == IGNORE) if name == "labels" else known)]
            if len(strange):
                raise DataError(
                    f"{name} of micro-batch {number} hold {int(strange[0])}, but the model's vocabulary has {vocabulary} tokens; "
                    "use the tokenizer of this model"
                )


def only_trailing_padding(mask: torch.Tensor) -> bool:
    """True if a [batch, tokens] mask hides nothing but the ends of rows. A causal model's real tokens never see those anyway."""
    return (
        mask.ndim == 2
        and bool((mask[:, 1:] <= mask[:, :-1]).all())
        and bool((mask[:, 0] != 0).all())
    )


def prepare(batch: Batch, number: int, device: torch.device) -> MicroBatch:
    """Move a micro-batch to the device. A mask that only hides trailing padding is dropped: it changes no real token and costs speed.

    Not if there are positions too: without a mask transformers takes a jump in them for the start of another document.
    """
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    mask = inputs.get("attention_mask")
    if mask is not None and "position_ids" not in inputs and only_trailing_padding(mask):
        del inputs["attention_mask"]
    moved = {name: value.to(device, non_blocking=True) for name, value in inputs.items()}
    return MicroBatch(number, moved, find_targets(batch["labels"]).to(device))


def cut(items: Sequence[MicroBatch], groups: int) -> list[Sequence[MicroBatch]]:
    """`items` in at most `groups` consecutive groups of as equal sizes as can be."""
    count = max(1, min(groups, len(items)))
    bounds = [round(i * len(items) / count) for i in range(count + 1)]
    return [items[start:stop] for start, stop in pairwise(bounds) if stop > start]


def check_type_of_loss(loss: object) -> None:
    """Raise ConfigError for what is no loss, such as a plain function."""
    if not callable(loss) or not hasattr(loss, "denominator"):
        raise ConfigError(
            f"loss: {loss!r} has no denominator; give a loss of mt.losses, or an object like one of them"
        )
