"""`train` and `resume`: from a config to a plan, and to the end of its run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

from megatrain.config import Config
from megatrain.config.resuming import asked_again, check_changes, is_open, resumed_configs, unheeded
from megatrain.data.build import Expected
from megatrain.data.loader import Loader
from megatrain.data.rows import Rows, TokenRows
from megatrain.data.samples import PROMPTS
from megatrain.data.show import held_out_line
from megatrain.data.streaming import Stream
from megatrain.engine.components import deterministic
from megatrain.engine.resolved import Machine, Resolved, piece_tokens
from megatrain.errors import ConfigError, StorageError, logger
from megatrain.heartbeat import may_end_here
from megatrain.losses import SequenceLoss
from megatrain.methods import METHODS
from megatrain.models.constants import without_source
from megatrain.models.family import regimes_of
from megatrain.planner.job import ImageTokens, StepTokens
from megatrain.planner.plan import Plan
from megatrain.recipes import setup
from megatrain.recipes.describe import RANKS, SUMS, other_circumstances, summarize
from megatrain.recipes.doctor import find_machine
from megatrain.recipes.frozen import check_reference_and_teacher
from megatrain.recipes.loop import fit, saves_beside
from megatrain.recipes.model import (
    Model,
    changed_source,
    check_tensors,
    check_weights,
    describe_model,
    read_model,
    shape_model,
    sighted,
    suited,
)
from megatrain.recipes.planned_site import beside_others
from megatrain.recipes.ranks import rendezvous
from megatrain.recipes.ranks.launch import goes_on
from megatrain.recipes.report import REPORT_FILE, write_report
from megatrain.recipes.rl.prompts import PromptRows, planned_for, read_prompt_rows
from megatrain.recipes.rl.rollouts import Rollouts
from megatrain.recipes.sample import check_sample_prompt, eval_prompts, prompts_of_rows
from megatrain.recipes.session import Session, check_links, check_output, open_run, run_session
from megatrain.recipes.signals import Stopped
from megatrain.recipes.state import Ready, steps_between
from megatrain.recipes.verify import causes_named, check_once
from megatrain.reporting.metrics import held_out_losses
from megatrain.reporting.progress import Progress
from megatrain.reporting.summary import RunSummary
from megatrain.reporting.tracing import claim
from megatrain.reporting.trackers import check_installed
from megatrain.settings import KEYS
from megatrain.storage.checkpoint import (
    Resumable,
    find_resumable,
    named_checkpoint,
    nothing_to_resume,
    read_about,
)
from megatrain.storage.manifest import check_files, read_manifest
from megatrain.storage.push import Uploads
from megatrain.storage.run_folder import CARD, FINAL, checkpoints, sequence_of
from megatrain.world import ALONE, World


def plan_model(config: Config, shape_alone: bool, machine: Machine | None) -> tuple[Plan, bool]:
    """(plan, True if there was nothing to say of the model but this), worked out of the model
    itself. shape_alone: as for `plan.plan`. machine: another than this one."""
    setup.quiet_libraries()
    if shape_alone or config.model.init == "pretrained":
        check_weights(config.model.source, needed=False)
    if (machine is None or machine.here) and not shape_alone:
        check_output(config)
    model = suited(shape_model(config) if shape_alone else read_model(config), config)
    if METHODS[config.method].kind == PROMPTS and not shape_alone:
        config = planned_for(config, *read_prompt_rows(config, model, setup.day_of(config)))
    resolved = setup.resolve_run(config, model, machine or find_machine(config))
    if config.model.init == "pretrained":
        check_tensors(resolved.skeleton, config.model.source)
    checked = check_once(resolved.skeleton, config.model.trust_remote_code)

    def plan_on(machine: Machine) -> Plan:
        return setup.plan_run(config, replace(resolved, machine=machine))

    steps = config.train.max_steps if config.train.epochs is None else None
    plan = setup.plan_run(config, resolved, steps, suggest=True)
    silent = not checked.reason and setup.other_balance(resolved) is None
    return beside_others(config, plan, resolved.machine.alone, plan_on), silent


def train(config: Config, profile: Path | None = None) -> RunSummary:
    """Run a config from its first step. Raises MegaTrainError; what was saved before it stays.
    profile: file for the timeline of one steady step, which Perfetto opens."""

    def work(session: Session) -> RunSummary:
        world = session.world
        if world.on_rank0(partial(goes_on, config)):
            own = asked_again(config.output, ())
            if others := ", ".join(unheeded(config, own)):
                logger.warning(
                    f"{config.output} goes on with its own config.yaml; what this command says of "
                    f"{others} does not count: set it with `megatrain resume`"
                )
            return _resume_in(session, own, None)
        return finish_run(get_ready(config, world=world), session, profile=profile)

    def as_one(world: World) -> RunSummary:
        if profile is not None and world.is_first:
            claim(profile)
        check_output(config)
        return _in_session(config.output, config, work, world)

    return rendezvous.as_rank(config.device, as_one)


def resume(
    run_dir: str | Path,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    checkpoint: str | None = None,
) -> RunSummary:
    """Continue a run from its newest intact checkpoint, bit for bit. Raises MegaTrainError.
    overrides: keys that may change (config/resuming.py). checkpoint: another one, by name; those of
    later saves stay until the next save."""
    run_dir = Path(run_dir)
    asked = asked_again(run_dir, overrides)
    work = partial(_resume_in, asked=asked, checkpoint=checkpoint)
    return rendezvous.as_rank(asked.device, partial(_in_session, run_dir, asked, work))


def _in_session(
    path: Path, config: Config, work: Callable[[Session], RunSummary], world: World
) -> RunSummary:
    check_installed(config.track, config.where("track"))
    rendezvous.check_ranks(config, world)
    rendezvous.check_alike(world, rendezvous.told_of(config))
    with run_session(path, config.hang_timeout, setup.sharing(config, world)) as session:
        try:
            session.stop.stop_if_early()  # a signal may have come while libraries were imported
            return work(session)
        except Stopped:
            session.stop.says("before the first step: nothing was trained and nothing is lost")
            saved, code = bool(checkpoints(path)), session.stop.exit_code
            return RunSummary(path, 0, 0, 0.0, resumable=saved, exit_code=code)


def _resume_in(session: Session, asked: Config, checkpoint: str | None) -> RunSummary:
    run_dir, world = session.path, session.world
    check_links(run_dir)
    point = resume_point(run_dir, asked, checkpoint)
    if point.is_the_end(run_dir) and final_is_whole(run_dir):
        logger.info(
            f"{run_dir} is finished, nothing is left to train; to go on, set a higher "
            "train.epochs or train.max_steps"
        )
        if world.is_first and (run_dir / f"{REPORT_FILE}.tmp").exists():  # a kill came between
            write_report([run_dir])
        losses = held_out_losses(run_dir)
        return RunSummary(run_dir, 0, 0, 0.0, final_dir=run_dir / FINAL, **losses)
    if "output" in asked.model_fields_set and asked.output.absolute() != run_dir.absolute():
        logger.info(f"resuming in {run_dir} (the run was started in {asked.output})")
    for warning in (*point.warnings, *other_circumstances(run_dir, world)):
        logger.warning(warning)
    sums, kept = point.state.get(SUMS), {}
    if sums is not None and point.state.get(RANKS) == world.size and is_open(asked, KEYS[SUMS]):
        kept = {SUMS: sums}  # on the device, as planned for as many ranks
    ready = get_ready(point.config, point.model(), point.rows, world, kept)
    return finish_run(ready, session, point.found)


def get_ready(
    config: Config,
    model: Model | None = None,
    expected: Expected | None = None,
    world: World = ALONE,
    kept: Mapping[str, Any] | None = None,
) -> Ready:
    """Read the rows and plan. Raises PlanError for what does not fit, before weights are read.

    model: another than the config's. expected: the rows of a resumed run. kept: as in `request_of`.
    """
    new = model is None and config.model.init == "pretrained"
    if new:
        check_weights(config.model.source)
    model = suited(model or read_model(config), config)
    check_reference_and_teacher(config, model)
    given, asked = None, config
    if METHODS[config.method].kind == PROMPTS:  # how long rows are follows from them
        given = read_prompt_rows(config, model, setup.day_of(config))
        asked = planned_for(config, *given)
    machine = find_machine(config, may_measure=True, world=world)
    resolved = setup.resolve_run(asked, model, machine, kept)
    skeleton, day = resolved.skeleton, world.broadcast(setup.day_of(config))
    if new:
        world.on_rank0(partial(check_tensors, skeleton, config.model.source))
    rendezvous.check_alike(world, {**causes_named(skeleton), **model.digests})
    if config.model.init == "random" and (unused := skeleton.anatomy.unused_weights).names:
        raise ConfigError(f"{config.where('model.init')}: {without_source(unused)}")
    check_sample_prompt(config, model)
    may_end_here()
    # before rows are read, which takes long
    setup.plan_run(config, resolved, checkpoints_written=1).check()
    # the first alone: on others transformers saves no folder to read
    world.on_rank0(partial(check_once, skeleton, config.model.trust_remote_code))
    may_end_here()
    prompts = eval_prompts(config, model)
    plan, loader, held_out = open_loader(config, model, resolved, day, given, expected)
    prompts = prompts or prompts_of_rows(config, model, held_out)
    plan.check()
    settings = vars(plan.choices.settings(plan.job, resolved.request.nvme_folders))
    settings = {"precision": machine.precision, "packed": resolved.packed_to} | settings
    # windows of a stream are compared as they come
    rows = None if loader.windows is not None else loader.rows
    whole = [some for some in (rows, held_out) if some is not None]
    rendezvous.check_alike(world, settings, [some.digest for some in whole])
    if world.is_first:
        setup.say_steps(config, loader)
    return Ready(
        config=config,
        model=model,
        plan=plan,
        loader=loader,
        held_out=held_out,
        prompts=prompts,
        day=day,
        save_every=steps_between(config.checkpoint.every, loader),
        eval_every=steps_between(config.train.eval_every, loader),
        push_every=steps_between(config.checkpoint.push_every, loader),
    )


def open_loader(
    config: Config,
    model: Model,
    resolved: Resolved,
    day: date,
    prompts: tuple[PromptRows, PromptRows | None] | None,
    expected: Expected | None,
) -> tuple[Plan, Loader | Rollouts, Rows | None]:
    """Read the rows, or take prompts that are read, and say what they are; the plan, the loader
    and the rows held out. Raises DataError."""
    world, windows = resolved.machine.world, None
    rows: Rows
    held_out: Rows | None
    if prompts is not None:
        rows, held_out = prompts
    else:
        # of a host's ranks the first tokenises
        reading = partial(setup.open_rows, config, model, day, expected, world.local_rank == 0)
        rows, held_out, windows = world.local_rank0_first(reading)
    may_end_here()
    if world.is_first:  # all have the same rows
        setup.say_rows(rows, held_out)
    setup.check_cuts(config, rows.counts, expected)
    if about_stops := model.about_stops:
        logger.info(about_stops)
    if held_out is not None:
        logger.info(held_out_line(held_out))
    return *plan_and_loader(config, model, resolved, rows, windows, held_out), held_out


def plan_and_loader(
    config: Config,
    model: Model,
    resolved: Resolved,
    rows: Rows,
    windows: Stream | None = None,
    held_out: Rows | None = None,
) -> tuple[Plan, Loader | Rollouts]:
    """The plan, which now counts checkpoints and padding, and the loader of its micro-batches, or
    what writes the answers to prompts, all of which the plan takes for as long as they may be."""
    train, request = config.train, resolved.request
    common: dict[str, Any] = {
        "micro_batch_tokens": request.least_tokens,  # no row is longer
        "pack_to": resolved.packed_to,
        "regimes": regimes_of(model.config),
        "world": resolved.machine.world,
    }
    known: dict[str, Any] = {}
    loader: Loader | Rollouts
    if isinstance(rows, PromptRows):
        assert isinstance(held_out, PromptRows | None)
        loader = Rollouts(rows=rows, held_out=held_out, config=config, model=model, **common)
    else:
        loader = Loader(
            rows,
            pad_id=model.pad_id,
            seed=train.seed,
            tokens_per_step=train.tokens_per_step,
            rows_per_step=train.rows_per_step,
            epochs=train.epochs,
            max_steps=train.max_steps,
            prompts_too=isinstance(request.loss, SequenceLoss) and request.loss.prompts,
            windows=windows,
            **common,
        )
        rendezvous.check_rows_of_a_step(loader)
        known = padding_of(resolved, loader)
        if isinstance(rows, TokenRows):
            known["images"] = ImageTokens(*rows.image_tokens())
    steps = loader.steps_total()
    every = steps_between(config.checkpoint.every, loader)
    written = 1 if every is None else -(-steps // every)
    plan = setup.plan_run(config, resolved, steps, checkpoints_written=written, **known)
    return plan, replace(loader, micro_batch_tokens=setup.micro_batch_of(config, plan))


def padding_of(resolved: Resolved, loader: Loader) -> dict[str, Any]:
    """The padding of the loader's rows as `plan_of` takes it; nothing if all fill sequences. A plan
    counts a rank's tokens, of sequences as long as its piece; the loader whole sequences."""
    if loader.pack_to is None and not resolved.lengths_vary:
        return {}
    request, rows, pieces = resolved.request, loader.rows, loader.world.cp_size
    size = request.asked.get("micro_batch_tokens") or request.least_tokens
    sizes = {*resolved.shape.layer.sizes, piece_tokens(size, request.context_parallel)}
    found = loader.step_tokens(size * pieces for size in sorted(sizes))
    step_tokens = tuple(
        StepTokens(size // pieces, -(-most // pieces), mean / pieces, most_parts, parts)
        for size, most, mean, most_parts, parts in found
    )
    share = float(rows.lengths.sum() / rows.side_lengths.sum())
    return {"step_tokens": step_tokens, "trained_share": share}


def finish_run(
    ready: Ready, session: Session, resuming: Resumable | None = None, profile: Path | None = None
) -> RunSummary:
    """Load weights or the checkpoint, train to the end or a signal, and summarise."""
    started, plan, train = time.perf_counter(), ready.plan, ready.config.train
    session.watch.expect(plan.timing.seconds)
    rendezvous.bind(session.world, ready.machine.device)
    exact = deterministic(train.deterministic)
    with setup.memory_errors(plan), ExitStack() as stack, exact:
        if isinstance(ready.loader, Loader) and ready.loader.windows is not None:
            stack.callback(ready.loader.windows.close)
        uploads, target = None, ready.config.checkpoint.push_to
        with session.world.together():
            if target and session.world.is_first:
                uploads = Uploads(target, session.path)
        shown = Progress(
            session.console, log_every=train.log_every, pending=lambda: session.stop.pending
        )
        progress = stack.enter_context(shown)
        run = open_run(ready, session, progress, stack, resuming)
        run.trace, run.uploads = profile, uploads
        session.stop.stop_if_early()
        session.stop.early = False  # from here on the loop looks for a request
        stop = session.stop.of_all(session.world)
        with saves_beside(run):
            done = fit(run, stop)
        if uploads is not None:
            with progress.doing("uploading"):
                uploads.finish(session.path / FINAL)
        return summarize(run, time.perf_counter() - started, None if done else stop)


# -- the checkpoint that a run is resumed from -----------------------------------------------------


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint to resume from, and the config that it was saved under.

    Attributes:
        state: as it was saved.
        digests: of the model's files, when the run began.
        warnings: of checkpoints passed over, and of what has changed.
    """

    found: Resumable
    state: Mapping[str, Any]
    digests: Mapping[str, str]
    before: Config
    config: Config
    warnings: tuple[str, ...]

    @property
    def rows(self) -> Expected:
        same = self.before.data.eval == self.config.data.eval
        held_out = self.state.get("held_out") if same else None
        return Expected(self.state["position"]["data"], held_out)

    def is_the_end(self, run_dir: Path) -> bool:
        """True if the run was finished, and nothing else is asked of it now."""
        if self.found.path is None or self.found.named or self.config != self.before:
            return False
        return sequence_of(run_dir / FINAL, -1) >= sequence_of(self.found.path)

    def model(self) -> Model:
        """The model as the checkpoint describes it, with warnings of changes in its source. A model
        whose own code is trusted is read from its source: no checkpoint's code is run."""
        assert self.found.path is not None
        for change in changed_source(self.before, self.digests):
            logger.warning(change)
        if self.config.model.trust_remote_code:
            return read_model(self.config)
        model = replace(describe_model(self.found.path), digests=self.digests)
        return sighted(model, self.config, self.found.path)


# why: decision 0050
def resume_point(run_dir: Path, asked: Config, name: str | None = None) -> ResumePoint:
    """Find the checkpoint and compare configs. Raises StorageError and ConfigError."""
    found = named_checkpoint(run_dir, name) if name else find_resumable(run_dir, deep=False)
    if found.path is None:
        for warning in found.warnings:
            logger.warning(warning)
        raise nothing_to_resume(run_dir)
    about = read_about(found.path)
    state, digests = about["state"], about["made_of"].get("source", {})
    before, config = resumed_configs(run_dir, asked, state)
    warnings = (*found.warnings, *check_changes(before, config))
    return ResumePoint(found, state, digests, before, config, warnings)


def final_is_whole(run_dir: Path) -> bool:
    """True if every file of `final/` but its card, which is made to be edited, is as it was saved;
    a warning names the first that is not."""
    final = run_dir / FINAL
    try:
        manifest = read_manifest(final)
        check_files(final, manifest, [name for name in manifest.files if name != CARD])
    except StorageError as error:
        logger.warning(f"{error}; {final} is written again")
        return False
    return True
