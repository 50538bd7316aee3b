"""Layers' inputs on NVMe in the plan: as few as host RAM allows, every byte known, and their time."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from megatrain import planner_bytes, timing
from megatrain.data.loader import cuts
from megatrain.engine.boundaries import Offload
from megatrain.engine.streams import Compute, Lane
from megatrain.hardware import GIB, MIB, Hardware
from megatrain.machine import typical
from megatrain.memory import slab, swap_files
from megatrain.nvme_tier import BOUNDARY_PIECE_BYTES, BOUNDARY_PIECES
from megatrain.planner import Job, Plan, lay_out, make_plan
from megatrain.planner_bytes import host_bytes, nvme_bytes, nvme_traffic
from megatrain.planner_job import Choices, StepTokens, WholeUpdate
from megatrain.planner_view import on_nvme
from tests.drives import rooms_for_inputs
from tests.planned import H200, JOB_7B, LAPTOP, QWEN_7B, TINY, TINY_JOB, with_gpu

# A million tokens at once: 196 GiB of boundaries
LONG = replace(JOB_7B, tokens_per_step=1 << 20, seq_len=16_384, groups=1, nvme_drives=1)
LAYER_BYTES = (1 << 20) * 3584 * 2  # of one layer's boundaries


def hardware_with(host: int) -> Hardware:
    return with_gpu(replace(H200, host_available_bytes=host * GIB), 80 * GIB)


@cache
def plan_of(host: int = 200, job: Job = LONG, nvme_limit: int | None = 1000 * GIB) -> Plan:
    return make_plan(job, QWEN_7B, hardware_with(host), typical(hardware_with(host)), nvme_limit=nvme_limit)


def with_choices(plan: Plan, **changes: Any) -> Plan:
    hardware = hardware_with(200)
    return lay_out(replace(plan.choices, **changes), plan.job, QWEN_7B, hardware, typical(hardware), plan.budget)


# -- the choice ---------------------------------------------------------------------------------------------------------------------


def test_what_host_ram_has_room_for_stays_there() -> None:
    plan = plan_of(350)
    assert (plan.choices.offload, plan.choices.nvme_activations, plan.nvme) == (True, 0, {})


@pytest.mark.parametrize("host", [200, 150, 100])
def test_as_little_as_can_be_goes_to_the_drive(host: int) -> None:
    plan = plan_of(host)
    plan.check()
    assert plan.choices.nvme_activations > 0
    fewer = with_choices(plan, nvme_activations=plan.choices.nvme_activations - 1)
    assert plan.host_bytes <= host * GIB
    assert fewer.host_bytes > 0.97 * host * GIB - 512 * MIB


def test_it_fits_where_nothing_else_does_and_the_fix_says_so() -> None:
    job = replace(LONG, nvme_activations=0)
    assert plan_of().fits
    assert not plan_of(job=job).fits
    assert "memory.nvme_activations: auto" in (plan_of(job=job).fix or "")


def test_of_arrays_and_inputs_that_goes_which_moves_fewer_bytes() -> None:
    """Arrays need staging for three layers before any room is won; inputs are read twice where there are two backwards."""
    for again, inputs_go in ((False, True), (True, False)):
        job = replace(LONG, resident=0, second_backward=again)
        plan, arrays, inputs = (plan_of(250, only) for only in (job, replace(job, nvme_activations=0), replace(job, nvme_blocks=0)))
        assert plan.fits
        assert arrays.fits
        assert inputs.fits
        moved = [sum(nvme_traffic(found.choices, job, QWEN_7B)) for found in (inputs, arrays)]
        assert (moved[0] < moved[1]) == inputs_go
        assert plan.choices == (inputs if inputs_go else arrays).choices
    both = plan_of(30, replace(LONG, resident=0)).choices
    assert both.nvme_activations == 28 - both.retained
    assert both.nvme_blocks > 0


def test_what_is_asked_for_is_done_and_a_drive_that_is_too_small_is_named() -> None:
    plan = plan_of(350, replace(LONG, nvme_activations=5, offload=None))
    assert (plan.choices.nvme_activations, plan.choices.offload) == (5, True)
    assert "inputs of" not in on_nvme(plan.choices)
    assert on_nvme(plan.choices) == "5 layers' worth of inputs"
    assert dict(plan.reasons)["NVMe"].startswith("inputs as asked, besides what host RAM has no room for; a step reads")
    assert plan_of(350, replace(LONG, nvme_activations=99)).choices.nvme_activations == 28
    assert plan_of(350, replace(LONG, nvme_activations=5), 5 * GIB).short == ("nvme",)
    assert plan_of(350, replace(LONG, groups=None, nvme_activations=5)).choices.retained <= 23


@pytest.mark.parametrize(
    ("host", "asked", "words"),
    [
        (200, {}, "what host RAM has no room for; "),
        (350, {}, "host RAM has room for everything"),
        (350, {"nvme_blocks": 2}, "blocks as asked, besides what host RAM has no room for; "),
        (350, {"nvme_arrays": "all", "nvme_blocks": 2}, "blocks and arrays as asked, besides what host RAM has no room for; "),
        (350, {"nvme_arrays": "all", "nvme_activations": 3}, "inputs as asked, besides what host RAM has no room for; "),
        (350, {"nvme_arrays": "all"}, "host RAM has room for everything"),
        (350, {"nvme_blocks": 0, "nvme_activations": 3}, "as asked; "),
        (350, {"nvme_activations": 0}, "inputs as asked; host RAM has room for the rest"),
        (350, {"nvme_blocks": 0, "nvme_activations": 0}, "as asked, nothing"),
    ],
    ids=str,
)
def test_the_plan_tells_what_was_asked_from_what_it_chose(host: int, asked: dict[str, Any], words: str) -> None:
    assert dict(plan_of(host, replace(LONG, **asked)).reasons)["NVMe"].startswith(words)


def test_inputs_may_go_there_with_an_optimizer_whose_arrays_may_not() -> None:
    numel = QWEN_7B.block_numel
    whole = WholeUpdate((("exp_avg", tuple(4 * n for n in numel)),), tuple(0.0 for _ in numel), 4.0, 0.0, 0, 0)
    plan = plan_of(150, replace(LONG, state_bytes=(), whole_update=whole))
    assert plan.fits
    assert plan.choices.nvme_activations > 0
    assert set(plan.nvme) == {"boundary activations"}


# -- bytes --------------------------------------------------------------------------------------------------------------------------


def test_every_input_is_counted_once_and_staging_does_not_grow_with_them() -> None:
    plan = plan_of()
    near, some, all_of_them = (with_choices(plan, nvme_activations=count) for count in (0, 7, 28))
    assert (some.nvme["boundary activations"], all_of_them.nvme["boundary activations"]) == (7 * LAYER_BYTES, 28 * LAYER_BYTES)
    assert near.host["boundary activations"] - some.host["boundary activations"] == 7 * LAYER_BYTES
    assert "boundary activations" not in all_of_them.host
    assert "NVMe staging" not in near.host
    assert all_of_them.host["NVMe staging"] == BOUNDARY_PIECES * BOUNDARY_PIECE_BYTES == 512 * MIB


def test_a_step_writes_them_once_and_reads_them_once_a_backward() -> None:
    choices = with_choices(plan_of(), nvme_activations=7).choices
    assert nvme_traffic(choices, LONG, QWEN_7B) == (7 * LAYER_BYTES, 7 * LAYER_BYTES)
    assert nvme_traffic(replace(choices, groups=4), LONG, QWEN_7B) == (7 * LAYER_BYTES, 7 * LAYER_BYTES)
    assert nvme_traffic(replace(choices, second_backward=True), LONG, QWEN_7B) == (14 * LAYER_BYTES, 7 * LAYER_BYTES)
    assert sum(nvme_bytes(replace(choices, groups=4), LONG, QWEN_7B).values()) == 7 * LAYER_BYTES // 4
    assert nvme_traffic(replace(choices, offload=False), LONG, QWEN_7B) == (0, 0)


@pytest.mark.parametrize("activations", ["none", "int8"])
@pytest.mark.parametrize(("far", "layers"), [(1, 2), (1, 1), (2, 2), (5, 2)])
def test_the_engine_allocates_what_the_plan_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, far: int, layers: int, activations: str
) -> None:
    monkeypatch.setattr(slab, "HUGE_PAGE", 4096)
    monkeypatch.setattr(planner_bytes, "HUGE_PAGE_BYTES", 4096)
    monkeypatch.setattr(swap_files, "PIECE_BYTES", 4096)
    reserved: list[int] = []
    monkeypatch.setattr(os, "posix_fallocate", lambda _, start, nbytes: reserved.append(nbytes))
    shape, job = replace(TINY, hidden_size=4096), replace(TINY_JOB, activations=activations)
    choices = Choices(16, 1, 0, 0, 2 - layers, False, True, 8, 1, nvme_activations=far)
    lanes = Lane("download"), Lane("fetch")
    row = planner_bytes.boundary_row_bytes(job, shape)
    keeper = Offload(row, Compute(torch.device("cpu")), *lanes, None, far, [tmp_path], choices.largest_group(job))
    keeper.begin_group([8], layers)
    staging = keeper._far and keeper._far.nbytes
    keeper.begin_group([16] * 4, layers)
    planned = host_bytes(choices, job, shape, LAPTOP)
    page = 4096 * 4 * layers  # a page a boundary
    assert keeper._far is not None
    assert planned.get("boundary activations", 0) == pytest.approx(keeper._boundaries.nbytes, abs=page)
    assert planned["NVMe staging"] == pytest.approx(keeper._far.nbytes, abs=4096 * BOUNDARY_PIECES)
    assert keeper._far.nbytes == staging
    assert reserved == [pytest.approx(sum(nvme_bytes(choices, job, shape).values()), abs=page)], "at once"
    for lane in lanes:
        lane.close()
    keeper.close()


# -- time ---------------------------------------------------------------------------------------------------------------------------


def predicted(count: int, drives: int = 1, share: float = 1.0, **changes: Any) -> timing.Timing:
    plan = plan_of()
    machine = typical(hardware_with(200))
    slower = replace(machine, disk_read=share * machine.disk_read, disk_write=share * machine.disk_write)
    choices = replace(plan.choices, nvme_activations=count, **changes)
    job = replace(plan.job, nvme_drives=drives)
    assert timing.at_least(choices, job, QWEN_7B, slower) <= timing.predict(choices, job, QWEN_7B, slower).seconds
    return timing.predict(choices, job, QWEN_7B, slower)


def test_a_drive_that_keeps_up_costs_no_time_and_one_that_does_not_is_named() -> None:
    none, few, all_of_them = predicted(0), predicted(3), predicted(28)
    assert few.seconds == pytest.approx(none.seconds, rel=0.01)
    assert all_of_them.waits["nvme"] > 1
    assert all_of_them.waits["download"] == all_of_them.waits["upload"] == 0
    assert all_of_them.bound_by["forward"] == "nvme"
    assert predicted(28, 1, 0.5).seconds > predicted(28, 1).seconds > predicted(28, 2).seconds
    assert predicted(28, 2, 0.5).seconds == pytest.approx(predicted(28, 1).seconds)


@pytest.mark.parametrize("again", [False, True])
def test_a_crawling_drive_takes_what_it_moves_at_its_rates(again: bool) -> None:
    machine = typical(hardware_with(200))
    read, written = ((1 + again) * 28 * LAYER_BYTES, 28 * LAYER_BYTES)
    expected = 100 * (read / machine.disk_read + written / machine.disk_write)
    assert predicted(28, 1, 0.01, second_backward=again).seconds == pytest.approx(expected, rel=0.05)


def test_rows_of_many_lengths_find_their_files_large_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Micro-batches are seldom full, and each share of each is rounded by itself."""
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: None)
    made = rooms_for_inputs(monkeypatch)
    draws, size = random.Random(0), 64
    steps = [sorted((draws.randint(2, 33) for _ in range(40)), reverse=True) for _ in range(30)]
    cut = [[(stop - start) * rows[start] for start, stop in cuts(rows, size)] for rows in steps]
    tokens, counts = [sum(sizes) for sizes in cut], [len(sizes) for sizes in cut]
    known = StepTokens(size, max(tokens), fmean(tokens), max(counts), fmean(counts))
    shape, job = replace(TINY, hidden_size=4096), replace(TINY_JOB, lengths_vary=True, step_tokens=(known,))
    choices = Choices(size, 1, 0, 0, 0, False, True, 8, 1, nvme_activations=1)
    lanes, row = (Lane("download"), Lane("fetch")), planner_bytes.boundary_row_bytes(job, shape)
    largest = choices.largest_group(job)
    assert (len(largest), sum(largest), largest[0]) == (max(counts), max(tokens), size)
    keeper = Offload(row, Compute(torch.device("cpu")), *lanes, None, 1, [tmp_path], largest, varied=True)
    for sizes in cut:
        keeper.begin_group(sizes, 2)
    assert made == [nvme_bytes(choices, job, shape)["boundary activations"]]
    for lane in lanes:
        lane.close()
    keeper.close()
