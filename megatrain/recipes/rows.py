"""A run's rows, read and tokenised."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from datetime import date, datetime
from typing import Any, TypeVar

from megatrain.config import Config
from megatrain.config.sources import SourceOptions
from megatrain.data.build import Expected, load_data
from megatrain.data.encoding import RowOptions
from megatrain.data.loader import Loader
from megatrain.data.rows import Rows
from megatrain.data.show import describe, warnings
from megatrain.data.sources import Part
from megatrain.data.streaming import Stream, load_stream
from megatrain.heartbeat import beat, may_end_here
from megatrain.machine.hardware import physical_cores
from megatrain.methods import METHODS
from megatrain.optim.schedules import warmup_steps
from megatrain.recipes.model import Model

T = TypeVar("T")
ROWS_LOGGED_EVERY_S = 10.0
MOST_PROCESSES = 16  # more wait for the one that reads the rows and writes the tokens
# of the config's data section: options of the rows, too
SAME_KEYS = (
    *("train_on", "format", "on_bad_row", "split", "text_field", "columns", "prompts"),
    "truncation_mode",
)

logger = logging.getLogger("megatrain")


def read_rows(
    config: Config, model: Model, day: date | None = None, expected: Expected | None = None
) -> tuple[Rows, Rows | None]:
    """Tokenised training and held-out rows; with data.streaming those of the first window.

    As `open_rows`.
    """
    rows, held_out, _ = open_rows(config, model, day, expected)
    return rows, held_out


def open_rows(
    config: Config,
    model: Model,
    day: date | None = None,
    expected: Expected | None = None,
    at_once: bool = True,
) -> tuple[Rows, Rows | None, Stream | None]:
    """`read_rows`, and with data.streaming all windows of the training rows. Raises DataError.

    For `pretrain` documents are packed into rows of seq_len tokens.

    Args:
        day: told to chat templates; None: the config's.
        expected: the rows of a run that goes on.
        at_once: as in `load_stream`.
    """
    data, seq_len = config.data, config.train.seq_len
    same = data.model_dump(include=set(SAME_KEYS))
    day = day or day_of(config)
    method = METHODS[config.method]
    processes = min(physical_cores(), MOST_PROCESSES)
    if isinstance(data.processes, int):
        processes = data.processes
    about = {"vocab_size": model.vocab_size, "day": day, "kind": method.kind, **same}
    options = RowOptions(seq_len, processes=processes, **about)
    more: dict[str, Any] = {
        "seed": config.train.seed,
        "pack_to": seq_len if method.whole_documents else None,
        "on_progress": rows_logger(),
        "expected": expected,
    }
    train, held_out = (_parts(given, config.rows) for given in (data.train, data.eval))
    if data.streaming:
        return load_stream(train, held_out, model.tokenizer, options, at_once=at_once, **more)
    return (*load_data(train, held_out, model.tokenizer, options, **more), None)


def say_rows(rows: Rows, held_out: Rows | None = None) -> None:
    """Log how many rows and tokens there are, and what was lost or looks wrong."""
    for line in describe(rows):
        logger.info(line)
    for line in warnings(rows, held_out):
        logger.warning(line)


def say_steps(config: Config, loader: Loader) -> None:
    """Warn of steps that cannot be of the size that was asked for, and of a rate never reached."""
    train, rows, steps = config.train, loader.rows, loader.steps_total()
    if train.tokens_per_step and (longer := int((rows.lengths > train.tokens_per_step).sum())):
        logger.warning(
            f"{longer:,} of {len(rows):,} rows are longer than train.tokens_per_step "
            f"{train.tokens_per_step:,}, the longest {int(rows.lengths.max()):,} tokens: a step "
            "takes one row at least, so it is larger there"
        )
    if steps <= (warming := warmup_steps(train.warmup, steps)):
        logger.warning(
            f"train.learning_rate {train.learning_rate:g} is never reached: the warm-up takes "
            f"{warming:,} steps and the run {steps:,}, of which the first has rate 0; the highest "
            f"rate is {train.learning_rate * (steps - 1) / warming:.3g}; set a lower train.warmup"
        )


def _parts(given: T | tuple[SourceOptions, ...], rows: Mapping[str, Any]) -> T | list[Part]:
    """The sources that the config names, as `load_data` takes them; anything else as it is.

    rows: that were given in Python, by their names.
    """
    if not isinstance(given, tuple):
        return given
    return [Part(**dict(one), rows=rows.get(one.path)) for one in given]


def day_of(config: Config) -> date:
    """The date that chat templates get: the config's, else today."""
    return today() if config.data.date == "auto" else date.fromisoformat(config.data.date)


def today() -> date:
    """The date in the time zone of this machine."""
    return datetime.now().astimezone().date()


def rows_logger() -> Callable[[int], None]:
    """A callable that logs the number of rows now and then: a large source takes minutes.

    Reading may end at each call.
    """
    logged = time.monotonic()

    def note(rows: int) -> None:
        nonlocal logged
        may_end_here()
        beat()
        if time.monotonic() - logged >= ROWS_LOGGED_EVERY_S:
            logged = time.monotonic()
            logger.info(f"reading and tokenising rows: {rows:,} so far")

    return note
