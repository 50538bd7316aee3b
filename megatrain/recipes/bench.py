"""How fast a model trains on this machine: whole optimizer steps over random tokens from random
weights, on the path that `train` takes, with as many ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import date
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from megatrain.config import Config
from megatrain.engine.context import deterministic
from megatrain.engine.engine import Engine
from megatrain.engine.results import StepResult
from megatrain.errors import ConfigError
from megatrain.losses import next_token
from megatrain.methods import METHODS
from megatrain.planner.plan import Plan
from megatrain.recipes import setup
from megatrain.recipes.bench_result import BenchResult, BenchStep
from megatrain.recipes.describe import choices_in_words, environment_of, facts_of, work_of
from megatrain.recipes.ranks.barrier import check_ranks
from megatrain.recipes.ranks.context_parallel import micro_batch_of, sharing
from megatrain.recipes.ranks.device import bind
from megatrain.recipes.ranks.rendezvous import as_rank
from megatrain.recipes.setup import Parts
from megatrain.recipes.shapes import shape_model
from megatrain.reporting.advice import advise
from megatrain.reporting.meters import GpuMeter, allocator_retries, peak_host_bytes
from megatrain.reporting.metrics import StepTime
from megatrain.reporting.progress import logging_on
from megatrain.reporting.streams import console_on
from megatrain.reporting.summary import Predicted
from megatrain.reporting.tracing import claim, computing_seconds, record_timeline
from megatrain.reporting.words import bound_in_words, human_parameters
from megatrain.world import ALONE, World

LONGEST_TRACED_S = 60.0  # of a step that is run once more to see when kernels run

Batches = list[dict[str, torch.Tensor]]
Step = Callable[[], StepResult]


def bench(
    config: Config,
    *,
    steps: int = 5,
    warmup: int = 2,
    layers: int | None = None,
    same_batch: bool = False,
    profile: Path | None = None,
) -> BenchResult:
    """Time `steps` steps of a run as `config` describes it, after `warmup` untimed ones.

    Each step's time goes to stderr. Of several ranks that a launcher has started all call it, and
    have the same result.

    Args:
        layers: another depth than the model's own.
        same_batch: train on the first step's tokens in every step, so that the loss must fall.
        profile: file for the timeline of one more step, which Perfetto opens.

    Raises MegaTrainError: PlanError for what does not fit, before anything is allocated.
    """
    timed = partial(_bench, config, layers, steps, warmup, same_batch, profile)
    return as_rank(config.device, timed)


def _bench(
    config: Config,
    layers: int | None,
    steps: int,
    warmup: int,
    same_batch: bool,
    profile: Path | None,
    world: World,
) -> BenchResult:
    setup.quiet_libraries()
    profile = profile if world.is_first else None
    if profile is not None:
        claim(profile)
    console = console_on(stderr=True, highlight=False, quiet=not world.is_first)
    with ExitStack() as stack:
        stack.enter_context(logging_on(console))
        parts = prepare_shape(config, layers, world)
        plan = setup.make_run_plan(parts, checkpoints_written=0)
        plan.check()
        model = human_parameters(plan.parameters, plan.active_parameters)
        console.print(f"{model}, {choices_in_words(plan)}", soft_wrap=True)
        stack.enter_context(setup.memory_errors(plan))
        stack.enter_context(deterministic(config.train.deterministic))
        bind(world, parts.machine.device)
        started = time.perf_counter()
        engine = stack.enter_context(setup.make_engine(parts, plan))
        meter = stack.enter_context(GpuMeter(engine.device))
        setup_s = time.perf_counter() - started
        draw = partial(drawn_step, engine, parts.config, plan)
        measured = measure(draw, warmup, steps, same_batch, console)
        memory = of_all(engine.world, memory_of(engine, meter))  # before the profiler's own
        computing_s = None
        steady_s = statistics.median(step.seconds for step in measured[warmup:])
        if engine.device.type == "cuda" and engine.world.told(steady_s) < LONGEST_TRACED_S:
            computing_s = computing_seconds(draw(0), engine.device)
        if engine.world.told(profile is not None):
            traced(draw(0), profile, engine.device, console)
    return result_of(parts, plan, measured, warmup, setup_s, memory, computing_s)


def traced(step: Step, profile: Path | None, device: torch.device, console: Console) -> None:
    """Make one more step, and write its timeline. None: another rank's is written."""
    if profile is None:
        step()
        return
    with record_timeline(profile, device) as trace:
        step()
    console.print(trace.table, soft_wrap=True, markup=False)
    where = f"the timeline of a step is in {profile}"
    console.print(f"{where}: open it in ui.perfetto.dev", soft_wrap=True)


def prepare_shape(config: Config, layers: int | None, world: World = ALONE) -> Parts:
    """`prepare` for a model that has a configuration, but no files. Raises ConfigError."""
    if METHODS[config.method].scores:
        raise ConfigError(
            f"{config.where('method')}: bench times steps of a language model; set method: sft, of "
            "which the layers are the same"
        )
    check_ranks(config, world)
    world = sharing(config, world)
    return setup.prepare(config, shape_model(config, layers), may_measure=True, world=world)


