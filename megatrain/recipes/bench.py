"""The speed of a model on this machine: whole optimizer steps over random tokens from random
weights, on the path that `train` takes, with as many ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from rich.console import Console

from megatrain.config import Config
from megatrain.engine.components import deterministic
from megatrain.engine.engine import Engine
from megatrain.engine.objective import StepResult
from megatrain.engine.resolved import Resolved
from megatrain.errors import ConfigError
from megatrain.losses import next_token
from megatrain.machine.profile import keep_ratio
from megatrain.methods import METHODS
from megatrain.planner.plan import Plan
from megatrain.recipes import setup
from megatrain.recipes.describe import choices_in_words, described_environment, facts_of, work_of
from megatrain.recipes.doctor import find_machine
from megatrain.recipes.model import shape_model, suited
from megatrain.recipes.ranks.rendezvous import as_rank, bind, check_ranks
from megatrain.reporting.meters import GpuMeter, allocator_retries, peak_host_bytes
from megatrain.reporting.metrics import StepTime
from megatrain.reporting.progress import logging_on
from megatrain.reporting.streams import console_on
from megatrain.reporting.summary import (
    Predicted,
    advise,
    bound_in_words,
    print_rows,
    step_seconds,
    time_in_words,
)
from megatrain.reporting.tracing import claim, computing_seconds, record_timeline
from megatrain.reporting.words import human_bytes, human_parameters, human_seconds
from megatrain.world import ALONE, World

LONGEST_TRACED_S = 60.0  # of a step that is run once more to see when kernels run

Step = Callable[[], StepResult]


@dataclass(frozen=True)
class BenchStep:
    """One measured step. retries: of the GPU's allocator (`meters.allocator_retries`)."""

    seconds: float
    loss: float
    grad_norm: float | None
    time: StepTime
    retries: int


