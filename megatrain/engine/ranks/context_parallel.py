"""Context parallelism: ranks share sequences, and trade tokens for heads around attention (Ulysses;
models/ulysses.py), by the lane that exchanges blocks.

One thread issues all collectives of a rank: NCCL does not allow several at once, and a common order
rules out that two ranks wait for each other. The computing thread asks for all of them, attention's
and blocks', in an order that follows from the plan alone; a recomputed layer asks again, and its
backward in the order of its graph, of which every rank has the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatrain.errors import DataError
from megatrain.losses import IGNORE, Targets
from megatrain.models.recorder import LayerCall
from megatrain.models.ulysses import Around, call_of_piece, implementation_of, piece_of
from megatrain.world import World


# why: decision 0102
class ContextParallel:
    """Part `rank` of `size` equal parts of the sequences that a group of ranks share."""

    def __init__(self, world: World, config: Any, exchange: Callable[..., None]) -> None:
        self.rank, self.size = world.cp_rank, world.cp_size
        self._around = Around(AllToAll(self.rank, self.size, exchange), implementation_of(config))

    def around_layers(
        self, hidden: Tensor, calls: Sequence[LayerCall]
    ) -> tuple[Tensor, list[LayerCall]]:
        """This rank's part of hidden [batch, tokens, hidden], and the layers' calls on it."""
        own, around = piece_of(hidden.shape[1], self.rank, self.size), self._around
        return hidden[:, own], [call_of_piece(call, hidden.shape, own, around) for call in calls]

    def own(self, targets: Targets, width: int) -> Targets:
        """This rank's of the targets of sequences of `width` tokens."""
        return targets.of_piece(width, self.rank, self.size)

    def lengthened(
        self, batch: Mapping[str, Tensor], longest: int | None = None
    ) -> Mapping[str, Tensor]:
        """A micro-batch padded to a multiple of `size` tokens; the padding is documents of its own.

        Raises DataError if that is longer than the model reads, or a mask is not one of tokens.
        """
        shape = batch["input_ids"].shape
        missing = -shape[1] % self.size
        if not missing:
            return batch
        zeros = "input_ids", "attention_mask", "position_ids", "token_real"
        fills = dict.fromkeys(zeros, 0) | {"labels": IGNORE}
        if longest is not None and "position_ids" not in batch and shape[1] + missing > longest:
            raise DataError(
                f"a sequence of {shape[1]} tokens is padded to {shape[1] + missing} for "
                f"{self.size} ranks that share it, but the model reads {longest}; cut it"
            )
        if any(batch[name].shape[1:] != shape[1:] for name in fills if name in batch):
            raise DataError(
                f"a sequence of {shape[1]} tokens needs padding for {self.size} ranks that share "
                "it, so its attention_mask must be [rows, tokens]"
            )
        return {
            name: pad(values, (0, missing), value=fills[name]) if name in fills else values
            for name, values in batch.items()
        }


class Traded(torch.autograd.Function):
    """Tensors of which ranks have given up parts of dimension 1, heads where attention reads them,
    for all of dimension 2, tokens there. Gradients go the same way back."""

    @staticmethod
    def forward(ctx: Any, trade: AllToAll, *states: Tensor) -> Any:
        ctx.trade = trade
        return trade.swapped(states, 1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *ctx.trade.swapped(grads, 2, 1)


@dataclass(eq=False)
class AllToAll:
    """`models.ulysses.Trade`. exchange: called with tensors to fill and tensors to send, of each of
    which part i along dimension 0 goes to rank i."""

    rank: int
    ranks: int
    exchange: Callable[..., None]

    def to_heads(self, *states: Tensor) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = Traded.apply(self, *states)  # type: ignore[no-untyped-call]
        return found

    def to_tokens(self, states: Tensor) -> Tensor:
        return self.to_heads(states)[0]  # whose dimensions 1 and 2 are tokens and heads

    def swapped(self, states: Sequence[Tensor], split: int, join: int) -> tuple[Tensor, ...]:
        """Send every rank its part along `split`; what came from them, joined along `join`."""
        sent = [torch.stack(state.chunk(self.ranks, split)) for state in states]
        received = [torch.empty_like(parts) for parts in sent]
        self.exchange(received, sent)
        return tuple(torch.cat(parts.unbind(0), join) for parts in received)
