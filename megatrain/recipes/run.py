"""`plan`, `train` and `resume`: from a config to a plan, and to the end of its run."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from megatrain.config import Config
from megatrain.config.resuming import asked_again, is_open
from megatrain.data.build import Expected
from megatrain.data.loader import Loader, Windows
from megatrain.data.rows import Rows
from megatrain.engine.context import deterministic
from megatrain.engine.resolved import Resolved, piece_tokens
from megatrain.errors import ConfigError, TooManyRanks
from megatrain.heartbeat import may_end_here
from megatrain.losses import SequenceLoss
from megatrain.models.constants import without_source
from megatrain.models.family import regimes_of
from megatrain.planner.plan import Plan
from megatrain.recipes.describe import (
    SUMS,
    other_circumstances,
    started_again,
    summarize,
)
from megatrain.recipes.loop import fit
from megatrain.recipes.model import (
    Model,
    check_tensors,
    check_weights,
    read_model,
    shape_model,
    suited,
)
from megatrain.recipes.output_checks import check_links, check_output
from megatrain.recipes.planned_machine import find_machine, planned_machine
from megatrain.recipes.ranks.barrier import check_alike, check_ranks, check_rows_of_a_step
from megatrain.recipes.ranks.context_parallel import micro_batch_of, sharing, step_tokens
from megatrain.recipes.ranks.device import bind
from megatrain.recipes.ranks.launch import ranks_for
from megatrain.recipes.ranks.multi_gpu import beside_others
from megatrain.recipes.ranks.rendezvous import as_rank
from megatrain.recipes.resume import final_is_whole, resume_point
from megatrain.recipes.rows import day_of, open_rows, say_rows, say_steps
from megatrain.recipes.sample import check_sample_prompt, eval_prompts
from megatrain.recipes.session import Session, open_run, run_session
from megatrain.recipes.setup import memory_errors, plan_run, quiet_libraries, resolve_run
from megatrain.recipes.signals import Stopped
from megatrain.recipes.state import Ready
from megatrain.recipes.verify import check_once
from megatrain.reporting.metrics import (
    held_out_losses,
)
from megatrain.reporting.progress import Progress
from megatrain.reporting.summary import RunSummary
from megatrain.reporting.tracing import claim
from megatrain.reporting.trackers import check_installed
from megatrain.settings import KEYS
from megatrain.storage.restore import Resumable
from megatrain.storage.run_folder import checkpoints
from megatrain.world import ALONE, World

logger = logging.getLogger("megatrain")


def plan(
    config: Config, shape_alone: bool = False, described: Mapping[str, Any] | None = None
) -> Plan:
    """The plan of a config's run. Loads no weights and touches no GPU. Raises MegaTrainError.

    Args:
        shape_alone: the model has no files but its configuration, or is a name (models/shapes.py).
        described: another machine than this one, or several of its GPUs, in the keywords of
            `planned_machine`, if any of them is not None.
    """
    other = {name: value for name, value in (described or {}).items() if value is not None}
    if other and "gpus" not in other and config.gpus != "auto":
        other["gpus"] = config.gpus
    if other or shape_alone or (gpus := ranks_for(config)) == 1:
        return _planned(config, shape_alone, other)
    try:
        return _planned(config, shape_alone, {"gpus": gpus})
    except TooManyRanks as error:
        if config.gpus != "auto":
            raise
        logger.info(f"{error.why}: {error.most} of {gpus} are used")
        return _planned(config, shape_alone, {"gpus": error.most} if error.most > 1 else {})


def _planned(config: Config, shape_alone: bool, other: Mapping[str, Any]) -> Plan:
    """As `plan`. other: of `described`, what is not None, and this host's GPUs if several."""
    machine = planned_machine(config, **other) if other else None
    quiet_libraries()
    if shape_alone or config.model.init == "pretrained":
        check_weights(config.model.source, needed=False)
    if (machine is None or machine.here) and not shape_alone:
        check_output(config)
    model = suited(shape_model(config) if shape_alone else read_model(config), config)
    resolved = resolve_run(config, model, machine or find_machine(config))
    if config.model.init == "pretrained" and not shape_alone:
        check_tensors(resolved.skeleton, config.model.source)
    check_once(resolved.skeleton, config.model.trust_remote_code)
    steps = config.train.max_steps if config.train.epochs is None else None
    return beside_others(config, plan_run(config, resolved, steps, suggest=True))


