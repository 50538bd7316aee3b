"""One step's passes over the model: sweeps of forward and backward around autograd."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatrain.engine.activations import Checkpoints, Offload
from megatrain.engine.batches import Batch, MicroBatch, answers_of, cut, prepare
from megatrain.engine.gradients import Gradients
from megatrain.engine.graphs import Graph, SavedTensors, run_for_graph
from megatrain.engine.head import Head
from megatrain.engine.objective import Objective, Peers
from megatrain.engine.products import Sum, SummingInto
from megatrain.engine.rollout.draw import mix
from megatrain.engine.routing import Balancer
from megatrain.engine.streamer import Streamer
from megatrain.heartbeat import TOKENS_SWEPT, beat
from megatrain.losses import Tally
from megatrain.models.skeleton import Skeleton
from megatrain.models.transforms.kept_attention import keeping_attention, reusing_attention
from megatrain.schedule import block_order, graphs_of_layers
from megatrain.settings import Settings


class NotFiniteLoss(Exception):
    """The loss is not finite, and nothing was updated yet."""


@dataclass(eq=False)
class Passes:
    """Sweeps over the skeleton's modules, whose parameters are bound to the streamer's slots."""

    skeleton: Skeleton
    streamer: Streamer
    gradients: Gradients
    checkpoints: Checkpoints
    settings: Settings
    seed: int  # of dropout
    balancer: Balancer | None  # of a mixture whose routers are balanced: a step is one group then
    peers: Peers

    def __post_init__(self) -> None:
        skeleton, streamer, settings = self.skeleton, self.streamer, self.settings
        self.device = streamer.compute.device
        self.step = 0  # counts steps, for dropout seeds
        layers, blocks = len(skeleton.layers), skeleton.anatomy.blocks
        self.first = skeleton.anatomy.first_trained  # the block where backward ends
        self.graphs_of = graphs_of_layers(
            layers, settings.retained, settings.retained_on_host, self.first
        )
        self.keeps = settings.keeps(self.graphs_of)
        self.embed, self.head = 0, layers + 1
        self.parameters = [skeleton.bind(b, streamer.flat(b.index)) for b in blocks]
        self.names = [[t.name for t in block.layout.trained.tensors] for block in blocks]
        self.order = block_order(layers + 2, self.first)
        self.tied = skeleton.anatomy.embed_feeds_head
        stored = settings.stored(layers, self.first, self.tied)
        # for the second pass of two-pass clipping, through these blocks, if it is to come
        self.twice = [block for block in self.order[self.head :] if block not in stored]
        self.waiting: tuple[Sequence[MicroBatch], Objective] | None = None
        self._again: Sequence[int] = ()  # of the blocks of this pass, those of a later one

    # -- a whole step -----------------------------------------------------------------------------

    def forward_backward(
        self, batches: Sequence[Batch], objective: Objective, *, check_loss: bool
    ) -> Tally[Tensor]:
        """Gradients of the objective, whose sums are returned.

        The gradients' sink receives each block's as its download is queued. Those of `twice` are
        only measured, and what the second pass needs stays in `waiting`. With `check_loss`
        NotFiniteLoss is raised before any gradient is complete."""
        # a reference without dropout is no match for a model with it: there is none (as in TRL)
        self.skeleton.set_training(objective.of_sequences is None)
        self._again = self.twice
        self.gradients.begin_step(only_measured=self._again)
        balancer = self.balancer
        given = self.prepare(batches, loss=objective.of_sequences, marks_real=bool(balancer))
        wanted = [mb for mb in given if mb.learns or balancer]  # others add nothing to the loss
        grouped = self._groups(wanted, 1 if objective.whole_step else self.settings.groups)
        total = Tally[Tensor]()
        # one sweep over all groups: the next one's first uploads run beside this one's backward
        route = self.order * len(grouped)
        with self._in_step(), closing(self.streamer.sweep(route)) as visits:
            for number, group in enumerate(grouped):
                last = number == len(grouped) - 1
                self.checkpoints.begin_group([mb.tokens for mb in group if mb.trains])
                if balancer:
                    balancer.begin(group)
                self._forward(group, visits)
                if balancer:
                    balancer.turn(self.peers)
                total.add(self._turn(group, objective, visits))
                # not later: a gradient that is complete may be applied at once
                if last and check_loss:
                    found = self.peers.total(objective, total)
                    if not math.isfinite(objective.mean_loss(found)):
                        raise NotFiniteLoss
                self.gradients.close(self.head, last_group=last)
                self._backward(group, visits, self.order[self.head + 1 :], last)
        if self._again and grouped:
            self.waiting = wanted, objective
        return self.peers.total(objective, total)

    def _groups(self, wanted: Sequence[MicroBatch], groups: int) -> list[Sequence[MicroBatch]]:
        most = max(self.peers.all_gather(len(wanted)))
        if groups > 1 and self.settings.group_size is not None:
            # more micro-batches than planned, as padding can cause, make more groups and not larger
            # ones, for which no memory was planned
            groups = max(groups, -(-most // self.settings.group_size))
        grouped = cut(wanted, groups)
        # as many groups as the process with most, or collectives would not meet: one that lacks
        # micro-batches takes part
        return [*grouped, *[[]] * (min(groups, most) - len(grouped))]

    def backward_again(self) -> None:
        """The second backward through `twice`, from the checkpoints and the gradients at the border
        that the first has left.

        A block may be updated as soon as the sink has its gradient: its weights do not travel
        again, and a tied embedding, which the head reads, comes last.
        """
        assert self.waiting is not None
        (group, objective), self.waiting = self.waiting, None
        self.skeleton.set_training(objective.of_sequences is None)
        self._again = ()
        self.gradients.begin_step()
        whole = self.head in self.twice
        route = [self.embed, *self.twice] if whole and self.tied else self.twice
        with self._in_step(), closing(self.streamer.sweep(route)) as visits:
            if route != self.twice:
                assert next(visits) == self.embed
            if whole:
                self._turn(group, objective, visits)
                self.gradients.close(self.head, last_group=True)
            else:
                self._prefetch(group)
            self._backward(group, visits, self.twice[whole:], True)

    # -- parts of a step --------------------------------------------------------------------------

    def _turn(
        self, group: Sequence[MicroBatch], objective: Objective, visits: Iterator[int]
    ) -> Tally[Tensor]:
        """Run the head forward and backward; leaves each micro-batch's gradient at its input."""
        assert next(visits) == self.head
        self._prefetch(group)  # what backward needs first comes back while the head computes
        parameters, sums = self._of_head()
        total, (loss, scale) = Tally[Tensor](), objective.of_tokens
        # a loss takes one micro-batch at a time, or all
        for part in [group] if objective.whole_step else [[mb] for mb in group]:
            if objective.of_sequences:
                total.add(self._weigh(part, objective))
            for mb in (mb for mb in part if mb.trains):
                self._seed_dropout(self.head, mb)
                hidden = mb.states
                if self.head not in self._again:
                    mb.hidden = None
                given = hidden.flatten(0, 1), mb.targets, loss, scale, parameters, sums
                found, grad = self.outputs.loss_and_gradients(*given, objective.values)
                mb.grad = grad.view_as(hidden)
                if not objective.of_sequences:
                    total.add(found)
        return total

    def _weigh(self, part: Sequence[MicroBatch], objective: Objective) -> Tally[Tensor]:
        """Give targets the weights that make a token-wise loss of one over sequences."""
        leaves = []
        for mb in part:
            rows = mb.states.flatten(0, 1)
            values, mb.targets = objective.first_pass(self.outputs, rows, mb.targets)
            leaves.append(values.requires_grad_())
            if not (mb.trains or self.head in self._again):
                mb.hidden = None
        with torch.enable_grad():
            if objective.whole_step:
                answers = answers_of(part, leaves, self.peers, self.device)
                found = objective.judge(answers.sums, answers.examples)
            else:
                found = objective.judge(leaves[0], part[0].targets.examples)
            weights = objective.derivatives(found, leaves)
        for mb, of_targets in zip(part, weights, strict=True):
            mb.targets = replace(mb.targets, weights=of_targets)
        return found.detached()

    def _of_head(self) -> tuple[list[nn.Parameter], list[Sum]]:
        """The head's parameters, a tied embedding's included, and their open sums."""
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

    def _backward(
        self, group: Sequence[MicroBatch], visits: Iterator[int], blocks: Sequence[int], last: bool
    ) -> None:
        """Sweep layers in reverse, then embed if it is among the `blocks`."""
        group = [mb for mb in group if mb.trains]
        for block in blocks:
            assert next(visits) == block
            self.gradients.open(block)
            for mb in group:
                if block in self.twice[:1]:
                    mb.at_border(bool(self._again))
                self._backward_block(block, mb)
            self.gradients.close(block, last_group=last)

    def _prefetch(self, group: Sequence[MicroBatch]) -> None:
        layers = reversed(range(len(self.graphs_of)))
        self.checkpoints.prefetch(mb.kept[i] for i in layers for mb in group if i in mb.kept)

    def _backward_block(self, block: int, mb: MicroBatch) -> None:
        if block == self.embed:
            if not self._again:
                mb.calls.clear()  # masks are large
            if not mb.ends:
                self._embed(mb, True)
            self.gradients.add(block, mb.gradients_of_embed(self.parameters[block]))
            return
        index = block - 1
        self._begin_layer(block, mb)
        if self.graphs_of[index] != "nowhere":
            mb.kept.pop(index, None)  # its graph takes and releases what it saved
            self._differentiate(block, mb, mb.graphs.pop(index))
            return
        # it is recomputed from its activation checkpoint
        kept = mb.kept[index] if block in self._again else mb.kept.pop(index)
        hidden, *attended = self.checkpoints.restore(kept)
        with reusing_attention(attended):
            # not the output: backward needs the room
            graph = run_for_graph(self.skeleton.layer_again, index, hidden, mb.calls[index])[0]
        self._differentiate(block, mb, graph)
        self.checkpoints.free(kept)  # not before: the graph may have saved it where it arrived

    def _differentiate(self, block: int, mb: MicroBatch, graph: Graph) -> None:
        """Back-propagate through a layer, into its parameters' sums and to its input."""
        ends = block == self.first
        grads = graph.gradients(self.parameters[block], mb.grad, ends_here=ends)
        mb.grad = grads[0]
        mb.keep_side_gradient(block - 1)
        self.gradients.add(block, grads[1:])

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """Leave the caller's random state as it was, and routers uncounted outside."""
        devices = [self.device] if self.device.type == "cuda" else []
        balancing = self.balancer.balancing() if self.balancer else nullcontext()
        with torch.random.fork_rng(devices=devices), balancing:
            yield

    # -- parts of a sweep -------------------------------------------------------------------------

    def prepare(self, batches: Sequence[Batch], **options: Any) -> list[MicroBatch]:
        """`batches.prepare` for this model."""
        return prepare(batches, self.skeleton, self.peers, self.device, **options)

    @property
    def outputs(self) -> Head:
        """The end of the model."""
        fused = self.settings.compile or self.settings.fused_loss
        return Head(self.skeleton.head, self.settings.head_chunk_tokens, bool(fused))

    @torch.no_grad()
    def _forward(
        self, group: Sequence[MicroBatch], visits: Iterator[int], keep: bool = True
    ) -> None:
        """Sweep embed and layers. keep: inputs or graphs of layers, for backward."""
        assert next(visits) == self.embed
        # towers do not run again for the embedding's backward
        retains = keep and self.skeleton.findings.seeing and not (self.first or self._again)
        for mb in group:
            self._embed(mb, bool(retains and mb.trains))
            mb.enter_layers()
        for index in range(len(self.skeleton.layers)):
            block = next(visits)
            for mb in group:
                self._begin_layer(block, mb)
                beat(TOKENS_SWEPT, mb.tokens)
                where = self.graphs_of[index] if keep and mb.trains else "unneeded"
                if where in ("device", "host"):
                    mb.hidden = self._retain(index, block, mb, mb.states)
                    continue
                with keeping_attention(keep and self.keeps[index]) as attended:
                    output = self.skeleton.layer(index, mb.states, mb.calls[index])
                if where == "nowhere":
                    mb.kept[index] = self.checkpoints.save([mb.states, *attended])
                attended.clear()  # the next layer needs the room
                mb.hidden = output
            if keep and self.balancer:
                self.balancer.end_layer()

    def _embed(self, mb: MicroBatch, graph: bool) -> None:
        self._seed_dropout(self.embed, mb)
        block = self.embed
        given = self.parameters[block], self.names[block], partial(self.gradients.sums, block)
        # not of towers, whose layers run again where no mode is active
        summing = SummingInto.later(*given, self.skeleton.findings.seeing)
        with torch.set_grad_enabled(graph), summing if graph else nullcontext():
            mb.receive(*self.skeleton.embed(mb.inputs), graph)

    def _retain(self, index: int, block: int, mb: MicroBatch, hidden: Tensor) -> Tensor:
        """The output of a layer whose graph stays until backward, on the device or in RAM."""
        call, saved = mb.calls[index], None
        if self.graphs_of[index] == "host":
            assert isinstance(self.checkpoints, Offload)
            constants = self.balancer.constants if self.balancer else ()
            saved = SavedTensors(self.checkpoints, self.streamer.flat(block), call, constants)
        mb.graphs[index], output = run_for_graph(self.skeleton.layer, index, hidden, call, saved)
        if saved:
            mb.kept[index] = saved.sent
        return output

    # -- what layers draw and count ---------------------------------------------------------------

    def _begin_layer(self, block: int, mb: MicroBatch) -> None:
        """Before a layer runs on a micro-batch, or its gradients do."""
        self._seed_dropout(block, mb)
        if self.balancer and mb.real is not None:
            self.balancer.look_at(mb)

    def _seed_dropout(self, block: int, mb: MicroBatch) -> None:
        """Seed the generators by run, step, layer and micro-batch: equally for recomputation."""
        # also without dropout, for what else a family draws: a router's jitter, say
        if not self.skeleton.model.training:
            return  # evaluation draws nothing, and must leave the caller's random state alone
        seed = mix(self.seed, self.step, block, mb.number)
        torch.default_generator.manual_seed(seed)
        # this GPU alone: `torch.manual_seed` would reseed the others
        if self.device.type == "cuda":
            torch.cuda.default_generators[self.device.index].manual_seed(seed)

    def through_layers(
        self, micro_batches: list[MicroBatch]
    ) -> Iterator[tuple[MicroBatch, Tensor]]:
        """Run all layers to evaluate; yield each with its last states, while the head is there."""
        self.skeleton.set_training(False)
        with closing(self.streamer.sweep(range(self.head + 1))) as visits:
            self._forward(micro_batches, visits, False)
            assert next(visits) == self.head
            for mb in micro_batches:
                yield mb, mb.states
