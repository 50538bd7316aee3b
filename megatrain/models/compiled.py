"""What torch.compile makes of a layer: which activations it keeps for the backward pass, and how often it goes to memory.

It can be made to keep less (decision 0013). To know the figures nothing is compiled: the layer is traced on the meta device, forward and
backward at once, and cut in two by the same code of torch that cuts it for the real compiler. What the cut keeps is exact; traffic and
kernels are estimates, by a simple rule of fusion.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from megatrain.errors import ConfigError
from megatrain.models.footprint import FusedAttention, additive
from megatrain.models.recorder import LayerCall
from megatrain.models.work import PRODUCTS, Traffic

aten = torch.ops.aten
ATTENTION = {aten._scaled_dot_product_cudnn_attention, aten._scaled_dot_product_cudnn_attention_backward}
COPIES_NOTHING = {aten._unsafe_view, aten.detach}  # views, though their schemas do not say so


# By default torch keeps whatever a product of the backward pass reads. Without these bans it still keeps all that does not fuse, such as
# products and attention, but of what lies between only as much as the rest can be computed from.
CHEAP_RETENTION = {
    "ban_recompute_materialized_backward": False,
    "ban_recompute_used_far_apart": False,
    "ban_recompute_long_fusible_chains": False,
}


@dataclass(frozen=True)
class CompiledLayer:
    """One micro-batch through a compiled layer. `saved_bytes` lie between forward and backward, beyond inputs, weights and output."""

    saved_bytes: int
    forward: Traffic
    backward: Traffic
    cheap_saved_bytes: int  # with cheap retention
    cheap_backward: Traffic


@contextmanager
def naming_the_compiler() -> Iterator[None]:
    """Turn torch.compile's failure into our error, which says how to do without. Memory that ran out meanwhile stays what it is."""
    try:
        yield
    except RuntimeError as error:
        exceptions: Any = sys.modules.get("torch._dynamo.exc")  # there only once something was compiled
        if exceptions is None or not isinstance(error, exceptions.TorchDynamoException):
            raise
        inner = getattr(error, "inner_exception", error)
        if isinstance(inner, torch.OutOfMemoryError):
            raise inner from error
        reason = (str(inner).strip().splitlines() or [type(inner).__name__])[0]
        raise ConfigError(
            f"compile: torch.compile could not compile the model's layers on this machine ({reason}); set compile: false"
        ) from error