def train(config: Config, profile: Path | None = None) -> RunSummary:
    """Run a config from its first step. Raises MegaTrainError; what was saved before it stays.

    profile: file for the timeline of one steady step, which Perfetto opens.
    """
    return as_rank(config.device, partial(_train, config, profile))


def _train(config: Config, profile: Path | None, world: World) -> RunSummary:
    if profile is not None and world.is_first:
        claim(profile)
    check_installed(config.track, config.where("track"))
    check_output(config)
    check_ranks(config, world)
    world = sharing(config, world)
    with run_session(config.output, config.hang_timeout, world) as session:
        try:
            session.stop.stop_if_early()  # a signal may have come while libraries were imported
            begun = bool(checkpoints(config.output)) or (config.output / "final").exists()
            if not world.broadcast(begun):
                return finish_run(get_ready(config, world=world), session, profile=profile)
            if world.broadcast(started_again(config.output)):
                return _resume_in(session, asked_again(config.output, ()), None)
            raise ConfigError(
                f"{config.where('output')}: {config.output} holds a run already; continue it with "
                f"`megatrain resume {config.output}`, or choose another folder"
            )
        except Stopped:
            return session.stopped()


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
    return as_rank(asked.device, partial(_resume, run_dir, asked, checkpoint))


def _resume(run_dir: Path, asked: Config, checkpoint: str | None, world: World) -> RunSummary:
    check_installed(asked.track, asked.where("track"))
    check_ranks(asked, world)
    world = sharing(asked, world)
    with run_session(run_dir, asked.hang_timeout, world) as session:
        try:
            session.stop.stop_if_early()  # a signal may have come while libraries were imported
            return _resume_in(session, asked, checkpoint)
        except Stopped:
            return session.stopped()


def _resume_in(session: Session, asked: Config, checkpoint: str | None) -> RunSummary:
    run_dir, world = session.path, session.world
    check_links(run_dir)
    point = resume_point(run_dir, asked, checkpoint)
    if point.is_the_end(run_dir):
        # every byte is checked here, or when it is loaded
        point = resume_point(run_dir, asked, deep=True)
        over = point.is_the_end(run_dir) and not point.found.warnings
        if over and final_is_whole(run_dir):
            return nothing_left(run_dir)
    if "output" in asked.model_fields_set and asked.output.absolute() != run_dir.absolute():
        logger.info(f"resuming in {run_dir} (the run was started in {asked.output})")
    for warning in (*point.warnings, *other_circumstances(run_dir, world)):
        logger.warning(warning)
    kept = {}
    if point.sums is not None and point.ranks == world.size:
        kept = {SUMS: point.sums} if is_open(asked, KEYS[SUMS]) else {}
    ready = get_ready(point.config, point.model(), point.rows, world, kept)
    return finish_run(ready, session, point.found)


def nothing_left(run_dir: Path) -> RunSummary:
    """The summary of a resume of a finished run; the log says how to train it longer."""
    logger.info(
        f"{run_dir} is finished, nothing is left to train; to go on, set a higher train.epochs or "
        "train.max_steps"
    )
    return RunSummary(run_dir, 0, 0, 0.0, final_dir=run_dir / "final", **held_out_losses(run_dir))


def get_ready(
    config: Config,
    model: Model | None = None,
    expected: Expected | None = None,
    world: World = ALONE,
    kept: Mapping[str, Any] | None = None,
) -> Ready:
    """Read the rows and plan. Raises PlanError for what does not fit, before weights are read.

    Args:
        model: another than the config's.
        expected: the rows of a resumed run.
        world: the ranks that train.
        kept: as in `request_of`.
    """
    new = model is None and config.model.init == "pretrained"
    if new:
        check_weights(config.model.source)
    model = suited(model or read_model(config), config)
    machine = find_machine(config, may_measure=True, world=world)
    resolved = resolve_run(config, model, machine, kept)
    skeleton, day = resolved.skeleton, world.broadcast(day_of(config))
    if new:
        world.on_rank0(partial(check_tensors, skeleton, config.model.source))
    unused_weights = skeleton.anatomy.unused_weights
    if config.model.init == "random" and unused_weights.names:
        raise ConfigError(f"{config.where('model.init')}: {without_source(unused_weights)}")
    check_sample_prompt(config, model)
    may_end_here()
    # before rows are read, which takes long
    plan_run(config, resolved, checkpoints_written=1).check()
    # the first alone: on others transformers saves no folder to read
    world.on_rank0(partial(check_once, skeleton, config.model.trust_remote_code))
    may_end_here()
    prompts = eval_prompts(config, model)
    # of a host's ranks the first tokenises
    reading = partial(open_rows, config, model, day, expected, world.local_rank == 0)
    rows, held_out, windows = world.local_rank0_first(reading)
    may_end_here()
    if world.is_first:  # all have the same rows
        say_rows(rows, held_out)
    if about_stops := model.about_stops:
        logger.info(about_stops)
    if held_out is not None:
        logger.info(f"{len(held_out):,} rows are held out for evaluation")
    plan, loader = plan_and_loader(config, model, resolved, rows, windows)
    plan.check()
    ready = Ready(
        config=config,
        model=model,
        plan=plan,
        loader=loader,
        held_out=held_out,
        prompts=prompts,
        day=day,
    )
    check_alike(world, settings_by_field(ready), digests_of(rows, held_out, windows))
    if world.is_first:
        say_steps(config, loader)
    return ready


