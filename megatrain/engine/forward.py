"""Sweeps forward over the model, without gradients or keeping what backward needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing

import torch
from torch.utils import _pytree as pytree

from megatrain.engine.activations.offload import Boundaries, Offload
from megatrain.engine.batches import Batch, MicroBatch, prepare
from megatrain.engine.graphs import SavedTensors, run_for_graph
from megatrain.engine.head import Values, loss_sum, target_values
from megatrain.engine.objective import Objective
from megatrain.engine.results import EvalResult
from megatrain.engine.routing import Balancer
from megatrain.engine.streamer import Streamer
from megatrain.engine.trade import HeadTrade
from megatrain.losses import IGNORE, SequenceLoss, Tally, Targets
from megatrain.losses.targets import Answers
from megatrain.models.recorder import LayerCall
from megatrain.models.skeleton import Skeleton
from megatrain.models.ulysses import Around, call_of_piece, implementation_of, piece_of
from megatrain.schedule import graphs_of_layers
from megatrain.settings import Settings
from megatrain.world import ALONE, World


class ForwardPasses:
    """Runs sweeps over the skeleton's modules, whose parameters it binds to the streamer's slots.

    Args:
        boundaries: keeps activation checkpoints between forward and backward.
        balancer: of a mixture whose routers are balanced. A step is one group then.
        seed: of dropout.
        trade: of ranks that share sequences.

    Attributes:
        step: counts steps, for dropout seeds.
        first: the first block that is trained, where backward ends.
        parameters: of every block, those that are trained.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        streamer: Streamer,
        boundaries: Boundaries,
        settings: Settings,
        seed: int,
        balancer: Balancer | None = None,
        world: World = ALONE,
        trade: HeadTrade | None = None,
    ) -> None:
        self.world, self.trade = world, trade
        self.skeleton, self.streamer, self.boundaries = skeleton, streamer, boundaries
        self.settings, self.seed, self.balancer = settings, seed, balancer
        self.device, self.step = streamer.compute.device, 0
        layers, blocks = len(skeleton.layers), skeleton.anatomy.blocks
        self.first = skeleton.anatomy.first_trained
        on_host = settings.retained_on_host
        self.graphs_of = graphs_of_layers(layers, settings.retained, on_host, self.first)
        self.embed, self.head = 0, layers + 1
        self.parameters = [skeleton.bind(b, streamer.flat(b.index)) for b in blocks]

    # -- whole sweeps -----------------------------------------------------------------------------

    def evaluate(self, batches: Sequence[Batch], objective: Objective) -> EvalResult:
        """The mean of an objective over all ranks' micro-batches in evaluation mode, in one sweep
        over the layers."""
        self.skeleton.set_training(False)
        prepared = self._prepare(batches, objective.of_sequences)
        total, values = Tally[torch.Tensor](), []
        for mb, hidden in self._through_layers(prepared):
            if objective.of_sequences:
                values.append(self.target_values(mb, hidden, objective.values))
                continue
            given = hidden.flatten(0, 1), mb.targets, objective.of_tokens[0], *self._chunks
            total.add(objective.tally(*vars(loss_sum(self.skeleton.head, *given)).values()))
        if objective.whole_step:
            answers = self.answers(prepared, values).to(torch.device("cpu"))
            return objective.result(objective.judge(answers.sums, answers.examples), answers)
        for mb, of_targets in zip(prepared, values, strict=False):
            total.add(objective.judge(of_targets, mb.targets.examples).detached())
        return objective.result(objective.over_ranks(total, self.world))

    def logprobs(
        self, batches: Sequence[Batch], greedy: bool, targets: Sequence[Targets] | None = None
    ) -> list[tuple[Targets, torch.Tensor, torch.Tensor]]:
        """Each micro-batch's targets and what `head.target_values` says of them, in one sweep.

        targets: others than the labels show; a position may have several.
        """
        self.skeleton.set_training(False)
        prepared, found = self._prepare(batches, whole=True), []
        for mb, given in zip(prepared, targets or (), strict=targets is not None):
            mb.targets = given.to(self.device)
        for mb, hidden in self._through_layers(prepared):
            given_head = self.skeleton.head, hidden.flatten(0, 1), mb.targets, *self._chunks
            found.append((mb.targets, *target_values(*given_head, greedy=greedy)))
        return found

    def target_values(self, mb: MicroBatch, hidden: torch.Tensor, values: Values) -> torch.Tensor:
        """What a loss over sequences is computed from, of a micro-batch's targets: fp32 [n]."""
        given = self.skeleton.head, hidden.flatten(0, 1), mb.targets, *self._chunks
        return target_values(*given, values)[0]

    def answers(self, part: Sequence[MicroBatch], values: Sequence[torch.Tensor]) -> Answers:
        """The examples of all ranks, in the order of micro-batches, from the `values` of this
        rank's: with their graphs, and with those of the others as numbers."""
        own = {
            mb.number: Answers.of(of_targets, examples)
            for mb, of_targets in zip(part, values, strict=True)
            if (examples := mb.targets.examples) is not None
        }
        if self.world.is_alone:
            return Answers.joined([*own.values()])
        cpu, found = torch.device("cpu"), dict[int, Answers]()
        for of_rank in self.world.every({number: one.to(cpu) for number, one in own.items()}):
            found |= of_rank
        joined = [own.get(number) or found[number].to(self.device) for number in sorted(found)]
        return Answers.joined(joined)

    @property
    def _chunks(self) -> tuple[int, bool]:
        """How the head takes targets: how many at a time, and whether by compiled passes."""
        fused = self.settings.compile or self.settings.fused_loss
        return self.settings.head_chunk_tokens, fused

    @torch.no_grad()
    def logits(self, input_ids: torch.Tensor, positions: slice = slice(None)) -> torch.Tensor:
        """Logits [batch, positions, vocab], in evaluation mode, whole: not for training."""
        self.skeleton.set_training(False)
        batch = {"input_ids": input_ids, "labels": torch.full_like(input_ids, IGNORE)}
        (logits,) = [
            self.skeleton.head(rows.flatten(0, 1)).view(*rows.shape[:2], -1)
            for _, hidden in self._through_layers(self._prepare([batch], whole=True))
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

    # -- parts of a sweep -------------------------------------------------------------------------

    def _prepare(
        self,
        batches: Sequence[Batch],
        loss: SequenceLoss | None = None,
        marks_real: bool = False,
        whole: bool = False,
    ) -> list[MicroBatch]:
        """whole: also ranks that share sequences compute all of each."""
        text = self.skeleton.config.get_text_config()
        pad_id = text.pad_token_id if loss is not None and loss.of_scores else None
        packed = any("position_ids" in batch for batch in batches)
        tells = packed and self.skeleton.told_documents(self.device)
        shared = {} if whole else {"piece": self.world.piece, "pieces": self.world.pieces}
        return [
            prepare(
                batch,
                self.world.number(number),
                self.device,
                loss=loss,
                pad_id=pad_id,
                marks_real=marks_real,
                tells_documents=tells,
                longest=self.skeleton.anatomy.max_positions,
                **shared,
            )
            for number, batch in enumerate(batches)
        ]

    @torch.no_grad()
    def _forward(
        self, group: Sequence[MicroBatch], visits: Iterator[int], keep: bool = True
    ) -> None:
        """Sweep embed and layers; `keep` each layer's input, or the graph of a retained one, of the
        micro-batches that train."""
        assert next(visits) == self.embed
        for mb in group:
            self._seed_dropout(self.embed, mb)
            hidden, mb.calls = self._embed(mb)
            # a copy: of a piece the whole would stay
            mb.hidden = hidden if mb.pieces == 1 else hidden.clone()
        for index in range(len(self.skeleton.layers)):
            block = next(visits)
            for mb in group:
                assert mb.hidden is not None
                self._begin_layer(block, mb)
                where = self.graphs_of[index] if keep and mb.trains else "unneeded"
                if where in ("device", "host"):
                    mb.hidden = self._retain(index, block, mb, mb.hidden)
                    continue
                output = self.skeleton.layer(index, mb.hidden, mb.calls[index])
                if where == "nowhere":
                    mb.kept[index] = self.boundaries.park(mb.hidden)
                mb.hidden = output
            if keep and self.balancer:
                self.balancer.end_layer()

    def _embed(self, mb: MicroBatch) -> tuple[torch.Tensor, list[LayerCall]]:
        """`Skeleton.embed` of whole sequences, cut to this rank's pieces if ranks share them."""
        hidden, calls = self.skeleton.embed(mb.inputs)
        if mb.pieces == 1:
            return hidden, calls
        assert self.trade is not None
        own = piece_of(hidden.shape[1], self.trade.rank, self.trade.ranks)
        around = Around(self.trade, implementation_of(self.skeleton.config))
        return hidden[:, own], [call_of_piece(call, hidden.shape, own, around) for call in calls]

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
