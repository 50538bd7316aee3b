"""A run from its beginning, or from where it was left: what `train`, `resume` and `plan` do."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import Any

from rich.console import Console

from megatrain.config import Config
from megatrain.config.resuming import check_changes, resumed_configs
from megatrain.data.dataset import Rows
from megatrain.data.loader import Loader
from megatrain.data.show import describe
from megatrain.engine.context import deterministic
from megatrain.engine.resolved import Machine
from megatrain.errors import ConfigError
from megatrain.machine.hardware import keep_heap_small
from megatrain.planner.job import StepTokens
from megatrain.planner.plan import Plan
from megatrain.recipes.describe import describe_run, facts_of, summarize, summarize_finished
from megatrain.recipes.loop import Run, fit
from megatrain.recipes.rows import make_loader, read_rows
from megatrain.recipes.setup import (
    Parts,
    assemble,
    find_machine,
    make_engine,
    make_run_plan,
    memory_errors,
    micro_batch_tokens,
    prepare,
    quiet_libraries,
    read_model,
)
from megatrain.recipes.shapes import shape_model
from megatrain.recipes.signals import stop_requests
from megatrain.reporting.energy import EnergyMeter
from megatrain.reporting.meters import GpuMeter
from megatrain.reporting.metrics import MetricsWriter
from megatrain.reporting.mfu import ModelFlops
from megatrain.reporting.progress import Progress, logging_to
from megatrain.reporting.summary import RunSummary
from megatrain.reporting.tracing import claim
from megatrain.storage.checkpoint import reopen
from megatrain.storage.restore import Resumable, find_resumable, load_resumable, nothing_to_resume
from megatrain.storage.run_folder import RunLock, checkpoints

logger = logging.getLogger("megatrain")


@dataclass(frozen=True)
class Ready:
    """A run that is known to fit, before anything large is loaded."""

    config: Config
    parts: Parts
    plan: Plan
    loader: Loader
    held_out: Rows | None


def plan(config: Config, machine: Machine | None = None, shape_alone: bool = False) -> Plan:
    """The plan of a config's run. Loads no weights and touches no GPU. Raises MegaTrainError.

    machine: another than this one. shape_alone: of the model nothing but its configuration is there, or
        its name (models/shapes.py).
    """
    quiet_libraries()
    keep_heap_small()
    model = shape_model(config) if shape_alone else read_model(config)
    return make_run_plan(
        config,
        assemble(config, model, machine or find_machine(config)),
        steps=config.train.max_steps if config.train.epochs is None else None,
        suggest=True,
    )


def train(config: Config, profile: Path | None = None) -> RunSummary:
    """Run a config from its first step. Raises MegaTrainError; on one, everything saved before stays.

    profile: file for the timeline of one steady step, which Perfetto opens.
    """
    if profile is not None:
        claim(profile)
    with run_folder(config.output) as console:
        if checkpoints(config.output) or (config.output / "final").exists():
            raise ConfigError(
                f"{config.where('output')}: {config.output} holds a run already; continue it with `megatrain resume {config.output}`, "
                "or choose another folder"
            )
        return _run(get_ready(config), console, resuming=None, profile=profile)


def resume(run_dir: str | Path, overrides: Sequence[str] | Mapping[str, Any] = ()) -> RunSummary:
    """Continue a run from its newest intact checkpoint, bit for bit. Some keys may be changed: see config/resuming.py."""
    run_dir = Path(run_dir)
    before, config = resumed_configs(run_dir, overrides)
    warnings = check_changes(before, config)
    with run_folder(run_dir) as console:
        finished = (run_dir / "final").is_dir() and config == before
        found = find_resumable(
            run_dir, deep=finished
        )  # of any other, every byte is checked when it is loaded
        for warning in (*warnings, *found.warnings):
            logger.warning(warning)
        if found.path is None:
            raise nothing_to_resume(run_dir)
        if finished and not found.warnings:
            logger.info(
                f"{run_dir} is finished, nothing is left to train; to go on, set a higher train.epochs or train.max_steps"
            )
            return summarize_finished(run_dir)
        return _run(get_ready(config), console, found)


@contextmanager
def run_folder(path: Path) -> Iterator[Console]:
    """The run folder, ours alone while the block lasts; the log goes to its train.log and to the console on stderr, which is yielded."""
    console = Console(stderr=True)
    with RunLock(path), logging_to(path, console):
        quiet_libraries()
        yield console


def get_ready(config: Config) -> Ready:
    """Read the rows, decide what is open. Raises PlanError for what does not fit, before the weights are read."""
    parts = prepare(config, may_measure=True)
    make_run_plan(
        config, parts, checkpoints_written=1
    ).check()  # before the rows are read, too, which may take long
    rows, held_out = read_rows(config, parts.model)
    for line in describe(rows):
        logger.info(line)
    if held_out is not None:
        logger.info(f"{len(held_out):,} rows are held out for evaluation")
    plan, loader = plan_and_loader(config, parts, rows)
    plan.check()
    return Ready(config, parts, plan, loader, held_out)


def plan_and_loader(config: Config, parts: Parts, rows: Rows) -> tuple[Plan, Loader]:
    """The plan, now that it is known how many checkpoints there are and how much padding, and the loader with its micro-batch."""
    loader_of = partial(make_loader, config, parts.model, rows, pack_to=parts.resolved.packed_to)
    loader = loader_of(
        micro_batch_tokens=config.train.seq_len
    )  # no row is longer; micro-batches are the plan's
    steps, every = loader.steps_total(), config.checkpoint.every
    plan = make_run_plan(
        config,
        knowing_rows(config, parts, loader),
        1 if every is None else -(-steps // every),
        steps,
    )
    return plan, loader_of(micro_batch_tokens=plan.choices.micro_batch_tokens)


def knowing_rows(config: Config, parts: Parts, loader: Loader) -> Parts:
    """The same with what the lengths of the loader's rows say, where these do not all fill their sequences."""
    if loader.pack_to is None and not parts.resolved.lengths_vary:
        return parts
    sizes = sorted({*parts.shape.layer.sizes, micro_batch_tokens(config) or config.train.seq_len})
    return replace(parts, step_tokens=tuple(starmap(StepTokens, loader.step_tokens(sizes))))