def settings_by_field(ready: Ready) -> dict[str, object]:
    """Settings that follow from the config and the machine, by field."""
    plan, resolved = ready.plan, ready.resolved
    settings = vars(plan.choices.settings(plan.job, resolved.request.nvme_folders))
    return {"precision": ready.machine.precision, "packed": resolved.packed_to} | settings


def digests_of(rows: Rows, held_out: Rows | None, windows: Windows | None) -> list[str]:
    """Digests of rows that are there. Windows of a stream are compared as they come."""
    whole = rows if windows is None else None
    return [some.digest for some in (whole, held_out) if some is not None]


def plan_and_loader(
    config: Config, model: Model, resolved: Resolved, rows: Rows, windows: Windows | None = None
) -> tuple[Plan, Loader]:
    """The plan, which now counts checkpoints and padding, and the loader of its micro-batches."""
    train, every, request = config.train, config.checkpoint.every, resolved.request
    loader = Loader(
        rows,
        micro_batch_tokens=request.least_tokens,  # no row is longer
        pad_id=model.pad_id,
        pack_to=resolved.packed_to,
        seed=train.seed,
        tokens_per_step=train.tokens_per_step,
        rows_per_step=train.rows_per_step,
        epochs=train.epochs,
        max_steps=train.max_steps,
        regimes=regimes_of(model.config),
        prompts_too=isinstance(request.loss, SequenceLoss) and request.loss.prompts,
        windows=windows,
        world=resolved.machine.world,
    )
    check_rows_of_a_step(loader)
    steps = loader.steps_total()
    written = 1 if every is None else -(-steps // every)
    known = padding_of(resolved, loader)
    plan = plan_run(config, resolved, steps, checkpoints_written=written, **known)
    return plan, replace(loader, micro_batch_tokens=micro_batch_of(config, plan))


def padding_of(resolved: Resolved, loader: Loader) -> dict[str, Any]:
    """The padding of the loader's rows as `plan_of` takes it; nothing if all fill sequences."""
    if loader.pack_to is None and not resolved.lengths_vary:
        return {}
    request, rows = resolved.request, loader.rows
    size = request.asked.get("micro_batch_tokens") or request.least_tokens
    size = piece_tokens(size, request.context_parallel)
    return {
        "step_tokens": step_tokens(loader, sorted({*resolved.shape.layer.sizes, size})),
        "trained_share": float(rows.lengths.sum() / rows.side_lengths.sum()),
    }


def finish_run(
    ready: Ready, session: Session, resuming: Resumable | None = None, profile: Path | None = None
) -> RunSummary:
    """Load weights or the checkpoint, train to the end or a signal, and summarise."""
    started, plan, train = time.perf_counter(), ready.plan, ready.config.train
    session.watch.expect(plan.timing.seconds)
    bind(session.world, ready.machine.device)
    exact = deterministic(train.deterministic)
    with memory_errors(plan), ExitStack() as stack, exact:
        if (windows := ready.loader.windows) is not None:
            stack.callback(windows.close)
        progress = stack.enter_context(Progress(session.console, log_every=train.log_every))
        run = open_run(ready, session, progress, stack, resuming)
        run.trace = profile
        session.stop.loop_begins()
        stop = session.stop.of_all(session.world)
        done = fit(run, stop)
        return summarize(run, time.perf_counter() - started, None if done else stop)
