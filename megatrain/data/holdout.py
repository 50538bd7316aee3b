"""Which rows are held out, and that none of them is trained on as well."""

from __future__ import annotations

import numpy as np

from megatrain.data.dataset import TokenRows
from megatrain.data.hashing import mix64
from megatrain.errors import DataError


def hold_out(rows: TokenRows, share: float | int, seed: int) -> tuple[TokenRows, TokenRows]:
    """(train, held out): an int holds out that number of rows, a float below 1 that share of them.

    The choice follows from the rows' content and the seed alone, whatever their order. Rows with
    one context (what precedes the first target: a question) stay on one side, so that no held-out
    question is trained on with another answer. Contexts of more rows than are held out are told
    apart by their whole rows, which is noted in `counts.choices`: then equal rows stay together.
    Where that makes the number impossible, fewer are held out. Raises DataError if no row would be
    left on either side.
    """
    total = len(rows)
    wanted = share if isinstance(share, int) else max(1, round(share * total))
    if share <= 0 or wanted >= total:
        raise DataError(
            f"data.eval: {share} holds out {wanted} of {total} rows; at least one has to be left "
            "to train on"
        )
    contexts, hashes = rows.contexts[rows.chosen], rows.hashes[rows.chosen]
    _, group, sizes = np.unique(contexts, return_inverse=True, return_counts=True)
    too_large = sizes[group] > wanted
    keys = np.where(too_large, hashes, contexts)
    if (contexts != keys).any():
        rows.counts.choices.append(
            f"{int(too_large.sum()):,} rows share their prompt with more rows than are held out "
            f"({wanted:,}); of these, whole rows are held out, and their prompts are trained on"
        )
    values, group, sizes = np.unique(keys, return_inverse=True, return_counts=True)
    taken, held = 0, np.zeros(len(values), np.bool_)
    for index in np.argsort(mix64(values, seed), kind="stable"):
        if taken + sizes[index] <= wanted:
            held[index] = True
            taken += int(sizes[index])
        if taken == wanted:
            break
    if not taken:
        raise DataError(
            f"data.eval: no {wanted} of the {total} rows can be held out, because all are copies; "
            "name another source"
        )
    chosen = held[group]
    return rows.choose(np.flatnonzero(~chosen)), rows.choose(np.flatnonzero(chosen))


def look_for_copies(rows: TokenRows, held: TokenRows) -> None:
    """Warn of held-out rows that are trained on, too, and of those whose prompt is, with other
    answers. Raises DataError if all rows are."""
    copied = np.isin(held.hashes[held.chosen], rows.hashes[rows.chosen])
    asked = np.isin(held.contexts[held.chosen], rows.contexts[rows.chosen]) & ~copied
    if copied.all():
        raise DataError(
            f"data.eval: all {len(held):,} held-out rows are rows of data.train, too; name others, "
            "or a share of data.train such as 0.02"
        )
    for which, what in ((copied, "are"), (asked, "have a prompt that is")):
        if count := int(which.sum()):
            with_others = " with other answers" if which is asked else ""
            rows.counts.warned.append(
                f"{count:,} of {len(held):,} held-out rows {what} trained on as well{with_others}; "
                "the held-out loss looks better than it is"
            )
