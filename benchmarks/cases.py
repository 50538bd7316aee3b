"""The training steps that are measured, by name, and the command of each system on a case: a fresh
process that leaves its figures as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


STREAMED_ONLY: tuple[str, ...] = (
    "memory.resident=0",
    "train.retained=0",
    "memory.offload_activations=true",
)
STREAMED_ONLY += ("memory.retained_on_host=0",)

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
    *(*STREAMED_ONLY, "optimizer.name=lion", "optimizer.moments=int8"),
    "memory.second_backward=true",
)
SAME_BATCH = "--same-batch"
LEARNT = (SAME_BATCH,)  # all steps on one batch, whose loss must fall
LION_INT8 = ("optimizer.name=lion", "optimizer.moments=int8", "memory.activations=int4")
# 100.6B parameters in 251 GiB of RAM, 139 of GPU memory and 125 on a drive.
THREE_TIERS = (*LION_INT8, "memory.host=243GiB", "memory.nvme=runs/nvme")
INT8 = ("optimizer.moments=int8",)
AT_1E4, AT_3E5 = "train.learning_rate=1e-4", "train.learning_rate=3e-5"
LLAMA_2 = "benchmarks/models/llama-2-70b"
IN_24_GIB = ("memory.gpu=24GiB",)


def _learnt(name: str, model: str, tokens: int, *overrides: str, **sizes: int) -> Case:
    """A case whose steps all train one batch, so that the loss must fall."""
    return Case(name, model, tokens, overrides=overrides, flags=LEARNT, **sizes)


CAPACITY_CASES: Mapping[str, Case] = {
    case.name: case
    for case in (
        _learnt("101b-16k", "llama-3-70b", 16384, *INT8, AT_1E4, layers=116),
        _learnt("120b-16k", "llama-3-70b", 16384, *LION_INT8, AT_3E5, layers=138),
        _learnt(
            "100b-16k-251gib", "benchmarks/models/llama-2-70b", 16384, *THREE_TIERS, layers=117
        ),
        _learnt("40b-16k-126gib", "llama-3-70b", 16384, *INT8, AT_1E4, layers=44),
        _learnt("49b-16k-126gib", "llama-3-70b", 16384, *LION_INT8, AT_3E5, layers=55),
        _learnt("20b-16k", "llama-3-70b", 16384, *INT8, AT_1E4, layers=21),
        _learnt("32b-65k", "qwen2.5-32b", 65536),
        _learnt("14.8b-32k-24gib", "qwen2.5-14b", 32768, *IN_24_GIB),
        _learnt("32b-32k-24gib", "qwen2.5-32b", 32768, *IN_24_GIB, *INT8),
        *(
            _learnt(f"depth-{n}", "benchmarks/models/qwen2.5-7b-tied", 16384, *DEPTH, layers=n)
            for n in (28, 180)
        ),
        *(
            _learnt(f"7.6b-context-{n >> 10}k", "qwen2.5-7b", n, seq_len=n)
            for n in (32768, 131072, 524288)
        ),
        _learnt("gpt-oss-120b-65k", "gpt-oss-120b", 65536, *LION_INT8[:2], seq_len=4096),
        *(
            _learnt(f"qwen3-30b-a3b-{n // 1000}k", "qwen3-30b-a3b", n, seq_len=4096)
            for n in (16384, 65536, 262144)
        ),
    )
}


# -- systems --------------------------------------------------------------------------------------

OURS = "ours"


@dataclass(frozen=True)
class Peer:
    """Another system: a module of benchmarks/peers, set up as its users would, but for the
    micro-batch, of which several are tried."""

    module: str
    arguments: tuple[str, ...]
    title: str


PEERS: Mapping[str, Peer] = {
    "resident": Peer("resident", ("--no-checkpointing",), "PyTorch, resident"),
    "bound": Peer(
        "resident", ("--no-checkpointing", "--optimizer", "none"), "PyTorch, resident, no optimizer"
    ),
    "zero2": Peer("deepspeed_offload", ("--stage", "2"), "DeepSpeed ZeRO-2 offload"),
    "zero3": Peer("deepspeed_offload", ("--stage", "3"), "DeepSpeed ZeRO-3 offload"),
    "zero3-half": Peer(
        "deepspeed_offload", ("--stage", "3", "--ratio", "0.5"), "DeepSpeed ZeRO-3, half offloaded"
    ),
    "fsdp2": Peer("fsdp2", (), "PyTorch FSDP2 offload"),
}
TITLES = {OURS: "MegaTrain"} | {name: peer.title for name, peer in PEERS.items()}


@dataclass(frozen=True)
class Run:
    """One process to start: `python` with these arguments. It prints its figures as JSON, or writes
    them to the file after `--json`."""

    case: Case
    system: str
    arguments: tuple[str, ...]
    variant: str = ""  # what was chosen for this run
    environ: tuple[tuple[str, str], ...] = ()  # set over this process's

    @property
    def name(self) -> str:
        return ".".join(part for part in (self.case.name, self.system, self.variant) if part)


def our_run(case: Case, steps: int, warmup: int) -> Run:
    """`megatrain bench`, which chooses everything that the case leaves open."""
    sizes = ("--tokens-per-step", str(case.tokens), "--seq-len", str(case.seq_len), *_depth(case))
    command = ("-m", "megatrain", "bench", case.model, *sizes, *_steps(steps, warmup), "--json")
    return Run(case, OURS, (*command, *case.flags, *case.overrides))


def peer_run(case: Case, system: str, micro_batch_tokens: int, steps: int, warmup: int) -> Run:
    """A peer with micro-batches of this many tokens, or of one row if that is more."""
    peer, rows = PEERS[system], max(1, micro_batch_tokens // case.seq_len)
    sizes = ("--shape", case.model, "--tokens", str(case.tokens), "--seq-len", str(case.seq_len))
    rest = ("--micro-batch-rows", str(rows), *_depth(case), *_steps(steps, warmup))
    arguments = ("-m", f"benchmarks.peers.{peer.module}", *peer.arguments, *sizes, *rest)
    return Run(case, system, arguments, f"{rows}-rows")


def runs_of(
    case: Case, system: str, micro_batch_tokens: Sequence[int], steps: int, warmup: int
) -> list[Run]:
    """All runs of a system on a case: one of ours; of a peer one for each micro-batch that is not
    larger than the step."""
    if system == OURS:
        return [our_run(case, steps, warmup)]
    if case.overrides:
        return []
    sizes = sorted({min(tokens, case.tokens) for tokens in micro_batch_tokens})
    return [peer_run(case, system, tokens, steps, warmup) for tokens in sizes]


def _depth(case: Case) -> tuple[str, ...]:
    return ("--layers", str(case.layers)) if case.layers else ()


def _steps(steps: int, warmup: int) -> tuple[str, ...]:
    return "--steps", str(steps), "--warmup", str(warmup)
