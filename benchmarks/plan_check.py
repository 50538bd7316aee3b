"""The plan against reality: plans runs, makes some steps of each in a process of its own, and compares peaks and times.

    python benchmarks/plan_check.py                       # the cases for this machine, on CUDA if there is any
    python benchmarks/plan_check.py --only qwen-7b --json out.json
    python benchmarks/plan_check.py --device cpu --budget 1200 --times

Columns: bytes where the model computes (what PyTorch allocates and reserves, what the driver counts) and of host RAM (peak resident
memory of the process), predicted and measured, and the seconds of a step. "other" is what the host holds beyond the rows that can be
counted, less what the process held at planning: the figure behind hardware.py's CPU_LIBRARY_BYTES and CUDA_LIBRARY_BYTES. An edge is a
limit just below or above the least that the planner could make do with: the one is to be refused, the other accepted and kept.

Exits 1 if a promise is broken: GPU 3%, host 2%, with --times 10% of a step; a wrong refusal, or a limit that was passed.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent))  # run as a script or from a test
from plan_cases import CPU_CASES, CUDA_CASES, Case

if TYPE_CHECKING:
    import torch

    from megatrain.optim import Optimizer
    from megatrain.planner.job import StepTokens
    from megatrain.planner.plan import Plan
    from megatrain.planner.search import Search

GPU_TOLERANCE, HOST_TOLERANCE, TIME_TOLERANCE = 0.03, 0.02, 0.10
MIB = 2**20
STEPS_LOOKED_AT = 64  # to see how much is padded


# -- one case, in a process of its own ----------------------------------------------------------------------------------------------


def imported() -> None:
    """What a run has in memory by the time that it plans."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2ForCausalLM  # noqa: F401

    import megatrain.recipes.run  # noqa: F401


def plan_case(case: Case, device: str) -> Plan:
    """The plan of a case, made as a run makes it: from a skeleton and the machine, before anything is allocated."""
    from megatrain.engine.placement import PRECISIONS
    from megatrain.engine.resolved import next_token_on_meta, state_bytes
    from megatrain.machine.hardware import GIB, keep_heap_small, read_hardware
    from megatrain.models.skeleton import Skeleton
    from megatrain.planner.cost.shape import shape_of
    from megatrain.planner.job import Job
    from megatrain.planner.memory import Layout
    from megatrain.planner.plan import lay_out, make_plan
    from megatrain.planner.search import AUTO_MICRO_BATCH_TOKENS, Room, Search
    from megatrain.recipes.doctor import measured_or_typical

    keep_heap_small()
    hardware = read_hardware(".", device)
    skeleton = Skeleton(case.config(), dtype=PRECISIONS[case.precision])
    most = min(case.tokens, AUTO_MICRO_BATCH_TOKENS[device])
    sizes = (
        [case.micro_batch]
        if case.micro_batch
        else [case.seq_len << n for n in range(16) if case.seq_len << n <= most]
    )
    fp8 = case.precision == "fp8"
    shape = shape_of(
        skeleton,
        case.seq_len,
        sizes,
        head_loss=next_token_on_meta,
        runs_on=device,
        compiled=case.compiled,
        fp8=fp8,
    )
    job = Job(
        case.precision,
        case.tokens,
        case.seq_len,
        case.clipping,
        state_bytes=state_bytes(optimizer_of(case), skeleton),
        compiled=case.compiled,
        micro_batch_tokens=case.micro_batch,
        groups=case.groups,
        resident=case.resident,
        retained=case.retained,
        cheap_retention=case.cheap,
        offload_activations=case.offload,
        retained_on_host=case.on_host,
        draws_weights=True,
        lengths_vary=case.varied,
        step_tokens=step_tokens(case, shape.layer.sizes) if case.varied else (),
        checkpoints_written=0,
    )
    machine = measured_or_typical(hardware, torch_device(device))
    limits = {
        tier: None if cap is None else int(cap * GIB)
        for tier, cap in (("gpu", case.gpu_cap), ("host", case.host_cap))
    }
    if case.edge is not None:
        tier, share = case.edge
        room = Room(
            None if hardware.gpu is None else hardware.gpu.free_bytes, hardware.host_available_bytes
        )
        limits[tier] = int(share * least(Search(job, shape, hardware, machine, room), tier))
    plan = make_plan(
        job, shape, hardware, machine, gpu_limit=limits["gpu"], host_limit=limits["host"]
    )
    choices = replace(
        plan.choices, head_chunk_tokens=case.head_chunk or plan.choices.head_chunk_tokens
    )
    if case.sums is not None:
        choices = replace(choices, sums_on_device=case.sums)
    return lay_out(Layout.of(choices, job, shape, hardware), machine, plan.budget)


