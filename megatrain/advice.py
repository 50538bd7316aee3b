"""What is worth changing about a run, in one sentence: from where its steps' time goes and what it has chosen."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from megatrain.metrics import StepTime

WORTH_NAMING = 0.05  # a wait below this share of the step is not worth anybody's time
LAUNCH_BOUND_MFU = 0.25  # layers that reach less of the GPU's peak wait for their kernels' launches, or for memory between them
FORWARD_SHARE = 0.3  # of a step's computation: behind it the host's update hides
TOKENS_ROUNDED_TO = 1024


@dataclass(frozen=True)
class Facts:
    """What the advice knows of a run besides where its time goes."""

    cuda: bool
    compiled: bool
    tokens_per_step: int
    groups: int
    layers: int
    recomputed: int  # of the layers
    streams: bool  # some block's weights are on the host
    update_threads: int
    idle_threads: int  # cores that the update could have, and has not
    second_backward: bool = False  # gradients are computed twice
    asked: frozenset[str] = frozenset()  # keys of the config that somebody has set where the planner would choose


@dataclass(frozen=True)
class Situation:
    """A run while it goes on."""

    facts: Facts
    time: StepTime
    mfu: float | None  # None where the device's peak is unknown

    def share(self, name: str) -> float:
        return self.time.shares()[name]

    @property
    def wait(self) -> str | None:
        """The largest wait, if it is worth naming."""
        waits = {name: share for name, share in self.time.shares().items() if name != "compute" and share >= WORTH_NAMING}
        return max(waits, key=lambda name: waits[name], default=None)

    @property
    def waits_for_streaming(self) -> bool:
        """The largest wait is one that blocks on the GPU do not have."""
        return self.facts.cuda and self.facts.streams and self.wait in ("wait_update", "wait_upload")

    def asked(self, key: str) -> bool:
        return key in self.facts.asked

    def more_tokens(self, hidden_behind: float = 1.0) -> str:
        """How many tokens hide the wait behind computation, if `hidden_behind` is the part of it that can hide anything."""
        assert self.wait is not None
        growth = 1 + self.share(self.wait) / max(self.share("compute") * hidden_behind, 0.01)
        tokens = math.ceil(self.facts.tokens_per_step * growth / TOKENS_ROUNDED_TO) * TOKENS_ROUNDED_TO
        return f"raise train.tokens_per_step to about {tokens:,}, so that there is enough to compute meanwhile"


Rule = tuple[Callable[[Situation], bool], Callable[[Situation], str]]

# The first rule that applies speaks. Where a cause has several cures, what costs the user nothing comes first.
RULES: tuple[Rule, ...] = (
    (
        lambda s: s.wait == "data",
        lambda s: "put the rows on a local disk: they are read more slowly than they are used",
    ),
    (
        lambda s: s.wait == "wait_update" and s.facts.idle_threads > 0,
        lambda s: f"raise threads from {s.facts.update_threads} to {s.facts.update_threads + s.facts.idle_threads}: cores are idle",
    ),
    (
        lambda s: s.waits_for_streaming and s.asked("memory.resident"),
        lambda s: "set memory.resident: auto: blocks that stay on the GPU need no upload and no update by the host",
    ),
    (
        lambda s: s.waits_for_streaming and s.asked("memory.gpu"),
        lambda s: "raise memory.gpu: blocks that stay on the GPU need no upload and no update by the host",
    ),
    (
        lambda s: s.wait == "wait_upload" and s.facts.groups > 1 and s.asked("train.groups"),
        lambda s: f"lower train.groups from {s.facts.groups}: every group sends the weights over the bus again",
    ),
    (
        lambda s: s.wait == "wait_nvme",
        lambda s: f"name folders on more drives in memory.nvme, or {s.more_tokens(hidden_behind=FORWARD_SHARE / s.facts.groups)}",
    ),
    (
        lambda s: s.wait == "wait_update",
        lambda s: s.more_tokens(hidden_behind=FORWARD_SHARE / s.facts.groups),
    ),
    (
        lambda s: s.wait is not None,
        lambda s: s.more_tokens(),
    ),
    (
        lambda s: s.facts.second_backward and s.asked("memory.second_backward"),
        lambda s: "set memory.second_backward: auto: all gradients are computed twice",
    ),
    (
        lambda s: s.facts.second_backward and s.asked("memory.host"),
        lambda s: "raise memory.host: for lack of it all gradients are computed twice",
    ),
    (
        lambda s: s.facts.cuda and not s.facts.compiled and s.mfu is not None and s.mfu < LAUNCH_BOUND_MFU,
        lambda s: f"set compile: true, or raise train.micro_batch_tokens: with kernels so small the GPU reaches {s.mfu:.0%} of its peak",
    ),
    (
        lambda s: s.facts.recomputed > 0 and s.asked("train.retained"),
        lambda s: f"set train.retained: auto: {s.facts.recomputed} of {s.facts.layers} layers are computed twice",
    ),
    (
        lambda s: s.facts.cuda and s.facts.recomputed > 0 and s.asked("memory.gpu"),
        lambda s: f"raise memory.gpu: for lack of it {s.facts.recomputed} of {s.facts.layers} layers are computed twice",
    ),
)


def advise(time: StepTime, facts: Facts, mfu: float | None = None) -> str:
    """One sentence: the setting most worth changing and why, or that there is none.

    Args:
        time: of one step, or summed over several; of steady ones, for the first of a process compiles.
        mfu: model FLOP utilisation of those steps, 0 to 1.
    """
    situation = Situation(facts, time, mfu)
    for applies, sentence in RULES:
        if applies(situation):
            return sentence(situation)
    return f"nothing is worth changing: the {'GPU' if facts.cuda else 'CPU'} computes {situation.share('compute'):.0%} of the time"
