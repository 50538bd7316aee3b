"""The objective of a step: a loss and its denominators, over the micro-batches of all processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from megatrain.engine.head import (
    Head,
    Values,
    first_scores,
    of_labels,
    token_entropies,
    token_logprobs,
)
from megatrain.engine.ranks.context_parallel import ContextParallel
from megatrain.errors import ConfigError, DataError
from megatrain.losses import IGNORE, Distillation, Examples, Loss, SequenceLoss, Tally, Targets
from megatrain.losses.sequences import ENTROPY, TARGETS
from megatrain.losses.targets import Answers, rows_of, weighted
from megatrain.world import ALONE, World

AnyLoss = Loss | SequenceLoss
T = TypeVar("T")


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
        aux_loss: of routers that are balanced: E * sum of f_e * P_e (engine/routing.py), without
            the coefficient. If all experts are chosen alike it is the number chosen for a token.
        expert_load_max: choices of the layer's most chosen expert over their mean, in the layer
            where that is largest: 1 if all are chosen alike.
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


@dataclass(frozen=True)
class Objective:
    """The loss of a step or an evaluation.

    Attributes:
        counts: of each unit of the loss, over all micro-batches.
        target_tokens: that are trained on; of a loss of scores those that have one.
    """

    loss: AnyLoss
    counts: Mapping[str, float]
    target_tokens: int

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to learn from."""
        return not any(self.counts.values())

    @property
    def of_sequences(self) -> SequenceLoss | None:
        """The loss, if it needs the log-probabilities of whole answers first."""
        return self.loss if isinstance(self.loss, SequenceLoss) else None

    @property
    def whole_step(self) -> bool:
        """True if the loss needs all micro-batches at once: a step is one group then."""
        return self.of_sequences is not None and self.of_sequences.whole_step

    @property
    def values(self) -> Values:
        """The function of the head's output and the targets from which the loss is computed."""
        if of_scores(self.loss):
            return of_labels(first_scores)
        if isinstance(self.loss, Distillation):
            return self.loss.values
        loss = self.of_sequences
        options = {"temperature": loss.temperature} if loss else {}
        return of_labels(token_logprobs, **options)

    @property
    def of_tokens(self) -> tuple[Loss, float]:
        """The loss of the pass that has gradients, and what it is multiplied by."""
        if isinstance(self.loss, SequenceLoss):
            return weighted, 1.0
        return self.loss, 1.0 / self.counts[TARGETS]

    def first_pass(self, head: Head, hidden: Tensor, targets: Targets) -> tuple[Tensor, Targets]:
        """The `values` of a micro-batch's targets, fp32 [n], without gradients; and its targets,
        with entropies if the loss asks for them."""
        loss, examples = self.of_sequences, targets.examples
        if loss is None or examples is None or not loss.entropies:
            return head.target_values(hidden, targets, self.values)[0], targets
        entropies = of_labels(token_entropies, temperature=loss.temperature)
        values, found = head.target_values(hidden, targets, self.values, entropies)
        examples = replace(examples, of_tokens={**examples.of_tokens, ENTROPY: found})
        return values, replace(targets, examples=examples)

    def judge(self, values: Tensor, examples: Examples | None) -> Tally[Tensor]:
        """The sums of a loss over sequences, from `values` [n] of the targets of these examples."""
        assert self.of_sequences is not None and examples is not None
        return self.of_sequences(values, examples)

    def derivatives(self, found: Tally[Tensor], leaves: Sequence[Tensor]) -> Sequence[Tensor]:
        """The derivative of the step's loss at each of the values that it was computed from."""
        shares = [s / self.counts[unit] for unit, s in found.loss.items() if self.counts[unit]]
        if not shares:  # a rank without micro-batches, or a step without targets
            return [torch.zeros_like(leaf) for leaf in leaves]
        return torch.autograd.grad(torch.stack(shares).sum(), leaves) if leaves else ()

    def mean_loss(self, found: Tally[Tensor] | Tally[float]) -> float:
        """The loss over all micro-batches. Waits for the device."""
        return found.mean_loss(self.counts)

    def metrics(self, found: Tally[Tensor] | Tally[float]) -> dict[str, float]:
        """Its further metrics, as means."""
        means = found.means(self.counts)
        return self.of_sequences.finish(means) if self.of_sequences else means

    def result(self, sums: Tally[float], answers: Answers | None = None) -> EvalResult:
        """The result of an evaluation."""
        mean, metrics = self.mean_loss(sums), self.metrics(sums)
        return EvalResult(mean, self.target_tokens, metrics, sums, self.counts, answers)

    def result_of_answers(self, answers: Answers) -> EvalResult:
        """The result of a loss over a whole step, from all answers, on the CPU."""
        return self.result(self.judge(answers.sums, answers.examples).numbers(), answers)


