"""The sizes of a model that the planner reckons with: parameters of each block, and what computing on them takes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from torch import Tensor

from megatrain.models.dry_run import DryRun, MicroBatchBytes, cross_entropy
from megatrain.models.skeleton import Skeleton
from megatrain.models.work import ModelWork

HEAD_CHUNK_TOKENS = (128, 256, 512, 1024, 2048, 4096, 8192)  # sizes in which the head may walk through a micro-batch

LAYER_CHUNK_TOKENS = (4096, 16_384)  # in which layers may walk through a longer micro-batch; larger ones run no faster
MOST_LAYER_CHUNKS = 64  # smaller chunks save little beside hidden states of the whole length, and take long to dry-run


@dataclass(frozen=True)
class WorkingSet:
    """Bytes that a computation needs, by the number of tokens it is given at once: (tokens, bytes) points in rising order."""

    points: tuple[tuple[int, int], ...]

    def at(self, tokens: int) -> int:
        """Bytes for `tokens` at once: exact at a point, an upper bound between points, on the last two points' line beyond.

        A peak is the largest of several moments, each linear in tokens: convex, so that a chord lies above it. Below the first
        point the first point's own bytes are the bound.
        """
        if tokens not in self._found:  # a search asks for the same few sizes again and again
            self._found[tokens] = self._at(tokens)
        return self._found[tokens]

    def _at(self, tokens: int) -> int:
        sizes = self.sizes
        right = bisect_left(sizes, tokens)
        if right < len(sizes) and (sizes[right] == tokens or right == 0):
            return self.points[right][1]
        if len(sizes) == 1:
            return -(-self.points[0][1] * tokens // sizes[0])
        (x0, y0), (x1, y1) = self.points[right - 1 : right + 1] if right < len(sizes) else self.points[-2:]
        return y0 + -(-(y1 - y0) * (tokens - x0) // (x1 - x0))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The token counts that were measured."""
        return tuple(size for size, _ in self.points)

    @cached_property
    def _found(self) -> dict[int, int]:
        return {}


@dataclass(frozen=True)
class CompiledSets:
    """Working sets of the hungriest layer where layers are compiled, by tokens of a micro-batch."""

    recomputed: WorkingSet  # as ModelShape's `layer`
    last: WorkingSet  # of the last layer, which may need less
    beyond_graph: WorkingSet  # of a retained one's backward, what it takes beyond what its graph holds
    beyond_cheap_graph: WorkingSet
    fp8: bool = False  # of layers whose products take fp8 operands


