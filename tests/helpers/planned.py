"""Models and machines that the planner's tests reckon with, as dry runs and probes found them."""

from __future__ import annotations

from dataclasses import replace

from megatrain.machine.hardware import GIB, MIB, Gpu, Hardware
from megatrain.planner.cost.shape import (
    BlockCost,
    ModelCost,
    ModelShape,
    PassCost,
    Traffic,
    WorkingSet,
)
from megatrain.planner.job import Choices, Job
from megatrain.planner.memory import Layout

TOKENS = (1024, 2048, 4096, 8192, 16_384)


def line(per_token: int, fixed: int = 0) -> WorkingSet:
    return WorkingSet(tuple((tokens, fixed + per_token * tokens) for tokens in TOKENS))


def of_head(*nbytes: int) -> WorkingSet:
    return WorkingSet(tuple(zip((256, *TOKENS[:4]), nbytes, strict=True)))


def retained(bytes_per_token: int, layers: int) -> tuple[WorkingSet, ...]:
    """Graphs of equal layers, by their number."""
    return tuple(line(count * bytes_per_token) for count in range(layers + 1))


def sizes(hidden: int, intermediate: int, heads: int, shared_heads: int) -> dict[str, int]:
    """The keys of a Hugging Face config that make a layer."""
    layer = {"hidden_size": hidden, "intermediate_size": intermediate}
    return {**layer, "num_attention_heads": heads, "num_key_value_heads": shared_heads}


QWEN_SIZES = {
    "1.8B": sizes(1536, 8960, 12, 2),
    "7B": sizes(3584, 18944, 28, 4),
    "14B": sizes(5120, 13824, 40, 8),
}

