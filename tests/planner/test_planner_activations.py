"""What computing takes where the model computes, written out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatrain.machine.hardware import MIB
from megatrain.planner.activations import Activations, head_bytes
from megatrain.planner.cost.shape import CompiledSets, ModelShape, WorkingSet
from megatrain.planner.job import Choices, Job, StepTokens
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
    line,
)

OFFLOADED = replace(ALL_STREAMED, offload_activations=True)
STATE = 10 * 2  # bytes of a token's hidden state
VARIED = replace(TINY_JOB, lengths_vary=True)


def boundaries(choices: Choices, shape: ModelShape = TINY, job: Job = TINY_JOB) -> tuple[int, int]:
    """Bytes of activation checkpoints on the device and in host RAM."""
    found = layout(choices, shape, job)
    return found.device["activation checkpoints"], found.host.get("activation checkpoints", 0)


def test_boundaries_wait_on_the_device_or_in_host_RAM():
    assert boundaries(TWO_GROUPS) == (32 * STATE * 3, 0)
    # what backward carries, and five on their way; of 64 x 2 states
    assert boundaries(OFFLOADED) == (64 * STATE + 5 * 16 * STATE, HUGE)
    # one micro-batch: its boundary is gone before the next one comes
    alone = replace(OFFLOADED, micro_batch_tokens=64)
    assert boundaries(alone) == (64 * STATE + 3 * 64 * STATE, HUGE)


def test_where_graphs_are_retained_a_layer_adds_what_comes_on_top_of_its_own():
    """Those that are recomputed have the device when all graphs are gone. A head that needs more
    has it while they are there."""

    def working_set(choices: Choices, shape: ModelShape) -> int:
        return layout(choices, shape).device["working set"]

    hungry = replace(TINY, layer=WorkingSet(((16, 16_000),)))
    keeping, graph = replace(ALL_STREAMED, retained=2), TINY.retained_bytes(16, 2) // 2
    assert working_set(ALL_STREAMED, hungry) == 16_000
    assert working_set(keeping, hungry) == 16_000 - graph
    head = replace(hungry, head=WorkingSet(((16, 20_000),)))
    assert working_set(keeping, head) == working_set(ALL_STREAMED, head) > 16_000


def test_retained_layers_keep_their_graphs_and_their_inputs():
    retained = replace(TWO_GROUPS, retained=2)
    # of two micro-batches
    graphs = 2 * TINY.retained_bytes(16, 2, compiled=False)
    assert layout(retained).device["retained activations"] == graphs
    assert boundaries(retained) == (32 * STATE * 3, 0)
    one = replace(TWO_GROUPS, retained=1, offload_activations=True)
    assert boundaries(one)[0] == 32 * STATE * 2 + 5 * 16 * STATE


def test_graphs_in_host_RAM_take_their_inputs_along():
    sent = replace(OFFLOADED, retained=1, retained_on_host=1)
    graph = TINY.retained_bytes(16, 2) // 2
    # one layer's stays, five are on their way, as are two checkpoints
    assert boundaries(sent)[0] == 64 * STATE * 2 + 5 * (16 * STATE + graph) + 2 * 16 * STATE
    assert layout(sent).device["retained activations"] == 4 * TINY.retained_bytes(16, 1)
    large = replace(TINY, retained=(line(0), line(HUGE), line(2 * HUGE)))
    assert layout(sent, large).host["retained activations"] == 4 * large.retained_bytes(16, 1)
    assert boundaries(sent, large)[1] == HUGE
    assert "retained activations" not in layout(shape=large).host


@pytest.mark.parametrize(
    ("compiled", "cheap", "kept"),
    [
        (False, False, (False, True, True)),
        (True, False, (True, False, True)),
        (True, True, (True, True, False)),
    ],
)
def test_graphs_that_do_not_hold_their_inputs_leave_them(compiled, cheap, kept):
    sent = replace(OFFLOADED, retained_on_host=1, cheap_retention=cheap)
    job = replace(TINY_JOB, compiled=compiled, tokens_per_step=HUGE)
    held = replace(TINY, retained_cheap=TINY.retained)
    here, on_host = boundaries(sent, held, job)
    # five are on their way
    left = (here - 5 * 16 * STATE, on_host - HUGE * STATE)
    assert boundaries(sent, replace(held, graphs_keep_inputs=kept), job) == left


def test_a_codec_keeps_inputs_of_recomputed_layers_in_fewer_bytes():
    """A hidden state of 10 elements is one group of int8: 64 codes and a scale. One micro-batch is
    whole while it is computed again."""
    coded = replace(TINY_JOB, activations="int8")
    one, both = (replace(ALL_STREAMED, retained=layers) for layers in (1, 2))
    assert layout(job=coded, hardware=H200).device["working set"] == 1600 + 16 * STATE
    assert boundaries(ALL_STREAMED, job=coded)[0] == 64 * (STATE + 2 * 66)
    assert boundaries(one, job=coded)[0] == 64 * (2 * STATE + 66)
    assert layout(both, job=coded).device == layout(both).device
    assert boundaries(OFFLOADED, job=coded)[0] == 64 * STATE + 5 * 16 * 66
    large = replace(coded, tokens_per_step=HUGE)
    assert boundaries(OFFLOADED, job=large)[1] == HUGE * 2 * 66
    # a graph in host RAM holds its input whole
    assert boundaries(replace(OFFLOADED, retained_on_host=1), job=large)[1] == HUGE * (66 + STATE)


@pytest.mark.parametrize(
    ("size", "padded", "computed", "most", "mean"),
    [
        (8, 72, 70.5, 9, 70.5 / 8),
        (16, 72, 70.5, 6, 5.5),
        (20, 80, 77.0, 4, 77 / 20),
        (32, 80, 77.0, 3, 2.5),
    ],
)
def test_padding_is_that_of_the_rows_once_they_are_known(size, padded, computed, most, mean):
    found = StepTokens(16, 72, 70.5, 6, 5.5), StepTokens(32, 80, 77.0, 3, 2.5)
    job = replace(VARIED, step_tokens=found)
    assert job.step(size)[1:] == (padded, computed, most, mean)
    assert boundaries(ALL_STREAMED, job=job)[0] == 72 * STATE * 3
    by_rows = replace(job, rows_per_step=8)
    assert by_rows.pads
    assert not replace(by_rows, step_tokens=()).pads, "eight full rows leave room for everything"


def test_ever_new_shapes_leave_holes_between_them():
    """A tenth of what comes and goes; of saved tensors 0.25 MiB for each that hidden states take,
    and no more than a tenth."""
    keeping = replace(ALL_STREAMED, retained=1)
    for hidden, share in ((10, 0.1), (MIB * 5 // 4, 0.25 / 40)):
        shape = replace(TINY, hidden_size=hidden)
        table, full = (layout(keeping, shape, job, H200).device for job in (VARIED, TINY_JOB))
        passing = table["activation checkpoints"] + table["working set"]
        holes = int(0.1 * passing + share * table["retained activations"])
        assert table["allocator slack"] - full["allocator slack"] == holes


def test_holes_of_a_compiled_layer_are_lost():
    job, same = replace(TINY_JOB, compiled=True), WorkingSet(((1, 100),))
    sets = CompiledSets(same, same, same, same)
    lost = []
    for holes in (0, 3):
        shape = replace(TINY, compiled=replace(sets, holes=WorkingSet(((1, holes),))))
        lost.append(layout(ALL_STREAMED, shape, job, H200).device["allocator slack"])
    assert lost[1] - lost[0] == 3 * ALL_STREAMED.micro_batch_tokens


def test_micro_batches_hold_whole_rows():
    job = replace(TINY_JOB, tokens_per_step=96, seq_len=8)
    for size, count in {8: 12, 15: 12, 16: 6, 20: 6}.items():
        assert job.step(size)[3:] == (count, count)
    choices = replace(ALL_STREAMED, micro_batch_tokens=20, groups=2)
    assert (choices.micro_batches(job), choices.group_tokens(job)) == (3, 48)
    known = replace(job, lengths_vary=True, step_tokens=(StepTokens(20, 96, 90.0, 7, 6.5),))
    assert known.step(20).most_micro_batches == 7


def test_a_second_backward_stores_no_gradient_and_keeps_the_inputs_of_the_head():
    twice = replace(ALL_STREAMED, second_backward=True)
    # two layers' inputs, the head's, and what backward carries
    assert boundaries(twice)[0] == 64 * STATE * 4
    assert layout(replace(twice, resident=4)).device["resident state"] == 10_000 * 12
    shape = replace(TINY, block_numel=(1000, 2_000_000, 3000, 4000))
    host = layout(twice, shape).host
    assert host == layout(twice, shape, replace(TINY_JOB, clipping=False)).host
    assert "grad" not in host
    assert host["gradient staging"] == 6 * HUGE  # 3 x 2,000,000 x 2 bytes: 5.7 huge pages


@pytest.mark.parametrize(
    ("hardware", "precision", "stored"),
    [(H200, "bfloat16", 0), (LAPTOP, "bfloat16", 1), (LAPTOP, "float32", 0)],
)
def test_a_head_whose_products_add_to_the_sums_stores_no_gradient(hardware, precision, stored):
    """CPUs cannot add a bf16 product to an fp32 sum."""
    job, weight = replace(JOB_7B, precision=precision), 4 if precision == "float32" else 2
    gradient = 152_064 * 3584 * weight
    # the chunk's hidden states, the gradient of the chunk before, the micro-batch's
    rows = (4096 + 4096 + 16_384) * 3584 * weight
    needed = QWEN_7B.head.at(4096) + rows - (1 - stored) * gradient
    assert head_bytes(4096, 16_384, job, QWEN_7B, hardware) == needed


def test_the_last_layer_alone_computes_beside_its_own_input():
    """A group's: 64 tokens of 10 numbers in bf16. What leaves, stays, or belongs to a retained
    layer makes no difference."""
    hungry, job = line(100), replace(TINY_JOB, compiled=True)

    def needed(last: WorkingSet, choices: Choices = ALL_STREAMED) -> int:
        shape = replace(TINY, compiled=CompiledSets(hungry, last, hungry, hungry))
        return Activations(choices, job, shape, H200).working_sets["layer, one micro-batch"]

    assert needed(line(50)) == hungry.at(16) - 64 * 10 * 2
    assert needed(hungry) == hungry.at(16)
    assert needed(line(50), OFFLOADED) == hungry.at(16)
    assert needed(line(50), replace(ALL_STREAMED, second_backward=True)) == hungry.at(16)


def test_what_compiled_layers_need_counts_only_in_the_precision_that_was_traced():
    """A bf16 run asks what fp8 would do, whose operands its traces do not know: then the eager
    working set holds."""
    small = line(1)

    def layer(traced: str | None, precision: str) -> int:
        sets = CompiledSets(small, small, small, small, fp8=traced == "fp8") if traced else None
        job = replace(TINY_JOB, compiled=True, precision=precision)
        activations = Activations(ALL_STREAMED, job, replace(TINY, compiled=sets), LAPTOP)
        return activations.working_sets["layer, one micro-batch"]

    eager = layer(None, "bfloat16")
    assert layer("bfloat16", "fp8") == layer("fp8", "bfloat16") == eager
    assert layer("bfloat16", "bfloat16") == layer("fp8", "fp8") < eager
