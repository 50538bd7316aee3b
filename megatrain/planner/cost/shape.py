"""The planner's view of a model: the parameters of its blocks, their bytes and their work."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from torch import Tensor

from megatrain.models.freezing import counted_parameters, share_of_experts_trained
from megatrain.models.skeleton import Skeleton
from megatrain.planner.cost.dry_run import DryRun, MicroBatchBytes, cross_entropy
from megatrain.planner.cost.footprint import LayerBytes
from megatrain.planner.cost.work import ImageCost, ModelCost
from megatrain.schedule import layers_back

# Chunks, in tokens, in which the head may go through a micro-batch.
HEAD_CHUNK_TOKENS = tuple(1 << power for power in range(7, 14))
# And layers through a longer micro-batch; larger chunks run no faster.
LAYER_CHUNK_TOKENS = (4096, 16_384)
# More chunks save little beside hidden states of the whole length, and take long to dry-run.
MOST_LAYER_CHUNKS = 64


@dataclass(frozen=True)
class WorkingSet:
    """Bytes that a computation needs, by the number of tokens that it is given at once. `points`
    are (tokens, bytes) in rising order."""

    points: tuple[tuple[int, int], ...]

    def at(self, tokens: int) -> int:
        """Bytes for `tokens` at once: exact at a point, an upper bound between points. A peak is
        the largest of several moments, each linear in tokens: convex, so that a chord lies above
        it. Below the first point that point's bytes are the bound; beyond the last, the line
        through the last two points."""
        first, nbytes = self.points[0]
        if tokens <= first:
            return nbytes
        if len(self.points) == 1:
            return -(-nbytes * tokens // first)
        right = min(bisect_left(self.sizes, tokens), len(self.points) - 1)
        (x0, y0), (x1, y1) = self.points[right - 1 : right + 1]
        return y0 + -(-(y1 - y0) * (tokens - x0) // (x1 - x0))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The token counts that were measured."""
        return tuple(size for size, _ in self.points)


@dataclass(frozen=True)
class CompiledSets:
    """Working sets of the largest layer where layers are compiled, by tokens of a micro-batch."""

    recomputed: WorkingSet  # as ModelShape's `layer`
    last: WorkingSet  # the same of the last layer, which may need less
    beyond_graph: WorkingSet  # a retained layer's backward, beyond its saved activations
    beyond_cheap_graph: WorkingSet  # the same with cheap retention
    fp8: bool = False  # the layers' matmuls take fp8 operands
    holes: WorkingSet = WorkingSet(((1, 0),))  # what an allocator needs beyond `recomputed`


@dataclass(frozen=True)
class FrozenParts:
    """The changes that frozen tensors make to a model's figures."""

    parameters: int  # frozen ones
    saved_bytes: int  # of them in a run's folder, once, in the configuration's dtype
    trained_numel: tuple[int, ...]  # elements of every block's arrays but the weight
    first_trained: int  # the first block that is trained
    counted_parameters: int  # as many trained ones would take a step's matmuls
    idle_parameters: int  # of experts that are not a token's own
    edges: tuple[bool, bool]  # the embedding's and the head's matrices are trained


