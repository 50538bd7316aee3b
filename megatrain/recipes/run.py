"""A run from its beginning, or from where it was left: what `train`, `resume` and `plan` do."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import Any

from megatrain.config import Config
from megatrain.config.evaluating import check_lm_eval
from megatrain.config.resuming import asked_again, check_changes, for_state, resumed_configs
from megatrain.data.build import Expected
from megatrain.data.dataset import Rows
from megatrain.data.loader import Loader, Windows
from megatrain.engine.context import deterministic
from megatrain.engine.engine import Engine
from megatrain.errors import ConfigError
from megatrain.heartbeat import BYTES_READ, WEIGHTS_READ, may_end_here
from megatrain.losses import SequenceLoss
from megatrain.machine.address_space import address_space_errors
from megatrain.models.passengers import without_source
from megatrain.models.rotary import regimes_of
from megatrain.planner.job import StepTokens
from megatrain.planner.plan import Plan
from megatrain.recipes import setup
from megatrain.recipes.another_machine import another_machine
from megatrain.recipes.describe import (
    decided,
    describe_run,
    facts_of,
    other_versions,
    summarize,
    work_of,
)
from megatrain.recipes.examination import Examination, open_examination
from megatrain.recipes.going_on import final_is_whole, where_to_go_on
from megatrain.recipes.judging import greater_is_better
from megatrain.recipes.loop import BEGINNING, Run, fit, still_to_come
from megatrain.recipes.model import Model, check_weights
from megatrain.recipes.opened import Opened, in_run_folder
from megatrain.recipes.place import check_links, check_place
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
from megatrain.recipes.rows import open_rows, say_rows, say_steps
from megatrain.recipes.sample import check_sample_prompt
from megatrain.recipes.setup import Parts
from megatrain.recipes.shapes import shape_model
from megatrain.recipes.together import beside_others
from megatrain.recipes.verify import check_once
from megatrain.reporting.energy import EnergyMeter
from megatrain.reporting.meters import GpuMeter
from megatrain.reporting.metrics import MetricsWriter, held_out_losses, read_metrics
from megatrain.reporting.progress import Progress
from megatrain.reporting.samples import cut_samples
from megatrain.reporting.spikes import Spikes
from megatrain.reporting.summary import RunSummary
from megatrain.reporting.tracing import claim
from megatrain.reporting.trackers import check_installed, tracking
from megatrain.storage.checkpoint import reopen
from megatrain.storage.restore import Resumable, load_resumable
from megatrain.storage.run_folder import RunLock, checkpoint_name, checkpoints, folder_bytes
from megatrain.storage.saves import newer_than

logger = logging.getLogger("megatrain")


@dataclass(frozen=True)
class Ready:
    """A run that is known to fit, before anything large is loaded."""

    parts: Parts
    plan: Plan
    loader: Loader
    held_out: Rows | None
    examination: Examination

    @property
    def rows(self) -> tuple[Rows, Rows | None]:
        """To train on, and held out."""
        return self.loader.rows, self.held_out

    @property
    def sweep_tokens(self) -> int:
        """Padded tokens that share one sweep of the weights where nothing is trained."""
        return self.plan.job.tokens_per_step // self.plan.choices.groups


def plan(
    config: Config, shape_alone: bool = False, described: Mapping[str, Any] | None = None
) -> Plan:
    """The plan of a config's run. Loads no weights and touches no GPU. Raises MegaTrainError.

    Args:
        shape_alone: the model has no files but its configuration, or is a name (models/shapes.py).
        described: another machine than this one, or several of its GPUs, in the keywords of
            `another_machine`, if any of them is not None.
    """
    given = {name: value for name, value in (described or {}).items() if value is not None}
    machine = another_machine(config, **given) if given else None
    setup.quiet_libraries()
    if shape_alone or config.model.init == "pretrained":
        check_weights(config.model.source, needed=False)
    if (machine is None or machine.here) and not shape_alone:
        check_place(config)
    parts = setup.prepare(config, shape_model(config) if shape_alone else None, machine)
    check_once(parts.resolved.skeleton, config.model.trust_remote_code)
    steps = config.train.max_steps if config.train.epochs is None else None
    return beside_others(parts, setup.make_run_plan(parts, steps=steps, suggest=True))


def train(config: Config, profile: Path | None = None) -> RunSummary:
    """Run a config from its first step. Raises MegaTrainError; what was saved before it stays.

    profile: file for the timeline of one steady step, which Perfetto opens.
    """
    if profile is not None:
        claim(profile)
    check_installed(config.track, config.where("track"))
    check_place(config)
    check_lm_eval(config.where("eval.tasks"), config.eval.tasks)

    def work(opened: Opened) -> RunSummary:
        if checkpoints(config.output) or (config.output / "final").exists():
            raise ConfigError(
                f"{config.where('output')}: {config.output} holds a run already; continue it with "
                f"`megatrain resume {config.output}`, or choose another folder"
            )
        return _run(get_ready(config), opened, resuming=None, profile=profile)

    return in_run_folder(config.output, config.hang_timeout, work)


def resume(
    run_dir: str | Path,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    checkpoint: str | None = None,
) -> RunSummary:
    """Continue a run from its newest intact checkpoint, bit for bit. Raises MegaTrainError.

    overrides: keys that may change (config/resuming.py).
    checkpoint: another one, by name; those of later saves stay until the next save.
    """
    run_dir = Path(run_dir)
    asked = asked_again(run_dir, overrides)
    check_installed(asked.track, asked.where("track"))
    check_lm_eval(asked.where("eval.tasks"), asked.eval.tasks)

    def work(opened: Opened) -> RunSummary:
        check_links(run_dir)
        going = where_to_go_on(run_dir, asked, checkpoint)
        if going.is_the_end(run_dir):
            # every byte is checked here, or when it is loaded
            going = where_to_go_on(run_dir, asked, deep=True)
            over = going.is_the_end(run_dir) and not going.found.warnings
            if over and final_is_whole(run_dir):
                return nothing_left(run_dir)
        if "output" in asked.model_fields_set and asked.output.absolute() != run_dir.absolute():
            logger.info(f"this run began in {asked.output} and goes on in {run_dir}")
        for warning in (*going.warnings, *other_versions(run_dir)):
            logger.warning(warning)
        return _run(get_ready(going.config, going.model(), going.rows), opened, going.found)

    return in_run_folder(run_dir, asked.hang_timeout, work)


def nothing_left(run_dir: Path) -> RunSummary:
    """The summary of a resume of a finished run, and how to train it longer."""
    logger.info(
        f"{run_dir} is finished, nothing is left to train; to go on, set a higher train.epochs or "
        "train.max_steps"
    )
    return RunSummary(run_dir, 0, 0, 0.0, final_dir=run_dir / "final", **held_out_losses(run_dir))


def get_ready(
    config: Config, model: Model | None = None, expected: Expected | None = None
) -> Ready:
    """Read the rows and plan. Raises PlanError for what does not fit, before weights are read.

    model: another than the config's.
    expected: the rows of a run that goes on.
    """
    if model is None and config.model.init == "pretrained":
        check_weights(config.model.source)
    parts = setup.prepare(config, model, may_measure=True)
    passengers = parts.resolved.skeleton.anatomy.passengers
    if config.model.init == "random" and passengers.names:
        raise ConfigError(f"{config.where('model.init')}: {without_source(passengers)}")
    check_sample_prompt(config, parts.model)
    may_end_here()
    # before rows are read, which takes long
    setup.make_run_plan(parts, checkpoints_written=1).check()
    check_once(parts.resolved.skeleton, config.model.trust_remote_code)
    may_end_here()
    examination = open_examination(config, parts.model)
    rows, held_out, windows = open_rows(config, parts.model, parts.day, expected)
    may_end_here()
    say_rows(rows, held_out)
    if about_stops := parts.model.about_stops:
        logger.info(about_stops)
    if held_out is not None:
        logger.info(f"{len(held_out):,} rows are held out for evaluation")
    plan, loader = plan_and_loader(parts, rows, windows)
    plan.check()
    say_steps(config, loader)
    return Ready(parts, plan, loader, held_out, examination)


def plan_and_loader(
    parts: Parts, rows: Rows, windows: Windows | None = None
) -> tuple[Plan, Loader]:
    """The plan, which now counts checkpoints and padding, and the loader of its micro-batches."""
    train, every = parts.config.train, parts.config.checkpoint.every
    loader = Loader(
        rows,
        micro_batch_tokens=parts.resolved.least_tokens,  # no row is longer
        pad_id=parts.model.pad_id,
        pack_to=parts.resolved.packed_to,
        seed=train.seed,
        tokens_per_step=train.tokens_per_step,
        rows_per_step=train.rows_per_step,
        epochs=train.epochs,
        max_steps=train.max_steps,
        regimes=regimes_of(parts.model.config),
        prompts_too=isinstance(parts.resolved.loss, SequenceLoss) and parts.resolved.loss.prompts,
        windows=windows,
    )
    steps = loader.steps_total()
    written = 1 if every is None else -(-steps // every)
    plan = setup.make_run_plan(knowing_rows(parts, loader), written, steps)
    return plan, replace(loader, micro_batch_tokens=plan.choices.micro_batch_tokens)


def knowing_rows(parts: Parts, loader: Loader) -> Parts:
    """The same with the padding of the loader's rows, where these do not all fill sequences."""
    if loader.pack_to is None and not parts.resolved.lengths_vary:
        return parts
    least = parts.resolved.least_tokens
    size = setup.micro_batch_tokens(parts.config, least) or least
    sizes = sorted({*parts.resolved.shape.layer.sizes, size})
    rows = loader.rows
    return replace(
        parts,
        step_tokens=tuple(starmap(StepTokens, loader.step_tokens(sizes))),
        trained_share=float(rows.lengths.sum() / rows.side_lengths.sum()),
    )


