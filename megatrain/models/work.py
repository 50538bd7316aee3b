"""What a piece of the model asks of the device that computes it: arithmetic, memory traffic, kernel launches.

Found by running it on the meta device and counting operations, so the figures hold for every family. An operation is taken for one
kernel that reads its inputs and writes its outputs once; views and allocations are free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatrain.models.footprint import AssumeYes, FusedAttention, fused_attention

aten = torch.ops.aten
PRODUCTS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten._grouped_mm}
FREE = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
LOOKUPS = {aten.embedding, aten.index, aten.index_select, aten.gather}  # of their first input they read what they return
FUSED_BACKWARD_KERNELS = 3  # flash and cuDNN: sums of rows, the gradients, rounding of the query's
BACKWARD_FLOPS = 2  # a product's gradients are two products


@dataclass(frozen=True)
class Pass:
    """One direction, forward or backward, of one block. FLOPs and bytes are per token, kernels per micro-batch.

    Bytes are the traffic of everything but matrix products and fused attention: tensors read and written. "Compiled" is what
    torch.compile makes of the same computation, an estimate.
    """

    matmul_flops: int  # of products with parameters; of a mixture only those with a token's own experts
    attention_flops: int  # of queries with keys and of probabilities with values, rows of the shape's length; causal counts half
    eager_bytes: int
    compiled_bytes: int
    eager_kernels: int
    compiled_kernels: int


@dataclass(frozen=True)
class LayerWork:
    """What one block computes: a decoder layer, the embedding, or the head with its loss. Backward counts no product computed again.

    `skippable_flops` are those of forward.matmul_flops that recomputing it for its gradients may leave out (models/skippable.py).
    `cheap_bytes` and `cheap_kernels` are what cheap retention adds to a compiled backward: bytes per token, kernels per micro-batch.
    Embedding and head are never compiled, and where compilation was not asked about, compiled figures are the eager ones.
    """

    forward: Pass
    backward: Pass
    skippable_flops: int = 0
    cheap_bytes: int = 0
    cheap_kernels: int = 0


@dataclass(frozen=True)
class ModelWork:
    """The work of every block; layers of one kind share one object."""

    embed: LayerWork
    layers: tuple[LayerWork, ...]
    head: LayerWork


class Traffic(NamedTuple):
    """Of one run in one direction: bytes that all but matrix products and fused attention read and write, and kernels of all."""

    bytes: int
    kernels: int


@dataclass(frozen=True)
class Tally:
    """What one run of some computation took; FLOPs are the forward's."""

    matmul_flops: int
    attention_flops: int
    forward: Traffic
    backward: Traffic


def tally(forward: Callable[[], Tensor], inputs: Sequence[Tensor], parameters: Sequence[Tensor], *, fused: bool, runs_on: str) -> Tally:
    """Count the operations of `forward()` and of the gradients of its output with respect to `inputs` and `parameters`.

    All on the meta device. Products with `parameters` are matrix products, all others are attention's. fused: False for eager attention.
    """
    ahead, back, attention = Operations(parameters), Operations(()), AttentionCalls()
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), AssumeYes():  # type: ignore[no-untyped-call]
        with FusedAttention(runs_on, attention) if fused else nullcontext(), ahead:
            out = forward()
        grad = torch.empty_like(out)
        with back:
            torch.autograd.grad(out, [*inputs, *parameters], grad, allow_unused=True)
    return Tally(
        ahead.matmul_flops,
        ahead.attention_flops + attention.flops,
        Traffic(ahead.bytes, ahead.kernels + attention.count),
        Traffic(back.bytes, back.kernels + FUSED_BACKWARD_KERNELS * attention.count),
    )


def work_per_token(run: Callable[[int], Tally], tokens: int) -> LayerWork:
    """Of a block, from `run(1)` over `tokens` and `run(2)` over twice as many: what does not grow with them is no token's."""
    once, twice = run(1), run(2)

    def grown(small: int, large: int) -> int:
        return (large - small) // tokens

    matmul, attention = grown(once.matmul_flops, twice.matmul_flops), grown(once.attention_flops, twice.attention_flops)

    def one_way(times: int, small: Traffic, large: Traffic) -> Pass:
        moved = grown(small.bytes, large.bytes)
        return Pass(times * matmul, times * attention, moved, moved, small.kernels, small.kernels)

    return LayerWork(one_way(1, once.forward, twice.forward), one_way(BACKWARD_FLOPS, once.backward, twice.backward))


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what runs under it."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._parameters = {_memory(p) for p in parameters}
        self.matmul_flops = self.attention_flops = self.bytes = self.kernels = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        read, written = _tensors((args, kwargs)), _tensors(out)
        if func.overloadpacket in PRODUCTS:
            self._count_product(func.overloadpacket, read)
        elif func.overloadpacket not in FREE and (func._schema.is_mutable or not _is_view(read, written)):
            self.kernels += 1
            if func.overloadpacket in LOOKUPS:
                read = [*read[1:], *written]
            self.bytes += _nbytes(read) + _nbytes(written)
        return out

    def _count_product(self, packet: Any, read: list[Tensor]) -> None:
        self.kernels += 1
        flops = product_flops(*(tuple(t.shape) for t in read[1 if packet in (aten.addmm, aten.baddbmm) else 0 :][:2]))
        if self._parameters.isdisjoint(map(_memory, read)):
            self.attention_flops += flops
        else:
            self.matmul_flops += flops


class AttentionCalls:
    """Stands in for fused attention, and counts its calls and the FLOPs of their forwards."""

    def __init__(self) -> None:
        self.count = self.flops = 0

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **_: Any,
    ) -> Tensor:
        rows, heads, queries, width = query.shape
        keys = key.shape[2]
        pairs = queries * (queries + 1) // 2 if is_causal else queries * keys  # a mask is read, not skipped
        self.count += 1
        self.flops += 2 * rows * heads * pairs * (width + value.shape[-1])
        return fused_attention(query, key, value, attn_mask)


def product_flops(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Of a matrix product of these shapes. A group of products shares its rows out among the matrices of `b`."""
    batches = a[:-2] if len(a) == len(b) else ()
    return 2 * prod(batches) * a[-2] * a[-1] * b[-1]


def _nbytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of distinct tensors; an expanded one is read from what it was expanded from."""
    return sum({_memory(t): min(t.numel() * t.element_size(), t.untyped_storage().nbytes()) for t in tensors}.values())


def _is_view(read: Sequence[Tensor], written: Sequence[Tensor]) -> bool:
    return {_memory(t) for t in written} <= {_memory(t) for t in read}


def _memory(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
