"""Advice about a run in one sentence, from its steps' times and its choices."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatrain.reporting.meters import Load
from megatrain.reporting.metrics import StepTime

WORTH_NAMING = 0.05  # share of a step below which no wait is named
# Layers below this share of the GPU's peak wait for kernel launches, or for memory between kernels.
LAUNCH_BOUND_MFU = 0.25
FORWARD_SHARE = 0.3  # of a step's computation: the host's update hides behind the forward pass
TOKENS_ROUNDED_TO = 1024


@dataclass(frozen=True)
class Facts:
    """Facts about a run, besides its times, that the advice uses."""

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
    asked: frozenset[str] = frozenset()  # config keys the user set where the planner would choose


def advise(time: StepTime, facts: Facts, mfu: float | None = None, load: Load | None = None) -> str:
    """One sentence: the setting most worth changing and why, or that there is none.

    Args:
        time: of one step or of several; of steady ones, for the first of a process compiles.
        mfu: model FLOP utilisation of those steps, 0 to 1; None where the peak is unknown.
        load: of the processors meanwhile; None if nobody looked.
    """
    waits = {name: share for name, share in time.shares().items() if name != "compute"}
    wait = max(waits, key=lambda name: waits[name])
    held_up = waits[wait] >= WORTH_NAMING
    if load is not None and load.contended and (held_up or not facts.cuda):
        return f"{load.words}: stop them, or expect longer steps than planned"
    if held_up:
        return _against_waiting(wait, time, facts)
    return _against_computing(time, facts, mfu)


# In both functions what costs the user nothing comes first.


def _against_waiting(wait: str, time: StepTime, facts: Facts) -> str:
    if wait == "data":
        return "put the rows on a local disk: they are read more slowly than they are used"
    if wait == "wait_update" and facts.idle_threads > 0:
        threads = facts.update_threads
        return f"raise threads from {threads} to {threads + facts.idle_threads}: cores are idle"
    resident = "blocks that stay on the GPU need no upload and no update by the host"
    if facts.cuda and facts.streams and wait in ("wait_update", "wait_upload"):
        if "memory.resident" in facts.asked:
            return f"set memory.resident: auto: {resident}"
        if "memory.gpu" in facts.asked:
            return f"raise memory.gpu: {resident}"
    if wait == "wait_upload" and facts.groups > 1 and "train.groups" in facts.asked:
        why = "every group sends the weights over the bus again"
        return f"lower train.groups from {facts.groups}: {why}"
    # The update and its traffic with NVMe hide behind the first group's forward pass alone.
    behind = FORWARD_SHARE / facts.groups if wait in ("wait_update", "wait_nvme") else 1.0
    shares = time.shares()
    tokens = facts.tokens_per_step * (1 + shares[wait] / max(shares["compute"] * behind, 0.01))
    tokens = math.ceil(tokens / TOKENS_ROUNDED_TO) * TOKENS_ROUNDED_TO
    why = "so that there is enough to compute meanwhile"
    more = f"raise train.tokens_per_step to about {tokens:,}, {why}"
    return f"name folders on more drives in memory.nvme, or {more}" if wait == "wait_nvme" else more


def _against_computing(time: StepTime, facts: Facts, mfu: float | None) -> str:
    if facts.second_backward and "memory.second_backward" in facts.asked:
        return "set memory.second_backward: auto: all gradients are computed twice"
    if facts.second_backward and "memory.host" in facts.asked:
        return "raise memory.host: for lack of it all gradients are computed twice"
    if facts.cuda and not facts.compiled and mfu is not None and mfu < LAUNCH_BOUND_MFU:
        why = f"with kernels so small the GPU reaches {mfu:.0%} of its peak"
        return f"set compile: true, or raise train.micro_batch_tokens: {why}"
    twice = f"{facts.recomputed} of {facts.layers} layers are computed twice"
    if facts.recomputed > 0 and "train.retained" in facts.asked:
        return f"set train.retained: auto: {twice}"
    if facts.cuda and facts.recomputed > 0 and "memory.gpu" in facts.asked:
        return f"raise memory.gpu: for lack of it {twice}"
    device, busy = "GPU" if facts.cuda else "CPU", time.shares()["compute"]
    return f"nothing is worth changing: the {device} computes {busy:.0%} of the time"
