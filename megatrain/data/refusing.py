"""Which sets are not trained on, and what is said of those that are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from megatrain.data import cuts
from megatrain.data.dataset import Counts, TokenRows
from megatrain.data.samples import KINDS
from megatrain.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megatrain.data.build import DataOptions
    from megatrain.data.sources import Source


def ready(
    rows: TokenRows,
    notes: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    options: DataOptions,
) -> TokenRows:
    """Rows from the cache with what is to be said of them. Raises DataError."""
    _check_vocabulary(rows.counts, tokenizer, options.vocab_size)
    warned = cuts.warnings(rows.counts, options.seq_len, options.truncation_mode)
    return replace(rows, counts=replace(rows.counts, choices=list(notes), warned=warned))


def refused(source: Source, counts: Counts, options: DataOptions) -> DataError | None:
    """Why the rows of a source are not to be trained on, if they are not."""
    written = sum(counts.parts)
    if not counts.read:
        return DataError(f"{source.name}: holds no rows")
    if counts.bad and options.streaming and options.on_bad_row == "refuse":
        return DataError(f"{counts.first_bad[0]} (mend it, or set data.on_bad_row: skip)")
    if counts.bad == counts.read:
        return DataError(f"{counts.first_bad[0]} (all {counts.read} rows are bad)")
    if counts.bad and options.on_bad_row == "refuse":
        rest = "it is the only bad row" if counts.bad == 1 else f"{counts.bad} rows are bad"
        return DataError(
            f"{counts.first_bad[0]} ({rest} of {counts.read}; mend them, or set data.on_bad_row: "
            "skip)"
        )
    if not written and counts.kept:
        return DataError(
            f"{source.name}: holds one row; method: {KINDS[options.kind].methods} also takes each "
            "prompt with another row's answer, so give it two rows or more"
        )
    if not written and counts.too_long:
        return DataError(
            f"{source.name}: {counts.too_long} of {counts.read} rows are longer than train.seq_len "
            f"{options.seq_len} and no other has an answer; set a larger one"
        )
    if not written:
        cut = f", {counts.truncated} of them cut to train.seq_len {options.seq_len}"
        return DataError(
            f"{source.name}: no token to train on in {counts.read - counts.bad} rows"
            f"{cut if counts.truncated else ''}; no row has an answer left"
        )
    return None


def _check_vocabulary(
    counts: Counts, tokenizer: PreTrainedTokenizerBase, vocab_size: int | None
) -> None:
    if vocab_size is not None and counts.max_token_id >= vocab_size:
        token = tokenizer.convert_ids_to_tokens(counts.max_token_id)
        raise DataError(
            f"{counts.max_token_where}: token {token!r} has id {counts.max_token_id}, but the "
            f"model knows {vocab_size} tokens; use the tokenizer that belongs to the model"
        )
