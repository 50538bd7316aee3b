"""Predictions of torch.compile's effect on a layer: saved activations, memory traffic, live bytes.

Nothing is compiled: the layer is traced on the meta device, forward and backward at once, and cut
in two by the code of torch that cuts it for the real compiler. What the cut keeps is exact
(decision 0013). Kernels, their traffic and what lives meanwhile are estimates by a simple rule:
matmuls, attention and our fp8 kernels run as they are, and are called barriers here. All other
operations are fused. A node is written to memory if it is reduced or if something other than a
fused kernel reads it; every kernel that needs any other node computes it anew.

`predict_compiled` is the one door of planner/cost to torch's private compiler API. If a name there
changes, dry runs with `compiled=True` raise. If only behaviour changes, predicted bytes and times
of compiled layers drift, which tests/planner/cost/test_compiled.py holds against the real compiler.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate, combinations, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

import megatrain.models.transforms.fp8  # noqa: F401  registers the kernels
from megatrain.models.meta import torch_paths
from megatrain.models.recorder import LayerCall, tensors_in
from megatrain.models.transforms.compiled import cheap_retention
from megatrain.models.transforms.skippable import skipping
from megatrain.planner.cost.footprint import Attention, FusedAttention, LayerBytes
from megatrain.planner.cost.shape import Traffic
from megatrain.planner.cost.work import MATMULS

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
    """Predict what torch.compile would make of a decoder layer; None if it cannot be traced whole.

    Args:
        hidden_shape: [batch, tokens, hidden]. The batch is 1 or a prime that divides no size of the
            layer, so that whatever it divides is known to grow with it.
        skipped: modules left out when it is recomputed (models/transforms/skippable.py).
        frozen: names of weights that need no gradient.
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
    """The layer as a function of tensors alone, and meta tensors for it: hidden states, weights,
    buffers and the tensors of `call`."""
    weights, buffers = dict(layer.named_parameters()), dict(layer.named_buffers())
    leaves, structure = pytree.tree_flatten((call.args, call.kwargs))
    names, places = [*weights, *buffers], [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
    others = [*buffers.values(), *(leaves[place] for place in places)]
    inputs = [
        torch.empty(hidden_shape, dtype=dtype, device="meta", requires_grad=True),
        *(
            torch.empty_like(
                weight,
                dtype=dtype if weight.requires_grad else weight.dtype,
                device="meta",
                requires_grad=weight.requires_grad and name not in frozen,
            )
            for name, weight in weights.items()
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
    """The graphs from which torch.compile would make code; if `cheap`, also of cheap retention."""
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
    """Attention as the cuDNN operator, which takes any mask here: fused kernels keep the same."""
    out: Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(
        call.query, call.key, call.value, call.bias, True, call.dropout_p, call.is_causal
    )[0]
    return out


class Lifetime(NamedTuple):
    """A piece of memory: taken in step `begin`, given back after `end`."""

    begin: int
    end: int
    of_row: int  # its bytes for each sequence
    fixed: int  # its bytes besides


Order = Sequence[Lifetime]  # what the steps of a computation take, in one order of them


@dataclass(frozen=True)
class Alive:
    """The memory of a computation, in each order in which its steps may run: the code generator
    takes the one that needs least."""

    orders: tuple[Order, ...]

    def peak(self, rows: int) -> int:
        """The most bytes at any moment, for `rows` sequences."""
        return min(_peak(order, rows) for order in self.orders)

    def holes(self, rows: int) -> int:
        """Bytes that an allocator needs beyond the peak, as pieces find no hole that is large
        enough among those alive."""
        chosen = min(self.orders, key=lambda order: _peak(order, rows))
        return extent(chosen, rows) - _peak(chosen, rows)


def _peak(order: Order, rows: int) -> int:
    growth = Counter[int]()  # bytes more than in the step before
    for piece in order:
        size = rows * piece.of_row + piece.fixed
        growth[piece.begin] += size
        growth[piece.end + 1] -= size
    return max(accumulate(growth[step] for step in sorted(growth)), default=0)


def extent(order: Order, rows: int) -> int:
    """Bytes of address space, where each piece takes the smallest hole that holds it, as PyTorch's
    allocator chooses, and what has no such hole lies behind all others."""
    end, taken = 0, list[tuple[int, int, int]]()  # where a piece begins and stops, its last step
    for piece in sorted(order, key=operator.attrgetter("begin")):
        size = rows * piece.of_row + piece.fixed
        if not size:
            continue
        taken = sorted(one for one in taken if one[2] >= piece.begin)
        edges = pairwise([0, *(edge for start, stop, _ in taken for edge in (start, stop)), end])
        holes = [(stop - start, start) for start, stop in [*edges][::2] if stop - start >= size]
        begin = min(holes)[1] if holes else max((one[1] for one in taken), default=0)
        taken.append((begin, begin + size, piece.end))
        end = max(end, begin + size)
    return end


aten = torch.ops.aten
ATTENTION_BACKWARD = aten._scaled_dot_product_cudnn_attention_backward
ATTENTIONS = {aten._scaled_dot_product_cudnn_attention, ATTENTION_BACKWARD}
QUANTISING = {torch.ops.megatrain.quantize_both, torch.ops.megatrain.quantize_columns}
BARRIERS = MATMULS | ATTENTIONS | QUANTISING | {aten._scaled_mm}
PICKS = {aten.index, aten.index_select, aten.gather, aten.index_put, aten.scatter}
STEPPED = {aten.slice: 4, aten.slice_scatter: 5}  # which argument is the step
# In a profile of GPT-OSS-20B's shape on an H200 such kernels ran at 0.3 to 0.7 of the memory's
# rate.
SCATTERED = 2
COPIES_NOTHING = {aten._unsafe_view, aten.detach}  # views, though their schemas do not say so
# The nodes that a kernel writes, each with the nodes in memory that it is computed from.
Kernel = dict[fx.Node, set[fx.Node]]

# -- bytes and traffic -----------------------------------------------------------------------------


# why: decision 0030
def saved_bytes(forward: fx.Graph) -> int:
    """Bytes between forward and backward, beyond inputs and the output."""
    output, *saved = _outputs(forward)
    kept = {_base(node) for node in saved} - {_base(output)}
    return sum(_nbytes(node) for node in kept if node.op != "placeholder")


def keeps_input(forward: fx.Graph) -> bool:
    """True if the layer's first input, its hidden states, is kept for backward."""
    hidden = next(node for node in forward.nodes if node.op == "placeholder")
    return any(_base(node) is hidden for node in _outputs(forward)[1:])


def traffic(graph: fx.Graph) -> Traffic:
    """Bytes that fused kernels read and write, those of kernels that pick rows or columns out
    SCATTERED times, and the number of all kernels; an estimate."""
    kernels = _fused(graph, _sources(graph))
    reads = [_reads(kernel) - kernel.keys() for kernel in kernels]
    written, picking = set[fx.Node]().union(*reads), _picking(graph)
    for node in graph.nodes:
        if not _is_fusible(node):
            written.update(map(_base, node.all_input_nodes))
    total = 0
    for kernel, read in zip(kernels, reads, strict=True):
        moved = sum(map(_nbytes, read)) + sum(map(_nbytes, written & kernel.keys()))
        total += SCATTERED * moved if picking & kernel.keys() else moved
    return Traffic(total, len(kernels) + sum(map(_is_barrier, graph.nodes)))


def _picking(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that a kernel computes from rows picked by number or from every nth column."""
    found: set[fx.Node] = set()
    for node in filter(_is_fusible, graph.nodes):
        picks = _packet(node) in PICKS or _has_a_step(node)
        inside = (s for s in map(_base, node.all_input_nodes) if not _is_written(s))
        if picks or any(map(_has_a_step, node.all_input_nodes)) or found.intersection(inside):
            found.add(node)
    return found


def _has_a_step(node: fx.Node) -> bool:
    """True of a slice, or its gradient, that leaves elements out in between."""
    place = STEPPED.get(_packet(node))
    return place is not None and bool(node.args[place:] and node.args[place] != 1)


# -- what is alive ---------------------------------------------------------------------------------


def alive(forward: fx.Graph, backward: fx.Graph, rows: int, runs_on: str) -> Alive:
    """Memory of forward and backward, beyond inputs, weights and the incoming gradient. The output
    is freed before backward begins, and what was saved as soon as it was last read. Kernels run in
    the graph's order, or in it but for those of the weights' gradients, which come last, and none
    writes over what it reads; inductor may do otherwise where that needs no more."""
    output, *saved = _outputs(forward)
    # Backward receives some saved memory under several names, as views of it.
    names = {node.name: _base(node) for node in saved if _base(node).op != "placeholder"}
    given = {
        node: names[node.name]
        for node in backward.nodes
        if node.op == "placeholder" and node.name in names
    }
    ahead = _in_order(forward)
    first = _spans(ahead, [output, *saved], {})

    def lifetimes(back: list[Kernel]) -> tuple[Lifetime, ...]:
        begun = len(ahead)
        later = _spans(back, _outputs(backward), given, begun)
        spans = {node: (begin, min(end, begun - 1)) for node, (begin, end) in first.items()}
        for node, (begin, end) in later.items():
            spans[node] = (spans.get(node, (begin, end))[0], end)
        made = {node for kernel in (*ahead, *back) for node in kernel}
        found = [Lifetime(*spans[node], *_size(node, rows)) for node in spans if node in made]
        if runs_on == "cuda":
            for step, kernel in enumerate(back, start=begun):
                found += [Lifetime(step, step, *_size(n, rows)) for n in _scratch(kernel)]
        return tuple(found)

    back = _in_order(backward)
    read = {node for kernel in back for node in _reads(kernel) - kernel.keys()}
    last = sorted(back, key=lambda kernel: not read & kernel.keys())
    return Alive((lifetimes(back), lifetimes(last)))


def _spans(
    kernels: list[Kernel], kept: Iterable[fx.Node], given: Mapping[fx.Node, fx.Node], begun: int = 0
) -> dict[fx.Node, tuple[int, int]]:
    """The first and last step in which each node's memory is used. kept: nodes that outlive the
    graph. given: the node that stands for each input's memory."""

    def memory(node: fx.Node) -> fx.Node:
        base = _base(node)
        return given.get(base, base)

    spans: dict[fx.Node, tuple[int, int]] = {}
    for step, kernel in enumerate(kernels, start=begun):
        for node in (*kernel, *_reads(kernel)):
            begin, _ = spans.get(memory(node), (step, step))
            spans[memory(node)] = (begin, step)
    end = begun + len(kernels)
    return spans | {memory(node): (spans.get(memory(node), (end, end))[0], end) for node in kept}


def _scratch(kernel: Iterable[fx.Node]) -> list[fx.Node]:
    """Temporary memory of attention's backward on CUDA (footprint.py), as nodes of that size: twice
    the query's gradient, and the gradients of shared keys and values once per head."""
    heads = {
        node: _values(node)[0].shape[1]
        for node in kernel
        if node.target is operator.getitem
        and _packet(node.all_input_nodes[0]) is ATTENTION_BACKWARD
        and node.args[1] in (0, 1, 2)
    }
    most = max(heads.values(), default=0)
    scratch = []
    for node, own in heads.items():
        scratch += [node] * (2 if node.args[1] == 0 else most // own if own < most else 0)
    return scratch


# -- kernels ---------------------------------------------------------------------------------------


def _in_order(graph: fx.Graph) -> list[Kernel]:
    """Kernels as they run: as early as the graph has them."""
    barriers, sources = [], _sources(graph)
    for node in filter(_is_barrier, graph.nodes):
        results = [user for user in node.users if user.target is operator.getitem] or [node]
        barriers.append(dict.fromkeys(results, sources[node]))
    place = {node: i for i, node in enumerate(graph.nodes)}
    waiting = [*_fused_late(_fused(graph, sources), barriers), *barriers]
    waiting.sort(key=lambda kernel: min(map(place.__getitem__, kernel)))
    to_come = {node for kernel in waiting for node in kernel}
    ordered = []
    while waiting:  # parts of a kernel may lie apart, with what one of them reads between
        ready = next(kernel for kernel in waiting if not (_reads(kernel) & to_come) - kernel.keys())
        waiting.remove(ready)
        to_come -= ready.keys()
        ordered.append(ready)
    return ordered


def _fused_late(kernels: list[Kernel], barriers: list[Kernel]) -> list[Kernel]:
    """Merge kernels that read the same if one can wait for the other: they read it but once."""
    fused = list(kernels)
    for pair in combinations(kernels, 2):
        one, other = (next(each for each in fused if part.keys() <= each.keys()) for part in pair)
        if one is other or not (_widths(one) & _widths(other) and _reads(one) & _reads(other)):
            continue
        if not any(_leads(a, b, [*fused, *barriers]) for a, b in ((one, other), (other, one))):
            fused = [kernel for kernel in fused if kernel is not one and kernel is not other]
            fused.append(one | other)
    return fused


def _reads(kernel: Kernel) -> set[fx.Node]:
    return set().union(*kernel.values())


def _widths(kernel: Iterable[fx.Node]) -> set[int]:
    """Numbers of elements of what it writes, or of the parts that it concatenates."""
    return {
        _numel(part)
        for node in kernel
        for part in (node.all_input_nodes if _packet(node) is aten.cat else [node])
    }


def _leads(start: Kernel, end: Kernel, kernels: Iterable[Kernel]) -> bool:
    """True if anything that `end` writes is computed from what `start` writes."""
    maker = {node: kernel for kernel in kernels for node in kernel}
    seen: set[fx.Node] = set()
    waiting = _reads(end) - end.keys()
    while waiting:
        node = waiting.pop()
        if node in start:
            return True
        if node not in seen and node in maker:
            seen.add(node)
            waiting |= _reads(maker[node])
    return False


def _fused(graph: fx.Graph, sources: Mapping[fx.Node, set[fx.Node]]) -> list[Kernel]:
    """The fused kernels, of the nodes that are written to memory: two of one depth share a kernel
    if one is made from the other, or if both have one size and a source in common."""
    kernel: dict[fx.Node, set[fx.Node]] = {}
    alike: dict[Any, fx.Node] = {}
    depth, written = _depths(graph), filter(_is_written, filter(_is_fusible, graph.nodes))
    for node in written:
        read = sources[node]
        kernel[node] = {node}
        near = [source for source in read if source in kernel and depth[source] == depth[node]]
        near += [alike.setdefault((depth[node], _numel(node), source), node) for source in read]
        merged = set().union(*(kernel[other] for other in near), kernel[node])
        kernel |= dict.fromkeys(merged, merged)
    found: dict[int, Kernel] = {}  # in the order of the graph: sets of nodes have none
    for node, members in kernel.items():
        found.setdefault(id(members), {})[node] = sources[node]
    return list(found.values())


def _depths(graph: fx.Graph) -> dict[fx.Node, int]:
    """For every node, the number of barriers that come one after another before it."""
    depth: dict[fx.Node, int] = {}
    for node in graph.nodes:
        before = (depth[source] + _is_barrier(source) for source in node.all_input_nodes)
        depth[node] = max(before, default=0)
    return depth


# -- nodes -----------------------------------------------------------------------------------------


def _is_written(node: fx.Node) -> bool:
    reduced = any(_nbytes(s) and _numel(node) < _numel(s) for s in node.all_input_nodes)
    return reduced or any(not _is_fusible(reader) for reader in _readers(node))


def _sources(graph: fx.Graph) -> dict[fx.Node, set[fx.Node]]:
    """For every node, the nodes in memory that it is computed from."""
    found: dict[fx.Node, set[fx.Node]] = {}
    for node in graph.nodes:  # each after those that it uses
        found[node] = set()
        for source in map(_base, node.all_input_nodes):
            inside = _is_fusible(source) and not _is_written(source)
            found[node] |= found[source] if inside else {source}
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
    """The operator of a node, whatever the overload; None for what is no operator of torch."""
    return node.target.overloadpacket if isinstance(node.target, torch._ops.OpOverload) else None


def _is_barrier(node: fx.Node) -> bool:
    return _packet(node) in BARRIERS


def _is_view(node: fx.Node) -> bool:
    if node.target is operator.getitem:  # one of several results, of attention or of a view
        return not _is_barrier(node.all_input_nodes[0])
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return node.target.is_view or _packet(node) in COPIES_NOTHING


def _is_fusible(node: fx.Node) -> bool:
    return _packet(node) is not None and not _is_view(node) and not _is_barrier(node)


def _outputs(graph: fx.Graph) -> list[fx.Node]:
    """The outputs of a graph; a forward graph the layer's output, then what is kept."""
    (returned,) = (node.args[0] for node in graph.nodes if node.op == "output")
    return [node for node in returned if isinstance(node, fx.Node)]


def _values(node: fx.Node) -> list[Tensor]:
    return tensors_in(node.meta.get("val"))


def _numel(node: fx.Node) -> int:
    return sum(tensor.numel() for tensor in _values(node))


def _nbytes(node: fx.Node) -> int:
    """Bytes in memory of a node's value; 0 for what is no tensor."""
    return sum(min(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensor in _values(node))


def _size(node: fx.Node, rows: int) -> tuple[int, int]:
    """(bytes per sequence, bytes besides) of a node's values: sizes that `rows` divides grow."""
    of_row = fixed = 0
    for tensor in _values(node):
        if tensor.numel() % rows:
            fixed += tensor.nbytes
        else:
            of_row += tensor.nbytes // rows
    return of_row, fixed