# Qwen2.5's layers, sequence 1024, bf16, on CUDA.
QWEN_7B = ModelShape(
    parameters=7_615_616_512,
    block_numel=(544_997_376, *[233_058_304] * 28, 545_001_472),
    tied=False,
    hidden_size=3584,
    vocab_size=152_064,
    layer=WorkingSet(
        (
            (1024, 568_876_032),
            (2048, 767_279_104),
            (4096, 1_398_767_616),
            (8192, 2_661_744_640),
            (16_384, 5_187_698_688),
        )
    ),
    embed=WorkingSet(((1024, 1_097_875_456), (16_384, 1_208_098_816))),
    head=of_head(1_177_027_588, 1_456_949_252, 2_109_175_812, 3_413_628_932, 6_022_535_172),
    calls=WorkingSet(((1024, 532_480), (16_384, 532_480))),  # rows share the rotary tables
    retained=retained(225_400, 28),
    retained_compiled=retained(151_672, 28),
    retained_cheap=retained(99_448, 28),
    cost=ModelCost(
        embed=BlockCost(
            PassCost(0, 0, Traffic(14_394, 21), Traffic(14_394, 21)),
            PassCost(0, 0, Traffic(7_176, 1), Traffic(7_176, 1)),
        ),
        layers=(
            BlockCost(
                PassCost(466_092_032, 7_347_200, Traffic(572_464, 38), Traffic(195_606, 14)),
                PassCost(932_184_064, 14_694_400, Traffic(1_248_336, 76), Traffic(351_285, 23)),
                skippable_flops=135_790_592,
                cheap_bytes=142_358,
            ),
        )
        * 28,
        head=BlockCost(
            PassCost(1_089_994_752, 0, Traffic(3_184_870, 65), Traffic(608_256, 8)),
            PassCost(2_179_989_504, 0, Traffic(4_283_512, 36), Traffic(608_256, 8)),
        ),
    ),
)
# The same with an MLP of 16 experts, of which a token has one.
EXPERTS = 3 * 3584 * 18944
MIXTURE = replace(
    QWEN_7B,
    cost=replace(
        QWEN_7B.cost,
        layers=tuple(
            replace(
                layer,
                forward=replace(layer.forward, matmul_flops=466_092_032 - 2 * EXPERTS * 15 // 16),
                backward=replace(layer.backward, matmul_flops=932_184_064 - 4 * EXPERTS * 15 // 16),
                skippable_flops=0,
                expert_parameters=EXPERTS,
                expert_flops=2 * EXPERTS // 16,
            )
            for layer in QWEN_7B.cost.layers
        ),
    ),
)
# The 1.5B model's layers with an embedding and a head that are not tied.
QWEN_1B8 = ModelShape(
    parameters=1_777_088_000,
    block_numel=(233_373_696, *[46_797_824] * 28, 233_375_744),
    tied=False,
    hidden_size=1536,
    vocab_size=151_936,
    layer=line(142_392, 27_525_120),
    embed=line(3_080, 466_747_392),
    head=of_head(548_471_812, 793_645_060, 1_120_542_724, 1_774_338_052, 3_081_928_708),
    calls=WorkingSet(((1024, 532_480), (16_384, 532_480))),
    retained=retained(103_480, 28),
    retained_compiled=retained(70_200, 28),
    retained_cheap=retained(46_136, 28),
    cost=ModelCost(
        embed=BlockCost(
            PassCost(0, 0, Traffic(6_202, 21), Traffic(6_202, 21)),
            PassCost(0, 0, Traffic(3_080, 1), Traffic(3_080, 1)),
        ),
        layers=(
            BlockCost(
                PassCost(93_585_408, 3_148_800, Traffic(254_512, 38), Traffic(89_614, 14)),
                PassCost(187_170_816, 6_297_600, Traffic(551_504, 76), Traffic(159_776, 23)),
                skippable_flops=27_525_120,
                cheap_bytes=66_062,
            ),
        )
        * 28,
        head=BlockCost(
            PassCost(466_747_392, 0, Traffic(3_100_390, 65), Traffic(3_100_390, 65)),
            PassCost(933_494_784, 0, Traffic(4_091_768, 36), Traffic(4_091_768, 36)),
        ),
    ),
)
TINY_LAYER = BlockCost(
    PassCost(5000, 100, Traffic(400, 30), Traffic(200, 10)),
    PassCost(10_000, 200, Traffic(800, 60), Traffic(400, 20)),
)
TINY = ModelShape(
    parameters=9_900,
    block_numel=(1000, 2000, 3000, 4000),
    tied=False,
    hidden_size=10,
    vocab_size=100,
    layer=WorkingSet(((8, 800), (16, 1600), (32, 3200))),
    embed=WorkingSet(((8, 80), (32, 320))),
    head=WorkingSet(((4, 400), (8, 700), (16, 1500), (32, 9000))),
    calls=WorkingSet(((8, 64), (16, 128), (32, 256))),
    retained=tuple(WorkingSet(((8, 2000 * n), (16, 4000 * n), (32, 8000 * n))) for n in range(3)),
    retained_compiled=tuple(
        WorkingSet(((8, 1000 * n), (16, 2000 * n), (32, 4000 * n))) for n in range(3)
    ),
    retained_cheap=tuple(
        WorkingSet(((8, 500 * n), (16, 1000 * n), (32, 2000 * n))) for n in range(3)
    ),
    cost=ModelCost(embed=TINY_LAYER, layers=(TINY_LAYER, TINY_LAYER), head=TINY_LAYER),
)

H200 = Hardware(
    gpu=Gpu("NVIDIA H200", 150_754_820_096, 150_109_880_320, (9, 0)),
    host_total_bytes=126 * GIB,
    host_available_bytes=125 * GIB,
    physical_cores=16,
    disk_free_bytes=1000 * GIB,
    memlock_bytes=None,
    context_bytes=GIB,
    workspace_bytes=32 * MIB,
    resident_bytes=GIB,
    library_bytes=GIB,
)
H200_LARGE_HOST = replace(
    H200, host_total_bytes=503 * GIB, host_available_bytes=500 * GIB, physical_cores=64
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
INT8_STATE = tuple(
    (f"{name}{part}", size)
    for name in ("exp_avg", "exp_avg_sq")
    for part, size in (("", 1.0), ("_scale", 1 / 64))
)
# optimizer.moments, bytes per parameter of AdamW's arrays, and parameters/s of one thread
MOMENTS_BYTES = (
    ("bfloat16", (("exp_avg", 2.0), ("exp_avg_sq", 2.0)), 1.4e9),
    ("int8", INT8_STATE, 0.8e9),
)
JOB_7B = Job(
    "bfloat16", tokens_per_step=65_536, seq_len=1024, lighter_moments=MOMENTS_BYTES, compiled=True
)
TINY_JOB = Job("bfloat16", tokens_per_step=64, seq_len=8, micro_batch_tokens=16)
ALL_STREAMED = Choices(
    micro_batch_tokens=16,
    groups=1,
    resident=0,
    sums_on_device=0,
    retained=0,
    cheap_retention=False,
    offload_activations=False,
    head_chunk_tokens=16,
    update_threads=2,
)
TWO_GROUPS = replace(ALL_STREAMED, groups=2)
HUGE = 2**21  # bytes of a huge page


def h200(gpu: float = 0, host: float = 0, disk: float = 0) -> Hardware:
    """A machine with an H200 and this much free memory and disk, in GiB; 0: as in H200."""
    machine = with_gpu(H200, int(gpu * GIB)) if gpu else H200
    machine = replace(machine, host_available_bytes=int(host * GIB)) if host else machine
    return replace(machine, disk_free_bytes=int(disk * GIB)) if disk else machine


def layout(
    choices: Choices = ALL_STREAMED,
    shape: ModelShape = TINY,
    job: Job = TINY_JOB,
    hardware: Hardware = LAPTOP,
) -> Layout:
    return Layout.of(choices, job, shape, hardware)


def with_gpu(hardware: Hardware, free_bytes: int) -> Hardware:
    return replace(hardware, gpu=Gpu("NVIDIA H200", free_bytes, free_bytes, (9, 0)))


def with_depth(shape: ModelShape, layers: int) -> ModelShape:
    """The same with another number of layers, which are all of one kind."""
    embed, layer, *_, head = shape.block_numel
    eager, compiled, cheap = (
        sets[1].at(1024) // 1024
        for sets in (shape.retained, shape.retained_compiled, shape.retained_cheap)
    )
    return replace(
        shape,
        parameters=embed + layers * layer + head,
        block_numel=(embed, *[layer] * layers, head),
        retained=retained(eager, layers),
        retained_compiled=retained(compiled, layers),
        retained_cheap=retained(cheap, layers),
        cost=replace(shape.cost, layers=shape.cost.layers[:1] * layers),
    )


def as_at_first(shape: ModelShape) -> ModelShape:
    """The same, as the engine was when it was first measured: it recomputed everything, and passes
    over the logits were never compiled."""
    cost = shape.cost
    layers = tuple(replace(layer, skippable_flops=0) for layer in cost.layers)
    forward, backward = (
        replace(way, compiled=way.eager) for way in (cost.head.forward, cost.head.backward)
    )
    head = replace(cost.head, forward=forward, backward=backward)
    return replace(shape, cost=replace(cost, layers=layers, head=head))