def least(search: Search, tier: str) -> int:
    """The least of a tier that a plan needs while the others suffice: the smallest limit that is accepted, to 0.1%."""
    low, high = 0, search.room.host if tier == "host" else search.room.device or 0
    while high - low > high // 1000:
        middle = (low + high) // 2
        room = (
            replace(search.room, host=middle)
            if tier == "host"
            else replace(search.room, device=middle)
        )
        low, high = (low, middle) if replace(search, room=room).fits_somehow() else (middle, high)
    return high


def optimizer_of(case: Case) -> Optimizer:
    from megatrain.optim import OPTIMIZERS

    return OPTIMIZERS["adamw"](lr=1e-5, moments=case.moments)


def torch_device(name: str) -> torch.device:
    import torch

    return torch.device(name)


def row_lengths(case: Case, number: int) -> list[int]:
    """Of one step's rows, 20 to `seq_len` tokens, the longest first."""
    draws, lengths = random.Random(number), list[int]()
    while sum(lengths) < case.tokens:
        lengths.append(draws.randint(20, case.seq_len))
    lengths[-1] -= sum(lengths) - case.tokens
    return sorted((length for length in lengths if length > 1), reverse=True)


def step_tokens(case: Case, sizes: Iterable[int]) -> tuple[StepTokens, ...]:
    """What a run learns from the lengths of its rows, here of so many steps."""
    from megatrain.data.loader import counted
    from megatrain.planner.job import StepTokens

    steps = [row_lengths(case, number) for number in range(STEPS_LOOKED_AT)]
    return tuple(StepTokens(*counted(steps, [True] * STEPS_LOOKED_AT, size)) for size in sizes)


