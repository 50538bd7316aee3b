"""Losses over target positions. A loss never sees whole logits: it declares what it needs of the chunked head, and gets just that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

IGNORE = -100  # a label that is no target, as in transformers


@dataclass(frozen=True)
class Targets:
    """Positions of a micro-batch that have a target, in order. `index` counts into the flattened [batch x tokens] hidden states of the
    positions that predict; `labels` are the tokens they should predict; both int64 [n]."""

    index: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return self.labels.numel()

    def chunks(self, size: int) -> list[Targets]:
        return [
            Targets(self.index[i : i + size], self.labels[i : i + size])
            for i in range(0, len(self), size)
        ]

    def to(self, device: torch.device) -> Targets:
        return Targets(
            self.index.to(device, non_blocking=True), self.labels.to(device, non_blocking=True)
        )


def find_targets(labels: torch.Tensor) -> Targets:
    """The targets of labels [batch, tokens], shifted as transformers shifts: position t predicts token t + 1 of its row."""
    following = torch.full_like(labels, IGNORE)
    following[:, :-1] = labels[:, 1:]
    flat = following.reshape(-1)
    index = (flat != IGNORE).nonzero().squeeze(1)
    return Targets(
        index, flat.index_select(0, index)
    )  # not flat[index], which wakes all of torch's threads for a few numbers


class Loss(Protocol):
    """A token-wise loss: one pass over the head, because each target's gradient needs nothing of the others."""

    def denominator(self, batch: Mapping[str, torch.Tensor]) -> float:
        """This micro-batch's share of the step's denominator, from its inputs alone; shares add up over the whole step."""
        ...

    def __call__(
        self, logprobs: torch.Tensor, targets: Targets
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """(sum over targets, sums of further metrics) from the targets' log-probabilities, fp32 [n]."""
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
