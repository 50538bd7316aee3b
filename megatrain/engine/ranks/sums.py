"""Sums with several GPUs, of gradients and of losses.

Each rank adds up the gradients of its own micro-batches; ranks exchange sums, and each gets the
gradient of its share of a block. Losses are added on the CPU, in the order of ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, final

import torch
from torch import Tensor

from megatrain.engine.gradients import (
    Buffer,
    Gradient,
    Gradients,
    GradientSink,
    OpenSum,
    row_norms,
    sum_of_squares,
)
from megatrain.engine.objective import Objective
from megatrain.engine.peers import Peers
from megatrain.engine.ranks.context_parallel import ContextParallel
from megatrain.engine.ranks.exchange import Exchange
from megatrain.engine.streams import Compute, Event, Lane
from megatrain.errors import ConfigError, DataError
from megatrain.losses import Tally
from megatrain.losses.targets import Answers
from megatrain.memory.layout import BLOCK_ALIGNMENT, FlatLayout
from megatrain.world import World

T = TypeVar("T")


@dataclass
class SharedSum(OpenSum):
    """An open sum whose rank's share is added up over groups in `share`, which comes back from the
    host by `returning`."""

    share: Buffer | None = None
    returning: Event | None = None


@final
class SharedGradients(Gradients):
    """The gradients of a rank.

    Sums that stay on the device are exchanged once a step; those that wait on the host once a
    group, of which only shares wait. So bits depend on which blocks' sums stay.

    Args:
        exchange: of the ranks. The others are those of `Gradients`; arrays that `host_sums` returns
            and the sink's are shares.
    """

    def __init__(
        self,
        layouts: Sequence[FlatLayout],
        dtype: torch.dtype,
        *,
        exchange: Exchange,
        resident: int,
        own: Collection[int],
        compute: Compute,
        upload: Lane,
        download: Lane,
        sink: GradientSink,
        host_sums: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        self.exchange, self.leaves_by = exchange, exchange.slowest
        self._exchanged: Event | None = None  # the last share of the step
        super().__init__(
            layouts,
            dtype,
            resident=resident,
            own=own,
            compute=compute,
            upload=upload,
            download=download,
            sink=sink,
            host_sums=host_sums,
        )
        # one for each buffer of the ring, so that a share travels beside its block's next sum
        self._shares = [] if host_sums is None else self._in_turn(exchange.shares)

    def _numels(self) -> Sequence[int]:
        return [self.exchange.padded(block) for block in range(len(self.layouts))]

    def _largest(self) -> int:
        return max(self.exchange.shares)

    def _travel(self) -> bool:
        return True

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
        far, in fp32. Valid until the next one."""
        exchange, lane = self.exchange, self.exchange.lane
        ready, span = self.compute.record(), exchange.trained_span(block)
        total, share, returning = opened.buffer.flat[: exchange.padded(block)], None, None
        there: Event | None = None
        if isinstance(opened, SharedSum) and opened.share is not None:
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
        assert self.host_sums is not None
        assert isinstance(opened, SharedSum) and opened.share is not None
        target, summed, share = self.host_sums(block), self._summed(block, opened), opened.share
        self._exchanged = opened.buffer.free = self.exchange.lane.submit(lambda _: summed())
        copied = share.flat[: len(target)], target
        share.free = self._sums_landed[block] = self._send(copied, after=self._exchanged)

    def _finish(self, block: int, opened: OpenSum) -> None:
        """Give every rank its share of the sum over all; measure, and send this rank's on its way.

        The squared norm covers the full gradient: identical on all ranks and equal to that of one
        GPU.
        """
        exchange, rows = self.exchange, self.layouts[block].numel // BLOCK_ALIGNMENT
        summed, square = self._summed(block, opened), self._square_sums[block : block + 1]
        staging, lane = self._staging, exchange.lane
        mine, free = staging.flat[: exchange.trained_span(block).numel], staging.free

        def job(_: Event) -> None:
            found = summed()
            lane.wait(free)  # wait: an earlier gradient still leaves this buffer
            mine.copy_(found)
            norms = exchange.all_norms(row_norms(mine), block)
            square.copy_(sum_of_squares(norms[:rows]))

        self._exchanged = opened.buffer.free = staging.free = shared = lane.submit(job)
        if isinstance(opened, SharedSum) and opened.share is not None:
            opened.share.free = shared
        if self._only_measured:
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


@final
class RankPeers(Peers):
    """The ranks of a world, of which this is one."""

    several = True

    def __init__(self, world: World, context_parallel: ContextParallel | None = None) -> None:
        self.world, self.context_parallel = world, context_parallel

    def number(self, local: int) -> int:
        return self.world.number(local)

    def all_gather(self, mine: T) -> list[T]:
        return self.world.all_gather(mine)

    def broadcast(self, value: T) -> T:
        return self.world.broadcast(value)

    def agreed(self, objective: Objective, batches: Sequence[Mapping[str, Tensor]]) -> Objective:
        """The objective over all ranks' micro-batches.

        Raises, where ranks share sequences:
            ConfigError: the loss is over sequences.
            DataError: ranks that share them got different ones.
        """
        world, counts, tokens = self.world, Counter[str](), 0
        shared = world.cp_size > 1
        if shared and objective.of_sequences is not None:
            raise ConfigError(
                f"context_parallel: {world.cp_size} does not work with "
                f"{type(objective.loss).__name__}, a loss over whole sequences; set 1"
            )
        outline = [(b["input_ids"].shape, int(b["input_ids"].sum())) for b in batches if shared]
        every = world.all_gather((dict(objective.counts), objective.target_tokens, outline))
        firsts = [every[rank - rank % world.cp_size] for rank in range(world.size)]
        if any(one[2] != first[2] for one, first in zip(every, firsts, strict=True)):
            raise DataError(
                "ranks that share sequences got different micro-batches; give the same to "
                "all ranks of one dp_rank"
            )
        for others, targets, _ in every[:: world.cp_size]:
            counts.update(others)
            tokens += targets
        return replace(objective, counts=dict(counts), target_tokens=tokens)

    def total(self, objective: Objective, found: Tally[Tensor]) -> Tally[Tensor]:
        # on the CPU, in the order of ranks: every rank gets the same bits
        total = Tally[Tensor]()
        loss = {unit: value.cpu() for unit, value in found.loss.items()}
        metrics = {name: (unit, value.cpu()) for name, (unit, value) in found.metrics.items()}
        every = self.all_gather(Tally(loss, metrics))
        for each in every[:1] if objective.whole_step else every:  # of a whole step each has all
            total.add(each)
        return total

    def answers(self, own: Mapping[int, Answers], device: torch.device) -> Answers:
        cpu, found = torch.device("cpu"), dict[int, Answers]()
        for of_rank in self.all_gather({number: one.to(cpu) for number, one in own.items()}):
            found |= of_rank
        return Answers.joined(
            [own.get(number) or found[number].to(device) for number in sorted(found)]
        )
