"""Metrics of a step: seconds, energy and memory on this rank and on all, for metrics.jsonl."""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.data.loader import StepBatch
from megatrain.engine.objective import StepResult
from megatrain.recipes.divergence import look_for_spikes
from megatrain.recipes.state import Run
from megatrain.reporting.energy import Energy, known_sum
from megatrain.reporting.meters import peak_host_bytes
from megatrain.reporting.metrics import StepMetrics, StepTime
from megatrain.reporting.summary import advise
from megatrain.world import World


@dataclass(frozen=True)
class Measured:
    """Seconds, energy and memory of a step. slowest: the rank that computed longest, of several."""

    seconds: float
    time: StepTime
    drawn: Energy
    gpu_peak_bytes: int | None
    host_bytes: int
    slowest: int | None = None


def measure(run: Run, seconds: float, time: StepTime, measured: Energy) -> Measured:
    """Measure a step: seconds and memory of the rank that has most, energy and host RAM of all.

    All ranks call it.
    """
    economy, world = run.config.economy, run.engine.world
    gpu_w = economy.gpu_power_w if run.gpu_name else None
    drawn = measured.or_given(seconds, gpu_w, economy.host_power_w)
    if world.local_rank:  # another one counts the host
        drawn = Energy(drawn.gpu_j, None)
    host = peak_host_bytes(world.local_size)
    mine = Measured(seconds, time, drawn, run.meter.peak_bytes(), host)
    return mine if world.is_alone else _of_all(world, mine)


def _of_all(world: World, mine: Measured) -> Measured:
    every = world.all_gather(mine)
    gpus = [each.gpu_peak_bytes for each in every if each.gpu_peak_bytes is not None]
    drawn = Energy(
        known_sum(*(each.drawn.gpu_j for each in every)),
        known_sum(*(each.drawn.host_j for each in every)),
    )
    computed = [each.time.compute for each in every]
    return Measured(
        seconds=max(each.seconds for each in every),
        time=mine.time,
        drawn=drawn,
        gpu_peak_bytes=max(gpus) if gpus else None,
        host_bytes=sum(each.host_bytes for each in every) // world.hosts,
        slowest=computed.index(max(computed)),
    )


def metrics_of(
    run: Run, batch: StepBatch, result: StepResult, rate: float, took: Measured
) -> StepMetrics:
    """The line of metrics.jsonl for the step that was just taken."""
    ranks, seconds = run.engine.world.size, took.seconds
    mfu = run.work.mfu(batch.lengths, seconds, run.gpu_name)
    mfu = None if mfu is None else mfu / ranks
    run.advice = advise(run.steady.total, run.facts, mfu, run.load.read())
    return StepMetrics(
        step=run.step,
        loss=result.loss,
        metrics=result.metrics,
        aux_loss=result.aux_loss,
        expert_load_max=result.expert_load_max,
        grad_norm=result.grad_norm,
        lr=rate,
        tokens=batch.tokens,
        target_tokens=result.target_tokens,
        epoch=batch.epoch,
        step_s=seconds,
        tokens_per_s=batch.tokens / seconds,
        tflops=run.work.tflops(batch.tokens, seconds) / ranks,
        mfu=mfu,
        gpu_peak_bytes=took.gpu_peak_bytes,
        host_bytes=took.host_bytes,
        skipped=result.skipped,
        spike=look_for_spikes(run, batch, result),
        energy_j=took.drawn.total_j,
        slowest_rank=took.slowest,
        time=took.time,
        advice=run.advice,
    )
