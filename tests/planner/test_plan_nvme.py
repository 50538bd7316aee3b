"""The third tier in the plan: as little of it as host RAM allows, every byte of it known, and its
time."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from io import StringIO
from typing import Any

import pytest
import torch
from rich.console import Console

from megatrain.engine.components import open_store
from megatrain.errors import PlanError
from megatrain.machine.hardware import GIB, Hardware
from megatrain.machine.profile import typical
from megatrain.memory import sizes
from megatrain.memory.layout import FlatLayout
from megatrain.optim import AdamW
from megatrain.planner.job import Budget, Choices, Job
from megatrain.planner.memory import Layout
from megatrain.planner.plan import Plan, render
from megatrain.planner.planning import lay_out, make_plan
from megatrain.planner.search import Search
from megatrain.planner.simulation import Timing
from megatrain.planner.timing import StepCosts
from megatrain.settings import Settings
from tests.helpers.planned import ALL_STREAMED, JOB_7B, LAPTOP, QWEN_7B, TINY, TINY_JOB, h200

SMALL = h200(24, 60)
# quickly planned, where the choices are not the question
ONE_SIZE = replace(JOB_7B, micro_batch_tokens=8192)
ON_DRIVE = replace(JOB_7B, nvme_drives=1, second_backward=False)
FEW_DIALS = replace(ON_DRIVE, micro_batch_tokens=8192, groups=1, retained=0)


@cache
def plan_of(
    job: Job = FEW_DIALS, hardware: Hardware = SMALL, nvme_limit: int | None = 1000 * GIB
) -> Plan:
    return make_plan(job, QWEN_7B, hardware, typical(hardware), nvme_limit=nvme_limit)


def layout_of(choices: Choices, job: Job) -> Layout:
    return Layout.of(choices, job, QWEN_7B, SMALL)


def with_choices(plan: Plan, **changes: Any) -> Plan:
    choices = replace(plan.choices, **changes)
    return lay_out(layout_of(choices, plan.job), typical(SMALL), plan.budget)


@pytest.mark.parametrize(("again", "drives"), [(True, 1), (None, 1), (None, 3)])
def test_room_to_spare_is_not_worth_a_drive(again, drives):
    on_drive = replace(ONE_SIZE, nvme_drives=drives, second_backward=again)
    host_alone = replace(on_drive, nvme_drives=0)
    # as little as can be, which is more than SMALL has
    tight = h200(24, 1.01 * plan_of(host_alone, SMALL, None).host_bytes / GIB)
    with_drive, without = plan_of(on_drive, tight), plan_of(host_alone, tight, None)
    assert without.fits
    if drives == 3:  # fast enough to spare a second backward
        assert without.choices.second_backward and not with_drive.choices.second_backward
        assert with_drive.timing.seconds < without.timing.seconds
    else:
        assert (with_drive.choices, with_drive.nvme) == (without.choices, {})


@pytest.mark.parametrize("host", [60, 48])
def test_as_little_as_can_be_goes_to_the_drive(host):
    plan = plan_of(replace(ONE_SIZE, nvme_drives=1, second_backward=False), h200(24, host))
    plan.check()
    assert plan.choices.nvme_blocks > 0
    assert not with_choices(plan, nvme_blocks=0).host_bytes <= host * GIB
    fewer = with_choices(plan, nvme_blocks=plan.choices.nvme_blocks - 1)
    assert fewer.host_bytes > 0.97 * host * GIB - 512 * 2**20


def test_blocks_whose_buffers_take_more_than_they_leave_stay_in_ram():
    job, shape = ON_DRIVE, replace(TINY, block_numel=(16 << 20, *[4 << 20] * 10, 16 << 20))
    here = Layout.of(ALL_STREAMED, job, shape, SMALL)
    layers, every = (here.moved(nvme_blocks=count).host_bytes for count in (10, 12))
    assert layers < every
    search = Search(job, shape, SMALL, typical(SMALL), Budget(24 * GIB, layers))
    assert search.spilled(here).choices.nvme_blocks == 10


@pytest.mark.parametrize("clipping", [True, False])
def test_every_array_is_counted_once(clipping):
    plan = plan_of(replace(FEW_DIALS, clipping=clipping))
    there = with_choices(plan, nvme_blocks=9)
    here = with_choices(plan, nvme_blocks=0)
    for name in layout_of(plan.choices, plan.job).array_bytes:
        both = there.nvme.get(name, 0) + there.host.get(name, 0)
        assert both == pytest.approx(here.host[name], abs=4 << 20)
    assert there.host["NVMe staging"] > 0
    assert "NVMe staging" not in here.host


def test_without_a_folder_the_fix_names_one_and_a_drive_that_is_too_small_is_named():
    with pytest.raises(PlanError, match=r"host RAM.*memory\.nvme: FOLDER"):
        plan_of(replace(FEW_DIALS, nvme_drives=0), nvme_limit=None).check()
    with pytest.raises(PlanError, match=r"GiB of NVMe space, where 5.00 GiB can be had"):
        plan_of(FEW_DIALS, nvme_limit=5 * GIB).check()


def test_a_slower_drive_takes_longer_and_two_drives_less_and_the_wait_has_its_name():
    plan, machine = plan_of(), typical(SMALL)
    layout = layout_of(plan.choices, plan.job)

    def predicted(drives: int, share: float) -> Timing:
        rates: Any = {
            "disk_read": share * machine.disk_read,
            "disk_write": share * machine.disk_write,
        }
        on_drives = layout_of(plan.choices, replace(plan.job, nvme_drives=drives))
        return StepCosts(on_drives, replace(machine, **rates)).predict()

    one = predicted(1, 1.0)
    assert one.waits["nvme"] > 0
    assert predicted(1, 0.5).seconds > one.seconds > predicted(2, 1.0).seconds
    assert predicted(2, 0.5).seconds == pytest.approx(one.seconds)
    once = sum(layout.nvme.values())
    alone = once / machine.disk_read + once / machine.disk_write
    assert predicted(1, 0.01).seconds == pytest.approx(100 * alone, rel=0.1)
    assert StepCosts(layout, machine).at_least <= one.seconds


def test_training_on_the_cpu_may_use_a_drive_too():
    machine, job = typical(LAPTOP), replace(TINY_JOB, nvme_drives=1, nvme_blocks=2)
    needed = make_plan(TINY_JOB, TINY, LAPTOP, machine).host_bytes
    choices = make_plan(job, TINY, LAPTOP, machine, nvme_limit=needed).choices
    assert choices.nvme_blocks == min(2, len(TINY.block_numel) - choices.resident)


def test_the_plan_says_what_is_there_and_what_wears_the_drive():
    plan, out = plan_of(), StringIO()
    render(plan, Console(file=out, width=300), full=True)
    text = out.getvalue()
    once = sum(plan.nvme.values())
    assert f"reads {once / GIB:,.2f} GiB and writes {once / GIB:,.2f} GiB" in text
    assert f"{int(600e12 / once):,} steps wear out a drive of 600 TB endurance" in text
    assert "NVMe space" in text
    total = {"need": sum(plan.nvme.values()), "have": 1000 * GIB, "fits": True}
    assert plan.to_dict()["totals"]["nvme"] == total


@pytest.mark.parametrize("count", [1, 3, 6])
def test_the_engine_allocates_what_the_plan_says(tmp_path, monkeypatch, count):
    monkeypatch.setattr(sizes, "HUGE_PAGE", 4096)
    numels = (90_112, 40_960, 40_960, 40_960, 40_960, 61_440)
    layouts = [FlatLayout.pack([("w", (numel,), True)]) for numel in numels]
    shape = replace(TINY, block_numel=tuple(layout.numel for layout in layouts))
    on_nvme: Any = {"nvme_blocks": count}
    settings = Settings(nvme_folders=(tmp_path,), **on_nvme)
    choices = make_plan(TINY_JOB, TINY, LAPTOP, typical(LAPTOP)).choices
    choices = replace(choices, resident=0, groups=1, **on_nvme)
    planned = Layout.of(choices, TINY_JOB, shape, LAPTOP)
    arrays = [*planned.array_bytes, "NVMe staging"]
    in_host = sum(planned.host.get(name, 0) for name in arrays)
    rest: Any = {"gradients": range(len(layouts)), "device": torch.device("cpu")}
    with open_store(layouts, AdamW(), "bfloat16", settings, **rest) as store:
        assert in_host == pytest.approx(store.nbytes, abs=4096 * 2 * len(planned.array_bytes))
        assert store.nvme is not None
        on_drive = sum(nbytes for _, nbytes in store.nvme._places.values())
        assert on_drive == sum(planned.nvme.values())
