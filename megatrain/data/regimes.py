"""Rows that may share a micro-batch, where a model's rotary embedding depends on the longest.

A model with longrope turns positions by other factors once a sequence is longer than its original
length, and one with dynamic NTK by factors of that very length. Rows of several lengths together
would all get those of the longest, which inference on the short ones does not use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True)
class Regime:
    """Sequences of up to `limit` tokens are alike; longer ones are, too, or each length (`exact`)
    is by itself."""

    limit: int
    exact: bool = False

    def of(self, length: int) -> int:
        """A number that sequences which may be together share."""
        return 0 if length <= self.limit else length if self.exact else 1


Regimes = tuple[Regime, ...]


def alike(lengths: Sequence[int], regimes: Regimes) -> list[slice]:
    """The runs of lengths, which descend or ascend, that may share a micro-batch."""
    if not regimes:
        return [slice(0, len(lengths))]
    runs, start = [], 0
    for _, run in groupby([regime.of(length) for regime in regimes] for length in lengths):
        stop = start + len(list(run))
        runs.append(slice(start, stop))
        start = stop
    return runs
