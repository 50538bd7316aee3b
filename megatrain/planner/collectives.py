"""The lane on which ranks exchange shares of blocks, and what that takes from computing.

A collective shares the GPU with the matmuls beside it: they lose a part of the time that it takes,
which is measured (machine/profile.py). While nothing is computed, nothing is lost.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

MOST_LOST = 0.95  # of computing: what is measured may exceed all of it, and then nothing would end


class Collective(NamedTuple):
    """Seconds from the beginning; `loss`: of computing, for each second of both."""

    begin: float
    end: float
    loss: float


class Collectives:
    """Collectives one after another, on a clock that the simulated step shares."""

    def __init__(self) -> None:
        self.free = 0.0  # when the next one may begin
        self._running: deque[Collective] = deque()  # those that computing may still meet

    def add(self, ready: float, seconds: float, loss: float) -> float:
        """The end of one that needs what is there at `ready`."""
        begin = max(self.free, ready)
        self.free = begin + seconds
        if seconds > 0 and loss > 0:
            self._running.append(Collective(begin, self.free, min(loss, MOST_LOST)))
        return self.free

    def beside(self, begin: float, seconds: float) -> float:
        """Seconds that a computation of `seconds` takes from `begin` on, beside those added."""
        running = self._running
        while running and running[0].end <= begin:
            running.popleft()
        now, left = begin, seconds
        for first, end, loss in running:
            if now + left <= first:
                break
            alone = max(0.0, first - now)
            now, left = now + alone, left - alone
            done = (end - now) * (1 - loss)
            if left <= done:
                return now + left / (1 - loss) - begin
            now, left = end, left - done
        return seconds if now == begin else now + left - begin