def _run(
    ready: Ready, opened: Opened, resuming: Resumable | None, profile: Path | None = None
) -> RunSummary:
    """Load, train, and say what became of it."""
    started, plan = time.perf_counter(), ready.plan
    config = ready.parts.config
    opened.watch.expect(plan.timing.seconds)
    exact = deterministic(config.train.deterministic)
    with setup.memory_errors(plan), address_space_errors(), ExitStack() as stack, exact:
        log_every = config.train.log_every
        if (windows := ready.loader.windows) is not None:
            stack.callback(windows.close)
        progress = stack.enter_context(Progress(opened.console, log_every=log_every))
        run = open_run(ready, opened.lock, progress, stack, resuming)
        run.trace = profile
        opened.stop.loop_begins()
        done = fit(run, opened.stop)
        return summarize(run, plan, time.perf_counter() - started, None if done else opened.stop)


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
    reopen(config.output, source)  # only now: before this nothing in the folder has changed
    if "loss" in state["best"]:  # of a release that knew no other figure
        state["best"]["eval_loss"] = state["best"].pop("loss")
    if not (config.output / checkpoint_name(state["best"].get("step", -1))).is_dir():
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
    anew = resuming is None or (of_model is not None and not are_kept(of_model, wanted))
    with progress.doing("preparing the weights", total=weights, counted=WEIGHTS_READ):
        engine = stack.enter_context(setup.make_engine(parts, plan, load=anew))
    return engine, compare_with_reference(ready, engine, of_model, wanted, anew, progress)


