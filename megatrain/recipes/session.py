"""A command's session in a run folder: lock, log, signals and watchdog; and the run that it opens,
with weights or a checkpoint loaded and its files open."""

from __future__ import annotations

import errno
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from rich.console import Console

from megatrain.config import Config
from megatrain.config.resuming import RESOLVED_FILE, check_changes, resumed_configs
from megatrain.data.loader import Loader
from megatrain.engine.engine import Engine
from megatrain.errors import ConfigError, StorageError, logger, storage_error, system_errors
from megatrain.heartbeat import BYTES_READ, doing, may_end_here
from megatrain.planner.plan import Plan
from megatrain.recipes.describe import DESCRIPTION, describe_run, facts_of, kept_config, work_of
from megatrain.recipes.frozen import check_frozen, computing_as, frozen_digest, open_teacher
from megatrain.recipes.loop import still_to_come
from megatrain.recipes.reference import lacks_references, open_engine
from megatrain.recipes.report import REPORT_FILE, LiveReport
from megatrain.recipes.rl.journal import FOLDER as ROLLOUTS
from megatrain.recipes.rl.journal import REWARDS_LOG
from megatrain.recipes.rl.rollouts import Rollouts
from megatrain.recipes.setup import quiet_libraries
from megatrain.recipes.signals import HangWatch, StopRequest, stop_requests, watchdog
from megatrain.recipes.state import BEGINNING, Ready, Run
from megatrain.reporting.energy import EnergyMeter
from megatrain.reporting.meters import GpuMeter
from megatrain.reporting.metrics import (
    METRICS_FILE,
    SAMPLES_FILE,
    MetricsWriter,
    Spikes,
    cut_back,
    read_metrics,
)
from megatrain.reporting.progress import LOG_FILE, Progress, logging_to
from megatrain.reporting.streams import console_on
from megatrain.reporting.trackers import ID_FILE, tracking
from megatrain.storage.checkpoint import Resumable, load_resumable, reopen
from megatrain.storage.manifest import CHECKPOINT, MANIFEST, UNVERIFIED, verifies
from megatrain.storage.run_folder import (
    ANOTHER_OUTPUT,
    FINAL,
    LINKS,
    LOCK,
    PASSENGERS,
    UNFINISHED,
    UPLOADING,
    RunLock,
    bytes_needed,
    checkpoint_name,
    newer_than,
    run_lock,
)
from megatrain.world import LOOKS_EVERY_S, World

# All names that a run writes, but for its lock.
FILES = (*DESCRIPTION, METRICS_FILE, SAMPLES_FILE, LOG_FILE, ID_FILE, REPORT_FILE, REWARDS_LOG)
FOLDERS = (*LINKS, FINAL, PASSENGERS, UPLOADING, ROLLOUTS, "tensorboard", "wandb")
BATCHES = r"(bad-batch|spike)-\d+(-rank-\d+)?\.safetensors"
NAMES = rf"({'|'.join(map(re.escape, FILES))})(\.tmp)?", *FOLDERS, CHECKPOINT.pattern, BATCHES
WRITTEN = re.compile("|".join((*NAMES, UNFINISHED.pattern)))
MODEL = "config.json"  # a folder that has it is taken for a model, not for a run
SEEN_WITHIN_S = 90.0  # by other hosts, whose view of a folder may be a minute old (nfs(5))


@dataclass(frozen=True)
class Session:
    """A command's work in a run folder."""

    path: Path
    lock: RunLock | None  # None: another rank has it
    console: Console
    stop: StopRequest
    watch: HangWatch
    world: World


