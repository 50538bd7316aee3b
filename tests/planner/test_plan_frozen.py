"""Plans of models with frozen tensors: bytes of every tier, seconds, and what is said of them."""

from __future__ import annotations

import io
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from rich.console import Console

from megatrain.engine.engine import Engine
from megatrain.machine.profile import typical
from megatrain.memory.sizes import PAGE
from megatrain.models.skeleton import Skeleton
from megatrain.planner.cost.dry_run import shape_of
from megatrain.planner.cost.shape import FrozenParts, ModelShape
from megatrain.planner.job import Job
from megatrain.planner.memory import disk_bytes
from megatrain.planner.plan import render
from megatrain.planner.planning import make_plan
from megatrain.planner.timing import StepCosts
from megatrain.schedule import block_order, graphs_of_layers, layers_back
from megatrain.settings import Settings
from tests.helpers.planned import ALL_STREAMED, H200, JOB_7B, QWEN_7B, TINY, TINY_JOB, layout
from tests.helpers.support import tiny_config

# of TINY's four blocks the embedding, the first layer and half of the second do not train
HALF = replace(
    TINY,
    parameters=5500,
    frozen=FrozenParts(
        parameters=4500,
        saved_bytes=9000,
        trained_numel=(0, 0, 1500, 4000),
        first_trained=2,
        counted_parameters=7000,
        idle_parameters=0,
        edges=(False, True),
    ),
)


def test_arrays_hold_what_is_trained_and_weights_all():
    table = layout(shape=HALF).host
    assert table["weight"] == table["exp_avg"] == 2**21  # a huge page at least
    far = replace(ALL_STREAMED, nvme_blocks=4)
    assert layout(far, HALF).nvme == {
        "remainder": 5500 * 2,
        "exp_avg": 5500 * 4,
        "exp_avg_sq": 5500 * 4,
    }
    device = layout(shape=HALF).device
    assert device["layer slots"] == 2 * 3000 * 2
    assert device["gradient sums"] == 4000 * 4
    assert device["gradient staging"] == 4000 * 2
    resident = replace(ALL_STREAMED, resident=3)
    assert layout(resident, HALF).device["resident state"] == 6000 * 2 + 1500 * (2 + 8 + 2)
    # one layer's input, and the head's
    assert device["activation checkpoints"] == 64 * 10 * 2 * 2


def test_checkpoints_hold_what_is_trained_and_the_rest_once():
    job = replace(TINY_JOB, checkpoints_kept=2, keeps_best=False)
    disk = disk_bytes(job, HALF)
    assert [disk[f"checkpoint {n}"] for n in (1, 2, 3)] == [5500 * 12] * 3
    assert disk["frozen weights"] == 9000
    drawn = disk_bytes(replace(job, draws_weights=True, precision="float32"), HALF)
    assert drawn["frozen weights"] == 4500 * 4
    assert "frozen weights" not in disk_bytes(job, TINY)


@pytest.mark.parametrize("first", range(6))
def test_the_order_of_blocks_and_kept_activations_end_where_training_begins(first):
    back = layers_back(4, first)
    assert block_order(6, first) == (*range(6), *reversed(range(first, 5)))
    assert back == min(4, 5 - first)
    for retained, on_host in ((0, 0), (2, 0), (1, 2), (9, 9)):
        where = graphs_of_layers(4, retained, on_host, first)
        assert where[: 4 - back] == ("unneeded",) * (4 - back)
        assert where.count("device") == min(retained, back)
        assert where.count("host") == min(on_host, back - min(retained, back))


def freeze_first(shape: ModelShape, blocks: int) -> ModelShape:
    """The shape with its first blocks frozen."""
    sizes = shape.block_numel
    trained = (*[0] * blocks, *sizes[blocks:])
    of_frozen = sum(sizes[:blocks])
    frozen = FrozenParts(of_frozen, 2 * of_frozen, trained, blocks, sum(trained), 0, (False, True))
    return replace(shape, parameters=sum(trained), frozen=frozen)


