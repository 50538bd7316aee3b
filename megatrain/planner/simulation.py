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

from megatrain.memory.sizes import SHARE_BUFFERS, STATE_STAGES
from megatrain.planner.collectives import Collectives
from megatrain.planner.tasks import BlockTasks, StepOptions, StepTimeline, total
from megatrain.schedule import (
    COMING,
    LANDING_BUFFERS,
    TRAVELLING_SUMS,
    block_order,
    leaving,
    slots_of_blocks,
    uploads,
)

# Groups: the first, two in the middle, and the last. More take as long as the second in the middle.
SIMULATED_GROUPS = 4


def overlapped(blocks: Sequence[BlockTasks], options: StepOptions) -> StepTimeline:
    """A step on a machine with a GPU: lanes run at once."""
    simulator = StepSimulator(blocks, options)
    simulator.step()  # the first one finds all lanes idle
    return simulator.step()


def at_least(blocks: Sequence[BlockTasks], options: StepOptions) -> float:
    """Lower bound in seconds of `overlapped`: computation, busiest lane or update alone."""
    groups = options.groups
    travelling = blocks[options.sums_on_device :] if groups > 1 else ()
    forward, backward, finish, on_device = (
        total(task, blocks) for task in ("forward", "backward", "finish", "device_update")
    )
    computing = groups * (forward + backward) + finish + on_device
    computing += backward + finish if options.second_backward else 0.0
    once = options.replicated
    uploading = groups * total("upload", blocks[once:]) + total("upload", blocks[:once])
    uploading += (groups - 1) * total("sum_up", travelling)
    downloading = groups * total("boundary_down", blocks) + total("download", blocks)
    downloading += (groups - 1) * total("sum_down", travelling)
    updating = max(total("host_update", blocks), total("nvme_read", blocks))
    # The head is updated last: where gradients are stored, only the first forward and the device's
    # own updates happen meanwhile.
    behind = computing - forward - on_device if options.stored else 0.0
    # at least once: where there are few layers, each stays in a slot of its own
    exchanging = 0.0
    if options.ranks > 1:
        exchanging = sum(total(task, blocks) for task in ("gather", "reduce"))
    exchanging += (groups - 1) * total("reduce", travelling)
    return max(computing, uploading, downloading, exchanging, updating + behind)