@dataclass(frozen=True)
class BenchResult:
    """The measured steps of a plan. Rates are those of the median step."""

    config: Config
    plan: Plan
    warmup_steps: tuple[BenchStep, ...]
    steps: tuple[BenchStep, ...]
    setup_s: float  # to allocate, pin and draw the weights
    memory: dict[str, int | None]  # peaks as counted, in bytes
    computing_s: float | None  # in which kernels run in one more step; None: not measured
    exit_code: ClassVar[int] = 0

    @property
    def step_s(self) -> Predicted:
        median = statistics.median(step.seconds for step in self.steps)
        return Predicted(self.plan.timing.seconds, median)

    @property
    def host(self) -> Predicted:
        """Bytes of a whole host."""
        return Predicted(self.plan.host_bytes * self.plan.job.ranks, self.memory["host_bytes"])

    @property
    def gpu(self) -> Predicted:
        """Bytes of that GPU of which most is taken."""
        return Predicted(self.plan.gpu_bytes or None, self.memory["gpu_peak_bytes"])

    @property
    def time(self) -> StepTime:
        """Seconds of all measured steps by phase, on the first rank."""
        return sum((step.time for step in self.steps), StepTime())

    def to_dict(self) -> dict[str, Any]:
        """JSON-able. `step_s` is the measured figure, predictions stand under `predicted`."""
        config, plan, spent, work = self.config, self.plan, self.time, work_of(self.plan)
        resolved: Resolved = plan.made_of
        machine, shape, ranks = resolved.machine, resolved.shape, plan.job.size
        gpu, rows, seq_len = machine.hardware.gpu, _rows_of(config, plan), config.train.seq_len
        tokens, seconds = rows * seq_len, self.step_s.measured or 0.0
        mfu = work.mfu([seq_len] * rows, seconds * ranks, gpu.name if gpu else None)
        planned = {"step_s": self.step_s, "host_bytes": self.host, "gpu_peak_bytes": self.gpu}
        used = {"device": machine.device.type, "precision": machine.precision}
        today = date.today().isoformat()
        return {
            "model": config.model.source,
            "parameters": shape.parameters,
            "active_parameters": shape.active_parameters,  # that act on a token: fewer in a mixture
            "layers": resolved.skeleton.anatomy.layers,
            "tokens": tokens,  # of a step, all of them real
            "step_s": seconds,
            "tokens_per_s": tokens / seconds,
            "tflops": work.tflops(tokens, seconds * ranks),  # of each rank
            "mfu": mfu,  # of each rank; None where the device's peak is unknown
            "gpu_busy": None if self.computing_s is None else self.computing_s / seconds,
            "time": asdict(spent),
            "advice": advise(spent, facts_of(config, plan), mfu, step_s=seconds),
            "choices": choices_in_words(plan),
            "ranks": ranks,
            "setup_s": self.setup_s,
            "warmup_steps": list(map(asdict, self.warmup_steps)),
            "steps": list(map(asdict, self.steps)),
            "plan": plan.to_dict(),
            "config": config.model_dump(mode="json"),
            "environment": {"date": today, **used, **described_environment(machine)},
            "shares": spent.shares(),
            **self.memory,
            "predicted": {name: figure.predicted for name, figure in planned.items()},
            "error": {name: figure.error for name, figure in planned.items()},
        }

    def render(self, console: Console) -> None:
        """Print the figures and the advice."""
        print_rows(console, self.config.model.source, self._rows(self.to_dict()))

    def _rows(self, found: dict[str, Any]) -> list[tuple[str, str]]:
        seconds, mfu, gpu_busy = [s.seconds for s in self.steps], found["mfu"], found["gpu_busy"]
        spread = f"median of {len(seconds)}, {min(seconds):.3g} to {max(seconds):.3g}"
        each = f" each of {found['ranks']} GPUs" if found["ranks"] > 1 else ""
        rates = f"{found['tflops']:,.3g} TFLOP/s{each}, {found['tokens_per_s']:,.0f} tokens/s"
        peak = "" if mfu is None else f", {mfu:.0%} of the GPU's peak"
        busy = "" if gpu_busy is None else f"; kernels run {gpu_busy:.1%} of it"
        parameters = human_parameters(found["parameters"], found["active_parameters"])
        timing = found["plan"]["timing"]
        planned, bounds = timing["phases"].items(), timing["bound_by"]
        phases = [f"{name} {s:.3g} s ({bounds[name]})" for name, s in planned if s]
        first, last = (*self.warmup_steps, *self.steps)[0], self.steps[-1]
        rows = [
            ("model", f"{parameters}, {found['layers']} layers"),
            ("run", f"{found['tokens']:,} tokens per step, {found['choices']}"),
            ("step", f"{self.step_s.words(step_seconds)}; {spread}"),
            ("loss", f"{first.loss:.4f} in the first step, {last.loss:.4f} in the last"),
            ("rate", rates + peak),
            ("time", time_in_words(self.time) + busy),
            ("planned", ", ".join(phases)),
            ("host memory", self.host.words(human_bytes)),
        ]
        if self.gpu.measured is not None:
            retries = sum(step.retries for step in self.steps)
            full = f"; {retries} times it was full, and cached memory was given back"
            rows.append(("GPU memory", self.gpu.words(human_bytes) + full * bool(retries)))
        return [*rows, ("start-up", human_seconds(self.setup_s)), ("advice", found["advice"])]


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

    All ranks that a launcher has started call it.

    Args:
        layers: another depth than the model's own.
        same_batch: train on the first step's tokens in every step, so that the loss must fall.
        profile: file for the timeline of one more step, which Perfetto opens.

    Raises MegaTrainError: PlanError for what does not fit, before anything is allocated.
    """

    def timed(world: World) -> BenchResult:
        setup.quiet_libraries()
        traced = profile if world.is_first else None
        if traced is not None:
            claim(traced)
        console = console_on(stderr=True, highlight=False, quiet=not world.is_first)
        with ExitStack() as stack:
            stack.enter_context(logging_on(console))
            resolved = resolve_shape(config, layers, world)
            plan = setup.plan_run(config, resolved, checkpoints_written=0)
            plan.check()
            model = human_parameters(plan.parameters, plan.active_parameters)
            console.print(f"{model}, {choices_in_words(plan)}", soft_wrap=True)
            stack.enter_context(setup.memory_errors(plan))
            stack.enter_context(deterministic(config.train.deterministic))
            bind(world, resolved.machine.device)
            started = time.perf_counter()
            engine = stack.enter_context(Engine.open_plan(plan))
            meter = stack.enter_context(GpuMeter(engine.device))
            setup_s = time.perf_counter() - started
            draw = partial(drawn_step, engine, config, plan)
            measured = _measure(draw, warmup, steps, same_batch, console)
            memory = memory_of(engine, meter)  # before the profiler's own
            computing_s = None
            steady_s = statistics.median(step.seconds for step in measured[warmup:])
            if engine.device.type == "cuda" and engine.world.broadcast(steady_s) < LONGEST_TRACED_S:
                computing_s = computing_seconds(draw(0), engine.device)
            if engine.world.broadcast(traced is not None):
                show = partial(console.print, soft_wrap=True, markup=False)
                about = engine.device, "a step", show
                with record_timeline(traced, *about) if traced else nullcontext():
                    draw(0)()
        parts = tuple(measured[:warmup]), tuple(measured[warmup:])
        found = BenchResult(config, plan, *parts, setup_s, memory, computing_s)
        if not plan.job.besides:
            keep_ratio(plan.made_of.machine.profile, plan.timing.seconds, found.step_s.measured)
        return found

    return as_rank(config.device, timed)


def resolve_shape(config: Config, layers: int | None, world: World = ALONE) -> Resolved:
    """Resolve the config's run for a model without files. Raises ConfigError."""
    if METHODS[config.method].scores:
        raise ConfigError(
            f"{config.where('method')}: bench times steps of a language model; set method: sft, of "
            "which the layers are the same"
        )
    check_ranks(config, world)
    world = setup.sharing(config, world)
    model = suited(shape_model(config, layers), config)
    return setup.resolve_run(config, model, find_machine(config, may_measure=True, world=world))


