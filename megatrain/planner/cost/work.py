"""The work of a model's blocks: arithmetic, memory traffic and kernel launches.

Found by running a block on the meta device and counting operations, so the figures hold for every
family. An operation is taken for one kernel that reads its inputs and writes its outputs once;
views and allocations are free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatrain.models.implementations import MATRICES_GRADIENT
from megatrain.models.meta import Watch, storage_of, without_data
from megatrain.planner.cost.footprint import Attention, FusedAttention, fused_attention

aten = torch.ops.aten
MATMULS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten._grouped_mm, MATRICES_GRADIENT}
GROUPED = {"aten._grouped_mm", "transformers.grouped_mm_fallback"}  # the second is known late
FREE = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
# Of their first input these read only what they return.
LOOKUPS = {aten.embedding, aten.index, aten.index_select, aten.gather}
# Flash's and cuDNN's: sums of rows, the gradients, rounding of the query's.
FUSED_BACKWARD_KERNELS = 3
TILE_COLUMNS = 64  # of the heads of fused attention on CUDA
BACKWARD_FLOPS = 2  # a matmul's gradients are two matmuls


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
    def rows_per_expert(self) -> float:
        """For each token, on average; 0 without experts."""
        return self.expert_flops / 2 / max(1, self.expert_parameters)

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


def tally(
    forward: Callable[[], Tensor],
    inputs: Sequence[Tensor],
    parameters: Sequence[Tensor],
    *,
    fused: bool,
    runs_on: str,
) -> tuple[Operations, Operations]:
    """Count the operations of `forward()`, and of its gradients by `inputs` and `parameters`. All
    on the meta device. Matmuls without any of `parameters` are attention's. Those of them that
    require no gradient are frozen. fused: False for eager attention."""
    wanted = [leaf for leaf in (*inputs, *parameters) if leaf.requires_grad]
    ahead, back = Operations(runs_on, parameters), Operations(runs_on)
    with without_data(runs_on), torch.enable_grad():
        with FusedAttention(runs_on, ahead.attend) if fused else nullcontext(), ahead:
            out = forward()
        if wanted:
            with back:
                torch.autograd.grad(out, wanted, torch.empty_like(out), allow_unused=True)
    back.kernels += FUSED_BACKWARD_KERNELS * ahead.attentions
    return ahead, back


def cost_per_token(run: Callable[[int], tuple[Operations, Operations]], tokens: int) -> BlockCost:
    """The cost of a block, from `run(1)` over `tokens` and `run(2)` over twice as many: what does
    not grow between the two belongs to no token."""
    (once, back), (twice, back_of_twice) = run(1), run(2)

    def grown(field: str) -> int:
        found: int = (getattr(twice, field) - getattr(once, field)) // tokens
        return found

    def one_way(times: int, products: int, small: Operations, large: Operations) -> PassCost:
        traffic = Traffic((large.bytes - small.bytes) // tokens, small.kernels)
        return PassCost(products, times * grown("attention_flops"), traffic, traffic)

    matmul, frozen = grown("matmul_flops"), grown("frozen_flops")
    return BlockCost(
        one_way(1, matmul, once, twice),
        # a frozen matrix has no gradient of its own
        one_way(BACKWARD_FLOPS, BACKWARD_FLOPS * matmul - frozen, back, back_of_twice),
        expert_parameters=sum(once.experts.values()),
        expert_flops=grown("expert_flops"),
        frozen_expert_flops=grown("frozen_expert_flops"),
        keys=once.keys,
    )


class Operations(Watch):  # type: ignore[no-untyped-call]
    """Counts what runs under it."""

    def __init__(self, runs_on: str, parameters: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self._columns = TILE_COLUMNS if runs_on == "cuda" else 1
        self._parameters = set(map(storage_of, parameters))
        self._frozen = {storage_of(p) for p in parameters if not p.requires_grad}
        self.bytes = self.kernels = 0
        self.matmul_flops = self.attention_flops = self.frozen_flops = 0
        self.expert_flops = self.frozen_expert_flops = 0  # of matmuls divided among experts
        self.experts: dict[int, int] = {}  # elements of experts' matrices, by their storage
        self.attentions = self.keys = 0  # calls of fused attention, and keys of the largest

    def saw(self, func: Any, read: list[Tensor], written: list[Tensor]) -> None:
        packet = func.overloadpacket
        is_view = set(map(storage_of, written)) <= set(map(storage_of, read))
        grouped = str(packet) in GROUPED
        if packet in MATMULS or grouped:
            self.kernels += 1
            a, b = read[1 if packet in (aten.addmm, aten.baddbmm) else 0 :][:2]
            flops, storages = flops_of_matmul(tuple(a.shape), tuple(b.shape)), map(storage_of, read)
            own = self._parameters.intersection(storages)
            if not own:
                self.attention_flops += flops
                return
            frozen = not own.isdisjoint(self._frozen)
            self.matmul_flops += flops
            self.frozen_flops += frozen * flops
            self.frozen_expert_flops += frozen * grouped * flops
            if grouped:
                self.expert_flops += flops
                self.experts[storage_of(b)] = b.numel()
        elif packet not in FREE and (func._schema.is_mutable or not is_view):
            self.kernels += 1
            if packet in LOOKUPS:
                read = [*read[1:], *written]
            self.bytes += _nbytes(read) + _nbytes(written)

    def attend(self, call: Attention) -> Tensor:
        """Stands in for fused attention; on CUDA, where kernels compute a head of 72 columns as one
        of 128, FLOPs are those of whole tiles."""
        rows, heads, queries, width = call.query.shape
        # a mask is read, not skipped
        pairs = queries * (queries + 1) // 2 if call.is_causal else queries * call.key.shape[2]
        self.attentions += 1
        self.kernels += 1
        self.keys = max(self.keys, call.key.shape[2])
        columns = sum(-(-n // self._columns) for n in (width, call.value.shape[-1])) * self._columns
        self.attention_flops += 2 * rows * heads * pairs * columns
        return fused_attention(call)


def flops_of_matmul(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """FLOPs of a matmul of these shapes; a grouped one divides its rows among matrices of `b`."""
    batches = a[:-2] if len(a) == len(b) else ()
    return 2 * prod(batches) * a[-2] * a[-1] * b[-1]


def _nbytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of distinct tensors; an expanded one is read from what it was expanded from."""
    sizes = {storage_of(t): min(t.nbytes, t.untyped_storage().nbytes()) for t in tensors}
    return sum(sizes.values())
