"""Plans of ranks that keep whole weights of blocks: once a step they come, where there is room."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatrain.machine.hardware import GIB
from megatrain.planner.simulation import overlapped, serial
from tests.planned import QWEN_7B
from tests.planner.test_plan_ranks import LONG, TWO, planned
from tests.planner.test_simulation import COMPUTING, LAYERS, ONE_GROUP, with_tasks


def test_what_is_replicated_is_gathered_once_a_step():
    """However many groups there are, and as soon as it is up."""
    slow, options = with_tasks(upload=0.1, gather=5.0), replace(TWO, groups=3)
    every = replace(options, replicated=LAYERS + 2)
    once, forward = overlapped(slow, every).seconds, 0.5 + LAYERS
    computing = 3 * overlapped(COMPUTING, ONE_GROUP).seconds
    # the first forward is as long as all gathers are, of which the head's is the last
    assert once == pytest.approx(0.1 + 5.0 * (LAYERS + 2) + computing - forward)
    some = overlapped(slow, replace(options, replicated=2)).seconds
    assert once < some < overlapped(slow, options).seconds
    read = [replace(task, read=True) for task in with_tasks(upload=5.0)]
    assert overlapped(read, every).seconds == pytest.approx(once - 0.1)
    together = [serial(slow, each) for each in (options, replace(options, replicated=2), every)]
    ups, gathers = 2 * (LAYERS + 2), 2 * LAYERS + 3
    alone = serial(COMPUTING, replace(ONE_GROUP, groups=3)).seconds
    assert [each.seconds - alone for each in together] == pytest.approx(
        [
            3 * (0.1 * ups + 5.0 * gathers),
            3 * (0.1 * (ups - 4) + 5.0 * (gathers - 4)) + 2 * 5.1,
            5.1 * (LAYERS + 2),
        ]
    )


def test_whole_weights_stay_where_there_is_room_and_time_to_be_gained():
    blocks, asked = len(QWEN_7B.block_numel), replace(LONG, groups=4)
    for ranks in (2, 8):
        chosen = planned(ranks, asked)
        without = planned(ranks, replace(asked, replicated=0))
        assert 0 < chosen.choices.replicated <= blocks
        assert chosen.timing.seconds < 0.995 * without.timing.seconds
        assert chosen.fits and without.choices.replicated == 0
        whole = 2 * sum(QWEN_7B.block_numel[: chosen.choices.replicated])
        assert chosen.device["replicated weights"] == pytest.approx(whole, rel=1e-3)
        assert "replicated weights" not in without.device
        (row,) = (row for row in chosen.reasons if row.what == "replicated")
        assert row.value == f"{chosen.choices.replicated} blocks"
        assert "come from all ranks once a step" in row.why
    short = planned(2, asked, gpu_limit=24 * GIB)
    assert short.fits and short.choices.replicated == 0
    every = planned(2, replace(asked, replicated=99, resident=0))
    assert every.choices.replicated == blocks and every.device["layer slots"] == 0
    assert [row.why[:9] for row in every.reasons if row.what == "replicated"] == ["as asked:"]


def test_of_one_gpu_nothing_is_replicated():
    plan = planned(1, replace(LONG, replicated=3))
    assert plan.choices.replicated == 0 and plan.job.replicated is None
    assert "replicated" not in {row.what for row in plan.reasons}
    assert plan.device == planned(1).device
