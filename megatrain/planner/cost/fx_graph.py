"""Reads the fx graphs of a traced layer: its kernels, their memory traffic and what is alive.

Part of compiled.py's wall around torch's private API, and imported by that file alone.

Matmuls, attention and our fp8 kernels run as they are; here they are called barriers. All other
operations are fused. A node is written to memory if it is reduced or if something other than a
fused kernel reads it; every kernel that needs any other node computes it anew.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, fx

import megatrain.models.transforms.fp8  # noqa: F401  registers the kernels
from megatrain.models.recorder import tensors_in
from megatrain.planner.cost.lifetimes import Alive, Lifetime
from megatrain.planner.cost.work import MATMULS, Traffic

aten = torch.ops.aten
ATTENTION_BACKWARD = aten._scaled_dot_product_cudnn_attention_backward
BARRIERS = MATMULS | {
    aten._scaled_dot_product_cudnn_attention,
    ATTENTION_BACKWARD,
    aten._scaled_mm,
    torch.ops.megatrain.quantize_both,
    torch.ops.megatrain.quantize_columns,
}
PICKS = {aten.index, aten.index_select, aten.gather, aten.index_put, aten.scatter}
STEPPED = {aten.slice: 4, aten.slice_scatter: 5}  # which argument is the step
# In a profile of GPT-OSS-20B's shape on an H200 such kernels ran at 0.3 to 0.7 of the memory's
# rate (docs/log/2026-11.md).
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
    """Bytes that fused kernels read and write, and the number of all kernels; an estimate.

    Bytes of kernels that pick rows or columns out count SCATTERED times.
    """
    kernels = _fused(graph, _sources(graph))
    reads = [_reads(kernel) - kernel.keys() for kernel in kernels]
    others = {
        _base(source)
        for node in graph.nodes
        if not _is_fusible(node)
        for source in node.all_input_nodes
    }
    written, picking = others.union(*reads), _picking(graph)
    total = 0
    for kernel, read in zip(kernels, reads, strict=True):
        moved = sum(map(_nbytes, read)) + sum(map(_nbytes, written & kernel.keys()))
        total += SCATTERED * moved if picking & kernel.keys() else moved
    return Traffic(total, len(kernels) + sum(map(_is_barrier, graph.nodes)))


def _picking(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that are computed, in a kernel, from rows picked by number or from every so
    manyth column."""
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
    """Through forward and backward, beyond inputs, weights and the incoming gradient.

    The output is freed before backward begins, and what was saved as soon as it was last read.
    Kernels run in the graph's order, or in it but for those of the weights' gradients, which come
    last, and none writes over what it reads; inductor may do otherwise where that needs no more.
    rows: as in `predict_compiled`.
    """
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
            begin = spans[node][0] if node in spans else begin
            spans[node] = (begin, end)
        made = {node for kernel in (*ahead, *back) for node in kernel}
        found = [Lifetime(*spans[node], *_total([node], rows)) for node in spans if node in made]
        if runs_on == "cuda":
            for step, kernel in enumerate(back, start=begun):
                found += [Lifetime(step, step, *_total([n], rows)) for n in _scratch(kernel)]
        return tuple(found)

    back = _in_order(backward)
    read = {node for kernel in back for node in _reads(kernel) - kernel.keys()}
    last = sorted(back, key=lambda kernel: not read & kernel.keys())
    return Alive((lifetimes(back), lifetimes(last)))


def _spans(
    kernels: list[Kernel],
    kept: Iterable[fx.Node],
    given: Mapping[fx.Node, fx.Node],
    begun: int = 0,
) -> dict[fx.Node, tuple[int, int]]:
    """The first and last step in which each node's memory is used.

    kept: nodes that outlive the graph. given: inputs, each with the node that stands for its
    memory. begun: number of the first step.
    """

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
    """Temporary memory of attention's backward on CUDA (footprint.py), as nodes of that size.

    Twice the query's gradient, and the gradients of shared keys and values once per head.
    """
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
    for first, second in combinations(kernels, 2):
        one, other = (
            next(kernel for kernel in fused if part.keys() <= kernel.keys())
            for part in (first, second)
        )
        alike = one is not other and _widths(one) & _widths(other) and _reads(one) & _reads(other)
        if not alike:
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
    """The fused kernels, of the nodes that are written to memory.

    Two nodes of one depth share a kernel if one is made from the other, or if both have one size
    and a source in common.
    """
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


def _total(nodes: Iterable[fx.Node], rows: int) -> tuple[int, int]:
    """(bytes per sequence, bytes besides) of the nodes' values: sizes that `rows` divides grow."""
    tensors = [tensor for node in nodes for tensor in _values(node)]
    growing = [tensor for tensor in tensors if tensor.numel() % rows == 0]
    of_row = sum(tensor.nbytes // rows for tensor in growing)
    return of_row, sum(tensor.nbytes for tensor in tensors if tensor.numel() % rows)
