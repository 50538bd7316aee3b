"""Losses over target positions, computed from log-probabilities: logits never exist whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

IGNORE = -100  # a label that is no target, as in transformers


@dataclass(frozen=True)
class Targets:
    """Positions of a micro-batch that have a target, in order; both fields int64 [n].

    Attributes:
        index: of the positions that predict, in the flattened [batch x tokens] hidden states.
        labels: the tokens that they should predict.
    """

    index: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return self.labels.numel()

    def chunks(self, size: int) -> list[Targets]:
        pairs = zip(torch.split(self.index, size), torch.split(self.labels, size), strict=True)
        return [Targets(index, labels) for index, labels in pairs if len(labels)]

    def to(self, device: torch.device) -> Targets:
        index = self.index.to(device, non_blocking=True)
        return Targets(index, self.labels.to(device, non_blocking=True))


def find_targets(labels: torch.Tensor) -> Targets:
    """The targets of labels [batch, tokens]: position t predicts token t + 1 of its sequence."""
    following = torch.full_like(labels, IGNORE)
    following[:, :-1] = labels[:, 1:]
    flat = following.reshape(-1)
    index = (flat != IGNORE).nonzero().squeeze(1)
    # not flat[index], which wakes all of torch's threads for a few numbers
    return Targets(index, flat.index_select(0, index))


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


next_token = NextToken()
