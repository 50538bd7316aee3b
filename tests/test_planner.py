"""The planner's arithmetic, written out by hand."""

import json
from dataclasses import dataclass, replace
from io import StringIO

import pytest
from rich.console import Console

from megatrain.errors import PlanError
from megatrain.hardware import CUDA_CONTEXT_BYTES, CUDA_LIBRARY_BYTES, GIB, MIB, Gpu, Hardware
from megatrain.models.shape import ModelShape, WorkingSet
from megatrain.planner import Budget, Choices, Job, Plan, lay_out, make_plan

# Qwen2.5-7B as dry runs of its modules found it, sequence 1024, bf16
EMBED, LAYER, HEAD = 544_997_376, 233_058_304, 545_001_472
QWEN_7B = ModelShape(
    family="qwen2",
    parameters=7_615_616_512,
    block_numel=(EMBED, *[LAYER] * 28, HEAD),
    tied=False,
    hidden_size=3584,
    vocab_size=152_064,
    layer=WorkingSet(((1024, 568_876_032), (2048, 767_279_104), (4096, 1_398_767_616), (8192, 2_661_744_640), (16384, 5_187_698_688))),
    embed=WorkingSet(((1024, 1_097_875_456), (16384, 1_208_098_816))),
    head=WorkingSet(((256, 1_177_027_588), (1024, 1_456_949_252), (2048, 2_109_175_812), (4096, 3_413_628_932), (8192, 6_022_535_172))),
    calls=WorkingSet(((1024, 532_480), (16384, 532_480))),  # rows share the rotary tables
)
TINY = ModelShape(
    family="tiny",
    parameters=9_900,
    block_numel=(1000, 2000, 3000, 4000),
    tied=False,
    hidden_size=10,
    vocab_size=100,
    layer=WorkingSet(((8, 800), (16, 1600), (32, 3200))),
    embed=WorkingSet(((8, 80), (32, 320))),
    head=WorkingSet(((4, 400), (8, 700), (16, 1500), (32, 9000))),
    calls=WorkingSet(((8, 64), (16, 128), (32, 256))),
)
H200 = Hardware(
    gpu=Gpu("NVIDIA H200", 150_754_820_096, 150_109_880_320, (9, 0)),
    host_total_bytes=126 * GIB,
    host_available_bytes=125 * GIB,
    physical_cores=16,
    disk_free_bytes=1000 * GIB,
    memlock_bytes=None,
    context_bytes=GIB,
    workspace_bytes=64 * MIB,
    resident_bytes=GIB,
    library_bytes=GIB,
)
LAPTOP = replace(
    H200,
    gpu=None,
    context_bytes=0,
    workspace_bytes=0,
    resident_bytes=70,
    library_bytes=30,
    host_available_bytes=GIB,
    physical_cores=2,
    disk_free_bytes=GIB,
)
JOB_7B = Job("bfloat16", tokens_per_step=65_536, seq_len=1024)
TINY_JOB = Job("bfloat16", tokens_per_step=64, seq_len=8, micro_batch_tokens=16)


def with_gpu(hardware: Hardware, free_bytes: int) -> Hardware:
    return replace(hardware, gpu=Gpu("NVIDIA Test", free_bytes, free_bytes, (9, 0)))


def with_depth(shape: ModelShape, layers: int) -> ModelShape:
    embed, layer, *_, head = shape.block_numel
    return replace(shape, block_numel=(embed, *[layer] * layers, head))


def test_device_arrays_of_a_small_model_by_hand() -> None:
    device = make_plan(TINY_JOB, TINY, with_gpu(H200, GIB * 2)).device
    assert device == {
        "layer slots": 2 * 3000 * 2,
        "embedding and head slot": 4000 * 2,
        "gradient sums": 4000 * 4,
        "gradient staging": 2 * 4000 * 2,
        "boundary activations": 64 * 10 * 2 * 3,  # tokens x hidden x bf16 x (two layers' inputs and the head's)
        "token ids and targets": 64 * 24,
        "rotary tables and masks": 4 * 128,  # four micro-batches of 16 tokens
        "working set": 1500 + (16 + 16) * 10 * 2,  # the head on a chunk of 16, its hidden states and the micro-batch's gradient
        "cuBLAS workspaces": 64 * MIB,
        "allocator slack": 32 * MIB + int(0.05 * 2140),
        "CUDA context": GIB,
    }


