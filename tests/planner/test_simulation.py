"""Simulated steps against timelines reckoned by hand."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from megatrain.planner.simulation import (
    BlockTasks,
    ScheduleOptions,
    StepTimeline,
    overlapped,
    serial,
)
from megatrain.settings import ALL

NOTHING = BlockTasks(**{field.name: 0.0 for field in fields(BlockTasks)})  # type: ignore[arg-type]
LAYERS = 6
ONE_GROUP = ScheduleOptions(
    groups=1, micro_batches=4.0, resident=0, sums_on_device=0, clips=True, tied=False
)


def model(layer: BlockTasks, edge: BlockTasks = NOTHING) -> list[BlockTasks]:
    """Embedding, layers and head; the head has no forward of its own."""
    return [edge, *[layer] * LAYERS, replace(edge, forward=0.0)]


COMPUTING = model(
    replace(NOTHING, forward=1.0, backward=3.0), replace(NOTHING, forward=0.5, backward=2.0)
)


def with_tasks(**seconds: float) -> list[BlockTasks]:
    """The computing model, with these tasks beside every block."""
    changes: dict[str, Any] = seconds
    return [replace(block, **changes) for block in COMPUTING]


def waits(timeline: StepTimeline) -> dict[str, float]:
    causes = ("upload", "update", "download")
    return {cause: sum(phase[cause] for phase in timeline.waits.values()) for cause in causes}


def test_a_step_that_only_computes_is_its_computation():
    timeline = overlapped(COMPUTING, ONE_GROUP)
    backward = 3.0 * LAYERS + 2.0
    computed = {"forward": 0.5 + LAYERS, "head": 2.0, "backward": backward}
    assert timeline.phases == {"update": 0.0, "second backward": 0.0, **computed}
    assert timeline.seconds == serial(COMPUTING, ONE_GROUP).seconds


def test_uploads_hide_behind_the_layer_before_but_for_the_first():
    timeline = overlapped(with_tasks(upload=0.4), ONE_GROUP)
    # the embedding's, at the step's start; all others arrive in time
    assert waits(timeline)["upload"] == pytest.approx(0.4)
    assert timeline.waits["forward"]["upload"] == pytest.approx(0.4)


def test_a_forward_shorter_than_its_uploads_takes_as_long_as_they_do():
    phases = overlapped(with_tasks(upload=5.0), ONE_GROUP).phases
    # a slot is free again when the layer two before is computed, so nothing is lost between two
    # uploads; the last layer still computes
    assert phases["forward"] == pytest.approx(5.0 * (LAYERS + 1) + 1.0)


def test_the_update_hides_in_the_forward_and_the_rest_is_waited_for():
    quick, slow = (overlapped(with_tasks(host_update=s), ONE_GROUP) for s in (0.4, 3.0))
    assert waits(quick)["update"] == pytest.approx(0.4)  # the embedding's
    until_head = slow.phases["forward"] + slow.waits["head"]["update"]
    assert until_head == pytest.approx(3.0 * (LAYERS + 2))  # the head's is the last


def test_updates_that_queue_behind_one_that_waited_for_its_drive_wait_for_the_drive():
    first, *others = with_tasks(host_update=3.0)
    timeline = overlapped([replace(first, nvme_read=40.0), *others], ONE_GROUP)
    assert waits(timeline)["update"] == 0.0
    assert timeline.waits["forward"]["nvme"] > 40.0 + 3.0


def test_gradients_that_are_applied_at_once_wait_for_the_buffers_of_those_before():
    timeline = overlapped(with_tasks(host_update=5.0), replace(ONE_GROUP, clips=False))
    # from the head's gradient on, update follows update; the embedding's is the last, and the next
    # forward begins with it
    assert timeline.seconds == pytest.approx(5.0 * (LAYERS + 2) + 0.5 + LAYERS + 2.0)
    # the head and two layers are applied from three buffers; each layer after them waits for a
    # buffer, and the embedding too
    until_last_buffer = 5.0 * (LAYERS + 2 - 3)
    assert timeline.phases["backward"] == pytest.approx(until_last_buffer)
    assert timeline.waits["forward"]["update"] == pytest.approx(5.0 * 3)


def test_resident_blocks_wait_for_nothing_and_are_updated_at_once():
    streamed = with_tasks(upload=0.4, host_update=3.0, download=0.1)
    resident, updates = with_tasks(device_update=0.01), pytest.approx(0.01 * (LAYERS + 2))
    whole = overlapped(resident, replace(ONE_GROUP, resident=LAYERS + 2))
    assert whole.seconds - overlapped(COMPUTING, ONE_GROUP).seconds == updates
    assert whole.phases["update"] == updates
    half = overlapped([*resident[:4], *streamed[4:]], replace(ONE_GROUP, resident=4))
    assert whole.seconds < half.seconds < overlapped(streamed, ONE_GROUP).seconds


def test_many_groups_are_counted_without_playing_each():
    blocks = with_tasks(upload=1.5, sum_up=2.0, sum_down=2.0, host_update=1.0)
    four, five, six, sixteen = (
        overlapped(blocks, replace(ONE_GROUP, groups=groups)).seconds for groups in (4, 5, 6, 16)
    )
    assert six - five == pytest.approx(five - four)
    assert sixteen - six == pytest.approx(10 * (five - four))


def test_travelling_sums_cost_what_does_not_hide():
    options = replace(ONE_GROUP, groups=2)
    alone = overlapped(COMPUTING, options).seconds
    quick, slow = (with_tasks(sum_up=s, sum_down=s) for s in (0.5, 9.0))
    assert overlapped(quick, options).seconds == pytest.approx(alone)
    assert overlapped(slow, options).seconds > alone + 20
    on_device = replace(options, sums_on_device=LAYERS + 2)
    assert overlapped(slow, on_device).seconds == pytest.approx(alone)


def test_offloaded_boundaries_cost_only_where_the_bus_is_slower_than_the_layer():
    cheap, dear = (
        overlapped(with_tasks(boundary_down=s, boundary_up=s), ONE_GROUP) for s in (0.5, 10.0)
    )
    assert cheap.seconds == pytest.approx(overlapped(COMPUTING, ONE_GROUP).seconds)
    assert dear.waits["forward"]["download"] > 8 * LAYERS
    assert dear.waits["backward"]["upload"] > 6 * LAYERS


def test_what_a_few_layers_send_away_leaves_while_the_others_compute():
    def seconds(every: int) -> float:
        """A step in which each `every`th block sends more than it has time for."""
        blocks = list(COMPUTING)
        for number in range(0, len(blocks), every):
            away = 1.3 * blocks[number].forward
            blocks[number] = replace(blocks[number], boundary_down=away, boundary_up=away)
        return overlapped(blocks, replace(ONE_GROUP, micro_batches=8)).seconds

    none = overlapped(COMPUTING, replace(ONE_GROUP, micro_batches=8)).seconds
    assert seconds(every=2) == pytest.approx(none)
    assert seconds(every=1) > none


TWICE = replace(ONE_GROUP, second_backward=ALL)


def test_a_second_backward_repeats_the_head_and_all_layers():
    blocks = with_tasks(finish=0.125, boundary_up=0.5)
    once, twice = (overlapped(blocks, options) for options in (ONE_GROUP, TWICE))
    again = 2.0 + 3.0 * LAYERS + 2.0 + 0.125 * (LAYERS + 2)
    assert twice.phases == once.phases | {"second backward": pytest.approx(again)}


def test_gradients_come_down_and_are_applied_in_the_second_backward_alone():
    timeline = overlapped(with_tasks(download=4.0, host_update=0.1, upload=0.4), TWICE)
    assert timeline.waits["backward"]["download"] == 0.0
    # two are on their way at a time
    assert timeline.waits["second backward"]["download"] > LAYERS - 4
    updating = with_tasks(download=0.1, host_update=2.5)
    unclipped = overlapped(updating, replace(ONE_GROUP, clips=False))
    assert waits(overlapped(updating, TWICE))["update"] == waits(unclipped)["update"]


@pytest.mark.parametrize("play", [overlapped, serial])
def test_resident_blocks_are_updated_in_the_second_backward(play):
    timeline = play(with_tasks(device_update=0.25), replace(TWICE, resident=LAYERS + 2))
    computing = overlapped(COMPUTING, TWICE).seconds
    assert timeline.seconds == pytest.approx(computing + 0.25 * (LAYERS + 2))


def test_where_everything_shares_the_cores_it_adds_up():
    blocks = with_tasks(upload=0.25, download=0.5, host_update=2.0, finish=0.125, boundary_up=0.5)
    once, twice = (serial(blocks, options) for options in (ONE_GROUP, TWICE))
    computing = overlapped(COMPUTING, ONE_GROUP).seconds
    each, boundaries = (LAYERS + 2) * (2 * 0.25 + 0.5 + 2.0 + 0.125), 0.5 * (LAYERS + 1)
    assert once.seconds == pytest.approx(computing + each + boundaries)
    assert once.phases["update"] == pytest.approx(2.0 * (LAYERS + 2))
    again = 2.0 + 3.0 * LAYERS + 2.0 + (LAYERS + 2) * (0.125 + 0.25) + boundaries
    assert twice.seconds == pytest.approx(once.seconds + again)
