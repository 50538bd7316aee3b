"""The training loop: steps, evaluations and saves. Methods differ in rows and losses only."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from safetensors.torch import save as to_safetensors

from megatrain.config import Config
from megatrain.data.loader import MicroBatch, StepBatch
from megatrain.data.rows import IndexArray, Rows, default_cache
from megatrain.engine.engine import Engine
from megatrain.engine.objective import AnyLoss, EvalResult, StepResult, joined_losses
from megatrain.errors import DataError, DivergedError, MegaTrainError, StorageError, logger
from megatrain.heartbeat import BYTES_WRITTEN, TOKENS_SWEPT
from megatrain.losses import divergence_of
from megatrain.machine.hardware import read_hardware
from megatrain.recipes.card import model_card
from megatrain.recipes.frozen import sweeps, taught
from megatrain.recipes.ranks.rendezvous import awaiting
from megatrain.recipes.rl.own_answers import on_policy
from megatrain.recipes.rl.rollouts import Rollouts
from megatrain.recipes.sample import answers_to
from megatrain.recipes.setup import check_metric
from megatrain.recipes.signals import Stopped, StopRequest
from megatrain.recipes.state import BEGINNING, Run, Saving
from megatrain.reporting.energy import Energy, known_sum
from megatrain.reporting.meters import peak_host_bytes
from megatrain.reporting.metrics import StepMetrics, StepTime, write_samples
from megatrain.reporting.progress import IN_FILE, STEP
from megatrain.reporting.summary import advise
from megatrain.reporting.tracing import record_timeline
from megatrain.storage.beside import Beside
from megatrain.storage.checkpoint import Checkpointable, save_checkpoint, write_final
from megatrain.storage.hashed_file import write_bytes
from megatrain.storage.passthrough import Passthrough
from megatrain.storage.run_folder import checkpoint_name, prove

Figures = dict[str, float]  # of an evaluation, as metrics.jsonl names them
Written = Callable[[], tuple[Path, Passthrough]]  # a save, and what is carried along from then on
TRACED_STEP = 3  # of a process: the first compiles, the second is the first to wait for an update
SWEEP_MICRO_BATCHES = 4  # at least, where weights are streamed for an evaluation
NON_FINITE_IN_A_ROW = 5  # one bad batch is skipped; this many mean that the weights are lost
SPIKES_KEPT = 10  # batches of a process
LOWER = 10  # the divisor of the learning rate that is proposed


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
    for batch, data_s in () if out_of_patience(run) else timed(run, stop):
        if batch is None:
            return stop.says(f"while step {run.step + 1} waited for rows; the run is saved")
        train_step(run, batch, data_s, stop)
        if run.saving is not None and run.saving.written.done():
            finish_save(run)
        last = run.step == run.total_steps
        # after the last step nothing would be left to resume, so no request is heeded
        request = StopRequest() if last else stop
        if request.pending:
            logger.info(f"step {run.step}: {request.pending}", extra={IN_FILE: True})
        wanted = due(run.save_every, run.step) or due(run.push_every, run.step)
        wanted = stop.asks_to_save() or wanted
        # while steps are skipped the weights may be lost: good checkpoints stay
        saving = last or (wanted and not run.non_finite)
        # each checkpoint has its held-out loss; a run that is asked to stop saves at once
        evaluates = saving or due(run.eval_every, run.step)
        found = evaluate(run, request) if evaluates else None
        run.report.write()
        saving = saving or is_better(config, found, run.best)
        enough = count_patience(run, found)
        must = last or enough or request.came()
        if not (must or saving) or not save(run, found, must=must):
            continue
        if enough:
            break
        if request.came():  # perhaps while the checkpoint was written
            finish_save(run, must=True)
            owed = evaluates and found is None and (run.held_out is not None or run.prompts)
            saved = "the run is saved, but not evaluated" if owed else "the run is saved"
            return stop.says(f"after step {run.step}; {saved}")
    if (final := config.checkpoint.final) != "none":
        run.engine.world.on_rank0(
            lambda: write_final(config.output, full=final == "full", card=model_card(run))
        )
    return True


def timed(run: Run, stop: StopRequest) -> Iterator[tuple[StepBatch | None, float]]:
    """(batch, seconds that the loop stood still for it). A run that is asked to stop while it waits
    for rows is saved, and the batch is None; so is one whose rows cannot be had, which raises
    why."""
    batches: Iterator[StepBatch]
    if isinstance(run.loader, Rollouts):
        batches = run.loader.batches(stop)
    elif run.loader.windows is not None:
        batches = run.loader.batches(awaiting(run.engine.world, stop, lambda: run.step + 1))
    else:
        batches = run.loader.batches()
    while True:
        waiting_since = time.perf_counter()
        try:
            batch = next(batches, None)
            batch = batch and on_policy(run, batch)
        except (Stopped, MegaTrainError) as end:
            finish_save(run)
            saved = (run.config.output / checkpoint_name(run.step)).is_dir()
            if run.step > run.first_step and not run.engine.world.broadcast(saved):
                save(run, None)
            if not isinstance(end, Stopped):
                raise
            yield None, 0.0
            return
        if batch is None:
            return
        yield batch, time.perf_counter() - waiting_since


def due(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0


def still_to_come(
    save: int | None, look: int | None, evaluates: bool, total: int, step: int
) -> dict[str, int]:
    """Count the evaluations and saves that follow step `step` of `total`, the last step's included.
    Not foreseen: saves of better evaluations, and an end by patience. save, look: steps between."""

    def multiples(*every: int | None) -> int:
        return 0 if None in every else total // math.lcm(*every) - step // math.lcm(*every)  # type: ignore[arg-type]

    last = int(step < total)
    saves = multiples(save) + last - int(last and due(save, total))
    looks = multiples(save) + multiples(look) - multiples(save, look)
    looks += last - int(last and (due(save, total) or due(look, total)))
    return {"saving": saves, "evaluating": looks if evaluates else 0}


# -- a step ----------------------------------------------------------------------------------------


def train_step(run: Run, batch: StepBatch, data_s: float, stop: StopRequest) -> None:
    """One optimizer step, its metrics written and shown."""
    rate = run.learning_rate
    with _traced(run):
        started, before = time.perf_counter(), run.energy.read()
        try:
            with (
                run.progress.doing(STEP, f"step {run.step + 1}"),
                taught(run.loss, batch.micro_batches) as given,
            ):
                result = run.engine.train_step(given, run.loss, rate)
        except DivergedError as error:
            raise DivergedError(f"step {run.step + 1}: {error}; {way_back(run)}") from error
        if run.step == 0:
            check_first_rewards(run, result)
        seconds = time.perf_counter() - started + data_s
        drawn = run.energy.read().since(before)
    writing = {"data": data_s - sum(batch.spent_s.values()), **batch.spent_s}
    spent = StepTime.of(seconds, {**result.stalls_s, **writing})
    run.step += 1
    run.tokens += batch.tokens
    run.steady.add(spent)
    metrics = _measure(run, batch, result, rate, spent, drawn, seconds, stop)
    run.writer.write_step(metrics)
    run.progress.step(metrics)
    stop_if_lost(run, batch, result)


def _traced(run: Run) -> AbstractContextManager[None]:
    """Write and show the timeline of the next step, if it is the one. Raises StorageError."""
    steady = min(run.first_step + TRACED_STEP, run.total_steps)
    if run.trace is None or run.step + 1 != steady or not run.engine.world.is_first:
        return nullcontext()
    return record_timeline(run.trace, run.engine.device, f"step {run.step + 1}", logger.info)


def _measure(
    run: Run,
    batch: StepBatch,
    result: StepResult,
    rate: float,
    spent: StepTime,
    drawn: Energy,
    seconds: float,
    stop: StopRequest,
) -> StepMetrics:
    """The line of metrics.jsonl for the step that was just taken: seconds and memory of the rank
    that has most, energy and host RAM of all. All ranks call it, and heed requests to stop."""
    economy, world, gpu = run.config.economy, run.engine.world, run.machine.hardware.gpu
    gpu_w = economy.gpu_power_w if gpu else None
    drawn = drawn.or_given(seconds, gpu_w, economy.host_power_w)
    host_j = None if world.local_rank else drawn.host_j  # another one counts the host
    gpu_bytes, host_bytes = run.meter.peak_bytes(), peak_host_bytes(world.local_size)
    mine = seconds, spent.compute, drawn.gpu_j, host_j, gpu_bytes, host_bytes, stop.here
    took, computed, gpu_j, hosts_j, gpus, hosts, asked = zip(*world.all_gather(mine), strict=True)
    stop.heed(asked)
    seconds, drawn = max(took), Energy(known_sum(*gpu_j), known_sum(*hosts_j))
    run.spent_s, run.spent = run.spent_s + seconds, run.spent + drawn
    mfu = run.work.mfu(batch.lengths, seconds, gpu.name if gpu else None)
    mfu = None if mfu is None else mfu / world.size
    steady = run.steady.total, run.facts, mfu, run.load.read(), run.steady.median_s
    return StepMetrics(
        step=run.step,
        loss=result.loss,
        metrics={**batch.metrics, **result.metrics},
        aux_loss=result.aux_loss,
        expert_load_max=result.expert_load_max,
        grad_norm=result.grad_norm,
        lr=rate,
        tokens=batch.tokens,
        target_tokens=result.target_tokens,
        epoch=batch.epoch,
        step_s=seconds,
        tokens_per_s=batch.tokens / seconds,
        tflops=run.work.tflops(batch.tokens, seconds) / world.size,
        mfu=mfu,
        gpu_peak_bytes=max((size for size in gpus if size is not None), default=None),
        host_bytes=sum(hosts) // world.hosts,
        skipped=result.skipped,
        spike=look_for_spikes(run, batch, result),
        energy_j=drawn.total_j,
        slowest_rank=None if world.is_alone else computed.index(max(computed)),
        time=spent,
        advice=advise(*steady),
    )


# -- steps that went wrong -------------------------------------------------------------------------

# Share of an answer's log-probability, and what is added to it, that rounding may take.
ROUNDING, LEAST = 0.05, 0.1


def check_first_rewards(run: Run, result: StepResult) -> None:
    """Raise DataError where answers are rewarded at a run's first step, while the model still is
    its own reference: the log-probabilities of the reference are another model's then."""
    if not getattr(run.loss, "reference", False):
        return
    beta = run.config.of_method["beta"]
    for side in ("chosen", "rejected"):
        reward, logps = (result.metrics.get(f"{kind}/{side}", 0.0) for kind in ("rewards", "logps"))
        if abs(reward) > beta * (ROUNDING * abs(logps) + LEAST):
            raise DataError(
                f"step 1: rewards/{side} is {reward:.3g} where it begins at 0: the reference's "
                "log-probabilities are not those of the model that the run begins with; remove "
                f"{default_cache() / 'reference'}, where they are kept, and start again"
            )


