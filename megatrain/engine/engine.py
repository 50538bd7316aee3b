"""The engine: a model that trains by streaming through the device, its state in host RAM."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatrain.engine import inference
from megatrain.engine.batches import Batch, check_batches, objective_of
from megatrain.engine.components import AppliedGradients, computing, open_parts
from megatrain.engine.constructors import Constructors
from megatrain.engine.objective import AnyLoss, EvalResult, StepResult
from megatrain.engine.request import check_context_parallel, check_settings
from megatrain.engine.rollout.decode import Answer, AnswerRequest, Look, More, answers
from megatrain.engine.rollout.draw import Draw
from megatrain.engine.rollout.streamed import streamed_model
from megatrain.engine.routing import balancer_of
from megatrain.engine.step import NotFiniteLoss, Passes
from megatrain.engine.update import diverged
from megatrain.errors import ConfigError, MegaTrainError
from megatrain.losses import IGNORE, Targets, next_token
from megatrain.models.skeleton import Skeleton
from megatrain.models.transforms.fp8 import Fp8Policy
from megatrain.models.transforms.kept_attention import most_kept
from megatrain.optim import Optimizer
from megatrain.optim.muon import check_one_rank
from megatrain.settings import Settings
from megatrain.world import ALONE, World

T = TypeVar("T")


class Engine(Constructors):
    """Trains a skeleton whose weights stream from a store. Close it, or use it in a `with`.

    Most callers want `from_pretrained` or `from_config`. The weights in the store are zero until
    something is loaded. Engines of one process share PyTorch's random state, so only one may
    compute at a time.

    Args:
        precision: "bfloat16" (exact fp32 master weights), "fp8" (fp8 matmuls, too) or "float32".
        max_grad_norm: clip the global gradient norm to this. None: no clipping, no model-sized
            gradient buffer, and `train_step` only. `Settings.second_backward` saves that buffer.
        device: where to compute. On the CPU the same schedule runs with threads for streams.
        router_aux_loss_coef: weight of the routers' balancing loss (engine/routing.py); 0: none.
        seed: of dropout and of random initialisation.
        world: the ranks that train together. Each gives `train_step` micro-batches of its own, or
            none, and all call the same methods in the same order. Those that share sequences give
            the same micro-batches.

    Attributes:
        parts: memory, threads and buffers, for tests.
        published: tensors of its model folder by block, named as in its source; no `constants`.
        passthrough: what its source holds besides, which goes unchanged into what is saved.
        updates, skipped: steps that changed the weights, and steps without an update.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        *,
        optimizer: Optimizer,
        precision: str,
        max_grad_norm: float | None,
        device: torch.device,
        settings: Settings,
        router_aux_loss_coef: float = 0.0,
        seed: int = 0,
        world: World = ALONE,
    ) -> None:
        self.skeleton, self.anatomy, self.hf_config = skeleton, skeleton.anatomy, skeleton.config
        self.published, self.constants = self.anatomy.published.tensors, skeleton.constants
        self.optimizer, self.precision = optimizer, precision
        self.max_grad_norm, self.device = max_grad_norm, device
        self.settings, self.seed, self.world = settings, seed, world
        self.updates = self.skipped = self._targets = 0
        check_settings(settings, max_grad_norm, world, self.anatomy)
        balancer = balancer_of(skeleton, router_aux_loss_coef, settings.groups)
        if world.cp_size > 1:
            balances = balancer is not None
            check_context_parallel(world.cp_size, skeleton, settings.compile, balances)
        check_one_rank(optimizer, world.size)
        self._computed = self._closed = False  # computed: `step` may follow
        if precision == "fp8":
            skeleton.use_fp8(Fp8Policy())
        if settings.layer_chunk_tokens is not None:
            skeleton.chunk_layers(settings.layer_chunk_tokens, settings.compile)
        skeleton.find_skippable()
        kept_attention = most_kept(skeleton, device.type) if settings.keep_attention else 0
        if settings.compile:
            skeleton.compile_layers(settings.cheap_retention, lengths_vary=settings.lengths_vary)
        optimizer.compile()
        # only now: what cannot be compiled is refused before any memory is taken
        with ExitStack() as resources:
            self.parts = open_parts(
                skeleton,
                optimizer=optimizer,
                precision=precision,
                clips=max_grad_norm is not None,
                device=device,
                settings=settings,
                seed=seed,
                balancer=balancer,
                kept_attention=kept_attention,
                world=world,
                resources=resources,
            )
            self.store, self._peers = self.parts.store, self.parts.passes.peers
            self._resources = resources.pop_all()  # until here a failure gives everything back

    # -- training ---------------------------------------------------------------------------------

    def forward_backward(
        self, micro_batches: Sequence[Batch], loss: AnyLoss = next_token
    ) -> StepResult:
        """Gradients of the mean loss over all targets of all micro-batches. Follow it with `step`.

        Args:
            micro_batches: dicts of CPU tensors: input_ids int64 [batch, tokens]; labels int64 of
                the same shape, -100 where there is no target, not shifted (the loss shifts, as
                transformers does); attention_mask or position_ids if needed. How the targets are
                cut into micro-batches does not change what is computed.

        Raises:
            MegaTrainError: called twice without `step`, or without gradient clipping (use
                `train_step`).
            DataError: a micro-batch lacks a tensor, has a token that the model does not know, or a
                sequence that is longer than it reads.
        """
        if self.max_grad_norm is None:
            raise MegaTrainError(
                "max_grad_norm is None, so gradients are not kept: use train_step, which updates "
                "during backward"
            )
        return self._with_stalls(self._forward_backward(micro_batches, loss))

    def _with_stalls(self, result: StepResult) -> StepResult:
        return replace(result, stalls_s=self.parts.compute.take_stalls())

    def _forward_backward(
        self, micro_batches: Sequence[Batch], loss: AnyLoss, *, check_loss: bool = False
    ) -> StepResult:
        self._check_usable()
        parts = self.parts
        if self._computed:
            raise MegaTrainError("forward_backward was called twice; call step in between")
        parts.passes.waiting = None  # left by an interrupted step
        objective = objective_of(micro_batches, loss, self.anatomy)
        objective = self._peers.agreed(objective, micro_batches)
        if objective.whole_step and (groups := self.settings.groups) > 1:
            raise ConfigError(
                f"groups: {type(loss).__name__} is computed over a whole step, so set 1, not "
                f"{groups}"
            )
        parts.sink.begin_step()
        self._targets = objective.target_tokens
        if objective.is_empty:
            self._computed = True
            return StepResult(0.0, 0)
        parts.passes.step = self.updates + self.skipped  # a skipped step's dropout is not repeated
        varies = self.settings.lengths_vary
        with computing(self.device, "a step's activations", lengths_vary=varies):
            found = parts.passes.forward_backward(micro_batches, objective, check_loss=check_loss)
        result = StepResult(
            objective.mean_loss(found),  # waits for the GPU
            self._targets,
            metrics=objective.metrics(found),
            **(parts.balancer.read() if parts.balancer else {}),
        )
        self._computed = True  # last: an interrupted forward_backward has made no step
        return result

    def step(self, lr: float | None = None) -> float:
        """Clip and apply the last gradients. The update runs on the host while the caller goes on.

        Args:
            lr: learning rate of this step; default: the optimizer's.

        Returns:
            The global gradient norm before clipping. If it is not finite the step is skipped, and
            the state stays as it was, bit for bit.

        Raises:
            MegaTrainError: no `forward_backward` came before.
            DivergedError: with two-pass clipping, a gradient of the second pass is not finite after
                other blocks were updated.
        """
        self._check_usable()
        if not self._computed:
            raise MegaTrainError("step was called without forward_backward")
        self._computed = False
        parts = self.parts
        finished = parts.sink.finished
        computed = finished or parts.passes.waiting
        norm = parts.gradients.norm(finished) if computed else 0.0
        if not computed or not math.isfinite(norm):
            parts.passes.waiting = None
            self.skipped += 1
            return norm
        assert self.max_grad_norm is not None
        rate, scale = self._rate(lr), min(1.0, self.max_grad_norm / (norm + 1e-6))
        # in forward order, in which the next step needs the blocks
        stored, number = sorted(finished, key=attrgetter("block")), self.updates + 1
        if parts.passes.waiting:
            what, varies = "a second backward's activations", self.settings.lengths_vary
            with computing(self.device, what, lengths_vary=varies):
                self._update_at_once(rate, scale, parts.passes.backward_again)
        with parts.updater.all_or_nothing():
            parts.streamer.invalidate()
            self.updates = number
            for gradient in stored:
                parts.updater.submit(gradient, lr=rate, step=number, grad_scale=scale)
        return norm

    def train_step(
        self, micro_batches: Sequence[Batch], loss: AnyLoss = next_token, lr: float | None = None
    ) -> StepResult:
        """`forward_backward` and `step` in one; unclipped, updates begin during backward.

        Raises:
            DivergedError: without clipping, a gradient is not finite after other blocks were
                updated. (A step whose loss is not finite is skipped.)
        """
        skipped = self.skipped
        if self.max_grad_norm is None:
            result = self._train_unclipped(micro_batches, loss, self._rate(lr))
        else:
            result = self._forward_backward(micro_batches, loss)
            result = replace(result, grad_norm=self.step(lr))
        result = replace(result, skipped=self.skipped > skipped)
        return self._with_stalls(result)  # last: hundreds of events are asked, and the GPU has work

    def _train_unclipped(
        self, micro_batches: Sequence[Batch], loss: AnyLoss, lr: float
    ) -> StepResult:
        try:
            result, norm = self._update_at_once(
                lr, 1.0, lambda: self._forward_backward(micro_batches, loss, check_loss=True)
            )
        except NotFiniteLoss:
            self.skipped += 1
            return StepResult(math.nan, self._targets, math.nan)
        finally:
            self._computed = False  # the update was part of it: no `step` may follow
        self.skipped += norm is None
        return replace(result, grad_norm=norm or 0.0)

    def _update_at_once(
        self, lr: float, grad_scale: float, backward: Callable[[], T]
    ) -> tuple[T, float | None]:
        """Update each block as soon as `backward` has its gradient. Raises DivergedError.

        Returns what `backward` does, and the global norm; None if there was no gradient.
        """
        parts, sink = self.parts, self.parts.sink
        assert isinstance(sink, AppliedGradients)
        sink.begin_step()
        submit, step = parts.updater.submit, self.updates + 1
        sink.apply = partial(submit, lr=lr, step=step, grad_scale=grad_scale, check_finite=True)
        begun = sink.finished  # grows while `backward` runs
        with parts.updater.all_or_nothing(begun):
            result = backward()
            if not begun:
                return result, None
            parts.streamer.invalidate()  # backward uploaded weights from before their updates
            self.updates += 1
            norm = parts.gradients.norm(begun)
        if not math.isfinite(norm):
            parts.updater.give_up(diverged("a gradient"))
            for gradient in begun:
                self.wait_ready(gradient.block)  # raises, naming the block if its update noticed
        return result, norm

    def _rate(self, lr: float | None) -> float:
        if lr is None:
            return self.optimizer.lr
        if isinstance(lr, bool) or not isinstance(lr, (int, float)):
            raise ConfigError(f"lr: {lr!r} is not a number; give a learning rate such as 1e-5")
        return lr

    # -- using the model --------------------------------------------------------------------------

    @contextmanager
    def reading(self, what: str) -> Iterator[Passes]:
        """Sweep without gradients inside; all is computed at its end. what: for errors."""
        self._check_usable()
        with computing(self.device, what, lengths_vary=self.settings.lengths_vary), torch.no_grad():
            yield self.parts.passes
        # wait: uploads read the store, which a step would update
        self.parts.compute.synchronize()
        self.parts.compute.take_stalls()

    def evaluate(self, micro_batches: Sequence[Batch], loss: AnyLoss = next_token) -> EvalResult:
        """Mean loss in evaluation mode. Raises DataError as `forward_backward`."""
        self._check_usable()
        objective = objective_of(micro_batches, loss, self.anatomy)
        objective = self._peers.agreed(objective, micro_batches)
        empty = objective.is_empty
        if objective.whole_step:  # what this sweep lacks others may have
            empty = not any(self._peers.all_gather(len(micro_batches)))
        if empty:
            return EvalResult(0.0, 0)
        with self.reading("an evaluation's activations") as passes:
            return inference.evaluate(passes, micro_batches, objective)

    def logprobs(self, micro_batches: Sequence[Batch], temperature: float = 1.0) -> list[Tensor]:
        """Log-probabilities of all targets, in evaluation mode: one sweep over the weights.

        temperature: that logits are divided by.

        Returns:
            For each micro-batch float32 [batch, tokens] on the CPU: at each place with a label the
            log-probability of that label after the tokens before it; 0 elsewhere, and for the first
            token of a row, which nothing predicts.

        Raises DataError as `forward_backward`.
        """
        objective_of(micro_batches, next_token, self.anatomy)
        found = self._logprobs(micro_batches, temperature=temperature)
        return inference.placed(micro_batches, found)

    def score(
        self, inputs: Sequence[Batch], targets: Sequence[tuple[Tensor, Tensor]]
    ) -> list[tuple[Tensor, Tensor]]:
        """`logprobs` of tokens that need no place of their own, of which a position may have some.

        Args:
            inputs: micro-batches; labels are not looked at.
            targets: for each (index, tokens), both int64 [n] on the CPU: positions in its flattened
                [batch x tokens], and the tokens that might follow them.

        Returns:
            For each (float32 [n], bool [n]) on the CPU: log-probabilities, or a classifier's
            scores at these positions, and True for a token that is the likeliest one.
        """
        blank = [{**one, "labels": torch.full_like(one["input_ids"], IGNORE)} for one in inputs]
        wanted = [Targets(index, tokens) for index, tokens in targets]
        found = self._logprobs(blank, wanted)
        return [(values.cpu(), likeliest.bool().cpu()) for _, (values, likeliest) in found]

    def _logprobs(
        self,
        micro_batches: Sequence[Batch],
        targets: list[Targets] | None = None,
        temperature: float = 1.0,
    ) -> list[tuple[Targets, tuple[Tensor, ...]]]:
        self._check_usable()
        check_batches(micro_batches, self.anatomy)
        if not (micro_batches or self._peers.several):
            return []  # one of several sweeps all the same: others need what it has of weights
        with self.reading("an evaluation's activations") as passes:
            return inference.logprobs(passes, micro_batches, targets, temperature)

    def logits(self, input_ids: Tensor, positions: slice = slice(None)) -> Tensor:
        """Logits [batch, positions, vocab], or a classifier's scores [batch, positions, labels], on
        the device, whole, computed: for checks, not for training."""
        with self.reading("these logits") as passes:
            return inference.logits(passes, input_ids, positions)

    @contextmanager
    def whole(self, tokens: int) -> Iterator[Any | None]:
        """Put transformers' own model, its weights on the device, inside: to be read, not changed.

        None where they have no room there, or the model cannot generate. The engine computes
        nothing else meanwhile, and goes on as before, to the bit.

        tokens: of all rows together, that a cache of keys and values will hold.
        """
        self._check_usable()
        with inference.whole_model(self.skeleton, self.parts, tokens) as model:
            yield model

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        n: int = 1,
        max_new_tokens: int = 256,
        eos_token_ids: Sequence[int] = (),
        temperature: float = 0.0,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        seed: int = 0,
    ) -> list[Answer]:
        """`n` answers to each prompt of token ids, in their order; greedy at temperature 0. Raises
        ConfigError for a reward model."""
        asked = [AnswerRequest(k, ids, range(n), max_new_tokens) for k, ids in enumerate(prompts)]
        draw = Draw(seed=seed, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
        return sorted(self.rollout(asked, draw, eos_token_ids), key=attrgetter("key", "number"))

    def rollout(
        self,
        requests: Sequence[AnswerRequest],
        draw: Draw,
        ends: Sequence[int],
        look: Look | None = None,
        more: More = None,
    ) -> Generator[Answer, None, None]:
        """Answers to requests as they end; the engine computes nothing else meanwhile, and goes on
        as before, to the bit. look: sees tokens as they come. more: further requests, as in
        `decode.answers`.

        An answer follows from the weights, its prompt, the request's key, its number and
        `draw.seed`, whatever is written beside it. Weights without room beside keys and values are
        streamed for each token. All ranks call it, each with requests of its own, or none. Raises
        ConfigError for a reward model.
        """
        given = requests, draw, ends, look, more
        with self.whole(max((len(one.ids) + one.most for one in requests), default=1)) as model:
            if model is not None:
                yield from answers(model, *given, fuse=self.settings.fused_loss)
                return
        with streamed_model(self.skeleton, self.parts) as streamed:
            yield from answers(streamed, *given)

    def iter_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, weight) of every tensor on the CPU, as `save_pretrained` writes them.

        Valid until the next step: those in host RAM are views of the store.
        """
        for block, tensors in enumerate(self.published):
            self.wait_ready(block)
            weights = self.store.whole("weight", block)
            yield from ((tensor.name, tensor.view(weights)) for tensor in tensors)
            yield from self.constants.of_block(block)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write a Hugging Face folder, which transformers and vLLM load, with the tokenizer, chat
        template and generation settings of `from_pretrained`'s source.

        Raises ConfigError if the folder is not empty, and StorageError.
        """
        from megatrain.storage.export import describe_source, save_pretrained

        save_pretrained(self, folder, *describe_source(self.source, self.trust_remote_code))

    # -- state ------------------------------------------------------------------------------------

    def wait_ready(self, block: int) -> None:
        """Return once the last update of a block is done. Every reader of the store calls this."""
        self._check_usable()
        self.parts.updater.wait_ready(block)

    def _check_usable(self) -> None:
        """Raise MegaTrainError if the engine is closed, or what stopped an update half-way."""
        if self._closed:
            raise MegaTrainError("the engine is closed; make a new one")
        self.parts.updater.check()
        self.store.check()  # a drive that failed in backward, before any update saw it

    def state(self) -> dict[str, int]:
        """The counters that a checkpoint keeps beside the arrays."""
        return {"updates": self.updates, "skipped": self.skipped, "seed": self.seed}

    def load_state(self, state: Mapping[str, int]) -> None:
        """Take over the counters of a checkpoint whose arrays were just loaded into the store."""
        self._check_usable()
        self.updates, self.skipped, self.seed = state["updates"], state["skipped"], state["seed"]
        self.parts.passes.seed = self.seed
        self.weights_changed()

    def weights_changed(self) -> None:
        """Tell the engine that the store was written from outside: uploaded blocks are stale."""
        self._check_usable()
        if self.store.shared is not None:  # wait: ranks read each other's weights
            self._peers.all_gather(None)
        self.parts.streamer.invalidate()

    def close(self) -> None:
        """Finish running updates, stop the threads, free the memory. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        try:
            self._resources.close()
        finally:  # the device's memory too, though a caller may hold on to this engine
            del self.parts
            self.constants.release()
            for block in self.anatomy.blocks:
                self.skeleton.bind(block, torch.empty(block.layout.numel, device="meta"))

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
