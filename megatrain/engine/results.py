"""Results of the engine's calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatrain.losses import Tally
from megatrain.losses.targets import Answers


@dataclass(frozen=True)
class StepResult:
    """The result of one step.

    Attributes:
        loss: sum of losses over number of targets, of all micro-batches; 0 if there was no target.
        grad_norm: global L2 norm before clipping; None until `step` was called.
        skipped: no update was made, for a non-finite loss or gradient, or for lack of targets.
        stalls_s: seconds that the computation waited, by cause (wait_upload, wait_update,
            wait_download, wait_nvme, and of several ranks wait_exchange, of hosts wait_network).
        metrics: the loss's further metrics, means over the step.
        aux_loss, expert_load_max: as `engine.routing.Balance` has them; None where routers are not
            balanced.
    """

    loss: float
    target_tokens: int
    grad_norm: float | None = None
    skipped: bool = False
    stalls_s: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    aux_loss: float | None = None
    expert_load_max: float | None = None


@dataclass(frozen=True)
class EvalResult:
    """An evaluation.

    Attributes:
        loss: mean over all targets, or over whatever the loss is averaged over.
        metrics: the loss's further metrics, as means.
        sums, counts: what these are means of.
        answers: of a loss over a whole step, what it was computed from, on the CPU.
    """

    loss: float
    target_tokens: int
    metrics: dict[str, float] = field(default_factory=dict)
    sums: Tally[float] = field(default_factory=Tally)
    counts: Mapping[str, float] = field(default_factory=dict)
    answers: Answers | None = None