def look_for_spikes(run: Run, batch: StepBatch, result: StepResult) -> bool:
    """Warn of a loss or norm far above the recent ones, and keep the batch."""
    # the loss of answers that were written says nothing, and their gradient is 0 now and then
    if result.target_tokens == 0 or isinstance(run.loader, Rollouts):
        return False
    found = run.recent.look(result.loss, result.grad_norm)
    if found:
        run.spikes += 1
        kept = "" if run.spikes > SPIKES_KEPT else keep_batch(run, batch, f"spike-{run.step}")
        logger.warning(f"step {run.step}: {'; '.join(found)}{kept}")
    return bool(found)


def keep_batch(run: Run, batch: StepBatch, name: str) -> str:
    """Write the step's micro-batches into the run folder; says so, or that it could not."""
    numbered = enumerate(batch.micro_batches)
    tensors = {f"{key}.{i}": value for i, mb in numbered for key, value in mb.items()}
    world = run.engine.world
    of_rank = "" if world.is_alone else f"-rank-{world.rank}"  # each has some of the rows
    path = run.config.output / f"{name}{of_rank}.safetensors"
    try:
        write_bytes(path, to_safetensors(tensors))
    except StorageError as error:
        return f" (the batch is not kept: {error})"
    return f" (the batch is in {path})"


