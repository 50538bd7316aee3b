"""The training loop, and the run that it drives: `sft` and `pretrain` differ in their rows, not in their steps."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from megatrain.config import Config
from megatrain.data import Loader, held_out_batches
from megatrain.data.dataset import Rows
from megatrain.data.loader import MicroBatch, StepBatch
from megatrain.engine.engine import Engine
from megatrain.engine.results import StepResult
from megatrain.errors import DivergedError, StorageError
from megatrain.losses import next_token
from megatrain.optim.schedules import SCHEDULES, warmup_steps
from megatrain.recipes.setup import Model
from megatrain.recipes.signals import StopRequest
from megatrain.reporting.advice import Facts, advise
from megatrain.reporting.energy import Energy, EnergyMeter
from megatrain.reporting.meters import GpuMeter, peak_host_bytes
from megatrain.reporting.metrics import MetricsWriter, SteadyTime, StepMetrics, StepTime
from megatrain.reporting.mfu import ModelFlops
from megatrain.reporting.progress import Progress
from megatrain.reporting.tracing import record_timeline
from megatrain.storage.checkpoint import save_checkpoint, write_final

logger = logging.getLogger("megatrain")

TRACED_STEP = 3  # of a process: the first compiles, and the second is the first that finds an update to wait for
NON_FINITE_IN_A_ROW = (
    5  # one bad batch is skipped and forgotten; so many in a row mean that the weights are lost
)


@dataclass
class Run:
    """Everything a loop needs, and where it stands. `step` counts finished steps, skipped ones included."""

    config: Config
    run_dir: Path
    model: Model
    engine: Engine
    loader: Loader
    held_out: Rows | None
    micro_batch_tokens: int  # padded tokens computed at once
    sweep_tokens: int  # padded tokens of held-out rows that share one sweep of the weights
    writer: MetricsWriter
    progress: Progress
    meter: GpuMeter
    energy: EnergyMeter
    work: ModelFlops
    gpu_name: str | None
    total_steps: int
    facts: Facts  # what the advice goes by, besides times
    trace: Path | None = None  # where the timeline of one step goes, if anywhere
    traced_step: int = 0
    steady: SteadyTime = field(default_factory=SteadyTime)
    advice: str = ""  # the latest
    spent_s: float = 0.0  # in the steps of this process, and what they took
    spent: Energy = field(default_factory=lambda: Energy(0.0, 0.0))
    step: int = 0
    tokens: int = 0
    first_tokens: int = 0  # those of the processes before this one
    best: dict[str, Any] = field(
        default_factory=dict
    )  # step and loss of the best evaluation so far
    non_finite: int = 0  # steps in a row

    @property
    def learning_rate(self) -> float:
        """Of the step about to be made."""
        train = self.config.train
        schedule = SCHEDULES[train.schedule]
        shares = {} if train.decay is None else {"decay_share": train.decay}
        return schedule(
            self.step,
            base=train.learning_rate,
            total_steps=self.total_steps,
            warmup_steps=warmup_steps(train.warmup, self.total_steps),
            min_ratio=train.min_lr_ratio,
            **shares,
        )

    def watch(self, path: Path | None) -> None:
        """Write the timeline of one step to come to `path`: a steady one, if the run is long enough. None: of no step."""
        self.trace, self.traced_step = path, min(self.step + TRACED_STEP, self.total_steps)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps besides the engine: JSON-able, and where a resumed run begins."""
        own = {
            "step": self.step,
            "tokens": self.tokens,
            "best": self.best,
            "non_finite": self.non_finite,
        }
        return {**own, "position": self.loader.position()}


def fit(run: Run, stop: StopRequest) -> bool:
    """Train to the end of the data. Returns False if a signal stopped the run before, with a checkpoint to resume from."""
    config = run.config
    if run.step == 0:
        evaluate(run, stop)
        if stop.came():
            return stopped(run, None)
    for batch, data_s in timed(run.loader):
        train_step(run, batch, data_s)
        last = run.step == run.total_steps
        request = (
            StopRequest() if last else stop
        )  # the end is followed through whatever is asked: nothing would be left to resume
        # while steps are skipped because the weights may be lost, good checkpoints must not give way to bad ones
        saving = last or (due(config.checkpoint.every, run.step) and not run.non_finite)
        # A checkpoint is worth its held-out loss, or `best` could not be told; but a run that is asked to stop saves at once.
        loss = evaluate(run, request) if saving or due(config.train.eval_every, run.step) else None
        if request.came():
            return stopped(run, loss)
        if last:
            save(run, loss)
        elif saving and try_to_save(run, loss) and request.came():
            return stopped(run, loss, saved=True)  # it came while the checkpoint was written
    write_final(run.run_dir)
    return True


def timed(batches: Iterable[StepBatch]) -> Iterator[tuple[StepBatch, float]]:
    """(batch, seconds that the loop stood still for it)."""
    waiting_since = time.perf_counter()
    for batch in batches:
        yield batch, time.perf_counter() - waiting_since
        waiting_since = time.perf_counter()


