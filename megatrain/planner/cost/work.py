"""The work of a model's blocks: arithmetic, memory traffic and kernel launches.

Found by running a block on the meta device and counting operations, so the figures hold for every
family. An operation is taken for one kernel that reads its inputs and writes its outputs once;
views and allocations are free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from math import prod
from typing import Any

import torch
from torch import Tensor

from megatrain.models.implementations import MATRICES_GRADIENT
from megatrain.models.meta import Watch, storage_of, without_data
from megatrain.planner.cost.footprint import Attention, FusedAttention, fused_attention
from megatrain.planner.cost.shape import BlockCost, PassCost, Traffic

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
        return int(getattr(twice, field) - getattr(once, field)) // tokens

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
            # a grouped matmul divides its rows among the matrices of `b`
            batches = a.shape[:-2] if a.ndim == b.ndim else ()
            flops = 2 * prod(batches) * a.shape[-2] * a.shape[-1] * b.shape[-1]
            own = self._parameters.intersection(map(storage_of, read))
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


def _nbytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of distinct tensors; an expanded one is read from what it was expanded from."""
    sizes = {storage_of(t): min(t.nbytes, t.untyped_storage().nbytes()) for t in tensors}
    return sum(sizes.values())