# why: decision 0051
def stop_if_lost(run: Run, batch: StepBatch, result: StepResult) -> None:
    """Raise DivergedError, and keep the batch, after too many non-finite steps in a row. A finite
    step proves the checkpoint before it: the link `proven` points to the newest."""
    if result.target_tokens == 0 or not result.skipped:
        run.non_finite = 0
        if result.target_tokens and math.isfinite(result.loss):
            note_proven(run)
        return
    run.non_finite += 1
    logger.warning(
        f"step {run.step}: the loss or the gradient is not finite; skipped, the weights are "
        "unchanged"
    )
    if run.non_finite >= NON_FINITE_IN_A_ROW:
        kept = keep_batch(run, batch, f"bad-batch-{run.step}")
        lost = f"{run.non_finite} steps in a row were not finite{kept}"
        raise DivergedError(f"{lost}; {way_back(run)}")


def note_proven(run: Run) -> None:
    """Note that a finite step followed the last checkpoint, also one that is being written."""
    if run.saving is not None:
        run.saving.proven = True
    if run.unproven is None:
        return
    try:
        if run.engine.world.is_first:
            prove(run.config.output, run.unproven, run.config.checkpoint.keep)
    except StorageError as error:  # the next save meets it, too
        logger.warning(str(error))
    run.unproven = None


