"""How fast a model trains on this machine: whole optimizer steps over random tokens from random weights, on the path that `train` takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import date
from pathlib import Path

import torch
from rich.console import Console

from megatrain.config import Config
from megatrain.engine.context import deterministic
from megatrain.engine.engine import Engine
from megatrain.losses import next_token
from megatrain.machine.hardware import keep_heap_small
from megatrain.planner.plan import Plan
from megatrain.recipes.bench_result import BenchResult, BenchStep
from megatrain.recipes.describe import choices_in_words, environment_of, facts_of
from megatrain.recipes.setup import (
    Parts,
    assemble,
    find_machine,
    make_engine,
    make_run_plan,
    memory_errors,
    quiet_libraries,
)
from megatrain.recipes.shapes import shape_model
from megatrain.reporting.advice import advise
from megatrain.reporting.meters import GpuMeter, peak_host_bytes
from megatrain.reporting.metrics import StepTime
from megatrain.reporting.mfu import ModelFlops
from megatrain.reporting.progress import logging_on
from megatrain.reporting.summary import Predicted
from megatrain.reporting.tracing import claim, computing_seconds, record_timeline
from megatrain.reporting.words import bound_in_words

LONGEST_TRACED_S = 60.0  # of a step that is run once more to see when kernels run

Batches = list[dict[str, torch.Tensor]]


def bench(
    config: Config,
    *,
    steps: int = 5,
    warmup: int = 2,
    layers: int | None = None,
    same_batch: bool = False,
    profile: Path | None = None,
) -> BenchResult:
    """Time `steps` steps of a run as `config` describes it, after `warmup` untimed ones. What each took goes to stderr.

    Args:
        layers: another depth than the model's own.
        same_batch: train on the first step's tokens in every step, so that the loss must fall.
        profile: file for the timeline of one more step, which Perfetto opens.

    Raises MegaTrainError: PlanError for what does not fit, before anything is allocated.
    """
    quiet_libraries()
    if profile is not None:
        claim(profile)
    console = Console(stderr=True, highlight=False)
    with ExitStack() as stack:
        stack.enter_context(logging_on(console))
        parts = prepare_shape(config, layers)
        plan = make_run_plan(config, parts, checkpoints_written=0)
        plan.check()
        console.print(
            f"{parts.shape.parameters:,} parameters, {choices_in_words(plan, parts)}",
            soft_wrap=True,
        )
        stack.enter_context(memory_errors(plan))
        stack.enter_context(deterministic(config.train.deterministic))
        started = time.perf_counter()
        engine = stack.enter_context(make_engine(config, parts, plan))
        meter = stack.enter_context(GpuMeter(parts.machine.device))
        setup_s = time.perf_counter() - started
        measured = measure(
            engine, config, plan, steps=steps, warmup=warmup, same_batch=same_batch, console=console
        )
        memory = memory_of(engine.device, meter)  # before the profiler takes its own
        steady_s = statistics.median(step.seconds for step in measured[warmup:])
        computing_s = time_computing(engine, config, plan) if steady_s < LONGEST_TRACED_S else None
        if profile is not None:
            show_timeline(engine, config, plan, profile, console)
    return result_of(
        config,
        plan,
        parts,
        measured[:warmup],
        measured[warmup:],
        setup_s=setup_s,
        memory=memory,
        computing_s=computing_s,
    )


def prepare_shape(config: Config, layers: int | None) -> Parts:
    """As `prepare`, for a model of which nothing but its configuration is there."""
    keep_heap_small()
    return assemble(config, shape_model(config, layers), find_machine(config, may_measure=True))


# -- measuring ----------------------------------------------------------------------------------------------------------------------


def measure(
    engine: Engine,
    config: Config,
    plan: Plan,
    *,
    steps: int,
    warmup: int,
    same_batch: bool,
    console: Console,
) -> list[BenchStep]:
    """All steps, those to warm up first. A step's time holds its part of the update of the step before, which is what a long run pays."""
    measured = []
    for number in range(warmup + steps):
        batches = random_batches(
            config, plan, engine.anatomy.vocab_size, 0 if same_batch else number
        )
        started = time.perf_counter()
        result = engine.train_step(batches, next_token, config.train.learning_rate)
        seconds = time.perf_counter() - started
        step = BenchStep(
            seconds, result.loss, result.grad_norm, StepTime.of(seconds, result.stalls_s)
        )
        measured.append(step)
        what = "to warm up" if number < warmup else f"step {number - warmup + 1}/{steps}"
        console.print(
            f"{what}: {seconds:.3f} s, loss {result.loss:.4f}, {bound_in_words(step.time)}"
        )
    return measured


