"""From a plan to a run: weights or a checkpoint are loaded, and what is written to is opened."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatrain.config import Config
from megatrain.config.resuming import check_changes, for_state, resumed_configs
from megatrain.data.dataset import Rows
from megatrain.data.loader import Loader
from megatrain.engine.engine import Engine
from megatrain.heartbeat import BYTES_READ, WEIGHTS_READ, may_end_here
from megatrain.planner.plan import Plan
from megatrain.recipes import setup
from megatrain.recipes.describe import (
    decided,
    decided_for_ranks,
    describe_run,
    facts_of,
    work_of,
)
from megatrain.recipes.loop import BEGINNING, Run, still_to_come
from megatrain.recipes.reference import (
    References,
    are_kept,
    check_references,
    compare_with_reference,
    known_reference,
    refers,
    wanted_by,
)
from megatrain.recipes.report import LiveReport
from megatrain.recipes.sample import EvalPrompt
from megatrain.recipes.setup import Parts
from megatrain.reporting.energy import EnergyMeter
from megatrain.reporting.meters import GpuMeter
from megatrain.reporting.metrics import (
    MetricsWriter,
    NoMetrics,
    Spikes,
    cut_samples,
    read_metrics,
)
from megatrain.reporting.progress import Progress
from megatrain.reporting.trackers import tracking
from megatrain.storage.checkpoint import reopen
from megatrain.storage.restore import Resumable, load_resumable
from megatrain.storage.run_folder import RunLock, checkpoint_name, folder_bytes
from megatrain.storage.saves import newer_than
from megatrain.world import World

logger = logging.getLogger("megatrain")


@dataclass(frozen=True)
class Ready:
    """A run that is known to fit, before anything large is loaded."""

    parts: Parts
    plan: Plan
    loader: Loader
    held_out: Rows | None
    prompts: Sequence[EvalPrompt]  # that evaluations answer

    @property
    def rows(self) -> tuple[Rows, Rows | None]:
        """To train on, and held out."""
        return self.loader.rows, self.held_out

    @property
    def sweep_tokens(self) -> int:
        """Padded tokens that a rank computes in one sweep of the weights where nothing is trained:
        as many as in one of a step's."""
        return self.plan.job.rank_tokens // self.plan.choices.groups


def load(
    ready: Ready, engine: Engine, resuming: Resumable, progress: Progress
) -> tuple[Path, dict[str, Any]]:
    """Load the checkpoint to go on from; (its folder, what was saved).

    Raises StorageError, and DataError if the rows are others.
    """
    config = ready.parts.config
    size = folder_bytes(resuming.path) if resuming.path else None
    with progress.doing("reading the checkpoint", total=size, counted=BYTES_READ):
        source, state = load_resumable(config.output, engine, resuming)
    may_end_here()
    if source != resuming.path:  # which may have been saved under another config
        before, _ = resumed_configs(config.output, config, state)
        for change in check_changes(before, config):
            logger.warning(change)
    ready.loader.restore(state.pop("position"))
    check_references(ready.loader, source)
    # only now: before this nothing in the folder has changed
    engine.world.first(partial(reopen, config.output, source))
    if "loss" in state["best"]:  # of a release that knew no other figure
        state["best"]["eval_loss"] = state["best"].pop("loss")
    best = config.output / checkpoint_name(state["best"].get("step", -1))
    if not engine.world.told(best.is_dir()):
        state["best"] = {}  # another may be the best of what is there
    return config.output / checkpoint_name(state["step"]), state  # `final/` is one by now


