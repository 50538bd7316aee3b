"""What an engine computes with its weights as they are: log-probabilities, logits, text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Literal, overload

import torch
from torch import Tensor

from megatrain.engine.batches import Batch, count_targets
from megatrain.engine.context import computing
from megatrain.engine.parts import EngineParts
from megatrain.losses import next_token
from megatrain.models.anatomy import Anatomy
from megatrain.settings import Settings


class Reading(ABC):
    """The part of `Engine` that changes nothing."""

    parts: EngineParts
    anatomy: Anatomy
    device: torch.device
    settings: Settings

    @abstractmethod
    def _check_usable(self) -> None: ...

    @abstractmethod
    def _computing(self, what: str) -> AbstractContextManager[None]: ...

    @overload
    def logprobs(
        self, micro_batches: Sequence[Batch], *, greedy: Literal[False] = False
    ) -> list[Tensor]: ...

    @overload
    def logprobs(
        self, micro_batches: Sequence[Batch], *, greedy: Literal[True]
    ) -> tuple[list[Tensor], list[Tensor]]: ...

    def logprobs(
        self, micro_batches: Sequence[Batch], *, greedy: bool = False
    ) -> list[Tensor] | tuple[list[Tensor], list[Tensor]]:
        """Log-probabilities of all targets, in evaluation mode: one sweep over the weights.

        Args:
            micro_batches: as `forward_backward` takes them.
            greedy: say of each target, too, whether it is the likeliest token.

        Returns:
            For each micro-batch float32 [batch, tokens] on the CPU: at each place with a label the
            log-probability of that label after the tokens before it; 0 elsewhere, and for the first
            token of a row, which nothing predicts. With `greedy` also a list of bool tensors of the
            same shapes, false where there is no target.

        Raises DataError as `forward_backward`.
        """
        self._check_usable()
        count_targets(micro_batches, next_token, self.anatomy)
        with self._computing("an evaluation's activations"), torch.no_grad():
            found = self.parts.passes.logprobs(micro_batches, greedy) if micro_batches else []
            values = [value.cpu() for value, _ in found]
            likeliest = [chosen.cpu() for _, chosen in found]
        self.parts.compute.take_stalls()
        return (values, likeliest) if greedy else values

    def logits(self, input_ids: Tensor, positions: slice = slice(None)) -> Tensor:
        """Logits [batch, positions, vocab] on the device, whole: for checks, not for training.

        Returns when they are computed.
        """
        self._check_usable()
        # in `generate` rows grow token by token; compiled layers keep the kernel they saw first
        varies = self.settings.lengths_vary or not self.settings.compile
        with computing(self.device, "these logits", lengths_vary=varies), torch.no_grad():
            logits = self.parts.passes.logits(input_ids, positions)
        self.parts.compute.synchronize()  # wait: uploads read the store, which a step would update
        self.parts.compute.take_stalls()
        return logits

    def generate(
        self,
        input_ids: Tensor,
        max_new_tokens: int,
        eos_token_ids: Sequence[int] = (),
        choose: Callable[[Tensor], int] = lambda logits: int(logits.argmax()),
    ) -> list[int]:
        """Continuation of input_ids [1, tokens]; greedy unless `choose` picks from logits [vocab].

        Every token streams the whole model once: for a look, not for serving.
        """
        tokens: list[int] = []
        while len(tokens) < max_new_tokens and not (tokens and tokens[-1] in eos_token_ids):
            context = torch.cat([input_ids, torch.tensor([tokens], dtype=torch.long)], dim=1)
            tokens.append(choose(self.logits(context, slice(-1, None))[0, 0]))
        return tokens
