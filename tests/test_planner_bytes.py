"""The planner's tables of bytes, written out by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from megatrain.hardware import COMPILER_BYTES, CUDA_CONTEXT_BYTES, CUDA_LIBRARY_BYTES, CUDNN_LIBRARY_BYTES, GIB, MIB, Hardware
from megatrain.models.shape import CompiledSets, ModelShape, WorkingSet
from megatrain.planner_bytes import HEAD_COPIES, NOT_ALLOCATED, block_bytes, device_bytes, disk_bytes, head_bytes, host_bytes, working_sets
from megatrain.planner_job import Choices, Job, StepTokens, WholeUpdate
from megatrain.run_folder import SMALL_FILES_BYTES
from tests.planned import H200, JOB_7B, LAPTOP, QWEN_7B, TINY, TINY_JOB, line, with_depth, with_gpu

HUGE = 2**21
ALL_STREAMED = Choices(
    micro_batch_tokens=16,
    groups=1,
    resident=0,
    sums_on_device=0,
    retained=0,
    cheap_retention=False,
    offload=False,
    head_chunk_tokens=16,
    update_threads=2,
)
TWO_GROUPS = replace(ALL_STREAMED, groups=2)
TIED = replace(TINY, block_numel=(4000, 2000, 3000, 10), tied=True)


def device(choices: Choices, shape: ModelShape = TINY, job: Job = TINY_JOB) -> dict[str, int]:
    return device_bytes(choices, job, shape, LAPTOP)


def test_device_arrays_of_a_small_model() -> None:
    assert device_bytes(ALL_STREAMED, TINY_JOB, TINY, with_gpu(H200, GIB * 2)) == {
        "layer slots": 2 * 3000 * 2,
        "embedding and head slot": 4000 * 2,
        "resident state": 0,
        "gradient sums": 4000 * 4,
        "gradient staging": 2 * 4000 * 2,
        "boundary activations": 64 * 10 * 2 * 3,  # tokens x hidden x bf16 x (two layers' inputs and the head's)
        "retained activations": 0,
        "token ids and targets": 64 * 24,
        "rotary tables and masks": 4 * 128,  # four micro-batches of 16 tokens
        "working set": 1600,  # of a layer
        "cuBLAS workspaces": 32 * MIB,
        "allocator slack": 32 * MIB + int(0.05 * 1600),
        "CUDA context": GIB,
    }


@pytest.mark.parametrize("hardware", [H200, LAPTOP])
@pytest.mark.parametrize(
    "job", [TINY_JOB, replace(TINY_JOB, lengths_vary=True, whole_update=WholeUpdate((), (0.0, 1.0, 1.0, 0.0), 0.0, 0.0, 5, 7))]
)
def test_where_blocks_and_sums_live_decides_what_the_search_says_it_does(job: Job, hardware: Hardware) -> None:
    """It tries many such places, and adds up only these rows."""
    places = [replace(TWO_GROUPS, resident=resident, sums_on_device=sums) for resident in range(5) for sums in range(resident, 5)]
    totals = [sum(device_bytes(choices, job, TINY, hardware).values()) for choices in places]
    decided = [sum(block_bytes(choices, job, TINY, hardware).values()) for choices in places]
    assert len(set(decided)) > 5
    assert len({total - part for total, part in zip(totals, decided, strict=True)}) == 1


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
def test_resident_blocks_need_no_slots(resident: int, slots: int, edge: int, state: int) -> None:
    table = device(replace(ALL_STREAMED, resident=resident))
    assert table["layer slots"] == slots * 2
    assert table["embedding and head slot"] == edge * 2
    assert table["resident state"] == state * (2 + 2 + 8 + 2)  # weight, remainder, moments, and the gradient until the norm is known


def test_resident_state_keeps_no_gradient_where_nothing_waits_for_the_norm_or_sums_hold_it() -> None:
    choices = replace(ALL_STREAMED, resident=4)
    assert device(choices, job=replace(TINY_JOB, clipping=False))["resident state"] == 10_000 * 12
    assert device(replace(choices, groups=2, sums_on_device=4))["resident state"] == 10_000 * 12
    assert device(choices, job=replace(TINY_JOB, precision="float32"))["resident state"] == 10_000 * 16


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
def test_gradient_sums(choices: Choices, shape: ModelShape, elements: int) -> None:
    assert device(choices, shape)["gradient sums"] == elements * 4


def test_a_tied_embedding_stays_for_the_head() -> None:
    assert device(ALL_STREAMED, TIED)["embedding and head slot"] == (4000 + 10) * 2
    assert device(replace(ALL_STREAMED, resident=1), TIED)["embedding and head slot"] == 10 * 2


def test_boundaries_wait_on_the_device_or_in_host_RAM() -> None:
    assert device(TWO_GROUPS)["boundary activations"] == 32 * 10 * 2 * 3
    offloaded = replace(ALL_STREAMED, offload=True)
    assert device(offloaded)["boundary activations"] == 64 * 10 * 2 + 5 * 16 * 10 * 2  # what backward carries, and five on their way
    alone = replace(offloaded, micro_batch_tokens=64)  # one micro-batch: its boundary is gone before the next one comes
    assert device(alone)["boundary activations"] == 64 * 10 * 2 + 3 * 64 * 10 * 2
    assert host_bytes(offloaded, TINY_JOB, TINY, LAPTOP)["boundary activations"] == HUGE  # of 64 x 10 x 2 x 2 bytes
    assert "boundary activations" not in host_bytes(ALL_STREAMED, TINY_JOB, TINY, LAPTOP)


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
    assert device(keeping, head)["working set"] == device(ALL_STREAMED, head)["working set"] > 16_000


def test_retained_layers_keep_their_graphs_and_their_inputs() -> None:
    table = device(replace(TWO_GROUPS, retained=2))
    assert table["retained activations"] == 2 * TINY.retained_bytes(16, 2, compiled=False)  # of two micro-batches
    assert table["boundary activations"] == 32 * 10 * 2 * 3
    one = device(replace(TWO_GROUPS, retained=1, offload=True))["boundary activations"]
    assert one == 32 * 10 * 2 * 2 + 5 * 16 * 10 * 2


def test_graphs_in_a_cpu_s_memory_leave_holes_between_them() -> None:
    """In malloc's heap, where the tensors of small micro-batches are; those of large ones are mapped."""
    keeping = replace(ALL_STREAMED, retained=2)
    graphs = device(keeping)["retained activations"]
    for hidden, share in ((10, 0.2), (HUGE, 0.05)):
        table = device_bytes(keeping, TINY_JOB, replace(TINY, hidden_size=hidden), LAPTOP)
        assert table["allocator slack"] == int(share * graphs)
    assert "allocator slack" not in device_bytes(ALL_STREAMED, TINY_JOB, TINY, LAPTOP)


