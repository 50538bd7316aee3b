"""What computing takes where the model computes, written out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatrain.machine.hardware import (
    MIB,
    Hardware,
)
from megatrain.planner.activations import Activations, head_bytes
from megatrain.planner.cost.shape import CompiledSets, ModelShape, WorkingSet
from megatrain.planner.job import Choices, Job, StepTokens
from megatrain.planner.memory import Layout
from tests.planned import (
    ALL_STREAMED,
    H200,
    HUGE,
    JOB_7B,
    LAPTOP,
    QWEN_7B,
    TINY,
    TINY_JOB,
    TWO_GROUPS,
    line,
)


def device(choices: Choices, shape: ModelShape = TINY, job: Job = TINY_JOB) -> dict[str, int]:
    return Layout.of(choices, job, shape, LAPTOP).device


def test_boundaries_wait_on_the_device_or_in_host_RAM() -> None:
    assert device(TWO_GROUPS)["boundary activations"] == 32 * 10 * 2 * 3
    offloaded = replace(ALL_STREAMED, offload_activations=True)
    assert (
        device(offloaded)["boundary activations"] == 64 * 10 * 2 + 5 * 16 * 10 * 2
    )  # what backward carries, and five on their way
    alone = replace(
        offloaded, micro_batch_tokens=64
    )  # one micro-batch: its boundary is gone before the next one comes
    assert device(alone)["boundary activations"] == 64 * 10 * 2 + 3 * 64 * 10 * 2
    assert (
        Layout.of(offloaded, TINY_JOB, TINY, LAPTOP).host["boundary activations"] == HUGE
    )  # of 64 x 10 x 2 x 2 bytes
    assert "boundary activations" not in Layout.of(ALL_STREAMED, TINY_JOB, TINY, LAPTOP).host


def test_where_graphs_are_retained_a_layer_adds_what_comes_on_top_of_its_own() -> None:
    """Those that are recomputed have the device when all graphs are gone. A head that needs more has it while they are there."""
    hungry, keeping, graph = (
        replace(TINY, layer=WorkingSet(((16, 16_000),))),
        replace(ALL_STREAMED, retained=2),
        TINY.retained_bytes(16, 2) // 2,
    )
    assert device(ALL_STREAMED, hungry)["working set"] == 16_000
    assert device(keeping, hungry)["working set"] == 16_000 - graph
    head = replace(hungry, head=WorkingSet(((16, 20_000),)))
    assert (
        device(keeping, head)["working set"] == device(ALL_STREAMED, head)["working set"] > 16_000
    )


def test_retained_layers_keep_their_graphs_and_their_inputs() -> None:
    table = device(replace(TWO_GROUPS, retained=2))
    assert table["retained activations"] == 2 * TINY.retained_bytes(
        16, 2, compiled=False
    )  # of two micro-batches
    assert table["boundary activations"] == 32 * 10 * 2 * 3
    one = device(replace(TWO_GROUPS, retained=1, offload_activations=True))["boundary activations"]
    assert one == 32 * 10 * 2 * 2 + 5 * 16 * 10 * 2


def test_graphs_in_a_cpu_s_memory_leave_holes_between_them() -> None:
    """In malloc's heap, where the tensors of small micro-batches are; those of large ones are mapped."""
    keeping = replace(ALL_STREAMED, retained=2)
    graphs = device(keeping)["retained activations"]
    for hidden, share in ((10, 0.2), (HUGE, 0.05)):
        table = Layout.of(keeping, TINY_JOB, replace(TINY, hidden_size=hidden), LAPTOP).device
        assert table["allocator slack"] == int(share * graphs)
    assert "allocator slack" not in Layout.of(ALL_STREAMED, TINY_JOB, TINY, LAPTOP).device


def test_graphs_in_host_RAM_take_their_inputs_along() -> None:
    sent = replace(ALL_STREAMED, offload_activations=True, retained=1, retained_on_host=1)
    graph = TINY.retained_bytes(16, 2) // 2
    assert device(sent)["boundary activations"] == 64 * 10 * 2 * 2 + 5 * (
        16 * 10 * 2 + graph
    )  # one layer's stays, five are on their way
    assert device(sent)["retained activations"] == 4 * TINY.retained_bytes(16, 1)
    large = replace(TINY, retained=(line(0), line(HUGE), line(2 * HUGE)))
    host = Layout.of(sent, TINY_JOB, large, LAPTOP).host
    assert host["retained activations"] == 4 * large.retained_bytes(16, 1)
    assert host["boundary activations"] == HUGE
    assert "retained activations" not in Layout.of(ALL_STREAMED, TINY_JOB, large, LAPTOP).host


