"""One step's passes over the model: forward and backward sweeps around autograd, with boundary activations kept and the rest recomputed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import nn

from megatrain.engine.gradients import Gradient, Gradients
from megatrain.engine.head import loss_and_gradients, loss_sum
from megatrain.engine.settings import Settings
from megatrain.engine.streamer import Streamer
from megatrain.errors import DataError
from megatrain.losses import IGNORE, Loss, Targets, find_targets
from megatrain.models.recorder import LayerCall
from megatrain.models.skeleton import Skeleton

Batch = Mapping[str, torch.Tensor]


@dataclass
class MicroBatch:
    """A micro-batch in flight. `boundaries[i]` is the input of layer i; the last entry, the output of the last layer, becomes `grad`.

    `graphs[i]` holds (input, output) of a layer i that is retained, the one a leaf of the graph and the other its root.
    """

    number: int  # in the step, whatever the grouping: dropout seeds depend on it
    inputs: dict[str, torch.Tensor]
    targets: Targets
    boundaries: list[torch.Tensor] = field(default_factory=list)
    calls: list[LayerCall] = field(default_factory=list)
    graphs: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    grad: torch.Tensor | None = None  # of the loss with respect to the boundary that backward has reached

    @property
    def tokens(self) -> int:
        return self.inputs["input_ids"].numel()


def check_batches(batches: Sequence[Batch], vocabulary: int) -> None:
    """Raise DataError for a micro-batch whose tensors are missing, misshapen or out of range, which a GPU would answer by dying."""
    for number, batch in enumerate(batches):
        for name in ("input_ids", "labels"):
            if name not in batch:
                raise DataError(f"micro-batch {number} has no {name}; it needs input_ids and labels")
            values, wanted = batch[name], list(batch["input_ids"].shape)
            if values.dtype != torch.int64 or values.ndim != 2 or list(values.shape) != wanted:
                found = f"{list(values.shape)} {str(values.dtype).removeprefix('torch.')}"
                raise DataError(
                    f"{name} of micro-batch {number} are {found}; they must be [rows, tokens] int64, as input_ids: {wanted} int64"
                )
            known = (values >= 0) & (values < vocabulary)
            strange = values[~(known | (values == IGNORE) if name == "labels" else known)]
            if len(strange):
                raise DataError(
                    f"{name} of micro-batch {number} hold {int(strange[0])}, but the model's vocabulary has {vocabulary} tokens; "
                    "use the tokenizer of this model"
                )


def only_trailing_padding(mask: torch.Tensor) -> bool:
    """True if a [batch, tokens] mask hides nothing but the ends of rows. A causal model's real tokens never see those anyway."""
    return mask.ndim == 2 and bool((mask[:, 1:] <= mask[:, :-1]).all()) and bool((mask[:, 0] != 0).all())


def prepare(batch: Batch, number: int, device: torch.device) -> MicroBatch:
    """Move a micro-batch to the device. A mask that only hides trailing padding is dropped: it changes no real token and costs speed.

    Not if there are positions too: without a mask transformers takes a jump in them for the start of another document.
    """
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    mask = inputs.get("attention_mask")
    if mask is not None and "position_ids" not in inputs and only_trailing_padding(mask):
        del inputs["attention_mask"]
    moved = {name: value.to(device, non_blocking=True) for name, value in inputs.items()}
    return MicroBatch(number, moved, find_targets(batch["labels"]).to(device))


def cut(items: Sequence[MicroBatch], groups: int) -> list[Sequence[MicroBatch]]:
    """`items` in at most `groups` consecutive groups of as equal sizes as can be."""
    count = max(1, min(groups, len(items)))
    bounds = [round(i * len(items) / count) for i in range(count + 1)]
    return [items[start:stop] for start, stop in pairwise(bounds) if stop > start]


