"""Ranks that share sequences trade tokens for heads and back, by the lane that exchanges blocks.

One thread issues all collectives of a rank: NCCL does not allow several at once, and a common order
rules out that two ranks wait for each other. The computing thread asks for all of them, attention's
and blocks', in an order that follows from the plan alone; a recomputed layer asks again, and its
backward in the order of its graph, of which every rank has the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatrain.engine.streams import Compute, Event, Lane
from megatrain.world import World, trade_parts

HEADS, TOKENS = 1, 2  # dimensions of what attention is given; what it returns has them turned round


class Lent(torch.autograd.Function):
    """Tensors of which ranks have swapped parts; gradients go the same way back."""

    @staticmethod
    def forward(ctx: Any, trade: HeadTrade, split: int, join: int, *states: Tensor) -> Any:
        ctx.way = trade, join, split
        return tuple(trade.swapped(states, split, join))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        trade, split, join = ctx.way
        return None, None, None, *trade.swapped(grads, split, join)


class HeadTrade:
    """What `models.ulysses.Trade` says, for the ranks of `world` that share sequences."""

    def __init__(self, world: World, compute: Compute, lane: Lane) -> None:
        self.rank, self.ranks = world.piece, world.pieces
        self._group, self._compute, self._lane = world.sharing, compute, lane

    def to_heads(self, *states: Tensor) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = Lent.apply(self, HEADS, TOKENS, *states)  # type: ignore[no-untyped-call]
        return found

    def to_tokens(self, states: Tensor) -> Tensor:
        (found,) = Lent.apply(self, 1, 2, states)  # type: ignore[no-untyped-call]
        return found  # type: ignore[no-any-return]

    def swapped(self, states: Sequence[Tensor], split: int, join: int) -> list[Tensor]:
        """Each cut along `split` into a part for every rank; what came from them, joined along
        `join`."""
        sent = [torch.stack(state.chunk(self.ranks, split)) for state in states]
        received = [torch.empty_like(parts) for parts in sent]
        computed = self._compute.record()

        def job(_: Event) -> None:
            self._lane.wait(computed)  # wait: what is sent may still be computed
            for theirs, ours in zip(received, sent, strict=True):
                trade_parts(theirs, ours, self._group)

        # wait: nothing that is sent or received may be read, or its memory used again, before
        self._compute.wait(self._lane.submit(job), "exchange")
        return [torch.cat(parts.unbind(0), join) for parts in received]
