"""Plans of several ranks: bytes against what engines allocate on as many processes, times against
timelines reckoned by hand, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from megatrain.planner.memory import HEAD_COPIES
from megatrain.planner.plan import Plan
from megatrain.world import World
from tests.once import engines_are_built_fast
from tests.planner.test_plan_measured import EMBEDDING, Case
from tests.ranks import run_ranks

CASES = {
    "streamed": (2, Case(tokens=1024)),
    "tied, three": (3, Case(tied=True, tokens=1536)),
    "half resident, not clipped": (2, Case(resident=3, clipping=False, tokens=1024)),
    "in groups, half resident": (
        2,
        Case(groups=2, micro_batch_tokens=128, tokens=1024, resident=3, sums=6),
    ),
    "computed twice": (2, Case(second_backward=True, tokens=1024)),
    "embedding frozen, resident": (2, Case(freeze=EMBEDDING, resident=3, tokens=1024)),
}


def measured(world: World, case: Case, plan: Plan) -> tuple[int, int]:
    with engines_are_built_fast():
        return case.measure(plan, world)


@pytest.mark.parametrize("name", CASES)
def test_ranks_take_the_bytes_that_are_planned(name, tmp_path):
    ranks, case = CASES[name]
    plan = replace(case.plan(tmp_path, ranks), made_of=None)
    for device_bytes, host_bytes in run_ranks(
        ranks, partial(measured, case=case, plan=plan), tmp_path
    ):
        assert plan.allocated_bytes == pytest.approx(device_bytes, rel=0.03)
        beside = ("gradient staging", HEAD_COPIES)  # not in the store
        stored = sum(plan.host.values()) - sum(plan.host.get(name, 0) for name in beside)
        assert stored == pytest.approx(host_bytes, rel=0.02)