def test_graphs_in_host_RAM_take_their_inputs_along() -> None:
    sent = replace(ALL_STREAMED, offload=True, retained=1, retained_on_host=1)
    graph = TINY.retained_bytes(16, 2) // 2
    assert device(sent)["boundary activations"] == 64 * 10 * 2 * 2 + 5 * (16 * 10 * 2 + graph)  # one layer's stays, five are on their way
    assert device(sent)["retained activations"] == 4 * TINY.retained_bytes(16, 1)
    large = replace(TINY, retained=(line(0), line(HUGE), line(2 * HUGE)))
    host = host_bytes(sent, TINY_JOB, large, LAPTOP)
    assert host["retained activations"] == 4 * large.retained_bytes(16, 1)
    assert host["boundary activations"] == HUGE
    assert "retained activations" not in host_bytes(ALL_STREAMED, TINY_JOB, large, LAPTOP)


@pytest.mark.parametrize(
    ("compiled", "cheap", "kept"),
    [(False, False, (False, True, True)), (True, False, (True, False, True)), (True, True, (True, True, False))],
)
def test_graphs_that_do_not_hold_their_inputs_leave_them(compiled: bool, cheap: bool, kept: tuple[bool, bool, bool]) -> None:
    sent = replace(ALL_STREAMED, offload=True, retained_on_host=1, cheap_retention=cheap)
    job = replace(TINY_JOB, compiled=compiled, tokens_per_step=HUGE)
    held = replace(TINY, retained_cheap=TINY.retained)
    left = replace(held, graphs_keep_inputs=kept)

    def boundaries(table: Callable[..., dict[str, int]], shape: ModelShape) -> int:
        return table(sent, job, shape, LAPTOP)["boundary activations"]

    assert boundaries(host_bytes, held) - boundaries(host_bytes, left) == HUGE * 10 * 2
    assert boundaries(device_bytes, held) - boundaries(device_bytes, left) == 5 * 16 * 10 * 2  # on their way


