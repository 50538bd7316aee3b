"""Runs a model's parts on the meta device, each kind of part once, to see what they need and do:
`shape_of` makes a model's shape of that."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate, count
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from megatrain.models.freezing import counted_parameters, share_of_experts_trained
from megatrain.models.meta import blank_call, without_data
from megatrain.models.recorder import LayerCall, kind_of, of_dtype
from megatrain.models.skeleton import Skeleton
from megatrain.models.transforms.fp8 import Fp8Policy, fp8_matmuls
from megatrain.models.transforms.kept_attention import attention_bytes
from megatrain.models.transforms.skippable import recompute_inside, skippable
from megatrain.models.ulysses import Around, Trade, call_of_piece, implementation_of
from megatrain.planner.cost.compiled import CompiledLayer, predict_compiled
from megatrain.planner.cost.footprint import (
    Footprint,
    FusedAttention,
    LayerBytes,
    LiveBytes,
    call_peak_bytes,
    graph_keeps_input,
    tensor_bytes,
)
from megatrain.planner.cost.shape import (
    BlockCost,
    CompiledSets,
    FrozenParts,
    ImageCost,
    ModelCost,
    ModelShape,
    PassCost,
    Traffic,
    WorkingSet,
)
from megatrain.planner.cost.work import BACKWARD_FLOPS, Operations, cost_per_token, tally

EMBED, HEAD = 0, -1  # blocks
# Chunks, in tokens, in which the head may go through a micro-batch.
HEAD_CHUNK_TOKENS = tuple(1 << power for power in range(7, 14))
# And layers through a longer micro-batch; larger chunks run no faster.
LAYER_CHUNK_TOKENS = (4096, 16_384)
# More chunks save little beside hidden states of the whole length, and take long to dry-run.
MOST_LAYER_CHUNKS = 64
# Times that a compiled loss reads or writes all logits: forward looks for the largest, then adds
# up; backward reads them once more and writes their gradient in their place. On an H200 these
# kernels moved 3.2 and 3.5 TB/s of the 4.2 that the memory gives.
LOSS_PASSES = 2  # each way
LOSS_KERNELS = 8  # each way, with matmuls and what is done with a number a row
MASK = "attention_mask"


@dataclass(frozen=True)
class MicroBatchBytes:
    """The needs of one micro-batch. Layers that cannot be traced count as eager everywhere."""

    embed: int  # working set of the embedding
    calls: int  # the layers' other arguments
    eager: tuple[LayerBytes, ...]
    compiled: tuple[LayerBytes, ...]
    cheap: tuple[LayerBytes, ...]  # compiled with cheap retention
    layer: int  # working set of the largest recomputed layer
    layer_compiled: int  # the same where layers are compiled
    last_compiled: int  # the same of the last layer, which may need less than others
    holes: int  # bytes that an allocator needs beyond `layer_compiled`, as `Alive.holes`


@dataclass(frozen=True, eq=False)
class DryRun:
    """Runs parts of a skeleton whose parameters are on the meta device."""

    skeleton: Skeleton
    seq_len: int  # of a piece, where ranks share every sequence
    padded: bool  # layers that masks tell documents by receive a boolean one for every sequence
    loss: Callable[[Tensor], Tensor]  # logits [n, vocab] -> scalar
    runs_on: str  # "cpu" or "cuda", where the model will compute
    compiles: bool  # predict compiled layers too
    fp8: bool  # the layers' matmuls take fp8 operands; their work is counted in bf16
    trade: Trade | None  # of these ranks
    _known_calls: dict[int, list[LayerCall]] = field(default_factory=dict)

    # -- bytes -------------------------------------------------------------------------------------

    def bytes_of(self, rows: int) -> MicroBatchBytes:
        """The needs of a micro-batch of `rows` full sequences."""
        calls = self._calls(rows)
        hidden = rows * self.seq_len * self.skeleton.anatomy.hidden_size
        output = hidden * self.skeleton.dtype.itemsize
        eager = {}
        with self._run_matmuls():
            for kind in set(self.kinds):
                found = self._layer(kind, rows)
                saved, peak = found.saved_bytes - output, found.peak_bytes
                eager[kind] = LayerBytes(saved, peak, peak - saved)
        known = self.compiled.items()
        compiled = eager | {kind: layer.bytes_at(rows) for kind, layer in known}
        cheap = eager | {kind: layer.bytes_at(rows, cheap=True) for kind, layer in known}
        # the eager figure is a bound for compiled layers too, and theirs for the last one
        layer = max(one.recomputed for one in eager.values())
        largest = max(one.recomputed for one in compiled.values())
        last = bound = min(largest, layer)
        if (own := self.compiled_last) is not None:
            last = min(own.bytes_at(rows).recomputed, bound)
        embed = call_peak_bytes(
            lambda: self._embed(rows)[0], self._parameters(EMBED), what="the embedding"
        )
        return MicroBatchBytes(
            embed=embed.peak_bytes,
            calls=tensor_bytes([(call.args, call.kwargs) for call in calls]),
            eager=tuple(eager[kind] for kind in self.kinds),
            compiled=tuple(compiled[kind] for kind in self.kinds),
            cheap=tuple(cheap[kind] for kind in self.kinds),
            layer=layer,
            layer_compiled=bound,
            last_compiled=last,
            holes=max(one.recomputed + one.holes for one in compiled.values()) - largest,
        )

    def graphs_keep_inputs(self) -> tuple[bool, bool, bool]:
        """True where some layer's graph holds its input besides what `bytes_of` counts: eager,
        compiled, compiled with cheap retention."""
        eager = {kind: graph_keeps_input(*self._blank(kind, 1)) for kind in set(self.kinds)}
        known = self.compiled.items()
        compiled = eager | {kind: layer.full.keeps_input for kind, layer in known}
        cheap = eager | {kind: layer.cheap.keeps_input for kind, layer in known}
        return any(eager.values()), any(compiled.values()), any(cheap.values())

    def layer_in_chunks(self, rows: int, chunk_tokens: int) -> int:
        """Working set of the largest layer whose token-wise modules run in chunks of tokens."""
        _ = self.skeleton.token_wise  # found before modules run in chunks
        with self._run_matmuls(), self.skeleton.chunked(chunk_tokens):
            return max(self._layer(kind, rows).peak_bytes for kind in set(self.kinds))

    def head(self, chunk_tokens: int) -> int:
        """Working set of the head and the loss for one chunk."""
        forward, hidden = self._head(chunk_tokens)
        leaves = [hidden, *self._parameters(HEAD)]
        return call_peak_bytes(forward, leaves, what="the LM head").peak_bytes

    def _head(self, tokens: int) -> tuple[Callable[[], Tensor], Tensor]:
        """The forward of head and loss, and its hidden states."""
        size, dtype = (tokens, self.skeleton.anatomy.hidden_size), self.skeleton.dtype
        hidden = torch.empty(size, dtype=dtype, device="meta", requires_grad=True)
        return lambda: self.loss(self.skeleton.head(hidden)), hidden

    def _layer(self, index: int, rows: int) -> Footprint:
        return call_peak_bytes(
            *self._blank(index, rows),
            fused_attention=self.fused,
            runs_on=self.runs_on,
            what=type(self.skeleton.layers[index]).__name__,
            output_stays=False,  # the next layer has read it, or nobody does
        )

    def _blank(self, index: int, rows: int) -> tuple[Callable[[], Tensor], list[Tensor]]:
        """A layer's forward on the meta device, and its hidden states and weights."""
        given = self._shape(rows), self.skeleton.dtype, self._calls(rows)[index]
        frozen = self.skeleton.frozen_in(index)
        return blank_call(self.skeleton.layers[index], *given, frozen=frozen)

    # -- work --------------------------------------------------------------------------------------

    def cost(self, head_tokens: int) -> ModelCost:
        """The work of every block. head_tokens: of a chunk to try the head with."""
        of_kind = {kind: self._layer_cost(kind) for kind in set(self.kinds)}
        anatomy = self.skeleton.anatomy
        count = partial(tally, fused=self.fused, runs_on=self.runs_on)

        def embed(rows: int) -> tuple[Operations, Operations]:
            return count(lambda: self._embed(rows)[0], [], self._parameters(EMBED))

        def head(chunks: int) -> tuple[Operations, Operations]:
            forward, hidden = self._head(chunks * head_tokens)
            return count(forward, [hidden], self._parameters(HEAD))

        of_head = cost_per_token(head, head_tokens)
        if anatomy.labels is None:  # passes over the logits are one kernel each; scores are few
            logits = anatomy.vocab_size * self.skeleton.dtype.itemsize
            fused = Traffic(LOSS_PASSES * logits, LOSS_KERNELS)
            of_head = _with_compiled(of_head, fused, fused)
        layers = tuple(of_kind[kind] for kind in self.kinds)
        return ModelCost(cost_per_token(embed, self.seq_len), layers, of_head)

    def of_images(self) -> ImageCost | None:
        """From the row that the model was tried with, once and twice: towers run on zeros on the
        CPU, as shapes follow from values. Backward is estimated from forward."""
        skeleton, row = self.skeleton, self.skeleton.image_row
        if row is None:
            return None
        tensors = [
            t for t in skeleton.anatomy.embed.layout.tensors if t.name in skeleton.findings.seeing
        ]
        trained = sum(t.numel for t in tensors if not t.frozen)
        trains = 2 * trained > sum(t.numel for t in tensors)  # more than a projector
        once, twice = self._seen(1), self._seen(2)
        layers = recompute_inside(skeleton.findings.tower_layers)
        light, lighter = self._seen(2), self._seen(1)
        tokens, inputs = row["input_ids"].numel(), skeleton.anatomy.of_images & row.keys()
        grown = {name: max(0, twice[name] - once[name]) // tokens for name in once}
        kept, peak = ((light[name] - lighter[name]) // tokens for name in ("live", "peak"))
        of_layer = max(0, grown["live"] - kept) // max(1, layers)

        def one_way(times: int) -> PassCost:
            traffic = Traffic(times * grown["bytes"], times * once["kernels"])
            counted = times * grown["matmul_flops"], times * grown["attention_flops"]
            return PassCost(*counted, traffic, traffic)

        each = skeleton.anatomy.hidden_size * skeleton.dtype.itemsize
        return ImageCost(
            BlockCost(one_way(1), one_way(BACKWARD_FLOPS * trains), keys=once["keys"]),
            # backward frees what a layer saved as its gradients appear
            working_bytes=max(0, peak - kept, of_layer),
            # hidden states are the first layer's; gradients of what is added come to it
            kept_bytes=max(0, kept + (once["sides"] - 1) * each),
            input_bytes=sum(of_dtype(row[n], skeleton.dtype).nbytes for n in inputs) // tokens,
            gradient_bytes=trained * skeleton.dtype.itemsize,
            counted_parameters=counted_parameters(
                skeleton.anatomy, 0, lambda tensor, _: tensor.name in skeleton.findings.seeing
            ),
            tokens=tokens,
        )

    def _seen(self, times: int) -> dict[str, int]:
        """The operations of the embedding on so many rows with an image, and bytes that live."""
        skeleton, row = self.skeleton, self.skeleton.image_row or {}
        rows = {n: of_dtype(torch.cat([value] * times), skeleton.dtype) for n, value in row.items()}
        with skeleton.zeros(), torch.random.fork_rng(devices=[]), torch.enable_grad():
            ops, alive = Operations(self.runs_on, self._parameters(EMBED)), LiveBytes()
            fused = FusedAttention(self.runs_on, ops.attend) if self.fused else nullcontext()
            with fused, ops, alive:
                embedded = skeleton.embed(rows)
            sides = sum(call.side is not None for call in embedded[1])
            found = {n: value for n, value in vars(ops).items() if type(value) is int}
            return found | {"live": alive.live, "peak": alive.peak, "sides": sides}

    def _layer_cost(self, index: int) -> BlockCost:
        layer = self.skeleton.layers[index]
        weights = [layer.get_parameter(f"{name}.weight") for name in self._skippable(index)]

        def run(rows: int) -> tuple[Operations, Operations]:
            forward, (hidden, *own) = self._blank(index, rows)
            return tally(forward, [hidden], own, fused=self.fused, runs_on=self.runs_on)

        cost = cost_per_token(run, self.seq_len)
        given = self._shape(1), self.skeleton.dtype, self._calls(1)[index], self.runs_on
        cost = replace(
            cost,
            skippable_flops=sum(2 * weight.numel() for weight in weights),
            kept_attention_bytes=attention_bytes(layer, *given),
        )
        compiled = self.compiled_bf16.get(index)
        if compiled is None:
            return cost
        full, cheap, tokens = compiled.full, compiled.cheap, compiled.full.rows * self.seq_len
        ways = (way._replace(bytes=way.bytes // tokens) for way in (full.forward, full.backward))
        cheap_bytes = (cheap.backward.bytes - full.backward.bytes) // tokens
        return replace(_with_compiled(cost, *ways), cheap_bytes=cheap_bytes)

    # -- compiled layers ---------------------------------------------------------------------------

    @cached_property
    def compiled_bf16(self) -> dict[int, CompiledLayer]:
        """A compiled layer of each kind that can be traced, matmuls in bf16; empty if not asked."""
        return self._predict_kinds()

    @cached_property
    def compiled(self) -> dict[int, CompiledLayer]:
        """The same with the run's matmuls."""
        if not self.fp8:
            return self.compiled_bf16
        with self._run_matmuls():
            return self._predict_kinds()

    @cached_property
    def compiled_last(self) -> CompiledLayer | None:
        """The last layer with its own matmuls, of which fewer are in fp8 than in other layers."""
        if not self.fp8 or self.kinds[-1] not in self.compiled:
            return self.compiled.get(self.kinds[-1])
        index = len(self.kinds) - 1
        with fp8_matmuls(self.skeleton.layers, Fp8Policy().of_layer(index, len(self.kinds))):
            return self._predict(index)

    def _predict_kinds(self) -> dict[int, CompiledLayer]:
        found = {kind: self._predict(kind) for kind in set(self.kinds) if self.compiles}
        return {kind: layer for kind, layer in found.items() if layer is not None}

    def _predict(self, index: int) -> CompiledLayer | None:
        layers = self.skeleton.layers
        sizes = {size for layer in layers for p in layer.parameters() for size in p.shape}
        primes = (n for n in count(11, 2) if all(n % divisor for divisor in range(3, n, 2)))
        rows = next(n for n in primes if all(size % n for size in (self.seq_len, *sizes)))
        return predict_compiled(
            layers[index],
            self._shape(rows),
            self.skeleton.dtype,
            self._calls(rows)[index],
            fused_attention=self.fused,
            runs_on=self.runs_on,
            skipped=self._skippable(index),
            frozen=self.skeleton.frozen_in(index),
        )

    def _skippable(self, index: int) -> tuple[str, ...]:
        given = self._shape(1), self.skeleton.dtype, self._calls(1)[index]
        return skippable(self.skeleton.layers[index], *given)

    def _run_matmuls(self) -> AbstractContextManager[None]:
        """The run's matmuls, with all outputs in fp8: some layers leave them out, and need less."""
        return fp8_matmuls(self.skeleton.layers, Fp8Policy(ends=0)) if self.fp8 else nullcontext()

    # -- what they run on --------------------------------------------------------------------------

    @property
    def fused(self) -> bool:
        """False for eager attention."""
        return bool(self.skeleton.config._attn_implementation != "eager")

    @cached_property
    def kinds(self) -> list[int]:
        """For each layer, the index of the first layer of its kind, which needs the same."""
        first: dict[Any, int] = {}
        pairs = zip(self.skeleton.layers, self._calls(1), strict=True)
        return [
            first.setdefault(
                # a window may be an attribute, and no mask
                (kind_of(layer, call, at), self.skeleton.frozen_in(at)),
                at,
            )
            for at, (layer, call) in enumerate(pairs)
        ]

    def _embed(self, rows: int) -> tuple[Tensor, list[LayerCall]]:
        tokens = self.seq_len * (self.trade.ranks if self.trade else 1)
        ids = torch.zeros(rows, tokens, dtype=torch.long, device="meta")
        return self.skeleton.embed({"input_ids": ids})

    def _calls(self, rows: int) -> list[LayerCall]:
        if rows not in self._known_calls:
            with torch.no_grad(), without_data():
                hidden, calls = self._embed(rows)
            calls = _padded(self.skeleton, calls, rows, hidden.shape[1]) if self.padded else calls
            if self.trade:
                around = Around(self.trade, implementation_of(self.skeleton.config))
                own = slice(self.seq_len)
                calls = [call_of_piece(call, hidden.shape, own, around) for call in calls]
            self._known_calls[rows] = calls
        return self._known_calls[rows]

    def _shape(self, rows: int) -> tuple[int, int, int]:
        return rows, self.seq_len, self.skeleton.anatomy.hidden_size

    def _parameters(self, block: int) -> list[nn.Parameter]:
        """The meta parameters that a block computes with, tied ones included."""
        anatomy = self.skeleton.anatomy
        names = [spec.name for spec in anatomy.blocks[block].layout.tensors]
        if block == HEAD:
            names += [owner for _, owner in anatomy.tied]
        return [module.get_parameter(leaf) for module, leaf in map(self.skeleton.owner, names)]


def _with_compiled(cost: BlockCost, forward: Traffic, backward: Traffic) -> BlockCost:
    ahead, back = replace(cost.forward, compiled=forward), replace(cost.backward, compiled=backward)
    return replace(cost, forward=ahead, backward=back)


def _padded(
    skeleton: Skeleton, calls: Iterable[LayerCall], rows: int, seq_len: int
) -> list[LayerCall]:
    """The arguments of layers for packed sequences: a mask for each, where an unpacked batch has
    none or one for all, unless it is their kernels that keep documents apart. Layers that share a
    mask go on sharing it. A new one is boolean, the form in which transformers hands a padded batch
    to scaled-dot-product attention."""
    masks: dict[int | None, Tensor] = {}
    padded = []
    for layer, call, masked in zip(skeleton.layers, calls, skeleton.masked, strict=True):
        if not masked:
            padded.append(call)
            continue
        names = [*inspect.signature(layer.forward).parameters][1:]  # after the hidden states
        args, kwargs = list(call.args), dict(call.kwargs)
        place = names.index(MASK) if MASK in names else len(names)
        by_place = place < len(args)
        mask = args[place] if by_place else kwargs.get(MASK)
        key = None if mask is None else id(mask)
        if key not in masks:
            shape, dtype = (1, seq_len, seq_len), torch.bool
            if mask is not None:
                shape, dtype = mask.shape[1:], mask.dtype
            masks[key] = torch.empty(rows, *shape, dtype=dtype, device="meta")
        if by_place:
            args[place] = masks[key]
        else:
            kwargs[MASK] = masks[key]
        padded.append(replace(call, args=tuple(args), kwargs=kwargs))
    return padded


def cross_entropy(logits: Tensor) -> Tensor:
    """Summed cross entropy in fp32 of logits [n, vocab], to targets that do not matter."""
    targets = torch.zeros(len(logits), dtype=torch.long, device=logits.device)
    return functional.cross_entropy(logits.float(), targets, reduction="sum")


# -- a whole model ---------------------------------------------------------------------------------


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
    trade: Trade | None = None,
) -> ModelShape:
    """Dry-run a skeleton whose parameters are on the meta device; no other device is touched.

    Args:
        seq_len: tokens of a full sequence, or of a piece of it with `trade`.
        micro_batch_tokens: sizes to try; each becomes as many full sequences as it holds, at least
            one.
        padded: layers receive a boolean mask [rows, 1, tokens, tokens] of whole sequences, unless
            it is their kernels that keep documents apart.
        head_loss: logits [n, vocab] -> scalar; by default cross entropy in fp32.
        runs_on: "cpu" or "cuda", where the model will compute; their attention kernels differ.
        compiled: predict compiled layers too, a second for each kind of layer. Otherwise, and for
            layers that cannot be traced, compiled figures are the eager ones, which are larger.
        fp8: the layers' matmuls take fp8 operands, which on CUDA need memory besides.
        layer_chunks: chunks of tokens for which to find what layers need.
        trade: of ranks that share every sequence: all numbers of tokens are then of pieces.

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
        trade=trade,
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

    def of_last(of: Callable[[MicroBatchBytes], Sequence[LayerBytes]]) -> tuple[WorkingSet, ...]:
        """Saved bytes of the last 0, 1, 2, ... layers together."""
        sums = []
        for tokens, run in runs.items():
            totals = accumulate((layer.saved for layer in reversed(of(run))), initial=0)
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
        idle_parameters=round(idle * (1 - share_of_experts_trained(anatomy))),
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