@pytest.mark.parametrize("groups", [1, 2])
def test_steps_are_shorter_the_more_is_frozen(groups):
    choices = replace(ALL_STREAMED, micro_batch_tokens=16_384, head_chunk_tokens=1024)
    choices = replace(choices, update_threads=14, groups=groups)
    machine, seconds = typical(H200), []
    for blocks in (0, 1, 8, 15, 29):
        shape = freeze_first(QWEN_7B, blocks) if blocks else QWEN_7B
        costs = StepCosts(layout(choices, shape, JOB_7B, H200), machine)
        seconds.append(costs.predict().seconds)
        assert costs.at_least <= seconds[-1] * (1 + 1e-9)
    assert all(more < less for less, more in pairwise(seconds))
    # forward alone of all layers: less than a third of four times that and the head
    assert seconds[-1] < 0.4 * seconds[0]


def test_a_plan_of_a_frozen_model_says_so_in_a_line():
    plan = make_plan(JOB_7B, freeze_first(QWEN_7B, 15), H200, typical(H200))
    console = Console(file=io.StringIO(), width=200)
    render(plan, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    count = sum(QWEN_7B.block_numel[:15])
    each = sum(size for _, size in plan.job.state_bytes) + 2
    assert plan.frozen_saves >= count * each
    assert f"frozen: {count:,} of {count + plan.parameters:,} parameters, which saves" in text
    assert "and backward visits the last 14 layers" in text


def job_of(skeleton: Skeleton) -> Job:
    return replace(TINY_JOB, precision="float32", seq_len=16, tokens_per_step=64)


@pytest.mark.slow
@pytest.mark.parametrize(
    "patterns",
    [("*.mlp.*",), ("*embed*", "*.layers.0.*"), ("*.layers.1.*",), ("lm_head*",)],
    ids=" ".join,
)
def test_backward_multiplies_for_what_is_trained(patterns):
    def found(*frozen: str) -> ModelShape:
        skeleton = Skeleton(tiny_config("llama"), dtype=torch.float32)
        skeleton.freeze(frozen)
        return shape_of(skeleton, 16, [16])

    whole, frozen = found(), found(*patterns)
    skeleton = Skeleton(tiny_config("llama"), dtype=torch.float32)
    skeleton.freeze(patterns)
    for index, (one, other) in enumerate(zip(whole.cost.layers, frozen.cost.layers, strict=True)):
        tensors = skeleton.anatomy.blocks[index + 1].layout.tensors
        left_out = sum(2 * t.numel for t in tensors if t.frozen and len(t.shape) == 2)
        assert other.forward == one.forward
        assert other.backward.matmul_flops == one.backward.matmul_flops - left_out
        assert (other.backward.eager.kernels < one.backward.eager.kernels) == bool(left_out)
    assert frozen.parameters + skeleton.anatomy.frozen_parameters == whole.parameters
    assert frozen.trained_numel == tuple(b.layout.trainable for b in skeleton.anatomy.blocks)


def test_on_nvme_the_store_has_the_bytes_of_the_plan(tmp_path):
    patterns, options = ("*embed*", "*.layers.0.*", "*.layers.1.*proj*"), dict[str, Any]()
    skeleton = Skeleton(tiny_config("llama"), dtype=torch.float32)
    skeleton.freeze(patterns)
    shape = shape_of(skeleton, 16, [16])
    choices = replace(ALL_STREAMED, nvme_blocks=5)
    planned = layout(choices, shape, replace(job_of(skeleton), nvme_drives=1))
    settings = Settings(nvme_blocks=5, nvme_folders=(tmp_path,))
    with Engine.from_config(
        tiny_config("llama"), settings=settings, freeze=patterns, precision="float32",
        device="cpu", **options,
    ) as engine:  # fmt: skip
        assert engine.store.nvme is not None
        places = engine.store.nvme._places
        for name in ("exp_avg", "exp_avg_sq"):
            held = [nbytes for (array, _), (_, nbytes) in places.items() if array == name]
            assert 0 <= sum(held) - planned.nvme[name] < PAGE * len(held) + 1
