"""Sweeps of the weights over rows that are not trained on: many micro-batches share one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from megatrain.data.loader import MicroBatch
from megatrain.engine.engine import Engine
from megatrain.engine.objective import AnyLoss, EvalResult, joined
from megatrain.recipes.signals import StopRequest

SWEEP_MICRO_BATCHES = 4  # at least, where weights are streamed for an evaluation


def evaluated(
    engine: Engine,
    batches: Iterable[MicroBatch],
    loss: AnyLoss,
    sweep_tokens: int,
    stop: StopRequest,
) -> EvalResult | None:
    """The loss over micro-batches; None if asked to stop.

    sweep_tokens: padded tokens that a rank computes in one sweep of the weights.
    """
    found, world = [], engine.world
    for part in sweeps(batches, sweep_tokens * world.size):
        if stop.came():
            return None
        found.append(engine.evaluate(part[world.dp_rank :: world.dp_size], loss))
    return joined(found, loss)


def sweeps(batches: Iterable[MicroBatch], tokens: int) -> Iterator[list[MicroBatch]]:
    """Consecutive micro-batches together, up to `tokens` padded tokens each."""
    part: list[MicroBatch] = []
    for batch in batches:
        if part and sum(b["input_ids"].numel() for b in [*part, batch]) > tokens:
            yield part
            part = []
        part.append(batch)
    if part:
        yield part
