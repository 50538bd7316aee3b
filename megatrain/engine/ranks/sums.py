"""Gradients with several GPUs: each rank adds up those of its own micro-batches; ranks exchange
sums, and each gets the gradient of its share of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from megatrain.engine.gradients import (
    Buffer,
    Gradient,
    Gradients,
    OpenSum,
    row_norms,
    sum_of_squares,
)
from megatrain.engine.ranks.exchange import Exchange
from megatrain.engine.streams import Event
from megatrain.memory.layout import BLOCK_ALIGNMENT, FlatLayout


@dataclass(kw_only=True)
class SharedSum(OpenSum):
    """An open sum whose rank's share is added up over groups in `share`, which comes back from the
    host by `returning`."""

    share: Buffer
    returning: Event | None = None


@final
class SharedGradients(Gradients):
    """The gradients of a rank. Arrays that `host_sums` returns, and the sink's, are shares.

    Sums that stay on the device are exchanged once a step; those that wait on the host once a
    group, of which only shares wait. So bits depend on which blocks' sums stay.
    """

    travels = True

    def __init__(
        self, exchange: Exchange, layouts: Sequence[FlatLayout], dtype: torch.dtype, **given: Any
    ) -> None:
        self.exchange, self.leaves_by = exchange, exchange.slowest
        self._exchanged: Event | None = None  # the last share of the step
        numels = [exchange.padded(block) for block in range(len(layouts))]
        super().__init__(layouts, dtype, numels=numels, largest=max(exchange.shares), **given)
        # one for each buffer of the ring, so that a share travels beside its block's next sum
        self._shares = [] if self.host_sums is None else self._in_turn(exchange.shares)

    def _begin(self, block: int, buffer: Buffer, in_turn: bool, later: bool) -> OpenSum:
        if not in_turn or not self._shares:
            return self._sums_in(block, buffer, empty=not later)
        share = self._shares[self._turn % len(self._shares)]
        # empty in every group: what earlier groups left is in the share
        opened = SharedSum(**vars(self._sums_in(block, buffer, empty=True)), share=share)
        if later:
            opened.returning = self._fetch_sum(block, share)
        return opened

    def _summed(self, block: int, opened: OpenSum) -> Callable[[], torch.Tensor]:
        """For a job of the exchange: this rank's share of the sum over all ranks and all groups so
        far, in fp32. Valid until its buffer is opened again."""
        exchange, lane = self.exchange, self.exchange.lane
        ready, span = self.compute.record(), exchange.trained_span(block)
        total, share, returning = opened.buffer.flat[: exchange.padded(block)], None, None
        there: Event | None = None
        if isinstance(opened, SharedSum):
            share, returning = opened.share.flat[: span.numel], opened.returning
            there = returning or opened.share.free

        def summed() -> torch.Tensor:
            lane.wait(ready)  # wait: the sum must have been computed
            found = exchange.summed(total)[: span.numel]
            if share is None:
                return found
            lane.wait(there)  # wait: earlier groups' come up, or another block's still leaves
            return share.copy_(found) if returning is None else share.add_(found)

        return summed

    def _put_by(self, block: int, opened: OpenSum) -> None:
        """Add this group's sum over all ranks to this rank's share, which waits on the host."""
        assert self.host_sums is not None and isinstance(opened, SharedSum)
        target, summed, share = self.host_sums(block), self._summed(block, opened), opened.share
        self._exchanged = opened.buffer.free = self.exchange.lane.submit(lambda _: summed())
        copied = share.flat[: len(target)], target
        share.free = self._sums_landed[block] = self._send(copied, after=self._exchanged)

    def _finish(self, block: int, opened: OpenSum) -> None:
        """Give every rank its share of the sum over all; measure and download this rank's."""
        exchange, rows = self.exchange, self.layouts[block].numel // BLOCK_ALIGNMENT
        summed, square = self._summed(block, opened), self._square_sums[block : block + 1]
        staging, lane = self._staging, exchange.lane
        mine, free = staging.flat[: exchange.trained_span(block).numel], staging.free

        def job(_: Event) -> None:
            found = summed()
            lane.wait(free)  # wait: an earlier gradient still leaves this buffer
            mine.copy_(found)
            # of the full gradient: identical on all ranks, and as of one GPU
            norms = exchange.all_norms(row_norms(mine), block)
            square.copy_(sum_of_squares(norms[:rows]))

        self._exchanged = opened.buffer.free = staging.free = shared = lane.submit(job)
        if isinstance(opened, SharedSum):
            opened.share.free = shared
        if block in self._only_measured:
            return
        target, scalar = self.sink.place(block), self._landed_square_sums[block : block + 1]
        if target is None:  # a resident block that is updated at once, on the stream that computes
            self.compute.wait(shared, exchange.slowest)
            self.sink.take(Gradient(block, mine, shared, scalar))
            staging.free = self.compute.record()
            return
        landed = self._send((mine, target), (square, scalar), after=shared)
        staging.free = landed
        self.sink.take(Gradient(block, target, landed, scalar))

    def norm(self, finished: Sequence[Gradient]) -> float:
        # wait: all ranks' shares are being measured
        self.compute.wait(self._exchanged, self.exchange.slowest)
        for gradient in (one for one in finished if one.block < self.resident):
            # wait: it is copied on another stream, and the update on this one reads it
            self.compute.wait(gradient.landed, "download")
        return super().norm(finished)
