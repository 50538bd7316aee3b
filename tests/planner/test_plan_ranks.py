"""Plans of several ranks: bytes against what engines allocate on as many processes, times against
timelines reckoned by hand, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from megatrain.errors import ConfigError, PlanError
from megatrain.machine.hardware import COMMUNICATOR_HOST_BYTES, GIB, communicator_bytes
from megatrain.machine.profile import (
    UPDATE_BYTES,
    MachineProfile,
    assumed,
    interpolate,
    part_of,
    typical,
)
from megatrain.planner.activations import TRADED_HOLES
from megatrain.planner.job import Job
from megatrain.planner.memory import HEAD_COPIES, OTHERS_TABLES, Layout
from megatrain.planner.plan import Plan
from megatrain.planner.planning import make_plan
from megatrain.planner.simulation import BlockTasks, Collectives, overlapped, serial
from megatrain.planner.timing import ATTENTION_FORWARD_SHARE, StepCosts
from megatrain.world import World
from tests.helpers.once import engines_are_built_fast
from tests.helpers.planned import ALL_STREAMED, H200_LARGE_HOST, JOB_7B, QWEN_7B
from tests.planner.test_plan_measured import EMBEDDING, HALVES, Case
from tests.planner.test_simulation import COMPUTING, LAYERS, ONE_GROUP, with_tasks

LONGER: dict[str, Any] = {"tokens": 1024}
READ = LONGER | {"transport": "read"}
CASES = {
    "tied, three": (3, 1, Case(tied=True, tokens=1536, replicated=1)),
    "two hosts of two": (4, 2, Case(tokens=2048, replicated=2)),
    "in groups, half resident": (2, 1, Case(**HALVES | LONGER, resident=3, replicated=5, sums=6)),
    "sums in host RAM, tied, read": (2, 1, Case(**HALVES | READ, resident=1, sums=2, tied=True)),
    "read from one copy, half resident": (2, 1, Case(**READ, resident=3)),
    "all read": (2, 1, Case(**READ, clipping=False, replicated=6)),
    "shared by four": (4, 1, Case(pieces=4, tokens=8192, micro_batch_tokens=8192, vocab=64)),
    "shared, retained": (2, 1, Case(pieces=2, tokens=1024, retained=4, vocab=64)),
    "embedding frozen, resident": (2, 1, Case(freeze=EMBEDDING, resident=3, tokens=1024)),
}


def measured(world: World, case: Case, plan: Plan) -> tuple[int, int]:
    with engines_are_built_fast():
        return case.measure(plan, world)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_ranks_take_the_bytes_that_are_planned(name, tmp_path, on_ranks):
    ranks, hosts, case = CASES[name]
    plan = replace(case.plan(tmp_path, ranks // hosts, hosts), made_of=None)
    run = partial(measured, case=case, plan=plan)
    for device_bytes, host_bytes in on_ranks(ranks, run, hosts=hosts):
        assert plan.allocated_bytes == pytest.approx(device_bytes, rel=0.03)
        beside = ("gradient staging", HEAD_COPIES, OTHERS_TABLES)  # not in the store
        stored = sum(plan.host.values()) - sum(plan.host.get(name, 0) for name in beside)
        assert stored == pytest.approx(host_bytes, rel=0.02)


# -- time ----------------------------------------------------------------------------------------

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


# -- plans ---------------------------------------------------------------------------------------

HOST = replace(H200_LARGE_HOST, physical_cores=32)
QUICK: dict[str, Any] = {"groups": 1, "retained": 0, "micro_batch_tokens": 16_384}  # to search
LONG = replace(JOB_7B, tokens_per_step=131_072, offload_activations=False, **QUICK)


def planned(ranks: int, job: Job = LONG, hosts: int = 1, **more: Any) -> Plan:
    machine = replace(assumed(typical(HOST), HOST, ranks), network=50e9)
    job = replace(job, ranks=ranks, hosts=hosts)
    return make_plan(job, QWEN_7B, part_of(HOST, ranks), machine, **more)


def test_more_ranks_hold_less_of_the_state_each():
    state = ("weight", "remainder", "exp_avg", "exp_avg_sq", "grad")
    asked = replace(LONG, resident=0)
    plans = [planned(ranks, asked) for ranks in (1, 2, 4, 8)]
    each = [sum(plan.host[name] for name in state) for plan in plans]
    assert each == pytest.approx([each[0] / n for n in (1, 2, 4, 8)], rel=0.01)
    assert all(plan.gpu_bytes > 0 and plan.fits for plan in plans)
    seconds = [plan.timing.seconds for plan in plans]
    assert seconds == sorted(seconds, reverse=True)
    # each has a process of its own, and NCCL's part of it
    alone, ours = (plan.host["CUDA and compiler libraries"] for plan in plans[:2])
    assert ours - COMMUNICATOR_HOST_BYTES == pytest.approx(alone, rel=0.05)
    (tier,) = (row for row in plans[1].tiers if row[0] == "host")
    assert tier[1] == 2 * plans[1].host_bytes
    assert plans[1].to_dict()["ranks"]["host_bytes"] == plans[1].host_bytes


def test_budgets_of_a_host_are_shared():
    limited = planned(2, host_limit=80 * GIB)
    assert limited.budget.host == 40 * GIB
    assert {name: have for name, _, have in limited.tiers}["host"] == 80 * GIB
    lacking = planned(2, replace(LONG, resident=0), host_limit=20 * GIB)
    assert not lacking.fits and "where 20.00 GiB can be had" in lacking.lack


def test_shares_of_sums_wait_in_host_ram_where_the_gpu_has_no_room():
    asked, every = replace(LONG, groups=4, sums_on_device=0), 4 * sum(QWEN_7B.trained_numel)
    for ranks in (1, 2, 4):
        short = planned(ranks, asked, gpu_limit=24 * GIB)
        assert short.fits and short.choices.sums_on_device == short.choices.resident == 0
        assert short.host["gradient sums"] == pytest.approx(every / ranks, rel=1e-3)
    roomy = planned(2, replace(LONG, groups=4))
    assert roomy.choices.sums_on_device == len(QWEN_7B.block_numel)
    assert "gradient sums" not in roomy.host
    tight = planned(2, replace(LONG, groups=4), gpu_limit=24 * GIB)
    assert tight.fits and tight.choices.sums_on_device < len(QWEN_7B.block_numel)
    reasons = planned(2, asked, gpu_limit=24 * GIB).reasons
    (row,) = (row for row in reasons if row.what == "gradient sums")
    assert row.why == "as asked: in host RAM between groups, and exchanged at the end of each"


def test_what_was_chosen_of_sums_is_kept_by_fewer_residents():
    """Residents' sums always stay: bits would differ if there were more of them."""
    kept = planned(2, replace(LONG, groups=4, sums_on_device=3)).choices
    assert (kept.sums_on_device, kept.resident) == (3, 3)


