"""The engine: a model whose parameters and optimizer state live in host RAM, and which trains by streaming through the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch

from megatrain.activations import kept_row_bytes
from megatrain.engine.batches import Batch, check_batches
from megatrain.engine.boundaries import Offload, OnDevice
from megatrain.engine.computing import computing, take_workspaces
from megatrain.engine.gradients import Gradient, Gradients
from megatrain.engine.out_of_memory import naming_the_gpu
from megatrain.engine.results import EvalResult, StepResult
from megatrain.engine.settings import PRECISIONS, Placement, Settings, open_store
from megatrain.engine.staging import GradientRing, StoredGradients, blocked_by_updates
from megatrain.engine.step import Passes
from megatrain.engine.streamer import Streamer
from megatrain.engine.streams import Compute, Lane
from megatrain.engine.update import Updater, diverged
from megatrain.errors import ConfigError, MegaTrainError
from megatrain.losses import Loss, next_token
from megatrain.memory.codecs import CODECS
from megatrain.models.anatomy import Anatomy
from megatrain.models.fp8 import Fp8Policy
from megatrain.models.skeleton import Skeleton, layouts_of
from megatrain.optim import Optimizer

T = TypeVar("T")
OnGradient = Callable[[Gradient], None]


class _NotFinite(Exception):
    """The loss is not finite and nothing was updated yet."""


class Engine:
    """Trains a skeleton whose weights stream from a host store. Close it, or use it as a context manager.

    Most callers want `from_pretrained` or `from_config`. The weights in the store are zero until something is loaded. Of several in one
    process one computes at a time: they share PyTorch's random state.

    Args:
        skeleton: the model without weights.
        optimizer: hyper-parameters and update rule.
        precision: "bfloat16" (bf16 computation, exact fp32 master weights), "fp8" (the same with fp8 products) or "float32".
        max_grad_norm: clip the global gradient norm to this; None: no clipping and no model-sized gradient buffer, `train_step` only.
            `Settings.second_backward` clips without one.
        device: where to compute. On the CPU the same schedule runs with worker threads for streams.
        seed: of dropout and of random initialisation.
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
        seed: int = 0,
    ) -> None:
        self.skeleton, self.optimizer, self.precision = skeleton, optimizer, precision
        self.max_grad_norm, self.device, self.settings, self.seed = max_grad_norm, device, settings, seed
        self.updates = 0
        self.skipped = 0
        if settings.second_backward and max_grad_norm is None:
            raise ConfigError("second_backward: without max_grad_norm there is no norm to wait for; set a max_grad_norm, or leave it out")
        self._pending: list[Gradient] | None = None
        self._targets = 0
        self._closed = False
        if precision == "fp8":
            skeleton.use_fp8(Fp8Policy())
        if settings.layer_chunk:
            skeleton.chunk_layers(settings.layer_chunk, settings.compile)
        skeleton.find_skippable()
        if settings.compile:
            skeleton.compile_layers(settings.cheap_retention, lengths_vary=settings.lengths_vary)
        optimizer.compile()
        with ExitStack() as resources:
            self._open(resources)
            self._resources = resources.pop_all()  # until here a failure gives everything back at once

    def _open(self, resources: ExitStack) -> None:
        """Allocate all memory and start all threads; `resources` closes them in reverse order: whoever uses before what is used."""
        skeleton, settings, cuda = self.skeleton, self.settings, self.device.type == "cuda"
        stored = self.max_grad_norm is not None and not settings.second_backward  # gradients, until their norm is known
        layouts, dtype, threads = layouts_of(skeleton.anatomy), PRECISIONS[self.precision], settings.update_threads
        placement = Placement.of(settings, len(layouts))
        with naming_the_gpu("the resident blocks' state"):
            take_workspaces(self.device, dtype)
            self.store = resources.enter_context(
                open_store(layouts, self.optimizer, self.precision, placement, gradients=stored, device=self.device, threads=threads)
            )
        self._compute, self._ring = Compute(self.device), None
        blocked = partial(blocked_by_updates, self._compute, self.store)
        if not stored:
            largest = max((layout.numel for layout in layouts[placement.resident :]), default=0)
            self._ring = GradientRing(largest, dtype, pinned=cuda, wait_ready=self.wait_ready, blocked=blocked)
            resources.callback(self._ring.close)
        self._stored = StoredGradients(self.store, self._ring, settings.groups == 1, blocked)
        resources.callback(self._stored.close)
        self._updater = Updater(self.store, self.optimizer, threads, self._compute)
        resources.callback(self._updater.close)
        with naming_the_gpu("the update's workspace"):
            self._updater.take_libraries()
        self._download, self._upload, self._fetch = (Lane(name, self.device) for name in ("download", "upload", "fetch"))
        self._boundaries = self._keeper()
        resources.callback(self._boundaries.close)
        releases = Lane("release") if self.store.nvme is not None else None
        if releases is not None:
            resources.callback(releases.close)
        for lane in (self._download, self._upload, self._fetch):
            resources.callback(lane.close)
        with naming_the_gpu("the weights' slots and the gradients' sums"):
            self._streamer = Streamer(skeleton.anatomy, self.store, dtype, self._compute, self._upload, self._updater, releases)
            tied = {0} if skeleton.anatomy.embed_feeds_head else set()
            self._gradients = Gradients(
                layouts,
                dtype,
                placement.resident,
                sorted(tied | set(range(placement.summed))),
                self._compute,
                self._upload,
                self._download,
                self._stored.destination,
                (lambda block: self.store.array("grad_sum", block)) if placement.sums_travel else None,
            )
            parameters = [skeleton.bind(block, self._streamer.flat(block.index)) for block in skeleton.anatomy.blocks]
            skeleton.move_buffers(self.device)
        self._passes = Passes(skeleton, self._streamer, self._gradients, self._boundaries, parameters, settings, self.seed)

    def _keeper(self) -> OnDevice | Offload:
        """Keeps the layers' inputs between forward and backward."""
        settings, codec = self.settings, CODECS.get(self.settings.activations)
        if not settings.offload:
            return OnDevice(codec)
        row = kept_row_bytes(settings.activations, self.anatomy.hidden_size, PRECISIONS[self.precision].itemsize)
        far = settings.nvme_activations, settings.nvme_folders, settings.largest_group, settings.lengths_vary
        return Offload(row, self._compute, self._download, self._fetch, codec, *far)

    # -- making one -----------------------------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(cls, source: str | Path, **options: Any) -> Engine:
        """An engine with the weights of a local folder, a GGUF file or a hub id. Options: see `megatrain.engine.build.build`."""
        from megatrain.engine.build import from_pretrained

        return from_pretrained(source, **options)

    @classmethod
    def from_config(cls, config: Any, **options: Any) -> Engine:
        """An engine with random weights for a transformers configuration or the folder of one."""
        from megatrain.engine.build import from_config

        return from_config(config, **options)

    # -- training -------------------------------------------------------------------------------------------------------------

    def forward_backward(self, micro_batches: Sequence[Batch], loss: Loss = next_token) -> StepResult:
        """Gradients of the mean loss over all targets of all micro-batches, however they are cut. Follow it with `step`.

        Args:
            micro_batches: dicts of CPU tensors: input_ids int64 [batch, tokens]; labels int64 of the same shape, -100 where there is no
                target, not shifted (the loss shifts, as transformers does); attention_mask or position_ids if needed.

        Raises:
            MegaTrainError: called twice without `step`, or without gradient clipping (use `train_step`).
            DataError: a micro-batch lacks something, or holds a token that the model does not know.
        """
        if self.max_grad_norm is None:
            raise MegaTrainError("max_grad_norm is None, so gradients are not kept: use train_step, which updates during backward")
        pending: list[Gradient] = []
        return self._run(micro_batches, loss, partial(self._stored.keep, pending), check_loss=False, pending=pending)

    def _run(
        self, micro_batches: Sequence[Batch], loss: Loss, on_gradient: Any, *, check_loss: bool, pending: list[Gradient]
    ) -> StepResult:
        self._check_usable()
        if self._pending is not None:
            raise MegaTrainError("forward_backward was called twice; call step in between")
        self._passes.forget()  # what an interrupted step left
        check_batches(micro_batches, self.anatomy.vocab_size)
        denominator = sum(loss.denominator(batch) for batch in micro_batches)
        self._targets = round(denominator)
        if denominator == 0:
            self._pending = []
            return StepResult(0.0, 0)

        def on_loss(total: torch.Tensor) -> None:
            if check_loss and not math.isfinite(float(total)):
                raise _NotFinite

        self._stored.begin_step()
        self._passes.step = self.updates + self.skipped
        with computing(self.device, "a step's activations", lengths_vary=self.settings.lengths_vary):
            total = self._passes.forward_backward(micro_batches, loss, 1.0 / denominator, on_gradient, on_loss)
        result = StepResult(float(total) / denominator, self._targets, stalls_s=self._compute.take_stalls())
        self._pending = pending  # last: who is interrupted while the device computes has made no step
        return result

    def step(self, lr: float | None = None) -> float:
        """Clip and apply the gradients of the last `forward_backward`. The update runs on the host while the caller goes on.

        Returns:
            The global gradient norm before clipping. If it is not finite the step is skipped, and the state stays as it was, bit for bit.

        Raises:
            DivergedError: a second backward's gradient is not finite, where the first one's was, after other blocks were updated.
        """
        self._check_usable()
        pending, self._pending = self._pending, None
        if pending is None:
            raise MegaTrainError("step was called without forward_backward")
        computed = bool(pending) or self._passes.waiting
        norm = self._gradients.norm(pending) if computed else 0.0
        if not computed or not math.isfinite(norm):
            self._passes.forget()
            self.skipped += 1
            return norm
        assert self.max_grad_norm is not None
        rate, scale = self._rate(lr), min(1.0, self.max_grad_norm / (norm + 1e-6))
        if self._passes.waiting:
            with computing(self.device, "a second backward's activations", lengths_vary=self.settings.lengths_vary):
                self._update_at_once(rate, scale, self._passes.backward_again)
            return norm
        with self._updater.all_or_nothing():
            self._streamer.invalidate()
            self.updates += 1
            for gradient in sorted(pending, key=lambda g: g.block):  # forward order: the next forward needs embed first
                self._updater.submit(gradient, lr=rate, step=self.updates, grad_scale=scale)
        return norm

    def train_step(self, micro_batches: Sequence[Batch], loss: Loss = next_token, lr: float | None = None) -> StepResult:
        """`forward_backward` and `step` in one. Without gradient clipping, blocks are updated while backward still runs.

        Raises:
            DivergedError: without clipping, a gradient that is not finite after other blocks were updated. (A non-finite loss is skipped.)
        """
        if self.max_grad_norm is not None:
            skipped = self.skipped
            result = self.forward_backward(micro_batches, loss)
            norm = self.step(lr)
            again = self._compute.take_stalls()  # in a second backward
            stalls_s = {cause: result.stalls_s.get(cause, 0.0) + again.get(cause, 0.0) for cause in result.stalls_s | again}
            return StepResult(result.loss, result.target_tokens, norm, self.skipped > skipped, stalls_s)
        return self._train_unclipped(micro_batches, loss, self._rate(lr))

    def _train_unclipped(self, micro_batches: Sequence[Batch], loss: Loss, lr: float) -> StepResult:
        try:
            result, norm = self._update_at_once(lr, 1.0, lambda update: self._run(micro_batches, loss, update, check_loss=True, pending=[]))
        except _NotFinite:
            self.skipped += 1
            return StepResult(math.nan, self._targets, math.nan, True, self._compute.take_stalls())
        finally:
            self._pending = None
        if norm is None:
            self.skipped += 1
            return StepResult(0.0, 0, 0.0, True)
        return StepResult(result.loss, result.target_tokens, norm, False, result.stalls_s)

    def _update_at_once(self, lr: float, grad_scale: float, backward: Callable[[OnGradient], T]) -> tuple[T, float | None]:
        """Update each block as soon as `backward` has its gradient. Returns what that returns, and the norm; None: of no gradients.

        Raises DivergedError if the norm is not finite.
        """
        begun: list[Gradient] = []

        def on_gradient(gradient: Gradient) -> None:
            begun.append(gradient)
            self._updater.submit(gradient, lr=lr, step=self.updates + 1, grad_scale=grad_scale, check_finite=True)

        with self._updater.all_or_nothing(begun):
            result = backward(on_gradient)
            if not begun:
                return result, None
            self._streamer.invalidate()
            self.updates += 1
            norm = self._gradients.norm(begun)
        if not math.isfinite(norm):
            self._updater.give_up(diverged("a gradient"))
            for gradient in begun:
                self.wait_ready(gradient.block)  # raises, with the block's name if its own update found out
        return result, norm

    def _rate(self, lr: float | None) -> float:
        return self.optimizer.lr if lr is None else lr

    # -- using the model ------------------------------------------------------------------------------------------------------

    def evaluate(self, micro_batches: Sequence[Batch], loss: Loss = next_token) -> EvalResult:
        """Mean loss over all targets, in evaluation mode. Raises DataError as `forward_backward`."""
        self._check_usable()
        check_batches(micro_batches, self.anatomy.vocab_size)
        targets = sum(loss.denominator(batch) for batch in micro_batches)
        if targets == 0:
            return EvalResult(0.0, 0)
        with computing(self.device, "an evaluation's activations", lengths_vary=self.settings.lengths_vary), torch.no_grad():
            total = float(self._passes.evaluate(micro_batches, loss))
        self._compute.take_stalls()
        return EvalResult(total / targets, round(targets))

    def logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Logits [batch, tokens, vocab] on the device, whole: for checks, not for training. Returns when they are computed."""
        return self._logits(input_ids, slice(None))

    def _logits(self, input_ids: torch.Tensor, positions: slice) -> torch.Tensor:
        self._check_usable()
        grows = not self.settings.compile  # a token at a time, in `generate`; compiled layers keep the kernel that they saw first
        with computing(self.device, "these logits", lengths_vary=self.settings.lengths_vary or grows), torch.no_grad():
            logits = self._passes.logits(input_ids, positions)
        self._compute.synchronize()  # wait: uploads still read the store, which a step called next would update
        self._compute.take_stalls()
        return logits

    def generate(self, input_ids: torch.Tensor, max_new_tokens: int, eos_token_ids: Sequence[int] = ()) -> list[int]:
        """Greedy continuation of input_ids [1, tokens]. Every token streams the whole model once: for a look, not for serving."""
        tokens: list[int] = []
        while len(tokens) < max_new_tokens and not (tokens and tokens[-1] in eos_token_ids):
            context = torch.cat([input_ids, torch.tensor([tokens], dtype=torch.long)], dim=1)
            tokens.append(int(self._logits(context, slice(-1, None))[0, 0].argmax()))
        return tokens

    def iter_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, weight) of every tensor as the device computes with it, on the CPU; the next step changes what lies in host RAM."""
        for block in self.anatomy.blocks:
            self.wait_ready(block.index)
            yield from block.layout.views(self.store.lasting("weight", block.index)).items()

    def save_pretrained(self, folder: str | Path) -> None:
        """Write weights and configuration as a Hugging Face folder, which transformers and vLLM load."""
        from megatrain.export import save_pretrained

        save_pretrained(self, Path(folder))

    # -- state ----------------------------------------------------------------------------------------------------------------

    @property
    def anatomy(self) -> Anatomy:
        return self.skeleton.anatomy

    @property
    def hf_config(self) -> Any:
        return self.skeleton.config

    def wait_ready(self, block: int) -> None:
        """Return once the last update of a block is done. Every reader of the store calls this first."""
        self._check_usable()
        self._updater.wait_ready(block)

    def _check_usable(self) -> None:
        """Raise MegaTrainError if the engine is closed, or whatever stopped an update half-way."""
        if self._closed:
            raise MegaTrainError("the engine is closed; make a new one")
        self._updater.check()

    def state(self) -> dict[str, int]:
        """The counters that a checkpoint keeps beside the arrays."""
        return {"updates": self.updates, "skipped": self.skipped, "seed": self.seed}

    def load_state(self, state: Mapping[str, int]) -> None:
        """Take over the counters of a checkpoint whose arrays were just loaded into the store."""
        self._check_usable()
        self.updates, self.skipped, self.seed = state["updates"], state["skipped"], state["seed"]
        self._passes.seed = self.seed
        self.weights_changed()

    def weights_changed(self) -> None:
        """Tell the engine that the store was written from outside, so that no block on the device is taken for current."""
        self._check_usable()
        self._streamer.invalidate()

    def close(self) -> None:
        """Finish running updates, stop the threads, give the memory back. Closing twice is closing once."""
        if self._closed:
            return
        self._closed = True
        try:
            self._resources.close()
        finally:  # the device's memory too, though a caller may hold on to this engine
            del self._passes, self._streamer, self._gradients
            for block in self.anatomy.blocks:
                self.skeleton.bind(block, torch.empty(block.layout.numel, device="meta"))

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
