"""Simulated steps against timelines reckoned by hand."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from megatrain.planner.simulation import (
    BlockTasks,
    StepOptions,
    StepTimeline,
    at_least,
    overlapped,
    serial,
)

NOTHING = BlockTasks(
    forward=0.0,
    backward=0.0,
    finish=0.0,
    upload=0.0,
    download=0.0,
    sum_up=0.0,
    sum_down=0.0,
    boundary_down=0.0,
    boundary_up=0.0,
    host_update=0.0,
    device_update=0.0,
)
LAYERS = 6
ONE_GROUP = StepOptions(
    groups=1, micro_batches=4.0, resident=0, sums_on_device=0, clipping=True, tied=False
)


def model(layer: BlockTasks, edge: BlockTasks = NOTHING) -> list[BlockTasks]:
    """Embedding, layers and head; the head has no forward of its own."""
    return [edge, *[layer] * LAYERS, replace(edge, forward=0.0)]


COMPUTING = model(
    replace(NOTHING, forward=1.0, backward=3.0), replace(NOTHING, forward=0.5, backward=2.0)
)


def waits(timeline: StepTimeline) -> dict[str, float]:
    return {
        cause: sum(of_phase[cause] for of_phase in timeline.waits.values())
        for cause in ("upload", "update", "download")
    }


def test_a_step_that_only_computes_is_its_computation() -> None:
    timeline = overlapped(COMPUTING, ONE_GROUP)
    assert timeline.phases == {
        "update": 0.0,
        "forward": 0.5 + LAYERS,
        "head": 2.0,
        "backward": 3.0 * LAYERS + 2.0,
        "second backward": 0.0,
    }
    assert (
        timeline.seconds == at_least(COMPUTING, ONE_GROUP) == serial(COMPUTING, ONE_GROUP).seconds
    )


def test_uploads_hide_behind_the_layer_before_but_for_the_first() -> None:
    blocks = [replace(block, upload=0.4) for block in COMPUTING]
    timeline = overlapped(blocks, ONE_GROUP)
    assert waits(timeline)["upload"] == pytest.approx(
        0.4
    )  # the embedding's, at the step's start; all others arrive in time
    assert timeline.waits["forward"]["upload"] == pytest.approx(0.4)


def test_a_forward_shorter_than_its_uploads_takes_as_long_as_they_do() -> None:
    blocks = [replace(block, upload=5.0) for block in COMPUTING]
    phases = overlapped(blocks, ONE_GROUP).phases
    # a slot is free again when the layer two before is computed, so nothing is lost between two uploads; the last layer still computes
    assert phases["forward"] == pytest.approx(5.0 * (LAYERS + 1) + 1.0)


def test_the_update_hides_in_the_forward_and_the_rest_is_waited_for() -> None:
    quick, slow = (
        [replace(block, host_update=seconds) for block in COMPUTING] for seconds in (0.4, 3.0)
    )
    assert waits(overlapped(quick, ONE_GROUP))["update"] == pytest.approx(0.4)  # the embedding's
    timeline = overlapped(slow, ONE_GROUP)
    assert timeline.phases["forward"] + timeline.waits["head"]["update"] == pytest.approx(
        3.0 * (LAYERS + 2)
    )  # the head's is the last


def test_gradients_that_are_applied_at_once_wait_for_the_buffers_of_those_before() -> None:
    blocks = [replace(block, host_update=5.0) for block in COMPUTING]
    timeline = overlapped(blocks, replace(ONE_GROUP, clipping=False))
    # from the head's gradient on, update follows update; the embedding's is the last, and the next forward begins with it
    assert timeline.seconds == pytest.approx(5.0 * (LAYERS + 2) + 0.5 + LAYERS + 2.0)
    # the head and two layers are applied from three buffers; each layer after them waits for a buffer, and the embedding too
    until_last_buffer = 5.0 * (LAYERS + 2 - 3)
    assert timeline.phases["backward"] == pytest.approx(until_last_buffer)
    assert timeline.waits["forward"]["update"] == pytest.approx(5.0 * 3)


def test_resident_blocks_wait_for_nothing_and_are_updated_at_once() -> None:
    streamed = [replace(block, upload=0.4, host_update=3.0, download=0.1) for block in COMPUTING]
    resident = [replace(block, device_update=0.01) for block in COMPUTING]
    whole = overlapped(resident, replace(ONE_GROUP, resident=LAYERS + 2))
    assert whole.seconds == pytest.approx(
        overlapped(COMPUTING, ONE_GROUP).seconds + 0.01 * (LAYERS + 2)
    )
    assert whole.phases["update"] == pytest.approx(0.01 * (LAYERS + 2))
    half = overlapped([*resident[:4], *streamed[4:]], replace(ONE_GROUP, resident=4))
    assert whole.seconds < half.seconds < overlapped(streamed, ONE_GROUP).seconds


def test_every_group_sends_the_weights_again() -> None:
    blocks = [replace(block, upload=5.0) for block in COMPUTING]
    one = overlapped(blocks, ONE_GROUP).seconds
    for groups in (2, 3, 4, 7):
        assert overlapped(blocks, replace(ONE_GROUP, groups=groups)).seconds > groups * 0.8 * one


def test_many_groups_are_counted_without_playing_each() -> None:
    blocks = [
        replace(block, upload=1.5, sum_up=2.0, sum_down=2.0, host_update=1.0) for block in COMPUTING
    ]
    seconds = [
        overlapped(blocks, replace(ONE_GROUP, groups=groups)).seconds for groups in (4, 5, 6, 16)
    ]
    each = seconds[1] - seconds[0]
    assert seconds[2] - seconds[1] == pytest.approx(each)
    assert seconds[3] - seconds[2] == pytest.approx(10 * each)


def test_travelling_sums_cost_what_does_not_hide() -> None:
    options = replace(ONE_GROUP, groups=2)
    quick = [replace(block, sum_up=0.5, sum_down=0.5) for block in COMPUTING]
    slow = [replace(block, sum_up=9.0, sum_down=9.0) for block in COMPUTING]
    assert overlapped(quick, options).seconds == pytest.approx(
        overlapped(COMPUTING, options).seconds
    )
    assert overlapped(slow, options).seconds > overlapped(COMPUTING, options).seconds + 20
    assert overlapped(slow, replace(options, sums_on_device=LAYERS + 2)).seconds == pytest.approx(
        overlapped(COMPUTING, options).seconds
    )


def test_offloaded_boundaries_cost_only_where_the_bus_is_slower_than_the_layer() -> None:
    cheap, dear = (
        [replace(block, boundary_down=s, boundary_up=s) for block in COMPUTING] for s in (0.5, 10.0)
    )
    assert overlapped(cheap, ONE_GROUP).seconds == pytest.approx(
        overlapped(COMPUTING, ONE_GROUP).seconds
    )
    timeline = overlapped(dear, ONE_GROUP)
    assert timeline.waits["forward"]["download"] > 8 * LAYERS
    assert timeline.waits["backward"]["upload"] > 6 * LAYERS


def test_what_a_few_layers_send_away_leaves_while_the_others_compute() -> None:
    def every(count: int) -> list[BlockTasks]:
        return [
            replace(block, boundary_down=1.3 * block.forward, boundary_up=1.3 * block.forward)
            if number % count == 0
            else block
            for number, block in enumerate(COMPUTING)
        ]

    micro_batches = replace(ONE_GROUP, micro_batches=8)
    assert overlapped(every(2), micro_batches).seconds == pytest.approx(
        overlapped(COMPUTING, micro_batches).seconds
    )
    assert (
        overlapped(every(1), micro_batches).seconds > overlapped(COMPUTING, micro_batches).seconds
    )


def test_without_clipping_the_update_runs_during_backward() -> None:
    blocks = [replace(block, host_update=2.5, download=0.1) for block in COMPUTING]
    clipped, unclipped = (
        overlapped(blocks, replace(ONE_GROUP, clipping=clipping)) for clipping in (True, False)
    )
    assert waits(clipped)["update"] > 12
    # what was computed last is needed first: the embedding's update is behind all others in the queue
    assert waits(unclipped)["update"] < 6


TWICE = replace(ONE_GROUP, second_backward=True)


def test_a_second_backward_repeats_the_head_and_all_layers() -> None:
    blocks = [replace(block, finish=0.125, boundary_up=0.5) for block in COMPUTING]
    once, twice = (overlapped(blocks, options) for options in (ONE_GROUP, TWICE))
    again = 2.0 + 3.0 * LAYERS + 2.0 + 0.125 * (LAYERS + 2)
    assert twice.phases == once.phases | {"second backward": pytest.approx(again)}
    assert twice.seconds == pytest.approx(at_least(blocks, TWICE))


def test_gradients_come_down_and_are_applied_in_the_second_backward_alone() -> None:
    blocks = [replace(block, download=4.0, host_update=0.1, upload=0.4) for block in COMPUTING]
    timeline = overlapped(blocks, TWICE)
    assert timeline.waits["backward"]["download"] == 0.0
    assert (
        timeline.waits["second backward"]["download"] > LAYERS - 4
    )  # two are on their way at a time
    updating = [replace(block, download=0.1, host_update=2.5) for block in COMPUTING]
    assert (
        waits(overlapped(updating, TWICE))["update"]
        == waits(overlapped(updating, replace(ONE_GROUP, clipping=False)))["update"]
    )


def test_resident_blocks_are_updated_in_the_second_backward() -> None:
    resident = [replace(block, device_update=0.25) for block in COMPUTING]
    for timeline in (
        overlapped(resident, replace(TWICE, resident=LAYERS + 2)),
        serial(resident, replace(TWICE, resident=LAYERS + 2)),
    ):
        assert timeline.seconds == pytest.approx(
            overlapped(COMPUTING, TWICE).seconds + 0.25 * (LAYERS + 2)
        )


def test_a_second_backward_moves_the_weights_again_where_all_adds_up() -> None:
    blocks = [
        replace(block, upload=0.25, download=0.5, host_update=2.0, finish=0.125, boundary_up=0.5)
        for block in COMPUTING
    ]
    once, twice = (serial(blocks, options) for options in (ONE_GROUP, TWICE))
    again = 2.0 + 3.0 * LAYERS + 2.0 + (LAYERS + 2) * (0.125 + 0.25) + 0.5 * (LAYERS + 1)
    assert twice.seconds == pytest.approx(once.seconds + again)


def test_where_everything_shares_the_cores_it_adds_up() -> None:
    blocks = [
        replace(block, upload=0.25, download=0.5, host_update=2.0, finish=0.125)
        for block in COMPUTING
    ]
    timeline = serial(blocks, ONE_GROUP)
    computing = overlapped(COMPUTING, ONE_GROUP).seconds
    assert timeline.seconds == pytest.approx(
        computing + (LAYERS + 2) * (2 * 0.25 + 0.5 + 2.0 + 0.125)
    )
    assert timeline.phases["update"] == pytest.approx(2.0 * (LAYERS + 2))


@pytest.mark.parametrize("seed", range(40))
def test_no_step_beats_its_bound(seed: int) -> None:
    draw = random.Random(seed)
    resident = draw.randrange(LAYERS + 3)

    def block(number: int) -> BlockTasks:
        names = (
            "forward",
            "backward",
            "finish",
            "upload",
            "download",
            "sum_up",
            "sum_down",
            "boundary_down",
            "boundary_up",
            "host_update",
        )
        tasks = replace(
            NOTHING, **{name: draw.choice((0.0, 0.5, 2.0)) * draw.random() for name in names}
        )
        if number < resident:
            tasks = replace(
                tasks, upload=0.0, download=0.0, host_update=0.0, device_update=draw.random()
            )
        if number in (0, LAYERS + 1):
            tasks = replace(tasks, boundary_down=0.0, boundary_up=0.0)
        return replace(tasks, forward=0.0) if number == LAYERS + 1 else tasks

    blocks = [block(number) for number in range(LAYERS + 2)]
    summed = draw.randrange(resident, LAYERS + 3)
    options = StepOptions(
        draw.choice((1, 2, 3, 5)),
        draw.choice((0.25, 1.0, 3.0)),
        resident,
        summed,
        draw.random() < 0.7,
        draw.random() < 0.5,
    )
    assert at_least(blocks, options) <= overlapped(blocks, options).seconds * (1 + 1e-9)
