"""One step's passes over the model: sweeps of forward and backward around autograd, in which each
layer keeps an activation checkpoint or its saved activations.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import nn

from megatrain.engine.activations.offload import Boundaries
from megatrain.engine.batches import Batch, MicroBatch, cut
from megatrain.engine.forward import ForwardPasses
from megatrain.engine.gradients import Gradients
from megatrain.engine.graphs import Graph, run_for_graph
from megatrain.engine.head import loss_and_gradients
from megatrain.engine.objective import Objective
from megatrain.engine.products import Sum, SummingInto
from megatrain.engine.routing import Balancer
from megatrain.engine.streamer import Streamer
from megatrain.engine.trade import HeadTrade
from megatrain.losses import Tally
from megatrain.models.skeleton import Skeleton
from megatrain.schedule import block_order
from megatrain.settings import Settings
from megatrain.world import ALONE, World


class NotFiniteLoss(Exception):
    """The loss is not finite, and nothing was updated yet."""


class Passes(ForwardPasses):
    """Runs sweeps forward and backward. Args and further attributes: as `ForwardPasses`.

    Attributes:
        names: of every block, its trained tensors.
        waiting: for the second pass of two-pass clipping: micro-batches and objective of the
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
        world: World = ALONE,
        trade: HeadTrade | None = None,
    ) -> None:
        super().__init__(skeleton, streamer, boundaries, settings, seed, balancer, world, trade)
        self.gradients = gradients
        blocks = skeleton.anatomy.blocks
        self.names = [[t.name for t in block.layout.trained.tensors] for block in blocks]
        self.waiting: tuple[Sequence[MicroBatch], Objective] | None = None
        self._repeats = False  # this backward runs twice, from the same activation checkpoints

    # -- a whole step -----------------------------------------------------------------------------

    def forward_backward(
        self, batches: Sequence[Batch], objective: Objective, *, check_loss: bool
    ) -> Tally[torch.Tensor]:
        """Gradients of the objective, whose sums are returned.

        The gradients' sink receives each block's as its download is queued. With two-pass clipping
        they are only measured, and what the second pass needs stays in `waiting`.

        Raises:
            NotFiniteLoss: with `check_loss`, before any gradient is complete.
        """
        self._set_training(objective)
        self._repeats = self.settings.second_backward
        self.gradients.begin_step(only_measured=self._repeats)
        balancer = self.balancer
        prepared = self._prepare(batches, objective.of_sequences, balancer is not None)
        # the others would add nothing to the loss
        wanted = [mb for mb in prepared if mb.learns or balancer]
        most = max(self.world.every(len(wanted)))
        groups = 1 if objective.whole_step else self.settings.groups
        if groups > 1 and self.settings.group_size is not None:
            # more micro-batches than planned, as padding can cause, make more groups and not larger
            # ones, for which no memory was planned
            groups = max(groups, -(-most // self.settings.group_size))
        grouped = cut(wanted, groups)
        # ranks have as many groups as the one with most; what lacks micro-batches takes part
        grouped += [[]] * (min(groups, most) - len(grouped))
        total = Tally[torch.Tensor]()
        # one sweep over all groups: the next one's first uploads run beside this one's backward
        route = block_order(self.head + 1, self.first) * len(grouped)
        with self._in_step(), closing(self.streamer.sweep(route)) as visits:
            for number, group in enumerate(grouped):
                last = number == len(grouped) - 1
                self.boundaries.begin_group(
                    [mb.tokens for mb in group if mb.trains],
                    self.graphs_of.count("nowhere"),
                    self.graphs_of.count("host"),
                )
                if balancer:
                    balancer.begin(group)
                self._forward(group, visits)
                if balancer:
                    balancer.turn(self.world)
                total.add(self._turn(group, objective, visits))
                # not later: a gradient that is complete may be applied at once
                if last and check_loss:
                    found = objective.over_ranks(total, self.world)
                    if not math.isfinite(objective.mean_loss(found)):
                        raise NotFiniteLoss
                self.gradients.close(self.head, last_group=last)
                self._backward(group, visits, last)
        if self._repeats and grouped:
            self.waiting = wanted, objective
        return objective.over_ranks(total, self.world)

    def backward_again(self) -> None:
        """The second backward: head, layers and embed as in the first, from the activation
        checkpoints it left. The gradients' sink receives each block's.

        A block may be updated as soon as the sink has its gradient: its weights do not travel
        again, and a tied embedding, which the head reads, comes last.
        """
        assert self.waiting is not None
        (group, objective), self.waiting = self.waiting, None
        self._set_training(objective)
        self._repeats = False
        self.gradients.begin_step()
        route = block_order(self.head + 1, self.first)[self.head :]
        if self.skeleton.anatomy.embed_feeds_head:
            route = (self.embed, *route)
        with self._in_step(), closing(self.streamer.sweep(route)) as visits:
            if self.skeleton.anatomy.embed_feeds_head:
                assert next(visits) == self.embed
            self._turn(group, objective, visits)
            self.gradients.close(self.head, last_group=True)
            self._backward(group, visits, True)

    # -- parts of a step --------------------------------------------------------------------------

    def _set_training(self, objective: Objective) -> None:
        """Training mode, but for losses over sequences: a reference without dropout is no match for
        a model with it, so there is none (as in TRL)."""
        self.skeleton.set_training(objective.of_sequences is None)

    def _turn(
        self, group: Sequence[MicroBatch], objective: Objective, visits: Iterator[int]
    ) -> Tally[torch.Tensor]:
        """The head, forward and backward at once; leaves each micro-batch's gradient at the last
        layer's output."""
        assert next(visits) == self.head
        layers = reversed(range(len(self.graphs_of)))
        # what backward needs first starts on its way back while the head computes
        self.boundaries.expect(mb.kept[i] for i in layers for mb in group if i in mb.kept)
        parameters, sums = self._of_head()
        total = Tally[torch.Tensor]()
        (loss, scale), (chunk, fused) = objective.of_tokens, self._chunks
        for part in objective.parts(group):
            if objective.of_sequences:
                total.add(self._weigh(part, objective))
            for mb in (mb for mb in part if mb.trains):
                self._seed_dropout(self.head, mb)
                hidden = mb.hidden
                assert hidden is not None
                if not self._repeats:  # else the second backward starts from it again
                    mb.hidden = None
                rows = hidden.flatten(0, 1), mb.targets
                given = self.skeleton.head, *rows, loss, scale, chunk, parameters, sums, fused
                found, grad = loss_and_gradients(*given, objective.values)
                mb.grad = grad.view_as(hidden)
                if not objective.of_sequences:
                    total.add(objective.tally(found.loss, found.metrics))
        return total

    def _weigh(self, part: Sequence[MicroBatch], objective: Objective) -> Tally[torch.Tensor]:
        """Give targets the weights that make a token-wise loss of one over sequences."""
        values = []
        for mb in part:
            assert mb.hidden is not None
            values.append(self.target_values(mb, mb.hidden, objective.values))
            if not mb.trains and not self._repeats:
                mb.hidden = None

        def judge() -> Tally[torch.Tensor]:
            if not objective.whole_step:
                return objective.judge(values[0], part[0].targets.examples)
            answers = self.answers(part, values)
            return objective.judge(answers.sums, answers.examples)

        found, weights = objective.weigh(values, judge)
        for mb, of_targets in zip(part, weights, strict=True):
            mb.targets = replace(mb.targets, weights=of_targets)
        return found

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
        """Sweep the layers in reverse to the first that is trained, then embed if that is.

        A layer whose activations were not saved is recomputed from its activation checkpoint.
        """
        group = [mb for mb in group if mb.trains]
        for index in reversed(range(max(self.first - 1, 0), len(self.skeleton.layers))):
            block = next(visits)
            self.gradients.open(block)
            for mb in group:
                self._backward_layer(index, block, mb)
            self.gradients.close(block, last_group=last)
        if self.first > self.embed:
            return
        assert next(visits) == self.embed
        self.gradients.open(self.embed)
        sums = self.gradients.sums(self.embed)
        for mb in group:
            if not self._repeats:
                mb.calls.clear()  # masks are large, and the embedding makes them anew
            self._seed_dropout(self.embed, mb)
            with torch.enable_grad(), SummingInto(self.parameters[self.embed], list(sums.values())):
                hidden, _ = self._embed(mb)
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
        ends = block == self.first
        grads = graph.gradients(self.parameters[block], mb.grad, ends_here=ends)
        mb.grad = grads[0]
        self.gradients.add(block, dict(zip(self.names[block], grads[1:], strict=True)))

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """Leaves the caller's random state as it was, and routers uncounted outside."""
        devices = [self.device] if self.device.type == "cuda" else []
        balancing = self.balancer.balancing() if self.balancer else nullcontext()
        with torch.random.fork_rng(devices=devices), balancing:
            yield
