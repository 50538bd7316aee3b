"""The work of a model's blocks: arithmetic, memory traffic and kernel launches.

Found by running a block on the meta device and counting operations, so the figures hold for every
family. An operation is taken for one kernel that reads its inputs and writes its outputs once;
views and allocations are free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
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


@dataclass(frozen=True)
class PassCost:
    """The forward or backward pass of one block: FLOPs and bytes per token, kernels per
    micro-batch.

    Bytes are read or written by everything but matmuls and fused attention. "Compiled" is an
    estimate of what torch.compile makes of the same computation.
    """

    matmul_flops: int  # with parameters; in a mixture only with a token's own experts
    attention_flops: int  # at the shape's sequence length; causal attention counts half
    eager_bytes: int
    compiled_bytes: int
    eager_kernels: int
    compiled_kernels: int


@dataclass(frozen=True)
class BlockCost:
    """A decoder layer, the embedding, or the head with its loss; backward without recomputation.

    The embedding is never compiled, the head but for its loss. Where nothing is known of compiling,
    compiled figures are the eager ones.
    """

    forward: PassCost
    backward: PassCost
    expert_parameters: int = 0  # in matrices of all experts
    expert_flops: int = 0  # of forward.matmul_flops, what a token's own experts take
    frozen_expert_flops: int = 0  # of these, with frozen matrices
    skippable_flops: int = 0  # of forward.matmul_flops, what recomputation may leave out
    cheap_bytes: int = 0  # per token: what cheap retention adds to a compiled backward
    keys: int = 0  # that fused attention goes over at once, as in a window; 0: it has none

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


class Traffic(NamedTuple):
    """One run of one pass: bytes as in `PassCost`, and kernels, matmuls and attention included."""

    bytes: int
    kernels: int


@dataclass(frozen=True)
class Tally:
    """The work of one run of some computation; FLOPs are the forward's."""

    matmul_flops: int
    attention_flops: int
    forward: Traffic
    backward: Traffic
    expert_flops: int  # of matmul_flops, those whose rows are divided among experts
    expert_parameters: int  # of all experts together
    frozen_flops: int = 0  # of matmul_flops, those with parameters that are frozen
    frozen_expert_flops: int = 0  # of these, the experts'
    keys: int = 0  # of the fused attention's largest call


def tally(
    forward: Callable[[], Tensor],
    inputs: Sequence[Tensor],
    parameters: Sequence[Tensor],
    *,
    fused: bool,
    runs_on: str,
) -> Tally:
    """Count the operations of `forward()` and of its gradients by `inputs` and `parameters`.

    All on the meta device. Matmuls without any of `parameters` are attention's. Those of them that
    require no gradient are frozen.
    fused: False for eager attention. runs_on: "cpu" or "cuda".
    """
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    wanted = [leaf for leaf in (*inputs, *parameters) if leaf.requires_grad]
    ahead, back = Operations(parameters, frozen), Operations(())
    attention = AttentionCalls(runs_on)
    with without_data(runs_on), torch.enable_grad():
        with FusedAttention(runs_on, attention) if fused else nullcontext(), ahead:
            out = forward()
        if wanted:
            with back:
                torch.autograd.grad(out, wanted, torch.empty_like(out), allow_unused=True)
    return Tally(
        ahead.matmul_flops,
        ahead.attention_flops + attention.flops,
        Traffic(ahead.bytes, ahead.kernels + attention.count),
        Traffic(back.bytes, back.kernels + FUSED_BACKWARD_KERNELS * attention.count),
        ahead.expert_flops,
        sum(ahead.experts.values()),
        ahead.frozen_flops,
        ahead.frozen_expert_flops,
        attention.keys,
    )


def cost_per_token(run: Callable[[int], Tally], tokens: int) -> BlockCost:
    """The cost of a block, from `run(1)` over `tokens` and `run(2)` over twice as many.

    What does not grow between the two belongs to no token.
    """
    once, twice = run(1), run(2)

    def grown(small: int, large: int) -> int:
        return (large - small) // tokens

    matmul = grown(once.matmul_flops, twice.matmul_flops)
    attention = grown(once.attention_flops, twice.attention_flops)

    frozen = grown(once.frozen_flops, twice.frozen_flops)

    def one_way(times: int, products: int, small: Traffic, large: Traffic) -> PassCost:
        moved, kernels = grown(small.bytes, large.bytes), small.kernels
        return PassCost(products, times * attention, moved, moved, kernels, kernels)

    return BlockCost(
        one_way(1, matmul, once.forward, twice.forward),
        # a frozen matrix has no gradient of its own
        one_way(BACKWARD_FLOPS, BACKWARD_FLOPS * matmul - frozen, once.backward, twice.backward),
        expert_parameters=once.expert_parameters,
        expert_flops=grown(once.expert_flops, twice.expert_flops),
        frozen_expert_flops=grown(once.frozen_expert_flops, twice.frozen_expert_flops),
        keys=once.keys,
    )


class Operations(Watch):  # type: ignore[no-untyped-call]
    """Counts what runs under it. frozen: some of the parameters."""

    def __init__(self, parameters: Sequence[Tensor], frozen: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self._parameters = set(map(storage_of, parameters))
        self._frozen = set(map(storage_of, frozen))
        self.matmul_flops = self.attention_flops = self.bytes = self.kernels = 0
        self.expert_flops = self.frozen_flops = self.frozen_expert_flops = 0
        self.experts: dict[int, int] = {}  # elements of experts' matrices, by their storage

    def saw(self, func: Any, read: list[Tensor], written: list[Tensor]) -> None:
        packet = func.overloadpacket
        is_view = set(map(storage_of, written)) <= set(map(storage_of, read))
        grouped = str(packet) in GROUPED
        if packet in MATMULS or grouped:
            self.kernels += 1
            a, b = read[1 if packet in (aten.addmm, aten.baddbmm) else 0 :][:2]
            flops = flops_of_matmul(tuple(a.shape), tuple(b.shape))
            if self._parameters.isdisjoint(map(storage_of, read)):
                self.attention_flops += flops
            else:
                self.matmul_flops += flops
                frozen = not self._frozen.isdisjoint(map(storage_of, read))
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


class AttentionCalls:
    """Stands in for fused attention, and counts its calls and the FLOPs of their forwards: on CUDA
    those of whole tiles, since kernels compute a head of 72 columns as one of 128."""

    def __init__(self, runs_on: str) -> None:
        self.count = self.flops = self.keys = 0
        self._columns = TILE_COLUMNS if runs_on == "cuda" else 1

    def __call__(self, call: Attention) -> Tensor:
        rows, heads, queries, width = call.query.shape
        # a mask is read, not skipped
        pairs = queries * (queries + 1) // 2 if call.is_causal else queries * call.key.shape[2]
        self.count += 1
        self.keys = max(self.keys, call.key.shape[2])
        columns = sum(-(-n // self._columns) for n in (width, call.value.shape[-1])) * self._columns
        self.flops += 2 * rows * heads * pairs * columns
        return fused_attention(call)


def flops_of_matmul(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """FLOPs of a matmul of these shapes; a grouped one divides its rows among matrices of `b`."""
    batches = a[:-2] if len(a) == len(b) else ()
    return 2 * prod(batches) * a[-2] * a[-1] * b[-1]


def _nbytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of distinct tensors; an expanded one is read from what it was expanded from."""
    sizes = {storage_of(t): min(t.nbytes, t.untyped_storage().nbytes()) for t in tensors}
    return sum(sizes.values())