def open_engine(
    ready: Ready, progress: Progress, stack: ExitStack, resuming: Resumable | None
) -> tuple[Engine, References | None]:
    """The engine with its first weights, or without any where a checkpoint follows; and what a
    method with a reference compares with."""
    parts, plan = ready.parts, ready.plan
    read = parts.config.model.init == "pretrained" and resuming is None
    weights = plan.parameters + plan.frozen_parameters if read else None
    of_model = known_reference(ready, resuming)
    wanted = wanted_by(ready, resuming) if refers(ready) else ()
    here = of_model is None or are_kept(of_model, wanted)
    anew = resuming is None or not parts.machine.world.told(here)  # the first rank's cache counts
    with progress.doing("preparing the weights", total=weights, counted=WEIGHTS_READ):
        engine = stack.enter_context(setup.make_engine(parts, plan, load=anew))
    return engine, compare_with_reference(ready, engine, of_model, wanted, anew, progress)


def open_metrics(
    config: Config, plan: Plan, state: dict[str, Any], stack: ExitStack, world: World
) -> tuple[MetricsWriter, LiveReport]:
    """The file of metrics, cut back to where the run goes on, whose lines trackers get, too, and
    the report, which is written last however the run ends. Only the first rank writes."""
    # a run that begins with step 0 begins with an evaluation
    step = state["step"] or -1
    about = {"config": config.model_dump(mode="json"), "plan": plan.to_dict()}
    if not world.is_first:
        world.every(None)  # now the file is cut back
        return NoMetrics(config.output), LiveReport(None)
    track = stack.enter_context(tracking(config.track, config.output, state["step"], about))
    report = LiveReport(config.output)
    writer = stack.enter_context(MetricsWriter(config.output, (track, report.add)))
    writer.truncate_to(step, state.get("metrics"))
    cut_samples(config.output, step)
    world.every(None)
    report.begin()
    stack.callback(report.write, last=True)
    return writer, report


def open_run(
    ready: Ready,
    lock: RunLock | None,
    progress: Progress,
    stack: ExitStack,
    resuming: Resumable | None,
) -> Run:
    """Load the model, or a checkpoint, and open what the loop writes to; `stack` closes it all.

    What was decided is written into the run folder; on resuming not before it is known that the run
    can go on.
    """
    parts, plan, loader, config = ready.parts, ready.plan, ready.loader, ready.parts.config
    if resuming is None:
        describe_run(parts, plan)
    may_end_here()
    engine, references = open_engine(ready, progress, stack, resuming)
    state, source = dict(BEGINNING), None
    if resuming is not None:
        source, state = load(ready, engine, resuming, progress)
        describe_run(parts, plan)
    named = resuming is not None and resuming.named
    digest, kept = ready.held_out.digest if ready.held_out else None, decided_for_ranks(plan)
    kept |= {"held_out": digest} | ({"reference": references.of_model} if references else {})
    evaluates = ready.held_out is not None or bool(ready.prompts)
    total, gpu, step = loader.steps_total(), parts.machine.hardware.gpu, state["step"]
    progress.begin(total, step, partial(still_to_come, config, evaluates, total))
    meter = stack.enter_context(GpuMeter(parts.machine.device))
    writer, report = open_metrics(config, plan, state, stack, parts.machine.world)
    return Run(
        config=config,
        model=parts.model,
        engine=engine,
        loss=parts.resolved.loss,
        loader=loader,
        held_out=ready.held_out,
        held_out_references=references.held_out if references else None,
        sweep_tokens=ready.sweep_tokens,
        writer=writer,
        report=report,
        progress=progress,
        meter=meter,
        energy=EnergyMeter(meter),
        work=work_of(parts),
        gpu_name=gpu.name if gpu else None,
        total_steps=total,
        recent=Spikes(read_metrics(config.output)),
        unproven=source,
        abandoned=newer_than(config.output, source) if named and source else [],
        facts=facts_of(parts, plan, resumed=resuming is not None),
        first_step=step,
        prompts=ready.prompts,
        lock=lock,
        describe=partial(describe_run, parts, plan),
        asked=for_state(config, decided(parts, plan)) | kept,
        first_tokens=state["tokens"],
        **{name: state[name] for name in BEGINNING},
    )