def open_metrics(
    config: Config, plan: Plan, state: dict[str, Any], stack: ExitStack
) -> tuple[MetricsWriter, LiveReport]:
    """The file of metrics, cut back to where the run goes on, whose lines trackers get, too, and
    the report, which is written last however the run ends."""
    # a run that begins with step 0 begins with an evaluation
    step = state["step"] or -1
    about = {"config": config.model_dump(mode="json"), "plan": plan.to_dict()}
    track = stack.enter_context(tracking(config.track, config.output, state["step"], about))
    report = LiveReport(config.output)
    writer = stack.enter_context(MetricsWriter(config.output, (track, report.add)))
    writer.truncate_to(step, state.get("metrics"))
    cut_samples(config.output, step)
    report.begin()
    stack.callback(report.write, last=True)
    return writer, report


def open_run(
    ready: Ready, lock: RunLock, progress: Progress, stack: ExitStack, resuming: Resumable | None
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
    kept = {"held_out": ready.held_out.digest if ready.held_out else None}
    kept |= {"reference": references.of_model} if references else {}
    evaluates = ready.held_out is not None or ready.examination.asks_each_time
    total, gpu, step = loader.steps_total(), parts.machine.hardware.gpu, state["step"]
    progress.begin(total, step, partial(still_to_come, config, evaluates, total))
    meter = stack.enter_context(GpuMeter(parts.machine.device))
    writer, report = open_metrics(config, plan, state, stack)
    tasks = ready.examination.tasks
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
        examination=ready.examination,
        greater_is_better=greater_is_better(config, tasks.higher_is_better() if tasks else {}),
        lock=lock,
        describe=partial(describe_run, parts, plan),
        asked=for_state(config, decided(parts, plan)) | kept,
        first_tokens=state["tokens"],
        **{name: state[name] for name in BEGINNING},
    )
