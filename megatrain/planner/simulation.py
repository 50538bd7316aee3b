"""A steady step in time: the engine's order of work, simulated over lanes that run at once.

Each lane does one thing after another: computation, uploads of weights and accumulators, fetches of
activations, downloads, the host's update, the drives, and what ranks exchange. A task begins when
its lane is free and its inputs are there, so one pass over the step in the engine's order
(schedule.py; engine/step.py, streamer.py, gradients.py, activations.py, update.py) gives
the time of everything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from megatrain.memory.sizes import SHARE_BUFFERS, STATE_STAGES
from megatrain.schedule import (
    COMING,
    LANDING_BUFFERS,
    TRAVELLING_SUMS,
    block_order,
    leaving,
    slots_of_blocks,
    uploads,
)
from megatrain.settings import Chosen

MOST_LOST = 0.95  # of computing: what is measured may exceed all of it, and then nothing would end
WORTH_NAMING = 0.05  # share of a phase's time: it is bound by what it waits for longer than that


@dataclass(frozen=True)
class Timing:
    """A steady step, predicted. Seconds unless said otherwise."""

    seconds: float
    phases: dict[str, float]  # they add up to the step
    waits: dict[str, float]  # of the computation
    bound_by: dict[str, str]  # of each phase, where most of its time goes: compute, or a wait
    tokens_per_s: float  # of the data, without padding, on all ranks together
    # 6 x counted parameters (planner/cost/shape.py) x these, in TFLOP/s of each rank
    tflops: float
    # of a forward alone over as many tokens, which all rows that the run takes have before the
    # first step where a loss refers to the model as it begins; 0: none does
    reference_s: float = 0.0

    @property
    def busy(self) -> float:
        """Share of the step in which the device computes."""
        return 1 - sum(self.waits.values()) / self.seconds


PHASES = ("update", "forward", "head", "backward", "second backward")
WAITS = ("upload", "update", "download", "nvme", "exchange", "network")


@dataclass(frozen=True)
class BlockTasks:
    """Seconds of each lane that a block takes; computation is of a group's micro-batches. Of ranks:
    what this one does with its share, and with the others."""

    forward: float
    backward: float  # recomputation and adding up gradients included; of the head everything
    finish: float  # rounding and measuring the whole step's gradient
    upload: float
    download: float  # of the finished gradient
    sum_up: float  # of fp32 accumulators that are in host RAM between groups
    sum_down: float
    boundary_down: float  # of offloaded activations
    boundary_up: float
    host_update: float
    device_update: float
    nvme_read: float = 0.0  # for the update
    nvme_write: float = 0.0  # after it
    frozen: bool = False  # without gradient and update
    gather: float = 0.0  # of all ranks' shares of the weight, once this one's is up
    read: bool = False  # the whole weight is uploaded here, and nothing gathered
    # of all ranks' sums to one's share of the gradient, which is rounded and measured; or of a
    # group's sums, to be added to those of the groups before
    reduce: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions(Chosen):
    """The options that decide the order of work: the choices, and what the job adds."""

    micro_batches: float  # of a group, on average
    clips: bool  # gradients wait for their norm; else each is applied as soon as it is there
    tied: bool  # the embedding stays in a slot of its own from the first layer to the head
    first_trained: int = 0  # block, where backward ends
    ranks: int = 1
    beside_update: float = 1.0  # share of the bus's rate that the host's update leaves it
    gather_loss: float = 0.0  # seconds of computing that are lost for each one of a collective
    reduce_loss: float = 0.0

    def waiting(self, blocks: int) -> frozenset[int]:
        """Blocks whose gradients are stored."""
        return self.stored(blocks - 2, self.first_trained, self.tied, self.clips)


@dataclass
class StepTimeline:
    """Seconds of each phase, and in it of each kind of wait of the computation."""

    phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    waits: dict[str, dict[str, float]] = field(
        default_factory=lambda: {phase: dict.fromkeys(WAITS, 0.0) for phase in PHASES}
    )

    @property
    def seconds(self) -> float:
        return sum(self.phases.values())

    def bound_by(self, phase: str) -> str:
        """The bound of a phase, on which most of its time is spent: compute, or a wait."""
        waits = self.waits[phase]
        worst = max(waits, key=waits.__getitem__)
        return worst if waits[worst] > WORTH_NAMING * self.phases[phase] else "compute"

    def at_least_in(self, phase: str, seconds: float) -> None:
        """Let a phase take what the network takes beside it."""
        wait = max(0.0, seconds - self.phases[phase])
        self.phases[phase] += wait
        self.waits[phase]["network"] += wait

    def add(self, other: StepTimeline, times: int) -> None:
        for phase in PHASES:
            self.phases[phase] += times * other.phases[phase]
            for wait in WAITS:
                self.waits[phase][wait] += times * other.waits[phase][wait]


def _total(task: str, blocks: Sequence[BlockTasks]) -> float:
    return float(sum(map(attrgetter(task), blocks)))


def serial(blocks: Sequence[BlockTasks], options: ScheduleOptions) -> StepTimeline:
    """A step on a machine where everything shares the same cores: the sum of all tasks."""
    *others, head = blocks
    groups, again = options.groups, options.groups - 1
    first, once = options.first_trained, options.replicated  # weights of these come once a step
    resident = options.resident
    travelling = blocks[options.sums_on_device :] if groups > 1 else ()
    forward = groups * _total("forward", others)
    drive = sum(block.nvme_read + block.nvme_write for block in blocks)
    computed = {
        "update": sum(block.host_update + block.device_update for block in blocks),
        "forward": forward,
        "head": groups * head.backward + head.finish,
        "backward": sum(groups * block.backward + block.finish for block in others),
        "second backward": 0.0,
    }
    timeline = StepTimeline()
    timeline.waits["forward"] |= {
        "exchange": groups * _total("gather", others[once:]) + _total("gather", blocks[:once]),
        "upload": groups * _total("upload", blocks[max(resident, once) :])
        + _total("upload", blocks[resident:once]),
        "download": groups * _total("boundary_down", others),
        "nvme": max(0.0, drive - forward),  # drives need no cores
    }
    gathers, reduced = _total("gather", blocks[max(first, once) :]), _total("reduce", blocks)
    backward = timeline.waits["backward"]
    backward |= {
        "upload": groups * _total("upload", blocks[max(resident, first, once) :])
        + groups * _total("boundary_up", others)
        + again * _total("sum_up", travelling),
        "download": _total("download", blocks[resident:]) + again * _total("sum_down", travelling),
        "exchange": groups * gathers + reduced + again * _total("reduce", travelling),
    }
    if options.second_backward:  # moves the same as the first, whose gradients stay
        stored = options.waiting(len(blocks))

        def twice(begin: int = 0, stop: int | None = None) -> list[BlockTasks]:
            numbers = range(len(blocks))[begin:stop]
            return [blocks[number] for number in numbers if number not in stored]

        computed["second backward"] = sum(block.backward + block.finish for block in twice())
        timeline.waits["second backward"] |= {
            "upload": _total("upload", twice(max(resident, first, once)))
            + _total("boundary_up", twice(stop=len(others))),
            "download": _total("download", twice(resident)),
            "exchange": _total("gather", twice(max(first, once))) + _total("reduce", twice()),
        }
        backward["download"] -= _total("download", twice(resident))
    timeline.phases = {
        phase: seconds + sum(timeline.waits[phase].values()) for phase, seconds in computed.items()
    }
    return timeline


# Groups: the first, two in the middle, and the last. More take as long as the second in the middle.
SIMULATED_GROUPS = 4


def overlapped(blocks: Sequence[BlockTasks], options: ScheduleOptions) -> StepTimeline:
    """A step on a machine with a GPU: lanes run at once."""
    simulator = StepSimulator(blocks, options)
    simulator.step()  # the first one finds all lanes idle
    return simulator.step()


class Collectives:
    """The lane on which ranks exchange shares of blocks, and what that takes from computing. A
    collective shares the GPU with the matmuls beside it: they lose a part of the time that it
    takes, which is measured (machine/profile.py). While nothing is computed, nothing is lost."""

    def __init__(self) -> None:
        self.free = 0.0  # when the next one may begin
        self._running: deque[tuple[float, float, float]] = deque()  # begin, end, loss

    def add(self, ready: float, seconds: float, loss: float) -> float:
        """The end of one that needs what is there at `ready`."""
        begin = max(self.free, ready)
        self.free = begin + seconds
        if seconds > 0 and loss > 0:
            self._running.append((begin, self.free, min(loss, MOST_LOST)))
        return self.free

    def beside(self, begin: float, seconds: float) -> float:
        """Seconds that a computation of `seconds` takes from `begin` on, beside those added."""
        running = self._running
        while running and running[0][1] <= begin:
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


# why: decision 0011
class StepSimulator:
    """Times at which each lane and buffer is free next; a step goes on where the last one ended."""

    def __init__(self, blocks: Sequence[BlockTasks], options: ScheduleOptions) -> None:
        self.blocks, self.options = blocks, options
        self.head = len(blocks) - 1
        self.order = block_order(len(blocks), options.first_trained)
        self.stored = options.waiting(len(blocks))
        back = self.order[self.head :] if options.clips else ()
        self.twice = tuple(block for block in back if block not in self.stored)
        self.several = options.ranks > 1
        # of several ranks, none has the whole of a resident block
        whole, self.own = (0, options.replicated) if self.several else (options.resident, 0)
        self.slots = slots_of_blocks(len(blocks), whole, options.tied, self.own)
        self.timeline, self.phase = StepTimeline(), PHASES[0]
        self.asked: Iterator[tuple[int, ...]] = iter(())  # uploads before each visit of the step
        self.compute = self.upload = self.fetch = self.download = self.host = self.drive = 0.0
        self.collectives = Collectives()
        self.uploaded, self.updated, self.gradient_landed, self.weights_landed, self.sum_landed = (
            [0.0] * len(blocks) for _ in range(5)
        )
        self.to_write: deque[int] = deque()  # blocks that were updated and are not on NVMe yet
        # blocks whose gradients are in the buffers of those that are applied at once
        self.applying: deque[int] = deque(maxlen=LANDING_BUFFERS)
        self.host_late = False  # the host's update is behind because it waited for NVMe
        self.late = [False] * len(blocks)  # the same, when each block was updated
        self.slot_free: dict[int | None, float] = {}
        self.slot_holds: dict[int | None, int] = {}
        self.staging_free = 0.0
        self.shares_free = deque([0.0] * SHARE_BUFFERS)
        self.travelling_free = [0.0] * TRAVELLING_SUMS
        self.travelling_shares_free = [0.0] * TRAVELLING_SUMS
        self.turn = 0
        self.parts = max(1.0, options.micro_batches)
        # the ring's size as seconds of the transfers that fill it
        pieces = leaving(options.micro_batches, options.retained_on_host)
        self.leaving = pieces * max(block.boundary_down for block in blocks) / self.parts

    def step(self) -> StepTimeline:
        """Simulate a step: from the time the norm of the one before is known to its own."""
        options, back = self.options, self.order[self.head :]
        simulated = min(options.groups, SIMULATED_GROUPS)
        visits = self.order * simulated + self.twice
        self.asked = iter(uploads(visits, self.slots, self.own))
        self.slot_holds.clear()
        whole = self.timeline = StepTimeline()
        if self.stored:
            self._update_stored()
        for group in range(simulated):
            self.timeline = StepTimeline()
            first, last = group == 0, group == simulated - 1
            for block in self.order[: self.head]:
                self._visit("forward", block)
            for block in back:
                self._visit("head" if block == self.head else "backward", block, first, last)
            times = options.groups - simulated + 1 if group == SIMULATED_GROUPS - 2 else 1
            whole.add(self.timeline, times)
        self.timeline = whole
        for block in self.twice:
            self._visit("second backward", block)
        if self.several:  # wait: the norm needs all ranks' shares
            self.phase = "second backward" if self.twice else "backward"
            self._wait(self.collectives.free, "exchange")
        return whole

    def _visit(self, phase: str, block: int, first: bool = True, last: bool = True) -> None:
        """first, last: of the groups whose gradients are added up."""
        self.phase = phase
        self._arrive(block)
        if phase == "forward":
            self._forward(block)
        else:
            self._backward(block, first, last)
        self.slot_free[self.slots[block]] = self.compute

    # -- updates -----------------------------------------------------------------------------------

    def _update_stored(self) -> None:
        """Update blocks whose gradients were stored: resident ones on the device, the others on the
        host in forward order."""
        self.host, stored = max(self.host, self.compute), sorted(self.stored)
        for block in (block for block in stored if block >= self.options.resident):
            self._host_update(block)
        while self.to_write:
            self._write_back()
        self.phase = "update"
        self._compute(sum(self.blocks[block].device_update for block in stored))
        for block in (block for block in stored if block < self.options.resident):
            self.updated[block] = self.compute

    def _host_update(self, block: int) -> None:
        tasks, begin = self.blocks[block], max(self.host, self.gradient_landed[block])
        if tasks.frozen:
            return
        arrived = 0.0
        if tasks.nvme_read:
            # state is read ahead of its update, when a write has freed a staging buffer
            if len(self.to_write) == STATE_STAGES:
                self._write_back()
            arrived = self.drive = max(self.drive, self.compute) + tasks.nvme_read
        queued = begin == self.host and self.host_late
        self.late[block] = self.host_late = arrived > begin or queued
        done = max(begin, arrived) + tasks.host_update
        self.host = self.updated[block] = done
        if tasks.nvme_write:
            self.to_write.append(block)

    def _write_back(self) -> None:
        block = self.to_write.popleft()
        self.drive = max(self.drive, self.updated[block]) + self.blocks[block].nvme_write

    # -- computation -------------------------------------------------------------------------------

    def _compute(self, seconds: float) -> None:
        self._pass(self.collectives.beside(self.compute, seconds))

    def _pass(self, seconds: float) -> None:
        self.compute += seconds
        self.timeline.phases[self.phase] += seconds

    def _wait(self, until: float, cause: str) -> None:
        gap = until - self.compute
        if gap > 0:
            self.timeline.waits[self.phase][cause] += gap
            self._pass(gap)

    def _forward(self, block: int) -> None:
        """Activations that leave for the host need room in the ring."""
        tasks, begin = self.blocks[block], self.compute
        self._compute(tasks.forward)
        if tasks.boundary_down:
            ready = begin + tasks.forward / self.options.micro_batches
            self.download = max(self.download, ready) + tasks.boundary_down
            # wait: what is on its way to the host must leave room in the ring
            self._wait(self.download - self.leaving, "download")

    def _backward(self, block: int, first: bool, last: bool) -> None:
        """Back-propagate a group's micro-batches through a block. The first needs no sum yet."""
        tasks = self.blocks[block]
        sums_here = block < self.options.sums_on_device or tasks.frozen
        travels = self.options.groups > 1 and not sums_here
        each = tasks.backward / self.parts
        # ranks exchange sums from the same buffers from which they would travel
        exchanged = self.several and not sums_here
        if travels or exchanged:
            self.turn = (self.turn + 1) % TRAVELLING_SUMS
        arriving, free = 0.0, self.travelling_free
        if exchanged:  # only shares travel
            self._wait(free[self.turn], "exchange")
            free = self.travelling_shares_free
        elif travels and first:
            self._wait(free[self.turn], "download")
        if travels and not first:
            # the sum of earlier groups comes into a buffer that another block's may be leaving
            begin = max(self.upload, free[self.turn], self.sum_landed[block])
            arriving = free[self.turn] = self.upload = begin + tasks.sum_up
        back = 0.0
        if tasks.boundary_up:
            ahead = COMING * tasks.boundary_up / self.parts
            self.fetch = max(self.fetch, self.compute - ahead) + tasks.boundary_up
            back = self.fetch + each
        self._compute(each)
        if not exchanged:
            self._wait(arriving, "upload")  # wait: the next gradient is added to the sum
        self._compute(tasks.backward - each)
        self._wait(back, "upload")  # wait: the last micro-batch needs its activations
        if last and not tasks.frozen:
            self._finish(block)
        elif travels:
            ready = self._exchange_sums(block, self.compute) if exchanged else self.compute
            self.download = max(self.download, ready) + tasks.sum_down
            free[self.turn] = self.sum_landed[block] = self.download

    def _exchange_sums(self, block: int, ready: float) -> float:
        """The time by which ranks have exchanged a block's sums, and this one has added its share
        to that of the groups before. ready: when the sums are there."""
        in_turn, shares_free = block >= self.options.sums_on_device, self.travelling_shares_free
        if in_turn:
            ready = max(ready, shares_free[self.turn])
        done = self.collectives.add(ready, self.blocks[block].reduce, self.options.reduce_loss)
        if in_turn:
            self.travelling_free[self.turn] = shares_free[self.turn] = done
        return done

    def _finish(self, block: int) -> None:
        """Round, measure and download a gradient; if it is not stored, apply it."""
        tasks, streamed = self.blocks[block], block >= self.options.resident
        if self.several:
            self._share_out(block)
            return
        if streamed:  # wait: the gradient before still leaves the staging buffer
            self._wait(self.staging_free, "download")
        if block in self.twice and self.phase != "second backward":
            self._compute(tasks.finish)
            return
        if streamed:
            self._take_landing_buffer(block)
        self._compute(tasks.finish)
        if streamed:
            self._send(block, self.compute)
        if block not in self.stored:
            self._compute(tasks.device_update)
            if streamed:
                self._host_update(block)

    def _share_out(self, block: int) -> None:
        """`_finish` of several ranks: each gets its share, which it rounds and sends away."""
        tasks, stored = self.blocks[block], block in self.stored
        shared = self._exchange_sums(block, max(self.compute, self.staging_free))
        self.staging_free = shared
        if block in self.twice and self.phase != "second backward":
            return
        if block >= self.options.resident:
            self._take_landing_buffer(block)
            self._send(block, shared)
            if not stored:
                self._host_update(block)
        elif not stored:
            self._wait(shared, "exchange")
            self._compute(tasks.device_update)
            self.updated[block] = self.compute

    def _take_landing_buffer(self, block: int) -> None:
        """In host RAM, for a gradient that is not stored."""
        if block in self.stored:
            return
        # wait: landing buffers are taken in turn, and an update still reads the next one
        if len(self.applying) == LANDING_BUFFERS:
            user = self.applying[0]
            self._wait(self.updated[user], "nvme" if self.late[user] else "update")
        self.applying.append(block)

    def _send(self, block: int, ready: float) -> None:
        """Download a finished gradient."""
        begin = max(self.download, ready)
        self.download = begin + self._beside_update(begin, self.blocks[block].download)
        self.staging_free = self.gradient_landed[block] = self.download

    # -- weights -----------------------------------------------------------------------------------

    def _arrive(self, block: int) -> None:
        """Ask for the weights whose slots are free, and wait for the block's own."""
        for wanted in next(self.asked):
            self._upload(wanted)
        if self.slots[block] is not None:
            up, late = self.uploaded[block], "nvme" if self.late[block] else "update"
            self._wait(min(self.updated[block], up), late)
            self._wait(up, "upload")
            self._wait(self.weights_landed[block], "exchange")

    def _beside_update(self, begin: float, seconds: float) -> float:
        """Seconds of a transfer, which is slower while the host updates in the same memory."""
        share = self.options.beside_update
        beside = min(max(0.0, self.host - begin), seconds / share)
        return seconds + (1 - share) * beside

    def _upload(self, block: int) -> None:
        tasks, slot = self.blocks[block], self.slots[block]
        if self.slot_holds.get(slot) == block:
            return
        self.slot_holds[slot] = block
        slot_free, gathered = self.slot_free.get(slot, 0.0), self.several and not tasks.read
        free = self.shares_free[0] if gathered else slot_free
        begin = max(self.upload, self.updated[block], free)
        self.upload = begin + self._beside_update(begin, tasks.upload)
        self.uploaded[block] = self.weights_landed[block] = self.upload
        if gathered:
            ready, lost = max(self.upload, slot_free), self.options.gather_loss
            landed = self.collectives.add(ready, tasks.gather, lost)
            self.weights_landed[block] = self.shares_free[0] = landed
            self.shares_free.rotate()
