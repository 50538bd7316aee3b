"""A run's rows, read and tokenised."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from megatrain.config import Config
from megatrain.data import DataOptions, load_data
from megatrain.data.dataset import Rows
from megatrain.recipes.setup import Model

ROWS_LOGGED_EVERY_S = 10.0

logger = logging.getLogger("megatrain")


def read_rows(config: Config, model: Model) -> tuple[Rows, Rows | None]:
    """Tokenised training and held-out rows. Raises DataError.

    For `pretrain` documents are packed into rows of seq_len tokens.
    """
    data = config.data
    options = DataOptions(
        seq_len=config.train.seq_len,
        train_on=data.train_on,
        format=data.format,
        on_bad_row=data.on_bad_row,
        text_field=data.text_field,
        split=data.split,
        vocab_size=model.vocab_size,
    )
    pack_to = config.train.seq_len if config.method == "pretrain" else None
    return load_data(
        data.train,
        data.eval,
        model.tokenizer,
        options,
        seed=config.train.seed,
        pack_to=pack_to,
        on_progress=rows_logger(),
    )


def rows_logger() -> Callable[[int], None]:
    """A callable that logs the number of rows now and then: a large source takes minutes."""
    logged = time.monotonic()

    def note(rows: int) -> None:
        nonlocal logged
        if time.monotonic() - logged >= ROWS_LOGGED_EVERY_S:
            logged = time.monotonic()
            logger.info(f"reading and tokenising rows: {rows:,} so far")

    return note