@dataclass(frozen=True)
class ModelShape:
    """What the planner knows of a model. Working sets are bytes beyond parameters, inputs and incoming gradients."""

    family: str
    parameters: int  # trained ones, tied counted once
    block_numel: tuple[int, ...]  # elements of each block's flat arrays, padding included: embed, layers, head
    tied: bool  # the head computes with a tensor of embed
    hidden_size: int
    vocab_size: int
    layer: WorkingSet  # recompute, backward and gradients of the hungriest layer, by tokens of a micro-batch
    embed: WorkingSet  # the same of the embedding
    head: WorkingSet  # the same of the head and the loss, by tokens of a chunk
    calls: WorkingSet  # what one micro-batch hands to its layers besides hidden states: rotary tables, masks
    retained: tuple[WorkingSet, ...]  # what graphs of the last 0, 1, 2, ... layers hold of a micro-batch, less the layers' outputs
    retained_compiled: tuple[WorkingSet, ...]
    work: ModelWork  # arithmetic and memory traffic of every block
    retained_cheap: tuple[WorkingSet, ...] = ()  # compiled, with cheap retention
    layer_chunked: tuple[tuple[int, WorkingSet], ...] = ()  # as `layer`, where its token-wise parts run so many tokens at a time
    compiled: CompiledSets | None = None  # None where they are not known
    graphs_keep_inputs: tuple[bool, bool, bool] = (True, True, True)  # of layers; eager, compiled, and compiled with cheap retention

    def layer_bytes(self, micro_batch_tokens: int, chunk_tokens: int = 0) -> int:
        """Working set of the hungriest layer. chunk_tokens: one of `layer_chunked`; 0, or what was not tried: a micro-batch at once."""
        return dict(self.layer_chunked).get(chunk_tokens, self.layer).at(micro_batch_tokens)

    def retained_bytes(self, micro_batch_tokens: int, layers: int, *, compiled: bool = False, cheap: bool = False) -> int:
        """Bytes that the graphs of the last `layers` layers hold between forward and backward of one micro-batch, less their outputs.

        cheap: with cheap retention, which only compiled layers have.
        """
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
    """Dry-run a skeleton whose parameters are still on the meta device. Nothing is allocated and no device is touched.

    Args:
        seq_len: tokens of a full row.
        micro_batch_tokens: sizes to try; each becomes as many full rows as it holds, at least one.
        padded: rows are padded, so every layer receives a boolean mask [rows, 1, seq_len, seq_len].
        head_loss: logits [n, vocab] -> scalar; by default cross entropy in fp32.
        runs_on: "cpu" or "cuda", where the model will compute: not every attention kernel exists on both.
        compiled: find out too what torch.compile makes of the layers, which takes a second for each kind of layer; otherwise, and of
            layers that it could not compile whole, compiled figures are the eager ones, which are larger.
        fp8: the layers' products take fp8 operands, which on CUDA need memory besides.
        layer_chunks: find out too what layers need whose token-wise parts are computed so many tokens at a time.

    Raises:
        ModelError: a part of the model cannot run without data.
    """
    assert all(p.is_meta for layer in skeleton.layers for p in layer.parameters()), "shape_of needs a skeleton that is not bound yet"
    dry = DryRun(
        skeleton, seq_len, padded=padded, loss=head_loss or cross_entropy, runs_on=runs_on, compiled=compiled, fp8=fp8 and runs_on == "cuda"
    )
    runs = {rows * seq_len: dry.bytes_of(rows) for rows in sorted({max(1, n // seq_len) for n in micro_batch_tokens})}
    chunked = {chunk: {tokens: dry.layer_in_chunks(tokens // seq_len, chunk) for tokens in runs} for chunk in sorted(layer_chunks)}
    anatomy = skeleton.anatomy

    def by_tokens(of: Callable[[MicroBatchBytes], int]) -> WorkingSet:
        return WorkingSet(tuple((tokens, of(run)) for tokens, run in runs.items()))

    return ModelShape(
        family=anatomy.family,
        parameters=anatomy.parameters,
        block_numel=tuple(block.layout.numel for block in anatomy.blocks),
        tied=anatomy.embed_feeds_head,
        hidden_size=anatomy.hidden_size,
        vocab_size=anatomy.vocab_size,
        layer=by_tokens(lambda run: run.layer),
        embed=by_tokens(lambda run: run.embed),
        head=WorkingSet(tuple((n, dry.head(n).peak_bytes) for n in HEAD_CHUNK_TOKENS)),
        calls=by_tokens(lambda run: run.calls),
        retained=_of_last_layers({tokens: run.kept for tokens, run in runs.items()}),
        retained_compiled=_of_last_layers({tokens: run.kept_compiled for tokens, run in runs.items()}),
        retained_cheap=_of_last_layers({tokens: run.kept_cheap for tokens, run in runs.items()}),
        work=dry.work(HEAD_CHUNK_TOKENS[0]),
        layer_chunked=tuple((chunk, WorkingSet(tuple(needs.items()))) for chunk, needs in chunked.items()),
        compiled=_compiled_sets(by_tokens, dry.fp8) if compiled else None,
        graphs_keep_inputs=dry.graphs_keep_inputs(),
    )


def _compiled_sets(by_tokens: Callable[[Callable[[MicroBatchBytes], int]], WorkingSet], fp8: bool) -> CompiledSets:
    return CompiledSets(
        recomputed=by_tokens(lambda run: run.layer_compiled),
        last=by_tokens(lambda run: run.last_compiled),
        beyond_graph=by_tokens(lambda run: run.beyond_graph),
        beyond_cheap_graph=by_tokens(lambda run: run.beyond_cheap_graph),
        fp8=fp8,
    )


def layer_chunks(wanted: int | str | None, largest: int) -> list[int]:
    """Chunks of layers whose memory the planner should know: the number wanted, or some that are shorter than the largest micro-batch.

    Those too if none is wanted: where that does not fit, the plan says what would.
    """
    if isinstance(wanted, int):
        return [wanted]
    return [size for size in LAYER_CHUNK_TOKENS if size < largest <= MOST_LAYER_CHUNKS * size or size == LAYER_CHUNK_TOKENS[-1] < largest]


def _of_last_layers(saved: Mapping[int, Sequence[int]]) -> tuple[WorkingSet, ...]:
    """From bytes of every layer, by tokens, to those of the last 0, 1, 2, ... layers together."""
    sums = {tokens: list(accumulate(reversed(layers), initial=0)) for tokens, layers in saved.items()}
    counts = range(len(next(iter(sums.values()))))
    return tuple(WorkingSet(tuple((tokens, total[count]) for tokens, total in sums.items())) for count in counts)
