"""Sums of several ranks: in the order that was promised, wherever they wait between groups."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from megatrain.engine.ranks.exchange import Exchange
from megatrain.engine.streams import Compute
from megatrain.world import World
from tests.engine.test_gradients import (
    CPU,
    LAYOUTS,
    MicroBatchGradients,
    landed,
    random_micro_batches,
    rig,
)
from tests.helpers.compare import differing
from tests.helpers.ranks import run_ranks

COUNTS = [[2, 1, 1], [1, 2, 0], [1, 0, 0]]  # micro-batches of each group and rank
OWN: dict[str, tuple[int, ...]] = {"none": (), "tied": (0,), "some": (0, 1)}
LANES = ("upload", "download", "exchange")
Found = tuple[dict[int, Tensor], float]


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
    """Two steps of every case, the second after one that was abandoned in its last group."""
    found = []
    for own, dtype, slow in CASES:
        exchange = Exchange(world, LAYOUTS, Compute(CPU))
        with rig("host", dtype, OWN[own], exchange=exchange) as made:
            if slow and world.rank == 1:
                made.lanes[slow].delay = partial(time.sleep, 0.001)
            steps = []
            for seed, stop in ((0, None), (2, 2), (1, None)):
                mine = [each[world.rank] for each in given(seed, world.size)]
                finished = made.step(mine, stop)
                if stop is None:
                    norm = made.gradients.norm(finished)
                    shares = landed(finished, dtype).items()
                    steps.append(({block: share.clone() for block, share in shares}, norm))
            found.append(steps)
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