def _run(
    ready: Ready, console: Console, resuming: Resumable | None, profile: Path | None = None
) -> RunSummary:
    """Load, train, and say what became of it."""
    started = time.perf_counter()
    with (
        ExitStack() as stack,
        memory_errors(ready.plan),
        deterministic(ready.config.train.deterministic),
    ):
        run = open_run(ready, console, stack, resuming)
        run.watch(profile)
        begun = run.step, run.tokens
        with run.progress, stop_requests() as stop:
            done = fit(run, stop)
        seconds = time.perf_counter() - started
        return summarize(
            run,
            ready.plan,
            steps=run.step - begun[0],
            tokens=run.tokens - begun[1],
            seconds=seconds,
            stop=None if done else stop,
        )


def open_run(ready: Ready, console: Console, stack: ExitStack, resuming: Resumable | None) -> Run:
    """Load the model, or a checkpoint, and open what the loop writes to; `stack` closes it all. What was decided is written into the run
    folder; on resuming not before it is known that the run can go on, and then `final/` is no longer its end."""
    config, parts, plan, loader = ready.config, ready.parts, ready.plan, ready.loader
    if resuming is None:
        logger.info(describe_run(config, plan, parts))
    engine = stack.enter_context(make_engine(config, parts, plan, load=resuming is None))
    state: dict[str, Any] = {"step": 0, "tokens": 0, "best": {}, "non_finite": 0}
    if resuming is not None:
        source, state = load_resumable(config.output, engine, resuming)
        loader.restore(state.pop("position"))
        reopen(config.output, source)
        logger.info(describe_run(config, plan, parts))
    total, meter = loader.steps_total(), stack.enter_context(GpuMeter(parts.machine.device))
    writer = stack.enter_context(MetricsWriter(config.output))
    writer.truncate_to(
        state["step"] or -1
    )  # a run that begins with step 0 begins with an evaluation
    return Run(
        config=config,
        run_dir=config.output,
        model=parts.model,
        engine=engine,
        loader=loader,
        held_out=ready.held_out,
        micro_batch_tokens=plan.choices.micro_batch_tokens,
        sweep_tokens=plan.job.tokens_per_step // plan.choices.groups,
        writer=writer,
        progress=Progress(
            console, total_steps=total, first_step=state["step"], log_every=config.train.log_every
        ),
        meter=meter,
        energy=EnergyMeter(meter),
        work=ModelFlops.of(parts.skeleton.anatomy, parts.model.config),
        gpu_name=parts.machine.hardware.gpu.name if parts.machine.hardware.gpu else None,
        total_steps=total,
        facts=facts_of(config, plan, parts, resumed=resuming is not None),
        first_tokens=state["tokens"],
        **state,
    )
