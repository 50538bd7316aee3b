"""The lane on which ranks exchange shares of blocks, and what that takes from computing.

A collective shares the GPU with the matmuls beside it: they lose a part of the time that it takes,
which is measured (machine/profile.py). While nothing is computed, nothing is lost.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from megatrain.machine.profile import UPDATE_BYTES, MachineProfile
from megatrain.planner.activations import SUM_BYTES
from megatrain.planner.job import Job
from megatrain.planner.tasks import StepTimeline

MOST_LOST = 0.95  # of computing: what is measured may exceed all of it, and then nothing would end


def exchanged(
    numel: int, job: Job, machine: MachineProfile, weight_bytes: int
) -> tuple[float, float]:
    """Seconds in which a host's ranks gather a block's weight, and exchange its sums.

    numel: with whole shares for all ranks. All but its own share comes to a rank over its link.
    """
    if job.ranks == 1:
        return 0.0, 0.0
    others = (job.ranks - 1) / job.ranks
    gathered = others * (numel * weight_bytes) / machine.gather
    return gathered, others * numel * SUM_BYTES / machine.reduce


def common_memory(machine: MachineProfile) -> float:
    """Bytes/s of a host's memory for each of its ranks while all use it: what updates reach."""
    return UPDATE_BYTES * max(rate for _, rate in machine.update)


def traded(tokens: float, row_bytes: int, job: Job, machine: MachineProfile) -> float:
    """Seconds in which ranks that share sequences trade tokens for heads and back, one way through
    a layer: queries, keys, values and output, of at most a hidden state's width each."""
    if job.pieces == 1:
        return 0.0
    others = (job.pieces - 1) / job.pieces
    return 4 * tokens * row_bytes * others / machine.gather


def cross_network(
    timeline: StepTimeline, job: Job, machine: MachineProfile, weights: int, sums: int
) -> None:
    """Let a step take at least what its bytes need between hosts: weights cross once, beside the
    forward, and sums beside the backward.

    weights, sums: bytes of all that is gathered, and of all sums, as they travel.
    """
    others = (job.hosts - 1) / job.hosts / machine.network
    timeline.at_least_in("forward", others * weights)
    timeline.at_least_in("backward", others * sums)


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