def drawn_step(engine: Engine, config: Config, plan: Plan, seed: int) -> Step:
    """A step of full rows of tokens drawn from `seed`, all targets, to be made by calling it."""
    seq_len, world = config.train.seq_len, engine.world
    generator = torch.Generator().manual_seed(seed)
    shape = _rows_of(config, plan), seq_len
    ids = torch.randint(0, engine.anatomy.vocab_size, shape, generator=generator)
    rows = max(1, setup.micro_batch_of(config, plan) // seq_len)
    parts = torch.split(ids[world.dp_rank :: world.dp_size], rows)
    batches = [{"input_ids": part, "labels": part} for part in parts]
    return lambda: engine.train_step(batches, next_token, config.train.learning_rate)


def _rows_of(config: Config, plan: Plan) -> int:
    """Rows of a step, of all ranks."""
    train = config.train
    return train.rows_per_step or max(1, plan.job.tokens_per_step // train.seq_len)


def _measure(
    draw: Callable[[int], Step], warmup: int, steps: int, same_batch: bool, console: Console
) -> list[BenchStep]:
    """All steps, the untimed ones first. A step's time holds the update of the one before."""
    measured = []
    for number in range(warmup + steps):
        step = draw(0 if same_batch else number)
        retries, started = allocator_retries(), time.perf_counter()
        result = step()
        seconds = time.perf_counter() - started
        spent, retries = StepTime.of(seconds, result.stalls_s), allocator_retries() - retries
        measured.append(BenchStep(seconds, result.loss, result.grad_norm, spent, retries))
        what = "to warm up" if number < warmup else f"step {number - warmup + 1}/{steps}"
        bound = bound_in_words(spent)
        console.print(f"{what}: {seconds:.3f} s, loss {result.loss:.4f}, {bound}")
    return measured


def memory_of(engine: Engine, meter: GpuMeter) -> dict[str, int | None]:
    """Peaks so far, in bytes: of a whole host's RAM, and of that GPU of which most is taken."""
    device, world = engine.device, engine.world
    allocated = reserved = peak = 0
    if device.type == "cuda":
        allocated = torch.cuda.max_memory_allocated(device)
        reserved = torch.cuda.max_memory_reserved(device)
        # between two readings of the driver PyTorch may have given back what one step took
        peak = max(meter.peak_bytes() or 0, reserved)
    gpu = {"gpu_peak_bytes": peak, "gpu_peak_allocated_bytes": allocated}
    gpu |= {"gpu_peak_reserved_bytes": reserved}
    hosts, gpus = zip(*world.all_gather((peak_host_bytes(world.local_size), gpu)), strict=True)
    most = {name: max(one[name] for one in gpus) or None for name in gpu}
    return {"host_bytes": sum(hosts) // world.hosts, **most}