@dataclass(frozen=True)
class ModelShape:
    """The planner's view of a model. Working sets are bytes beyond parameters, inputs and incoming
    gradients, by tokens of a micro-batch unless noted."""

    parameters: int  # trained ones, tied counted once
    block_numel: tuple[int, ...]  # elements of the weight arrays, padded: embed, layers, head
    tied: bool  # the head computes with a tensor of embed
    hidden_size: int
    vocab_size: int
    layer: WorkingSet  # the largest layer's recomputation, backward and gradients
    embed: WorkingSet  # the same of the embedding
    head: WorkingSet  # the same of the head and the loss, by tokens of a chunk
    calls: WorkingSet  # the layers' other arguments, such as rotary tables and masks
    # saved activations of the last 0, 1, 2, ... layers, less the layers' outputs
    retained: tuple[WorkingSet, ...]
    retained_compiled: tuple[WorkingSet, ...]
    cost: ModelCost  # arithmetic and memory traffic of every block
    carried_bytes: int = 0  # of unused weights, which lie on the disk alone, once
    retained_cheap: tuple[WorkingSet, ...] = ()  # compiled, with cheap retention
    # (chunk tokens, `layer` with token-wise modules computed in chunks)
    layer_chunked: tuple[tuple[int, WorkingSet], ...] = ()
    compiled: CompiledSets | None = None  # None where they are not known
    # layers' graphs hold their inputs: eager, compiled, compiled with cheap retention
    graphs_keep_inputs: tuple[bool, bool, bool] = (True, True, True)
    constant_bytes: int = 0  # of tensors that are not trained, which stay on the device
    scores: int | None = None  # a reward model's head has so many outputs, and no vocabulary
    frozen: FrozenParts | None = None  # what the user does not train
    images: ImageCost | None = None  # None: it sees none
    package_kernels: bool = False  # layers compute with kernels of fla, mamba-ssm, ...

    @property
    def layers(self) -> int:
        return len(self.block_numel) - 2

    @property
    def head_matrix(self) -> int:
        """Elements of the matrix that makes logits or scores."""
        return (self.scores or self.vocab_size) * self.hidden_size

    @property
    def idle_parameters(self) -> int:
        """Those of experts that a token is not multiplied with; 0 of a dense model."""
        return sum(layer.idle_parameters for layer in self.cost.layers)

    @property
    def active_parameters(self) -> int:
        """Those trained ones that act on a token."""
        of_frozen = self.frozen.idle_parameters if self.frozen else 0
        return self.parameters - (self.idle_parameters - of_frozen)

    @property
    def counted_parameters(self) -> int:
        """The parameters that "6 x parameters" counts of a token of text in a mixture, or where
        tensors are frozen."""
        counted = self.frozen.counted_parameters if self.frozen else self.active_parameters
        return counted - (self.images.counted_parameters if self.images else 0)

    def image_flops(self, share: float, each: float) -> float:
        """FLOP that images take besides, for each token of a run, of which a share is of images of
        so many."""
        return share * self.images.flops(each) if self.images else 0.0

    @property
    def trained_numel(self) -> tuple[int, ...]:
        """Elements of every block's gradient, and of what the update reads besides the weight."""
        return self.frozen.trained_numel if self.frozen else self.block_numel

    @property
    def first_trained(self) -> int:
        """The first block that is trained, where backward ends."""
        return self.frozen.first_trained if self.frozen else 0

    @property
    def layers_back(self) -> int:
        """Number of layers that backward visits."""
        return layers_back(self.layers, self.first_trained)

    @property
    def trains_edges(self) -> tuple[bool, bool]:
        """Two flags: the matrices of embedding and head are trained."""
        return self.frozen.edges if self.frozen else (True, True)

    def layer_bytes(self, micro_batch_tokens: int, chunk_tokens: int | None = None) -> int:
        """Working set of the largest layer, in chunks of a size in `layer_chunked`, or whole."""
        return dict(self.layer_chunked).get(chunk_tokens or 0, self.layer).at(micro_batch_tokens)

    def retained_bytes(
        self, micro_batch_tokens: int, layers: int, *, compiled: bool = False, cheap: bool = False
    ) -> int:
        """Saved activations of the last `layers` layers for one micro-batch, less their outputs."""
        of_compiled = self.retained_cheap if cheap else self.retained_compiled
        return (of_compiled if compiled else self.retained)[layers].at(micro_batch_tokens)


