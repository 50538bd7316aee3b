"""Steps on several GPUs of this host, beside one of them on the same day: `megatrain bench` against
its plan, and peers under torchrun.

    python -m benchmarks.gpus                                       # all cases, on all GPUs
    python -m benchmarks.gpus --only 7.6b-65k-each --gpus 1 4 --seconds 540

Each run leaves a JSON in benchmarks/results/<date>-<machine>; rows are printed as they come. None
is begun after --seconds. What a GPU computes alone is the rate that others are measured by; cases
that are the same on one GPU share that run.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.cases import INT8, LION_INT8, SAME_BATCH, Case, Run, our_run, peer_run
from benchmarks.records import Record, execute, new_folder
from megatrain.machine.hardware import GIB, visible_gpus


@dataclass(frozen=True)
class Scaled:
    """A case on several GPUs.

    Attributes:
        case: tokens are of each GPU, or of all; "{gpus}" in its overrides is their number.
        wanted: share of one GPU's rate that each is to reach; None: one GPU does not run it.
        environ: of the run on several.
        peers: (system, tokens of its micro-batch).
    """

    case: Case
    in_all: bool = False
    wanted: float | None = None
    environ: tuple[tuple[str, str], ...] = ()
    peers: tuple[tuple[str, int], ...] = ()

    def of(self, gpus: int) -> Case:
        tokens = self.case.tokens * (1 if self.in_all else gpus)
        overrides = tuple(key.replace("{gpus}", str(gpus)) for key in self.case.overrides)
        return replace(self.case, tokens=tokens, overrides=overrides)


# Of Llama-3-70B's layers: their number, and the GiB that hosts of 252, 504 and 560 can give.
LARGEST = {
    "70.6b-16k-each": (None, 247),  # on two H100
    "95b-16k-each": (109, 247),  # on two H200
    "130b-16k-each": (150, 499),  # on four H100
    "177b-16k-each": (205, 499),  # on four H200
    "267b-16k-each": (310, 540),  # on eight H200
}
CASES: Mapping[str, Scaled] = {
    scaled.case.name: scaled
    for scaled in (
        Scaled(Case("7.6b-65k-each", "qwen2.5-7b", 65536), wanted=0.92),
        Scaled(Case("7.6b-65k-in-all", "qwen2.5-7b", 65536), in_all=True, wanted=0.88),
        Scaled(Case("7.6b-16k-in-all", "qwen2.5-7b", 16384), in_all=True, wanted=0.85),
        Scaled(Case("14.8b-65k-each", "qwen2.5-14b", 65536), wanted=0.92),
        Scaled(Case("32.8b-65k-each", "qwen2.5-32b", 65536, overrides=INT8), wanted=0.95),
        Scaled(
            Case("7.6b-131k-each-fp8", "qwen2.5-7b", 131072, overrides=("precision=fp8",)),
            wanted=0.95,
        ),
        Scaled(Case("30b-a3b-65k-each", "qwen3-30b-a3b", 65536, seq_len=4096)),
        Scaled(
            Case("7.6b-32k-each-no-peer-access", "qwen2.5-7b", 32768),
            wanted=0.85,
            environ=(("NCCL_P2P_DISABLE", "1"),),
        ),
        Scaled(
            Case("3.4b-65k-each", "benchmarks/models/qwen2.5-3b-untied", 65536),
            peers=(("zero3", 32768), ("fsdp2", 32768)),
        ),
        *(
            Scaled(
                Case(
                    name,
                    "llama-3-70b",
                    16384,
                    layers=layers,
                    overrides=(*LION_INT8, "train.learning_rate=3e-5", f"memory.host={ram}GiB"),
                    flags=(SAME_BATCH,),
                )
            )
            for name, (layers, ram) in LARGEST.items()
        ),
        Scaled(
            Case(
                "7.6b-context-512k",
                "qwen2.5-7b",
                524288,
                seq_len=524288,
                overrides=("train.context_parallel={gpus}",),
            ),
            in_all=True,
        ),
        Scaled(Case("tiny", "tiny", 512, seq_len=64), wanted=0.0),  # to try the script out
    )
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    most = [name for name in CASES if name != "tiny"]
    parser.add_argument("--only", nargs="+", choices=CASES, default=most, help="cases")
    most_gpus = max(1, len(visible_gpus()))
    powers = [1 << power for power in range((most_gpus - 1).bit_length())]
    parser.add_argument(
        "--gpus",
        type=int,
        nargs="+",
        default=[*powers, most_gpus],
        help="how many; a case runs on each of these numbers",
    )
    parser.add_argument("--steps", type=int, default=3, help="measured")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--limit", type=float, default=300, help="seconds of one process")
    parser.add_argument("--seconds", type=float, default=3600, help="after which none is begun")
    parser.add_argument("--output", type=Path, default=None, help="folder of the JSON files")
    args = parser.parse_args()
    if not all(1 <= count <= most_gpus for count in args.gpus):
        parser.error(f"--gpus: {args.gpus}, but {len(visible_gpus())} are visible here")
    folder, started = args.output or new_folder(), time.monotonic()
    done: dict[tuple[tuple[str, ...], tuple[tuple[str, str], ...]], Record] = {}
    for name in args.only:
        alone: float | None = None
        for run in runs(CASES[name], args.gpus, args.steps, args.warmup):
            key = (run.arguments, run.environ)
            if key not in done:
                if time.monotonic() - started > args.seconds:
                    print(f"{run.name}: not begun, {args.seconds:.0f} s are over", flush=True)
                    continue
                done[key] = execute(run, args.limit, folder)
                words = in_words(done[key], alone, CASES[name].wanted)
                print(f"{run.name}: {words}", flush=True)
            if run.variant == variant(1):
                alone = done[key].tflops


def runs(scaled: Scaled, counts: Sequence[int], steps: int, warmup: int) -> Iterator[Run]:
    """On each number of GPUs, or where one cannot run it on the largest; peers on that one, too."""
    visible, gpus = visible_gpus(), max(counts)
    for count in sorted(counts) if scaled.wanted is not None else [gpus]:
        shown = (("CUDA_VISIBLE_DEVICES", ",".join(visible[:count])),) if visible else ()
        environ = shown + (scaled.environ if count > 1 else ())
        run = our_run(scaled.of(count), steps, warmup)
        yield replace(run, variant=variant(count), environ=environ)
    # torchrun gives each process one thread, with which optimizers on the CPU crawl
    threads = max(1, (os.cpu_count() or 1) // gpus)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus))
    for system, tokens in scaled.peers:
        run = peer_run(scaled.of(gpus), system, tokens, steps, warmup)
        yield replace(
            run,
            arguments=(*launcher, *run.arguments),
            variant=f"{variant(gpus)}.{run.variant}",
            environ=(("OMP_NUM_THREADS", str(threads)),),
        )


def variant(gpus: int) -> str:
    return f"{gpus}-gpus" if gpus > 1 else "1-gpu"


def in_words(record: Record, alone: float | None, wanted: float | None) -> str:
    """One line. alone: TFLOP/s of one GPU."""
    if record.error is not None:
        return f"failed: {record.error} ({record.wall_s:.0f} s in all)"
    result = record.result
    gpu, host = (result[name] or 0 for name in ("gpu_peak_bytes", "host_bytes"))
    words = [f"{result['step_s']:.3f} s, {result['tflops']:.0f} TFLOP/s each"]
    words.append(f"GPU {gpu / GIB:.1f} GiB, host {host / GIB:.1f}")
    if alone and wanted is not None:
        words.append(f"{result['tflops'] / alone:.3f} of one GPU's ({wanted} wanted)")
    if "error" in result:
        planned = {name: error for name, error in result["error"].items() if error is not None}
        words.append(", ".join(f"{name} {error:+.1%}" for name, error in planned.items()))
        words.append(f"steps {', '.join(format(s['seconds'], '.3f') for s in result['steps'])}")
    for gpu, found in result["clocks"].items():
        held = ", ".join(f"{name} {share:.0%}" for name, share in found["held_by"].items())
        words.append(f"GPU {gpu} at {found['mhz']:.0f} MHz, {found['watts']:.0f} W ({held})")
    words.append(f"{result['stolen']:.1%} of processor time stolen")
    return "; ".join(words) + f" ({record.wall_s:.0f} s in all)"


if __name__ == "__main__":
    main()
