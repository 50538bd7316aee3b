"""What would make a plan fit, and what would make it faster."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from io import StringIO

import pytest
from rich.console import Console

from megatrain.machine.hardware import GIB, Hardware
from megatrain.machine.profile import typical
from megatrain.planner.job import Budget, Job, StepTokens
from megatrain.planner.plan import Plan, render
from megatrain.planner.planning import make_plan
from megatrain.planner.search import Search
from megatrain.planner.suggest import (
    EXACT,
    MOST_SUGGESTIONS,
    WORTH_SAYING,
    faster_jobs,
    missing,
    smaller_jobs,
)
from tests.helpers.planned import (
    H200,
    JOB_7B,
    LAPTOP,
    MIXTURE,
    MOMENTS_BYTES,
    QWEN_7B,
    TINY,
    TINY_JOB,
    h200,
    with_gpu,
)

# six cores update 7.6 billion parameters in 5 s
SLOW_UPDATE = with_gpu(replace(H200, physical_cores=6), 24 * GIB)
SMALL_STEPS = replace(JOB_7B, tokens_per_step=8192)


@cache
def plan_of(job: Job, hardware: Hardware) -> Plan:
    return make_plan(job, QWEN_7B, hardware, typical(hardware), suggest=True)


@pytest.mark.slow
@pytest.mark.parametrize(("gpu_gib", "host_gib"), [(24, 60), (4, 200), (90, 20), (5, 50)])
def test_what_is_missing_is_enough_and_little_less_is_not(gpu_gib, host_gib):
    hardware, budget = h200(gpu_gib, host_gib), Budget(gpu_gib * GIB, host_gib * GIB)
    search = Search(JOB_7B, QWEN_7B, hardware, typical(hardware), budget)
    assert not search.fits_somehow()
    lacking = missing(search)
    assert lacking
    for tier, more in lacking:
        for share, fits in ((1.0, True), (0.9, False)):
            extra = {"gpu": 0, "host": 0, tier: int(share * more)}
            larger = Budget(gpu_gib * GIB + extra["gpu"], host_gib * GIB + extra["host"])
            assert replace(search, budget=larger).fits_somehow() is fits, (tier, more / GIB, share)


def test_on_a_cpu_only_RAM_is_missing():
    needed = make_plan(TINY_JOB, TINY, LAPTOP, typical(LAPTOP))
    search = Search(TINY_JOB, TINY, LAPTOP, typical(LAPTOP), Budget(None, needed.host_bytes // 100))
    assert [tier for tier, _ in missing(search)] == ["host"]


@pytest.mark.slow
def test_a_refusal_says_how_much_more_would_do_and_what_the_machine_has():
    plan = make_plan(JOB_7B, QWEN_7B, H200, typical(H200), gpu_limit=24 * GIB, host_limit=60 * GIB)
    assert plan.fix is not None
    assert ", or add " in plan.fix
    assert " GiB of host RAM (the machine has it: memory.host: " in plan.fix
    assert "GiB of GPU memory (the machine has it: memory.gpu: " in plan.fix


def test_more_tokens_hide_an_update_that_is_waited_for():
    plan = plan_of(SMALL_STEPS, SLOW_UPDATE)
    plan.check()
    assert plan.timing.waits["update"] > 0.3 * plan.timing.seconds
    batch = next(better for better in plan.faster if better.cost == "changes the batch")
    # twice the tokens gain much less than four times do
    assert batch.words == "train.tokens_per_step: 32768"
    assert "waits for the update fall" in batch.why
    assert batch.speedup > 1.2
    # a whole search finds no less
    tokens = int(batch.words.split()[1])
    larger = plan_of(replace(SMALL_STEPS, tokens_per_step=tokens), SLOW_UPDATE)
    assert batch.tokens_per_s <= 1.01 * tokens / larger.timing.seconds


def test_a_few_suggestions_worth_making_the_harmless_first():
    plan = plan_of(replace(SMALL_STEPS, resident=0, compiled=False), SLOW_UPDATE)
    assert 0 < len(plan.faster) <= MOST_SUGGESTIONS
    assert all(better.speedup >= WORTH_SAYING for better in plan.faster)
    assert len({better.cost for better in plan.faster}) == len(plan.faster)


def test_a_dial_that_was_set_by_hand_is_given_back_first():
    plan = plan_of(replace(JOB_7B, retained=0), H200)
    assert plan.faster[0].words == "train.retained: auto"
    assert plan.faster[0].cost == "exact"


MIXTURE_STEPS = replace(
    JOB_7B, tokens_per_step=32_768, micro_batch_tokens=8192, lighter_moments=MOMENTS_BYTES
)
BF16_MOMENTS = replace(
    MIXTURE_STEPS, state_bytes=MOMENTS_BYTES[0][1], update_arithmetic=MOMENTS_BYTES[0][2]
)


@pytest.mark.slow
def test_a_mixture_that_waits_for_the_host_is_told_so_and_what_helps_in_order():
    hardware, out = with_gpu(H200, 40 * GIB), StringIO()
    plan = make_plan(MIXTURE_STEPS, MIXTURE, hardware, typical(hardware), suggest=True)
    assert plan.bound_by_update
    costs = [better.cost for better in plan.faster]
    assert costs == ["changes the batch", "does not clip", "rounds the moments"]
    for better, changed in zip(
        plan.faster[1:], (replace(MIXTURE_STEPS, clipping=False), BF16_MOMENTS), strict=True
    ):
        searched = make_plan(changed, MIXTURE, hardware, typical(hardware)).timing.tokens_per_s
        assert better.speedup == better.tokens_per_s / plan.timing.tokens_per_s
        assert better.tokens_per_s <= 1.01 * searched
    render(plan, Console(file=out, width=200))
    share = plan.timing.waits["update"] / plan.timing.seconds
    said = out.getvalue().splitlines()
    bound = said.index(
        "bound by the host's update: it updates all 7,615,616,512 parameters, of which "
        f"{plan.active_parameters:,} act on a token; {share:.0%} of a step waits for it"
    )
    assert all(line.startswith("faster: ") for line in said[bound + 1 : bound + 4])


def test_suggestions_are_for_who_asks_and_can_be_read():
    assert make_plan(SMALL_STEPS, QWEN_7B, SLOW_UPDATE, typical(SLOW_UPDATE)).faster == ()
    plan, out = plan_of(SMALL_STEPS, SLOW_UPDATE), StringIO()
    render(plan, Console(file=out, width=200))
    for better, values in zip(plan.faster, plan.to_dict()["faster"], strict=True):
        assert f"faster: {better.words} would give {better.speedup:.2f}x tokens/s" in out.getvalue()
        assert values["speedup"] == better.speedup


# -- the table of what a user may ask for instead --------------------------------------------------


JOBS = {
    "plain": JOB_7B,
    "float32": replace(JOB_7B, precision="float32", compiled=False),
    "set by hand": replace(JOB_7B, resident=3, groups=2),
    "nothing left": replace(
        JOB_7B, clipping=False, tokens_per_step=1024, state_bytes=MOMENTS_BYTES[0][1]
    ),
}


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_each_change_is_another_job_named_once(job):
    for changes in (list(smaller_jobs(job)), list(faster_jobs(job, on_gpu=True))):
        assert len({change.words for change in changes}) == len(changes)
        assert all(": " in change.words and change.job != job for change in changes)


def test_what_is_known_of_a_steps_rows_is_not_of_another_steps():
    tokens = StepTokens(2048, 70_000, 68_000.0, 40, 38.5)
    known = replace(JOB_7B, lengths_vary=True, step_tokens=(tokens,))
    for job in (known, replace(known, rows_per_step=64)):
        jobs = [change.job for change in (*smaller_jobs(job), *faster_jobs(job, on_gpu=True))]
        others = [other for other in jobs if other.tokens_per_step != job.tokens_per_step]
        assert others
        assert all(other.step_tokens == () for other in others)


def test_what_costs_least_comes_first():
    words = [change.words for change in smaller_jobs(JOBS["set by hand"])]
    given_back = ["memory.resident: auto", "memory.resident: auto and train.groups: auto"]
    assert words[:3] == [*given_back, "train.tokens_per_step: 32768"]
    least = (
        "train.tokens_per_step: 8192 and optimizer.moments: int8 and memory.activations: int8 "
        "and train.max_grad_norm: null"
    )
    assert words[-3:] == [least, *(f"{first} and {least}" for first in given_back)]
    of_one_row = [change.words for change in smaller_jobs(JOBS["nothing left"])]
    assert not any("tokens_per_step" in words for words in of_one_row), "a step has a row at least"
    costs = [change.cost for change in faster_jobs(JOBS["set by hand"], on_gpu=True)]
    assert costs[:3] == [EXACT, EXACT, "changes the batch"]
    assert costs[-1] == "does not clip"


def test_a_cpu_is_not_offered_what_only_a_gpu_does_fast():
    words = {change.words for change in faster_jobs(JOBS["plain"], on_gpu=False)}
    assert words.isdisjoint({"precision: fp8", "compile: true"})