def shape_of(
    skeleton: Skeleton,
    seq_len: int,
    micro_batch_tokens: Iterable[int],
    *,
    padded: bool = False,
    head_loss: Callable[[Tensor], Tensor] | None = None,
    runs_on: str = "cpu",
    compiled: bool = False,
    fp8: bool = False,
    layer_chunks: Iterable[int] = (),
) -> ModelShape:
    """Dry-run a skeleton whose parameters are on the meta device; no other device is touched.

    Args:
        seq_len: tokens of a full sequence.
        micro_batch_tokens: sizes to try; each becomes as many full sequences as it holds, at least
            one.
        padded: layers receive a boolean mask [rows, 1, seq_len, seq_len], unless it is their
            kernels that keep documents apart.
        head_loss: logits [n, vocab] -> scalar; by default cross entropy in fp32.
        runs_on: "cpu" or "cuda", where the model will compute; their attention kernels differ.
        compiled: predict compiled layers too, a second for each kind of layer. Otherwise, and for
            layers that cannot be traced, compiled figures are the eager ones, which are larger.
        fp8: the layers' matmuls take fp8 operands, which on CUDA need memory besides.
        layer_chunks: chunks of tokens for which to find what layers need.

    Raises:
        ModelError: a part of the model cannot run without data.
    """
    bound = any(not p.is_meta for layer in skeleton.layers for p in layer.parameters())
    assert not bound, "shape_of needs a skeleton that is not bound yet"
    dry = DryRun(
        skeleton,
        seq_len,
        padded=padded,
        loss=head_loss or cross_entropy,
        runs_on=runs_on,
        compiles=compiled,
        fp8=fp8 and runs_on == "cuda",
    )
    rows = sorted({max(1, tokens // seq_len) for tokens in micro_batch_tokens})
    chunked = []
    for chunk in sorted(layer_chunks):
        points = ((n * seq_len, dry.layer_in_chunks(n, chunk)) for n in rows)
        chunked.append((chunk, WorkingSet(tuple(points))))
    return _assembled(dry, {n * seq_len: dry.bytes_of(n) for n in rows}, tuple(chunked))


def _assembled(
    dry: DryRun, runs: Mapping[int, MicroBatchBytes], chunked: tuple[tuple[int, WorkingSet], ...]
) -> ModelShape:
    """The shape, from the bytes of micro-batches by their tokens."""
    anatomy, cost = dry.skeleton.anatomy, dry.cost(HEAD_CHUNK_TOKENS[0])

    def by_tokens(of: Callable[[MicroBatchBytes], int]) -> WorkingSet:
        return WorkingSet(tuple((tokens, of(run)) for tokens, run in runs.items()))

    def of_last(
        layers: Callable[[MicroBatchBytes], tuple[LayerBytes, ...]],
    ) -> tuple[WorkingSet, ...]:
        """Saved bytes of the last 0, 1, 2, ... layers together."""
        sums = []
        for tokens, run in runs.items():
            totals = accumulate((layer.saved for layer in reversed(layers(run))), initial=0)
            sums.append([(tokens, total) for total in totals])
        return tuple(WorkingSet(points) for points in zip(*sums, strict=True))

    compiled = None
    if dry.compiles:
        compiled = CompiledSets(
            recomputed=by_tokens(lambda run: run.layer_compiled),
            last=by_tokens(lambda run: run.last_compiled),
            beyond_graph=by_tokens(lambda run: max(n.beyond for n in run.compiled)),
            beyond_cheap_graph=by_tokens(lambda run: max(n.beyond for n in run.cheap)),
            fp8=dry.fp8,
            holes=by_tokens(lambda run: run.holes),
        )
    return ModelShape(
        parameters=anatomy.parameters,
        carried_bytes=anatomy.unused_weights.nbytes,
        block_numel=tuple(block.layout.numel for block in anatomy.blocks),
        tied=anatomy.embed_feeds_head,
        hidden_size=anatomy.hidden_size,
        vocab_size=anatomy.vocab_size,
        scores=anatomy.labels,
        layer=by_tokens(lambda run: run.layer),
        embed=by_tokens(lambda run: run.embed),
        head=WorkingSet(tuple((n, dry.head(n)) for n in HEAD_CHUNK_TOKENS)),
        calls=by_tokens(lambda run: run.calls),
        retained=of_last(lambda run: run.eager),
        retained_compiled=of_last(lambda run: run.compiled),
        retained_cheap=of_last(lambda run: run.cheap),
        cost=cost,
        layer_chunked=chunked,
        compiled=compiled,
        graphs_keep_inputs=dry.graphs_keep_inputs(),
        constant_bytes=dry.skeleton.constants.nbytes,
        frozen=_frozen(dry.skeleton, cost) if anatomy.frozen_parameters else None,
        images=dry.of_images(),
        package_kernels=dry.skeleton.has_kernels and dry.runs_on == "cuda",
    )


def _frozen(skeleton: Skeleton, cost: ModelCost) -> FrozenParts:
    anatomy = skeleton.anatomy
    idle = sum(layer.idle_parameters for layer in cost.layers)
    idle_frozen = round(idle * (1 - share_of_experts_trained(anatomy)))
    owners = {owner for _, owner in anatomy.tied}
    embedding, head = (
        any(len(t.shape) > 1 and not t.frozen for t in block.layout.tensors)
        for block in (anatomy.embed, anatomy.head)
    )
    if owners:
        head = not owners & set(anatomy.frozen)
    return FrozenParts(
        parameters=anatomy.frozen_parameters,
        saved_bytes=anatomy.frozen_parameters * skeleton.source_dtype.itemsize,
        trained_numel=tuple(block.layout.trainable for block in anatomy.blocks),
        first_trained=anatomy.first_trained,
        counted_parameters=counted_parameters(anatomy, idle),
        idle_parameters=idle_frozen,
        edges=(embedding, head),
    )


def layer_chunks(wanted: int | str | None, largest: int) -> list[int]:
    """Chunks of layers, in tokens, whose memory the planner should know: the number wanted, or some
    shorter than the largest micro-batch. These also if none is wanted, for what would fit."""
    if isinstance(wanted, int):
        return [wanted]
    return [
        size
        for size in LAYER_CHUNK_TOKENS
        if size < largest <= MOST_LAYER_CHUNKS * size or size == LAYER_CHUNK_TOKENS[-1] < largest
    ]
