"""A loss of answers that are wanted or unwanted, each by itself: KTO, with TRL's names and keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megatrain.losses.sequences import REFERENCE, SequenceLoss
from megatrain.losses.tally import Tally
from megatrain.losses.targets import Examples

WANTED, MISMATCHED = "row_value", "row_mismatched"


@dataclass(frozen=True)
class Kto(SequenceLoss):
    """Kahneman-Tversky optimisation (Ethayarajh et al., 2024), against a reference.

    Micro-batches say of each example whether it is wanted (`row_value`, 1 or 0) and whether its
    answer is another prompt's (`row_mismatched`). Those have no gradient; the mean of their
    log-ratios over a step, where it is positive, is the point that rewards are measured from.

    Args:
        beta: how strongly answers are held to the reference model.
        desirable_weight, undesirable_weight: of the losses of wanted and unwanted answers.
    """

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    of_pairs: ClassVar[bool] = False
    reference: ClassVar[bool] = True
    needs: ClassVar[tuple[str, ...]] = (WANTED, MISMATCHED, REFERENCE)

    @property
    def whole_step(self) -> bool:
        return True

    def trains(self, batch: Mapping[str, Tensor]) -> bool:
        return not bool(batch[MISMATCHED].any())

    def counts(self, batch: Mapping[str, Tensor]) -> dict[str, float]:
        if not self.trains(batch):
            return {}
        wanted = float(batch[WANTED].sum())
        rows = float(len(batch[WANTED]))
        return {"rows": rows, "chosen": wanted, "rejected": rows - wanted}

    def __call__(self, logprobs: Tensor, examples: Examples) -> Tally[Tensor]:
        sums = examples.sums(logprobs)
        ratios = sums - examples.given[REFERENCE].to(sums.dtype)
        mismatched, wanted = examples.given[MISMATCHED], examples.given[WANTED] > 0
        kl = torch.where(mismatched, ratios, 0.0).sum().detach() / mismatched.sum().clamp(min=1)
        kl = kl.clamp(min=0)
        signed = torch.where(wanted, ratios - kl, kl - ratios)
        weight = torch.where(wanted, self.desirable_weight, self.undesirable_weight)
        losses = weight * (1 - torch.sigmoid(self.beta * signed))
        chosen, rejected = wanted & ~mismatched, ~wanted & ~mismatched
        rewards = self.beta * ratios.detach()
        metrics = {"kl": ("rows", kl * (~mismatched).sum())}
        for name, of_side in {"chosen": chosen, "rejected": rejected}.items():
            for kind, values in {"rewards": rewards, "logps": sums}.items():
                metrics[f"{kind}/{name}"] = name, torch.where(of_side, values, 0.0).sum()
        return Tally({"rows": torch.where(mismatched, 0.0, losses).sum()}, metrics)

    def finish(self, means: dict[str, float]) -> dict[str, float]:
        """With the margin of mean rewards, where a step has answers of both kinds."""
        sides = ("rewards/chosen", "rewards/rejected")
        if not means.keys() >= {*sides}:
            return means
        return means | {"rewards/margins": means[sides[0]] - means[sides[1]]}
