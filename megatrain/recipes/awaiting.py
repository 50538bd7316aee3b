"""Rows of the next step, which may still be tokenised: every rank has them before any begins."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import ExitStack

from megatrain.data.loader import StepBatch
from megatrain.errors import DataError
from megatrain.heartbeat import beat, ending, total
from megatrain.recipes.signals import Stopped, StopRequest
from megatrain.world import LOOKS_EVERY_S, World

ROWS_DIFFER = (
    "the source, or the token cache (MEGATRAIN_CACHE), is not the same on their hosts; make it the "
    "same"
)
Await = Callable[[Future[StepBatch]], StepBatch]

logger = logging.getLogger("megatrain")


def awaiting(world: World, stop: StopRequest, step: Callable[[], int]) -> Await:
    """What waits for a batch of a set that comes in windows. All ranks call it before each step.

    No rank waits for another for longer than LOOKS_EVERY_S: they tell each other again and again
    how far they are, so a request to stop is heeded, and a rank that died is noticed as ever. One
    that has its rows gives signs of life as long as those that lack theirs do.

    stop: on which all agree. step: the number of the next step.

    Raises Stopped if any was asked to, DataError if ranks have different rows, and what the loader
    raises on any of them.
    """

    def arrived(pending: Future[StepBatch]) -> StepBatch:
        of_others, said = list[int](), False
        with ExitStack() as stack:
            lacks = threading.Event()  # a window is not there
            stack.enter_context(ending(lacks.set))
            while True:
                wait((pending,), LOOKS_EVERY_S)
                there, failure = pending.done(), None
                if there and (found := pending.exception()) is not None:
                    if not isinstance(found, Exception):
                        raise found
                    failure = found
                rows = _name(pending.result()) if there and failure is None else None
                told = world.every((rows, world.as_told(failure), total(), lacks.is_set()))
                world.raise_first([error for _, error, _, _ in told], failure)
                missing = [signs for theirs, _, signs, _ in told if theirs is None]
                if not missing:
                    _check_equal([theirs for theirs, *_ in told])
                    return pending.result()
                if there and missing != of_others:
                    beat()
                of_others = missing
                if stop.came():
                    raise Stopped
                if any(lack for *_, lack in told) and not said:
                    logger.info(f"step {step()} waits for rows, which are still being tokenised")
                    said = True

    return arrived


def _name(batch: StepBatch) -> tuple[object, int]:
    """What ranks compare of a step's rows: where they end, and all their lengths."""
    return batch.after, hash(batch.lengths)


def _check_equal(names: list[tuple[object, int] | None]) -> None:
    for rank, name in enumerate(names):
        if name != names[0]:
            raise DataError(
                f"ranks 0 and {rank} have different rows for the next step: {ROWS_DIFFER}"
            )