def due(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0


# -- a step -------------------------------------------------------------------------------------------------------------------------


def train_step(run: Run, batch: StepBatch, data_s: float) -> None:
    """One optimizer step, its metrics written and shown."""
    rate = run.learning_rate
    with traced(run):
        started, before = time.perf_counter(), run.energy.read()
        result = run.engine.train_step(batch.micro_batches, next_token, rate)
        seconds = time.perf_counter() - started + data_s
        drawn = (
            run.energy.read()
            .since(before)
            .or_given(
                seconds,
                run.config.economy.gpu_power_w if run.gpu_name else None,
                run.config.economy.host_power_w,
            )
        )
    run.step += 1
    run.tokens += batch.tokens
    run.spent_s, run.spent = run.spent_s + seconds, run.spent + drawn
    spent = StepTime.of(seconds, {**result.stalls_s, "data": data_s})
    run.steady.add(spent)
    mfu = run.work.mfu(batch.lengths, seconds, run.gpu_name)
    run.advice = advise(run.steady.total, run.facts, mfu)
    metrics = StepMetrics(
        step=run.step,
        loss=result.loss,
        grad_norm=result.grad_norm,
        lr=rate,
        tokens=batch.tokens,
        target_tokens=result.target_tokens,
        epoch=batch.epoch,
        step_s=seconds,
        tokens_per_s=batch.tokens / seconds,
        tflops=run.work.tflops(batch.tokens, seconds),
        mfu=mfu,
        gpu_peak_bytes=run.meter.peak_bytes(),
        host_bytes=peak_host_bytes(),
        skipped=result.skipped,
        energy_j=drawn.total_j,
        time=spent,
        advice=run.advice,
    )
    run.writer.write_step(metrics)
    run.progress.step(metrics)
    watch(run, batch, result)


@contextmanager
def traced(run: Run) -> Iterator[None]:
    """Watch the step about to be made, if it is the one to be watched, and show what took longest in it. Raises StorageError."""
    if run.trace is None or run.step + 1 != run.traced_step:
        yield
        return
    with record_timeline(run.trace, run.engine.device) as trace:
        yield
    run.progress.traced(run.step + 1, run.trace, trace.table)


def watch(run: Run, batch: StepBatch, result: StepResult) -> None:
    """Count steps that were skipped because something was not finite; stop, keeping the batch, when there are too many in a row."""
    if not result.skipped or result.target_tokens == 0:
        run.non_finite = 0
        return
    run.non_finite += 1
    logger.warning(
        f"step {run.step}: the loss or the gradient is not finite; skipped, the weights are unchanged"
    )
    if run.non_finite < NON_FINITE_IN_A_ROW:
        return
    kept = run.run_dir / f"bad-batch-{run.step}.safetensors"
    save_file(
        {
            f"{name}.{i}": value
            for i, mb in enumerate(batch.micro_batches)
            for name, value in mb.items()
        },
        kept,
    )
    raise DivergedError(
        f"{run.non_finite} steps in a row were not finite (the last batch is in {kept}); {way_back(run)} with a lower train.learning_rate"
    )


def way_back(run: Run) -> str:
    return (
        "resume from the last checkpoint"
        if (run.run_dir / "last").exists()
        else "no checkpoint was written yet: start again"
    )


# -- evaluation ---------------------------------------------------------------------------------------------------------------------


def evaluate(run: Run, stop: StopRequest) -> float | None:
    """Mean loss over the held-out rows, written and shown; None if nothing is held out, or the run was asked to stop before the end."""
    if run.held_out is None:
        return None
    started = time.perf_counter()
    batches = held_out_batches(
        run.held_out,
        run.micro_batch_tokens,
        run.model.pad_id,
        run.config.train.eval_rows,
        run.loader.pack_to,
    )
    mean = mean_loss(run.engine, batches, run.sweep_tokens, stop)
    if mean is None:
        return None
    loss, targets = mean
    seconds = time.perf_counter() - started
    run.writer.write_eval(run.step, loss, targets, seconds)
    run.progress.evaluated(run.step, loss, seconds)
    return loss


def mean_loss(
    engine: Engine, batches: Iterable[MicroBatch], sweep_tokens: int, stop: StopRequest
) -> tuple[float, int] | None:
    """(mean loss, targets) over micro-batches, `sweep_tokens` padded tokens in one sweep of the weights; None if asked to stop."""
    total, targets = 0.0, 0
    for part in sweeps(batches, sweep_tokens):
        if stop.came():
            return None
        result = engine.evaluate(part, next_token)
        total += result.loss * result.target_tokens
        targets += result.target_tokens
    return (total / targets if targets else 0.0), targets


def sweeps(batches: Iterable[MicroBatch], tokens: int) -> Iterator[list[MicroBatch]]:
    """Consecutive micro-batches together, up to `tokens` padded tokens each."""
    part: list[MicroBatch] = []
    for batch in batches:
        if part and sum(b["input_ids"].numel() for b in part) + batch["input_ids"].numel() > tokens:
            yield part
            part = []
        part.append(batch)
    if part:
        yield part


# -- saving -------------------------------------------------------------------------------------------------------------------------


def save(run: Run, loss: float | None) -> None:
    """A checkpoint of this step, whose held-out loss is `loss` if it was computed. The pending update finishes while it is written."""
    config, model, before = run.config.checkpoint, run.model, run.best
    started = time.perf_counter()
    best = loss is not None and math.isfinite(loss) and loss < before.get("loss", math.inf)
    if best:
        run.best = {"step": run.step, "loss": loss}
    try:
        path = save_checkpoint(
            run.run_dir,
            run.step,
            run.engine,
            model.tokenizer,
            run.state(),
            config.keep,
            model.generation,
            best=best,
        )
    except StorageError:
        run.best = before
        raise
    run.progress.saved(path, time.perf_counter() - started)


def try_to_save(run: Run, loss: float | None) -> bool:
    """`save`, in the middle of a run: on a disk that is full the run goes on, for what it has learnt is nowhere else."""
    try:
        save(run, loss)
    except StorageError as error:
        logger.error(f"step {run.step} is not saved, training goes on: {error}")
        return False
    return True


def stopped(run: Run, loss: float | None, saved: bool = False) -> bool:
    """Save, unless that was just done; always False, as `fit` answers when it was stopped."""
    if not saved:
        save(run, loss)
    logger.info(f"stopped by a signal after step {run.step}; the run is saved")
    return False