def test_a_codec_keeps_inputs_of_recomputed_layers_in_fewer_bytes() -> None:
    """A hidden state of 10 elements is one group of int8: 64 codes and a scale. One micro-batch is whole while it is computed again."""
    coded = replace(TINY_JOB, activations="int8")
    assert device(ALL_STREAMED, job=coded)["boundary activations"] == 64 * (10 * 2 + 2 * 66)
    assert device_bytes(ALL_STREAMED, coded, TINY, H200)["working set"] == 1600 + 16 * 10 * 2
    assert device(replace(ALL_STREAMED, retained=1), job=coded)["boundary activations"] == 64 * (2 * 10 * 2 + 66)
    assert device(replace(ALL_STREAMED, retained=2), job=coded) == device(replace(ALL_STREAMED, retained=2))
    offloaded = replace(ALL_STREAMED, offload=True)
    assert device(offloaded, job=coded)["boundary activations"] == 64 * 10 * 2 + 5 * 16 * 66
    large = replace(coded, tokens_per_step=HUGE)
    assert host_bytes(offloaded, large, TINY, LAPTOP)["boundary activations"] == HUGE * 2 * 66
    sent = replace(offloaded, retained_on_host=1)
    assert host_bytes(sent, large, TINY, LAPTOP)["boundary activations"] == HUGE * (66 + 10 * 2)  # its graph holds its input whole


def test_padding_is_that_of_the_rows_once_they_are_known() -> None:
    job = replace(TINY_JOB, lengths_vary=True, step_tokens=(StepTokens(16, 72, 70.5, 6, 5.5), StepTokens(32, 80, 77.0, 3, 2.5)))
    found = {size: (job.padded_tokens(size), job.computed_tokens(size)) for size in (8, 16, 20, 32, 64)}
    assert found == {8: (72, 70.5), 16: (72, 70.5), 20: (80, 77.0), 32: (80, 77.0), 64: (80, 77.0)}
    parts = {size: (job.most_micro_batches(size), job.mean_micro_batches(size)) for size in (8, 16, 20, 32)}
    assert parts == {8: (9, 70.5 / 8), 16: (6, 5.5), 20: (4, 77 / 20), 32: (3, 2.5)}
    assert device(ALL_STREAMED, job=job)["boundary activations"] == 72 * 10 * 2 * 3
    by_rows = replace(job, rows_per_step=8)
    assert by_rows.pads and not replace(by_rows, step_tokens=()).pads, "so many full rows leave room for everything"


