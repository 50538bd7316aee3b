"""Seconds and rows of writing answers on a device, from the rates of its memory and products."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from megatrain.machine.profile import MachineProfile, interpolate
from megatrain.memory.sizes import SCORE_BYTES
from megatrain.planner.plan import Plan
from megatrain.planner.suggest import WORTH_SAYING

# A step takes this many times its products and the reading of keys, and seconds for each layer's
# small kernels: fitted to 7.1, 11.1 and 19.1 ms at 64, 256 and 512 rows (decision 0114).
TIMES, LAYER_S = 1.07, 100e-6
ANSWERS = "answers"  # the phase of a step
# Of the device's memory what only training takes, and gives back.
OF_TRAINING = {
    *("activation checkpoints", "retained activations", "working set", "allocator slack"),
    *("token ids and targets", "rotary tables and masks"),
}


@dataclass(frozen=True, kw_only=True)
class Writing:
    """One rollout: `answers` answers of `length` tokens to prompts of `prompt` tokens.

    Attributes:
        parameters: that act on a token; of these and of all, `weight_bytes` are read a step.
        token_bytes: keys and values of a token, in all layers.
        room: bytes that the device has beside what stays there between steps.
    """

    answers: int
    prompts: int
    prompt: int
    length: int
    parameters: int
    weight_bytes: int
    token_bytes: int
    vocabulary: int
    layers: int
    room: int

    @property
    def row_bytes(self) -> int:
        return self.token_bytes * (self.prompt + self.length) + SCORE_BYTES * self.vocabulary

    @property
    def streamed(self) -> bool:
        """The weights have no room beside one answer, and pass through the device at each step."""
        return self.room - self.weight_bytes < self.row_bytes

    @property
    def rows(self) -> int:
        """Answers that are written at a time; 0 where not one has room."""
        room = self.room if self.streamed else self.room - self.weight_bytes
        return max(0, min(self.answers, room // self.row_bytes))

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes + (0 if self.streamed else self.weight_bytes)

    def seconds(self, profile: MachineProfile) -> float:
        """Weights are uploaded once, prompts computed once, and every step reads weights and the
        keys of its rows."""
        rows, flops = max(1, self.rows), 2 * self.parameters
        keys = rows * self.token_bytes * (self.prompt + self.length / 2)
        products = flops * rows / interpolate(profile.matmul, rows)
        products = max(products, self.weight_bytes / profile.memory)
        step = TIMES * (products + keys / profile.memory) + LAYER_S * self.layers
        upload = self.weight_bytes / profile.upload if profile.upload else 0.0
        if self.streamed:
            step, upload = max(step, upload), 0.0
        asked = self.prompts * self.prompt
        beginning = flops * asked / interpolate(profile.matmul, asked)
        return upload + beginning + math.ceil(self.answers / rows) * self.length * step


def with_answers(plan: Plan, writing: Writing, seconds: float) -> Plan:
    """The plan of steps that also write answers, for so many seconds of each; on a GPU with the
    memory that this takes beyond training's."""
    device = plan.device
    more = writing.nbytes - sum(size for name, size in device.items() if name in OF_TRAINING)
    if plan.budget.gpu is not None and more > 0:
        device = {**device, "answers, beyond training": more}
    bound = "upload" if writing.streamed else "compute"
    return with_phases(replace(plan, device=device), {ANSWERS: (seconds, bound)})


def with_phases(plan: Plan, further: Mapping[str, tuple[float, str]]) -> Plan:
    """The plan of steps that also take these seconds, each bound by something, and those of its
    frozen models."""
    besides = {one.name: (one.seconds, "compute") for one in plan.job.besides}
    added, timing = {**further, **besides}, plan.timing
    seconds = sum(took for took, _ in added.values())
    whole = timing.seconds + seconds
    share = timing.seconds / whole
    faster = []
    for one in plan.faster:  # whose training alone takes less
        speedup = whole / (timing.seconds / one.speedup + seconds)
        rate = speedup * share * timing.tokens_per_s
        faster += [replace(one, speedup=speedup, tokens_per_s=rate)]
    timing = replace(
        timing,
        seconds=whole,
        phases={**{name: took for name, (took, _) in added.items()}, **timing.phases},
        bound_by={**{name: by for name, (_, by) in added.items()}, **timing.bound_by},
        tokens_per_s=timing.tokens_per_s * share,
        tflops=timing.tflops * share,
    )
    faster = [one for one in faster if one.speedup >= WORTH_SAYING]
    return replace(plan, timing=timing, faster=tuple(faster))
