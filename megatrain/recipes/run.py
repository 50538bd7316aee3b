"""A run from its beginning, or from where it was left: what `train`, `resume` and `plan` do."""

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
from megatrain.data.dataset import Rows
from megatrain.data.loader import Loader, Windows
from megatrain.engine.context import deterministic
from megatrain.engine.resolved import piece_tokens
from megatrain.errors import ConfigError, TooManyRanks
from megatrain.heartbeat import may_end_here
from megatrain.losses import SequenceLoss
from megatrain.machine.address_space import address_space_errors
from megatrain.models.passengers import without_source
from megatrain.models.rotary import regimes_of
from megatrain.planner.plan import Plan
from megatrain.recipes import setup
from megatrain.recipes.another_machine import another_machine
from megatrain.recipes.describe import (
    SUMS,
    other_circumstances,
    started_again,
    summarize,
)
from megatrain.recipes.going_on import final_is_whole, where_to_go_on
from megatrain.recipes.loop import fit
from megatrain.recipes.model import Model, check_tensors, check_weights
from megatrain.recipes.opened import Opened, in_run_folder
from megatrain.recipes.opening import Ready, open_run
from megatrain.recipes.place import check_links, check_place
from megatrain.recipes.ranks.barrier import check_alike, check_ranks, check_rows_of_a_step
from megatrain.recipes.ranks.context_parallel import micro_batch_of, sharing, step_tokens
from megatrain.recipes.ranks.device import bind
from megatrain.recipes.ranks.launch import ranks_for
from megatrain.recipes.ranks.multi_gpu import beside_others
from megatrain.recipes.ranks.rendezvous import as_rank
from megatrain.recipes.rows import open_rows, say_rows, say_steps
from megatrain.recipes.sample import check_sample_prompt, eval_prompts
from megatrain.recipes.setup import Parts
from megatrain.recipes.shapes import shape_model
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
            `another_machine`, if any of them is not None.
    """
    given = {name: value for name, value in (described or {}).items() if value is not None}
    if given and "gpus" not in given and config.gpus != "auto":
        given["gpus"] = config.gpus
    if given or shape_alone or (gpus := ranks_for(config)) == 1:
        return _planned(config, shape_alone, given)
    try:
        return _planned(config, shape_alone, {"gpus": gpus})
    except TooManyRanks as error:
        if config.gpus != "auto":
            raise
        logger.info(f"{error.why}: {error.most} of {gpus} are used")
        fewer = {"gpus": error.most} if error.most > 1 else {}
        return _planned(config, shape_alone, fewer)


def _planned(config: Config, shape_alone: bool, given: Mapping[str, Any]) -> Plan:
    """As `plan`. given: of `described`, what is not None, and this host's GPUs if several."""
    machine = another_machine(config, **given) if given else None
    setup.quiet_libraries()
    if shape_alone or config.model.init == "pretrained":
        check_weights(config.model.source, needed=False)
    if (machine is None or machine.here) and not shape_alone:
        check_place(config)
    parts = setup.prepare(config, shape_model(config) if shape_alone else None, machine)
    skeleton = parts.resolved.skeleton
    if config.model.init == "pretrained" and not shape_alone:
        check_tensors(skeleton, config.model.source)
    check_once(skeleton, config.model.trust_remote_code)
    steps = config.train.max_steps if config.train.epochs is None else None
    return beside_others(parts, setup.make_run_plan(parts, steps=steps, suggest=True))


def train(config: Config, profile: Path | None = None) -> RunSummary:
    """Run a config from its first step. Raises MegaTrainError; what was saved before it stays.

    profile: file for the timeline of one steady step, which Perfetto opens.
    """
    return as_rank(config.device, partial(_train, config, profile))


def _train(config: Config, profile: Path | None, world: World) -> RunSummary:
    if profile is not None and world.is_first:
        claim(profile)
    check_installed(config.track, config.where("track"))
    check_place(config)
    check_ranks(config, world)
    world = sharing(config, world)

    def work(opened: Opened) -> RunSummary:
        begun = bool(checkpoints(config.output)) or (config.output / "final").exists()
        if world.told(begun):
            if world.told(started_again(config.output)):
                return _go_on(config.output, asked_again(config.output, ()), None, opened)
            raise ConfigError(
                f"{config.where('output')}: {config.output} holds a run already; continue it with "
                f"`megatrain resume {config.output}`, or choose another folder"
            )
        ready = get_ready(config, world=world)
        return _run(ready, opened, resuming=None, profile=profile)

    return in_run_folder(config.output, config.hang_timeout, world, work)


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

    return in_run_folder(
        run_dir, asked.hang_timeout, world, partial(_go_on, run_dir, asked, checkpoint)
    )


