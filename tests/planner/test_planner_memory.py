"""The planner's tables of bytes, written out by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from megatrain.machine.hardware import (
    CUDA_CONTEXT_BYTES,
    CUDA_LIBRARY_BYTES,
    GIB,
    MIB,
)
from megatrain.planner.job import WholeUpdate
from megatrain.planner.memory import HEAD_COPIES, NOT_ALLOCATED, Layout, disk_bytes
from megatrain.storage.hashed_file import SMALL_FILES_BYTES
from tests.helpers.planned import (
    ALL_STREAMED,
    H200,
    HUGE,
    JOB_7B,
    LAPTOP,
    QWEN_7B,
    TINY,
    TINY_JOB,
    TWO_GROUPS,
    layout,
    with_depth,
    with_gpu,
)

LARGER = replace(TINY, block_numel=(1000, 2_000_000, 3000, 4000))
TIED = replace(TINY, block_numel=(4000, 2000, 3000, 10), tied=True)


def test_device_arrays_of_a_small_model():
    assert layout(hardware=with_gpu(H200, GIB * 2)).device == {
        "layer slots": 2 * 3000 * 2,
        "embedding and head slot": 4000 * 2,
        "resident state": 0,
        "gradient sums": 4000 * 4,
        "gradient staging": 4000 * 2,
        # tokens x hidden x bf16 x (two layers' inputs and the head's)
        "activation checkpoints": 64 * 10 * 2 * 3,
        "retained activations": 0,
        "token ids and targets": 64 * 24,
        "rotary tables and masks": 4 * 128,  # four micro-batches of 16 tokens
        "working set": 1600,  # of a layer
        "cuBLAS workspaces": 32 * MIB,
        "allocator slack": 32 * MIB + int(0.05 * 1600),
        "CUDA context": GIB,
    }


@pytest.mark.parametrize("hardware", [H200, LAPTOP])
def test_a_layout_with_blocks_and_sums_elsewhere_is_that_of_its_choices(hardware):
    """A search moves them often, and reckons what computing takes but once."""
    whole = WholeUpdate((), (0.0, 1.0, 1.0, 0.0), 0.0, 0.0, 5, 7)
    job, totals = replace(TINY_JOB, lengths_vary=True, whole_update=whole), set()
    streamed = Layout.of(TWO_GROUPS, job, TINY, hardware)
    for resident, sums, nvme in product(range(5), range(5), range(3)):
        places: dict[str, Any] = {"resident": resident, "sums_on_device": sums, "nvme_blocks": nvme}
        moved = streamed.moved(**places)
        made = Layout.of(replace(TWO_GROUPS, **places), job, TINY, hardware)
        assert (moved.device, moved.host, moved.nvme) == (made.device, made.host, made.nvme)
        totals.add((moved.device_bytes, moved.host_bytes))
    assert len(totals) > 15


@pytest.mark.parametrize(
    ("resident", "slots", "edge", "state"),
    [
        (0, 2 * 3000, 4000, 0),
        (1, 2 * 3000, 4000, 1000),
        (2, 1 * 3000, 4000, 1000 + 2000),  # one layer is left to stream, and needs one slot
        (3, 0, 4000, 1000 + 2000 + 3000),
        (4, 0, 0, 10_000),
    ],
)
def test_resident_blocks_need_no_slots(resident, slots, edge, state):
    table = layout(replace(ALL_STREAMED, resident=resident)).device
    assert table["layer slots"] == slots * 2
    assert table["embedding and head slot"] == edge * 2
    # weight, remainder, moments, and the gradient until the norm is known
    assert table["resident state"] == state * (2 + 2 + 8 + 2)


@pytest.mark.parametrize(
    ("asked", "job", "bytes_each"),
    [
        ({}, TINY_JOB, 14),
        ({}, replace(TINY_JOB, clipping=False), 12),
        ({"groups": 2, "sums_on_device": 4}, TINY_JOB, 12),
        ({}, replace(TINY_JOB, precision="float32"), 16),
    ],
)
def test_resident_state_keeps_a_gradient_only_while_it_waits_for_the_norm(asked, job, bytes_each):
    choices = replace(ALL_STREAMED, resident=4, **asked)
    assert layout(choices, job=job).device["resident state"] == 10_000 * bytes_each


@pytest.mark.parametrize(
    ("choices", "shape", "elements"),
    [
        (ALL_STREAMED, TINY, 4000),
        (TWO_GROUPS, TINY, 2 * 4000),  # all sums travel, through two buffers
        (replace(TWO_GROUPS, sums_on_device=2), TINY, 1000 + 2000 + 2 * 4000),
        (replace(TWO_GROUPS, sums_on_device=4), TINY, 10_000),
        (ALL_STREAMED, TIED, 4000 + 3000),  # a tied embedding's sum lives from head to embedding
        (TWO_GROUPS, TIED, 4000 + 2 * 3000),
        (replace(TWO_GROUPS, sums_on_device=2), TIED, 4000 + 2000 + 2 * 3000),
    ],
)
def test_gradient_sums(choices, shape, elements):
    assert layout(choices, shape).device["gradient sums"] == elements * 4


def test_host_arrays_are_of_streamed_blocks():
    process = {"process at start": 70, "CUDA and compiler libraries": 30, HEAD_COPIES: 4600}
    assert layout(shape=LARGER).host == process | {
        "weight": 2 * HUGE,  # 2 x 2,008,000 bytes: 1.9 huge pages
        "remainder": 2 * HUGE,
        "exp_avg": 4 * HUGE,
        "exp_avg_sq": 4 * HUGE,
        "grad": 2 * HUGE,
    }
    rest = layout(replace(ALL_STREAMED, resident=2), LARGER).host
    assert rest["weight"] == rest["exp_avg"] == HUGE  # 7,000 elements
    assert layout(replace(ALL_STREAMED, resident=4), LARGER).host == process


@pytest.mark.parametrize(
    ("kept", "best", "written", "copies"),
    [(2, True, None, 4), (2, False, None, 3), (2, True, 1, 1)],
)
def test_checkpoints(kept, best, written, copies):
    job = replace(TINY_JOB, checkpoints_kept=kept, keeps_best=best, checkpoints_written=written)
    assert list(disk_bytes(job, TINY).values()) == [9_900 * 12] * copies + [
        copies * SMALL_FILES_BYTES
    ]


# -- measured ------------------------------------------------------------------------------------


def test_what_was_measured_on_an_h200():
    """Peaks of the 7B engine, compiled, all streamed and recomputed
    (benchmarks/results/2026-11-21-h200); a layer decides. Gradients were computed in a thread of
    their own then, which had a cuBLAS handle with a workspace, and left through two buffers."""
    workspace, handle, buffer = 32 * MIB, 72 * MIB, max(QWEN_7B.block_numel) * 2
    hardware = replace(H200, context_bytes=CUDA_CONTEXT_BYTES, library_bytes=CUDA_LIBRARY_BYTES)
    hardware = replace(hardware, resident_bytes=856 * MIB)
    choices = replace(ALL_STREAMED, micro_batch_tokens=16_384, head_chunk_tokens=4096)
    found = layout(choices, QWEN_7B, JOB_7B, hardware)
    allocated = sum(size for name, size in found.device.items() if name not in NOT_ALLOCATED)
    assert allocated == pytest.approx(25_264_909_312 - workspace - buffer, rel=0.001)
    in_all = sum(found.device.values())
    assert in_all == pytest.approx(26_461_863_936 - workspace - handle - buffer, rel=0.01)
    assert sum(found.host.values()) == pytest.approx(108_421_505_024, rel=0.005)


@pytest.mark.parametrize("hardware", [H200, LAPTOP])
def test_device_bytes_less_boundaries_do_not_grow_with_depth(hardware):
    choices, rest = replace(ALL_STREAMED, micro_batch_tokens=4096), set()
    for layers in (4, 16, 64):
        table = layout(choices, with_depth(QWEN_7B, layers), JOB_7B, hardware).device
        assert table["activation checkpoints"] == 65_536 * 3584 * 2 * (layers + 1)
        rest.add(sum(table.values()) - table["activation checkpoints"])
    assert len(rest) == 1


def test_constants_are_on_the_device_and_in_every_checkpoint():
    shape = replace(TINY, constant_bytes=12_345)
    with_them, without = layout(shape=shape), layout()
    assert with_them.device == without.device | {"constants": 12_345}
    more, less = disk_bytes(TINY_JOB, shape), disk_bytes(TINY_JOB, TINY)
    assert more["checkpoint 1"] - less["checkpoint 1"] == 12_345