@pytest.mark.parametrize(
    ("compiled", "cheap", "kept"),
    [
        (False, False, (False, True, True)),
        (True, False, (True, False, True)),
        (True, True, (True, True, False)),
    ],
)
def test_graphs_that_do_not_hold_their_inputs_leave_them(
    compiled: bool, cheap: bool, kept: tuple[bool, bool, bool]
) -> None:
    sent = replace(
        ALL_STREAMED, offload_activations=True, retained_on_host=1, cheap_retention=cheap
    )
    job = replace(TINY_JOB, compiled=compiled, tokens_per_step=HUGE)
    held = replace(TINY, retained_cheap=TINY.retained)
    left = replace(held, graphs_keep_inputs=kept)

    def boundaries(shape: ModelShape) -> tuple[int, int]:
        layout = Layout.of(sent, job, shape, LAPTOP)
        return layout.host["boundary activations"], layout.device["boundary activations"]

    on_host, here = (
        with_them - without
        for with_them, without in zip(boundaries(held), boundaries(left), strict=True)
    )
    assert on_host == HUGE * 10 * 2
    assert here == 5 * 16 * 10 * 2  # on their way


def test_a_codec_keeps_inputs_of_recomputed_layers_in_fewer_bytes() -> None:
    """A hidden state of 10 elements is one group of int8: 64 codes and a scale. One micro-batch is whole while it is computed again."""
    coded = replace(TINY_JOB, activations="int8")
    assert device(ALL_STREAMED, job=coded)["boundary activations"] == 64 * (10 * 2 + 2 * 66)
    assert Layout.of(ALL_STREAMED, coded, TINY, H200).device["working set"] == 1600 + 16 * 10 * 2
    assert device(replace(ALL_STREAMED, retained=1), job=coded)["boundary activations"] == 64 * (
        2 * 10 * 2 + 66
    )
    assert device(replace(ALL_STREAMED, retained=2), job=coded) == device(
        replace(ALL_STREAMED, retained=2)
    )
    offloaded = replace(ALL_STREAMED, offload_activations=True)
    assert device(offloaded, job=coded)["boundary activations"] == 64 * 10 * 2 + 5 * 16 * 66
    large = replace(coded, tokens_per_step=HUGE)
    assert Layout.of(offloaded, large, TINY, LAPTOP).host["boundary activations"] == HUGE * 2 * 66
    sent = replace(offloaded, retained_on_host=1)
    assert Layout.of(sent, large, TINY, LAPTOP).host["boundary activations"] == HUGE * (
        66 + 10 * 2
    )  # its graph holds its input whole


def test_padding_is_that_of_the_rows_once_they_are_known() -> None:
    job = replace(
        TINY_JOB,
        lengths_vary=True,
        step_tokens=(StepTokens(16, 72, 70.5, 6, 5.5), StepTokens(32, 80, 77.0, 3, 2.5)),
    )
    found = {
        size: (job.padded_tokens(size), job.computed_tokens(size)) for size in (8, 16, 20, 32, 64)
    }
    assert found == {8: (72, 70.5), 16: (72, 70.5), 20: (80, 77.0), 32: (80, 77.0), 64: (80, 77.0)}
    parts = {
        size: (job.most_micro_batches(size), job.mean_micro_batches(size))
        for size in (8, 16, 20, 32)
    }
    assert parts == {8: (9, 70.5 / 8), 16: (6, 5.5), 20: (4, 77 / 20), 32: (3, 2.5)}
    assert device(ALL_STREAMED, job=job)["boundary activations"] == 72 * 10 * 2 * 3
    by_rows = replace(job, rows_per_step=8)
    assert by_rows.pads and not replace(by_rows, step_tokens=()).pads, (
        "so many full rows leave room for everything"
    )


