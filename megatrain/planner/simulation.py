"""A steady step in time: the engine's order of work, simulated over lanes that run at once.

Each lane does one thing after another: computation, uploads of weights and accumulators, fetches of
activations, downloads, the host's update, the drives. A task begins when its lane is free and its
inputs are there, so one pass over the step in the engine's order (schedule.py; engine/step.py,
streamer.py, gradients.py, activations/offload.py, update.py) gives the time of everything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from megatrain.schedule import (
    GRADIENT_STAGES,
    LANDING_BUFFERS,
    STAGES,
    STATE_STAGES,
    TRAVELLING_SUMS,
    block_order,
    rings,
    slots_of_blocks,
    uploads,
)

# The first, two in the middle, and the last; further ones take as long as the second in the middle.
SIMULATED_GROUPS = 4
PHASES = ("update", "forward", "head", "backward", "second backward")
WAITS = ("upload", "update", "download", "nvme")


@dataclass(frozen=True)
class BlockTasks:
    """Seconds of each lane that a block takes; computation is of a group's micro-batches."""

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
    nvme_gradient: float = 0.0  # writing a gradient
    nvme_weight: float = 0.0  # reading a weight for a sweep


@dataclass(frozen=True)
class StepOptions:
    """The choices that decide the order of work."""

    groups: int
    micro_batches: float  # of a group, on average
    resident: int  # blocks
    sums_on_device: int  # blocks
    clipping: bool
    tied: bool  # the embedding stays in a slot of its own from the first layer to the head
    second_backward: bool = False  # the first one measures gradients only
    layers_on_host: int = 0  # that send saved activations to host RAM

    @property
    def stored(self) -> bool:
        """True if gradients wait for their norm; else each is applied as soon as it is there."""
        return self.clipping and not self.second_backward


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

    def add(self, other: StepTimeline, times: int) -> None:
        for phase in PHASES:
            self.phases[phase] += times * other.phases[phase]
            for wait in WAITS:
                self.waits[phase][wait] += times * other.waits[phase][wait]


def serial(blocks: Sequence[BlockTasks], options: StepOptions) -> StepTimeline:
    """A step on a machine where everything shares the same cores: the sum of all tasks."""
    timeline = StepTimeline()
    *others, head = blocks
    groups, streamed = options.groups, blocks[options.resident :]
    forward, backward = timeline.waits["forward"], timeline.waits["backward"]
    weights = groups * sum(block.upload for block in streamed)
    travelling = blocks[options.sums_on_device :] if groups > 1 else ()
    forward["upload"] = weights
    forward["download"] = groups * sum(block.boundary_down for block in others)
    backward["upload"] = (
        weights
        + groups * sum(block.boundary_up for block in others)
        + (groups - 1) * sum(block.sum_up for block in travelling)
    )
    backward["download"] = sum(block.download for block in streamed) + (groups - 1) * sum(
        block.sum_down for block in travelling
    )
    sweeps = 2 * groups - 1 + options.second_backward
    drive = sum(
        b.nvme_read + b.nvme_write + b.nvme_gradient + sweeps * b.nvme_weight for b in blocks
    )
    # drives need no cores
    forward["nvme"] = max(0.0, drive - groups * sum(block.forward for block in others))
    computed = {
        "update": sum(block.host_update + block.device_update for block in blocks),
        "forward": groups * sum(block.forward for block in others),
        "head": groups * head.backward + head.finish,
        "backward": sum(groups * block.backward + block.finish for block in others),
        "second backward": 0.0,
    }
    if options.second_backward:  # moves the same as the first, whose gradients stay
        computed["second backward"] = sum(block.backward + block.finish for block in blocks)
        timeline.waits["second backward"] |= backward
        backward["download"] = 0.0
    timeline.phases = {
        phase: seconds + sum(timeline.waits[phase].values()) for phase, seconds in computed.items()
    }
    return timeline


def overlapped(blocks: Sequence[BlockTasks], options: StepOptions) -> StepTimeline:
    """A step on a machine with a GPU: lanes run at once."""
    simulator = StepSimulator(blocks, options)
    simulator.step()  # the first one finds all lanes idle
    return simulator.step()


def at_least(blocks: Sequence[BlockTasks], options: StepOptions) -> float:
    """Lower bound in seconds of `overlapped`: computation, busiest lane or update alone."""
    groups = options.groups
    travelling = blocks[options.sums_on_device :] if groups > 1 else ()
    forward = sum(block.forward for block in blocks)
    on_device = sum(block.device_update for block in blocks)
    computing = (
        groups * (forward + sum(block.backward for block in blocks))
        + sum(block.finish for block in blocks)
        + on_device
    )
    if options.second_backward:
        computing += sum(block.backward + block.finish for block in blocks)
    uploading = groups * sum(block.upload for block in blocks)
    uploading += (groups - 1) * sum(block.sum_up for block in travelling)
    downloading = sum(groups * block.boundary_down + block.download for block in blocks)
    downloading += (groups - 1) * sum(block.sum_down for block in travelling)
    updating = max(
        sum(block.host_update for block in blocks), sum(block.nvme_read for block in blocks)
    )
    # The head is updated last: where gradients are stored, only the first forward and the device's
    # own updates happen meanwhile.
    behind = computing - forward - on_device if options.stored else 0.0
    return max(computing, uploading, downloading, updating + behind)


