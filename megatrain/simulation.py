"""One steady step's course in time: the engine's order of work played through over lanes that run at once, without a device.

Each lane does one thing after another: computation, uploads of weights and sums, fetches of boundary activations, downloads, the host's
update, the drives. A task begins when its lane is free and what it needs is there, so one pass over the step in the engine's order
(engine/step.py, streamer.py, gradients.py, boundaries.py, update.py) gives every moment.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatrain.nvme_tier import STAGES, STATE_STAGES
from megatrain.planner_bytes import HOST_STAGES
from megatrain.retention import rings

LAYER_SLOTS, EMBEDDING_SLOT, HEAD_SLOT = 2, -1, -2
SIMULATED_GROUPS = 4  # the first, two in the middle, and the last; further ones take as long as the second in the middle
PHASES = ("update", "forward", "head", "backward", "second backward")
WAITS = ("upload", "update", "download", "nvme")


@dataclass(frozen=True)
class BlockTasks:
    """What one block asks of each lane, seconds: of the computation for all micro-batches of a group."""

    forward: float
    backward: float  # recomputation and adding up gradients included; of the head everything
    finish: float  # rounding and measuring the whole step's gradient
    upload: float
    download: float  # of the finished gradient
    sum_up: float  # of fp32 sums that wait on the host between groups
    sum_down: float
    boundary_down: float  # of offloaded boundary activations
    boundary_up: float
    host_update: float
    device_update: float
    nvme_read: float = 0.0  # for the update, of what lies on NVMe
    nvme_write: float = 0.0  # behind it
    nvme_gradient: float = 0.0  # a gradient's way there
    nvme_weight: float = 0.0  # a weight's way back for a sweep
    boundary_write: float = 0.0  # of offloaded boundary activations that go on to NVMe
    boundary_read: float = 0.0


@dataclass(frozen=True)
class Dials:
    """The choices that decide the order of work."""

    groups: int
    micro_batches: float  # of a group, on average
    resident: int  # blocks
    sums_on_device: int  # blocks
    clipping: bool
    tied: bool  # the embedding stays in a slot of its own from the first layer to the head
    second_backward: bool = False  # the first one measures gradients only
    graphs_on_host: int = 0  # layers

    @property
    def stored(self) -> bool:
        """Gradients wait for their norm; else each is applied as soon as it is there."""
        return self.clipping and not self.second_backward


@dataclass
class Course:
    """Seconds of each phase, and in it of each kind of wait of the computation."""

    phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    waits: dict[str, dict[str, float]] = field(default_factory=lambda: {phase: dict.fromkeys(WAITS, 0.0) for phase in PHASES})

    @property
    def seconds(self) -> float:
        return sum(self.phases.values())

    def add(self, other: Course, times: int) -> None:
        for phase in PHASES:
            self.phases[phase] += times * other.phases[phase]
            for wait in WAITS:
                self.waits[phase][wait] += times * other.waits[phase][wait]


def in_turn(blocks: Sequence[BlockTasks], dials: Dials) -> Course:
    """A step on a machine where everything shares the same cores: the sum of all tasks."""
    course = Course()
    *others, head = blocks
    groups, streamed = dials.groups, blocks[dials.resident :]
    uploads = groups * sum(block.upload for block in streamed)
    travelling = blocks[dials.sums_on_device :] if groups > 1 else ()
    course.waits["forward"] |= {"upload": uploads, "download": groups * sum(block.boundary_down for block in others)}
    course.waits["backward"] |= {
        "upload": uploads + groups * sum(block.boundary_up for block in others) + (groups - 1) * sum(block.sum_up for block in travelling),
        "download": sum(block.download for block in streamed) + (groups - 1) * sum(block.sum_down for block in travelling),
    }
    drive = groups * sum(b.boundary_write + b.boundary_read for b in blocks)
    drive += dials.second_backward * sum(b.boundary_read for b in blocks)
    drive += sum(b.nvme_read + b.nvme_write + b.nvme_gradient + (2 * groups - 1 + dials.second_backward) * b.nvme_weight for b in blocks)
    course.waits["forward"]["nvme"] = max(0.0, drive - groups * sum(block.forward for block in others))  # drives need no cores
    computed = {
        "update": sum(block.host_update + block.device_update for block in blocks),
        "forward": groups * sum(block.forward for block in others),
        "head": groups * head.backward + head.finish,
        "backward": sum(groups * block.backward + block.finish for block in others),
        "second backward": sum(block.backward + block.finish for block in blocks) if dials.second_backward else 0.0,
    }
    if dials.second_backward:  # moves the same in both directions, but that the first one's gradients stay
        course.waits["second backward"] |= course.waits["backward"]
        course.waits["backward"]["download"] = 0.0
    course.phases = {phase: seconds + sum(course.waits[phase].values()) for phase, seconds in computed.items()}
    return course


def overlapped(blocks: Sequence[BlockTasks], dials: Dials) -> Course:
    """A step on a machine with a GPU: lanes run at once."""
    play = _Play(blocks, dials)
    play.step()  # the first one finds all lanes idle
    return play.step()


def at_least(blocks: Sequence[BlockTasks], dials: Dials) -> float:
    """Seconds that an overlapped step cannot fall below: what its computation, its busiest lane or its update take alone. Far quicker."""
    groups, travelling = dials.groups, blocks[dials.sums_on_device :] if dials.groups > 1 else ()
    forward = sum(block.forward for block in blocks)
    on_device = sum(block.device_update for block in blocks)
    computing = groups * (forward + sum(block.backward for block in blocks)) + sum(block.finish for block in blocks) + on_device
    if dials.second_backward:
        computing += sum(block.backward + block.finish for block in blocks)
    uploading = groups * sum(block.upload for block in blocks)
    uploading += (groups - 1) * sum(block.sum_up for block in travelling)
    downloading = sum(groups * block.boundary_down + block.download for block in blocks)
    downloading += (groups - 1) * sum(block.sum_down for block in travelling)
    inputs = groups * sum(block.boundary_write + block.boundary_read for block in blocks)  # written and read again within the step
    updating = max(sum(block.host_update for block in blocks), sum(block.nvme_read for block in blocks))
    # the head is updated last: where gradients are stored, only the first forward and the device's own updates happen meanwhile
    behind = computing - forward - on_device if dials.stored else 0.0
    return max(computing, uploading, downloading, inputs, updating + behind)


class _Play:
    """The moments at which lanes and buffers become free, as far as the step was played."""

    def __init__(self, blocks: Sequence[BlockTasks], dials: Dials) -> None:
        self.blocks, self.dials = blocks, dials
        self.head = len(blocks) - 1
        self.compute = self.upload = self.fetch = self.download = self.host = self.drive = 0.0
        self.to_write: list[int] = []  # blocks that were updated and are not on NVMe yet
        self.stored = [0.0] * STAGES["grad"]  # when the latest gradients were there
        self.applying: deque[int] = deque(maxlen=HOST_STAGES)  # blocks whose gradients have the buffers of those that are applied at once
        self.host_late = False  # whether the host's update is behind for waiting for NVMe
        self.late = [False] * len(blocks)  # whether a block's update waited for NVMe, or came after one that did
        self.updated = [0.0] * len(blocks)
        self.gradient_landed = [0.0] * len(blocks)
        self.weights_landed = [0.0] * len(blocks)
        self.sum_landed = [0.0] * len(blocks)
        self.slot_free: dict[int, float] = {}
        self.slot_holds: dict[int, int] = {}
        self.staging_free = [0.0, 0.0]
        self.travelling_free = [0.0, 0.0]
        self.turn = 0
        leaving, coming = rings(dials.micro_batches, dials.graphs_on_host)
        self.leaving = leaving * max(block.boundary_down for block in blocks) / max(1.0, dials.micro_batches)
        self.coming = coming * max(block.boundary_up for block in blocks) / max(1.0, dials.micro_batches)

    def step(self) -> Course:
        """Play a whole step: from the moment the norm of the one before is known to that moment."""
        played = min(self.dials.groups, SIMULATED_GROUPS)
        visits = [block for _ in range(played) for block in self._there_and_back()]
        if self.dials.second_backward:
            visits += self._there_and_back()[self.head :]
        self.route = [block for block in visits if block >= self.dials.resident]
        self.position = self.fetched = 0
        self.slot_holds.clear()
        whole = Course()
        self.course = whole
        if self.dials.stored:
            self._update_all()
        for group in range(played):
            self.course = Course()
            self._group(first=group == 0, last=group == played - 1)
            whole.add(self.course, self.dials.groups - played + 1 if group == SIMULATED_GROUPS - 2 else 1)
        if self.dials.second_backward:
            self.course = whole
            for block in range(self.head, -1, -1):
                self._arrive("second backward", block)
                self._backward("second backward", block, first=True, last=True)
                self._leave(block)
        return whole

    def _there_and_back(self) -> list[int]:
        return [*range(self.head + 1), *range(self.head - 1, -1, -1)]

    def _update_all(self) -> None:
        """The norm is known: resident blocks at once on the device, the others on the host in forward order."""
        self.host = max(self.host, self.compute)
        for block in range(self.dials.resident, self.head + 1):
            self._host_update(block)
        while self.to_write:
            self._write_back()
        self._compute("update", sum(block.device_update for block in self.blocks))

    def _host_update(self, block: int) -> None:
        tasks, begin = self.blocks[block], max(self.host, self.gradient_landed[block])
        arrived = self._read_state(tasks) if tasks.nvme_read else 0.0
        self.late[block] = self.host_late = arrived > begin or (begin == self.host and self.host_late)
        self.host = self.updated[block] = max(begin, arrived) + tasks.host_update
        if tasks.nvme_write:
            self.to_write.append(block)

    def _read_state(self, tasks: BlockTasks) -> float:
        """What a block keeps on NVMe is read as soon as there is a staging buffer: ahead of its update, behind earlier ones' way back."""
        if len(self.to_write) == STATE_STAGES:
            self._write_back()
        self.drive = max(self.drive, self.compute) + tasks.nvme_read
        return self.drive

    def _write_back(self) -> None:
        block = self.to_write.pop(0)
        self.drive = max(self.drive, self.updated[block]) + self.blocks[block].nvme_write

    def _group(self, first: bool, last: bool) -> None:
        for block in range(self.head):
            self._arrive("forward", block)
            self._forward(block)
            self._leave(block)
        for block in range(self.head, -1, -1):
            phase = "head" if block == self.head else "backward"
            self._arrive(phase, block)
            self._backward(phase, block, first, last)
            self._leave(block)

    # -- computation ----------------------------------------------------------------------------------------------------------

    def _compute(self, phase: str, seconds: float) -> None:
        self.compute += seconds
        self.course.phases[phase] += seconds

    def _wait(self, phase: str, until: float, cause: str) -> None:
        gap = until - self.compute
        if gap > 0:
            self.course.waits[phase][cause] += gap
            self._compute(phase, gap)

    def _forward(self, block: int) -> None:
        """What leaves for the host must make room for what follows: so much can be on its way at a time."""
        tasks, begin = self.blocks[block], self.compute
        self._compute("forward", tasks.forward)
        if tasks.boundary_down:
            begin = max(self.download, begin + tasks.forward / self.dials.micro_batches)
            self.download, cause = self._boundary(begin, tasks.boundary_down, tasks.boundary_write, "download")
            longer = max(1.0, tasks.boundary_write / tasks.boundary_down)  # the same ring holds so many more seconds of a slower way
            self._wait("forward", self.download - longer * self.leaving, cause)

    def _boundary(self, begin: float, bus: float, drive: float, cause: str) -> tuple[float, str]:
        """When boundaries are in place, and what a wait for them waits for: they pass bus and drive part by part, at the slower's rate.

        A drive that also holds arrays takes inputs after a whole update here; in fact it does both at once, and is done as soon.
        """
        there = begin + bus
        if drive:
            self.drive = max(self.drive, begin) + drive
            if self.drive > there:
                return self.drive, "nvme"
        return there, cause

    def _backward(self, phase: str, block: int, first: bool, last: bool) -> None:
        """The first micro-batch needs no sums yet, and the last one its boundary."""
        tasks = self.blocks[block]
        travels = self.dials.groups > 1 and block >= self.dials.sums_on_device
        each = tasks.backward / max(1.0, self.dials.micro_batches)
        if travels:
            self.turn = 1 - self.turn
        arriving = self._fetch_sum(block) if travels and not first else 0.0
        if travels and first:
            self._wait(phase, self.travelling_free[self.turn], "download")
        back, cause = 0.0, "upload"
        if tasks.boundary_up:
            longer = max(1.0, tasks.boundary_read / tasks.boundary_up)
            begin = max(self.fetch, self.compute - longer * self.coming)
            self.fetch, cause = self._boundary(begin, tasks.boundary_up, tasks.boundary_read, cause)
            back = self.fetch + each
        self._compute(phase, each)
        self._wait(phase, arriving, "upload")
        self._compute(phase, tasks.backward - each)
        self._wait(phase, back, cause)
        if last:
            self._finish(phase, block)
        elif travels:
            self.download = max(self.download, self.compute) + tasks.sum_down
            self.travelling_free[self.turn] = self.sum_landed[block] = self.download

    def _finish(self, phase: str, block: int) -> None:
        """Round, measure and download a gradient; where none is stored it is applied as soon as it is there."""
        tasks = self.blocks[block]
        if block >= self.dials.resident:
            self._wait(phase, self.staging_free[block % 2], "download")
        if self.dials.second_backward and phase != "second backward":
            self._compute(phase, tasks.finish)
            return
        if block >= self.dials.resident and not self.dials.stored:
            self._wait_for_a_buffer(phase, block)
        self._compute(phase, tasks.finish)
        if block >= self.dials.resident:
            self.download = max(self.download, self.compute) + tasks.download
            self.staging_free[block % 2] = self.gradient_landed[block] = self.download
            if tasks.nvme_gradient:
                self._wait(phase, self.stored.pop(0), "nvme")
                self.drive = max(self.drive, self.download) + tasks.nvme_gradient
                self.stored.append(self.drive)
        if not self.dials.stored:
            self._compute(phase, tasks.device_update)
            if block >= self.dials.resident:
                self._host_update(block)

    def _wait_for_a_buffer(self, phase: str, block: int) -> None:
        """A gradient that is applied at once lands where one was that was applied before."""
        if len(self.applying) == HOST_STAGES:
            user = self.applying[0]
            self._wait(phase, self.updated[user], "nvme" if self.late[user] else "update")
        self.applying.append(block)

    # -- lanes ----------------------------------------------------------------------------------------------------------------

    def _arrive(self, phase: str, block: int) -> None:
        """Ask for the weights that there are slots for, and wait for the block's own."""
        while self.fetched < len(self.route) and self._has_slot():
            self._fetch(self.route[self.fetched])
            self.fetched += 1
        if block >= self.dials.resident:
            self._wait(phase, min(self.updated[block], self.weights_landed[block]), "nvme" if self.late[block] else "update")
            self._wait(phase, self.weights_landed[block], "nvme" if self.blocks[block].nvme_weight else "upload")

    def _leave(self, block: int) -> None:
        if block >= self.dials.resident:
            self.slot_free[self._slot(block)] = self.compute
            self.position += 1

    def _slot(self, block: int) -> int:
        if block == self.head and self.dials.tied:
            return HEAD_SLOT
        return EMBEDDING_SLOT if block in (0, self.head) else (block - max(1, self.dials.resident)) % LAYER_SLOTS

    def _has_slot(self) -> bool:
        """Whether no visit still to come reads another block from the slot that the next upload would fill."""
        wanted = self.route[self.fetched]
        slot = self._slot(wanted)
        return not any(self._slot(block) == slot and block != wanted for block in self.route[self.position : self.fetched])

    def _fetch(self, block: int) -> None:
        slot = self._slot(block)
        if self.slot_holds.get(slot) == block:
            return
        self.slot_holds[slot] = block
        there = self.updated[block]
        if self.blocks[block].nvme_weight and not (self.dials.stored and self.fetched <= self.head):  # just updated, it is still in staging
            there = self.drive = max(self.drive, there, self.compute) + self.blocks[block].nvme_weight
        begin = max(self.upload, there, self.slot_free.get(slot, 0.0))
        self.upload = self.weights_landed[block] = begin + self.blocks[block].upload

    def _fetch_sum(self, block: int) -> float:
        """The block's sum of the groups before, into a buffer that another block's may still be leaving."""
        begin = max(self.upload, self.travelling_free[self.turn], self.sum_landed[block])
        self.upload = begin + self.blocks[block].sum_up
        return self.upload
