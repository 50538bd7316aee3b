"""One configuration of `plan_check`, planned and trained in a process of its own.

    echo '{"layers": 2, ...}' | python benchmarks/plan_run.py --device cpu --steps 6

Reads a case as JSON, and writes what was predicted and measured.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent))  # run as a script or from a test
from plan_cases import Case  # type: ignore[import-not-found]

if TYPE_CHECKING:
    import torch

    from megatrain.models.skeleton import Skeleton
    from megatrain.optim import Optimizer
    from megatrain.planner.cost.shape import ModelShape
    from megatrain.planner.job import Job, StepTokens
    from megatrain.planner.plan import Plan
    from megatrain.planner.search import Search

STEPS_LOOKED_AT = 64  # to see how much is padded


def imported() -> None:
    """What a run has in memory by the time that it plans."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2ForCausalLM  # noqa: F401

    import megatrain.recipes.run  # noqa: F401


# -- the plan ------------------------------------------------------------------------------------


def plan_case(case: Case, device: str) -> Plan:
    """The plan of a case, made as a run makes it: from a skeleton and the machine, before anything
    is allocated."""
    import torch

    from megatrain.engine.components import PRECISIONS
    from megatrain.machine.hardware import GIB, bound_heap, keep_caches_small, read_hardware
    from megatrain.models.skeleton import Skeleton
    from megatrain.planner.job import Budget
    from megatrain.planner.memory import Layout
    from megatrain.planner.planning import lay_out, make_plan
    from megatrain.planner.search import Search
    from megatrain.recipes.doctor import measured_or_typical

    keep_caches_small()
    bound_heap()  # what plans count on where memory is short
    hardware = read_hardware(".", device)
    skeleton = Skeleton(case.config(), dtype=PRECISIONS[case.precision])
    shape = shape_of_case(case, skeleton, device)
    job = job_of(case, skeleton, shape)
    machine = measured_or_typical(hardware, torch.device(device))
    caps = {"gpu": case.gpu_cap, "host": case.host_cap}
    limits = {tier: None if cap is None else int(cap * GIB) for tier, cap in caps.items()}
    if case.edge is not None:
        tier, share = case.edge
        free = None if hardware.gpu is None else hardware.gpu.free_bytes
        budget = Budget(free, hardware.host_available_bytes)
        limits[tier] = int(share * least(Search(job, shape, hardware, machine, budget), tier))
    plan = make_plan(
        job, shape, hardware, machine, gpu_limit=limits["gpu"], host_limit=limits["host"]
    )
    chunk = case.head_chunk or plan.choices.head_chunk_tokens
    choices = replace(plan.choices, head_chunk_tokens=chunk)
    if case.sums is not None:
        choices = replace(choices, sums_on_device=case.sums)
    return lay_out(Layout.of(choices, job, shape, hardware), machine, plan.budget)


def shape_of_case(case: Case, skeleton: Skeleton, device: str) -> ModelShape:
    from megatrain.engine.resolved import next_token_on_meta
    from megatrain.planner.cost.dry_run import shape_of
    from megatrain.planner.search import AUTO_MICRO_BATCH_TOKENS

    most = min(case.tokens, AUTO_MICRO_BATCH_TOKENS[device])
    sizes = [case.seq_len << n for n in range(16) if case.seq_len << n <= most]
    return shape_of(
        skeleton,
        case.seq_len,
        [case.micro_batch] if case.micro_batch else sizes,
        head_loss=next_token_on_meta,
        runs_on=device,
        compiled=case.compiled,
        fp8=case.precision == "fp8",
    )


