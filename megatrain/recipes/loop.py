"""The training loop, and the run that it drives. Methods differ in rows and losses only."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from megatrain.config import Config
from megatrain.data.loader import StepBatch
from megatrain.errors import DivergedError, MegaTrainError, StorageError
from megatrain.heartbeat import BYTES_WRITTEN
from megatrain.recipes.card import model_card
from megatrain.recipes.describe import describe_run
from megatrain.recipes.divergence import stop_if_lost, way_back
from megatrain.recipes.early_stopping import (
    Figures,
    check_metric,
    is_better,
    out_of_patience,
)
from megatrain.recipes.ranks.barrier import awaiting
from megatrain.recipes.sample import answers_to
from megatrain.recipes.signals import Stopped, StopRequest
from megatrain.recipes.state import BEGINNING, Run
from megatrain.recipes.step_metrics import measure, metrics_of
from megatrain.recipes.sweeps import evaluated
from megatrain.reporting.metrics import StepTime, write_samples
from megatrain.reporting.tracing import record_timeline
from megatrain.storage.checkpoint import save_checkpoint, write_final
from megatrain.storage.run_folder import checkpoint_name

logger = logging.getLogger("megatrain")

TRACED_STEP = 3  # of a process: the first compiles, the second is the first to wait for an update


def fit(run: Run, stop: StopRequest) -> bool:
    """Train to the end of the data. False: a signal stopped the run before, and it is saved."""
    config = run.config
    if run.step == 0:
        found = evaluate(run, stop)
        if found and not math.isfinite(loss := found.get("eval_loss", 0.0)):
            raise DivergedError(
                f"the held-out loss before the first step is {loss}: the model's weights or "
                f"settings do not compute; check {config.model.source}"
            )
        if stop.came():
            save(run, None)
            return stop.says(f"after step {run.step}; the run is saved")
        check_metric(config, found)
    for batch, data_s in () if out_of_patience(config, run.waited) else timed(run, stop):
        if batch is None:
            return stop.says(f"while step {run.step + 1} waited for rows; the run is saved")
        train_step(run, batch, data_s)
        last = run.step == run.total_steps
        # after the last step nothing would be left to resume, so no request is heeded
        request = StopRequest() if last else stop
        # while steps are skipped the weights may be lost: good checkpoints stay
        saving = last or (due(config.checkpoint.every, run.step) and not run.non_finite)
        # each checkpoint has its held-out loss; a run that is asked to stop saves at once
        found = evaluate(run, request) if saving or due(config.train.eval_every, run.step) else None
        run.report.write()
        saving = saving or better(run, found)
        enough = count_patience(run, found)
        if last or enough or request.came():
            save(run, found)
        elif not saving or not try_to_save(run, found):
            continue
        if enough:
            break
        if request.came():  # perhaps while the checkpoint was written
            return stop.says(f"after step {run.step}; the run is saved")
    finish(run)
    return True


def finish(run: Run) -> None:
    """Write `final/` as the config asks for it. Raises StorageError."""
    if run.config.checkpoint.final != "none":
        run.engine.world.on_rank0(partial(write_final_of, run))


def write_final_of(run: Run) -> None:
    full = run.config.checkpoint.final == "full"
    write_final(run.config.output, full=full, card=model_card(run))


def timed(run: Run, stop: StopRequest) -> Iterator[tuple[StepBatch | None, float]]:
    """(batch, seconds that the loop stood still for it).

    A run that is asked to stop while it waits for rows is saved, and the batch is None; so is one
    whose rows cannot be had, which raises why.
    """
    how = () if run.loader.windows is None else (awaiting(run.engine.world, stop, run.next_step),)
    batches = run.loader.batches(*how)
    while True:
        waiting_since = time.perf_counter()
        try:
            batch = next(batches, None)
        except Stopped:
            save_unless_saved(run)
            yield None, 0.0
            return
        except MegaTrainError:
            save_unless_saved(run)
            raise
        if batch is None:
            return
        yield batch, time.perf_counter() - waiting_since


def due(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0


def still_to_come(config: Config, evaluates: bool, total: int, step: int) -> dict[str, int]:
    """Count the evaluations and saves that follow step `step` of `total`, the last step's included.

    Not foreseen: saves of better evaluations, and an end by patience.

    evaluates: something is held out.
    """

    def multiples(*every: int | None) -> int:
        return 0 if None in every else total // math.lcm(*every) - step // math.lcm(*every)  # type: ignore[arg-type]

    save, look = config.checkpoint.every, config.train.eval_every
    last = int(step < total)
    saves = multiples(save) + last - int(last and due(save, total))
    looks = multiples(save) + multiples(look) - multiples(save, look)
    looks += last - int(last and (due(save, total) or due(look, total)))
    return {"saving": saves, "evaluating": looks if evaluates else 0}


# -- a step ----------------------------------------------------------------------------------------


def train_step(run: Run, batch: StepBatch, data_s: float) -> None:
    """One optimizer step, its metrics written and shown."""
    rate = run.learning_rate
    with traced(run):
        started, before = time.perf_counter(), run.energy.read()
        try:
            with run.progress.doing("step", f"step {run.step + 1}"):
                result = run.engine.train_step(batch.micro_batches, run.loss, rate)
        except DivergedError as error:
            raise DivergedError(f"step {run.step + 1}: {error}; {way_back(run)}") from error
        seconds = time.perf_counter() - started + data_s
        measured = run.energy.read().since(before)
    spent = StepTime.of(seconds, {**result.stalls_s, "data": data_s})
    took = measure(run, seconds, spent, measured)
    run.step += 1
    run.tokens += batch.tokens
    run.spent_s, run.spent = run.spent_s + took.seconds, run.spent + took.drawn
    run.steady.add(spent)
    metrics = metrics_of(run, batch, result, rate, took)
    run.writer.write_step(metrics)
    run.progress.step(metrics)
    stop_if_lost(run, batch, result)


@contextmanager
def traced(run: Run) -> Iterator[None]:
    """Write and show the timeline of the next step, if it is the one. Raises StorageError."""
    steady = min(run.first_step + TRACED_STEP, run.total_steps)
    if run.trace is None or run.step + 1 != steady or not run.engine.world.is_first:
        yield
        return
    with record_timeline(run.trace, run.engine.device) as trace:
        yield
    run.progress.traced(run.step + 1, run.trace, trace.table)


# -- evaluation ------------------------------------------------------------------------------------


def evaluate(run: Run, stop: StopRequest) -> Figures | None:
    """Compute, write and show the figures of the held-out rows, by name, and answer the prompts.

    None if there is nothing to evaluate, or the run was asked to stop before the end.
    """
    if run.held_out is None and not run.prompts:
        return None
    started, found, figures = time.perf_counter(), None, Figures()
    with run.progress.doing("evaluating"):
        if run.held_out is not None:
            limit = run.config.train.eval_rows
            batches = run.loader.batches_of(run.held_out, limit, run.held_out_references)
            found = evaluated(run.engine, batches, run.loss, run.sweep_tokens, stop)
            if found is None:
                return None
            figures = {f"eval_{name}": value for name, value in found.metrics.items()}
        new = run.config.eval.max_new_tokens
        answers = answers_to(run.prompts, run.engine, run.model, new, stop)
        if answers is None:
            return None
        if run.engine.world.is_first:
            write_samples(run.config.output, run.step, answers)
    seconds = time.perf_counter() - started
    loss, targets = (None, 0) if found is None else (found.loss, found.target_tokens)
    run.writer.write_eval(run.step, loss, targets, seconds, figures)
    run.progress.evaluated(run.step, loss, seconds)
    return figures if loss is None else {"eval_loss": loss, **figures}


def better(run: Run, found: Figures | None) -> bool:
    """True for the best evaluation so far, whose step is saved and becomes `best`."""
    return is_better(run.config, found, run.best)


def count_patience(run: Run, found: Figures | None) -> bool:
    """Count evaluations in a row that were not better; True if they are as many as may be."""
    if run.config.checkpoint.metric not in (found or {}):
        return False
    run.waited = 0 if better(run, found) else run.waited + 1
    if not out_of_patience(run.config, run.waited):
        return False
    logger.info(
        f"step {run.step}: the last {run.waited} evaluations were not better than step "
        f"{run.best.get('step')}; training ends (checkpoint.patience)"
    )
    return True


# -- saving ----------------------------------------------------------------------------------------


def save(run: Run, found: Figures | None) -> None:
    """Write a checkpoint of this step while its update still finishes. Raises StorageError.

    found: by the evaluation of this step, if there was one.
    """
    model, before, started = run.model, run.best, time.perf_counter()
    gone = run.lock is not None and not run.lock.in_place()
    if any(run.engine.world.all_gather(gone)):
        write_folder_anew(run)
    if found and better(run, found):
        metric = run.config.checkpoint.metric
        run.best = {"step": run.step, metric: found[metric]}
    state = {name: getattr(run, name) for name in BEGINNING}
    about = {"position": run.loader.position(), "metrics": run.writer.state()}
    try:
        with run.progress.doing("saving", counted=BYTES_WRITTEN):
            path = save_checkpoint(
                run.config.output,
                run.step,
                run.engine,
                model.tokenizer,
                {**state, **about, **run.asked},
                run.config.checkpoint.keep,
                model.generation,
                source=model.digests,
                code=model.code,
                best=run.best.get("step"),
                abandoned=run.abandoned,
            )
    except StorageError:
        run.best = before
        raise
    run.unproven, run.abandoned = path, ()
    run.progress.saved(path, time.perf_counter() - started)


def save_unless_saved(run: Run) -> None:
    """Save where a run ends between two saves."""
    saved = (run.config.output / checkpoint_name(run.step)).is_dir()
    if run.step > run.first_step and not run.engine.world.broadcast(saved):
        save(run, None)


def write_folder_anew(run: Run) -> None:
    """After somebody has removed or replaced the run folder. Raises StorageError."""
    folder = run.config.output

    def has_best() -> bool:
        assert run.lock is not None
        said = "was removed or replaced while the run goes on; it is written anew"
        logger.warning(f"{folder}: {said}")
        run.lock.retake()
        describe_run(run)
        run.writer.reopen()
        return (folder / checkpoint_name(run.best.get("step", -1))).is_dir()

    if not run.engine.world.on_rank0(has_best):
        run.best = {}
    run.unproven, run.abandoned = None, ()


def try_to_save(run: Run, found: Figures | None) -> bool:
    """`save` in the middle of a run, which goes on if that fails: its weights are nowhere else."""
    try:
        save(run, found)
    except StorageError as error:
        if run.engine.world.is_first:  # all have the same
            logger.error(f"step {run.step} is not saved, training goes on: {error}")
        return False
    return True
