"""One step's passes over the model: sweeps of forward and backward around autograd, in which each layer keeps
an activation checkpoint or its saved activations."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

import torch
from torch import nn
from torch.utils import _pytree as pytree

from megatrain.engine.activations.offload import Boundaries, Offload
from megatrain.engine.batches import Batch, MicroBatch, cut, prepare
from megatrain.engine.gradients import Gradients
from megatrain.engine.graphs import Graph, SavedTensors, run_for_graph
from megatrain.engine.head import LossSum, loss_and_gradients, loss_sum
from megatrain.engine.products import Sum, SummingInto
from megatrain.engine.streamer import Streamer
from megatrain.losses import Loss
from megatrain.models.skeleton import Skeleton
from megatrain.schedule import block_order, graphs_of_layers
from megatrain.settings import Settings


class NotFiniteLoss(Exception):
    """The loss is not finite, and nothing was updated yet."""


class Passes:
    """Runs sweeps. Owns nothing: it wires the skeleton's modules, the streamer's weights and the gradient
    accumulators together.

    Args:
        boundaries: keeps activation checkpoints between forward and backward.
        parameters: of each block, in layout order, bound to the block's slot.
        seed: of dropout.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        streamer: Streamer,
        gradients: Gradients,
        boundaries: Boundaries,
        parameters: list[list[nn.Parameter]],
        settings: Settings,
        seed: int,
    ) -> None:
        self.skeleton, self.streamer, self.gradients = skeleton, streamer, gradients
        self.boundaries, self.parameters, self.seed = boundaries, parameters, seed
        self.chunk, self.groups = settings.head_chunk_tokens, settings.groups
        self.group_size, self.fused = settings.group_size, settings.compile
        layers = len(skeleton.layers)
        self.graphs_of = graphs_of_layers(layers, settings.retained, settings.retained_on_host)
        self.second_backward = settings.second_backward
        self._repeats = False  # this backward runs twice, from the same activation checkpoints
        self._waiting: tuple[Sequence[MicroBatch], Loss, float] | None = None  # for the second one
        self.device = streamer.compute.device
        self.step = 0  # counts steps, for dropout seeds
        self.names = [[t.name for t in block.layout.tensors] for block in skeleton.anatomy.blocks]
        self.embed, self.head = 0, layers + 1

    # -- a whole step ---------------------------------------------------------------------------------------------------------

    def forward_backward(
        self, batches: Sequence[Batch], loss: Loss, scale: float, *, check_loss: bool
    ) -> LossSum:
        """Gradients of `scale` times the summed loss, which is returned.

        The gradients' sink receives each block's as its download is queued. With two-pass clipping they
        are only measured, and what the second pass needs stays: `backward_again` or `forget` must follow.

        Raises:
            NotFiniteLoss: with `check_loss`, before any gradient is complete.
        """
        self.skeleton.set_training(True)
        self._repeats = self.second_backward
        self.gradients.begin_step(only_measured=self._repeats)
        prepared = [prepare(batch, number, self.device) for number, batch in enumerate(batches)]
        wanted = [mb for mb in prepared if len(mb.targets)]  # the others would add nothing
        grouped = cut(wanted, self._group_count(len(wanted)))
        total = LossSum.zero(self.device)
        route = block_order(self.head + 1) * len(grouped)
        with self._dropout_state(), closing(self.streamer.sweep(route)) as visits:
            for number, group in enumerate(grouped):
                last = number == len(grouped) - 1
                self.boundaries.begin_group(
                    [mb.tokens for mb in group],
                    self.graphs_of.count("nowhere"),
                    self.graphs_of.count("host"),
                )
                self._forward(group, visits)
                of_group = self._turn(group, loss, scale, visits)
                total.add(of_group.loss, of_group.metrics)
                if last and check_loss and not math.isfinite(float(total.loss)):
                    raise NotFiniteLoss
                self.gradients.close(self.head, last_group=last)
                self._backward(group, visits, last)
        if self._repeats and wanted:
            self._waiting = wanted, loss, scale
        return total

    @property
    def waiting(self) -> bool:
        """Whether a second backward is to come."""
        return self._waiting is not None

    def forget(self) -> None:
        """There will be no second backward of the last step."""
        self._waiting = None

    def backward_again(self) -> None:
        """The second backward: head, layers and embed as in the first, from the activation checkpoints it
        left. The gradients' sink receives each block's.

        A block may be updated from then on: its weights do not travel again, and a tied embedding, which
        the head reads, comes last.
        """
        assert self._waiting is not None
        (group, loss, scale), self._waiting = self._waiting, None
        self.skeleton.set_training(True)
        self._repeats = False
        self.gradients.begin_step()
        route = block_order(self.head + 1)[self.head :]
        if self.skeleton.anatomy.embed_feeds_head:
            route = (self.embed, *route)
        with self._dropout_state(), closing(self.streamer.sweep(route)) as visits:
            if self.skeleton.anatomy.embed_feeds_head:
                assert next(visits) == self.embed
            self._turn(group, loss, scale, visits)
            self.gradients.close(self.head, last_group=True)
            self._backward(group, visits, True)

    def _group_count(self, micro_batches: int) -> int:
        """Accumulation groups of a step: more micro-batches than planned, which padding can cause, make
        more groups and not larger ones, for which no memory was planned."""
        if self.groups == 1 or self.group_size is None:
            return self.groups
        return max(self.groups, -(-micro_batches // self.group_size))

    def evaluate(self, batches: Sequence[Batch], loss: Loss) -> LossSum:
        """The summed loss in evaluation mode: all micro-batches in one sweep over the layers."""
        self.skeleton.set_training(False)
        prepared = [prepare(batch, number, self.device) for number, batch in enumerate(batches)]
        total = LossSum.zero(self.device)
        for mb in self._through_layers(prepared):
            assert mb.hidden is not None
            rows = mb.hidden.flatten(0, 1)
            head = self.skeleton.head
            found = loss_sum(head, rows, mb.targets, loss, self.chunk, self.fused)
            total.add(found.loss, found.metrics)
        return total

    def logits(self, input_ids: torch.Tensor, positions: slice = slice(None)) -> torch.Tensor:
        """Logits [batch, positions, vocab], in evaluation mode. Whole: for tests, checks and sampling, not for training."""
        self.skeleton.set_training(False)
        batch = {"input_ids": input_ids, "labels": torch.full_like(input_ids, -100)}
        (logits,) = (
            self._all_logits(mb, positions)
            for mb in self._through_layers([prepare(batch, 0, self.device)])
        )
        return logits

    @torch.no_grad()
    def _all_logits(self, mb: MicroBatch, positions: slice) -> torch.Tensor:
        assert mb.hidden is not None
        hidden = mb.hidden[:, positions]
        return self.skeleton.head(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)

    def _through_layers(self, micro_batches: list[MicroBatch]) -> Iterator[MicroBatch]:
        """Run all layers without keeping boundaries, then yield each micro-batch while the head's weights are in place."""
        with closing(self.streamer.sweep(range(self.head + 1))) as visits:
            self._forward(micro_batches, visits, keep=False)
            assert next(visits) == self.head
            yield from micro_batches

    # -- parts of a step ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _forward(
        self, group: Sequence[MicroBatch], visits: Iterator[int], keep: bool = True
    ) -> None:
        """Sweep embed and the layers; keep every layer's input, and the whole graph of those that are retained."""
        assert next(visits) == self.embed
        for mb in group:
            self._seed_dropout(self.embed, mb)
            mb.hidden, mb.calls = self.skeleton.embed(mb.inputs)
        for index in range(len(self.skeleton.layers)):
            block = next(visits)
            for mb in group:
                assert mb.hidden is not None
                self._seed_dropout(block, mb)
                if keep and self.graphs_of[index] != "nowhere":
                    mb.hidden = self._retain(index, block, mb, mb.hidden)
                    continue
                output = self.skeleton.layer(index, mb.hidden, mb.calls[index])
                if keep:
                    mb.kept[index] = self.boundaries.park(mb.hidden)
                mb.hidden = output

    def _retain(self, index: int, block: int, mb: MicroBatch, hidden: torch.Tensor) -> torch.Tensor:
        """Run a layer whose graph stays until backward, on the device or in host RAM; returns its output."""
        call, saved = mb.calls[index], None
        if self.graphs_of[index] == "host":
            assert isinstance(self.boundaries, Offload)
            given = [
                self.streamer.flat(block),
                *(
                    leaf
                    for leaf in pytree.tree_leaves((call.args, call.kwargs))
                    if isinstance(leaf, torch.Tensor)
                ),
            ]
            saved = SavedTensors(
                self.boundaries, {tensor.untyped_storage().data_ptr() for tensor in given}
            )
        mb.graphs[index], output = run_for_graph(self.skeleton.layer, index, hidden, call, saved)
        if saved:
            mb.kept[index] = saved.parked
        return output

    def _turn(
        self, group: Sequence[MicroBatch], loss: Loss, scale: float, visits: Iterator[int]
    ) -> LossSum:
        """The head, forward and backward at once; leaves each micro-batch's gradient at the last layer's
        output."""
        assert next(visits) == self.head
        self.boundaries.expect(
            mb.kept[index]
            for index in reversed(range(len(self.graphs_of)))
            for mb in group
            if index in mb.kept
        )
        parameters, sums = self._of_head()

        def add(grads: list[torch.Tensor | None]) -> None:
            for into, grad in zip(sums, grads, strict=True):
                if grad is not None:
                    into.add(grad)

        total = LossSum.zero(self.device)
        for mb in group:
            self._seed_dropout(self.head, mb)
            hidden, mb.hidden = mb.hidden, mb.hidden if self._repeats else None
            assert hidden is not None
            found, grad = loss_and_gradients(
                self.skeleton.head,
                hidden.flatten(0, 1),
                mb.targets,
                loss,
                scale,
                self.chunk,
                parameters,
                add,
                sums,
                fused=self.fused,
            )
            mb.grad = grad.view_as(hidden)
            total.add(found.loss, found.metrics)
        return total

    def _of_head(self) -> tuple[list[torch.Tensor], list[Sum]]:
        """The parameters that the head computes with, a tied embedding's included, and their open sums."""
        parameters = dict(zip(self.names[self.head], self.parameters[self.head], strict=True))
        self.gradients.open(self.head)
        sums = dict(self.gradients.sums(self.head))
        if self.skeleton.anatomy.tied:
            self.gradients.open(self.embed)
            tied = {owner for _, owner in self.skeleton.anatomy.tied}
            parameters |= {
                n: p
                for n, p in zip(self.names[self.embed], self.parameters[self.embed], strict=True)
                if n in tied
            }
            sums |= self.gradients.sums(self.embed)
        return list(parameters.values()), [sums[name] for name in parameters]

    def _backward(self, group: Sequence[MicroBatch], visits: Iterator[int], last: bool) -> None:
        """Sweep the layers in reverse, then embed. A layer whose activations were not saved is recomputed
        from its activation checkpoint first."""
        for index in reversed(range(len(self.skeleton.layers))):
            block = next(visits)
            self.gradients.open(block)
            for mb in group:
                self._backward_layer(index, block, mb)
            self.gradients.close(block, last_group=last)
        assert next(visits) == self.embed
        self.gradients.open(self.embed)
        sums = self.gradients.sums(self.embed)
        for mb in group:
            if not self._repeats:
                mb.calls.clear()  # masks are large, and running the embedding again makes them anew
            self._seed_dropout(self.embed, mb)
            with torch.enable_grad(), SummingInto(self.parameters[self.embed], list(sums.values())):
                hidden, _ = self.skeleton.embed(mb.inputs)
            grads = torch.autograd.grad(
                hidden, self.parameters[self.embed], mb.grad, allow_unused=True
            )
            self.gradients.add(self.embed, dict(zip(self.names[self.embed], grads, strict=True)))
            mb.grad = None
        self.gradients.close(self.embed, last_group=last)

    def _backward_layer(self, index: int, block: int, mb: MicroBatch) -> None:
        kept = mb.kept.get(index) if self._repeats else mb.kept.pop(index, None)
        if self.graphs_of[index] != "nowhere":
            self._differentiate(block, mb, mb.graphs.pop(index))
            return
        self._seed_dropout(block, mb)
        graph = run_for_graph(
            self.skeleton.layer_again, index, self.boundaries.take(kept), mb.calls[index]
        )[0]  # backward needs the room
        self._differentiate(block, mb, graph)
        self.boundaries.release(kept)

    def _differentiate(self, block: int, mb: MicroBatch, graph: Graph) -> None:
        """Back-propagate through a layer, into its parameters' sums and to its input."""
        grads = graph.gradients(self.parameters[block], mb.grad)
        mb.grad = grads[0]
        self.gradients.add(block, dict(zip(self.names[block], grads[1:], strict=True)))

    # -- dropout --------------------------------------------------------------------------------------------------------------

    def _seed_dropout(self, block: int, mb: MicroBatch) -> None:
        """Seed the generators: alike for a layer's forward and its recomputation, otherwise for every run's
        seed, step, layer and micro-batch.

        Also without dropout, since it costs microseconds: what else a family draws (a router's jitter, say)
        is replayed too.
        """
        if not self.skeleton.model.training:
            return  # evaluation draws nothing, and must leave the caller's random state alone
        seed = mix(self.seed, self.step, block, mb.number)
        torch.default_generator.manual_seed(seed)
        if (
            self.device.type == "cuda"
        ):  # this GPU alone: `torch.manual_seed` would reseed the others
            torch.cuda.default_generators[self.device.index].manual_seed(seed)

    @contextmanager
    def _dropout_state(self) -> Iterator[None]:
        """Leave the caller's random state as it was."""
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            yield


def mix(*numbers: int) -> int:
    """A 63-bit seed from several integers: splitmix64's finaliser over their running sum (Steele et al.,
    OOPSLA 2014)."""
    state = 0
    for number in numbers:
        state = (state + (number & 0xFFFFFFFFFFFFFFFF) + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1
