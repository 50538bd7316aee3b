"""A model's parts run on the meta device, one kind of part after another, to see what they would need and do."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from megatrain.models.compiled import CompiledLayer, trace_compiled
from megatrain.models.footprint import AssumeYes, Footprint, call_peak_bytes, graph_keeps_input, layer_peak_bytes, tensor_bytes
from megatrain.models.fp8 import Fp8Policy, fp8_products
from megatrain.models.recorder import LayerCall, kind_of
from megatrain.models.skeleton import Skeleton
from megatrain.models.skippable import skippable
from megatrain.models.traced import Alive
from megatrain.models.work import LayerWork, ModelWork, Pass, Tally, Traffic, tally, work_per_token

EMBED, HEAD = 0, -1  # blocks
PRIMES = (11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97, 101, 103, 107, 109, 113, 127, 131)


@dataclass(frozen=True)
class MicroBatchBytes:
    """What one micro-batch needs."""

    layer: int  # working set of the hungriest layer
    embed: int  # working set of the embedding
    calls: int  # handed to the layers besides hidden states
    kept: tuple[int, ...]  # by each layer's graph between forward and backward, less the layer's output
    kept_compiled: tuple[int, ...]
    kept_cheap: tuple[int, ...]
    layer_compiled: int  # as `layer`; where it was not compiled, the same
    last_compiled: int  # the same of the last layer
    beyond_graph: int  # of the hungriest compiled layer, what its backward takes beyond what its graph holds
    beyond_cheap_graph: int


class DryRun:
    """Runs parts of a skeleton whose parameters are on the meta device.

    Args:
        seq_len: tokens of a row.
        padded: layers receive a boolean mask for every row.
        loss: logits [n, vocab] -> scalar.
        runs_on: "cpu" or "cuda", where the model will compute.
        compiled: trace the layers as torch.compile would; otherwise all are taken to be eager.
        fp8: the layers' products take fp8 operands, which lie in memory besides. Their work is counted in bf16.
    """

    def __init__(
        self, skeleton: Skeleton, seq_len: int, *, padded: bool, loss: Callable[[Tensor], Tensor], runs_on: str, compiled: bool, fp8: bool
    ) -> None:
        self.skeleton, self.seq_len, self.padded, self.loss = skeleton, seq_len, padded, loss
        self.runs_on, self.compiled, self.fp8 = runs_on, compiled, fp8
        self._known_calls: dict[int, list[LayerCall]] = {}
        self.fused = getattr(skeleton.config, "_attn_implementation", None) != "eager"

    # -- bytes ------------------------------------------------------------------------------------------------------------------

    def bytes_of(self, rows: int) -> MicroBatchBytes:
        """Of a micro-batch of so many full rows."""
        calls = self._calls(rows)
        with self._products():
            of_kind = {index: self._layer(index, rows, calls[index]) for index in set(self.kinds)}
        footprints = [of_kind[kind] for kind in self.kinds]
        output = rows * self.seq_len * self.skeleton.anatomy.hidden_size * self.skeleton.dtype.itemsize
        kept = tuple(footprint.saved_bytes - output for footprint in footprints)
        peak = {kind: footprint.peak_bytes for kind, footprint in of_kind.items()}
        beyond = {kind: peak[kind] - footprint.saved_bytes + output for kind, footprint in of_kind.items()}

        def compiled(saved: Callable[[CompiledLayer], int]) -> tuple[int, ...]:
            pairs = zip(self.kinds, kept, strict=True)
            return tuple(rows * saved(self.traced[kind]) // self.traced_rows if kind in self.traced else eager for kind, eager in pairs)

        def hungriest(of_compiled: Callable[[CompiledLayer], Alive], of_eager: dict[int, int]) -> int:
            return max(of_compiled(self.traced[kind]).peak(rows) if kind in self.traced else eager for kind, eager in of_eager.items())

        again = min(hungriest(lambda layer: layer.again, peak), max(peak.values()))  # either is a bound
        return MicroBatchBytes(
            layer=max(peak.values()),
            embed=call_peak_bytes(lambda: self._embed(rows)[0], self._parameters(EMBED), what="the embedding").peak_bytes,
            calls=tensor_bytes([(call.args, call.kwargs) for call in calls]),
            kept=kept,
            kept_compiled=compiled(lambda layer: layer.saved_bytes),
            kept_cheap=compiled(lambda layer: layer.cheap_saved_bytes),
            layer_compiled=again,
            last_compiled=again if self.traced_last is None else min(again, self.traced_last.again.peak(rows)),
            beyond_graph=hungriest(lambda layer: layer.beyond, beyond),
            beyond_cheap_graph=hungriest(lambda layer: layer.cheap_beyond, beyond),
        )

    def graphs_keep_inputs(self) -> tuple[bool, bool, bool]:
        """Whether some layer's graph holds its input besides what `bytes_of` counts: eager, compiled, and cheaply retained."""
        layers, calls = self.skeleton.layers, self._calls(1)
        eager = {
            index: graph_keeps_input(layers[index], self._shape(1), self.skeleton.dtype, calls[index].kwargs, calls[index].args)
            for index in set(self.kinds)
        }
        compiled = [self.traced[kind].keeps_input if kind in self.traced else kept for kind, kept in eager.items()]
        cheap = [self.traced[kind].cheap_keeps_input if kind in self.traced else kept for kind, kept in eager.items()]
        return any(eager.values()), any(compiled), any(cheap)

    def layer_in_chunks(self, rows: int, chunk_tokens: int) -> int:
        """Working set of the hungriest layer whose token-wise parts are computed so many tokens at a time."""
        calls = self._calls(rows)
        self.skeleton.find_token_wise()
        with self._products(), self.skeleton.chunked(chunk_tokens):
            return max(self._layer(index, rows, calls[index]).peak_bytes for index in set(self.kinds))

    def head(self, chunk_tokens: int) -> Footprint:
        """Of the head and the loss for so many tokens."""
        hidden = self._hidden(chunk_tokens, self.skeleton.anatomy.hidden_size)
        return call_peak_bytes(lambda: self.loss(self.skeleton.head(hidden)), [hidden, *self._parameters(HEAD)], what="the LM head")

    def _layer(self, index: int, rows: int, call: LayerCall) -> Footprint:
        return layer_peak_bytes(
            self.skeleton.layers[index],
            self._shape(rows),
            self.skeleton.dtype,
            call.kwargs,
            call.args,
            fused_attention=self.fused,
            runs_on=self.runs_on,
            output_stays=False,  # the next layer has read it, or nobody does
        )

    # -- work -------------------------------------------------------------------------------------------------------------------

    def work(self, head_tokens: int) -> ModelWork:
        """Of every block. head_tokens: a chunk to try the head with."""
        of_kind = {index: self._layer_work(index) for index in set(self.kinds)}
        return ModelWork(
            embed=work_per_token(lambda rows: self._tally(EMBED, lambda: self._embed(rows)[0]), self.seq_len),
            layers=tuple(of_kind[kind] for kind in self.kinds),
            head=work_per_token(lambda chunks: self._head_tally(chunks * head_tokens), head_tokens),
        )

    def _layer_work(self, index: int) -> LayerWork:
        layer = self.skeleton.layers[index]
        skipped = sum(2 * layer.get_parameter(f"{name}.weight").numel() for name in self._skippable(index))
        work = replace(work_per_token(lambda rows: self._layer_tally(index, rows), self.seq_len), skippable_flops=skipped)
        if index not in self.traced_plainly:
            return work
        traced = self.traced_plainly[index]
        return replace(
            work,
            forward=self._compiled(work.forward, traced.forward),
            backward=self._compiled(work.backward, traced.backward),
            cheap_bytes=(traced.cheap_backward.bytes - traced.backward.bytes) // (self.traced_rows * self.seq_len),
            cheap_kernels=traced.cheap_backward.kernels - traced.backward.kernels,
        )

    def _compiled(self, eager: Pass, traffic: Traffic) -> Pass:
        return replace(eager, compiled_bytes=traffic.bytes // (self.traced_rows * self.seq_len), compiled_kernels=traffic.kernels)

    def _layer_tally(self, index: int, rows: int) -> Tally:
        hidden, call = self._hidden(*self._shape(rows)), self._calls(rows)[index]
        return self._tally(1 + index, lambda: self.skeleton.layer(index, hidden, call), hidden)

    def _head_tally(self, tokens: int) -> Tally:
        hidden = self._hidden(tokens, self.skeleton.anatomy.hidden_size)
        return self._tally(HEAD, lambda: self.loss(self.skeleton.head(hidden)), hidden)

    def _tally(self, block: int, forward: Callable[[], Tensor], *inputs: Tensor) -> Tally:
        return tally(forward, inputs, self._parameters(block), fused=self.fused, runs_on=self.runs_on)

    @cached_property
    def traced(self) -> dict[int, CompiledLayer]:
        """`traced_plainly`, but with the products that the run computes."""
        if not self.fp8:
            return self.traced_plainly
        with self._products():
            return self._traces()

    @cached_property
    def traced_last(self) -> CompiledLayer | None:
        """The last layer with the products that it computes: of those in fp8 fewer than any other's."""
        if not self.fp8 or self.kinds[-1] not in self.traced:
            return self.traced.get(self.kinds[-1])
        index = len(self.kinds) - 1
        with fp8_products(self.skeleton.layers, Fp8Policy().of_layer(index, len(self.kinds))):
            return self._trace(index)

    @cached_property
    def traced_plainly(self) -> dict[int, CompiledLayer]:
        """`traced_rows` through a compiled layer of each kind that can be traced; empty unless asked for."""
        return self._traces()

    def _traces(self) -> dict[int, CompiledLayer]:
        kinds = set(self.kinds) if self.compiled else set()
        found = {index: self._trace(index) for index in kinds}
        return {index: layer for index, layer in found.items() if layer is not None}

    @cached_property
    def traced_rows(self) -> int:
        """A prime that divides no size of the model: what it divides in a trace grows with the rows."""
        sizes = {self.seq_len, *(size for layer in self.skeleton.layers for p in layer.parameters() for size in p.shape)}
        return next(prime for prime in PRIMES if all(size % prime for size in sizes))

    def _trace(self, index: int) -> CompiledLayer | None:
        rows = self.traced_rows
        return trace_compiled(
            self.skeleton.layers[index],
            self._shape(rows),
            self.skeleton.dtype,
            self._calls(rows)[index],
            fused_attention=self.fused,
            runs_on=self.runs_on,
            skipped=self._skippable(index),
        )

    def _skippable(self, index: int) -> tuple[str, ...]:
        return skippable(self.skeleton.layers[index], self._shape(1), self.skeleton.dtype, self._calls(1)[index])

    def _products(self) -> AbstractContextManager[None]:
        """Of layers that compute their outputs in fp8, too, which some do not: that takes the most."""
        return fp8_products(self.skeleton.layers, Fp8Policy(ends=0)) if self.fp8 else nullcontext()

    # -- what they run on -------------------------------------------------------------------------------------------------------

    @cached_property
    def kinds(self) -> list[int]:
        """For each layer the first one like it: layers of one class with equal parameter shapes and equal inputs need the same."""
        first: dict[Any, int] = {}
        return [
            first.setdefault(kind_of(layer, call), index)
            for index, (layer, call) in enumerate(zip(self.skeleton.layers, self._calls(1), strict=True))
        ]

    def _embed(self, rows: int) -> tuple[Tensor, list[LayerCall]]:
        return self.skeleton.embed({"input_ids": torch.zeros(rows, self.seq_len, dtype=torch.long, device="meta")})

    def _calls(self, rows: int) -> list[LayerCall]:
        if rows not in self._known_calls:
            with torch.no_grad(), AssumeYes():  # type: ignore[no-untyped-call]
                _, calls = self._embed(rows)
            self._known_calls[rows] = _padded(calls, rows, self.seq_len) if self.padded else calls
        return self._known_calls[rows]

    def _shape(self, rows: int) -> tuple[int, int, int]:
        return rows, self.seq_len, self.skeleton.anatomy.hidden_size

    def _hidden(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.skeleton.dtype, device="meta", requires_grad=True)

    def _parameters(self, block: int) -> list[nn.Parameter]:
        """The meta parameters that a block computes with, tied ones included."""
        anatomy = self.skeleton.anatomy
        names = [spec.name for spec in anatomy.blocks[block].layout.tensors]
        if block == HEAD:
            names += [owner for _, owner in anatomy.tied]
        return [module.get_parameter(leaf) for module, leaf in map(self.skeleton.owner, names)]


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


def cross_entropy(logits: Tensor) -> Tensor:
    """Summed, of logits [n, vocab] in fp32, to targets that do not matter."""
    targets = torch.zeros(len(logits), dtype=torch.long, device=logits.device)
    return functional.cross_entropy(logits.float(), targets, reduction="sum")
