"""The least time that a step can take when every weight streams and every update runs on the host;
docs/performance.md derives it."""

from __future__ import annotations

from dataclasses import dataclass

WEIGHT_BYTES = 2
UPDATE_BYTES = 26  # DRAM traffic of one parameter's AdamW update
FORWARD_FLOPS, BACKWARD_FLOPS = 2, 4  # per parameter and token


@dataclass(frozen=True)
class Limits:
    """What a machine sustains."""

    flops: float  # FLOP/s of a whole model's forward and backward, everything on the GPU
    pcie: float  # bytes/s in each direction
    dram: float  # bytes/s of the host's update


H200 = Limits(flops=650e12, pcie=53e9, dram=150e9)  # PCIe 5 x16; a host of 16 cores


def step_s(parameters: int, tokens: int, limits: Limits, recomputed: float = 0.0) -> float:
    """Seconds of a step of one group. `recomputed`: share of the layers whose forward pass backward
    repeats."""
    weights = WEIGHT_BYTES * parameters / limits.pcie
    update = UPDATE_BYTES * parameters / limits.dram
    forward = max(FORWARD_FLOPS * parameters * tokens / limits.flops, weights, update)
    backward = max(
        (BACKWARD_FLOPS + FORWARD_FLOPS * recomputed) * parameters * tokens / limits.flops, weights
    )
    return forward + backward


def tflops(parameters: int, tokens: int, limits: Limits, recomputed: float = 0.0) -> float:
    """6 x parameters x tokens / step_s, in TFLOP/s. It does not depend on the number of
    parameters."""
    return 6 * parameters * tokens / step_s(parameters, tokens, limits, recomputed) / 1e12