def way_back(run: Run) -> str:
    """The command to type after a divergence."""
    finish_save(run)
    folder = run.config.output
    rate = f"train.learning_rate={run.config.train.learning_rate / LOWER:g}"
    proven, quoted = folder / "proven", shlex.quote(str(folder))
    if proven.exists():
        name = proven.resolve().name
        return (
            f"go back to {name}, the newest that a finite step followed, with a lower rate: "
            f"megatrain resume {quoted} --checkpoint {name} {rate}"
        )
    anew = shlex.quote(str(folder.with_name(f"{folder.name}-2")))
    config = shlex.quote(str(folder / "config.yaml"))
    return (
        "no checkpoint was followed by a finite step: start again with a lower rate: "
        f"megatrain train {config} output={anew} {rate}"
    )


# -- evaluation ------------------------------------------------------------------------------------


def evaluate(run: Run, stop: StopRequest) -> Figures | None:
    """Compute, write and show the figures of the held-out rows, by name, and answer the prompts.
    None if there is nothing to evaluate, or the run was asked to stop before the end."""
    if run.held_out is None and not run.prompts:
        return None
    started, loss, targets = time.perf_counter(), None, 0
    named: Figures | None = {}
    limit, swept = run.config.train.eval_rows, None
    if run.held_out is not None:
        swept = tokens_to_sweep(run.engine, run.held_out, slice(limit))
    with run.progress.doing("evaluating", total=swept, counted=TOKENS_SWEPT):
        if isinstance(run.loader, Rollouts):
            named = run.loader.evaluate(limit, stop)
        elif run.held_out is not None:
            batches = run.loader.batches_of(run.held_out, limit, run.held_out_references)
            found = evaluated(run.engine, batches, run.loss, run.sweep_tokens, stop)
            if found is None:
                return None
            loss, targets, named = found.loss, found.target_tokens, found.metrics
        if named is None:
            return None
        new = run.config.eval.max_new_tokens
        answers = answers_to(run.prompts, run.engine, run.model, new, stop)
        if answers is None:
            return None
        if run.engine.world.is_first:
            write_samples(run.config.output, run.step, answers)
    seconds = time.perf_counter() - started
    figures = {f"eval_{name}": value for name, value in named.items()}
    run.writer.write_eval(run.step, loss, targets, seconds, figures)
    name = "held-out reward" if "eval_reward" in figures else "held-out loss"
    run.progress.evaluated(run.step, figures.get("eval_reward", loss), seconds, name)
    return figures if loss is None else {"eval_loss": loss, **figures}


def evaluated(
    engine: Engine,
    batches: Iterable[MicroBatch],
    loss: AnyLoss,
    sweep_tokens: int,
    stop: StopRequest,
) -> EvalResult | None:
    """The loss over micro-batches; None if asked to stop. sweep_tokens: padded tokens that a rank
    computes in one sweep of the weights."""
    found, world, loss = [], engine.world, divergence_of(loss) or loss
    for part in sweeps(batches, sweep_tokens * world.size):
        if stop.came():
            return None
        with taught(loss, part[world.dp_rank :: world.dp_size]) as given:
            found.append(engine.evaluate(given, loss))
    return joined_losses(found, loss)


def tokens_to_sweep(engine: Engine, rows: Rows, chosen: IndexArray | slice) -> float:
    """The amount of TOKENS_SWEPT that a rank will count over these rows, about."""
    tokens = int(rows.side_lengths[chosen].sum())
    return tokens * len(engine.skeleton.layers) / engine.world.size


def is_better(config: Config, found: Figures | None, best: Mapping[str, Any]) -> bool:
    """True for an evaluation that beats `best`: the metric's value by its name, empty at first.
    Its step is saved and becomes `best`."""
    checkpoint = config.checkpoint
    value, before = (found or {}).get(checkpoint.metric), best.get(checkpoint.metric)
    if value is None or not math.isfinite(value) or before is None:
        return value is not None and math.isfinite(value)
    greater = checkpoint.greater_is_better
    if greater == "auto":
        greater = not checkpoint.metric.endswith("loss")
    return bool(value > before if greater else value < before)