def batches(case: Case, micro_batch_tokens: int, number: int) -> list[dict[str, torch.Tensor]]:
    """One step's micro-batches: full rows, or rows of many lengths, the longest first, padded to the longest of theirs."""
    import torch

    from megatrain.data.loader import cuts

    draws = torch.Generator().manual_seed(number)
    if not case.varied:
        ids = torch.randint(
            case.vocab, (case.tokens // case.seq_len, case.seq_len), generator=draws
        )
        return [
            {"input_ids": rows, "labels": rows}
            for rows in ids.split(max(1, micro_batch_tokens // case.seq_len))
        ]
    made, lengths = [], row_lengths(case, number)
    for start, stop in cuts(lengths, micro_batch_tokens):
        rows = lengths[start:stop]
        ids = torch.randint(case.vocab, (len(rows), rows[0]), generator=draws)
        real = torch.arange(rows[0])[None] < torch.tensor(rows)[:, None]
        made.append(
            {
                "input_ids": ids,
                "labels": ids.masked_fill(~real, -100),
                "attention_mask": real.long(),
            }
        )
    return made


def measure(case: Case, device: str, steps: int) -> dict[str, Any]:
    """Plan, train, and report predicted and measured bytes and seconds; of a plan that is refused, that it was."""
    import torch

    from megatrain.engine.build import choose_device
    from megatrain.engine.engine import Engine
    from megatrain.reporting.meters import GpuMeter, peak_host_bytes

    where = choose_device(device)
    plan = plan_case(case, where.type)
    choices, cuda = plan.choices, where.type == "cuda"
    limits = {"driver": plan.budget.gpu, "host": plan.budget.host}
    result = {
        "case": asdict(case),
        "parameters": plan.parameters,
        "refused": not plan.fits,
        "limits": limits,
        "choices": asdict(choices),
    }
    if not plan.fits:
        return result
    options = {
        "precision": case.precision,
        "max_grad_norm": 1.0 if case.clipping else None,
        "device": str(where),
    }
    seconds = []
    with (
        Engine.from_config(
            case.config(),
            optimizer=optimizer_of(case),
            settings=plan.choices.settings(plan.job),
            **options,
        ) as engine,
        GpuMeter(where) as meter,
    ):
        for number in range(steps):
            step = batches(case, choices.micro_batch_tokens, number)
            started = time.perf_counter()
            engine.train_step(step)
            seconds.append(time.perf_counter() - started)
        for block in engine.anatomy.blocks:
            engine.wait_ready(block.index)  # the last update is deferred
        peak = {
            "allocated": torch.cuda.max_memory_allocated() if cuda else None,
            "reserved": torch.cuda.max_memory_reserved() if cuda else None,
            "driver": meter.peak_bytes(),
            "host": peak_host_bytes(),
            "seconds": statistics.median(seconds[2:] or seconds),
        }
    predicted = {
        "allocated": plan.allocated_bytes if cuda else None,
        "driver": plan.gpu_bytes if cuda else None,
        "host": plan.host_bytes,
    }
    return result | {
        "predicted": predicted | {"seconds": plan.timing.seconds},
        "measured": peak,
        "steps_s": seconds,
        "other": peak["host"]
        - (
            plan.host_bytes
            - plan.host["libraries at work"]
            - plan.host.get("the libraries' forms of the head", 0)
        ),
        "device": plan.device,
        "host": plan.host,
        "working_sets": plan.working_sets,
    }


# -- all cases ----------------------------------------------------------------------------------------------------------------------


def measure_rates(device: str) -> dict[str, Any]:
    """On CUDA as a run does before its first plan, but in a process that ends before any peak is taken."""
    command = [
        sys.executable,
        "-m",
        "megatrain",
        "doctor",
        "--json",
        *(["--quick"] if device == "cuda" else []),
    ]
    found: dict[str, Any] = json.loads(
        subprocess.run(command, capture_output=True, check=True).stdout
    )["profile"]
    return found


def interpreter(device: str, steps: int) -> subprocess.Popen[str]:
    """A fresh one for one case, so that the peaks are its own. It imports, and waits to be told which."""
    command = [sys.executable, __file__, "--device", device, "--steps", str(steps), "--one"]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def run_case(case: Case, process: subprocess.Popen[str]) -> dict[str, Any]:
    """`measure` in that interpreter; of a case that fails, its last words."""
    out, words = process.communicate(json.dumps(asdict(case)))
    if process.returncode != 0:
        return {
            "case": asdict(case),
            "failed": "failed: " + "".join(words.strip().splitlines()[-1:]),
        }
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    return result


def errors(result: Mapping[str, Any]) -> dict[str, float]:
    """Predicted over measured, less one, for every figure that was measured."""
    return {
        name: value / result["measured"][name] - 1
        for name, value in result.get("predicted", {}).items()
        if value is not None
    }


def misjudged(result: Mapping[str, Any]) -> list[str]:
    """A wrong refusal, or a wrong acceptance."""
    edge = result["case"]["edge"]
    return (
        []
        if result["refused"] == (edge is not None and edge[1] < 1)
        else ["refused" if result["refused"] else "accepted"]
    )


def over_limits(result: Mapping[str, Any]) -> list[str]:
    """Limits that were passed."""
    peaks = {
        name: (result.get("measured", {}).get(name, 0), limit)
        for name, limit in result["limits"].items()
        if limit is not None
    }
    return [
        f"{name} {peak / limit:.1%} of its limit"
        for name, (peak, limit) in peaks.items()
        if peak > limit
    ]


def broken(result: Mapping[str, Any], times: bool) -> list[str]:
    """The promises that a result does not keep. A peak under the prediction breaks none where rows vary: how long they are is chance."""
    if "failed" in result:
        return ["failed"]
    tolerance = {"allocated": GPU_TOLERANCE, "driver": GPU_TOLERANCE, "host": HOST_TOLERANCE} | (
        {"seconds": TIME_TOLERANCE} if times else {}
    )
    exact = not result["case"]["varied"]
    apart = [
        f"{name} {error:+.1%}"
        for name, error in errors(result).items()
        if error < -tolerance.get(name, 1e9) or (exact and error > tolerance.get(name, 1e9))
    ]
    return [*misjudged(result), *apart, *over_limits(result)]


def row(name: str, result: dict[str, Any]) -> str:
    def figure(kind: str, what: str) -> str:
        value = result[kind].get(what)
        return f"{value / MIB:>9,.0f}" if value is not None else f"{'-':>9}"

    if "failed" in result or result["refused"]:
        return f"{name:38}  {result.get('failed', 'refused')}"
    cells = [
        figure("predicted", "allocated"),
        figure("measured", "allocated"),
        figure("measured", "reserved"),
        figure("predicted", "driver"),
    ]
    cells += [
        figure("measured", "driver"),
        figure("predicted", "host"),
        figure("measured", "host"),
        f"{result['other'] / MIB:>9,.0f}",
    ]
    cells += [f"{result[kind]['seconds']:>9.3g}" for kind in ("predicted", "measured")]
    return (
        f"{name:38}"
        + "".join(cells)
        + "  "
        + "  ".join(f"{what} {error:+.1%}" for what, error in errors(result).items())
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=[""],
        help="cases whose name contains one of these, in this order",
    )
    parser.add_argument("--device", default="auto", help="cpu or cuda: whose cases")
    parser.add_argument("--steps", type=int, default=6, help="of each case; two warm it up")
    parser.add_argument(
        "--budget",
        type=float,
        default=float("inf"),
        help="seconds after which no further case begins",
    )
    parser.add_argument(
        "--times",
        action="store_true",
        help="hold the seconds of a step to the plan, too: on a machine with nothing else to do",
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        imported()
        print(json.dumps(measure(Case(**json.loads(sys.stdin.read())), args.device, args.steps)))
        return
    import torch

    device = (
        ("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device
    )
    known = CUDA_CASES if device == "cuda" else CPU_CASES
    cases = {name: case for part in args.only for name, case in known.items() if part in name}
    columns = (
        "allocated",
        "measured",
        "reserved",
        "driver",
        "measured",
        "host",
        "measured",
        "other",
        "seconds",
        "measured",
    )
    print(
        f"{'MiB':38}" + "".join(f"{column:>9}" for column in columns) + "  predicted over measured",
        flush=True,
    )
    results: dict[str, Any] = {}
    machine = measure_rates(device)
    started, following = time.monotonic(), None
    for name, case in cases.items():
        if time.monotonic() - started > args.budget:
            print(f"{name:38}  not run: the time was up")
            continue
        if args.times and device == "cpu" and results:
            machine = measure_rates(
                device
            )  # what other machines on the same host leave to this one changes with the minutes
        process = following or interpreter(device, args.steps)
        following = (
            interpreter(device, args.steps) if device == "cuda" else None
        )  # it imports while this one plans
        results[name] = run_case(case, process) | {"machine": machine}
        print(row(name, results[name]), flush=True)
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(
                json.dumps(
                    {"torch": torch.__version__, "device": device, "cases": results}, indent=1
                )
                + "\n"
            )
    if following is not None:
        following.kill()
    failures = [
        f"{name}: {', '.join(wrong)}"
        for name, result in results.items()
        if (wrong := broken(result, args.times))
    ]
    print(f"{len(results)} of {len(cases)} cases run, {len(results) - len(failures)} as promised")
    if failures:
        raise SystemExit("beyond tolerance: " + "; ".join(failures))


if __name__ == "__main__":
    main()
