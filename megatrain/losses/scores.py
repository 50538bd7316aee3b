"""A loss of the scores that a reward model gives to whole answers, with TRL's names and keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from megatrain.losses.sequences import SequenceLoss, pair_counts
from megatrain.losses.tally import Tally
from megatrain.losses.targets import Examples, Targets, about_examples, rows_of

MARGIN = "row_value"


@dataclass(frozen=True)
class Reward(SequenceLoss):
    """The Bradley-Terry model of preferences (Ouyang et al., 2022): a chosen answer scores higher
    than the rejected one.

    Micro-batches may say by how much (`row_value`, the same for both sides of a pair; NaN: not
    known), which is taken off the difference (Touvron et al., 2023).

    Args:
        center_rewards_coefficient: weight of the squared sum of a pair's scores, which keeps their
            mean near 0 (Eisenstein et al., 2023); None: none.
    """

    center_rewards_coefficient: float | None = None

    of_scores: ClassVar[bool] = True

    def counts(self, batch: Mapping[str, Tensor]) -> dict[str, float]:
        return {"pairs": pair_counts(batch)["pairs"]}

    def __call__(self, scores: Tensor, examples: Examples) -> Tally[Tensor]:
        chosen, rejected = scores[0::2], scores[1::2]
        difference = wanted = chosen - rejected
        if MARGIN in examples.given:
            wanted = difference - examples.given[MARGIN][0::2].to(scores.dtype).nan_to_num(0.0)
        loss = -logsigmoid(wanted)
        if self.center_rewards_coefficient is not None:
            loss = loss + self.center_rewards_coefficient * (chosen + rejected) ** 2
        metrics = {
            "accuracy": (chosen > rejected).float(),
            "margin": difference,
            "mean_reward": (chosen + rejected) / 2,
        }
        found = {name: ("pairs", value.sum()) for name, value in metrics.items()}
        return Tally({"pairs": loss.sum()}, found)


def find_ends(batch: Mapping[str, Tensor], pad_id: int) -> Targets:
    """The last token of each example of a micro-batch on the CPU, which has the example's score: as
    one target each, whose labels mean nothing, with the examples.

    As in transformers, tokens of `pad_id` do not count, even where they end an answer. Nor do those
    that attention_mask [batch, tokens] hides, or documents behind an example's own in its sequence,
    whose position_ids begin anew. Of an example that has no others it is the first.
    """
    ids = batch["input_ids"]
    rows, places, real = rows_of(batch).reshape(-1), torch.arange(ids.numel()), ids != pad_id
    mask = batch.get("attention_mask")
    if mask is not None and mask.shape == ids.shape:
        real = real & (mask != 0)
    counted = real.reshape(-1)
    count = int(rows.max()) + 1
    first = torch.full((count,), ids.numel()).scatter_reduce(0, rows, places, "amin")
    if "row_of" in batch and "position_ids" in batch:
        positions = batch["position_ids"].reshape(-1)
        counted = counted & (positions - positions[first][rows] == places - first[rows])
    last = torch.full((count,), -1)
    last = last.scatter_reduce(0, rows, torch.where(counted, places, -1), "amax")
    one_each = torch.arange(count)
    examples = Examples(
        one_each, one_each[:, None], torch.ones_like(one_each), about_examples(batch)
    )
    return Targets(torch.where(last < 0, first, last), one_each, examples=examples)