GROUPS = replace(TWO, groups=2)


def test_sums_that_wait_are_exchanged_in_every_group():
    """They hide behind the computation where they are short, as their way up and down does."""
    once, each = (
        overlapped(with_tasks(reduce=9.0), replace(GROUPS, sums_on_device=stay))
        for stay in (LAYERS + 2, 0)
    )
    # the second group has its first two layers in their slots; the third layer's weights queue
    # behind the first group's sums
    later = LAYERS - 2 + 2.0
    assert each.seconds == pytest.approx(0.5 + LAYERS + 2.0 + later + 2 * 9.0 * (LAYERS + 2))
    forth = overlapped(COMPUTING, ONE_GROUP).seconds
    assert once.seconds == pytest.approx(forth + 0.5 + LAYERS + 2.0 + 9.0 * (LAYERS + 2))
    hidden = overlapped(with_tasks(reduce=0.5, sum_up=0.5, sum_down=0.5), GROUPS)
    assert hidden.seconds == pytest.approx(2 * forth + 0.5)
    slow = overlapped(with_tasks(reduce=0.5, sum_up=9.0, sum_down=9.0), GROUPS)
    assert slow.seconds > hidden.seconds + 20
    blocks = with_tasks(reduce=0.5, sum_up=0.25, sum_down=0.125)
    both = [serial(blocks, replace(GROUPS, sums_on_device=stay)) for stay in (LAYERS + 2, 0)]
    travelling = (0.5 + 0.25 + 0.125) * (LAYERS + 2)
    assert both[1].seconds - both[0].seconds == pytest.approx(travelling)


@pytest.mark.slow
def test_hosts_are_bound_by_their_network():
    near = planned(2, hosts=2, suggest=True)
    slow = replace(assumed(typical(HOST), HOST, 2), network=1e8)
    job = replace(LONG, ranks=2, hosts=2)
    far, less = (
        make_plan(each, QWEN_7B, part_of(HOST, 2), slow, suggest=True)
        for each in (job, replace(job, wire="bfloat16"))
    )
    # weights once, and fp32 sums once: 6 bytes a parameter, of which half is here already
    assert far.timing.seconds > 6 * QWEN_7B.parameters / 2 / 1e8
    assert far.timing.waits["network"] > 0.9 * far.timing.seconds
    assert less.timing.seconds == pytest.approx(far.timing.seconds * 4 / 6, rel=0.01)
    (wire,) = (one for one in far.faster if one.words == "train.wire: bfloat16")
    assert wire.speedup == pytest.approx(1.5, rel=0.01)
    assert not any("wire" in one.words for one in (*less.faster, *near.faster))
    assert near.timing.waits["network"] < 0.1 * near.timing.seconds
    kept = sum(QWEN_7B.block_numel[near.choices.replicated :])  # others stay on the GPUs
    assert near.host["weights of all hosts"] == pytest.approx(kept, rel=0.01)
    every = planned(2, replace(LONG, replicated=0), hosts=2)
    assert every.host["weights of all hosts"] == pytest.approx(QWEN_7B.parameters, rel=0.01)
    assert near.to_dict()["ranks"]["run_by"] == "train"


