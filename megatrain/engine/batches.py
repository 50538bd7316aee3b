"""Micro-batches: checked, moved to the device, cut into groups, and what is kept of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatrain.engine.activations import Kept
from megatrain.engine.graphs import Graph
from megatrain.engine.objective import Objective, Peers, counted, of_scores
from megatrain.engine.ranks.context_parallel import ContextParallel
from megatrain.errors import ConfigError, DataError
from megatrain.losses import (
    FOR_LOSS,
    IGNORE,
    SequenceLoss,
    Targets,
    find_ends,
    find_examples,
    find_targets,
)
from megatrain.losses.divergence import TEACHER
from megatrain.losses.targets import Answers
from megatrain.models.anatomy import Anatomy
from megatrain.models.constants import NO_IMAGES, OF_TEXT
from megatrain.models.recorder import TYPES, LayerCall, boundaries_of, of_dtype, with_places
from megatrain.models.skeleton import Skeleton

Batch = Mapping[str, Tensor]
EMBEDDED = -1  # in `MicroBatch.ends`: hidden states


@dataclass
class MicroBatch:
    """A micro-batch in flight."""

    number: int  # its place in the step, however that is grouped: dropout seeds depend on it
    inputs: dict[str, Tensor]
    targets: Targets
    calls: list[LayerCall] = field(default_factory=list)
    hidden: Tensor | None = None  # that forward has reached, [batch, tokens, hidden]
    # by layer: its checkpoint, or what its graph saved and is offloaded
    kept: dict[int, Kept] = field(default_factory=dict)
    graphs: dict[int, Graph] = field(default_factory=dict)  # by layer: the graph of a retained one
    grad: Tensor | None = None  # of the loss at the layer output that backward has reached
    side_grads: dict[int, Tensor] = field(default_factory=dict)  # by layer, of its call's side
    # both, where the second pass begins
    border: tuple[Tensor | None, dict[int, Tensor]] = field(default_factory=lambda: (None, {}))
    embedded: tuple[Tensor, list[LayerCall]] | None = None  # what embed gives to layers
    # where graphs of that end, of hidden states and by layer of what is added before it
    ends: dict[int, GradientEdge] = field(default_factory=dict)
    trains: bool = True  # False: only its log-probabilities are wanted
    parallel: ContextParallel | None = None  # targets and hidden states are then of one part
    learns: bool = True  # it has targets, in whichever part
    # fp32 [batch, tokens], 0 where token_real or attention_mask hides a token; if asked for
    real: Tensor | None = None
    real_tokens: int = 0

    def keep_side_gradient(self, index: int) -> None:
        """Keep for embed's turn the gradient of what is added before a layer: its input's."""
        if (side := self.calls[index].side) is not None and self.grad is not None:
            self.side_grads[index] = self.grad.flatten(0, 1)[side.index]

    def at_border(self, first: bool) -> None:
        """Keep the gradients that the first pass has reached, or go on from them in the second."""
        if first:
            self.border = self.grad, {**self.side_grads}
        else:
            (self.grad, self.side_grads), self.border = self.border, (None, {})

    def receive(self, hidden: Tensor, calls: list[LayerCall], graph: bool) -> None:
        """Take what embed has made. graph: keep the ends of its graph for backward."""
        if self.parallel:
            hidden, calls = self.parallel.around_layers(hidden, calls)
        sides = {index: call.side.rows for index, call in enumerate(calls) if call.side}
        if graph:  # not the tensors, which layers let go of
            outputs = {EMBEDDED: hidden, **sides}
            self.ends = {i: get_gradient_edge(t) for i, t in outputs.items() if t.requires_grad}
        # a copy: a view of some tokens would keep all of them
        hidden = hidden.clone() if self.parallel else hidden.detach()
        self.embedded = hidden, [call.without_graph() for call in calls]

    def enter_layers(self) -> None:
        """Begin with what was received."""
        assert self.embedded is not None
        (self.hidden, self.calls), self.embedded = self.embedded, None

    def gradients_of_embed(self, wanted: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Gradients of what embed gave to layers, whose own are dropped. None: not reached, as
        where all of it is frozen and the rows have no image."""
        given = {EMBEDDED: self.grad, **self.side_grads}
        ends, self.ends = self.ends, {}
        self.grad, self.side_grads, self.embedded = None, {}, None
        of_ends = [given[index] for index in ends]
        return torch.autograd.grad([*ends.values()], wanted, of_ends, allow_unused=True)

    @property
    def states(self) -> Tensor:
        """The hidden states that forward has reached."""
        assert self.hidden is not None
        return self.hidden

    @property
    def tokens(self) -> int:
        """That have hidden states here."""
        return self.inputs["input_ids"].numel() // (self.parallel.size if self.parallel else 1)