def inductor_with_cheap_retention(graph: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    """A backend of torch.compile: inductor, but its graphs keep only what products and attention need."""
    from torch._inductor.compile_fx import compile_fx

    with cheap_retention():
        compiled: Any = compile_fx(graph, inputs)
    return compiled  # type: ignore[no-any-return]


def cheap_retention() -> AbstractContextManager[None]:
    """Graphs that are cut while it lasts keep as little as `CHEAP_RETENTION` allows."""
    from torch._functorch import config

    return config.patch(CHEAP_RETENTION)  # type: ignore[no-any-return]


def trace_compiled(
    layer: nn.Module, hidden_shape: tuple[int, int, int], dtype: torch.dtype, call: LayerCall, *, fused_attention: bool, runs_on: str
) -> CompiledLayer | None:
    """What torch.compile would make of a decoder layer. None if it cannot be traced whole, because what it computes depends on values.

    layer: parameters on any device; only shapes are read. hidden_shape: (batch, tokens, hidden). dtype: of parameters and hidden states.
    call: what the layer receives besides hidden states. fused_attention: False for eager attention. runs_on: "cpu" or "cuda".
    """
    function, inputs = _as_function(layer, hidden_shape, dtype, call)
    with torch.random.fork_rng(devices=[]), FusedAttention(runs_on, _traced_attention) if fused_attention else nullcontext():
        try:
            (forward, backward), (cheap_forward, cheap_backward) = _cut(function, inputs)
        except (RuntimeError, NotImplementedError):
            return None
    return CompiledLayer(
        _saved_bytes(forward), _traffic(forward), _traffic(backward), _saved_bytes(cheap_forward), _traffic(cheap_backward)
    )


# -- tracing ------------------------------------------------------------------------------------------------------------------------


def _as_function(
    layer: nn.Module, hidden_shape: tuple[int, int, int], dtype: torch.dtype, call: LayerCall
) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """The layer as a function of tensors alone, and such tensors: hidden states, weights, buffers, and those of the call."""
    weights, buffers = dict(layer.named_parameters()), dict(layer.named_buffers())
    leaves, structure = pytree.tree_flatten((call.args, call.kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    names = [*weights, *buffers]
    inputs = [torch.empty(hidden_shape, dtype=dtype, device="meta", requires_grad=True)]
    inputs += [torch.empty_like(p, dtype=dtype, device="meta", requires_grad=p.requires_grad) for p in weights.values()]
    inputs += [torch.empty_like(tensor, device="meta") for tensor in (*buffers.values(), *(leaves[i] for i in places))]

    def function(hidden: Tensor, *tensors: Tensor) -> Tensor:
        filled = list(leaves)
        for place, tensor in zip(places, tensors[len(names) :], strict=True):
            filled[place] = tensor
        args, kwargs = pytree.tree_unflatten(filled, structure)
        out = torch.func.functional_call(layer, dict(zip(names, tensors, strict=False)), (hidden, *args), kwargs)
        return out[0] if isinstance(out, tuple) else out  # type: ignore[no-any-return]

    return function, inputs


def _cut(function: Callable[..., Tensor], inputs: list[Tensor]) -> tuple[tuple[fx.Graph, fx.Graph], tuple[fx.Graph, fx.Graph]]:
    """The graphs of forward and backward as torch.compile would hand them to its code generator, and those of cheap retention."""
    from torch._functorch.aot_autograd import aot_function
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.fake_tensor import FakeTensorMode

    pairs: list[tuple[fx.Graph, fx.Graph]] = []
    weights = [place for place, tensor in enumerate(inputs) if place and tensor.requires_grad]

    def cut(joint: fx.GraphModule, joint_inputs: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        options["static_lifetime_input_indices"] = weights  # as dynamo says of parameters: keeping one costs nothing
        forward, backward = min_cut_rematerialization_partition(joint, joint_inputs, **options)
        pairs.append((forward.graph, backward.graph))
        return forward, backward

    def cut_twice(joint: fx.GraphModule, joint_inputs: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        halves = cut(joint, joint_inputs, **options)
        with cheap_retention():
            cut(joint, joint_inputs, **options)
        return halves

    def as_it_is(gm: fx.GraphModule, example_inputs: Any) -> fx.GraphModule:
        return gm

    fake = FakeTensorMode(allow_non_fake_inputs=True)  # some layers make small tensors of their own
    traced = aot_function(function, as_it_is, as_it_is, cut_twice, decompositions=select_decomp_table())
    traced(*[fake.from_tensor(tensor) for tensor in inputs])
    full, cheap = pairs
    return full, cheap


def _traced_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False, **_: Any
) -> Tensor:
    """Takes the arguments of scaled_dot_product_attention. Every fused kernel keeps the same tensors; this one takes any mask."""
    out: Tensor = aten._scaled_dot_product_cudnn_attention(query, key, value, additive(attn_mask, query), True, dropout_p, is_causal)[0]
    return out


# -- reading the graphs -------------------------------------------------------------------------------------------------------------


def _saved_bytes(forward: fx.Graph) -> int:
    output, *saved = _outputs(forward)
    kept = {_base(node) for node in saved} - {_base(output)}
    return sum(_nbytes(node) for node in kept if node.op != "placeholder")


def _traffic(graph: fx.Graph) -> Traffic:
    """Estimated: what neither leaves the graph nor enters a product is computed by each kernel that needs it; reductions are written."""
    sources = {node: _sources(node) for node in graph.nodes if _is_fusible(node) and _is_written(node)}
    kernels = _fused(sources, _depths(graph))
    reads = [set().union(*(sources[node] for node in kernel)) - kernel for kernel in kernels]
    others = [_base(source) for node in graph.nodes if not _is_fusible(node) for source in node.all_input_nodes]
    writes = sources.keys() & set(others).union(*reads)
    total = sum(_nbytes(node) for kernel in reads for node in kernel) + sum(map(_nbytes, writes))
    return Traffic(total, len(kernels) + sum(map(_is_barrier, graph.nodes)))


def _fused(sources: Mapping[fx.Node, set[fx.Node]], depth: Mapping[fx.Node, int]) -> list[set[fx.Node]]:
    """Nodes of each kernel: of one depth, and one made from the other, or both of one size and made from the same."""
    kernel: dict[fx.Node, set[fx.Node]] = {}
    alike: dict[Any, fx.Node] = {}
    for node in sources:
        kernel[node] = {node}
        near = [source for source in sources[node] if source in kernel and depth[source] == depth[node]]
        near += [alike.setdefault((depth[node], _numel(node), source), node) for source in sources[node]]
        merged = set().union(*(kernel[other] for other in near), kernel[node])
        kernel |= dict.fromkeys(merged, merged)
    return list({id(members): members for members in kernel.values()}.values())


def _depths(graph: fx.Graph) -> dict[fx.Node, int]:
    """Of every node, how many products and attentions come one after another before it."""
    depth: dict[fx.Node, int] = {}
    for node in graph.nodes:
        depth[node] = max((depth[source] + _is_barrier(source) for source in node.all_input_nodes), default=0)
    return depth


def _is_written(node: fx.Node) -> bool:
    return _is_reduction(node) or any(not _is_fusible(reader) for reader in _readers(node))


def _is_reduction(node: fx.Node) -> bool:
    return any(_nbytes(source) and _numel(node) < _numel(source) for source in node.all_input_nodes)


def _sources(node: fx.Node) -> set[fx.Node]:
    """What lies in memory that `node` is computed from."""
    found: set[fx.Node] = set()
    for source in map(_base, node.all_input_nodes):
        found |= _sources(source) if _is_fusible(source) and not _is_written(source) else {source}
    return found


def _readers(node: fx.Node) -> Iterable[fx.Node]:
    """Nodes that use the values of `node`, also through views."""
    for user in node.users:
        if _is_view(user):
            yield from _readers(user)
        else:
            yield user


def _base(node: fx.Node) -> fx.Node:
    """The node whose memory `node` is a view of."""
    while _is_view(node):
        node = node.all_input_nodes[0]
    return node


def _packet(node: fx.Node) -> Any:
    return getattr(node.target, "overloadpacket", None)


def _is_barrier(node: fx.Node) -> bool:
    return _packet(node) in PRODUCTS | ATTENTION


def _is_view(node: fx.Node) -> bool:
    if node.target is operator.getitem:  # one of several results, which attention has and views have
        return not _is_barrier(node.all_input_nodes[0])
    return isinstance(node.target, torch._ops.OpOverload) and (node.target.is_view or _packet(node) in COPIES_NOTHING)


def _is_fusible(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and not _is_view(node) and not _is_barrier(node)


def _outputs(graph: fx.Graph) -> list[fx.Node]:
    """What a graph returns; of a forward graph the layer's output, then what is kept."""
    (returned,) = (node.args[0] for node in graph.nodes if node.op == "output")
    return [node for node in returned if isinstance(node, fx.Node)]


def _nbytes(node: fx.Node) -> int:
    """Bytes of a node's value; 0 for what is no tensor."""
    return sum(t.numel() * t.element_size() for t in _values(node))


def _numel(node: fx.Node) -> int:
    return sum(t.numel() for t in _values(node))


def _values(node: fx.Node) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(node.meta.get("val")) if isinstance(leaf, Tensor)]
