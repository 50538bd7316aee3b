"""Attention over sequences whose tokens are shared out to ranks: a contiguous piece of each to each
rank (Ulysses; Jacobs et al., arXiv 2309.14509).

Before a layer's attention ranks trade tokens for heads, and behind it heads for tokens. So each
head is computed whole, by the kernel in use, over the keys and the mask that one rank would have.
Everything else in a layer is computed a token at a time
(`why_not_in_pieces` makes sure of it).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils import _pytree as pytree

from megatrain.errors import ModelError
from megatrain.models.anatomy import find_layers
from megatrain.models.family import layers_in
from megatrain.models.meta import torch_paths
from megatrain.models.recorder import (
    LayerCall,
    StandIn,
    documents_known,
    none_found,
    split_hidden,
    tensors_in,
)
from megatrain.models.skeleton import Skeleton
from megatrain.models.trials.behaviour import NOISE, moved
from megatrain.models.trials.small import plain_model, small_scale

SINKS = ("s_aux", "sinks")  # what attention takes of each head: as an option, on its module


class Trade(Protocol):
    """Differentiable exchanges among ranks that share sequences. `rank` of `ranks`."""

    rank: int
    ranks: int

    def to_heads(self, *states: Tensor) -> tuple[Tensor, ...]:
        """[batch, heads, piece, width] of all heads to [batch, heads / ranks, tokens, width]."""

    def to_tokens(self, states: Tensor) -> Tensor:
        """[batch, tokens, heads / ranks, width] to [batch, piece, heads, width] of all heads."""


# -- pieces ----------------------------------------------------------------------------------------


def piece_of(tokens: int, rank: int, ranks: int) -> slice:
    """A rank's part of a sequence of a multiple of `ranks` tokens."""
    length = tokens // ranks
    return slice(rank * length, (rank + 1) * length)


def implementation_of(config: Any) -> str:
    """The attention in use, as transformers names it."""
    return str(config.get_text_config()._attn_implementation)


@dataclass(frozen=True)
class Around:
    """The context in which a layer runs on a piece of each sequence."""

    trade: Trade
    attention: str  # the implementation in use, as transformers names it
    # by name, what attention takes of whole sequences where the layer has a piece
    whole: Mapping[str, Tensor] = field(default_factory=dict)
    run: Callable[..., Any] | None = None  # in place of that implementation

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """While models find `attend` where they look for the implementation in use."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as FUNCTIONS

        inner = self.run or FUNCTIONS.get(self.attention)  # none for eager: families have their own

        def attention(
            module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
        ) -> tuple[Tensor, None]:
            run = inner or sys.modules[type(module).__module__].eager_attention_forward
            return _attend(self, run, module, query, key, value, mask, options), None

        FUNCTIONS[self.attention] = attention  # of this instance, which models share
        try:
            yield
        finally:
            FUNCTIONS.pop(self.attention)


def call_of_piece(call: LayerCall, shape: torch.Size, own: slice, around: Around) -> LayerCall:
    """The call of a layer that gets the piece `own` of sequences of `shape`, [batch, tokens, ..].
    What has an element for each token is cut, but for masks, which attention takes whole."""
    batch, tokens = shape[:2]

    def cut(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.shape == (tokens,):
            return value[own]
        of_tokens = value.ndim > 1 and value.shape[0] in (1, batch) and value.shape[1] == tokens
        return value[:, own] if of_tokens else value

    kwargs = {
        name: value if "mask" in name else pytree.tree_map(cut, value)
        for name, value in call.kwargs.items()
    }
    whole = {n: v for n, v in call.kwargs.items() if isinstance(v, Tensor) and kwargs[n] is not v}
    args = pytree.tree_map(cut, call.args)
    return replace(call, args=args, kwargs=kwargs, around=replace(around, whole=whole))


# -- attention -------------------------------------------------------------------------------------


def _attend(
    around: Around,
    run: Callable[..., Any],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    options: Mapping[str, Any],
) -> Tensor:
    """transformers' interface of attention, of a piece: [batch, piece, heads, width of values].

    Args:
        run: the implementation in use, which gets whole sequences of some heads.
        query: [batch, heads, piece, width].
        key, value: [batch, heads or groups of heads, piece, width].
        mask: of whole sequences, as `run` takes it.

    A head goes where its number says. Where groups or heads cannot be dealt evenly, each head gets
    a copy of its group's keys and values, and heads of zeros fill up.
    """
    trade, heads = around.trade, query.shape[1]
    each = -(-heads // trade.ranks)
    missing = each * trade.ranks - heads
    ours = slice(trade.rank * each, (trade.rank + 1) * each)
    uneven = missing > 0 or key.shape[1] % trade.ranks > 0

    def of_heads(states: Tensor) -> Tensor:
        """This rank's, of states whose first dimension is heads."""
        return pad(states, [0, 0] * (states.ndim - 1) + [0, missing])[ours]

    if uneven:
        key, value = (spread(states, heads) for states in (key, value))
        query, key, value = (
            pad(states, (0, 0, 0, 0, 0, missing)) for states in (query, key, value)
        )
    if isinstance(mask, Tensor) and mask.ndim == 4 and mask.shape[1] > 1:
        raise ModelError("its attention has a mask for each head")
    given = {name: _whole(name, option, around, of_heads) for name, option in options.items()}
    of_ours = _OfSomeHeads(module, of_heads, alone=uneven)
    out = run(of_ours, *trade.to_heads(query, key, value), mask, **given)[0]
    return trade.to_tokens(out)[:, :, :heads]


def spread(states: Tensor, heads: int) -> Tensor:
    """[batch, groups, tokens, width] for each head of the groups, [batch, heads, tokens, width]."""
    batch, groups, *others = states.shape
    expanded = states[:, :, None].expand(batch, groups, heads // groups, *others)
    return expanded.reshape(batch, heads, *others)


def _whole(name: str, option: Any, around: Around, of_heads: Callable[[Tensor], Tensor]) -> Any:
    """An option of attention over a piece as it is over whole sequences."""
    if not isinstance(option, Tensor):
        return option
    if name in SINKS:
        return of_heads(option)
    if name not in around.whole:
        raise ModelError(f"its attention takes {name}, of which it is not known how to cut it")
    return around.whole[name]


class _OfSomeHeads:
    """A module of attention as implementations see it that compute some of its heads; `alone` if
    no two of them share keys and values."""

    def __init__(
        self, module: nn.Module, of_heads: Callable[[Tensor], Tensor], *, alone: bool
    ) -> None:
        self._module, self._of_heads, self._alone = module, of_heads, alone

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if name == "num_key_value_groups" and self._alone:
            return 1
        return self._of_heads(value) if name in SINKS else value


# -- a trial on a small model ----------------------------------------------------------------------

# What layers compute beside attention must follow from single tokens, and attention must go through
# transformers' interface.

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
