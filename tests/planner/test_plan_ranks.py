"""Plans of several ranks: bytes against what engines allocate on as many processes, times against
timelines reckoned by hand, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from megatrain.planner.collectives import Collectives
from megatrain.planner.memory import HEAD_COPIES
from megatrain.planner.plan import Plan
from megatrain.planner.simulation import overlapped
from megatrain.world import World
from tests.once import engines_are_built_fast
from tests.planner.test_plan_measured import EMBEDDING, Case
from tests.planner.test_simulation import COMPUTING, LAYERS, ONE_GROUP, with_tasks
from tests.ranks import run_ranks

CASES = {
    "tied, three": (3, Case(tied=True, tokens=1536)),
    "half resident, not clipped": (2, Case(resident=3, clipping=False, tokens=1024)),
    "in groups, half resident": (
        2,
        Case(groups=2, micro_batch_tokens=128, tokens=1024, resident=3, sums=6),
    ),
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


# -- time ------------------------------------------------------------------------------------------

TWO = replace(ONE_GROUP, ranks=2)


def test_collectives_hide_behind_the_computation_but_for_what_it_loses():
    """Each matmul beside a collective runs at 1 - loss of its speed."""
    free = overlapped(with_tasks(gather=0.5, reduce=0.5), TWO)
    alone = overlapped(COMPUTING, ONE_GROUP)
    # the first block's gather, and the last one's reduction
    assert free.seconds == pytest.approx(alone.seconds + 1.0)
    assert free.waits["forward"]["exchange"] == pytest.approx(0.5)
    assert free.waits["backward"]["exchange"] == pytest.approx(0.5)
    losing = replace(TWO, gather_loss=0.3, reduce_loss=0.6)
    dear = overlapped(with_tasks(gather=0.5, reduce=0.5), losing)
    # gathers of all blocks but the first in forward, and of all but the last three in backward
    hidden = 0.3 * 0.5 * (LAYERS + 1 + LAYERS - 1) + 0.6 * 0.5 * (LAYERS + 1)
    assert dear.seconds == pytest.approx(free.seconds + hidden, rel=0.02)


def test_a_lane_of_collectives_that_is_slower_than_the_computation_is_waited_for():
    slow = overlapped(with_tasks(gather=5.0), TWO)
    assert slow.phases["forward"] == pytest.approx(5.0 * (LAYERS + 1) + 1.0)
    assert slow.waits["forward"]["upload"] == 0.0
    reducing = overlapped(with_tasks(reduce=9.0), TWO)
    # from the head's gradient to the embedding's, of which the norm is the last to wait
    assert reducing.seconds == pytest.approx(0.5 + LAYERS + 2.0 + 9.0 * (LAYERS + 2))


def test_a_share_is_gathered_once_it_is_up():
    both = overlapped(with_tasks(upload=0.4, gather=0.5), TWO)
    assert both.waits["forward"]["upload"] == pytest.approx(0.4)
    assert both.waits["forward"]["exchange"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("begin", "seconds", "taken"),
    [
        (0.0, 0.5, 0.5),  # before the first
        (0.0, 2.0, 3.0),  # 1 alone, 1 at half speed
        (2.0, 1.0, 2.0),  # at half speed, beside both
        (0.0, 9.0, 9.0 + 1.0 + 0.5),
        (9.0, 1.0, 1.0),
    ],
)
def test_computing_beside_collectives(begin, seconds, taken):
    lane = Collectives()
    assert lane.add(1.0, 2.0, 0.5) == 3.0
    assert lane.add(0.0, 1.0, 0.5) == 4.0  # behind the one before
    lane.add(4.0, 9.0, 0.0)
    assert lane.beside(begin, seconds) == pytest.approx(taken)
