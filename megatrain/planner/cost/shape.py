"""The planner's view of a model: the parameters of its blocks, their bytes and their work. Plain
numbers: nothing here imports torch."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from megatrain.schedule import layers_back


class Traffic(NamedTuple):
    """Bytes read or written by all but matmuls and fused attention, and kernels, those included."""

    bytes: int
    kernels: int


@dataclass(frozen=True)
class PassCost:
    """A pass of one block, forward or backward: FLOPs and bytes a token, kernels a micro-batch."""

    matmul_flops: int  # with parameters; in a mixture only with a token's own experts
    attention_flops: int  # at the shape's sequence length; causal attention counts half
    eager: Traffic
    compiled: Traffic  # an estimate of what torch.compile makes of the same computation


@dataclass(frozen=True)
class BlockCost:
    """A decoder layer, the embedding, or the head with its loss; backward without recomputation.
    Where nothing is known of compiling, compiled figures are the eager ones."""

    forward: PassCost
    backward: PassCost
    expert_parameters: int = 0  # in matrices of all experts
    expert_flops: int = 0  # of forward.matmul_flops, what a token's own experts take
    frozen_expert_flops: int = 0  # of these, with frozen matrices
    skippable_flops: int = 0  # of forward.matmul_flops, what recomputation may leave out
    cheap_bytes: int = 0  # per token: what cheap retention adds to a compiled backward
    keys: int = 0  # that fused attention goes over at once, as in a window; 0: it has none
    kept_attention_bytes: int = 0  # per token: what recomputation may leave attention's forward for

    @property
    def idle_parameters(self) -> int:
        """Those of experts that are not a token's own: each of the others is multiplied once."""
        return self.expert_parameters - self.expert_flops // 2


@dataclass(frozen=True)
class ModelCost:
    """The work of every block; layers of one kind share one object."""

    embed: BlockCost
    layers: tuple[BlockCost, ...]
    head: BlockCost

    @property
    def kept_attention_bytes(self) -> int:
        """The most of any layer, as the engine makes room for all."""
        return max(layer.kept_attention_bytes for layer in self.layers)


@dataclass(frozen=True)
class ImageCost:
    """The needs of each token of an image beside those of text, all of them in block 0."""

    work: BlockCost
    working_bytes: int  # while towers run forward, or back where they train, beyond `kept_bytes`
    kept_bytes: int  # from embed to the end of backward, with what is added between layers
    input_bytes: int  # pixels, in the dtype of the computation
    gradient_bytes: int  # not for each token: of what only images use
    counted_parameters: int  # of that, as `freezing.counted_parameters` counts
    tokens: int  # of the image that this was found with

    def of_images(self, tokens: float) -> BlockCost:
        """The work for each token of images of so many: attention grows with their size."""
        larger, (ahead, back) = tokens / self.tokens, (self.work.forward, self.work.backward)
        ahead, back = (
            replace(way, attention_flops=round(way.attention_flops * larger))
            for way in (ahead, back)
        )
        return BlockCost(ahead, back, keys=round(self.work.keys * larger))

    def flops(self, tokens: float) -> int:
        """FLOP for each, forward and backward, nothing repeated."""
        work = self.of_images(tokens)
        return sum(one.matmul_flops + one.attention_flops for one in (work.forward, work.backward))


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