@contextmanager
def run_session(path: Path, hang_timeout: int | None, world: World) -> Iterator[Session]:
    """Lock the folder, write its log, and heed signals; a watchdog ends the process after
    `hang_timeout` seconds without a sign of life. Folder and terminal are the first rank's."""
    console = console_on(stderr=True)
    who = "" if world.is_first else f"[rank {world.rank} {socket.gethostname()}] "
    with stop_requests() as stop, run_lock(path) if world.is_first else nullcontext() as lock:
        seen_by_all(path, world)
        watched = watchdog(hang_timeout, path / LOG_FILE)
        with logging_to(path, console, who), watched as watch:
            if lock is not None and lock.warning:
                logger.warning(lock.warning)
            if not verifies() and world.is_first:
                logger.warning(UNVERIFIED)
            quiet_libraries()
            shown = console if world.is_first else Console(quiet=True)
            yield Session(path, lock, shown, stop, watch, world)


def seen_by_all(path: Path, world: World) -> None:
    """Wait until all ranks see the run folder, which the first one has. Raises ConfigError if a
    rank of another host does not: checkpoints would lack its files."""
    mark = path / world.broadcast(f".seen-{uuid4().hex}")  # now there is a folder
    if world.hosts == 1:
        return
    try:
        if world.is_first:
            mark.touch()
        world.all_gather(None)
        until = time.monotonic() + SEEN_WITHIN_S
        while not (seen := mark.exists()) and time.monotonic() < until:
            time.sleep(LOOKS_EVERY_S)
        for rank, (sees, host) in enumerate(world.all_gather((seen, socket.gethostname()))):
            if not sees:
                raise ConfigError(
                    f"{path}: rank {rank} on {host} does not see the files of the first one there; "
                    "put output on a file system that all hosts share"
                )
    finally:
        if world.is_first:
            mark.unlink(missing_ok=True)


def open_run(
    ready: Ready, session: Session, progress: Progress, stack: ExitStack, resuming: Resumable | None
) -> Run:
    """Load the model, or a checkpoint, and open what the loop writes to; `stack` closes it all. The
    run is described in its folder; on resuming not before it is known that the run can go on."""
    plan, loader, config, machine = ready.plan, ready.loader, ready.config, ready.machine
    if resuming is None:
        describe_run(ready)
    may_end_here()
    engine, reference, held_out_references = open_engine(ready, stack, resuming)
    state, source, frozen = dict(BEGINNING), None, frozen_digest(config)
    if resuming is not None:
        source, state = _load_checkpoint(ready, engine, resuming)
        check_frozen(config, state, frozen)
        describe_run(ready)
    named = resuming is not None and resuming.named
    kept = kept_config(ready) | ({"reference": reference} if reference else {})
    kept |= {"frozen": frozen} if frozen else {}
    kept["held_out"] = ready.held_out.digest if ready.held_out else None
    evaluates = ready.held_out is not None or bool(ready.prompts)
    total, step = loader.steps_total(), state["step"]
    often = ready.save_every, ready.eval_every, evaluates
    progress.begin(total, step, partial(still_to_come, *often, total))
    if isinstance(loader, Rollouts):
        loader.begin(engine, stack, config.output / REWARDS_LOG)
    open_teacher(config, ready.loss, stack, **computing_as(engine))
    meter = stack.enter_context(GpuMeter(machine.device))
    writer, report = open_metrics(config, plan, state, stack, machine.world)
    return Run(
        **vars(ready),
        engine=engine,
        held_out_references=held_out_references,
        writer=writer,
        report=report,
        progress=progress,
        meter=meter,
        energy=EnergyMeter(meter),
        work=work_of(plan),
        total_steps=total,
        recent=Spikes(read_metrics(config.output)),
        unproven=source,
        abandoned=newer_than(config.output, source) if named and source else [],
        facts=facts_of(config, plan, resumed=resuming is not None),
        first_step=step,
        lock=session.lock,
        asked=kept,
        first_tokens=state["tokens"],
        **{name: state[name] for name in BEGINNING},
    )