def drawn_step(engine: Engine, config: Config, plan: Plan, seed: int) -> Step:
    """A step whose tokens are drawn already, to be made by calling it."""
    batches = random_batches(config, plan, engine, seed)
    return lambda: engine.train_step(batches, next_token, config.train.learning_rate)


def random_batches(config: Config, plan: Plan, engine: Engine, seed: int) -> Batches:
    """This rank's micro-batches of a step: full rows of tokens drawn from `seed`, all targets."""
    seq_len, world = config.train.seq_len, engine.world
    generator = torch.Generator().manual_seed(seed)
    shape = rows_of(config, plan), seq_len
    ids = torch.randint(0, engine.anatomy.vocab_size, shape, generator=generator)
    rows = max(1, micro_batch_of(config, plan) // seq_len)
    parts = torch.split(ids[world.team :: world.teams], rows)
    return [{"input_ids": part, "labels": part} for part in parts]


def rows_of(config: Config, plan: Plan) -> int:
    """Rows of a step, of all ranks."""
    train = config.train
    return train.rows_per_step or max(1, plan.job.tokens_per_step // train.seq_len)


def measure(
    draw: Callable[[int], Step], warmup: int, steps: int, same_batch: bool, console: Console
) -> list[BenchStep]:
    """All steps, the untimed ones first.

    A step's time holds its part of the update of the step before, as in a long run.
    """
    measured = []
    for number in range(warmup + steps):
        step = draw(0 if same_batch else number)
        retries, started = allocator_retries(), time.perf_counter()
        result = step()
        seconds = time.perf_counter() - started
        spent, retries = StepTime.of(seconds, result.stalls_s), allocator_retries() - retries
        measured.append(BenchStep(seconds, result.loss, result.grad_norm, spent, retries))
        what = "to warm up" if number < warmup else f"step {number - warmup + 1}/{steps}"
        found = f"{seconds:.3f} s, loss {result.loss:.4f}, {bound_in_words(spent)}"
        console.print(f"{what}: {found}")
    return measured


def memory_of(engine: Engine, meter: GpuMeter) -> dict[str, int | None]:
    """Peaks so far, in bytes."""
    device = engine.device
    allocated = reserved = peak = None
    if device.type == "cuda":
        allocated = torch.cuda.max_memory_allocated(device)
        reserved = torch.cuda.max_memory_reserved(device)
        # between two readings of the driver PyTorch may have given back what one step took
        peak = max(meter.peak_bytes() or 0, reserved)
    return {
        "host_bytes": peak_host_bytes(engine.world.local_size),
        "gpu_peak_bytes": peak,
        "gpu_peak_allocated_bytes": allocated,
        "gpu_peak_reserved_bytes": reserved,
    }


def of_all(world: World, mine: dict[str, int | None]) -> dict[str, int | None]:
    """The memory of a host's ranks together, and the most that is taken of a GPU."""
    every = world.every(mine)
    found = {name: max((one[name] or 0 for one in every), default=0) for name in mine}
    host = sum(one["host_bytes"] or 0 for one in every) // world.hosts
    return {name: found[name] or None for name in mine} | {"host_bytes": host}


def result_of(
    parts: Parts,
    plan: Plan,
    measured: list[BenchStep],
    warmup: int,
    setup_s: float,
    memory: dict[str, int | None],
    computing_s: float | None,
) -> BenchResult:
    """Rates are those of the median step."""
    config, machine, anatomy = parts.config, parts.machine, parts.resolved.skeleton.anatomy
    steps, gpu, seq_len = measured[warmup:], machine.hardware.gpu, config.train.seq_len
    step_s = statistics.median(step.seconds for step in steps)
    rows, ranks = rows_of(config, plan), plan.job.size
    tokens, shape = rows * seq_len, parts.resolved.shape
    work = work_of(parts)
    mfu = work.mfu([seq_len] * rows, step_s * ranks, gpu.name if gpu else None)
    spent = sum((step.time for step in steps), StepTime())
    used = {"device": machine.device.type, "precision": machine.precision}
    return BenchResult(
        model=config.model.source,
        parameters=shape.parameters,
        active_parameters=shape.active_parameters,
        layers=anatomy.layers,
        tokens=tokens,
        step_s=Predicted(plan.timing.seconds, step_s),
        tokens_per_s=tokens / step_s,
        tflops=work.tflops(tokens, step_s * ranks),
        mfu=mfu,
        gpu_busy=None if computing_s is None else computing_s / step_s,
        time=spent,
        host=Predicted(plan.host_bytes * plan.job.ranks, memory["host_bytes"]),
        gpu=Predicted(plan.gpu_bytes or None, memory["gpu_peak_bytes"]),
        memory=memory,
        advice=advise(spent, facts_of(parts, plan), mfu),
        choices=choices_in_words(plan),
        ranks=ranks,
        setup_s=setup_s,
        warmup_steps=tuple(measured[:warmup]),
        steps=tuple(steps),
        plan=plan.to_dict(),
        config=config.model_dump(mode="json"),
        environment={"date": date.today().isoformat(), **used, **environment_of(machine)},
    )
