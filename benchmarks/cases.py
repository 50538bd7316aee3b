"""What is measured: training steps by name, and what each is expected to reach."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One training step. `overrides` are keys of our config; other systems cannot honour them and
    leave such a case out."""

    name: str
    model: str  # a shape of `megatrain bench`, or a model folder
    tokens: int  # per step
    seq_len: int = 1024
    layers: int | None = None
    overrides: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()  # of `megatrain bench`


@dataclass(frozen=True)
class Target:
    """What a case is to reach: TFLOP/s, a share of the step's time, or how many times another
    case's figure."""

    case: str
    words: str
    wanted: float
    against: str | None = None  # another case
    figure: str = "tflops"  # what is compared with it
    share: str | None = None  # a share of the step in `megatrain bench --json`


STREAMED_ONLY = (
    "memory.resident=0",
    "train.retained=0",
    "memory.offload_activations=true",
    "memory.retained_on_host=0",
)

CASES: Mapping[str, Case] = {
    case.name: case
    for case in (
        Case("7.6b-65k", "qwen2.5-7b", 65536),
        Case("7.6b-16k", "qwen2.5-7b", 16384),
        Case("1.8b-16k", "qwen2.5-1.5b", 16384),
        Case("1.8b-16k-12gib", "qwen2.5-1.5b", 16384, overrides=("memory.gpu=12GiB",)),
        Case("7.6b-32k-long", "qwen2.5-7b", 32768, seq_len=8192),
        Case("14.8b-65k", "qwen2.5-14b", 65536),
        Case("7.6b-131k", "qwen2.5-7b", 131072),
        Case("7.6b-131k-fp8", "qwen2.5-7b", 131072, overrides=("precision=fp8",)),
        Case(
            "28-layers", "benchmarks/models/qwen2.5-3b", 65536, layers=28, overrides=STREAMED_ONLY
        ),
        Case(
            "84-layers", "benchmarks/models/qwen2.5-3b", 65536, layers=84, overrides=STREAMED_ONLY
        ),
        Case("tiny", "tiny", 512, seq_len=64),  # to try the scripts out, on any machine
    )
}

# Five bytes a parameter: 43B in 251 GiB of RAM. The embedding is tied, since one that is only
# looked up counts in 6 x parameters x tokens
# and takes no time: of few layers that would be 7% of the rate.
DEPTH = (
    *STREAMED_ONLY,
    "optimizer.name=lion",
    "optimizer.moments=int8",
    "memory.second_backward=true",
)
SAME_BATCH = "--same-batch"
LEARNT = (SAME_BATCH,)  # all steps on one batch, whose loss must fall
LION_INT8 = ("optimizer.name=lion", "optimizer.moments=int8", "memory.activations=int4")
# 100.6B parameters in 251 GiB of RAM, 139 of GPU memory and 125 on a drive.
THREE_TIERS = (*LION_INT8, "memory.host=243GiB", "memory.nvme=runs/nvme")
CAPACITY_CASES: Mapping[str, Case] = {
    case.name: case
    for case in (
        Case(
            "101b-16k",
            "llama-3-70b",
            16384,
            layers=116,
            overrides=("optimizer.moments=int8", "train.learning_rate=1e-4"),
            flags=LEARNT,
        ),
        Case(
            "120b-16k",
            "llama-3-70b",
            16384,
            layers=138,
            overrides=(*LION_INT8, "train.learning_rate=3e-5"),
            flags=LEARNT,
        ),
        Case(
            "100b-16k-251gib",
            "benchmarks/models/llama-2-70b",
            16384,
            layers=117,
            overrides=THREE_TIERS,
            flags=LEARNT,
        ),
        Case(
            "40b-16k-126gib",
            "llama-3-70b",
            16384,
            layers=44,
            overrides=("optimizer.moments=int8", "train.learning_rate=1e-4"),
            flags=LEARNT,
        ),
        Case(
            "49b-16k-126gib",
            "llama-3-70b",
            16384,
            layers=55,
            overrides=(*LION_INT8, "train.learning_rate=3e-5"),
            flags=LEARNT,
        ),
        Case(
            "20b-16k",
            "llama-3-70b",
            16384,
            layers=21,
            overrides=("optimizer.moments=int8", "train.learning_rate=1e-4"),
            flags=LEARNT,
        ),
        Case("32b-65k", "qwen2.5-32b", 65536, flags=LEARNT),
        Case(
            "14.8b-32k-24gib", "qwen2.5-14b", 32768, overrides=("memory.gpu=24GiB",), flags=LEARNT
        ),
        Case(
            "14.8b-32k-24gib-int8",
            "qwen2.5-14b",
            32768,
            overrides=("memory.gpu=24GiB", "optimizer.moments=int8"),
            flags=LEARNT,
        ),
        Case(
            "32b-32k-24gib",
            "qwen2.5-32b",
            32768,
            overrides=("memory.gpu=24GiB", "optimizer.moments=int8"),
            flags=LEARNT,
        ),
        *(
            Case(
                f"depth-{layers}",
                "benchmarks/models/qwen2.5-7b-tied",
                16384,
                layers=layers,
                overrides=DEPTH,
                flags=LEARNT,
            )
            for layers in (28, 90, 180)
        ),
        *(
            Case(f"7.6b-context-{n >> 10}k", "qwen2.5-7b", n, seq_len=n, flags=LEARNT)
            for n in (32768, 131072, 524288)
        ),
        *(
            Case(
                f"gpt-oss-120b{words}-65k",
                "gpt-oss-120b",
                65536,
                seq_len=4096,
                layers=layers,
                overrides=("optimizer.name=lion", "optimizer.moments=int8"),
                flags=LEARNT,
            )
            for words, layers in (("", None), ("-18-layers", 18))  # in 504 and 252 GiB of RAM
        ),
        *(
            Case(f"qwen3-30b-a3b-{n // 1000}k", "qwen3-30b-a3b", n, seq_len=4096, flags=LEARNT)
            for n in (16384, 65536, 262144)
        ),
    )
}

TARGETS = (
    Target("7.6b-65k", "7.6B, 65k tokens", 580),
    Target("7.6b-16k", "7.6B, 16k tokens", 530),
    Target("1.8b-16k", "1.8B, 16k tokens", 540),
    Target("1.8b-16k-12gib", "1.8B, 16k tokens, 12 GiB of GPU memory", 300),
    Target("7.6b-32k-long", "7.6B, 32k tokens, sequence 8192", 500),
    Target("14.8b-65k", "14.8B, 65k tokens, 512 GiB host", 530),
    Target(
        "7.6b-131k-fp8", "7.6B, 131k tokens, fp8 matmuls against bf16", 1.3, against="7.6b-131k"
    ),
    Target(
        "84-layers",
        "84 layers against 28 (hidden size 2048), all recomputed, activations on the host",
        0.97,
        against="28-layers",
    ),
    Target("84-layers", "the same: GPU memory", 1.0, against="28-layers", figure="gpu_peak_bytes"),
    Target("7.6b-65k", "share of the 65k step in which the GPU computes", 0.97, share="gpu_busy"),
)


def sweep_case(model: str, tokens: int) -> Case:
    """One point of the sweep over tokens per step, in sequences of 1024 or, below that, of all the
    step's tokens."""
    return Case(f"sweep-{model}-{tokens}", model, tokens, seq_len=min(1024, tokens))