def check_batches(batches: Sequence[Batch], anatomy: Anatomy, loss: Any = None) -> None:
    """Raise DataError for a tensor that is missing, misshapen or out of range, of which a GPU would
    die; those that a loss over sequences needs among them."""
    if not isinstance(batches, (list, tuple)):
        found = type(batches).__name__
        raise DataError(f"micro_batches must be a list of dicts of tensors, not {found}")
    for number, batch in enumerate(batches):
        _check(batch, number, anatomy)
        if isinstance(loss, SequenceLoss):
            _check_examples(batch, number, loss)


def objective_of(batches: Sequence[Batch], loss: Any, anatomy: Anatomy) -> Objective:
    """The objective of a step over these micro-batches, which are checked first.

    Raises:
        DataError: a tensor is missing, misshapen or out of range, of which a GPU would die.
        ConfigError: `loss` is a plain function, say, or needs another head than the model's.
    """
    check_batches(batches, anatomy, loss)
    if not isinstance(loss, SequenceLoss) and not (callable(loss) and hasattr(loss, "denominator")):
        raise ConfigError(
            f"loss: {loss!r} has no denominator; give a loss of mt.losses, or an object like them"
        )
    if of_scores(loss) != (anatomy.labels is not None):
        gives, wants = "logits", "scores, which a model for sequence classification gives"
        if anatomy.labels is not None:
            gives, wants = "scores", "log-probabilities of tokens, which a language model gives"
        raise ConfigError(
            f"loss: {type(loss).__name__} needs {wants}, and this model gives {gives}; take "
            "another loss or another model"
        )
    return counted(loss, batches)


def _check(batch: Any, number: int, anatomy: Anatomy) -> None:
    for name in ("input_ids", "labels"):
        if not isinstance(batch, Mapping) or name not in batch:
            raise DataError(
                f"micro-batch {number} has no {name}; give a dict of tensors with input_ids and "
                "labels"
            )
    for name, values in batch.items():
        if not isinstance(values, torch.Tensor):
            found = type(values).__name__
            raise DataError(f"{name} of micro-batch {number} are {found}; give a tensor")
        known = name in OF_TEXT or name in anatomy.of_images or for_loss(name)
        if (anatomy.unused_weights.multimodal or anatomy.of_images) and not known:
            raise DataError(f"micro-batch {number} has {name}: {NO_IMAGES}; leave it out")
    for name in ("input_ids", "labels"):
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
    length, longest = batch["input_ids"].shape[1], anatomy.max_positions
    if "position_ids" in batch and batch["position_ids"].numel():
        length = int(batch["position_ids"].max()) + 1
    if longest is not None and length > longest:
        raise DataError(
            f"micro-batch {number} has a sequence of {length} tokens, but the model reads "
            f"{longest}; cut it"
        )


def _check_examples(batch: Batch, number: int, loss: SequenceLoss) -> None:
    """Raise DataError if a micro-batch lacks what the loss needs to know of its examples."""
    shape, rows, name = batch["labels"].shape, batch.get("row_of"), type(loss).__name__
    count = shape[0]
    for key in ("row_of", *(key for key in batch if key.startswith("token_"))):
        if batch.get(key, batch["labels"]).shape != shape or (rows is not None and rows.min() < 0):
            raise DataError(
                f"{key} of micro-batch {number} must have the shape of input_ids, {list(shape)}; "
                "row_of counts from 0"
            )
    if rows is not None:
        numbers = rows.reshape(-1)
        count = int(numbers.max()) + 1
        if loss.of_scores and not numbers.bincount().all():
            raise DataError(
                f"row_of of micro-batch {number} leaves out a number below {count - 1}; each "
                "example has a token"
            )
    given = {key: values for key, values in batch.items() if key.startswith("row_")} | {
        key: batch.get(key, torch.empty(0)) for key in loss.needs
    }
    for key, values in given.items():
        if key != "row_of" and list(values.shape) != [count]:
            raise DataError(
                f"{key} of micro-batch {number}, which {name} needs, must be a tensor with one "
                f"value for each of its {count} examples"
            )
    if loss.of_pairs and count % 2:
        raise DataError(
            f"micro-batch {number} has {count} examples; {name} needs pairs: chosen, rejected, "
            "chosen, rejected ..."
        )


