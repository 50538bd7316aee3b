"""Seconds and rows of writing answers on a device, from the rates of its memory and products."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from megatrain.machine.profile import MachineProfile, interpolate
from megatrain.memory.sizes import SCORE_BYTES
from megatrain.planner.simulation import Timing

# A step takes this many times its products and the reading of keys, and seconds for each layer's
# small kernels: fitted to 8.5, 13.1 and 23.7 ms at 64, 256 and 512 rows (decision 0114).
TIMES, LAYER_S = 1.1, 140e-6
ANSWERS = "answers"  # the phase of a step


@dataclass(frozen=True, kw_only=True)
class Writing:
    """One rollout: `answers` answers of `length` tokens to prompts of `prompt` tokens.

    Attributes:
        parameters: that act on a token; of these and of all, `weight_bytes` are read a step.
        token_bytes: keys and values of a token, in all layers.
        room: bytes that the device has.
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
    def rows(self) -> int:
        """Answers that are written at a time; 0 where not one has room beside the weights."""
        return max(0, min(self.answers, (self.room - self.weight_bytes) // self.row_bytes))

    def seconds(self, profile: MachineProfile) -> float:
        """Weights are uploaded once, prompts computed once, and every step reads weights and the
        keys of its rows."""
        rows, flops = max(1, self.rows), 2 * self.parameters
        keys = rows * self.token_bytes * (self.prompt + self.length / 2)
        products = flops * rows / interpolate(profile.matmul, rows)
        products = max(products, self.weight_bytes / profile.memory)
        step = TIMES * (products + keys / profile.memory) + LAYER_S * self.layers
        asked = self.prompts * self.prompt
        beginning = flops * asked / interpolate(profile.matmul, asked)
        upload = self.weight_bytes / profile.upload if profile.upload else 0.0
        return upload + beginning + math.ceil(self.answers / rows) * self.length * step


def with_answers(timing: Timing, seconds: float) -> Timing:
    """A step that also writes answers, for so many seconds of it."""
    whole = timing.seconds + seconds
    share = timing.seconds / whole
    return replace(
        timing,
        seconds=whole,
        phases={ANSWERS: seconds, **timing.phases},
        bound_by={ANSWERS: "compute", **timing.bound_by},
        tokens_per_s=timing.tokens_per_s * share,
        tflops=timing.tflops * share,
    )