def test_ever_new_shapes_leave_holes_between_them() -> None:
    """Of what comes and goes a tenth, of graphs a quarter of a mebibyte for each that hidden states take, and no more than a tenth."""
    keeping, varied = replace(ALL_STREAMED, retained=1), replace(TINY_JOB, lengths_vary=True)
    for hidden, share in ((10, 0.1), (MIB * 5 // 4, 0.25 / 40)):
        shape = replace(TINY, hidden_size=hidden)
        table = Layout.of(keeping, varied, shape, H200).device
        passing, full = (
            table["boundary activations"] + table["working set"],
            Layout.of(keeping, TINY_JOB, shape, H200).device,
        )
        assert table["allocator slack"] - full["allocator slack"] == int(
            0.1 * passing + share * table["retained activations"]
        )


def test_micro_batches_hold_whole_rows() -> None:
    job = replace(TINY_JOB, tokens_per_step=96, seq_len=8)
    assert [
        (job.most_micro_batches(size), job.mean_micro_batches(size)) for size in (8, 15, 16, 20)
    ] == [
        (12, 12),
        (12, 12),
        (6, 6),
        (6, 6),
    ]
    choices = replace(ALL_STREAMED, micro_batch_tokens=20, groups=2)
    assert (choices.micro_batches(job), choices.group_tokens(job)) == (3, 48)
    assert (
        replace(
            job, lengths_vary=True, step_tokens=(StepTokens(20, 96, 90.0, 7, 6.5),)
        ).most_micro_batches(20)
        == 7
    )


def test_so_many_rows_have_the_tokens_that_are_computed_at_most() -> None:
    short = replace(
        TINY_JOB,
        lengths_vary=True,
        rows_per_step=8,
        step_tokens=(StepTokens(16, 30, 28.0, 3, 2.5),),
    )
    assert (short.tokens_per_step, short.trained_tokens(16)) == (64, 28.0)
    assert replace(short, step_tokens=()).trained_tokens(16) == TINY_JOB.trained_tokens(16) == 64


def test_padding_is_part_of_the_boundaries() -> None:
    assert (
        device(ALL_STREAMED, job=replace(TINY_JOB, lengths_vary=True))["boundary activations"]
        == 88 * 10 * 2 * 3
    )  # 64 tokens and their padding


def test_a_second_backward_stores_no_gradient_and_keeps_the_inputs_of_the_head() -> None:
    twice = replace(ALL_STREAMED, second_backward=True)
    assert (
        device(twice)["boundary activations"] == 64 * 10 * 2 * 4
    )  # two layers' inputs, the head's, and what backward carries
    assert device(replace(twice, resident=4))["resident state"] == 10_000 * 12
    shape = replace(TINY, block_numel=(1000, 2_000_000, 3000, 4000))
    host = Layout.of(twice, TINY_JOB, shape, LAPTOP).host
    assert host == Layout.of(twice, replace(TINY_JOB, clipping=False), shape, LAPTOP).host
    assert "grad" not in host
    assert host["gradient staging"] == 6 * HUGE  # 3 x 2,000,000 x 2 bytes: 5.7 huge pages


@pytest.mark.parametrize(
    ("hardware", "precision", "stored"),
    [
        (H200, "bfloat16", 0),
        (LAPTOP, "bfloat16", 1),
        (LAPTOP, "float32", 0),
    ],  # CPUs cannot add a bf16 product to an fp32 sum
)
def test_a_head_whose_products_add_to_the_sums_stores_no_gradient(
    hardware: Hardware, precision: str, stored: int
) -> None:
    job, weight = replace(JOB_7B, precision=precision), 4 if precision == "float32" else 2
    gradient = 152_064 * 3584 * weight
    rows = (
        (4096 + 4096 + 16_384) * 3584 * weight
    )  # the chunk's hidden states, the gradient of the chunk before, the micro-batch's
    assert (
        head_bytes(4096, 16_384, job, QWEN_7B, hardware)
        == QWEN_7B.head.at(4096) + rows - (1 - stored) * gradient
    )


def test_the_last_layer_alone_computes_beside_its_own_input() -> None:
    """A group's: 64 tokens of 10 numbers in bf16. What leaves, stays, or belongs to a retained layer makes no difference."""
    hungry, job = line(100), replace(TINY_JOB, compiled=True)

    def needed(last: WorkingSet, choices: Choices = ALL_STREAMED) -> int:
        shape = replace(TINY, compiled=CompiledSets(hungry, last, hungry, hungry))
        return Activations(choices, job, shape, H200).working_sets["layer, one micro-batch"]

    assert needed(line(50)) == hungry.at(16) - 64 * 10 * 2
    assert needed(hungry) == hungry.at(16)
    assert needed(line(50), replace(ALL_STREAMED, offload_activations=True)) == hungry.at(16)
    assert needed(line(50), replace(ALL_STREAMED, second_backward=True)) == hungry.at(16)


def test_what_compiled_layers_need_counts_only_in_the_precision_that_was_traced() -> None:
    """A bf16 run asks what fp8 would do, whose operands its traces do not know: then the eager working set holds."""
    small = line(1)
    in_bf16, in_fp8 = (
        replace(TINY, compiled=CompiledSets(small, small, small, small, fp8=fp8))
        for fp8 in (False, True)
    )
    bf16, fp8 = (
        replace(TINY_JOB, compiled=True, precision=precision) for precision in ("bfloat16", "fp8")
    )

    def layers(shape: ModelShape, job: Job) -> int:
        return Activations(ALL_STREAMED, job, shape, LAPTOP).working_sets["layer, one micro-batch"]

    eager = layers(TINY, bf16)
    assert layers(in_bf16, fp8) == layers(in_fp8, bf16) == eager
    assert layers(in_bf16, bf16) == layers(in_fp8, fp8) < eager