def joined_losses(results: Sequence[EvalResult], loss: AnyLoss) -> EvalResult:
    """Several sweeps' results as one, equal to that of a single sweep."""
    sums, counts = Tally[float](), Counter[str]()
    for result in results:
        sums.add(result.sums)
        counts.update(result.counts)
    whole = Objective(loss, dict(counts), sum(result.target_tokens for result in results))
    of_sweeps = [result.answers for result in results if result.answers is not None]
    return whole.result_of_answers(Answers.joined(of_sweeps)) if of_sweeps else whole.result(sums)


def of_scores(loss: AnyLoss) -> bool:
    """True for a loss of scores, which only a classifier's head gives."""
    return isinstance(loss, SequenceLoss) and loss.of_scores


def counted(loss: AnyLoss, batches: Sequence[Mapping[str, Tensor]]) -> Objective:
    """The objective of a loss over these micro-batches."""
    if not isinstance(loss, SequenceLoss):
        denominator = float(sum(loss.denominator(batch) for batch in batches))
        return Objective(loss, {TARGETS: denominator}, round(denominator))
    counts: Counter[str] = Counter()
    tokens = 0
    for batch in batches:
        counts.update(loss.counts(batch))
        if loss.of_scores:
            tokens += int(rows_of(batch).max()) + 1
        elif loss.trains(batch):
            tokens += int((batch["labels"][:, 1:] != IGNORE).sum())
    return Objective(loss, dict(counts), tokens)


# -- the processes that compute a step together ----------------------------------------------------


class Peers:
    """The ranks of a world, which all call these methods at one place; alone by default."""

    def __init__(self, world: World = ALONE, parallel: ContextParallel | None = None) -> None:
        self.world, self.context_parallel, self.several = world, parallel, not world.is_alone
        self.number, self.broadcast = world.number, world.broadcast
        self.all_gather = world.all_gather

    def agreed(self, objective: Objective, batches: Sequence[Mapping[str, Tensor]]) -> Objective:
        """The objective over all ranks' micro-batches, of which `batches` are this one's.

        Raises ConfigError for a loss over sequences that ranks share, and DataError if ranks that
        share them got different ones.
        """
        counts, tokens, size = Counter[str](), 0, self.world.cp_size
        if size > 1 and objective.of_sequences is not None:
            raise ConfigError(
                f"context_parallel: {size} does not work with {type(objective.loss).__name__}, a "
                "loss over whole sequences; set 1"
            )
        outline = [(b["input_ids"].shape, int(b["input_ids"].sum())) for b in batches if size > 1]
        every = self.all_gather((dict(objective.counts), objective.target_tokens, outline))
        if any(one[2] != every[rank - rank % size][2] for rank, one in enumerate(every)):
            raise DataError(
                "ranks that share sequences got different micro-batches; give the same to "
                "all ranks of one dp_rank"
            )
        for of_group, targets, _ in every[::size]:
            counts.update(of_group)
            tokens += targets
        return replace(objective, counts=dict(counts), target_tokens=tokens)

    def total(self, objective: Objective, found: Tally[Tensor]) -> Tally[Tensor]:
        """The sums of all ranks. Waits for the device, unless one is alone."""
        if not self.several:
            return found
        # on the CPU, in the order of ranks: every rank gets the same bits
        total = Tally[Tensor]()
        loss = {unit: value.cpu() for unit, value in found.loss.items()}
        metrics = {name: (unit, value.cpu()) for name, (unit, value) in found.metrics.items()}
        every = self.all_gather(Tally(loss, metrics))
        for each in every[:1] if objective.whole_step else every:  # of a whole step each has all
            total.add(each)
        return total

    def answers(self, own: Mapping[int, Answers], device: torch.device) -> Answers:
        """All ranks' examples in the order of micro-batches. own: this one's, by number."""
        if not self.several:
            return Answers.joined([*own.values()])
        cpu, found = torch.device("cpu"), dict[int, Answers]()
        for of_rank in self.all_gather({number: one.to(cpu) for number, one in own.items()}):
            found |= of_rank
        return Answers.joined(
            [own.get(number) or found[number].to(device) for number in sorted(found)]
        )
