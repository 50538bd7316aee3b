"""Choose rows: those held out, none of which is trained on as well, and repeats by weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np

from megatrain.data.rows import IndexArray, TokenRows, mix64, permutation
from megatrain.data.sources import Part
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


# Times the rows of all sources: with longer epochs, some source's rows occur over 100 times in one,
# which nobody wants, and the order of an epoch's rows (8 bytes each) would fill the memory.
LONGEST_EPOCH = 100


def weighted(rows: TokenRows, parts: Sequence[Part], seed: int) -> TokenRows:
    """Rows of which each source has its weight's share; the same rows where there are no weights.

    It is the shortest epoch with every row at least once: of one source each row occurs once, of
    the others each the same number of times, some once more. Those follow from the seed. Raises
    DataError if a source has no row left, and for weights that repeat rows beyond reason.
    """
    weights = [Fraction(part.weight) for part in parts if part.weight is not None]
    if not weights:
        return rows
    ends = np.cumsum(rows.counts.parts)
    of_part = np.searchsorted(ends, rows.chosen, side="right")
    places = [np.flatnonzero(of_part == number) for number in range(len(parts))]
    if empty := [part.path for part, found in zip(parts, places, strict=True) if not len(found)]:
        raise DataError(f"{empty[0]}: no row of it is left to train on, so it can have no weight")
    sizes = shares_of_sources([len(found) for found in places], weights)
    if sum(sizes) > LONGEST_EPOCH * len(rows):
        which = max(range(len(parts)), key=lambda number: sizes[number] / len(places[number]))
        least = min(range(len(parts)), key=lambda number: sizes[number] / len(places[number]))
        raise DataError(
            f"{parts[which].path}: by its weight {float(weights[which]):g} an epoch of all rows of "
            f"{parts[least].path}, whose weight is {float(weights[least]):g}, has each of its rows "
            f"{sizes[which] // len(places[which]):,} times; give weights nearer to each other"
        )
    chosen = [repeated(found, size, seed) for found, size in zip(places, sizes, strict=True)]
    notes = [
        f"{part.path}: {size:,} rows of an epoch's {sum(sizes):,}, by its weight; "
        f"each of its {len(found):,} rows {size / len(found):.3g} times"
        for part, found, size in zip(parts, places, sizes, strict=True)
    ]
    counts = replace(rows.counts, choices=[*rows.counts.choices, *notes])
    return replace(rows.choose(np.concatenate(chosen)), counts=counts)


def shares_of_sources(sizes: Sequence[int], weights: Sequence[Fraction]) -> list[int]:
    """Rows of each source in the smallest total in which none has fewer than it holds.

    Each is within one row of its weight's share of the total.
    """
    parts = [weight / sum(weights) for weight in weights]
    total = -(-max(size / part for size, part in zip(sizes, parts, strict=True)) // 1)
    exact = [total * part for part in parts]
    found = [int(rows) for rows in exact]
    left = int(total) - sum(found)
    by_rest = sorted(range(len(exact)), key=lambda number: found[number] - exact[number])
    for number in by_rest[:left]:
        found[number] += 1
    return found


def repeated(places: IndexArray, size: int, seed: int) -> IndexArray:
    """`size` of the places in order, each as often as the next, or once more: int64 [size]."""
    times, more = divmod(size, len(places))
    extra = np.sort(permutation(len(places), seed, epoch=0)[:more])
    return np.concatenate([*[places] * times, places[extra]])
