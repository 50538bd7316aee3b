"""The simulated step as intervals of its lanes, for a picture. A search does not pay for it: the
simulator is the same, and this one looks at its clocks after each task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatrain.planner.simulation import StepSimulator
from megatrain.planner.tasks import PHASES, WAITS, BlockTasks, StepOptions, StepTimeline, serial

# Lanes by the attribute that is their clock.
LANES = {
    "compute": "compute",
    "upload": "upload",
    "fetch": "activations up",
    "download": "download",
    "host": "host update",
    "drive": "NVMe",
    "exchange": "exchange",
}
WAIT = "wait"


class Interval(NamedTuple):
    """Seconds from the beginning of the step."""

    begin: float
    end: float
    kind: str  # a phase of the computation, WAIT, or the lane's name
    words: str


Lanes = dict[str, list[Interval]]  # by the lane's name; empty ones are left out


class RecordedSimulator(StepSimulator):
    """Notes every task when the lane's clock shows its end."""

    def __init__(self, blocks: Sequence[BlockTasks], options: StepOptions) -> None:
        super().__init__(blocks, options)
        self.lanes: Lanes = {name: [] for name in LANES.values()}
        self.block = 0  # that is visited
        self.waits_for = ""
        self.on_bus = 0.0  # seconds of the latest weight or gradient

    def _note(self, clock: str, seconds: float, words: str, kind: str = "") -> None:
        """A task of `seconds` that has just been put on a lane."""
        if seconds > 0:
            name, end = LANES[clock], getattr(self, clock)
            self.lanes[name].append(Interval(end - seconds, end, kind or name, words))

    def _name(self, block: int) -> str:
        return {0: "embedding", self.head: "head"}.get(block, f"layer {block}")

    def _visit(self, phase: str, block: int, first: bool, last: bool) -> None:
        self.block = block
        super()._visit(phase, block, first, last)

    def _pass(self, phase: str, seconds: float) -> None:
        super()._pass(phase, seconds)
        if self.waits_for:
            self._note("compute", seconds, f"waits for {self.waits_for}", WAIT)
        else:
            where = "resident blocks" if phase == "update" else self._name(self.block)
            self._note("compute", seconds, f"{phase}, {where}", phase)

    def _wait(self, phase: str, until: float, cause: str) -> None:
        self.waits_for = cause
        super()._wait(phase, until, cause)
        self.waits_for = ""

    def _beside_update(self, begin: float, seconds: float) -> float:
        self.on_bus = super()._beside_update(begin, seconds)
        return self.on_bus

    def _upload(self, block: int) -> None:
        before = self.upload, self.drive, self.exchange
        super()._upload(block)
        name, tasks = self._name(block), self.blocks[block]
        if self.upload > before[0]:
            self._note("upload", self.on_bus, f"weight of {name}")
        if self.exchange > before[2]:
            self._note("exchange", tasks.gather, f"weight of {name}")

    def _host_update(self, block: int) -> None:
        before = self.host
        super()._host_update(block)
        name, tasks = self._name(block), self.blocks[block]
        if self.host > before:
            self._note("drive", tasks.nvme_read, f"reads the state of {name}")
            self._note("host", tasks.host_update, name)

    def _exchange_sums(self, block: int, ready: float) -> float:
        done = super()._exchange_sums(block, ready)
        self._note("exchange", self.blocks[block].reduce, f"sums of {self._name(block)}")
        return done

    def _write_back(self) -> None:
        block = self.to_write[0]
        super()._write_back()
        self._note("drive", self.blocks[block].nvme_write, f"writes {self._name(block)}")

    def _forward(self, block: int) -> None:
        super()._forward(block)
        words = f"activations of {self._name(block)}"
        self._note("download", self.blocks[block].boundary_down, words)

    def _backward(self, phase: str, block: int, first: bool, last: bool) -> None:
        before = self.upload, self.fetch, self.download
        super()._backward(phase, block, first, last)
        name, tasks = self._name(block), self.blocks[block]
        if self.upload > before[0]:
            self._note("upload", tasks.sum_up, f"accumulator of {name}")
        if self.fetch > before[1]:
            self._note("fetch", tasks.boundary_up, f"activations of {name}")
        if self.download > before[2] and (not last or tasks.frozen):
            self._note("download", tasks.sum_down, f"accumulator of {name}")

    def _finish(self, phase: str, block: int) -> None:
        before = self.download
        super()._finish(phase, block)
        if self.download > before:
            self._note("download", self.on_bus, f"gradient of {self._name(block)}")


def played(blocks: Sequence[BlockTasks], options: StepOptions) -> tuple[float, Lanes]:
    """(seconds, intervals) of a steady step on a machine with a GPU.

    Of more than `SIMULATED_GROUPS` groups the third stands for all that are left out. What a lane
    does over the step's end is shown up to there; what it goes on with, from the beginning.
    """
    simulator = RecordedSimulator(blocks, options)
    simulator.step()  # the first one finds all lanes idle
    begin = simulator.compute
    simulator.step()
    end = simulator.compute
    lanes = {
        name: [
            Interval(max(0.0, one.begin - begin), min(end, one.end) - begin, one.kind, one.words)
            for one in done
            if one.end > begin and one.begin < end
        ]
        for name, done in simulator.lanes.items()
    }
    return end - begin, {name: done for name, done in lanes.items() if done}


def played_serially(blocks: Sequence[BlockTasks], options: StepOptions) -> tuple[float, Lanes]:
    """The same where all share the same cores: phase after phase, each with its waits last."""
    timeline: StepTimeline = serial(blocks, options)
    done: list[Interval] = []
    for phase in PHASES:
        waits = {f"waits for {wait}": timeline.waits[phase][wait] for wait in WAITS}
        computing = timeline.phases[phase] - sum(waits.values())
        for words, seconds in {phase: computing, **waits}.items():
            if seconds > 0:
                begin = done[-1].end if done else 0.0
                kind = phase if words == phase else WAIT
                done.append(Interval(begin, begin + seconds, kind, words))
    return timeline.seconds, {"compute": done}
