"""Points that all ranks pass together: checks before the first step, and the rows of each."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack

from megatrain.config import Config
from megatrain.data.loader import Loader, StepBatch
from megatrain.errors import ConfigError, DataError
from megatrain.heartbeat import beat, ending, total
from megatrain.planner.reasons import counted, too_many_ranks
from megatrain.recipes.signals import Stopped, StopRequest
from megatrain.settings import KEYS
from megatrain.world import LOOKS_EVERY_S, World

ROWS_DIFFER = (
    "the source, or the token cache (MEGATRAIN_CACHE), is not the same on their hosts; make it the "
    "same"
)
Await = Callable[[Future[StepBatch]], StepBatch]

logger = logging.getLogger("megatrain")


def check_ranks(config: Config, world: World) -> None:
    """Raise ConfigError for another number of ranks than the config's."""
    if config.gpus not in ("auto", world.local_size):
        raise ConfigError(
            f"{config.where('gpus')}: {config.gpus}, but {world.local_size} process(es) of this "
            "host take part; `megatrain train` and torchrun start several; or remove it"
        )


# why: decision 0112
def check_alike(world: World, how: Mapping[str, object], rows: Sequence[str]) -> None:
    """Raise ConfigError or DataError if ranks would train in different ways, or on other rows: each
    decides by itself, from what it finds on its host. All call it at the same place.

    how: settings and the like, by field. rows: digests.
    """
    (_, first, ours), *others = world.all_gather((socket.gethostname(), how, rows))
    for rank, (host, theirs, digests) in enumerate(others, 1):
        for name in how:
            if theirs[name] != first[name]:
                raise ConfigError(
                    f"ranks 0 and {rank}, on {host}, would train with {KEYS.get(name, name)} "
                    f"{first[name]} and {theirs[name]}; set it in the config, or take hosts that "
                    "are alike"
                )
        if digests != ours:
            raise DataError(f"ranks 0 and {rank}, on {host}, have different rows: {ROWS_DIFFER}")


def check_rows_of_a_step(loader: Loader) -> None:
    """Raise TooManyRanks if half of the steps have fewer rows than there are ranks."""
    world = loader.world
    if world.size == 1 or (rows := loader.rows_of_a_step()) >= world.dp_size:
        return
    found = f"half of the steps have at most {counted(rows, 'row')}"
    way_on = "raise train.tokens_per_step"
    if loader.windows is None and (there := len(loader.rows)) < world.dp_size:  # no step has more
        rows, found, way_on = there, f"the set has {counted(there, 'row')}", "add rows"
    raise too_many_ranks(f"{found},", rows * world.cp_size, world.size, way_on)


def awaiting(world: World, stop: StopRequest, step: Callable[[], int]) -> Await:
    """A function that waits for the next batch of rows that are still tokenised, on all ranks.

    No rank waits in a collective for longer than LOOKS_EVERY_S: they tell each other again and
    again how far they are, so a request to stop is heeded, and a dead rank is noticed as ever. A
    rank that has its rows gives signs of life as long as those that lack theirs do.

    stop: agreed on by all ranks. step: the number of the next step.

    Raises Stopped if any rank was asked to, DataError if ranks have different rows, and what the
    loader raises on any of them.
    """

    def arrived(pending: Future[StepBatch]) -> StepBatch:
        signs_before, shown = list[int](), False
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
                rows = None
                if there and failure is None:  # where they end, and all their lengths
                    rows = pending.result().after, hash(pending.result().lengths)
                states = world.all_gather((rows, world.as_told(failure), total(), lacks.is_set()))
                world.raise_first([error for _, error, _, _ in states], failure)
                signs = [count for theirs, _, count, _ in states if theirs is None]
                if not signs:
                    for rank, (theirs, *_) in enumerate(states):
                        if theirs != states[0][0]:
                            ranks = f"ranks 0 and {rank} have different rows for the next step"
                            raise DataError(f"{ranks}: {ROWS_DIFFER}")
                    return pending.result()
                if there and signs != signs_before:
                    beat()
                signs_before = signs
                if stop.came():
                    raise Stopped
                if any(lack for *_, lack in states) and not shown:
                    logger.info(f"step {step()} waits for rows, which are still being tokenised")
                    shown = True

    return arrived