class StepSimulator:
    """The times at which lanes and buffers become free, as far as steps were simulated."""

    def __init__(self, blocks: Sequence[BlockTasks], options: StepOptions) -> None:
        self.blocks, self.options = blocks, options
        self.head = len(blocks) - 1
        self.slots = slots_of_blocks(len(blocks), options.resident, options.tied)
        self.timeline = StepTimeline()
        self.asked: Iterator[tuple[int, ...]] = iter(())  # uploads before each visit of the step
        self.uploads = 0  # asked for so far
        self.compute = self.upload = self.fetch = self.download = self.host = self.drive = 0.0
        self.to_write: list[int] = []  # blocks that were updated and are not on NVMe yet
        self.stored = [0.0] * STAGES["grad"]  # when the latest gradients were on NVMe
        # blocks whose gradients are in the buffers of those that are applied at once
        self.applying: deque[int] = deque(maxlen=LANDING_BUFFERS)
        self.host_late = False  # the host's update is behind because it waited for NVMe
        self.late = [False] * len(blocks)  # the same, when each block was updated
        self.updated = [0.0] * len(blocks)
        self.gradient_landed = [0.0] * len(blocks)
        self.weights_landed = [0.0] * len(blocks)
        self.sum_landed = [0.0] * len(blocks)
        self.slot_free: dict[int | None, float] = {}
        self.slot_holds: dict[int | None, int] = {}
        self.staging_free = [0.0] * GRADIENT_STAGES
        self.travelling_free = [0.0] * TRAVELLING_SUMS
        self.turn = 0
        # the rings' sizes as seconds of the transfers that fill them
        leaving, coming = rings(options.micro_batches, options.layers_on_host)
        parts = max(1.0, options.micro_batches)
        self.leaving = leaving * max(block.boundary_down for block in blocks) / parts
        self.coming = coming * max(block.boundary_up for block in blocks) / parts

    def step(self) -> StepTimeline:
        """Simulate a step: from the time the norm of the one before is known to its own."""
        options = self.options
        simulated = min(options.groups, SIMULATED_GROUPS)
        order = block_order(len(self.blocks))
        visits = order * simulated + (order[self.head :] if options.second_backward else ())
        self.asked = iter(uploads(visits, self.slots))
        self.uploads = 0
        self.slot_holds.clear()
        whole = self.timeline = StepTimeline()
        if options.stored:
            self._update_all()
        for group in range(simulated):
            self.timeline = StepTimeline()
            self._group(first=group == 0, last=group == simulated - 1)
            times = options.groups - simulated + 1 if group == SIMULATED_GROUPS - 2 else 1
            whole.add(self.timeline, times)
        if options.second_backward:
            self.timeline = whole
            for block in order[self.head :]:
                self._arrive("second backward", block)
                self._backward("second backward", block, first=True, last=True)
                self._leave(block)
        return whole

    def _group(self, first: bool, last: bool) -> None:
        order = block_order(len(self.blocks))
        for block in order[: self.head]:
            self._arrive("forward", block)
            self._forward(block)
            self._leave(block)
        for block in order[self.head :]:
            phase = "head" if block == self.head else "backward"
            self._arrive(phase, block)
            self._backward(phase, block, first, last)
            self._leave(block)

    # -- updates -----------------------------------------------------------------------------------

    def _update_all(self) -> None:
        """Update resident blocks on the device, the others on the host in forward order."""
        self.host = max(self.host, self.compute)
        for block in range(self.options.resident, self.head + 1):
            self._host_update(block)
        while self.to_write:
            self._write_back()
        self._compute("update", sum(block.device_update for block in self.blocks))

    def _host_update(self, block: int) -> None:
        tasks, begin = self.blocks[block], max(self.host, self.gradient_landed[block])
        arrived = self._read_state(tasks) if tasks.nvme_read else 0.0
        queued = begin == self.host and self.host_late
        self.late[block] = self.host_late = arrived > begin or queued
        self.host = self.updated[block] = max(begin, arrived) + tasks.host_update
        if tasks.nvme_write:
            self.to_write.append(block)

    def _read_state(self, tasks: BlockTasks) -> float:
        """State is read from NVMe ahead of its update, when a write has freed a staging buffer."""
        if len(self.to_write) == STATE_STAGES:
            self._write_back()
        self.drive = max(self.drive, self.compute) + tasks.nvme_read
        return self.drive

    def _write_back(self) -> None:
        block = self.to_write.pop(0)
        self.drive = max(self.drive, self.updated[block]) + self.blocks[block].nvme_write

    # -- computation -------------------------------------------------------------------------------

    def _compute(self, phase: str, seconds: float) -> None:
        self.compute += seconds
        self.timeline.phases[phase] += seconds

    def _wait(self, phase: str, until: float, cause: str) -> None:
        gap = until - self.compute
        if gap > 0:
            self.timeline.waits[phase][cause] += gap
            self._compute(phase, gap)

    def _forward(self, block: int) -> None:
        """Activations that leave for the host wait for room in the ring."""
        tasks, begin = self.blocks[block], self.compute
        self._compute("forward", tasks.forward)
        if tasks.boundary_down:
            ready = begin + tasks.forward / self.options.micro_batches
            self.download = max(self.download, ready) + tasks.boundary_down
            self._wait("forward", self.download - self.leaving, "download")

    def _backward(self, phase: str, block: int, first: bool, last: bool) -> None:
        """The first micro-batch needs no accumulator yet, and the last one its checkpoint."""
        tasks = self.blocks[block]
        travels = self.options.groups > 1 and block >= self.options.sums_on_device
        each = tasks.backward / max(1.0, self.options.micro_batches)
        if travels:
            self.turn = (self.turn + 1) % TRAVELLING_SUMS
        arriving = self._fetch_sum(block) if travels and not first else 0.0
        if travels and first:
            self._wait(phase, self.travelling_free[self.turn], "download")
        back = 0.0
        if tasks.boundary_up:
            self.fetch = max(self.fetch, self.compute - self.coming) + tasks.boundary_up
            back = self.fetch + each
        self._compute(phase, each)
        self._wait(phase, arriving, "upload")
        self._compute(phase, tasks.backward - each)
        self._wait(phase, back, "upload")
        if last:
            self._finish(phase, block)
        elif travels:
            self.download = max(self.download, self.compute) + tasks.sum_down
            self.travelling_free[self.turn] = self.sum_landed[block] = self.download

    def _finish(self, phase: str, block: int) -> None:
        """Round, measure and download a gradient; if it is not stored, apply it."""
        tasks, streamed = self.blocks[block], block >= self.options.resident
        stage = block % GRADIENT_STAGES
        if streamed:
            self._wait(phase, self.staging_free[stage], "download")
        if self.options.second_backward and phase != "second backward":
            self._compute(phase, tasks.finish)
            return
        if streamed and not self.options.stored:
            self._wait_for_a_buffer(phase, block)
        self._compute(phase, tasks.finish)
        if streamed:
            self.download = max(self.download, self.compute) + tasks.download
            self.staging_free[stage] = self.gradient_landed[block] = self.download
            if tasks.nvme_gradient:
                self._wait(phase, self.stored.pop(0), "nvme")
                self.drive = max(self.drive, self.download) + tasks.nvme_gradient
                self.stored.append(self.drive)
        if not self.options.stored:
            self._compute(phase, tasks.device_update)
            if streamed:
                self._host_update(block)

    def _wait_for_a_buffer(self, phase: str, block: int) -> None:
        """Landing buffers are taken in turn: the update that reads the next one must be done."""
        if len(self.applying) == LANDING_BUFFERS:
            user = self.applying[0]
            self._wait(phase, self.updated[user], "nvme" if self.late[user] else "update")
        self.applying.append(block)

    # -- weights and accumulators ------------------------------------------------------------------

    def _arrive(self, phase: str, block: int) -> None:
        """Ask for the weights whose slots are free, and wait for the block's own."""
        for wanted in next(self.asked):
            self._upload(wanted)
            self.uploads += 1
        if block >= self.options.resident:
            landed = self.weights_landed[block]
            late = "nvme" if self.late[block] else "update"
            self._wait(phase, min(self.updated[block], landed), late)
            self._wait(phase, landed, "nvme" if self.blocks[block].nvme_weight else "upload")

    def _leave(self, block: int) -> None:
        self.slot_free[self.slots[block]] = self.compute

    def _upload(self, block: int) -> None:
        tasks, slot = self.blocks[block], self.slots[block]
        if self.slot_holds.get(slot) == block:
            return
        self.slot_holds[slot] = block
        there = self.updated[block]
        just_updated = self.options.stored and self.uploads <= self.head  # and still in staging
        if tasks.nvme_weight and not just_updated:
            there = self.drive = max(self.drive, there, self.compute) + tasks.nvme_weight
        begin = max(self.upload, there, self.slot_free.get(slot, 0.0))
        self.upload = self.weights_landed[block] = begin + tasks.upload

    def _fetch_sum(self, block: int) -> float:
        """The sum of earlier groups comes into a buffer that another block's may be leaving."""
        begin = max(self.upload, self.travelling_free[self.turn], self.sum_landed[block])
        self.upload = begin + self.blocks[block].sum_up
        return self.upload
