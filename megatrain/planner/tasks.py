"""The tasks of a step: the seconds of each block's tasks, what decides their order, and where
its time goes. Where all share the same cores, a step is their sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from megatrain.settings import Chosen

WORTH_NAMING = 0.05  # share of a phase's time: it is bound by what it waits for longer than that


@dataclass(frozen=True)
class Timing:
    """A steady step, predicted. Seconds unless said otherwise.

    Attributes:
        phases: update (resident blocks, on the device), forward, head, backward, second backward;
            they add up to the step.
        waits: of the computation: upload, update, download, nvme, exchange or network.
        bound_by: of each phase, where most of its time goes: compute, or one of the waits.
        tokens_per_s: of the data, without padding, on all ranks together.
        tflops: 6 x counted parameters (planner/cost/shape.py) x these, in TFLOP/s of each rank.
        reference_s: of a forward alone over as many tokens, which all rows that the run takes have
            before the first step where a loss refers to the model as it begins; 0: none does.
    """

    seconds: float
    phases: dict[str, float]
    waits: dict[str, float]
    bound_by: dict[str, str]
    tokens_per_s: float
    tflops: float
    reference_s: float = 0.0

    def waits_most_for(self, wait: str) -> bool:
        """True if no other wait takes longer than this one, which is worth naming."""
        seconds = self.waits[wait]
        return seconds == max(self.waits.values()) and seconds > WORTH_NAMING * self.seconds

    @property
    def busy(self) -> float:
        """Share of the step in which the device computes."""
        return 1 - sum(self.waits.values()) / self.seconds


PHASES = ("update", "forward", "head", "backward", "second backward")
WAITS = ("upload", "update", "download", "nvme", "exchange", "network")


@dataclass(frozen=True)
class BlockTasks:
    """Seconds of each lane that a block takes; computation is of a group's micro-batches.

    Of several ranks: what this one does with its share, and with the others.
    """

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
class StepOptions(Chosen):
    """The options that decide the order of work: the choices, and what the job adds."""

    micro_batches: float  # of a group, on average
    stored: bool  # gradients wait for their norm; else each is applied as soon as it is there
    tied: bool  # the embedding stays in a slot of its own from the first layer to the head
    first_trained: int = 0  # block, where backward ends
    ranks: int = 1
    beside_update: float = 1.0  # share of the bus's rate that the host's update leaves it
    gather_loss: float = 0.0  # seconds of computing that are lost for each one of a collective
    reduce_loss: float = 0.0


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
        """The bound of a phase, on which most of its time is spent: compute, or one of the
        waits."""
        waits = self.waits[phase]
        worst = max(waits, key=lambda name: waits[name])
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


def total(task: str, blocks: Sequence[BlockTasks]) -> float:
    seconds: float = sum(map(attrgetter(task), blocks))
    return seconds


def serial(blocks: Sequence[BlockTasks], options: StepOptions) -> StepTimeline:
    """A step on a machine where everything shares the same cores: the sum of all tasks."""
    *others, head = blocks
    groups, streamed = options.groups, blocks[options.resident :]
    first, once = options.first_trained, options.replicated  # weights of these come once a step
    in_turn, back_in_turn = (blocks[max(n, once) :] for n in (options.resident, first))
    travelling = blocks[options.sums_on_device :] if groups > 1 else ()
    forward = groups * total("forward", others)
    weights = groups * total("upload", in_turn) + total("upload", blocks[options.resident : once])
    weights_back = groups * total("upload", blocks[max(options.resident, first, once) :])
    drive = sum(block.nvme_read + block.nvme_write for block in blocks)
    computed = {
        "update": sum(block.host_update + block.device_update for block in blocks),
        "forward": forward,
        "head": groups * head.backward + head.finish,
        "backward": sum(groups * block.backward + block.finish for block in others),
        "second backward": 0.0,
    }
    timeline = StepTimeline()
    gathers = total("gather", back_in_turn)
    timeline.waits["forward"] |= {
        "exchange": groups * total("gather", others[once:]) + total("gather", blocks[:once]),
        "upload": weights,
        "download": groups * total("boundary_down", others),
        "nvme": max(0.0, drive - forward),  # drives need no cores
    }
    backward = timeline.waits["backward"]
    backward["upload"] = (
        weights_back
        + groups * total("boundary_up", others)
        + (groups - 1) * total("sum_up", travelling)
    )
    backward["download"] = total("download", streamed)
    backward["download"] += (groups - 1) * total("sum_down", travelling)
    backward["exchange"] = groups * gathers + total("reduce", blocks)
    backward["exchange"] += (groups - 1) * total("reduce", travelling)
    if options.second_backward:  # moves the same as the first, whose gradients stay
        computed["second backward"] = sum(block.backward + block.finish for block in blocks)
        timeline.waits["second backward"] |= backward | {
            "exchange": gathers + total("reduce", blocks)
        }
        backward["download"] = 0.0
    timeline.phases = {
        phase: seconds + sum(timeline.waits[phase].values()) for phase, seconds in computed.items()
    }
    return timeline