def count_patience(run: Run, found: Figures | None) -> bool:
    """Count evaluations in a row that were not better; True if they are as many as may be."""
    if run.config.checkpoint.metric not in (found or {}):
        return False
    run.waited = 0 if is_better(run.config, found, run.best) else run.waited + 1
    if not out_of_patience(run):
        return False
    logger.info(
        f"step {run.step}: the last {run.waited} evaluations were not better than step "
        f"{run.best.get('step')}; training ends (checkpoint.patience)"
    )
    return True


def out_of_patience(run: Run) -> bool:
    patience = run.config.checkpoint.patience
    return patience is not None and run.waited >= patience


# -- saving ----------------------------------------------------------------------------------------


def save(run: Run, found: Figures | None, *, must: bool = True) -> bool:
    """Write a checkpoint of this step while its update still finishes. found: by the evaluation of
    this step, if there was one. must: before this returns, and raising StorageError; otherwise
    while training goes on, if there is room for that, and a failure is logged, and False: the
    weights are nowhere else."""
    finish_save(run)
    model, best, step, began = run.model, run.best, run.step, time.perf_counter()
    run.engine.world.on_rank0(lambda: check_in_place(run))
    if found and is_better(run.config, found, best):
        metric = run.config.checkpoint.metric
        best = {"step": step, metric: found[metric]}
    state = {name: getattr(run, name) for name in BEGINNING} | {"best": best}
    state["position"] = run.loader.position()

    def write(engine: Checkpointable) -> Path:
        return save_checkpoint(
            run.config.output,
            step,
            engine,
            model.tokenizer,
            {**state, **run.asked},
            run.config.checkpoint.keep,
            model.generation,
            source=model.digests,
            code=model.code,
            best=best.get("step"),
            abandoned=run.abandoned,
        )

    saving = Saving(step, run.best, began)
    run.best = best
    if not must and run.beside is not None and run.beside.usable:
        run.saving, saving.written = saving, run.beside.save(write)
        return True
    return take_over(
        run, saving, lambda: (write(run.engine), run.engine.passthrough), must=must, beside=False
    )


def take_over(run: Run, saving: Saving, written: Written, *, must: bool, beside: bool) -> bool:
    """Have a checkpoint written, or wait for it, note it, and upload it if it is time. must: raise
    StorageError where it is not written; otherwise that is logged, and False."""
    total = run.plan.disk.get("checkpoint 1", 0) / run.engine.world.size
    try:
        with run.progress.doing("saving", total=total, counted=BYTES_WRITTEN):
            path, run.engine.passthrough = written()
    except StorageError as error:
        run.best = saving.best_before
        if must:
            raise
        if run.engine.world.is_first:  # all have the same
            logger.error(f"step {saving.step} is not saved, training goes on: {error}")
        return False
    run.unproven, run.abandoned = path, ()
    run.progress.saved(path, time.perf_counter() - saving.began, beside=beside)
    if run.uploads is not None and due(run.push_every, saving.step):
        run.uploads.begin(path)
    if saving.proven:
        note_proven(run)
    return True


@contextmanager
def saves_beside(run: Run) -> Iterator[None]:
    """Let saves go on beside the training inside, if there are some before its end, and room for
    them: as planned, and now."""
    config, plan = run.config, run.plan
    counts = still_to_come(run.save_every, None, False, run.total_steps, run.step)
    if plan.saves_beside and counts["saving"] > 1:
        now = read_hardware(config.output, "cpu")
        if now.host_available_bytes - now.resident_bytes >= plan.disk["checkpoint 1"]:
            run.beside = Beside(run.engine)
    try:
        yield
    finally:
        finish_save(run)
        if run.beside is not None:
            run.beside.close()


def finish_save(run: Run, *, must: bool = False) -> None:
    """Wait for a checkpoint that is written beside training, and take it over. must: raise
    StorageError where it was not written; otherwise that is logged."""
    saving, run.saving = run.saving, None
    if saving is not None:
        take_over(run, saving, saving.written.result, must=must, beside=True)


def check_in_place(run: Run) -> None:
    if run.lock is not None and not run.lock.in_place():
        raise StorageError(
            f"{run.config.output}: was removed or replaced while the run goes on; nothing is saved "
            "there: bring it back and resume, or start again"
        )
