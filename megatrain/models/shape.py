"""The sizes of a model that the planner reckons with: parameters of each block, and what computing on them takes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from megatrain.models.footprint import Footprint, call_peak_bytes, layer_peak_bytes, tensor_bytes
from megatrain.models.recorder import LayerCall
from megatrain.models.skeleton import Skeleton

HEAD_CHUNK_TOKENS = (128, 256, 512, 1024, 2048, 4096, 8192)  # sizes in which the head may walk through a micro-batch


@dataclass(frozen=True)
class WorkingSet:
    """Bytes that a computation needs, by the number of tokens it is given at once: (tokens, bytes) points in rising order."""

    points: tuple[tuple[int, int], ...]

    def at(self, tokens: int) -> int:
        """Bytes for `tokens` at once: exact at a point, an upper bound between points, on the last two points' line beyond.

        A peak is the largest of several moments, each linear in tokens: convex, so that a chord lies above it. Below the first
        point the first point's own bytes are the bound.
        """
        sizes = [size for size, _ in self.points]
        right = bisect_left(sizes, tokens)
        if right < len(sizes) and (sizes[right] == tokens or right == 0):
            return self.points[right][1]
        if len(sizes) == 1:
            return -(-self.points[0][1] * tokens // sizes[0])
        (x0, y0), (x1, y1) = self.points[right - 1 : right + 1] if right < len(sizes) else self.points[-2:]
        return y0 + -(-(y1 - y0) * (tokens - x0) // (x1 - x0))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The token counts that were measured."""
        return tuple(size for size, _ in self.points)


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


def shape_of(
    skeleton: Skeleton,
    seq_len: int,
    micro_batch_tokens: Iterable[int],
    *,
    padded: bool = False,
    head_loss: Callable[[Tensor], Tensor] | None = None,
    runs_on: str = "cpu",
) -> ModelShape:
    """Dry-run a skeleton whose parameters are still on the meta device. Nothing is allocated and no device is touched.

    Args:
        seq_len: tokens of a full row.
        micro_batch_tokens: sizes to try; each becomes as many full rows as it holds, at least one.
        padded: rows are padded, so every layer receives a boolean mask [rows, 1, seq_len, seq_len].
        head_loss: logits [n, vocab] -> scalar; by default cross entropy in fp32.
        runs_on: "cpu" or "cuda", where the model will compute: not every attention kernel exists on both.

    Raises:
        ModelError: a part of the model cannot run without data.
    """
    assert all(p.is_meta for layer in skeleton.layers for p in layer.parameters()), "shape_of needs a skeleton that is not bound yet"
    anatomy = skeleton.anatomy
    runs = {
        rows * seq_len: _dry_run(skeleton, rows, seq_len, padded, runs_on)
        for rows in sorted({max(1, n // seq_len) for n in micro_batch_tokens})
    }
    loss = head_loss or _cross_entropy
    return ModelShape(
        family=anatomy.family,
        parameters=anatomy.parameters,
        block_numel=tuple(block.layout.numel for block in anatomy.blocks),
        tied=anatomy.embed_feeds_head,
        hidden_size=anatomy.hidden_size,
        vocab_size=anatomy.vocab_size,
        layer=WorkingSet(tuple((tokens, run.layer_bytes) for tokens, run in runs.items())),
        embed=WorkingSet(tuple((tokens, run.embed_bytes) for tokens, run in runs.items())),
        head=WorkingSet(tuple((n, _head(skeleton, n, loss).peak_bytes) for n in HEAD_CHUNK_TOKENS)),
        calls=WorkingSet(tuple((tokens, run.call_bytes) for tokens, run in runs.items())),
    )


@dataclass(frozen=True)
class _DryRun:
    """Bytes of one micro-batch shape."""

    layer_bytes: int
    embed_bytes: int
    call_bytes: int


def _dry_run(skeleton: Skeleton, rows: int, seq_len: int, padded: bool, runs_on: str) -> _DryRun:
    calls: list[LayerCall] = []

    def embed() -> Tensor:
        hidden, received = skeleton.embed({"input_ids": torch.zeros(rows, seq_len, dtype=torch.long, device="meta")})
        calls[:] = received
        return hidden

    embed_bytes = call_peak_bytes(embed, _parameters(skeleton, 0), what="the embedding").peak_bytes
    if padded:
        calls = _padded(calls, rows, seq_len)
    fused = getattr(skeleton.config, "_attn_implementation", None) != "eager"
    hidden_shape = (rows, seq_len, skeleton.anatomy.hidden_size)
    layer_bytes = max(
        layer_peak_bytes(layer, hidden_shape, skeleton.dtype, call.kwargs, call.args, fused_attention=fused, runs_on=runs_on).peak_bytes
        for layer, call in _distinct(skeleton.layers, calls)
    )
    return _DryRun(layer_bytes, embed_bytes, tensor_bytes([(call.args, call.kwargs) for call in calls]))


def _padded(calls: Iterable[LayerCall], rows: int, seq_len: int) -> list[LayerCall]:
    """What the layers receive when rows are padded: a mask per row, where an unpadded batch has none or one for all rows.

    Layers that share a mask go on sharing it.
    """
    masks: dict[int | None, Tensor] = {}
    padded = []
    for call in calls:
        mask = call.kwargs.get("attention_mask")
        per_row = torch.empty(rows, *mask.shape[1:], dtype=mask.dtype, device="meta") if mask is not None else _boolean_mask(rows, seq_len)
        shared = masks.setdefault(None if mask is None else id(mask), per_row)
        padded.append(LayerCall(call.args, {**call.kwargs, "attention_mask": shared}))
    return padded


def _boolean_mask(rows: int, seq_len: int) -> Tensor:
    """The form in which transformers hands a padded batch to scaled-dot-product attention."""
    return torch.empty(rows, 1, seq_len, seq_len, dtype=torch.bool, device="meta")


def _distinct(layers: Sequence[nn.Module], calls: Sequence[LayerCall]) -> Iterable[tuple[nn.Module, LayerCall]]:
    """One of each kind of layer: layers of one class with equal parameter shapes and equal inputs need equal bytes."""

    def describe(value: Any) -> Any:
        return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else type(value)

    kinds = {}
    for layer, call in zip(layers, calls, strict=True):
        shapes = tuple((name, tuple(p.shape)) for name, p in layer.named_parameters())
        inputs = tuple(describe(leaf) for leaf in pytree.tree_leaves((call.args, call.kwargs)))
        kinds[type(layer), shapes, inputs] = (layer, call)
    return kinds.values()


def _head(skeleton: Skeleton, chunk_tokens: int, loss: Callable[[Tensor], Tensor]) -> Footprint:
    hidden = torch.empty(chunk_tokens, skeleton.anatomy.hidden_size, dtype=skeleton.dtype, device="meta", requires_grad=True)
    parameters = _parameters(skeleton, len(skeleton.layers) + 1)
    return call_peak_bytes(lambda: loss(skeleton.head(hidden)), [hidden, *parameters], what="the LM head")


def _parameters(skeleton: Skeleton, block: int) -> list[nn.Parameter]:
    """The meta parameters that a block computes with, tied ones included."""
    names = {spec.name for spec in skeleton.anatomy.blocks[block].layout.tensors}
    if block > 0:
        names |= {owner for _, owner in skeleton.anatomy.tied}
    return [parameter for name, parameter in skeleton.model.named_parameters() if name in names]


def _cross_entropy(logits: Tensor) -> Tensor:
    targets = torch.zeros(len(logits), dtype=torch.long, device=logits.device)
    return functional.cross_entropy(logits.float(), targets, reduction="sum")
