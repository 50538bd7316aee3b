"""What the engine's calls return."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class StepResult:
    """What one step saw.

    Attributes:
        loss: sum of losses over sum of targets, over all micro-batches of the step; 0 if there was no target.
        grad_norm: global L2 norm before clipping; None until `step` was called.
        skipped: no update was made: a non-finite loss or gradient, or no target.
        stalls_s: seconds that the computation waited, by cause (wait_upload, wait_update, wait_download,
            wait_nvme).
        metrics: sums over the step's targets of what the loss returns beside its own sum.
    """

    loss: float
    target_tokens: int
    grad_norm: float | None = None
    skipped: bool = False
    stalls_s: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class EvalResult:
    """Mean loss over all targets of an evaluation."""

    loss: float
    target_tokens: int
