"""Losses of which each target has its own part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from megatrain.losses.targets import IGNORE, Targets


class Loss(Protocol):
    """A token-wise loss: no target's gradient depends on the others, so one pass suffices."""

    def denominator(self, batch: Mapping[str, torch.Tensor]) -> float:
        """The micro-batch's share of the step's denominator, which is the sum of all shares."""
        ...

    def __call__(
        self, logprobs: torch.Tensor, targets: Targets
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """(sum over targets, sums of further metrics) from the targets' log-probabilities [n]."""
        ...


class NextToken:
    """Cross-entropy of the next token, averaged over all targets of the step."""

    def denominator(self, batch: Mapping[str, torch.Tensor]) -> float:
        return float((batch["labels"][:, 1:] != IGNORE).sum())

    def __call__(
        self, logprobs: torch.Tensor, targets: Targets
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return -logprobs.sum(), {}


class Weighted:
    """The sum of each log-probability times its weight: the second pass of a loss over sequences,
    whose gradient it has. It is divided by nothing more."""

    def denominator(self, batch: Mapping[str, torch.Tensor]) -> float:
        return 1.0

    def __call__(
        self, logprobs: torch.Tensor, targets: Targets
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        assert targets.weights is not None
        return (logprobs * targets.weights).sum(), {}


next_token, weighted = NextToken(), Weighted()