def _load_checkpoint(
    ready: Ready, engine: Engine, resuming: Resumable
) -> tuple[Path, dict[str, Any]]:
    """Load the checkpoint to resume from; returns its folder and its state. Raises StorageError,
    and DataError if the rows are others."""
    config = ready.config
    size = bytes_needed([resuming.path]) if resuming.path else None
    with doing("reading the checkpoint", size, BYTES_READ):
        source, state = load_resumable(config.output, engine, resuming)
    may_end_here()
    if source != resuming.path:  # which may have been saved under another config
        before, _ = resumed_configs(config.output, config, state)
        for change in check_changes(before, config):
            logger.warning(change)
    loader = ready.loader
    loader.restore(state.pop("position"))
    if isinstance(loader, Loader) and lacks_references(loader):
        raise StorageError(
            f"{source}: leads over rows for which the reference's log-probabilities were not "
            f"computed; resume from it by name: --checkpoint {source.name}"
        )
    # only now: before this nothing in the folder has changed
    engine.world.on_rank0(partial(reopen, config.output, source))
    best = config.output / checkpoint_name(state["best"].get("step", -1))
    if not engine.world.broadcast(best.is_dir()):
        state["best"] = {}  # another may be the best of what is there
    return config.output / checkpoint_name(state["step"]), state  # `final/` is one by now


def open_metrics(
    config: Config, plan: Plan, state: dict[str, Any], stack: ExitStack, world: World
) -> tuple[MetricsWriter, LiveReport]:
    """Open metrics.jsonl, cut back to the position in `state`, with trackers, and the report, which
    is written last however the run ends. Only the first rank writes."""
    # a run that begins with step 0 begins with an evaluation
    step = state["step"] or -1
    about = {"config": config.model_dump(mode="json"), "plan": plan.to_dict()}
    if not world.is_first:
        world.all_gather(None)  # now the file is cut back
        return stack.enter_context(MetricsWriter(Path(os.devnull))), LiveReport(None)
    track = stack.enter_context(tracking(config.track, config.output, state["step"], about))
    writer = stack.enter_context(MetricsWriter(config.output / METRICS_FILE))
    for name in (METRICS_FILE, SAMPLES_FILE):
        if (config.output / name).is_file():
            cut_back(config.output / name, step)
    world.all_gather(None)
    report = LiveReport(config.output)
    writer.also = track, report.add
    stack.callback(report.write, last=True)
    return writer, report


# -- the folder ------------------------------------------------------------------------------------


def check_output(config: Config) -> None:
    """Check that a run may be written into `output`, before anything is loaded or written. A folder
    with a resolved config or a checkpoint is a run's. Any other may hold anything but names that a
    run writes. Raises ConfigError, and StorageError where no folder can be made."""
    folder, whole = config.output, config.output.absolute()
    nearest = next(path for path in (whole, *whole.parents) if os.path.lexists(path))
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK, effective_ids=True):
        number = errno.EACCES if nearest.is_dir() else errno.ENOTDIR
        error = OSError(number, os.strerror(number))
        raise storage_error(folder, error, "make the run folder", ANOTHER_OUTPUT)
    if nearest != whole:
        return
    with system_errors(folder, "look into it"):
        there = sorted(path.name for path in folder.iterdir())
        saved = (name for name in there if name == FINAL or CHECKPOINT.fullmatch(name))
        if RESOLVED_FILE in there or any((folder / name / MANIFEST).is_file() for name in saved):
            check_links(folder)
            return
        # of a start that failed before it had written more
        ours = {LOG_FILE} if (folder / LOCK).is_file() else set()
    taken = [name for name in there if WRITTEN.fullmatch(name) and name not in ours]
    if taken:
        more = f" and {len(taken) - 1} more" if len(taken) > 1 else ""
        problem = f"{taken[0]}{more}, which a run would write, and is no run's folder"
    elif MODEL in there:
        problem = f"{MODEL}, so it would be taken for a model, not for a run"
    else:
        return
    raise ConfigError(f"{config.where('output')}: {folder} holds {problem}; choose another folder")


def check_links(run_dir: Path) -> None:
    """Raise StorageError if something lies where a save puts a link."""
    for path in (run_dir / name for name in LINKS):
        if path.exists() and not path.is_symlink():
            raise StorageError(f"{path}: is no link, and a save puts one there; move it away")
