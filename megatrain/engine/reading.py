"""What an engine computes with its weights as they are: log-probabilities, logits, text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, overload

import torch
from torch import Tensor

from megatrain.engine.batches import Batch, objective_of
from megatrain.engine.context import computing, naming_the_gpu
from megatrain.engine.generation import Choose, generated, has_room, likeliest, weights_on_device
from megatrain.engine.parts import EngineParts
from megatrain.errors import ConfigError
from megatrain.losses import IGNORE, Targets, next_token
from megatrain.models.anatomy import Anatomy
from megatrain.models.skeleton import Skeleton
from megatrain.models.whole import whole
from megatrain.settings import Settings


class Reading(ABC):
    """The part of `Engine` that changes nothing."""

    parts: EngineParts
    anatomy: Anatomy
    skeleton: Skeleton
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
        found = self._logprobs(micro_batches, greedy)
        shapes = [batch["input_ids"].shape for batch in micro_batches]
        placed = [torch.zeros(shape) for shape in shapes]
        chosen = [torch.zeros(shape, dtype=torch.bool) for shape in shapes]
        for value, choice, (targets, values, said) in zip(placed, chosen, found, strict=True):
            place = targets.index.cpu() + 1  # a row's last position predicts nothing
            value.view(-1)[place], choice.view(-1)[place] = values.cpu(), said.cpu()
        return (placed, chosen) if greedy else placed

    def score(
        self, inputs: Sequence[Batch], targets: Sequence[tuple[Tensor, Tensor]]
    ) -> list[tuple[Tensor, Tensor]]:
        """`logprobs` of tokens that need no place of their own, of which a position may have some.

        Args:
            inputs: micro-batches; labels are not looked at.
            targets: for each (index, tokens), both int64 [n] on the CPU: positions in its flattened
                [batch x tokens], and the tokens that might follow them.

        Returns:
            For each (float32 [n], bool [n]) on the CPU: log-probabilities, and whether the token is
            the likeliest one.
        """
        blank = [{**one, "labels": torch.full_like(one["input_ids"], IGNORE)} for one in inputs]
        wanted = [Targets(index, tokens) for index, tokens in targets]
        found = self._logprobs(blank, True, wanted)
        return [(values.cpu(), likeliest.cpu()) for _, values, likeliest in found]

    def _logprobs(
        self, micro_batches: Sequence[Batch], greedy: bool, targets: list[Targets] | None = None
    ) -> list[tuple[Targets, Tensor, Tensor]]:
        self._check_usable()
        objective_of(micro_batches, next_token, self.anatomy)
        if not micro_batches and self.parts.store.world.is_alone:
            return []  # one of several sweeps all the same: others need its shares of weights
        with self._computing("an evaluation's activations"), torch.no_grad():
            found = self.parts.passes.logprobs(micro_batches, greedy, targets)
            self.parts.compute.synchronize()
        self.parts.compute.take_stalls()
        return found

    def logits(self, input_ids: Tensor, positions: slice = slice(None)) -> Tensor:
        """Logits [batch, positions, vocab], or a classifier's scores [batch, positions, labels], on
        the device, whole: for checks, not for training.

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

    @contextmanager
    def whole(self, tokens: int) -> Iterator[Any | None]:
        """Inside, transformers' own model, its weights on the device, to be read and never changed.

        None where they have no room there beside what is there already, or the model cannot
        generate. The engine computes nothing else meanwhile, and goes on as before, to the bit.

        tokens: of all rows together, that a cache of keys and values will hold.
        """
        self._check_usable()
        parts, skeleton = self.parts, self.skeleton
        family: Any = skeleton.model
        here = parts.store.world.is_alone and has_room(skeleton, parts, tokens)
        if not family.can_generate() or not here:
            yield None
            return
        eager = torch.compiler.set_stance("force_eager") if self.settings.compile else nullcontext()
        with naming_the_gpu("the whole model"):
            weights = weights_on_device(parts)
        with (
            computing(self.device, "the keys and values of an answer", lengths_vary=True),
            eager,
            whole(skeleton, weights) as model,
        ):
            yield model
        parts.compute.synchronize()  # wait: nothing may read the store when a step updates it

    def generate(
        self,
        input_ids: Tensor,
        max_new_tokens: int,
        eos_token_ids: Sequence[int] = (),
        choose: Choose = likeliest,
    ) -> list[int]:
        """Continuation of input_ids [1, tokens]; greedy unless `choose` picks from logits [vocab].

        Where all weights fit on the device, transformers' own `generate` writes it. Elsewhere every
        token streams the whole model once: for a look, not for serving.

        Raises ConfigError for a reward model.
        """
        if self.anatomy.labels is not None:
            raise ConfigError(
                "generate: a reward model gives scores and writes no text; take a language model"
            )
        with self.whole(input_ids.numel() + max_new_tokens) as model:
            if model is not None:
                ids = input_ids.to(self.device)
                return generated(model, ids, max_new_tokens, eos_token_ids, choose)
        return self.generate_streamed(input_ids, max_new_tokens, eos_token_ids, choose)

    def generate_streamed(
        self,
        input_ids: Tensor,
        max_new_tokens: int,
        eos_token_ids: Sequence[int] = (),
        choose: Choose = likeliest,
    ) -> list[int]:
        """`generate` where weights do not fit: one sweep over them for every token."""
        tokens: list[int] = []
        while len(tokens) < max_new_tokens and not (tokens and tokens[-1] in eos_token_ids):
            context = torch.cat([input_ids, torch.tensor([tokens], dtype=torch.long)], dim=1)
            chosen = choose(self.logits(context, slice(-1, None))[0, 0])
            tokens.append(self.parts.store.world.told(chosen))  # all end together
        return tokens
