"""A trial of a family's layers with pieces of sequences (models/ulysses.py), tried on a small
model: what they compute beside attention must follow from single tokens, and attention must go
through transformers' interface.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatrain.errors import ModelError
from megatrain.models.anatomy import find_layers
from megatrain.models.documents import documents_known, none_found
from megatrain.models.family import layers_in
from megatrain.models.recorder import LayerCall, StandIn, split_hidden, tensors_in
from megatrain.models.skeleton import Skeleton
from megatrain.models.trials.behaviour import NOISE, moved
from megatrain.models.trials.kernel_packages import torch_paths
from megatrain.models.trials.plain import plain_model, small_scale
from megatrain.models.ulysses import Around, call_of_piece, implementation_of, piece_of, spread

ROWS, TOKENS, PIECES = 3, 10, 2
OUTSIDE = "its layers mix tokens outside of attention, or it lets nobody take its attention's place"


@dataclass
class _Notes:
    """Takes the place of ranks that trade; notes what attention is given, and computes none."""

    rank: int = 0
    ranks: int = 1
    of_tokens: list[Tensor] = field(default_factory=list)  # [batch, tokens, ...]
    of_all: list[Tensor] = field(default_factory=list)

    def to_heads(self, *states: Tensor) -> tuple[Tensor, ...]:
        self.of_tokens += [state.transpose(1, 2) for state in states]
        return states

    def to_tokens(self, states: Tensor) -> Tensor:
        return states

    def run(
        self, _: Any, query: Tensor, __: Tensor, value: Tensor, mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        """Each token's own values."""
        self.of_all += tensors_in((mask, options))
        return spread(value, query.shape[1]).transpose(1, 2), None


class _Tried(StandIn):
    """Runs a layer on whole sequences without its attention, and on pieces, and compares."""

    attention = ""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden, call = split_hidden(args, kwargs)
        whole, of_all = self._without_attention(hidden, call, slice(0, TOKENS))
        for rank in range(PIECES):
            own = piece_of(TOKENS, rank, PIECES)
            found, same = self._without_attention(hidden, call, own)
            if not _equal([tensor[:, own] for tensor in whole], found) or not _equal(of_all, same):
                raise ModelError(OUTSIDE)
        return self.layer(*args, **kwargs)

    def _without_attention(
        self, hidden: Tensor, call: LayerCall, own: slice
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The outputs for each token of a piece, the layer's output first, and of all tokens."""
        notes = _Notes()
        around = Around(notes, self.attention, run=notes.run)
        cut = call_of_piece(call, hidden.shape, own, around)
        with cut.around():
            output = self.layer(hidden[:, own].clone(), *cut.args, **cut.kwargs)
        output = output[0] if isinstance(output, tuple) else output
        return [output, *notes.of_tokens], notes.of_all


def _equal(expected: list[Tensor], found: list[Tensor]) -> bool:
    return len(expected) == len(found) and all(
        a.shape == b.shape and moved(a.float(), b.float()) <= NOISE
        for a, b in zip(expected, found, strict=True)
    )


@torch.no_grad()
def why_not_in_pieces(skeleton: Skeleton) -> str | None:
    """The reason for which a model's layers cannot take pieces of sequences; None if they can."""
    if skeleton.behaviour is None:
        return "no small model of its family can be tried"
    small, attention = skeleton.behaviour.small, implementation_of(skeleton.config)
    generator = torch.Generator().manual_seed(0)
    vocabulary = small.get_text_config().vocab_size
    trust = skeleton.trust_remote_code
    ids = torch.randint(vocabulary, (ROWS, TOKENS), generator=generator)
    hides = torch.ones_like(ids)
    hides[0, 0] = hides[1, -3:] = 0  # so that there are masks
    try:
        with small_scale(), torch_paths():
            model: Any = plain_model(small, attention=attention, trust_remote_code=trust)
            _, stack = find_layers(model, layers_in(small.get_text_config()))
            for index, layer in enumerate(stack):
                tried = _Tried(layer, index)
                tried.attention = implementation_of(model.config)
                stack[index] = tried
            for mask in ({}, {"attention_mask": hides}):
                with documents_known(none_found):
                    model.eval()(input_ids=ids, use_cache=False, **mask)
    except Exception as error:  # noqa: BLE001  whatever a family's code raises on pieces
        return str(error).splitlines()[0] if isinstance(error, ModelError) else OUTSIDE
    return None
