"""How often the rows of several sources occur in an epoch, by the sources' weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np

from megatrain.data.dataset import IndexArray, TokenRows
from megatrain.data.hashing import permutation
from megatrain.data.sources import Part
from megatrain.errors import DataError

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
    sizes = shares([len(found) for found in places], weights)
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


def shares(sizes: Sequence[int], weights: Sequence[Fraction]) -> list[int]:
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