def test_host_and_disk_of_a_small_model_by_hand() -> None:
    plan = make_plan(TINY_JOB, replace(TINY, block_numel=(1000, 2_000_000, 3000, 4000)), LAPTOP)
    numel = 1000 + 2_000_000 + 3000 + 4000
    huge = 2**21
    assert plan.host == {
        "weight": 2 * huge,  # 2 x 2,008,000 bytes: 1.9 huge pages
        "remainder": 2 * huge,
        "exp_avg": 4 * huge,
        "exp_avg_sq": 4 * huge,
        "grad": 2 * huge,
        "the process so far": 70,
        "libraries at work": 30,
    }
    assert 2 * numel == pytest.approx(1.915 * huge, rel=0.001)
    assert list(plan.disk.values()) == [9_900 * 12] * 4  # two kept, the best, and the one being written
    assert plan.gpu_bytes == 0
    assert plan.host_bytes == sum(plan.host.values()) + sum(plan.device.values())  # on the CPU both live in RAM


def test_a_tied_embedding_stays_and_has_its_own_sums() -> None:
    tied = replace(TINY, block_numel=(4000, 2000, 3000, 10), tied=True)
    device = make_plan(TINY_JOB, tied, LAPTOP).device
    assert device["embedding and head slot"] == (4000 + 10) * 2
    assert device["gradient sums"] == (4000 + 3000) * 4


@pytest.mark.parametrize(
    ("precision", "clipping", "bytes_per_parameter"),
    [("bfloat16", True, 14), ("bfloat16", False, 12), ("float32", True, 16), ("float32", False, 12)],
)
def test_host_bytes_per_parameter_at_7b(precision: str, clipping: bool, bytes_per_parameter: int) -> None:
    plan = make_plan(replace(JOB_7B, precision=precision, clipping=clipping), QWEN_7B, H200)
    stages = 0 if clipping else 3 * HEAD * (2 if precision == "bfloat16" else 4)
    assert plan.host_bytes - 2 * GIB - stages == pytest.approx(bytes_per_parameter * QWEN_7B.parameters, rel=0.001)  # 0.1%: padding


def test_a_7b_step_on_an_h200() -> None:
    plan = make_plan(JOB_7B, QWEN_7B, H200)
    plan.check()
    assert (plan.choices.micro_batch_tokens, plan.choices.groups, plan.choices.gradient_sums) == (16_384, 1, "ring")
    assert plan.choices.head_chunk_tokens == 4096  # 4.7 GB; the next, 7.3 GB, is more than the layer's 5.2 GB
    assert plan.choices.update_threads == 14
    assert plan.host_bytes < 15 * QWEN_7B.parameters
    assert plan.boundary_bytes == 65_536 * 3584 * 2 * 29
    slots = 2 * LAYER * 2 + HEAD * 2
    gradients = 4 * HEAD + 2 * HEAD * 2
    inputs = 65_536 * 24 + 4 * 532_480
    working_set = 5_187_698_688
    assert plan.allocated_bytes == slots + gradients + plan.boundary_bytes + inputs + working_set + 64 * MIB
    assert plan.gpu_bytes == plan.allocated_bytes + 32 * MIB + int(0.05 * working_set) + GIB


@dataclass(frozen=True)
class Measured:
    """Peaks of the 7B engine on an H200 (benchmarks/results/2026-11-21-h200): micro-batches of 16,384 tokens, one group."""

    head_chunk: int
    clipping: bool
    allocated: int
    driver: int
    host: int