def _go_on(run_dir: Path, asked: Config, checkpoint: str | None, opened: Opened) -> RunSummary:
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
    for warning in (*going.warnings, *other_circumstances(run_dir, opened.world)):
        logger.warning(warning)
    kept = {}
    if going.sums is not None and going.ranks == opened.world.size:
        kept = {SUMS: going.sums} if is_open(asked, KEYS[SUMS]) else {}
    ready = get_ready(going.config, going.model(), going.rows, opened.world, kept)
    return _run(ready, opened, going.found)


def nothing_left(run_dir: Path) -> RunSummary:
    """The summary of a resume of a finished run, and how to train it longer."""
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

    model: another than the config's.
    expected: the rows of a run that goes on.
    world: the ranks that train.
    kept: as in `Parts`.
    """
    if model is None and config.model.init == "pretrained":
        check_weights(config.model.source)
    parts = setup.prepare(config, model, may_measure=True, world=world)
    if model is None and config.model.init == "pretrained":
        world.first(partial(check_tensors, parts.resolved.skeleton, config.model.source))
    parts = replace(parts, kept=kept or {})
    passengers = parts.resolved.skeleton.anatomy.passengers
    if config.model.init == "random" and passengers.names:
        raise ConfigError(f"{config.where('model.init')}: {without_source(passengers)}")
    check_sample_prompt(config, parts.model)
    may_end_here()
    # before rows are read, which takes long
    setup.make_run_plan(parts, checkpoints_written=1).check()
    # the first alone: on others transformers saves no folder to read
    world.first(partial(check_once, parts.resolved.skeleton, config.model.trust_remote_code))
    may_end_here()
    prompts = eval_prompts(config, parts.model)
    # of a host's ranks the first tokenises
    first = world.local_rank == 0
    reading = partial(open_rows, config, parts.model, parts.day, expected, first)
    rows, held_out, windows = world.in_turn(reading)
    may_end_here()
    if world.is_first:  # all have the same rows
        say_rows(rows, held_out)
    if about_stops := parts.model.about_stops:
        logger.info(about_stops)
    if held_out is not None:
        logger.info(f"{len(held_out):,} rows are held out for evaluation")
    plan, loader = plan_and_loader(parts, rows, windows)
    plan.check()
    check_alike(world, ways_of(parts, plan), digests_of(rows, held_out, windows))
    if world.is_first:
        say_steps(config, loader)
    return Ready(parts, plan, loader, held_out, prompts)


def ways_of(parts: Parts, plan: Plan) -> dict[str, object]:
    """How a run trains, by field: what follows from its config and from the machine."""
    settings = vars(plan.choices.settings(plan.job, parts.resolved.nvme_folders))
    return {"precision": parts.machine.precision, "packed": parts.resolved.packed_to} | settings


def digests_of(rows: Rows, held_out: Rows | None, windows: Windows | None) -> list[str]:
    """Of rows that are there. Windows of a stream are compared as they come."""
    whole = rows if windows is None else None
    return [some.digest for some in (whole, held_out) if some is not None]


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
        world=parts.machine.world,
    )
    check_rows_of_a_step(loader)
    steps = loader.steps_total()
    written = 1 if every is None else -(-steps // every)
    plan = setup.make_run_plan(knowing_rows(parts, loader), written, steps)
    return plan, replace(loader, micro_batch_tokens=micro_batch_of(parts.config, plan))


def knowing_rows(parts: Parts, loader: Loader) -> Parts:
    """The same with the padding of the loader's rows, where these do not all fill sequences."""
    if loader.pack_to is None and not parts.resolved.lengths_vary:
        return parts
    least = parts.resolved.least_tokens
    size = setup.micro_batch_tokens(parts.config, least) or least
    size = piece_tokens(size, parts.resolved.pieces)
    sizes = sorted({*parts.resolved.shape.layer.sizes, size})
    rows = loader.rows
    return replace(
        parts,
        step_tokens=step_tokens(loader, sizes),
        trained_share=float(rows.lengths.sum() / rows.side_lengths.sum()),
    )


def _run(
    ready: Ready, opened: Opened, resuming: Resumable | None, profile: Path | None = None
) -> RunSummary:
    """Load, train, and say what became of it."""
    started, plan = time.perf_counter(), ready.plan
    config = ready.parts.config
    opened.watch.expect(plan.timing.seconds)
    bind(opened.world, ready.parts.machine.device)
    exact = deterministic(config.train.deterministic)
    with setup.memory_errors(plan), address_space_errors(), ExitStack() as stack, exact:
        log_every = config.train.log_every
        if (windows := ready.loader.windows) is not None:
            stack.callback(windows.close)
        progress = stack.enter_context(Progress(opened.console, log_every=log_every))
        run = open_run(ready, opened.lock, progress, stack, resuming)
        run.trace = profile
        opened.stop.loop_begins()
        stop = opened.stop.of_all(opened.world)
        done = fit(run, stop)
        return summarize(run, plan, time.perf_counter() - started, None if done else stop)
