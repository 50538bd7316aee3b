"""Losses of pairs of answers and of single, judged answers: names, keys and defaults are TRL's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from megatrain.errors import ConfigError
from megatrain.losses.sequences import (
    REFERENCE,
    SequenceLoss,
    Sides,
    Tally,
    of_chosen,
    pair_metrics,
    sides_of,
)
from megatrain.losses.targets import Examples, Targets, about_examples, rows_of

# -- DPO -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dpo(SequenceLoss):
    """Direct preference optimisation (Rafailov et al., 2023), and its kin, against a reference.

    Args:
        beta: how strongly answers are held to the reference model.
        loss_type: a name of LOSS_TYPES, or several, which are added.
        loss_weights: one for each of several; 1 by default.
        label_smoothing: probability that a preference is wrong, for robust, exo_pair and aot.
        discopop_tau: temperature of discopop's mixture.
    """

    beta: float = 0.1
    loss_type: str | Sequence[str] = "sigmoid"
    loss_weights: Sequence[float] | None = None
    label_smoothing: float = 0.0
    discopop_tau: float = 0.05

    reference: ClassVar[bool] = True
    needs: ClassVar[tuple[str, ...]] = (REFERENCE,)

    def __post_init__(self) -> None:
        if unknown := [name for name in self.loss_types if name not in LOSS_TYPES]:
            known = ", ".join(LOSS_TYPES)
            raise ConfigError(f"loss_type: {unknown[0]!r} is unknown; use one of {known}")
        if self.loss_weights is not None and len(self.loss_weights) != len(self.loss_types):
            raise ConfigError(
                f"loss_weights: {len(self.loss_weights)} weights for {len(self.loss_types)} loss "
                "types; give one for each"
            )
        check_smoothing(self.label_smoothing)
        if "exo_pair" in self.loss_types and not self.label_smoothing:
            raise ConfigError(
                "label_smoothing: loss_type exo_pair takes its logarithm; set it above 0, to 1e-3, "
                "say"
            )

    @property
    def loss_types(self) -> tuple[str, ...]:
        named = isinstance(self.loss_type, str)
        return (self.loss_type,) if named else tuple(self.loss_type)  # type: ignore[return-value]

    @property
    def whole_step(self) -> bool:
        return any(name in OF_A_STEP for name in self.loss_types)

    def __call__(self, logprobs: Tensor, examples: Examples) -> Tally[Tensor]:
        sides = sides_of(logprobs, examples)
        found = Tally(metrics=pair_metrics(sides, sides.over_reference, self.beta))
        weights = self.loss_weights or [1.0] * len(self.loss_types)
        for name, weight in zip(self.loss_types, weights, strict=True):
            if name == SFT:
                unit, value = "chosen_targets", -of_chosen(logprobs, examples)
            else:
                unit, value = "pairs", LOSS_TYPES[name](self, sides).sum()
            found.loss[unit] = found.loss.get(unit, torch.zeros_like(value)) + weight * value
        return found


def _robust(of: Dpo, sides: Sides) -> Tensor:
    """Chowdhury et al., 2024: unbiased where preferences are flipped at a known rate."""
    logits, flipped = of.beta * _delta(sides.over_reference), of.label_smoothing
    return (flipped * logsigmoid(-logits) - (1 - flipped) * logsigmoid(logits)) / (1 - 2 * flipped)


def _exo_pair(of: Dpo, sides: Sides) -> Tensor:
    """Ji et al., 2024: the reverse KL divergence to smoothed preferences."""
    logits = of.beta * _delta(sides.over_reference)
    smooth = torch.tensor(of.label_smoothing, device=logits.device)
    win = torch.sigmoid(logits) * (logsigmoid(logits) - torch.log1p(-smooth))
    return win + torch.sigmoid(-logits) * (logsigmoid(-logits) - torch.log(smooth))


def _discopop(of: Dpo, sides: Sides) -> Tensor:
    """Lu et al., 2024: a mixture of a logistic and an exponential loss, found by search."""
    logits = of.beta * _delta(sides.over_reference)
    exponential = torch.sigmoid(logits / of.discopop_tau)
    return -logsigmoid(logits) * (1 - exponential) + torch.exp(-logits) * exponential


def _delta(sides: Sides) -> Tensor:
    return sides.chosen - sides.rejected


def _chosen(of: Dpo, sides: Sides) -> Tensor:
    return of.beta * sides.over_reference.chosen


def _rejected(of: Dpo, sides: Sides) -> Tensor:
    return of.beta * sides.over_reference.rejected


def _smoothed(of: Dpo | Cpo, delta: Tensor) -> Tensor:
    """A sigmoid loss whose preferences are wrong with probability `label_smoothing`."""
    right, wrong = logsigmoid(of.beta * delta), logsigmoid(-of.beta * delta)
    return -right * (1 - of.label_smoothing) - wrong * of.label_smoothing


SFT = "sft"  # of chosen answers' tokens, not of pairs
LOSS_TYPES: dict[str, Callable[[Dpo, Sides], Tensor]] = {
    "sigmoid": lambda of, sides: -logsigmoid(of.beta * _delta(sides.over_reference)),
    "hinge": lambda of, sides: relu(1 - of.beta * _delta(sides.over_reference)),
    # Azar et al., 2023, over means of tokens, as its authors confirmed to TRL
    "ipo": lambda of, sides: (_delta(sides.over_reference.means) - 1 / (2 * of.beta)) ** 2,
    "exo_pair": _exo_pair,
    # Chen et al., 2024: each answer against noise
    "nca_pair": lambda of, sides: (
        -logsigmoid(_chosen(of, sides))
        - 0.5 * logsigmoid(-_chosen(of, sides))
        - 0.5 * logsigmoid(-_rejected(of, sides))
    ),
    "robust": _robust,
    # Jung et al., 2024: two binary classifications
    "bco_pair": lambda of, sides: (
        -logsigmoid(_chosen(of, sides)) - logsigmoid(-_rejected(of, sides))
    ),
    # Wu et al., 2024, with the winner's probability at 1
    "sppo_hard": lambda of, sides: (
        (sides.over_reference.chosen - 0.5 / of.beta) ** 2
        + (sides.over_reference.rejected + 0.5 / of.beta) ** 2
    ),
    # Melnyk et al., 2024: by order over the whole step, of ratios of chosen to rejected, or of each
    # side's ratios to the reference
    "aot": lambda of, sides: _smoothed(
        of, _delta(sides).sort()[0] - _delta(sides.reference).sort()[0]
    ),
    "aot_unpaired": lambda of, sides: _smoothed(
        of, sides.over_reference.chosen.sort()[0] - sides.over_reference.rejected.sort()[0]
    ),
    # D'Oosterlinck et al., 2024: where chosen answers are better than the model's own, or worse
    "apo_zero": lambda of, sides: (
        1 - torch.sigmoid(_chosen(of, sides)) + torch.sigmoid(_rejected(of, sides))
    ),
    "apo_down": lambda of, sides: (
        torch.sigmoid(_chosen(of, sides))
        + 1
        - torch.sigmoid(_chosen(of, sides) - _rejected(of, sides))
    ),
    "discopop": _discopop,
    SFT: lambda of, sides: torch.zeros_like(sides.chosen),
    # over means of tokens
    "sigmoid_norm": lambda of, sides: -logsigmoid(of.beta * _delta(sides.over_reference.means)),
}
OF_A_STEP = ("aot", "aot_unpaired")


def check_smoothing(value: float) -> None:
    """Raises ConfigError unless a label smoothing is below a half."""
    if not 0 <= value < 0.5:
        raise ConfigError(f"label_smoothing: must be from 0 to below 0.5, not {value}")


# -- without a reference ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Cpo(SequenceLoss):
    """Contrastive preference optimisation (Xu et al., 2024), and SimPO (Meng et al., 2024), which
    is loss_type simpo with cpo_alpha 0.

    Args:
        cpo_alpha: weight of the chosen answers' mean negative log-likelihood.
        simpo_gamma: simpo: the margin that is wanted between rewards.
    """

    beta: float = 0.1
    cpo_alpha: float = 1.0
    loss_type: str = "sigmoid"
    label_smoothing: float = 0.0
    simpo_gamma: float = 0.5

    def __post_init__(self) -> None:
        if self.loss_type not in CPO_TYPES:
            known = ", ".join(CPO_TYPES)
            raise ConfigError(f"loss_type: {self.loss_type!r} is unknown; use one of {known}")
        check_smoothing(self.label_smoothing)

    def __call__(self, logprobs: Tensor, examples: Examples) -> Tally[Tensor]:
        sides = sides_of(logprobs, examples)
        if self.loss_type in ("ipo", "simpo"):
            sides = sides.means
        metrics = pair_metrics(sides, sides, self.beta)
        found = Tally({"pairs": CPO_TYPES[self.loss_type](self, _delta(sides)).sum()}, metrics)
        if self.cpo_alpha:
            negative = -of_chosen(logprobs, examples)
            found.loss["chosen_targets"] = self.cpo_alpha * negative
            metrics["nll_loss"] = "chosen_targets", negative
        else:
            metrics["nll_loss"] = "pairs", torch.zeros_like(logprobs[:1].sum())
        return found


CPO_TYPES: dict[str, Callable[[Cpo, Tensor], Tensor]] = {
    "sigmoid": _smoothed,
    "hinge": lambda of, delta: relu(1 - of.beta * delta),
    "ipo": lambda of, delta: (delta - 1 / (2 * of.beta)) ** 2,
    "simpo": lambda of, delta: _smoothed(of, delta - of.simpo_gamma / of.beta),
}


@dataclass(frozen=True)
class Orpo(SequenceLoss):
    """Odds ratio preference optimisation (Hong et al., 2024): the chosen examples' negative
    log-likelihood, prompts included, and `beta` times the log-sigmoid of the log odds ratio."""

    beta: float = 0.1

    prompts: ClassVar[bool] = True

    def __call__(self, logprobs: Tensor, examples: Examples) -> Tally[Tensor]:
        sides = sides_of(logprobs, examples).means
        log_odds = _delta(sides) - (log1mexp(sides.chosen) - log1mexp(sides.rejected))
        ratio, negative = logsigmoid(log_odds), -of_chosen(logprobs, examples)
        metrics = pair_metrics(sides, sides, self.beta)
        metrics["nll_loss"] = "chosen_targets", negative
        metrics["log_odds_ratio"] = "pairs", ratio.sum()
        metrics["log_odds_chosen"] = "pairs", log_odds.sum()
        return Tally({"chosen_targets": negative, "pairs": -self.beta * ratio.sum()}, metrics)


def log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0, accurate at both ends (Maechler, 2012)."""
    near = x > -0.6931472  # log 2
    safe = torch.where(near, x, -0.1), torch.where(near, -1.0, x)
    return torch.where(near, torch.log(-torch.expm1(safe[0])), torch.log1p(-torch.exp(safe[1])))


# -- single answers, wanted or unwanted ------------------------------------------------------------

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
        return {"pairs": super().counts(batch)["pairs"]}

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