class Passes:
    """Runs sweeps. Owns nothing: it wires the skeleton's modules, the streamer's weights and the gradient sums together.

    Args:
        parameters: of each block, in layout order, bound to the block's slot.
        seed: of dropout.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        streamer: Streamer,
        gradients: Gradients,
        parameters: list[list[nn.Parameter]],
        settings: Settings,
        seed: int,
    ) -> None:
        self.skeleton = skeleton
        self.streamer = streamer
        self.gradients = gradients
        self.parameters = parameters
        self.chunk, self.groups = settings.head_chunk, settings.groups
        self.first_retained = len(skeleton.layers) - settings.retained
        self.seed = seed
        self.device = streamer.compute.device
        self.step = 0  # of dropout seeds
        self.names = [[t.name for t in block.layout.tensors] for block in skeleton.anatomy.blocks]
        self.embed, self.head = 0, len(skeleton.layers) + 1

    # -- a whole step ---------------------------------------------------------------------------------------------------------

    def forward_backward(
        self,
        batches: Sequence[Batch],
        loss: Loss,
        scale: float,
        on_gradient: Callable[[Gradient], None],
        on_loss: Callable[[torch.Tensor], None],
    ) -> torch.Tensor:
        """Gradients of `scale` times the summed loss, which is returned as a device scalar.

        Calls `on_gradient` with each block's, as its download is queued, and `on_loss` with the summed loss after the last group's head.
        """
        self.skeleton.set_training(True)
        self.gradients.begin_step()
        micro_batches = [prepare(batch, number, self.device) for number, batch in enumerate(batches)]
        grouped = cut(
            [mb for mb in micro_batches if len(mb.targets)], self.groups
        )  # one without targets adds nothing, so it is not computed
        total = torch.zeros((), device=self.device)
        route = [block for _ in grouped for block in self._there_and_back()]
        with self._dropout_state(), closing(self.streamer.sweep(route)) as visits:
            for number, group in enumerate(grouped):
                last = number == len(grouped) - 1
                self._forward(group, visits)
                total += self._turn(group, loss, scale, visits)
                if last:
                    on_loss(total)
                self._close(self.head, last, on_gradient)
                self._backward(group, visits, last, on_gradient)
        return total

    def evaluate(self, batches: Sequence[Batch], loss: Loss) -> torch.Tensor:
        """The summed loss in evaluation mode, a device scalar. One micro-batch after another in one sweep."""
        self.skeleton.set_training(False)
        micro_batches = [prepare(batch, number, self.device) for number, batch in enumerate(batches)]
        total = torch.zeros((), device=self.device)
        for mb in self._through_layers(micro_batches):
            total += loss_sum(self.skeleton.head, mb.boundaries[-1].flatten(0, 1), mb.targets, loss, self.chunk)
        return total

    def logits(self, input_ids: torch.Tensor, positions: slice = slice(None)) -> torch.Tensor:
        """Logits [batch, positions, vocab], in evaluation mode. Whole: for tests, checks and sampling, not for training."""
        self.skeleton.set_training(False)
        batch = {"input_ids": input_ids, "labels": torch.full_like(input_ids, -100)}
        (logits,) = (self._all_logits(mb, positions) for mb in self._through_layers([prepare(batch, 0, self.device)]))
        return logits

    @torch.no_grad()
    def _all_logits(self, mb: MicroBatch, positions: slice) -> torch.Tensor:
        hidden = mb.boundaries[-1][:, positions]
        return self.skeleton.head(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)

    def _through_layers(self, micro_batches: list[MicroBatch]) -> Iterator[MicroBatch]:
        """Run all layers without keeping boundaries, then yield each micro-batch while the head's weights are in place."""
        with closing(self.streamer.sweep(range(self.head + 1))) as visits:
            self._forward(micro_batches, visits, keep=False)
            assert next(visits) == self.head
            yield from micro_batches

    def _there_and_back(self) -> list[int]:
        layers = range(1, self.head)
        return [self.embed, *layers, self.head, *reversed(layers), self.embed]

    # -- parts of a step ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _forward(self, group: Sequence[MicroBatch], visits: Iterator[int], keep: bool = True) -> None:
        """Sweep embed and the layers; keep every layer's input, and the whole graph of those that are retained."""
        assert next(visits) == self.embed
        for mb in group:
            self._seed_dropout(self.embed, mb)
            hidden, mb.calls = self.skeleton.embed(mb.inputs)
            mb.boundaries = [hidden]
        for index in range(len(self.skeleton.layers)):
            block = next(visits)
            for mb in group:
                self._seed_dropout(block, mb)
                if keep and index >= self.first_retained:
                    mb.graphs[index] = self._graph(index, mb)
                    hidden = mb.graphs[index][1].detach()
                else:
                    hidden = self.skeleton.layer(index, mb.boundaries[-1], mb.calls[index])
                if not keep:
                    mb.boundaries.clear()
                mb.boundaries.append(hidden)

    def _graph(self, index: int, mb: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a layer on its kept input, for gradients: (input, output)."""
        hidden = mb.boundaries[-1].detach().requires_grad_()
        with torch.enable_grad():
            return hidden, self.skeleton.layer(index, hidden, mb.calls[index])

    def _turn(self, group: Sequence[MicroBatch], loss: Loss, scale: float, visits: Iterator[int]) -> torch.Tensor:
        """The head, forward and backward at once. Leaves each micro-batch's gradient at the last layer's output."""
        assert next(visits) == self.head
        tied = dict(self.skeleton.anatomy.tied)
        names = [*self.names[self.head], *tied.values()]
        parameters: list[torch.Tensor] = [*self.parameters[self.head]]
        if tied:
            self.gradients.open(self.embed)
            owners = dict(zip(self.names[self.embed], self.parameters[self.embed], strict=True))
            parameters += [owners[owner] for owner in tied.values()]
        self.gradients.open(self.head)
        own = set(self.names[self.head])

        def add(grads: list[torch.Tensor | None]) -> None:
            named = dict(zip(names, grads, strict=True))
            self.gradients.add(self.head, {n: g for n, g in named.items() if n in own})
            if tied:
                self.gradients.add(self.embed, {n: g for n, g in named.items() if n not in own})

        total = torch.zeros((), device=self.device)
        for mb in group:
            self._seed_dropout(self.head, mb)
            hidden = mb.boundaries.pop()
            value, grad = loss_and_gradients(self.skeleton.head, hidden.flatten(0, 1), mb.targets, loss, scale, self.chunk, parameters, add)
            mb.grad = grad.view_as(hidden)
            total += value
        return total

    def _backward(self, group: Sequence[MicroBatch], visits: Iterator[int], last: bool, on_gradient: Callable[[Gradient], None]) -> None:
        """Sweep the layers in reverse and embed: recompute each from its kept input unless it is retained, then back-propagate."""
        for index in reversed(range(len(self.skeleton.layers))):
            block = next(visits)
            self.gradients.open(block)
            for mb in group:
                self._backward_layer(index, block, mb)
            self._close(block, last, on_gradient)
        assert next(visits) == self.embed
        self.gradients.open(self.embed)
        for mb in group:
            mb.calls.clear()  # masks are large, and running the embedding again makes them anew
            self._seed_dropout(self.embed, mb)
            with torch.enable_grad():
                hidden, _ = self.skeleton.embed(mb.inputs)
            grads = torch.autograd.grad(hidden, self.parameters[self.embed], mb.grad, allow_unused=True)
            self.gradients.add(self.embed, dict(zip(self.names[self.embed], grads, strict=True)))
            mb.grad = None
        self._close(self.embed, last, on_gradient)

    def _backward_layer(self, index: int, block: int, mb: MicroBatch) -> None:
        if index < self.first_retained:
            self._seed_dropout(block, mb)
            mb.graphs[index] = self._graph(index, mb)
        hidden, output = mb.graphs.pop(index)
        mb.boundaries.pop()
        grads = torch.autograd.grad(output, [hidden, *self.parameters[block]], mb.grad, allow_unused=True)
        mb.grad = grads[0]
        self.gradients.add(block, dict(zip(self.names[block], grads[1:], strict=True)))

    def _close(self, block: int, last: bool, on_gradient: Callable[[Gradient], None]) -> None:
        gradient = self.gradients.close(block, last_group=last)
        if gradient is not None:
            on_gradient(gradient)

    # -- dropout --------------------------------------------------------------------------------------------------------------

    def _seed_dropout(self, block: int, mb: MicroBatch) -> None:
        """The same seed for a layer's forward and its recomputation, another for every seed, step, layer and micro-batch.

        Always, since it costs microseconds: what a family draws beside dropout (a router's jitter, say) is replayed too.
        """
        if self.skeleton.model.training:  # evaluation draws nothing, and must leave the caller's state alone
            seed = mix(self.seed, self.step, block, mb.number)
            torch.default_generator.manual_seed(seed)
            if self.device.type == "cuda":  # this device's generator alone: `torch.manual_seed` would reseed the caller's other GPUs too
                torch.cuda.default_generators[self.device.index].manual_seed(seed)

    @contextmanager
    def _dropout_state(self) -> Iterator[None]:
        """Leave the caller's random state as it was."""
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            yield


def mix(*numbers: int) -> int:
    """A 63-bit seed from several integers: splitmix64's finaliser over their running sum (Steele et al., OOPSLA 2014)."""
    state = 0
    for number in numbers:
        state = (state + (number & 0xFFFFFFFFFFFFFFFF) + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1