def random_batches(config: Config, plan: Plan, vocab_size: int, seed: int) -> Batches:
    """One step's micro-batches: full rows of tokens that were drawn from `seed`, every one of them a target."""
    seq_len = config.train.seq_len
    rows = config.train.rows_per_step or max(1, plan.job.tokens_per_step // seq_len)
    ids = torch.randint(
        0, vocab_size, (rows, seq_len), generator=torch.Generator().manual_seed(seed)
    )
    parts = torch.split(ids, max(1, plan.choices.micro_batch_tokens // seq_len))
    return [{"input_ids": part, "labels": part} for part in parts]


def one_more(engine: Engine, config: Config, plan: Plan) -> Callable[[], object]:
    """Another step, its tokens drawn already."""
    batches = random_batches(config, plan, engine.anatomy.vocab_size, seed=0)
    return lambda: engine.train_step(batches, next_token, config.train.learning_rate)


def time_computing(engine: Engine, config: Config, plan: Plan) -> float | None:
    """Seconds of one step more in which the GPU runs kernels; None on the CPU, which does nothing else."""
    if engine.device.type != "cuda":
        return None
    return computing_seconds(one_more(engine, config, plan), engine.device)


def show_timeline(engine: Engine, config: Config, plan: Plan, path: Path, console: Console) -> None:
    """Watch one step more. Raises StorageError."""
    step = one_more(engine, config, plan)
    with record_timeline(path, engine.device) as trace:
        step()
    console.print(trace.table, soft_wrap=True, markup=False)
    console.print(
        f"the timeline of a step is in {path}: open it in ui.perfetto.dev", soft_wrap=True
    )


def memory_of(device: torch.device, meter: GpuMeter) -> dict[str, int | None]:
    """Peaks so far, in bytes. Between two looks at the driver PyTorch may have given back what the first step alone took."""
    cuda = device.type == "cuda"
    return {
        "host_bytes": peak_host_bytes(),
        "gpu_peak_bytes": max(meter.peak_bytes() or 0, torch.cuda.max_memory_reserved(device))
        if cuda
        else None,
        "gpu_peak_allocated_bytes": torch.cuda.max_memory_allocated(device) if cuda else None,
        "gpu_peak_reserved_bytes": torch.cuda.max_memory_reserved(device) if cuda else None,
    }


# -- the result ---------------------------------------------------------------------------------------------------------------------


def result_of(
    config: Config,
    plan: Plan,
    parts: Parts,
    warmup_steps: list[BenchStep],
    steps: list[BenchStep],
    *,
    setup_s: float,
    memory: dict[str, int | None],
    computing_s: float | None,
) -> BenchResult:
    """Rates are those of the median step."""
    step_s = statistics.median(step.seconds for step in steps)
    machine, gpu = parts.machine, parts.machine.hardware.gpu
    work, seq_len = ModelFlops.of(parts.skeleton.anatomy, parts.model.config), config.train.seq_len
    tokens = (
        config.train.rows_per_step * seq_len
        if config.train.rows_per_step
        else plan.job.tokens_per_step // seq_len * seq_len
    )
    mfu = work.mfu([seq_len] * (tokens // seq_len), step_s, gpu.name if gpu else None)
    spent = sum((step.time for step in steps), StepTime())
    return BenchResult(
        model=config.model.source,
        parameters=parts.shape.parameters,
        layers=parts.skeleton.anatomy.layers,
        tokens=tokens,
        step_s=Predicted(plan.timing.seconds, step_s),
        tokens_per_s=tokens / step_s,
        tflops=work.tflops(tokens, step_s),
        mfu=mfu,
        gpu_busy=None if computing_s is None else computing_s / step_s,
        time=spent,
        host=Predicted(plan.host_bytes, memory["host_bytes"]),
        gpu=Predicted(plan.gpu_bytes or None, memory["gpu_peak_bytes"]),
        memory=memory,
        advice=advise(spent, facts_of(config, plan, parts), mfu),
        choices=choices_in_words(plan, parts),
        setup_s=setup_s,
        warmup_steps=tuple(warmup_steps),
        steps=tuple(steps),
        plan=plan.to_dict(),
        config=config.model_dump(mode="json"),
        environment={
            "date": date.today().isoformat(),
            "device": machine.device.type,
            "precision": machine.precision,
            **environment_of(parts),
        },
    )
