"""Targets from labels: the positions that predict, their targets and their examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

IGNORE = -100  # a label that is no target, as in transformers
# Tensors of a micro-batch with these beginnings are for its loss: the model never sees them.
FOR_LOSS = ("row_", "token_", "step_")


@dataclass(frozen=True)
class Examples:
    """The examples of a micro-batch: each an answer to be judged whole, after its prompt.

    Attributes:
        of_target: int64 [n]: the example of each target.
        places: int64 [examples, longest]: where the targets of each answer are among all; n where
            an answer has no more. Sums over them are the same in every run.
        sizes: int64 [examples]: tokens of each answer.
        given: by name, what the micro-batch says of its examples: tensors [examples].
        of_tokens: by name, its numbers for each token, those of targets: floating [n].
    """

    of_target: Tensor
    places: Tensor
    sizes: Tensor
    given: Mapping[str, Tensor]
    of_tokens: Mapping[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.sizes)

    def sums(self, of_targets: Tensor) -> Tensor:
        """Sum over each answer of one value per target, [n] -> [examples]."""
        zero = of_targets.new_zeros(1)
        return torch.cat([of_targets, zero])[self.places].sum(dim=1)

    def means(self, of_targets: Tensor) -> Tensor:
        """The same for the mean; 0 of an answer without tokens."""
        return self.sums(of_targets) / self.sizes.clamp(min=1)

    def to(self, device: torch.device) -> Examples:
        return Examples(
            self.of_target.to(device, non_blocking=True),
            self.places.to(device, non_blocking=True),
            self.sizes.to(device, non_blocking=True),
            {name: value.to(device, non_blocking=True) for name, value in self.given.items()},
            {name: value.to(device, non_blocking=True) for name, value in self.of_tokens.items()},
        )


@dataclass(frozen=True)
class Answers:
    """The examples of micro-batches, each with one number: sums, fp32 [examples], over its answer.
    sizes, given: as in `Examples`."""

    sums: Tensor
    sizes: Tensor
    given: Mapping[str, Tensor]

    @classmethod
    def of(cls, of_targets: Tensor, examples: Examples) -> Answers:
        """of_targets: one value per target, [n]."""
        return cls(examples.sums(of_targets), examples.sizes, examples.given)

    @classmethod
    def joined(cls, parts: Sequence[Answers]) -> Answers:
        """Those of several micro-batches, one after the other."""
        given = {name: torch.cat([one.given[name] for one in parts]) for name in parts[0].given}
        sums, sizes = ([getattr(one, name) for one in parts] for name in ("sums", "sizes"))
        return cls(torch.cat(sums), torch.cat(sizes), given)

    @property
    def examples(self) -> Examples:
        """As if each answer were one target."""
        numbers = torch.arange(len(self.sums), device=self.sums.device)
        return Examples(numbers, numbers[:, None], self.sizes, self.given)

    def to(self, device: torch.device) -> Answers:
        """Without graphs."""
        given = {name: value.to(device) for name, value in self.given.items()}
        return Answers(self.sums.detach().to(device), self.sizes.to(device), given)


@dataclass(frozen=True)
class Targets:
    """Positions of a micro-batch that have a target, in order.

    Attributes:
        index: int64 [n]: of the positions that predict, in the flattened [batch x tokens] hidden
            states.
        labels: int64 [n]: the tokens that they should predict.
        weights: fp32 [n]: the gradient of a loss over sequences at each log-probability, once it
            is known.
        examples: for a loss over sequences; None otherwise, and in a chunk.
        teacher: [n, its hidden size], on the CPU: a teacher's last hidden states at these
            positions, for a loss that has one.
    """

    index: Tensor
    labels: Tensor
    weights: Tensor | None = None
    examples: Examples | None = field(default=None, compare=False)
    teacher: Tensor | None = field(default=None, compare=False)

    def __len__(self) -> int:
        return self.labels.numel()

    def chunks(self, size: int) -> list[Targets]:
        """Consecutive targets, `size` at a time."""
        index, labels = torch.split(self.index, size), torch.split(self.labels, size)
        nothing: Any = [None] * len(index)
        weights = nothing if self.weights is None else torch.split(self.weights, size)
        teacher = nothing if self.teacher is None else torch.split(self.teacher, size)
        parts = zip(index, labels, weights, nothing, teacher, strict=True)
        return [Targets(*part) for part in parts if len(part[1])]

    def of_piece(self, tokens: int, cp_rank: int, cp_size: int) -> Targets:
        """Those whose predicting positions are in one of equal pieces of each sequence of `tokens`;
        index: in the flattened [batch x piece] hidden states."""
        row, place = self.index // tokens, self.index % tokens
        length = tokens // cp_size
        here = place // length == cp_rank
        index = (row * length + place % length)[here]
        return Targets(index, self.labels[here])

    def to(self, device: torch.device) -> Targets:
        index = self.index.to(device, non_blocking=True)
        labels = self.labels.to(device, non_blocking=True)
        examples = self.examples and self.examples.to(device)
        return Targets(index, labels, examples=examples, teacher=self.teacher)


def find_targets(labels: Tensor) -> Targets:
    """The targets of labels [batch, tokens]: position t predicts token t + 1 of its sequence."""
    flat = following(labels, IGNORE)
    index = (flat != IGNORE).nonzero().squeeze(1)
    # not flat[index], which wakes all of torch's threads for a few numbers
    return Targets(index, flat.index_select(0, index))


def following(of_tokens: Tensor, last: int) -> Tensor:
    """For each position of [batch, tokens], flattened, what the next token has; `last` at ends."""
    shifted = torch.full_like(of_tokens, last)
    shifted[:, :-1] = of_tokens[:, 1:]
    return shifted.reshape(-1)


def rows_of(batch: Mapping[str, Tensor]) -> Tensor:
    """The example of each token, int64 [batch, tokens]: `row_of`, by default its sequence."""
    labels = batch["labels"]
    return batch.get("row_of", torch.arange(len(labels))[:, None].expand_as(labels))


def about_examples(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The labels of a micro-batch's examples: tensors [examples]."""
    return {n: v for n, v in batch.items() if n.startswith("row_") and n != "row_of"}


def find_examples(batch: Mapping[str, Tensor], targets: Targets) -> Examples:
    """The examples of a micro-batch on the CPU, whose targets these are. batch: `row_of` as in
    `rows_of`; `token_answer` bool [batch, tokens] are the tokens of answers, by default all that
    are targets; further `row_...` are tensors [examples], and floating `token_...` [batch, tokens]
    have a token's number at its own place, as labels do."""
    rows, given = rows_of(batch), about_examples(batch)
    of_target = following(rows, -1).index_select(0, targets.index)
    counts = [len(value) for value in given.values()]
    count = counts[0] if counts else int(rows.max()) + 1
    answers = torch.arange(len(targets))
    if "token_answer" in batch:
        of_answers = following(batch["token_answer"], 0).index_select(0, targets.index)
        answers = of_answers.nonzero().squeeze(1)
    of_answer = of_target.index_select(0, answers)
    sizes = torch.bincount(of_answer, minlength=count)
    places = torch.full((count, int(sizes.max()) if count else 0), len(targets))
    order = torch.argsort(of_answer, stable=True)
    within = torch.arange(len(answers)) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    places[of_answer[order], within] = answers[order]
    of_tokens = {
        name: following(values, 0).index_select(0, targets.index)
        for name, values in batch.items()
        if name.startswith("token_") and values.is_floating_point()
    }
    return Examples(of_target, places, sizes, given, of_tokens)


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
