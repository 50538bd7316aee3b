"""One step's passes over the model: sweeps of forward and backward around autograd, in which each
layer keeps an activation checkpoint or its saved activations.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext

import torch
from torch import nn
from torch.utils import _pytree as pytree

from megatrain.engine.activations.offload import Boundaries, Offload
from megatrain.engine.batches import Batch, MicroBatch, cut, prepare
from megatrain.engine.gradients import Gradients
from megatrain.engine.graphs import Graph, SavedTensors, run_for_graph
from megatrain.engine.head import LossSum, loss_and_gradients, loss_sum, target_logprobs
from megatrain.engine.products import Sum, SummingInto
from megatrain.engine.routing import Balancer
from megatrain.engine.streamer import Streamer
from megatrain.losses import IGNORE, Loss, Targets
from megatrain.models.skeleton import Skeleton
from megatrain.schedule import block_order, graphs_of_layers
from megatrain.settings import Settings


class NotFiniteLoss(Exception):
    """The loss is not finite, and nothing was updated yet."""


class Passes:
    """Runs sweeps over the skeleton's modules, whose parameters it binds to the streamer's slots.

    Args:
        boundaries: keeps activation checkpoints between forward and backward.
        balancer: of a mixture whose routers are balanced. A step is one group then.
        seed: of dropout.

    Attributes:
        step: counts steps, for dropout seeds.
        waiting: for the second pass of two-pass clipping: micro-batches, loss and scale of the
            first. None: there is none to come.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        streamer: Streamer,
        gradients: Gradients,
        boundaries: Boundaries,
        settings: Settings,
        seed: int,
        balancer: Balancer | None = None,
    ) -> None:
        self.skeleton, self.streamer, self.gradients = skeleton, streamer, gradients
        self.boundaries, self.settings, self.seed = boundaries, settings, seed
        self.balancer = balancer
        self.device, self.step = streamer.compute.device, 0
        layers, blocks = len(skeleton.layers), skeleton.anatomy.blocks
        self.graphs_of = graphs_of_layers(layers, settings.retained, settings.retained_on_host)
        self.embed, self.head = 0, layers + 1
        self.parameters = [skeleton.bind(b, streamer.flat(b.index)) for b in blocks]
        self.names = [[t.name for t in block.layout.tensors] for block in blocks]
        self.waiting: tuple[Sequence[MicroBatch], Loss, float] | None = None
        self._repeats = False  # this backward runs twice, from the same activation checkpoints

    # -- a whole step -----------------------------------------------------------------------------

    def forward_backward(
        self, batches: Sequence[Batch], loss: Loss, scale: float, *, check_loss: bool
    ) -> LossSum:
        """Gradients of `scale` times the summed loss, which is returned.

        The gradients' sink receives each block's as its download is queued. With two-pass clipping
        they are only measured, and what the second pass needs stays in `waiting`.

        Raises:
            NotFiniteLoss: with `check_loss`, before any gradient is complete.
        """
        self.skeleton.set_training(True)
        self._repeats = self.settings.second_backward
        self.gradients.begin_step(only_measured=self._repeats)
        balancer = self.balancer
        prepared = self._prepare(batches, marks_real=balancer is not None)
        # the others would add nothing to the loss
        wanted = [mb for mb in prepared if len(mb.targets) or balancer]
        groups = self.settings.groups
        if groups > 1 and self.settings.group_size is not None:
            # more micro-batches than planned, as padding can cause, make more groups and not larger
            # ones, for which no memory was planned
            groups = max(groups, -(-len(wanted) // self.settings.group_size))
        grouped = cut(wanted, groups)
        total = LossSum.zero(self.device)
        # one sweep over all groups: the next one's first uploads run beside this one's backward
        route = block_order(self.head + 1) * len(grouped)
        with self._in_step(), closing(self.streamer.sweep(route)) as visits:
            for number, group in enumerate(grouped):
                last = number == len(grouped) - 1
                self.boundaries.begin_group(
                    [mb.tokens for mb in group],
                    self.graphs_of.count("nowhere"),
                    self.graphs_of.count("host"),
                )
                if balancer:
                    balancer.begin(group)
                self._forward(group, visits)
                if balancer:
                    balancer.turn()
                of_group = self._turn(group, loss, scale, visits)
                total.add(of_group.loss, of_group.metrics)
                # not later: a gradient that is complete may be applied at once
                if last and check_loss and not math.isfinite(float(total.loss)):
                    raise NotFiniteLoss
                self.gradients.close(self.head, last_group=last)
                self._backward(group, visits, last)
        if self._repeats and wanted:
            self.waiting = wanted, loss, scale
        return total

    def backward_again(self) -> None:
        """The second backward: head, layers and embed as in the first, from the activation
        checkpoints it left. The gradients' sink receives each block's.

        A block may be updated as soon as the sink has its gradient: its weights do not travel
        again, and a tied embedding, which the head reads, comes last.
        """
        assert self.waiting is not None
        (group, loss, scale), self.waiting = self.waiting, None
        self.skeleton.set_training(True)
        self._repeats = False
        self.gradients.begin_step()
        route = block_order(self.head + 1)[self.head :]
        if self.skeleton.anatomy.embed_feeds_head:
            route = (self.embed, *route)
        with self._in_step(), closing(self.streamer.sweep(route)) as visits:
            if self.skeleton.anatomy.embed_feeds_head:
                assert next(visits) == self.embed
            self._turn(group, loss, scale, visits)
            self.gradients.close(self.head, last_group=True)
            self._backward(group, visits, True)

    def evaluate(self, batches: Sequence[Batch], loss: Loss) -> LossSum:
        """The summed loss in evaluation mode: all micro-batches in one sweep over the layers."""
        self.skeleton.set_training(False)
        prepared = self._prepare(batches)
        total = LossSum.zero(self.device)
        chunk, fused = self.settings.head_chunk_tokens, self.settings.compile
        for mb, hidden in self._through_layers(prepared):
            rows = hidden.flatten(0, 1)
            found = loss_sum(self.skeleton.head, rows, mb.targets, loss, chunk, fused)
            total.add(found.loss, found.metrics)
        return total

    def logprobs(
        self, batches: Sequence[Batch], greedy: bool, targets: Sequence[Targets] | None = None
    ) -> list[tuple[Targets, torch.Tensor, torch.Tensor]]:
        """Each micro-batch's targets and what `target_logprobs` says of them, in one sweep.

        targets: others than the labels show; a position may have several.
        """
        self.skeleton.set_training(False)
        prepared, found = self._prepare(batches), []
        for mb, given in zip(prepared, targets or (), strict=targets is not None):
            mb.targets = given.to(self.device)
        chunk, fused = self.settings.head_chunk_tokens, self.settings.compile
        for mb, hidden in self._through_layers(prepared):
            rows = hidden.flatten(0, 1)
            said = target_logprobs(self.skeleton.head, rows, mb.targets, chunk, fused, greedy)
            found.append((mb.targets, *said))
        return found

    @torch.no_grad()
    def logits(self, input_ids: torch.Tensor, positions: slice = slice(None)) -> torch.Tensor:
        """Logits [batch, positions, vocab], in evaluation mode, whole: not for training."""
        self.skeleton.set_training(False)
        batch = {"input_ids": input_ids, "labels": torch.full_like(input_ids, IGNORE)}
        (logits,) = [
            self.skeleton.head(rows.flatten(0, 1)).view(*rows.shape[:2], -1)
            for _, hidden in self._through_layers(self._prepare([batch]))
            for rows in [hidden[:, positions]]
        ]
        return logits

    def _through_layers(
        self, micro_batches: list[MicroBatch]
    ) -> Iterator[tuple[MicroBatch, torch.Tensor]]:
        """Run all layers, keeping nothing for a backward; then yield each micro-batch with its last
        hidden states, while the head's weights are in place."""
        with closing(self.streamer.sweep(range(self.head + 1))) as visits:
            self._forward(micro_batches, visits, keep=False)
            assert next(visits) == self.head
            for mb in micro_batches:
                assert mb.hidden is not None
                yield mb, mb.hidden

    # -- parts of a step --------------------------------------------------------------------------

    def _prepare(self, batches: Sequence[Batch], marks_real: bool = False) -> list[MicroBatch]:
        packed = any("position_ids" in batch for batch in batches)
        tells = packed and self.skeleton.told_documents(self.device)
        return [
            prepare(batch, number, self.device, marks_real=marks_real, tells_documents=tells)
            for number, batch in enumerate(batches)
        ]

    @torch.no_grad()
    def _forward(
        self, group: Sequence[MicroBatch], visits: Iterator[int], keep: bool = True
    ) -> None:
        """Sweep embed and layers; `keep` each layer's input, or the graph of a retained one."""
        assert next(visits) == self.embed
        for mb in group:
            self._seed_dropout(self.embed, mb)
            mb.hidden, mb.calls = self.skeleton.embed(mb.inputs)
        for index in range(len(self.skeleton.layers)):
            block = next(visits)
            for mb in group:
                assert mb.hidden is not None
                self._begin_layer(block, mb)
                if keep and self.graphs_of[index] != "nowhere":
                    mb.hidden = self._retain(index, block, mb, mb.hidden)
                    continue
                output = self.skeleton.layer(index, mb.hidden, mb.calls[index])
                if keep:
                    mb.kept[index] = self.boundaries.park(mb.hidden)
                mb.hidden = output
            if keep and self.balancer:
                self.balancer.end_layer()

    def _retain(self, index: int, block: int, mb: MicroBatch, hidden: torch.Tensor) -> torch.Tensor:
        """Run a layer whose graph stays until backward, on the device or in host RAM; returns its
        output."""
        call, saved = mb.calls[index], None
        if self.graphs_of[index] == "host":
            assert isinstance(self.boundaries, Offload)
            constants = self.balancer.constants if self.balancer else ()
            own = (self.streamer.flat(block), call.args, call.kwargs, constants)
            given = pytree.tree_leaves(own)
            tensors = (leaf for leaf in given if isinstance(leaf, torch.Tensor))
            stays = {tensor.untyped_storage().data_ptr() for tensor in tensors}
            saved = SavedTensors(self.boundaries, stays)
        mb.graphs[index], output = run_for_graph(self.skeleton.layer, index, hidden, call, saved)
        if saved:
            mb.kept[index] = saved.parked
        return output

    def _turn(
        self, group: Sequence[MicroBatch], loss: Loss, scale: float, visits: Iterator[int]
    ) -> LossSum:
        """The head, forward and backward at once; leaves each micro-batch's gradient at the last
        layer's output."""
        assert next(visits) == self.head
        layers = reversed(range(len(self.graphs_of)))
        # what backward needs first starts on its way back while the head computes
        self.boundaries.expect(mb.kept[i] for i in layers for mb in group if i in mb.kept)
        parameters, sums = self._of_head()
        total = LossSum.zero(self.device)
        for mb in group:
            self._seed_dropout(self.head, mb)
            hidden = mb.hidden
            assert hidden is not None
            if not self._repeats:  # else the second backward starts from it again
                mb.hidden = None
            found, grad = loss_and_gradients(
                self.skeleton.head,
                hidden.flatten(0, 1),
                mb.targets,
                loss,
                scale,
                self.settings.head_chunk_tokens,
                parameters,
                sums,
                fused=self.settings.compile,
            )
            mb.grad = grad.view_as(hidden)
            total.add(found.loss, found.metrics)
        return total

    def _of_head(self) -> tuple[list[nn.Parameter], list[Sum]]:
        """The parameters that the head computes with, a tied embedding's included, and their open
        sums."""
        tied = {owner for _, owner in self.skeleton.anatomy.tied}
        parameters, sums = [], []
        for block in (self.head, self.embed) if tied else (self.head,):
            self.gradients.open(block)
            open_sums = self.gradients.sums(block)
            for name, parameter in zip(self.names[block], self.parameters[block], strict=True):
                if block == self.head or name in tied:
                    parameters.append(parameter)
                    sums.append(open_sums[name])
        return parameters, sums

    def _backward(self, group: Sequence[MicroBatch], visits: Iterator[int], last: bool) -> None:
        """Sweep the layers in reverse, then embed.

        A layer whose activations were not saved is recomputed from its activation checkpoint.
        """
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
                mb.calls.clear()  # masks are large, and the embedding makes them anew
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
        self._begin_layer(block, mb)
        if self.graphs_of[index] != "nowhere":
            mb.kept.pop(index, None)  # its graph takes and releases what it saved
            self._differentiate(block, mb, mb.graphs.pop(index))
            return
        kept = mb.kept[index] if self._repeats else mb.kept.pop(index)
        graph = run_for_graph(
            self.skeleton.layer_again, index, self.boundaries.take(kept), mb.calls[index]
        )[0]  # not the output: backward needs the room
        self._differentiate(block, mb, graph)
        self.boundaries.release(kept)  # not before: the graph may have saved it where it arrived

    def _differentiate(self, block: int, mb: MicroBatch, graph: Graph) -> None:
        """Back-propagate through a layer, into its parameters' sums and to its input."""
        grads = graph.gradients(self.parameters[block], mb.grad)
        mb.grad = grads[0]
        self.gradients.add(block, dict(zip(self.names[block], grads[1:], strict=True)))

    # -- what layers draw and count ---------------------------------------------------------------

    def _begin_layer(self, block: int, mb: MicroBatch) -> None:
        """Before a layer runs on a micro-batch, or its gradients do."""
        self._seed_dropout(block, mb)
        if self.balancer and mb.real is not None:
            self.balancer.look_at(mb)

    def _seed_dropout(self, block: int, mb: MicroBatch) -> None:
        """Seed the generators: equally for a layer's forward and its recomputation, otherwise by
        the run's seed, step, layer and micro-batch.

        Also without dropout, since it costs microseconds: what else a family draws (a router's
        jitter, say) is replayed too.
        """
        if not self.skeleton.model.training:
            return  # evaluation draws nothing, and must leave the caller's random state alone
        seed = mix(self.seed, self.step, block, mb.number)
        torch.default_generator.manual_seed(seed)
        # this GPU alone: `torch.manual_seed` would reseed the others
        if self.device.type == "cuda":
            torch.cuda.default_generators[self.device.index].manual_seed(seed)

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """Leaves the caller's random state as it was, and routers uncounted outside."""
        devices = [self.device] if self.device.type == "cuda" else []
        balancing = self.balancer.balancing() if self.balancer else nullcontext()
        with torch.random.fork_rng(devices=devices), balancing:
            yield


def mix(*numbers: int) -> int:
    """A 63-bit seed from several integers: splitmix64's finaliser over their running sum (Steele
    et al., OOPSLA 2014)."""
    state = 0
    for number in numbers:
        state = (state + (number & 0xFFFFFFFFFFFFFFFF) + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1
