"""The intervals of a step's picture against the simulation that they are taken from."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from megatrain.planner.played import WAIT, Interval, played, played_serially
from megatrain.planner.simulation import SIMULATED_GROUPS, overlapped
from megatrain.planner.tasks import PHASES, serial
from tests.planner.test_simulation import LAYERS, ONE_GROUP, drawn, waits, with_tasks

BUSY = with_tasks(upload=0.4, download=0.3, host_update=1.5, nvme_read=0.2, nvme_write=0.1)


def seconds(intervals: list[Interval], kind: str = "") -> float:
    return sum(one.end - one.begin for one in intervals if kind in ("", one.kind))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("seed", range(40))
def test_lanes_do_one_thing_at_a_time_and_the_computation_is_the_step(seed, ranks):
    blocks, options = drawn(seed, ranks)
    options = replace(options, groups=min(options.groups, SIMULATED_GROUPS))
    timeline = overlapped(blocks, options)
    whole, lanes = played(blocks, options)
    assert whole == pytest.approx(timeline.seconds)
    computing = lanes["compute"]
    assert computing[0].begin == pytest.approx(0.0) and computing[-1].end == pytest.approx(whole)
    for done in lanes.values():
        for one, following in itertools.pairwise(done):
            assert one.begin <= one.end <= following.begin + 1e-9
    gaps = [b.begin - a.end for a, b in itertools.pairwise(computing)]
    assert gaps == pytest.approx([0.0] * len(gaps), abs=1e-9)
    for phase in PHASES:
        busy = timeline.phases[phase] - sum(timeline.waits[phase].values())
        assert seconds(computing, phase) == pytest.approx(busy)


def test_each_lane_has_its_tasks():
    whole, lanes = played(BUSY, ONE_GROUP)
    each = LAYERS + 2
    assert seconds(lanes["host update"]) == pytest.approx(1.5 * each)
    assert seconds(lanes["download"]) == pytest.approx(0.3 * each)
    assert seconds(lanes["NVMe"]) == pytest.approx(0.3 * each)
    # the head is visited once, and backward finds the last two layers in their slots
    assert seconds(lanes["upload"]) == pytest.approx(0.4 * (2 * each - 3))
    assert "activations up" not in lanes
    names = [one.words for one in lanes["host update"]]
    assert names == ["embedding", *(f"layer {n}" for n in range(1, LAYERS + 1)), "head"]
    waited = sum(waits(overlapped(BUSY, ONE_GROUP)).values())
    assert seconds(lanes["compute"], WAIT) == pytest.approx(waited)
    assert whole == pytest.approx(overlapped(BUSY, ONE_GROUP).seconds)


def test_an_update_that_goes_on_into_the_next_step_is_shown_from_its_beginning():
    options = replace(ONE_GROUP, stored=False)
    whole, lanes = played(with_tasks(host_update=2.5), options)
    assert lanes["host update"][0].begin == 0.0
    assert lanes["host update"][-1].end <= whole
    assert seconds(lanes["host update"]) == pytest.approx(2.5 * (LAYERS + 2))


def test_groups_that_are_left_out_make_the_picture_shorter():
    many = replace(ONE_GROUP, groups=9)
    assert played(BUSY, many)[0] == pytest.approx(played(BUSY, replace(many, groups=4))[0])


def test_without_a_gpu_phases_follow_each_other():
    whole, lanes = played_serially(BUSY, ONE_GROUP)
    assert whole == pytest.approx(serial(BUSY, ONE_GROUP).seconds)
    assert seconds(lanes["compute"]) == pytest.approx(whole)
    assert seconds(lanes["compute"], WAIT) > 0