@pytest.mark.parametrize(
    "measured",
    [
        Measured(4096, True, 25_264_909_312, 26_461_863_936, 108_421_505_024),  # a layer decides
        Measured(8192, False, 27_414_260_224, 28_496_101_376, 96_514_838_528),  # the head decides
    ],
)
def test_what_was_measured_on_an_h200(measured: Measured) -> None:
    hardware = replace(H200, context_bytes=CUDA_CONTEXT_BYTES, resident_bytes=856 * MIB, library_bytes=CUDA_LIBRARY_BYTES)
    choices = Choices(16_384, 1, "ring", measured.head_chunk, 14)
    plan = lay_out(choices, replace(JOB_7B, clipping=measured.clipping), QWEN_7B, hardware, Budget(gpu=0, host=0, disk=0))
    assert plan.allocated_bytes == pytest.approx(measured.allocated, rel=0.001)
    assert plan.gpu_bytes == pytest.approx(measured.driver, rel=0.01)
    assert plan.host_bytes == pytest.approx(measured.host, rel=0.002)


@pytest.mark.parametrize("hardware", [H200, replace(LAPTOP, host_available_bytes=500 * GIB)])
def test_device_bytes_less_boundaries_do_not_grow_with_depth(hardware: Hardware) -> None:
    rest = set()
    for layers in (4, 16, 64):
        plan = make_plan(replace(JOB_7B, micro_batch_tokens=4096, groups=1), with_depth(QWEN_7B, layers), hardware)
        assert plan.boundary_bytes == 65_536 * 3584 * 2 * (layers + 1)
        rest.add(sum(plan.device.values()) - plan.boundary_bytes)
    assert len(rest) == 1


# -- choosing -----------------------------------------------------------------------------------------------------------------------


def gpu_need(job: Job, shape: ModelShape = QWEN_7B) -> int:
    return make_plan(job, shape, H200).gpu_bytes


def test_a_smaller_gpu_gets_smaller_micro_batches_before_it_gets_groups() -> None:
    for tokens in (16_384, 8_192, 4_096):
        need = gpu_need(replace(JOB_7B, micro_batch_tokens=tokens))
        choices = make_plan(JOB_7B, QWEN_7B, with_gpu(H200, need)).choices
        assert (choices.micro_batch_tokens, choices.groups) == (tokens, 1)


def test_groups_cut_the_boundaries_where_one_does_not_fit() -> None:
    smallest = gpu_need(replace(JOB_7B, micro_batch_tokens=1024))
    plan = make_plan(JOB_7B, QWEN_7B, with_gpu(replace(H200, host_available_bytes=200 * GIB), smallest - GIB))
    plan.check()
    assert plan.choices.groups == 2
    assert plan.choices.gradient_sums == "host"  # 30 GB of sums have no room on this GPU
    assert plan.host["gradient sums"] == pytest.approx(4 * sum(QWEN_7B.block_numel), abs=2**21)
    assert plan.boundary_bytes == 32_768 * 3584 * 2 * 29


def test_groups_that_are_asked_for_sum_on_the_gpu_if_it_has_room() -> None:
    plan = make_plan(replace(JOB_7B, groups=4), QWEN_7B, H200)
    assert plan.choices.gradient_sums == "device"
    assert plan.device["gradient sums"] == 4 * sum(QWEN_7B.block_numel)
    assert "gradient sums" not in plan.host


def test_micro_batches_on_the_cpu_stay_small() -> None:
    plan = make_plan(JOB_7B, QWEN_7B, replace(LAPTOP, host_available_bytes=500 * GIB))
    assert plan.choices.micro_batch_tokens == 2048
    assert plan.choices.update_threads == 1


def test_a_micro_batch_holds_a_row_and_no_more_than_a_step() -> None:
    long_rows = replace(QWEN_7B, layer=WorkingSet(((65_536, 20 * GIB),)))
    assert make_plan(replace(JOB_7B, seq_len=65_536), long_rows, H200).choices.micro_batch_tokens == 65_536
    assert make_plan(replace(JOB_7B, tokens_per_step=5000), QWEN_7B, H200).choices.micro_batch_tokens == 4096


def test_padding_is_part_of_the_boundaries() -> None:
    plan = make_plan(replace(TINY_JOB, padded_tokens_per_step=80), TINY, LAPTOP)
    assert plan.boundary_bytes == 80 * 10 * 2 * 3


def test_checkpoints_never_outnumber_those_written() -> None:
    plan = make_plan(replace(TINY_JOB, checkpoints_written=1), TINY, LAPTOP)
    assert list(plan.disk.values()) == [9_900 * 12]