def test_ever_new_shapes_leave_holes_between_them() -> None:
    """Of what comes and goes a tenth, of graphs a quarter of a mebibyte for each that hidden states take, and no more than a tenth."""
    keeping, varied = replace(ALL_STREAMED, retained=1), replace(TINY_JOB, lengths_vary=True)
    for hidden, share in ((10, 0.1), (MIB * 5 // 4, 0.25 / 40)):
        shape = replace(TINY, hidden_size=hidden)
        table = device_bytes(keeping, varied, shape, H200)
        passing, full = table["boundary activations"] + table["working set"], device_bytes(keeping, TINY_JOB, shape, H200)
        assert table["allocator slack"] - full["allocator slack"] == int(0.1 * passing + share * table["retained activations"])


def test_the_host_keeps_records_of_the_gpu_s_memory() -> None:
    """0.4 MiB a GiB."""
    for choices in (ALL_STREAMED, replace(ALL_STREAMED, retained=2)):
        used = sum(device_bytes(choices, TINY_JOB, TINY, H200).values())
        libraries = host_bytes(choices, TINY_JOB, TINY, H200)["libraries at work"]
        assert libraries == H200.library_bytes + int(0.4 / 1024 * used)


def test_micro_batches_hold_whole_rows() -> None:
    job = replace(TINY_JOB, tokens_per_step=96, seq_len=8)
    assert [(job.most_micro_batches(size), job.mean_micro_batches(size)) for size in (8, 15, 16, 20)] == [
        (12, 12),
        (12, 12),
        (6, 6),
        (6, 6),
    ]
    choices = replace(ALL_STREAMED, micro_batch_tokens=20, groups=2)
    assert (choices.micro_batches(job), choices.group_tokens(job), choices.largest_group(job)) == (3, 48, (16, 16, 16))
    assert replace(job, lengths_vary=True, step_tokens=(StepTokens(20, 96, 90.0, 7, 6.5),)).most_micro_batches(20) == 7


def test_so_many_rows_have_the_tokens_that_are_computed_at_most() -> None:
    short = replace(TINY_JOB, lengths_vary=True, rows_per_step=8, step_tokens=(StepTokens(16, 30, 28.0, 3, 2.5),))
    assert (short.tokens_per_step, short.trained_tokens(16)) == (64, 28.0)
    assert replace(short, step_tokens=()).trained_tokens(16) == TINY_JOB.trained_tokens(16) == 64


def test_padding_is_part_of_the_boundaries() -> None:
    assert (
        device(ALL_STREAMED, job=replace(TINY_JOB, lengths_vary=True))["boundary activations"] == 88 * 10 * 2 * 3
    )  # 64 tokens and their padding


def test_a_second_backward_stores_no_gradient_and_keeps_the_inputs_of_the_head() -> None:
    twice = replace(ALL_STREAMED, second_backward=True)
    assert device(twice)["boundary activations"] == 64 * 10 * 2 * 4  # two layers' inputs, the head's, and what backward carries
    assert device(replace(twice, resident=4))["resident state"] == 10_000 * 12
    shape = replace(TINY, block_numel=(1000, 2_000_000, 3000, 4000))
    host = host_bytes(twice, TINY_JOB, shape, LAPTOP)
    assert host == host_bytes(twice, replace(TINY_JOB, clipping=False), shape, LAPTOP)
    assert "grad" not in host
    assert host["gradient staging"] == 6 * HUGE  # 3 x 2,000,000 x 2 bytes: 5.7 huge pages


def test_host_arrays_are_of_streamed_blocks() -> None:
    shape = replace(TINY, block_numel=(1000, 2_000_000, 3000, 4000))
    assert host_bytes(ALL_STREAMED, TINY_JOB, shape, LAPTOP) == {
        "weight": 2 * HUGE,  # 2 x 2,008,000 bytes: 1.9 huge pages
        "remainder": 2 * HUGE,
        "exp_avg": 4 * HUGE,
        "exp_avg_sq": 4 * HUGE,
        "grad": 2 * HUGE,
        "the process so far": 70,
        "libraries at work": 30,
        HEAD_COPIES: 4600,  # of 100 x 10 weights
    }
    rest = host_bytes(replace(ALL_STREAMED, resident=2), TINY_JOB, shape, LAPTOP)
    assert rest["weight"] == rest["exp_avg"] == HUGE  # 7,000 elements
    everything = host_bytes(replace(ALL_STREAMED, resident=4), TINY_JOB, shape, LAPTOP)
    assert everything == {"the process so far": 70, "libraries at work": 30, HEAD_COPIES: 4600}


def test_sums_that_travel_wait_in_host_RAM() -> None:
    shape = replace(TINY, block_numel=(1000, 2_000_000, 3000, 4000))
    assert host_bytes(TWO_GROUPS, TINY_JOB, shape, LAPTOP)["gradient sums"] == 4 * HUGE
    assert host_bytes(replace(TWO_GROUPS, sums_on_device=2), TINY_JOB, shape, LAPTOP)["gradient sums"] == HUGE
    assert "gradient sums" not in host_bytes(replace(TWO_GROUPS, sums_on_device=4), TINY_JOB, shape, LAPTOP)


@pytest.mark.parametrize(("kept", "best", "written", "copies"), [(2, True, None, 4), (2, False, None, 3), (2, True, 1, 1)])
def test_checkpoints(kept: int, best: bool, written: int | None, copies: int) -> None:
    job = replace(TINY_JOB, checkpoints_kept=kept, keeps_best=best, checkpoints_written=written)
    assert list(disk_bytes(job, TINY).values()) == [9_900 * 12] * copies + [copies * SMALL_FILES_BYTES]


@pytest.mark.parametrize(
    ("precision", "clipping", "bytes_per_parameter"),
    [("bfloat16", True, 14), ("bfloat16", False, 12), ("float32", True, 16), ("float32", False, 12)],
)
def test_host_bytes_per_parameter_at_7b(precision: str, clipping: bool, bytes_per_parameter: int) -> None:
    job = replace(JOB_7B, precision=precision, clipping=clipping)
    table = host_bytes(replace(ALL_STREAMED, micro_batch_tokens=16_384), job, QWEN_7B, H200)
    libraries = 2 * GIB + COMPILER_BYTES - (CUDNN_LIBRARY_BYTES if precision == "float32" else 0)
    arrays = sum(table.values()) - libraries - table.get("gradient staging", 0)
    assert arrays == pytest.approx(bytes_per_parameter * QWEN_7B.parameters, rel=0.001)  # 0.1%: padding


# -- measured -----------------------------------------------------------------------------------------------------------------------


def test_what_was_measured_on_an_h200() -> None:
    """Peaks of the 7B engine, compiled, all streamed and recomputed (benchmarks/results/2026-11-21-h200); a layer decides. Gradients were
    computed in a thread of their own then, which had a cuBLAS handle with a workspace."""
    workspace, handle = 32 * MIB, 72 * MIB
    hardware = replace(H200, context_bytes=CUDA_CONTEXT_BYTES, resident_bytes=856 * MIB, library_bytes=CUDA_LIBRARY_BYTES)
    choices = replace(ALL_STREAMED, micro_batch_tokens=16_384, head_chunk_tokens=4096)
    table = device_bytes(choices, JOB_7B, QWEN_7B, hardware)
    allocated = sum(size for name, size in table.items() if name not in NOT_ALLOCATED)
    assert allocated == pytest.approx(25_264_909_312 - workspace, rel=0.001)
    assert sum(table.values()) == pytest.approx(26_461_863_936 - workspace - handle, rel=0.01)
    assert sum(host_bytes(choices, JOB_7B, QWEN_7B, hardware).values()) == pytest.approx(108_421_505_024, rel=0.005)


@pytest.mark.parametrize(
    ("hardware", "precision", "stored"),
    [(H200, "bfloat16", 0), (LAPTOP, "bfloat16", 1), (LAPTOP, "float32", 0)],  # CPUs cannot add a bf16 product to an fp32 sum
)
def test_a_head_whose_products_add_to_the_sums_stores_no_gradient(hardware: Hardware, precision: str, stored: int) -> None:
    job, weight = replace(JOB_7B, precision=precision), 4 if precision == "float32" else 2
    gradient = 152_064 * 3584 * weight
    rows = (4096 + 4096 + 16_384) * 3584 * weight  # the chunk's hidden states, the gradient of the chunk before, the micro-batch's
    assert head_bytes(4096, 16_384, job, QWEN_7B, hardware) == QWEN_7B.head.at(4096) + rows - (1 - stored) * gradient


@pytest.mark.parametrize("hardware", [H200, LAPTOP])
def test_device_bytes_less_boundaries_do_not_grow_with_depth(hardware: Hardware) -> None:
    rest = set()
    for layers in (4, 16, 64):
        table = device_bytes(replace(ALL_STREAMED, micro_batch_tokens=4096), JOB_7B, with_depth(QWEN_7B, layers), hardware)
        assert table["boundary activations"] == 65_536 * 3584 * 2 * (layers + 1)
        rest.add(sum(table.values()) - table["boundary activations"])
    assert len(rest) == 1


def test_the_last_layer_alone_computes_beside_its_own_input() -> None:
    """A group's: 64 tokens of 10 numbers in bf16. What leaves, stays, or belongs to a retained layer makes no difference."""
    hungry, job = line(100), replace(TINY_JOB, compiled=True)

    def needed(last: WorkingSet, choices: Choices = ALL_STREAMED) -> int:
        shape = replace(TINY, compiled=CompiledSets(hungry, last, hungry, hungry))
        return working_sets(choices, job, shape, H200)["layer, one micro-batch"]

    assert needed(line(50)) == hungry.at(16) - 64 * 10 * 2
    assert needed(hungry) == hungry.at(16)
    assert needed(line(50), replace(ALL_STREAMED, offload=True)) == hungry.at(16)
    assert needed(line(50), replace(ALL_STREAMED, second_backward=True)) == hungry.at(16)


def test_what_compiled_layers_need_counts_only_in_the_precision_that_was_traced() -> None:
    """A bf16 run asks what fp8 would do, whose operands its traces do not know: then the eager working set holds."""
    small = line(1)
    in_bf16, in_fp8 = (replace(TINY, compiled=CompiledSets(small, small, small, small, fp8=fp8)) for fp8 in (False, True))
    bf16, fp8 = (replace(TINY_JOB, compiled=True, precision=precision) for precision in ("bfloat16", "fp8"))

    def layers(shape: ModelShape, job: Job) -> int:
        return working_sets(ALL_STREAMED, job, shape, LAPTOP)["layer, one micro-batch"]

    eager = layers(TINY, bf16)
    assert layers(in_bf16, fp8) == layers(in_fp8, bf16) == eager
    assert layers(in_bf16, bf16) == layers(in_fp8, fp8) < eager
