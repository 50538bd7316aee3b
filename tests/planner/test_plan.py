"""What the planner chooses, refuses and says."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from io import StringIO
from itertools import pairwise, product
from typing import Any

import pytest
from rich.console import Console

from megatrain.errors import PlanError
from megatrain.machine.hardware import COMPILER_BYTES, GIB, Hardware
from megatrain.machine.profile import typical
from megatrain.planner.cost.shape import ModelShape
from megatrain.planner.job import Job
from megatrain.planner.memory import GPU_RECORDS_SHARE
from megatrain.planner.plan import Plan, render
from megatrain.planner.planning import make_plan
from megatrain.planner.search import most
from tests.helpers.planned import (
    H200,
    H200_LARGE_HOST,
    JOB_7B,
    LAPTOP,
    QWEN_1B8,
    QWEN_7B,
    TINY,
    TINY_JOB,
    h200,
    with_depth,
    with_gpu,
)

ALL_STREAMED: Any = {"groups": 1, "resident": 0, "retained": 0, "offload_activations": False}
SMALL_STEP = replace(JOB_7B, tokens_per_step=16_384)
# quickly planned, where the size of a micro-batch is not the question
ONE_SIZE = replace(JOB_7B, micro_batch_tokens=4096)


@cache
def plan_of(job: Job, shape: ModelShape = QWEN_7B, hardware: Hardware = H200, **more: Any) -> Plan:
    return make_plan(job, shape, hardware, typical(hardware), **more)


# -- choosing ------------------------------------------------------------------------------------


def test_a_small_model_on_a_large_gpu_stays_there_whole():
    plan = plan_of(SMALL_STEP, QWEN_1B8)
    assert (plan.choices.resident, plan.choices.retained, plan.choices.groups) == (30, 28, 1)
    assert sum(plan.timing.waits.values()) == 0
    # nothing but the process, its libraries, and what they keep
    records = int(GPU_RECORDS_SHARE * plan.gpu_bytes)
    assert plan.host_bytes == 2 * GIB + COMPILER_BYTES + records


def test_a_large_one_shares_the_gpu_among_states_sums_and_graphs():
    plan = plan_of(JOB_7B)
    plan.check()
    assert 0 < plan.choices.resident < 30
    assert plan.choices.retained > 20
    assert plan.gpu_bytes > 126 * GIB
    assert plan.timing.tflops > 1.1 * plan_of(replace(JOB_7B, **ALL_STREAMED)).timing.tflops


def test_no_other_choice_is_predicted_to_be_faster():
    """Against a plain walk over every combination of a small model."""
    hardware = with_gpu(replace(H200, context_bytes=0, workspace_bytes=0), 40_000_000 + 3000 * 60)
    machine = typical(hardware)
    chosen = make_plan(replace(TINY_JOB, micro_batch_tokens=None), TINY, hardware, machine)
    names = ("micro_batch_tokens", "groups", "resident", "retained")
    for values in product((8, 16, 32), (1, 2, 4), range(5), range(3)):
        asked: dict[str, Any] = dict(zip(names, values, strict=True))
        other = make_plan(replace(TINY_JOB, **asked), TINY, hardware, machine)
        assert not other.fits or chosen.timing.seconds <= other.timing.seconds * 1.006


@pytest.mark.parametrize(
    "asked",
    [
        {"micro_batch_tokens": 2048},
        {"groups": 4},
        {"resident": 3},
        {"resident": 0, "groups": 2},
        {"retained": 5},
        {"cheap_retention": True},
        {"cheap_retention": False},
        {"offload_activations": True},
        {"offload_activations": False},
        {"head_chunk_tokens": 512},
        {"update_threads": 3},
    ],
)
def test_what_is_set_by_hand_stays(asked):
    plan = plan_of(replace(SMALL_STEP, **{"micro_batch_tokens": 4096, **asked}))
    for name, value in asked.items():
        assert getattr(plan.choices, name) == value


def test_numbers_beyond_the_model_mean_all_of_it():
    choices = plan_of(replace(TINY_JOB, resident=99, retained=99), TINY).choices
    assert (choices.resident, choices.retained) == (4, 2)


def test_cheap_retention_where_whole_graphs_would_leave_layers_to_recompute():
    plan = plan_of(JOB_7B)
    whole = plan_of(replace(JOB_7B, cheap_retention=False))
    assert plan.choices.cheap_retention
    assert plan.choices.retained >= whole.choices.retained
    assert plan.timing.seconds < whole.timing.seconds
    assert not plan_of(replace(JOB_7B, compiled=False)).choices.cheap_retention
    # there is room for all
    assert not plan_of(SMALL_STEP, QWEN_1B8).choices.cheap_retention


def test_graphs_wait_in_host_RAM_where_the_device_has_no_room_for_them():
    """A model twice as deep as 7B's: the bus idles in forward, and what it carries need not be
    computed again."""

    def planned(**asked: Any) -> Plan:
        asked_job = replace(JOB_7B, groups=1, **asked)
        return plan_of(asked_job, with_depth(QWEN_7B, 56), H200_LARGE_HOST)

    sent, recomputed = planned(), planned(retained_on_host=0)
    assert 0 < sent.choices.retained_on_host <= 56 - sent.choices.retained
    assert sent.choices.offload_activations and sent.fits
    assert sent.timing.seconds < 0.99 * recomputed.timing.seconds
    assert sent.host["retained activations"] > 0
    assert " more in host RAM" not in recomputed.to_dict()["reasons"]["retained"]
    assert planned(retained_on_host=99, retained=5).choices.retained_on_host == 51


def test_balanced_routers_leave_one_group():
    job, small = replace(JOB_7B, offload_activations=False), h200(16, 200)
    assert plan_of(job, hardware=small).choices.groups > 1
    plan = plan_of(replace(job, balances_routers=True), hardware=small)
    assert plan.choices.groups == 1
    (groups,) = (row for row in plan.reasons if row.what == "groups")
    assert groups.why == "the routers' balancing loss is over a whole step"


def test_on_the_cpu_nothing_is_copied_and_nothing_computed_twice_where_memory_allows():
    roomy = plan_of(replace(TINY_JOB, micro_batch_tokens=None), TINY, LAPTOP).choices
    assert (roomy.resident, roomy.retained, roomy.offload_activations) == (4, 2, False)
    plan = plan_of(JOB_7B, hardware=replace(LAPTOP, host_available_bytes=500 * GIB))
    assert plan.choices.micro_batch_tokens <= 2048
    assert plan.choices.resident == 30


@pytest.mark.parametrize("limit", range(12))
def test_the_most_that_fits(limit):
    assert most(10, lambda count: count <= limit) == min(limit, 10)
    assert most(10, lambda count: count <= limit or count == 10) == 10


# -- computing gradients twice -------------------------------------------------------------------

# of host RAM: the state of 7B, and not its gradients too
SHORT = h200(25, 90)  # host RAM for the state of 7B, and not for its gradients too


def test_gradients_are_computed_twice_where_they_cannot_be_stored():
    plan = plan_of(ONE_SIZE, hardware=SHORT)
    plan.check()
    assert 0 < plan.choices.second_backward < 28
    assert (plan.choices.groups, plan.choices.retained, plan.choices.retained_on_host) == (1, 0, 0)
    assert plan.to_dict()["reasons"]["gradients"].startswith("once for the global norm")


def test_what_is_computed_twice_falls_to_nothing_as_host_ram_grows():
    """Without a cliff between a second backward through everything and stored gradients."""

    def needed(twice: bool) -> float:
        job = replace(ONE_SIZE, resident=0, second_backward=twice)
        return plan_of(job, hardware=h200(25)).host_bytes / GIB

    least, most = needed(twice=True), needed(twice=False)
    steps = [least - 3 + (most - least + 4) * part / 16 for part in range(17)]
    plans = [plan_of(replace(ONE_SIZE, resident=0), hardware=h200(25, host)) for host in steps]
    fitting = [plan for plan in plans if plan.fits]
    assert 10 < len(fitting) < 17 and not plans[0].fits
    assert plans[0].host_bytes <= fitting[0].host_bytes
    twice = [plan.choices.second_backward for plan in fitting]
    assert twice == sorted(twice, reverse=True) and twice[0] >= 27 and twice[-1] == 0
    seconds = [plan.timing.seconds for plan in fitting]
    assert all(a >= b > 0.85 * a for a, b in pairwise(seconds)) and seconds[-1] < seconds[0] / 1.5
    # what is stored grows by the layers that are no longer computed twice, and fills what there is
    each = 2 * QWEN_7B.block_numel[1]
    for less, more in pairwise(plan for plan in fitting if 0 < plan.choices.second_backward < 28):
        fewer = less.choices.second_backward - more.choices.second_backward
        stored = more.host["grad"] - less.host["grad"]
        assert stored == pytest.approx(fewer * each, abs=8 << 20)
        assert less.host_bytes > less.budget.host - each - (16 << 20)


@pytest.mark.parametrize("hardware", [H200, h200(25, 100), LAPTOP])
def test_and_nowhere_else(hardware):
    """The second is that machine with room for all but what speed may not use up."""
    job, shape = (TINY_JOB, TINY) if hardware is LAPTOP else (ONE_SIZE, QWEN_7B)
    plan = plan_of(job, shape, hardware)
    plan.check()
    assert not plan.choices.second_backward
    assert plan.timing.phases["second backward"] == 0


def test_not_beside_groups_or_graphs_that_were_asked_for_nor_without_clipping():
    sent: dict[str, Any] = {"retained_on_host": 1, "offload_activations": True}
    for asked in ({"groups": 2}, {"retained": 28}, sent, {"second_backward": False}):
        assert not plan_of(replace(ONE_SIZE, **asked), hardware=SHORT).fits
    unclipped = plan_of(replace(ONE_SIZE, clipping=False), hardware=SHORT)
    assert unclipped.fits and not unclipped.choices.second_backward


def test_asked_for_it_leaves_no_graphs_and_costs_a_head_and_a_backward():
    once = plan_of(replace(JOB_7B, second_backward=False, **ALL_STREAMED))
    twice = plan_of(replace(JOB_7B, second_backward=True, **ALL_STREAMED))
    assert twice.choices == replace(once.choices, second_backward=28)
    head_and_backward = once.timing.phases["head"] + once.timing.phases["backward"]
    assert twice.timing.phases["second backward"] == pytest.approx(head_and_backward, rel=0.05)
    alone = plan_of(replace(JOB_7B, second_backward=True)).choices
    assert (alone.groups, alone.retained, alone.retained_on_host) == (1, 0, 0)


# -- refusing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["gpu", "host", "disk"])
def test_refused_just_below_the_need_and_accepted_just_above(tier):
    job = replace(JOB_7B, micro_batch_tokens=1024, second_backward=False, **ALL_STREAMED)
    need = next(need for name, need, _ in plan_of(job).tiers if name == tier) / GIB
    plan_of(job, hardware=h200(**{tier: 1.001 * need})).check()
    short = plan_of(job, hardware=h200(**{tier: 0.95 * need}))
    assert short.short == (tier,)
    with pytest.raises(PlanError) as error:
        short.check()
    assert f"needs {need:.2f} GiB" in str(error.value)
    assert f"{0.95 * need:.2f} GiB can be had" in str(error.value)
    assert error.value.exit_code == 4


def job(**asked: Any) -> Job:
    return replace(ONE_SIZE, **asked)


SMALLER_STEP = "set train.tokens_per_step: 32768"
NOTHING_HELPS = "no setting frees enough host RAM: take a larger machine or a smaller model"
OTHER_DISK = "free disk space, or set output to a folder on a larger disk"
IN_ONE_GROUP = job(tokens_per_step=131_072, groups=1, offload_activations=False)


@pytest.mark.parametrize(
    ("job", "hardware", "fix"),
    [
        (ONE_SIZE, h200(25, 82), SMALLER_STEP),
        (ONE_SIZE, h200(25, 72), "set optimizer.moments: bfloat16"),
        (ONE_SIZE, h200(24, 43), f"{SMALLER_STEP} and optimizer.moments: int8"),
        (job(second_backward=False), h200(25, 90), "set memory.second_backward: auto"),
        (job(precision="float32", tokens_per_step=4096), h200(9, 130), "set precision: bfloat16"),
        (IN_ONE_GROUP, h200(22), "set memory.offload_activations: auto"),
        (job(micro_batch_tokens=65_536), h200(20), "set train.micro_batch_tokens: auto"),
        (job(resident=0), h200(host=60), "set memory.resident: auto"),
        (job(retained=28, groups=1), H200, "set train.retained: auto"),
        (ONE_SIZE, h200(24, 60), "set optimizer.moments: bfloat16"),
        (ONE_SIZE, h200(24, 8), NOTHING_HELPS),
        (ONE_SIZE, h200(disk=300), "set checkpoint.keep: 1"),
        (ONE_SIZE, h200(disk=1), OTHER_DISK),
    ],
)
def test_the_cheapest_fix_is_named(job, hardware, fix):
    words = f"; {re.escape(fix)}( or, exact but slower, memory.nvme: FOLDER)?(, or add .*)?$"
    with pytest.raises(PlanError, match=words):
        plan_of(job, hardware=hardware).check()


def test_the_users_budgets_count():
    few_dials = replace(JOB_7B, micro_batch_tokens=8192, groups=1, retained=0)
    with pytest.raises(PlanError, match="GPU memory"):
        plan_of(few_dials, gpu_limit=4 * GIB).check()
    with pytest.raises(PlanError, match="host RAM"):
        plan_of(few_dials, gpu_limit=30 * GIB, host_limit=50 * GIB).check()
    assert plan_of(JOB_7B, gpu_limit=10**15).budget.gpu == 150_109_880_320
    assert plan_of(JOB_7B, host_limit=200 * GIB).budget.host == 200 * GIB


# -- showing -------------------------------------------------------------------------------------


def test_the_plan_is_json():
    plan = plan_of(JOB_7B)
    values = json.loads(json.dumps(plan.to_dict()))
    assert values["fits"] is True
    assert values["choices"]["resident"] == plan.choices.resident
    assert values["totals"]["host"]["need"] == sum(values["host"].values())
    assert values["timing"]["seconds"] == plan.timing.seconds
    assert sum(values["timing"]["phases"].values()) == pytest.approx(plan.timing.seconds)
    assert values["timing"]["bound_by"]["backward"] == "compute"


@pytest.mark.parametrize("hardware", [H200, LAPTOP])
def test_the_plan_can_be_read(hardware):
    out = StringIO()
    plan = plan_of(JOB_7B, hardware=hardware)
    render(plan, Console(file=out, width=160), full=True)
    text = " ".join(out.getvalue().split())
    for array, nbytes in [*plan.device.items(), *plan.host.items(), *plan.disk.items()]:
        assert array in text or nbytes == 0
    for phase, seconds in plan.timing.phases.items():
        assert seconds == 0 or f"{phase} │ {seconds:.3g}" in text
    verdict = "fits: " if plan.fits else f"does not fit: {plan.lack} to change: {plan.fix}"
    assert text.startswith(verdict)


@pytest.mark.parametrize(("total", "says"), [(128, True), (100, False)])
def test_memory_that_others_hold_now_is_said(total, says):
    """82 GiB do not do; with what other programs hold of 128 they would."""
    hardware = replace(h200(25, 82), host_total_bytes=total * GIB)
    with pytest.raises(PlanError) as error:
        plan_of(replace(JOB_7B, **ALL_STREAMED), hardware=hardware).check()
    assert ("hold 46.0 GiB of RAM now: this may pass" in str(error.value)) == says