# -- refusing -----------------------------------------------------------------------------------------------------------------------


def limited(tier: str, need: int) -> Plan:
    """The 7B plan with fixed choices, on a machine whose `tier` has `need` bytes."""
    job = replace(JOB_7B, micro_batch_tokens=1024, groups=1)
    hardware = {
        "gpu": with_gpu(H200, need),
        "host": replace(H200, host_available_bytes=need),
        "disk": replace(H200, disk_free_bytes=need),
    }[tier]
    return make_plan(job, QWEN_7B, hardware)


@pytest.mark.parametrize("tier", ["gpu", "host", "disk"])
def test_refused_just_below_the_need_and_accepted_just_above(tier: str) -> None:
    plan = make_plan(replace(JOB_7B, micro_batch_tokens=1024, groups=1), QWEN_7B, H200)
    need = next(need for name, need, _ in plan.tiers if name == tier)
    limited(tier, int(1.05 * need)).check()
    short = limited(tier, int(0.95 * need))
    assert short.short == (tier,)
    with pytest.raises(PlanError) as error:
        short.check()
    assert f"needs {need / GIB:.2f} GiB" in str(error.value)
    assert f"{0.95 * need / GIB:.2f} GiB can be had" in str(error.value)
    assert error.value.exit_code == 4


@pytest.mark.parametrize(
    ("job", "hardware", "fix"),
    [
        (JOB_7B, replace(H200, host_available_bytes=95 * GIB), "set train.max_grad_norm: null"),
        (replace(JOB_7B, precision="float32"), replace(H200, host_available_bytes=105 * GIB), "set precision: bfloat16"),
        (replace(JOB_7B, tokens_per_step=131_072, groups=1), with_gpu(H200, 22 * GIB), "set train.tokens_per_step: 65536"),
        (replace(JOB_7B, micro_batch_tokens=65_536), with_gpu(H200, 25 * GIB), "set train.micro_batch_tokens: auto and train.groups: auto"),
        (
            JOB_7B,
            replace(H200, host_available_bytes=40 * GIB),
            "no setting frees enough host RAM: take a larger machine or a smaller model",
        ),
        (JOB_7B, replace(H200, disk_free_bytes=300 * GIB), "set checkpoint.keep: 1"),
        (JOB_7B, replace(H200, disk_free_bytes=GIB), "free disk space, or set output to a folder on a larger disk"),
    ],
)
def test_the_cheapest_fix_is_named(job: Job, hardware: Hardware, fix: str) -> None:
    with pytest.raises(PlanError) as error:
        make_plan(job, QWEN_7B, hardware).check()
    assert str(error.value).endswith("; " + fix)


def test_the_users_budgets_count() -> None:
    with pytest.raises(PlanError, match="GPU memory"):
        make_plan(JOB_7B, QWEN_7B, H200, gpu_limit=4 * GIB).check()
    with pytest.raises(PlanError, match="host RAM"):
        make_plan(JOB_7B, QWEN_7B, H200, host_limit=50 * GIB).check()
    assert make_plan(JOB_7B, QWEN_7B, H200, gpu_limit=10**15).budget.gpu == 150_109_880_320
    assert make_plan(JOB_7B, QWEN_7B, H200, host_limit=200 * GIB).budget.host == 200 * GIB


# -- showing ------------------------------------------------------------------------------------------------------------------------


def test_the_plan_is_json() -> None:
    values = json.loads(json.dumps(make_plan(JOB_7B, QWEN_7B, H200).to_dict()))
    assert values["fits"] is True
    assert values["choices"]["micro_batch_tokens"] == 16_384
    assert values["totals"]["host"]["need"] == sum(values["host"].values())


@pytest.mark.parametrize("hardware", [H200, LAPTOP])
def test_the_plan_can_be_read(hardware: Hardware) -> None:
    out = StringIO()
    plan = make_plan(JOB_7B, QWEN_7B, hardware)
    plan.render(Console(file=out, width=140))
    text = out.getvalue()
    for array in [*plan.device, *plan.host, *plan.disk]:
        assert array in text
    assert ("fits" if plan.fits else f"does not fit: {plan.fix}") in " ".join(text.split())
