"""Sums of several ranks: in the order that was promised, wherever they wait between groups."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import pytest
import torch
from torch import Tensor

from megatrain.engine.ranks.exchange import Exchange
from megatrain.engine.ranks.sums import SharedGradients
from megatrain.engine.streams import Compute, Lane
from megatrain.world import World
from tests.engine.test_gradients import (
    CPU,
    LAYOUTS,
    Landed,
    MicroBatchGradients,
    landed,
    random_micro_batches,
)
from tests.helpers.compare import differing
from tests.helpers.ranks import run_ranks

COUNTS = [[2, 1, 1], [1, 2, 0], [1, 0, 0]]  # micro-batches of each group and rank
OWN: dict[str, tuple[int, ...]] = {"none": (), "tied": (0,), "some": (0, 1)}
LANES = ("upload", "download", "exchange")
Found = tuple[dict[int, Tensor], float]


class Rig:
    """A rank's gradient sums on the CPU, with everything that they write to."""

    def __init__(self, world: World, own: Sequence[int], dtype: torch.dtype) -> None:
        self.world, self.dtype, compute = world, dtype, Compute(CPU)
        self.exchange = Exchange(world, LAYOUTS, compute)
        self.lanes = {name: Lane(name) for name in LANES[:2]}
        spans = [self.exchange.trained_span(block) for block in range(len(LAYOUTS))]
        host = {n: torch.full((s.numel,), 7.0, dtype=dtype) for n, s in enumerate(spans)}
        sums = [torch.full((span.numel,), 9.0) for span in spans]
        self.sink = Landed({**host})
        self.gradients = SharedGradients(
            self.exchange,
            LAYOUTS,
            dtype,
            resident=0,
            own=own,
            compute=compute,
            upload=self.lanes["upload"],
            download=self.lanes["download"],
            sink=self.sink,
            host_sums=sums.__getitem__,
        )
        self.lanes["exchange"] = self.exchange.lane

    def step(self, seed: int, groups: int = len(COUNTS)) -> Found:
        """This rank's shares, and the norm. As the engine visits blocks."""
        self.gradients.begin_step()
        self.sink.begin_step()
        rank = self.world.rank
        mine = [each[rank] for each in given(seed, self.world.size)]
        for group in mine[:groups]:
            for block in reversed(range(len(LAYOUTS))):
                self.gradients.open(block)
                for micro_batch in group:
                    self.gradients.add(block, dict(micro_batch[block]))
                self.gradients.close(block, last_group=group is mine[-1])
        if groups < len(mine):
            return {}, 0.0
        norm = self.gradients.norm(self.sink.finished)
        shares = landed(self.sink.finished, self.dtype)
        return {block: share.clone() for block, share in shares.items()}, norm


@contextmanager
def rig(world: World, own: Sequence[int], dtype: torch.dtype = torch.float32) -> Iterator[Rig]:
    made = Rig(world, own, dtype)
    with ExitStack() as stack:
        for lane in made.lanes.values():
            stack.callback(lane.close)
        yield made


def given(seed: int, ranks: int) -> list[list[list[MicroBatchGradients]]]:
    """Micro-batches of each group and rank."""
    every = iter(random_micro_batches(9, seed))
    return [[[next(every) for _ in range(n)] for n in counts[:ranks]] for counts in COUNTS]


def expected(seed: int, ranks: int, own: Sequence[int], dtype: torch.dtype) -> dict[int, Tensor]:
    """Plain sums: by group, rank and micro-batch; of `own` blocks by rank and micro-batch."""
    groups = given(seed, ranks)
    together = [[[mb for group in groups for mb in group[rank]] for rank in range(ranks)]]
    return {
        block: in_order(
            [
                in_order([plain_sum(of_rank, block) for of_rank in group])
                for group in (together if block in own else groups)
            ]
        ).to(dtype)
        for block in range(len(LAYOUTS))
    }


def plain_sum(micro_batches: Sequence[MicroBatchGradients], block: int) -> Tensor:
    total = torch.zeros(LAYOUTS[block].numel)
    for micro_batch in micro_batches:
        for name, view in LAYOUTS[block].views(total).items():
            view += micro_batch[block][name]
    return total


def in_order(terms: Sequence[Tensor]) -> Tensor:
    total, *others = terms
    for other in others:
        total = total + other
    return total


CASES = [
    (own, dtype, slow)
    for own in OWN
    for dtype in (torch.float32, torch.bfloat16)
    for slow in ("", *LANES)
    if not slow or dtype == torch.float32
]


def summed(world: World) -> list[list[Found]]:
    """Two steps of every case, the second after one that was abandoned in its second group."""
    found = []
    for own, dtype, slow in CASES:
        with rig(world, OWN[own], dtype) as made:
            if slow and world.rank == 1:
                made.lanes[slow].delay = partial(time.sleep, 0.001)
            first = made.step(0)
            made.step(2, groups=2)
            found.append([first, made.step(1)])
    return found


@pytest.mark.slow
def test_sums_are_by_group_and_rank_and_micro_batch_unless_they_stay(tmp_path):
    ranks = 3
    of_ranks = run_ranks(ranks, summed, tmp_path)
    for (own, dtype, slow), *found in zip(CASES, *of_ranks, strict=True):
        for seed in range(2):
            shares, norms = zip(*(of[seed] for of in found), strict=True)
            whole = {block: torch.cat([of[block] for of in shares]) for block in shares[0]}
            plain = expected(seed, ranks, OWN[own], dtype)
            assert differing(whole, plain) == [], (own, dtype, slow, seed)
            assert len({*norms}) == 1
            squares = sum(float(of.double().square().sum()) for of in plain.values())
            assert norms[0] == pytest.approx(squares**0.5, rel=1e-6)
