"""How each system is started on a case: the command of a fresh process that leaves its figures as
JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.cases import Case

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
    return Run(
        case,
        OURS,
        (
            "-m",
            "megatrain",
            "bench",
            case.model,
            *sizes,
            *_steps(steps, warmup),
            "--json",
            *case.flags,
            *case.overrides,
        ),
    )


def peer_run(case: Case, system: str, micro_batch_tokens: int, steps: int, warmup: int) -> Run:
    """A peer with micro-batches of this many tokens, or of one row if that is more."""
    peer, rows = PEERS[system], max(1, micro_batch_tokens // case.seq_len)
    sizes = (
        "--tokens",
        str(case.tokens),
        "--seq-len",
        str(case.seq_len),
        "--micro-batch-rows",
        str(rows),
        *_depth(case),
    )
    arguments = (
        "-m",
        f"benchmarks.peers.{peer.module}",
        *peer.arguments,
        "--shape",
        case.model,
        *sizes,
        *_steps(steps, warmup),
    )
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