def for_loss(name: str) -> bool:
    """True for a tensor of a micro-batch that its loss reads and the model does not."""
    return name == "labels" or (name.startswith(FOR_LOSS) and name not in TYPES)


def prepare(
    batches: Sequence[Batch],
    skeleton: Skeleton,
    peers: Peers,
    device: torch.device,
    *,
    loss: SequenceLoss | None = None,
    marks_real: bool = False,
    whole: bool = False,
) -> list[MicroBatch]:
    """Move micro-batches to the device.

    Args:
        loss: of whole sequences, for which examples are found.
        marks_real: mark the tokens that are no padding.
        whole: do not cut targets of sequences that several ranks share.
    """
    packed, anatomy = any("position_ids" in batch for batch in batches), skeleton.anatomy
    tells_documents = packed and skeleton.told_documents(device)
    parallel, found = None if whole else peers.context_parallel, []
    for local, batch in enumerate(batches):
        if parallel:
            batch = parallel.lengthened(batch, anatomy.max_positions)
        inputs = with_places(skeleton.model, _inputs(batch, tells_documents))
        for name in anatomy.of_images & inputs.keys():
            inputs[name] = of_dtype(inputs[name], skeleton.dtype)
        moved = {name: value.to(device, non_blocking=True) for name, value in inputs.items()}
        targets, trains = _targets(batch, loss, skeleton), loss is None or loss.trains(batch)
        learns = len(targets) > 0
        if parallel:
            targets = parallel.own(targets, batch["labels"].shape[1])
        mb = MicroBatch(peers.number(local), moved, targets.to(device), parallel=parallel)
        mb.trains, mb.learns = trains, learns
        if marks_real:
            ids = batch["input_ids"]
            mask = batch.get("token_real", batch.get("attention_mask"))
            plain = mask is not None and mask.shape == ids.shape  # models take others, too
            real = (mask != 0 if plain else torch.ones_like(ids)).float()  # type: ignore[union-attr]
            real *= trains  # else its choices of experts do not count
            mb.real_tokens, mb.real = int(real.sum()), real.to(device, non_blocking=True)
        found.append(mb)
    return found


def _inputs(batch: Batch, tells_documents: bool) -> dict[str, Tensor]:
    """The arguments of the model's forward. tells_documents: also where they begin."""
    inputs = {name: value for name, value in batch.items() if not for_loss(name)}
    mask = inputs.get("attention_mask")
    # A mask that hides the ends of rows alone changes no real token, which are causal, and costs
    # speed. With positions it stays: without one transformers takes a jump in them for the start of
    # another document.
    if mask is not None and mask.ndim == 2 and "position_ids" not in inputs:
        falls = bool((mask[:, 1:] <= mask[:, :-1]).all())
        if falls and bool((mask[:, 0] != 0).all()):
            del inputs["attention_mask"]
    if tells_documents and "position_ids" in inputs:
        inputs |= boundaries_of(inputs["position_ids"])
    return inputs


def _targets(batch: Batch, loss: SequenceLoss | None, skeleton: Skeleton) -> Targets:
    # on the CPU: the host would have to wait for a GPU to learn how many there are
    if loss is not None and loss.of_scores:
        pad_id = skeleton.config.get_text_config().pad_token_id
        assert pad_id is not None, "a classifier's head does not run without"
        return find_ends(batch, pad_id)
    targets = replace(find_targets(batch["labels"]), teacher=batch.get(TEACHER))
    return targets if loss is None else replace(targets, examples=find_examples(batch, targets))


def answers_of(
    part: Sequence[MicroBatch], values: Sequence[Tensor], peers: Peers, device: torch.device
) -> Answers:
    """The examples of all processes, in the order of micro-batches, from the `values` of this one's
    targets, which keep their graphs."""
    own = {
        mb.number: Answers.of(of_targets, examples)
        for mb, of_targets in zip(part, values, strict=True)
        if (examples := mb.targets.examples) is not None
    }
    return peers.answers(own, device)


def cut(items: Sequence[MicroBatch], groups: int) -> list[Sequence[MicroBatch]]:
    """`items` in at most `groups` consecutive groups of as equal sizes as can be."""
    count = max(1, min(groups, len(items)))
    bounds = [round(i * len(items) / count) for i in range(count + 1)]
    return [items[start:stop] for start, stop in pairwise(bounds) if stop > start]