# why: decision 0011
class StepSimulator:
    """Times at which each lane and buffer is free next; a step goes on from where the one before
    ended."""

    def __init__(self, blocks: Sequence[BlockTasks], options: StepOptions) -> None:
        self.blocks, self.options = blocks, options
        self.head = len(blocks) - 1
        self.order = block_order(len(blocks), options.first_trained)
        self.several = options.ranks > 1
        # of several ranks, none has the whole of a resident block
        whole, self.own = (0, options.replicated) if self.several else (options.resident, 0)
        self.slots = slots_of_blocks(len(blocks), whole, options.tied, self.own)
        self.timeline = StepTimeline()
        self.asked: Iterator[tuple[int, ...]] = iter(())  # uploads before each visit of the step
        self.compute = self.upload = self.fetch = self.download = self.host = self.drive = 0.0
        self.collectives = Collectives()
        self.shares_free = deque([0.0] * SHARE_BUFFERS)
        self.uploaded = [0.0] * len(blocks)
        self.to_write: list[int] = []  # blocks that were updated and are not on NVMe yet
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
        self.staging_free = 0.0
        self.travelling_free = [0.0] * TRAVELLING_SUMS
        self.travelling_shares_free = [0.0] * TRAVELLING_SUMS
        self.turn = 0
        self.parts = max(1.0, options.micro_batches)
        # the ring's size as seconds of the transfers that fill it
        pieces = leaving(options.micro_batches, options.retained_on_host)
        self.leaving = pieces * max(block.boundary_down for block in blocks) / self.parts

    @property
    def exchange(self) -> float:
        return self.collectives.free

    def step(self) -> StepTimeline:
        """Simulate a step: from the time the norm of the one before is known to its own."""
        options, back = self.options, self.order[self.head :]
        simulated = min(options.groups, SIMULATED_GROUPS)
        visits = self.order * simulated + (back if options.second_backward else ())
        self.asked = iter(uploads(visits, self.slots, self.own))
        self.slot_holds.clear()
        whole = self.timeline = StepTimeline()
        if options.stored:
            self._update_all()
        for group in range(simulated):
            self.timeline = StepTimeline()
            first, last = group == 0, group == simulated - 1
            for block in self.order[: self.head]:
                self._visit("forward", block, first, last)
            for block in back:
                self._visit("head" if block == self.head else "backward", block, first, last)
            times = options.groups - simulated + 1 if group == SIMULATED_GROUPS - 2 else 1
            whole.add(self.timeline, times)
        self.timeline = whole
        for block in back if options.second_backward else ():
            self._visit("second backward", block, first=True, last=True)
        if self.several:  # wait: the norm needs all ranks' shares
            phase = "second backward" if options.second_backward else "backward"
            self._wait(phase, self.collectives.free, "exchange")
        return whole

    def _visit(self, phase: str, block: int, first: bool, last: bool) -> None:
        """first, last: of the groups whose gradients are added up."""
        self._arrive(phase, block)
        if phase == "forward":
            self._forward(block)
        else:
            self._backward(phase, block, first, last)
        self.slot_free[self.slots[block]] = self.compute

    # -- updates -----------------------------------------------------------------------------------

    def _update_all(self) -> None:
        """Update resident blocks on the device, the others on the host in forward order."""
        here = self.options.resident
        self.host = max(self.host, self.compute)
        for block in range(here, self.head + 1):
            self._host_update(block)
        while self.to_write:
            self._write_back()
        self._compute("update", sum(block.device_update for block in self.blocks))
        self.updated[:here] = [self.compute] * here

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
        block = self.to_write.pop(0)
        self.drive = max(self.drive, self.updated[block]) + self.blocks[block].nvme_write

    # -- computation -------------------------------------------------------------------------------

    def _compute(self, phase: str, seconds: float) -> None:
        self._pass(phase, self.collectives.beside(self.compute, seconds))

    def _pass(self, phase: str, seconds: float) -> None:
        self.compute += seconds
        self.timeline.phases[phase] += seconds

    def _wait(self, phase: str, until: float, cause: str) -> None:
        gap = until - self.compute
        if gap > 0:
            self.timeline.waits[phase][cause] += gap
            self._pass(phase, gap)

    def _forward(self, block: int) -> None:
        """Activations that leave for the host need room in the ring."""
        tasks, begin = self.blocks[block], self.compute
        self._compute("forward", tasks.forward)
        if tasks.boundary_down:
            ready = begin + tasks.forward / self.options.micro_batches
            self.download = max(self.download, ready) + tasks.boundary_down
            # wait: what is on its way to the host must leave room in the ring
            self._wait("forward", self.download - self.leaving, "download")

    def _backward(self, phase: str, block: int, first: bool, last: bool) -> None:
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
            self._wait(phase, free[self.turn], "exchange")
            free = self.travelling_shares_free
        elif travels and first:
            self._wait(phase, free[self.turn], "download")
        if travels and not first:
            # the sum of earlier groups comes into a buffer that another block's may be leaving
            begin = max(self.upload, free[self.turn], self.sum_landed[block])
            arriving = free[self.turn] = self.upload = begin + tasks.sum_up
        back = 0.0
        if tasks.boundary_up:
            ahead = COMING * tasks.boundary_up / self.parts
            self.fetch = max(self.fetch, self.compute - ahead) + tasks.boundary_up
            back = self.fetch + each
        self._compute(phase, each)
        if not exchanged:
            self._wait(phase, arriving, "upload")  # wait: the next gradient is added to the sum
        self._compute(phase, tasks.backward - each)
        self._wait(phase, back, "upload")  # wait: the last micro-batch needs its activations
        if last and not tasks.frozen:
            self._finish(phase, block)
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

    def _finish(self, phase: str, block: int) -> None:
        """Round, measure and download a gradient; if it is not stored, apply it."""
        tasks, streamed = self.blocks[block], block >= self.options.resident
        if self.several:
            self._share_out(phase, block)
            return
        if streamed:  # wait: the gradient before still leaves the staging buffer
            self._wait(phase, self.staging_free, "download")
        if self.options.second_backward and phase != "second backward":
            self._compute(phase, tasks.finish)
            return
        if streamed:
            self._take_landing_buffer(phase, block)
        self._compute(phase, tasks.finish)
        if streamed:
            self._send(phase, block, self.compute)
        if not self.options.stored:
            self._compute(phase, tasks.device_update)
            if streamed:
                self._host_update(block)

    def _share_out(self, phase: str, block: int) -> None:
        """`_finish` of several ranks: each gets its share, which it rounds and sends away."""
        tasks, stored = self.blocks[block], self.options.stored
        shared = self._exchange_sums(block, max(self.compute, self.staging_free))
        self.staging_free = shared
        if self.options.second_backward and phase != "second backward":
            return
        if block >= self.options.resident:
            self._take_landing_buffer(phase, block)
            self._send(phase, block, shared)
            if not stored:
                self._host_update(block)
        elif not stored:
            self._wait(phase, shared, "exchange")
            self._compute(phase, tasks.device_update)
            self.updated[block] = self.compute

    def _take_landing_buffer(self, phase: str, block: int) -> None:
        """In host RAM, for a gradient that is not stored."""
        if self.options.stored:
            return
        # wait: landing buffers are taken in turn, and an update still reads the next one
        if len(self.applying) == LANDING_BUFFERS:
            user = self.applying[0]
            self._wait(phase, self.updated[user], "nvme" if self.late[user] else "update")
        self.applying.append(block)

    def _send(self, phase: str, block: int, ready: float) -> None:
        """Download a finished gradient."""
        begin = max(self.download, ready)
        self.download = begin + self._beside_update(begin, self.blocks[block].download)
        self.staging_free = self.gradient_landed[block] = self.download

    # -- weights -----------------------------------------------------------------------------------

    def _arrive(self, phase: str, block: int) -> None:
        """Ask for the weights whose slots are free, and wait for the block's own."""
        for wanted in next(self.asked):
            self._upload(wanted)
        if self.slots[block] is not None:
            up, late = self.uploaded[block], "nvme" if self.late[block] else "update"
            self._wait(phase, min(self.updated[block], up), late)
            self._wait(phase, up, "upload")
            self._wait(phase, self.weights_landed[block], "exchange")

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
        there = self.updated[block]
        slot_free = self.slot_free.get(slot, 0.0)
        gathered = self.several and not tasks.read
        begin = max(self.upload, there, self.shares_free[0] if gathered else slot_free)
        self.upload = begin + self._beside_update(begin, tasks.upload)
        self.uploaded[block] = self.weights_landed[block] = self.upload
        if gathered:
            ready, lost = max(self.upload, slot_free), self.options.gather_loss
            landed = self.collectives.add(ready, tasks.gather, lost)
            self.weights_landed[block] = self.shares_free[0] = landed
            self.shares_free.rotate()