def uploading(transport: str, machine: MachineProfile) -> BlockTasks:
    """What a streamed layer takes on four ranks."""
    job, hardware = replace(LONG, resident=0, ranks=4, transport=transport), part_of(HOST, 4)
    choices = make_plan(job, QWEN_7B, hardware, machine).choices
    return StepCosts(Layout.of(choices, job, QWEN_7B, hardware), machine).blocks[1]


def test_reading_takes_links_or_memory_instead_of_a_gather():
    machine = assumed(typical(HOST), HOST, 4)
    gather, read = uploading("gather", machine), uploading("read", machine)
    assert gather.gather > 0.0 == read.gather
    assert read.reduce == gather.reduce
    assert read.upload == pytest.approx(4 * gather.upload, rel=1e-3)
    slow = replace(machine, update=((1, 1e8), (9, 3e8)), update_busy=1e8)
    weight = 2 * QWEN_7B.block_numel[1]
    assert uploading("read", slow).upload == pytest.approx(weight / (UPDATE_BYTES * 3e8))


def test_one_copy_of_a_host_s_weights_is_counted_once():
    ways = [replace(LONG, resident=0, transport=transport) for transport in ("gather", "read")]
    gather, read = (planned(4, way).host for way in ways)
    assert read["weight"] == pytest.approx(gather["weight"], rel=1e-3)
    # 24 bytes for 4 KiB of the others' part
    assert read[OTHERS_TABLES] == pytest.approx(3 * read["weight"] * 24 / 4096, rel=1e-3)
    several = replace(LONG, transport="read")
    with pytest.raises(ConfigError, match=r"several hosts.*set memory.transport: gather"):
        planned(2, several, hosts=2)


def test_attention_of_a_piece_is_over_the_whole_sequence():
    """Ranks trade queries, keys, values and outputs for it: half of them, where two share."""
    job = replace(LONG, ranks=2, compiled=False)
    machine = assumed(typical(HOST), HOST, 2)
    choices = replace(ALL_STREAMED, micro_batch_tokens=16_384, head_chunk_tokens=4096)

    def layer(job: Job) -> tuple[StepCosts, float]:
        costs = StepCosts(Layout.of(choices, job, QWEN_7B, part_of(HOST, 2)), machine)
        return costs, costs.blocks[1].forward / costs.micro_batches

    costs, alone = layer(job)
    together = layer(replace(job, pieces=2))[1]
    flops = 3 * QWEN_7B.cost.layers[0].forward.attention_flops * costs.tokens
    rates = [interpolate(machine.attention, job.seq_len * pieces) for pieces in (1, 2)]
    longer = ATTENTION_FORWARD_SHARE * (flops / rates[1] - flops / rates[0])
    traded = 4 * costs.tokens * QWEN_7B.hidden_size * 2 / 2 / machine.gather
    assert together - alone == pytest.approx(longer + traded)


def test_pieces_of_a_long_row_fit_where_it_does_not():
    whole = replace(LONG, seq_len=131_072, micro_batch_tokens=131_072, resident=0)
    piece = replace(whole, seq_len=16_384, micro_batch_tokens=16_384, pieces=8)
    assert not planned(1, whole, gpu_limit=60 * GIB).fits
    plan = planned(8, piece, gpu_limit=60 * GIB)
    assert plan.fits and plan.job.rank_tokens == 16_384
    one, some = (
        Layout.of(plan.choices, replace(plan.job, pieces=n), QWEN_7B, part_of(HOST, 8))
        for n in (1, 4)
    )
    # whole sequences' ids, holes where parts come and go, and a communicator of those that share
    assert some.device["token ids and targets"] == 4 * one.device["token ids and targets"]
    more = some.device["allocator slack"] - one.device["allocator slack"]
    assert more == TRADED_HOLES * 16_384 * QWEN_7B.hidden_size * 2
    groups = (some, [8, 4]), (one, [8])
    assert all(of.device["communicators"] == communicator_bytes(n, True) for of, n in groups)


@pytest.mark.parametrize(
    ("job", "words"),
    [
        ({"tokens_per_step": 3 * 1024}, "at most 3 GPUs, not for 4: take at most 3"),
        ({"rows_per_step": 1, "lengths_vary": True}, "a step of 1 row has work"),
    ],
)
def test_what_ranks_cannot_do_is_refused(job, words):
    with pytest.raises(PlanError, match=words):
        planned(4, replace(JOB_7B, **job))


# -- whole weights of blocks: once a step they come, where there is room ---------------------------


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
