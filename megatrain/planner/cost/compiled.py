"""Predictions of torch.compile's effect on a layer: saved activations, memory traffic, live bytes.

It can be made to keep less (decision 0013). Nothing is compiled to know the figures: the layer is
traced on the meta device, forward and backward at once, and cut in two by the same code of torch
that cuts it for the real compiler. What the cut keeps is exact. Kernels, their traffic and what
lives meanwhile are estimates by a simple rule of fusion (fx_graph.py).

`predict_compiled` is the one door to torch's private compiler API. In planner/cost only this file
and fx_graph.py use it:
- torch._functorch: `aot_function` traces, `min_cut_rematerialization_partition` cuts, its keyword
  `static_lifetime_input_indices` says what costs nothing to keep; its config (cheap retention);
- torch._inductor: `select_decomp_table`, the operators that inductor sees;
- torch._subclasses: `FakeTensorMode`;
- torch._ops and private operators of aten (attention, scaled matmul, views) in fx_graph.py.
If a name changes, dry runs with `compiled=True` raise. If only behaviour changes, predicted bytes
and times of compiled layers drift, which tests/planner/cost/test_compiled.py holds against the real
compiler. Plans for eager layers and training itself use none of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from megatrain.models.meta import torch_paths
from megatrain.models.recorder import LayerCall
from megatrain.models.transforms.compiled import cheap_retention
from megatrain.models.transforms.skippable import skipping
from megatrain.planner.cost.footprint import Attention, FusedAttention, LayerBytes
from megatrain.planner.cost.fx_graph import alive, keeps_input, saved_bytes, traffic
from megatrain.planner.cost.lifetimes import Alive
from megatrain.planner.cost.work import Traffic

Cut = tuple[fx.Graph, fx.Graph]  # the graphs of forward and backward


@dataclass(frozen=True)
class CompiledGraphs:
    """Forward and backward of a compiled layer over `rows` sequences."""

    rows: int
    saved_bytes: int  # between forward and backward, beyond inputs, weights and output
    keeps_input: bool
    forward: Traffic
    backward: Traffic
    alive: Alive


@dataclass(frozen=True)
class CompiledLayer:
    """A compiled layer, with the compiler's own choice of what to keep and with cheap retention."""

    full: CompiledGraphs
    cheap: CompiledGraphs
    again: Alive  # where it is recomputed for its gradients alone

    def bytes_at(self, rows: int, *, cheap: bool = False) -> LayerBytes:
        """The needs of a micro-batch of `rows` sequences."""
        graphs = self.cheap if cheap else self.full
        saved = rows * graphs.saved_bytes // graphs.rows
        beyond = graphs.alive.peak(rows) - rows * (graphs.saved_bytes // graphs.rows)
        return LayerBytes(saved, self.again.peak(rows), beyond, self.again.holes(rows))


def predict_compiled(
    layer: nn.Module,
    hidden_shape: tuple[int, int, int],
    dtype: torch.dtype,
    call: LayerCall,
    *,
    fused_attention: bool,
    runs_on: str,
    skipped: Sequence[str] = (),
    frozen: Collection[str] = (),
) -> CompiledLayer | None:
    """Predict what torch.compile would make of a decoder layer.

    Args:
        layer: parameters on any device; only shapes are read.
        hidden_shape: [batch, tokens, hidden]. The batch is 1 or a prime that divides no size of the
            layer, so that whatever it divides is known to grow with it.
        dtype: of parameters and hidden states.
        call: what the layer receives besides the hidden states.
        fused_attention: False for eager attention.
        runs_on: "cpu" or "cuda".
        skipped: modules left out when it is recomputed (models/transforms/skippable.py).
        frozen: names of weights that need no gradient.

    Returns:
        None if it cannot be traced whole, because what it computes depends on values.
    """
    rows = hidden_shape[0]
    function, inputs = _as_function(layer, hidden_shape, dtype, call, frozen)
    attention = FusedAttention(runs_on, _traced_attention) if fused_attention else nullcontext()

    def attending(*tensors: Tensor) -> Tensor:
        with attention:  # here alone: torch's own tracing calls thousands of functions
            return function(*tensors)

    try:
        with torch.random.fork_rng(devices=[]), torch_paths():
            full, cheap = _trace_and_cut(attending, inputs)
            with skipping(layer, skipped):
                again = _trace_and_cut(attending, inputs, cheap=False)[0] if skipped else full
    except (RuntimeError, NotImplementedError):
        return None

    def graphs(forward: fx.Graph, backward: fx.Graph) -> CompiledGraphs:
        return CompiledGraphs(
            rows,
            saved_bytes(forward),
            keeps_input(forward),
            traffic(forward),
            traffic(backward),
            alive(forward, backward, rows, runs_on),
        )

    kept = graphs(*full)
    recomputed = alive(*again, rows, runs_on) if skipped else kept.alive
    return CompiledLayer(kept, graphs(*cheap), recomputed)


def _as_function(
    layer: nn.Module,
    hidden_shape: tuple[int, int, int],
    dtype: torch.dtype,
    call: LayerCall,
    frozen: Collection[str],
) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """The layer as a function of tensors alone, and meta tensors for it.

    These are hidden states, weights, buffers and the tensors of `call`, in this order.
    """
    weights, buffers = dict(layer.named_parameters()), dict(layer.named_buffers())
    leaves, structure = pytree.tree_flatten((call.args, call.kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    names = [*weights, *buffers]
    others = [*buffers.values(), *(leaves[i] for i in places)]
    inputs = [
        torch.empty(hidden_shape, dtype=dtype, device="meta", requires_grad=True),
        *(
            torch.empty_like(p, dtype=dtype, device="meta", requires_grad=name not in frozen)
            if p.requires_grad
            else torch.empty_like(p, device="meta")
            for name, p in weights.items()
        ),
        *(torch.empty_like(tensor, device="meta") for tensor in others),
    ]

    def function(hidden: Tensor, *tensors: Tensor) -> Tensor:
        filled = list(leaves)
        for place, tensor in zip(places, tensors[len(names) :], strict=True):
            filled[place] = tensor
        args, kwargs = pytree.tree_unflatten(filled, structure)
        own = dict(zip(names, tensors, strict=False))
        out = torch.func.functional_call(layer, own, (hidden, *args), kwargs)
        return out[0] if isinstance(out, tuple) else out  # type: ignore[no-any-return]

    return function, inputs


def _trace_and_cut(
    function: Callable[..., Tensor], inputs: list[Tensor], *, cheap: bool = True
) -> list[Cut]:
    """The graphs that torch.compile would hand to its code generator, then, if `cheap`, those of
    cheap retention."""
    from torch._functorch.aot_autograd import aot_function
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.fake_tensor import FakeTensorMode

    halves: list[tuple[fx.GraphModule, fx.GraphModule]] = []
    weights = [place for place, tensor in enumerate(inputs) if place and tensor.requires_grad]

    def cut(joint: fx.GraphModule, joint_inputs: Any, **options: Any) -> Any:
        # inductor takes them out before, and where the cut goes depends on how far nodes are apart
        alias = torch.ops.aten.alias.default
        for node in joint.graph.find_nodes(op="call_function", target=alias):
            node.replace_all_uses_with(node.args[0])
            joint.graph.erase_node(node)
        # as dynamo says of parameters: keeping one costs nothing
        options["static_lifetime_input_indices"] = weights
        for retention in (nullcontext, cheap_retention)[: 1 + cheap]:
            with retention():
                halves.append(min_cut_rematerialization_partition(joint, joint_inputs, **options))
        return halves[0]

    def as_it_is(gm: fx.GraphModule, example_inputs: Any) -> fx.GraphModule:
        return gm

    fake = FakeTensorMode(allow_non_fake_inputs=True)  # some layers make small tensors of their own
    traced = aot_function(function, as_it_is, as_it_is, cut, decompositions=select_decomp_table())
    traced(*[fake.from_tensor(tensor) for tensor in inputs])
    return [(forward.graph, backward.graph) for forward, backward in halves]


def _traced_attention(call: Attention) -> Tensor:
    """Stands in for scaled_dot_product_attention as the cuDNN operator, which takes any mask here.

    Every fused kernel keeps the same tensors.
    """
    out: Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(
        call.query, call.key, call.value, call.bias, True, call.dropout_p, call.is_causal
    )[0]
    return out