def job_of(case: Case, skeleton: Skeleton, shape: ModelShape) -> Job:
    from megatrain.engine.resolved import state_bytes
    from megatrain.planner.job import Job

    return Job(
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


def least(search: Search, tier: str) -> int:
    """The least of a tier that a plan needs while the others suffice: the smallest limit that is
    accepted, to 0.1%."""
    low, high = 0, getattr(search.budget, tier) or 0
    while high - low > high // 1000:
        middle = (low + high) // 2
        limited = replace(search, budget=replace(search.budget, **{tier: middle}))
        low, high = (low, middle) if limited.fits_somehow() else (middle, high)
    return high


def optimizer_of(case: Case) -> Optimizer:
    from megatrain.optim import AdamW

    return AdamW(lr=1e-5, moments=case.moments)


# -- its rows ------------------------------------------------------------------------------------


def row_lengths(case: Case, number: int) -> list[int]:
    """Tokens of each row of a step, 20 to `seq_len`, the longest first."""
    draws, lengths = random.Random(number), list[int]()
    while sum(lengths) < case.tokens:
        lengths.append(draws.randint(20, case.seq_len))
    lengths[-1] -= sum(lengths) - case.tokens
    return sorted((length for length in lengths if length > 1), reverse=True)


def step_tokens(case: Case, sizes: Iterable[int]) -> tuple[StepTokens, ...]:
    """What a run learns from the lengths of its rows, here of the first STEPS_LOOKED_AT steps."""
    from megatrain.data.micro_batches import RowRun, counted_tokens
    from megatrain.planner.job import StepTokens

    numbers = range(STEPS_LOOKED_AT)
    steps = [[[RowRun(row_lengths(case, number), [])]] for number in numbers]  # of one rank
    return tuple(
        StepTokens(*counted_tokens(steps, [True] * STEPS_LOOKED_AT, size)) for size in sizes
    )


def batches(case: Case, micro_batch_tokens: int, number: int) -> list[dict[str, torch.Tensor]]:
    """One step's micro-batches: full rows, or rows of many lengths, the longest first, padded to
    the longest of theirs."""
    import torch

    from megatrain.data.micro_batches import cuts

    draws = torch.Generator().manual_seed(number)
    if not case.varied:
        shape = (case.tokens // case.seq_len, case.seq_len)
        parts = torch.randint(case.vocab, shape, generator=draws).split(
            max(1, micro_batch_tokens // case.seq_len)
        )
        return [{"input_ids": rows, "labels": rows} for rows in parts]
    made, lengths = [], row_lengths(case, number)
    for start, stop in cuts(lengths, micro_batch_tokens):
        rows = lengths[start:stop]
        ids = torch.randint(case.vocab, (len(rows), rows[0]), generator=draws)
        real = torch.arange(rows[0])[None] < torch.tensor(rows)[:, None]
        labels = ids.masked_fill(~real, -100)
        made.append({"input_ids": ids, "labels": labels, "attention_mask": real.long()})
    return made


# -- the run -------------------------------------------------------------------------------------


def measure(case: Case, device: str, steps: int) -> dict[str, Any]:
    """Plan, train, and report predicted and measured bytes and seconds; of a plan that is refused,
    that it was."""
    from megatrain.engine.request import choose_device

    where = choose_device(device)
    plan = plan_case(case, where.type)
    result = {
        "case": asdict(case),
        "parameters": plan.parameters,
        "refused": not plan.fits,
        "limits": {"driver": plan.budget.gpu, "host": plan.budget.host},
        "choices": asdict(plan.choices),
    }
    if not plan.fits:
        return result
    peak, seconds = train(case, plan, where, steps)
    cuda = where.type == "cuda"
    libraries = plan.host["CUDA and compiler libraries"]
    libraries += plan.host.get("the libraries' forms of the head", 0)
    return result | {
        "predicted": {
            "allocated": plan.allocated_bytes if cuda else None,
            "driver": plan.gpu_bytes if cuda else None,
            "host": plan.host_bytes,
            "seconds": plan.timing.seconds,
        },
        "measured": peak,
        "steps_s": seconds,
        "other": peak["host"] - (plan.host_bytes - libraries),
        "device": plan.device,
        "host": plan.host,
        "working_sets": plan.working_sets,
    }


def train(
    case: Case, plan: Plan, where: torch.device, steps: int
) -> tuple[dict[str, Any], list[float]]:
    """Peaks in bytes with the median seconds of a step, and the seconds of each step."""
    import torch

    from megatrain.engine.engine import Engine
    from megatrain.reporting.meters import GpuMeter, peak_host_bytes

    cuda, seconds = where.type == "cuda", list[float]()
    engine = Engine.from_config(
        case.config(),
        optimizer=optimizer_of(case),
        settings=plan.choices.settings(plan.job),
        precision=case.precision,
        max_grad_norm=1.0 if case.clipping else None,
        device=str(where),
    )
    with engine, GpuMeter(where) as meter:
        for number in range(steps):
            step = batches(case, plan.choices.micro_batch_tokens, number)
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
    return peak, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description="See plan_check.py")
    parser.add_argument("--device", required=True)
    parser.add_argument("--steps", type=int, required=True)
    args = parser.parse_args()
    imported()
    print(json.dumps(measure(Case(**json.loads(sys.stdin.read())), args.device, args.steps)))


if __name__ == "__main__":
    main()
