"""Losses of reinforcement learning from answers that the model wrote: names, keys and defaults are
TRL's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megatrain.errors import ConfigError, DataError
from megatrain.losses.sequences import ENTROPY, SequenceLoss, Tally
from megatrain.losses.targets import IGNORE, Examples, rows_of

ADVANTAGE = "row_advantage"
# log-probabilities of an answer's tokens: of the sampler, under the weights at the beginning of the
# rollout, and under the reference
SAMPLED, OLD, REFERENCE_TOKENS = "token_sampled", "token_old", "token_reference"
CHOICES = {
    "loss_type": ("dapo", "bnpo", "grpo", "dr_grpo", "cispo"),
    "importance_sampling_level": ("token", "sequence", "answer"),
    "importance_sampling_mode": (
        "sequence_mask", "sequence_truncate", "token_mask", "token_truncate",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Policy(SequenceLoss):
    """Group relative policy optimisation (Shao et al., 2024), and its kin.

    Micro-batches have an advantage for each example (`row_advantage`), the log-probability that the
    sampler gave each token (`token_sampled`), and with several steps for one rollout that under the
    weights at its beginning (`token_old`); without, the loss takes its own.

    Everything is averaged over the whole step. Rows without advantage may be left out of one:
    `step_tokens` and `step_rows`, tensors of one number, say in any micro-batch how many more there
    are, which count as if they were there. Entropy and the sampler's metrics are of those present.

    Args:
        loss_type: dapo (Yu et al., 2025) and bnpo: a mean over all tokens, the same over a whole
            step; grpo: over each answer, then over answers; dr_grpo (Liu et al., 2025): a sum over
            `max_completion_length` tokens; cispo (MiniMax, 2025): a mean over tokens, with clipped
            ratios as mere weights.
        beta: how strongly tokens are held to the reference (`token_reference`); 0: there is none.
        epsilon, epsilon_high: how far ratios may fall and rise; without the latter, alike. cispo:
            the largest ratio.
        delta: the largest ratio even where the advantage is negative (INTELLECT-2, 2025).
        importance_sampling_level: token; sequence: the mean over an answer (Zheng et al., 2025);
            answer: the sum over it, as the ratio of whole answers is.
        use_bias_correction_kl: weigh the reference's term by the ratios (DeepSeek-V3.2, 2025).
        off_policy_mask_threshold: leave out answers of negative advantage whose tokens became this
            much less likely in the mean (the same).
        importance_sampling_correction: weigh by how much likelier than for the sampler tokens are.
        importance_sampling_mode: of the weights of tokens, or of whole answers, those above
            `importance_sampling_clip_max` become 0 (mask) or as large as that (truncate).
        temperature: of the sampler, which logits are divided by.
    """

    loss_type: str = "dapo"
    beta: float = 0.0
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    importance_sampling_level: str = "token"
    use_bias_correction_kl: bool = True
    off_policy_mask_threshold: float | None = None
    importance_sampling_correction: bool = True
    importance_sampling_mode: str = "sequence_mask"
    importance_sampling_clip_max: float = 3.0
    max_completion_length: int = 512
    temperature: float = 1.0

    of_pairs: ClassVar[bool] = False
    in_rewards: ClassVar[bool] = False  # the divergence is, and not in the loss
    needs: ClassVar[tuple[str, ...]] = (ADVANTAGE,)
    entropies: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for key, known in CHOICES.items():
            if (value := getattr(self, key)) not in known:
                raise ConfigError(f"{key}: {value!r} is unknown; use one of {', '.join(known)}")
        if self.temperature <= 0:
            raise ConfigError(f"temperature: must be above 0, not {self.temperature}")

    @property
    def in_loss(self) -> bool:
        """The loss has a term of the divergence from the reference."""
        return self.beta > 0 and not self.in_rewards

    def counts(self, batch: Mapping[str, Tensor]) -> dict[str, float]:
        """Count tokens and rows, with those left out; and of those present tokens, those that the
        sampler's log-probability is known of, and answers that have any."""
        wanted = {SAMPLED: self.importance_sampling_correction, REFERENCE_TOKENS: self.in_loss}
        if missing := [name for name, asked in wanted.items() if asked and name not in batch]:
            raise DataError(
                f"a micro-batch has no {missing[0]}, which Policy needs with these keys"
            )
        more = {n: float(batch.get(f"step_{n}", torch.zeros(1)).sum()) for n in ("tokens", "rows")}
        if self.in_loss and any(more.values()):
            raise DataError("a step leaves out rows, which with beta above 0 have a loss, too")
        targets = batch["labels"][:, 1:] != IGNORE
        tokens = float(targets.sum())
        counts = {"present_tokens": tokens, "tokens": tokens + more["tokens"]}
        counts["rows"] = int(rows_of(batch).max()) + 1 + more["rows"]
        of_targets = rows_of(batch)[:, 1:][targets]
        counts["present_answers"] = float(of_targets.bincount().count_nonzero())
        if SAMPLED in batch:
            counts["sampled_tokens"] = float((targets & ~batch[SAMPLED][:, 1:].isnan()).sum())
        return counts

    def __call__(self, logprobs: Tensor, examples: Examples) -> Tally[Tensor]:
        given, own = examples.of_tokens, logprobs.detach()
        old = given.get(OLD, own)
        ratio = logprobs - old
        if self.importance_sampling_level != "token":
            whole = self.importance_sampling_level == "answer"
            of_answers = examples.sums(ratio) if whole else examples.means(ratio)
            ratio = of_answers[examples.of_target]
        ratio = ratio.exp()
        losses, metrics = self._surrogate(logprobs, ratio, examples)
        if self.off_policy_mask_threshold is not None:
            fall = examples.means((given.get(SAMPLED, old) - own).nan_to_num(nan=0.0))
            kept = (examples.given[ADVANTAGE] >= 0) | (fall <= self.off_policy_mask_threshold)
            losses = losses * kept[examples.of_target]
        if SAMPLED in given and len(own):
            weights, about = self._correction(old - given[SAMPLED], examples)
            losses, metrics = losses * weights, metrics | about
        if self.in_loss:
            further = given[REFERENCE_TOKENS] - logprobs
            kl = further.exp() - further - 1
            if self.use_bias_correction_kl:
                kl = kl * ratio
            losses = losses + self.beta * kl
            metrics["kl"] = "tokens", kl.sum()
        if ENTROPY in given:
            metrics["entropy"] = "present_tokens", given[ENTROPY].sum()
        if self.loss_type == "grpo":
            return Tally({"rows": examples.means(losses).sum()}, metrics)
        if self.loss_type == "dr_grpo":
            return Tally({"rows": losses.sum() / self.max_completion_length}, metrics)
        return Tally({"tokens": losses.sum()}, metrics)

    def advantages(self, logprobs: Tensor, examples: Examples) -> Tensor:
        """The advantage of each token [n], without gradients."""
        return examples.given[ADVANTAGE][examples.of_target]

    def _surrogate(
        self, logprobs: Tensor, ratio: Tensor, examples: Examples
    ) -> tuple[Tensor, dict[str, tuple[str, Tensor]]]:
        """The loss of each token [n] by its advantage, and the shares that were clipped."""
        advantage = self.advantages(logprobs, examples)
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        if self.loss_type == "cispo":
            losses = -ratio.clamp(max=high).detach() * advantage * logprobs
            clipped = {"cispo_clip_ratio": (ratio > high) & (advantage > 0)}
        else:
            bounded = ratio.clamp(1 - self.epsilon, 1 + high)
            ratio = ratio if self.delta is None else ratio.clamp(max=self.delta)
            losses = -torch.min(ratio * advantage, bounded * advantage)
            low = (ratio < 1 - self.epsilon) & (advantage < 0)
            above = (ratio > 1 + high) & (advantage > 0)
            clipped = {"low_mean": low, "high_mean": above, "region_mean": low | above}
            clipped = {f"clip_ratio/{name}": where for name, where in clipped.items()}
        if self.importance_sampling_level != "token":  # then all tokens of an answer are alike
            shares = {name: examples.means(where.float()) for name, where in clipped.items()}
            return losses, {name: ("rows", share.sum()) for name, share in shares.items()}
        return losses, {name: ("tokens", where.float().sum()) for name, where in clipped.items()}

    def _correction(
        self, gap: Tensor, examples: Examples
    ) -> tuple[Tensor | float, dict[str, tuple[str, Tensor]]]:
        """The weight of each token [n] for being another distribution's, and metrics. gap [n]: its
        log-probability less the sampler's, NaN where that is not known."""
        apart, gap = gap.abs().nan_to_num(nan=0.0), gap.nan_to_num(nan=0.0)
        name = "sampling/sampling_logp_difference"
        found = {
            f"{name}/mean": ("sampled_tokens", apart.sum()),
            f"{name}/max": ("max", apart.max()),
        }
        if not self.importance_sampling_correction:
            return 1.0, found
        whole, most = "sequence" in self.importance_sampling_mode, self.importance_sampling_clip_max
        weights = (examples.sums(gap)[examples.of_target] if whole else gap).exp()
        if "truncate" in self.importance_sampling_mode:
            weights = weights.clamp(max=most)
        else:
            weights = weights.masked_fill(weights > most, 0.0)
        mean = examples.means(weights).sum() if whole else weights.sum()
        name = "sampling/importance_sampling_ratio"
        found[f"{name}/mean"] = "present_answers" if whole else "present_tokens", mean
        found |= {f"{name}/min": ("min", weights.min()), f"{name}/max": ("max", weights.max())}
        return weights, found


@dataclass(frozen=True)
class Rloo(Policy):
    """REINFORCE with the other answers as the baseline (Ahmadian et al., 2024): clipped ratios of
    whole answers, and a mean over these."""

    loss_type: str = "grpo"
    importance_sampling_level: str = "answer"
    importance_sampling_correction: bool = False

    in_rewards: ClassVar[bool] = True
