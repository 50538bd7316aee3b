"""Lifetimes of a computation's memory: what is alive, and what is lost in
holes. Arithmetic only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class Lifetime(NamedTuple):
    """The lifetime of one piece of memory.

    Attributes:
        begin: the step in which it is taken.
        end: the last step that needs it; it is given back then.
        of_row: its bytes for each sequence.
        fixed: its bytes besides.
    """

    begin: int
    end: int
    of_row: int
    fixed: int


@dataclass(frozen=True)
class Alive:
    """The memory of a computation, in each order in which its steps may run: the code generator
    takes the one that needs least."""

    orders: tuple[tuple[Lifetime, ...], ...]

    @cached_property
    def moments(self) -> tuple[frozenset[tuple[int, int]], ...]:
        """The bytes alive in a step, for every order: those of each sequence, and besides."""
        return tuple(frozenset(_moments(order)) for order in self.orders)

    def peak(self, rows: int) -> int:
        """The most bytes of all moments, for `rows` sequences."""
        return min(self._peaks(rows))

    def holes(self, rows: int) -> int:
        """Bytes that an allocator needs beyond the peak, as pieces find no hole that is large
        enough among those alive."""
        peaks = self._peaks(rows)
        chosen = self.orders[peaks.index(min(peaks))]
        return extent(chosen, rows) - min(peaks)

    def _peaks(self, rows: int) -> list[int]:
        return [max(rows * of_row + fixed for of_row, fixed in each) for each in self.moments]


def _moments(order: Sequence[Lifetime]) -> list[tuple[int, int]]:
    found = []
    for step in range(1 + max((piece.end for piece in order), default=0)):
        alive = [piece for piece in order if piece.begin <= step <= piece.end]
        found.append((sum(p.of_row for p in alive), sum(p.fixed for p in alive)))
    return found


def extent(order: Sequence[Lifetime], rows: int) -> int:
    """Bytes of address space, where each piece takes the smallest hole that holds it, as PyTorch's
    allocator chooses, and what has no such hole lies behind all others."""
    end, holes = 0, dict[int, int]()  # begin of each hole: its bytes
    taken: list[tuple[int, int, int]] = []  # the last step, begin, bytes
    for step in sorted({piece.begin for piece in order}):
        for last, begin, size in [piece for piece in taken if piece[0] < step]:
            taken.remove((last, begin, size))
            holes[begin] = size
        holes = _merged(holes)
        for piece in order:
            size = rows * piece.of_row + piece.fixed
            if piece.begin != step or not size:
                continue
            fitting = [(free, begin) for begin, free in holes.items() if free >= size]
            if fitting:
                free, begin = min(fitting)
                del holes[begin]
                if free > size:
                    holes[begin + size] = free - size
            else:  # it begins in the hole at the end, if there is one
                begin = next((b for b, free in holes.items() if b + free == end), end)
                holes.pop(begin, None)
                end = begin + size
            taken.append((piece.end, begin, size))
    return end


def _merged(holes: dict[int, int]) -> dict[int, int]:
    """Holes that touch, as one."""
    found: dict[int, int] = {}
    last = -1
    for begin, size in sorted(holes.items()):
        if last >= 0 and last + found[last] == begin:
            found[last] += size
        else:
            found[begin], last = size, begin
    return found
