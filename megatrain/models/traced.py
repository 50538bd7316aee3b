"""Reading the graphs of a traced layer: which kernels would run, how often they go to memory, and what lies there meanwhile."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

import megatrain.models.fp8_kernels  # noqa: F401  registers the kernels
from megatrain.models.work import PRODUCTS, Traffic

aten = torch.ops.aten
ATTENTION = {aten._scaled_dot_product_cudnn_attention, aten._scaled_dot_product_cudnn_attention_backward}
OF_FP8 = {aten._scaled_mm, torch.ops.megatrain.quantize_both, torch.ops.megatrain.quantize_columns}  # products, and kernels of ours
COPIES_NOTHING = {aten._unsafe_view, aten.detach}  # views, though their schemas do not say so
Kernel = dict[fx.Node, set[fx.Node]]  # what it writes, and what in memory each of that is computed from

# -- bytes and kernels --------------------------------------------------------------------------------------------------------------


def saved_bytes(forward: fx.Graph) -> int:
    """What lies between forward and backward, beyond inputs and the output."""
    output, *saved = _outputs(forward)
    kept = {_base(node) for node in saved} - {_base(output)}
    return sum(_nbytes(node) for node in kept if node.op != "placeholder")


def keeps_input(forward: fx.Graph) -> bool:
    """Whether what a layer was given first, its hidden states, is kept for backward."""
    hidden = next(node for node in forward.nodes if node.op == "placeholder")
    return any(_base(node) is hidden for node in _outputs(forward)[1:])


def traffic(graph: fx.Graph) -> Traffic:
    """Estimated: what neither leaves the graph nor enters a product is computed by each kernel that needs it; reductions are written."""
    sources = _written(graph)
    kernels = _fused(sources, _depths(graph))
    reads = [set().union(*(sources[node] for node in kernel)) - kernel for kernel in kernels]
    others = [_base(source) for node in graph.nodes if not _is_fusible(node) for source in node.all_input_nodes]
    writes = sources.keys() & set(others).union(*reads)
    total = sum(_nbytes(node) for kernel in reads for node in kernel) + sum(map(_nbytes, writes))
    return Traffic(total, len(kernels) + sum(map(_is_barrier, graph.nodes)))


# -- what is alive ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Alive:
    """Bytes at every moment of a computation, as (of each row, whatever the rows)."""

    moments: frozenset[tuple[int, int]]

    def peak(self, rows: int) -> int:
        """The most of all moments."""
        return max(rows * of_row + fixed for of_row, fixed in self.moments)

    def beyond(self, of_row: int) -> Alive:
        """The same, less so many bytes of each row."""
        return Alive(frozenset((moment - of_row, fixed) for moment, fixed in self.moments))


def alive(forward: fx.Graph, backward: fx.Graph, rows: int, runs_on: str) -> Alive:
    """Through forward and backward, beyond inputs, weights and the incoming gradient. The output goes before backward begins.

    Kernels run in the graph's order, and none writes over what it reads: inductor may do otherwise where that needs no more. Backward gives
    back what was saved as soon as it was read.

    rows: of what was traced: one row, or a prime that divides no size of the layer, so that whatever it divides is known to grow with rows.
    """
    output, *saved = _outputs(forward)
    first: dict[fx.Node, str] = {}  # of every memory that was saved, the name under which backward is given it; views of it come as well
    name_of = {node.name: first.setdefault(_base(node), node.name) for node in saved if _base(node).op != "placeholder"}
    given = {node.name: node for node in backward.nodes if node.op == "placeholder" and node.name in name_of}
    same = {node: given[name_of[name]] for name, node in given.items()}
    before = _moments(forward, [output, *saved], {}, rows)
    return Alive(frozenset(before | _moments(backward, _outputs(backward), same, rows, runs_on == "cuda")))


def _moments(
    graph: fx.Graph, kept: Iterable[fx.Node], given: Mapping[fx.Node, fx.Node], rows: int, scratch: bool = False
) -> set[tuple[int, int]]:
    """Bytes alive at each kernel of a graph. kept: what outlives it. given: inputs that are its to give back, as the memory they are of.
    scratch: also what kernels take for themselves."""

    def memory(node: fx.Node) -> fx.Node:
        base = _base(node)
        return given.get(base, base)

    kernels = [{node: set(map(memory, read)) for node, read in kernel.items()} for kernel in _in_order(graph)]
    last = {node: step for step, kernel in enumerate(kernels) for node in {*kernel}.union(*kernel.values())}
    last |= dict.fromkeys(map(memory, kept), len(kernels))
    live = {node for node in given.values() if node in last}
    found = {_total(live, rows)}
    for step, kernel in enumerate(kernels):
        live |= kernel.keys()
        found.add(_total([*live, *(_scratch(kernel) if scratch else ())], rows))
        live -= {node for node in live if last[node] <= step}
    return found


def _scratch(kernel: Iterable[fx.Node]) -> list[fx.Node]:
    """What attention takes on CUDA (footprint.py): twice its query's gradient, and of keys and values that heads share as many as heads."""
    backward = aten._scaled_dot_product_cudnn_attention_backward
    results = [node for node in kernel if node.target is operator.getitem and _packet(node.all_input_nodes[0]) is backward]
    heads = {node: _values(node)[0].shape[1] for node in results if node.args[1] in (0, 1, 2)}
    most = max(heads.values(), default=0)
    times = {node: 2 if node.args[1] == 0 else most // own if own < most else 0 for node, own in heads.items()}
    return [node for node, count in times.items() for _ in range(count)]


def _in_order(graph: fx.Graph) -> list[Kernel]:
    """Kernels as they run: as early as the graph has them."""
    written = _written(graph)
    kernels = [{node: written[node] for node in kernel} for kernel in _fused(written, _depths(graph))]
    barriers = []
    for node in filter(_is_barrier, graph.nodes):
        results = [user for user in node.users if user.target is operator.getitem] or [node]
        barriers.append(dict.fromkeys(results, _sources(node)))
    place = {node: i for i, node in enumerate(graph.nodes)}
    waiting = sorted([*_fused_late(kernels, barriers), *barriers], key=lambda kernel: min(map(place.__getitem__, kernel)))
    to_come = {node for kernel in waiting for node in kernel}
    ordered = []
    while waiting:  # parts of a kernel may lie apart, with what one of them reads between
        ready = next(kernel for kernel in waiting if not (set().union(*kernel.values()) & to_come) - kernel.keys())
        waiting.remove(ready)
        to_come -= ready.keys()
        ordered.append(ready)
    return ordered


def _fused_late(kernels: list[Kernel], barriers: list[Kernel]) -> list[Kernel]:
    """Those that read the same are one as well if one of them can wait for the other: saved activations are read but once."""
    fused = list(kernels)
    for first, second in combinations(kernels, 2):
        one, other = (next(kernel for kernel in fused if part.keys() <= kernel.keys()) for part in (first, second))
        alike = _widths(one) & _widths(other)
        if one is other or not alike or not set().union(*one.values()) & set().union(*other.values()):
            continue
        if not any(_leads(a, b, [*fused, *barriers]) for a, b in ((one, other), (other, one))):
            fused = [kernel for kernel in fused if kernel is not one and kernel is not other] + [one | other]
    return fused


def _widths(kernel: Iterable[fx.Node]) -> set[int]:
    """Elements of what it writes, or of the parts that it puts together."""
    return {_numel(part) for node in kernel for part in (node.all_input_nodes if _packet(node) is aten.cat else [node])}


def _leads(start: Kernel, end: Kernel, kernels: Iterable[Kernel]) -> bool:
    """Whether anything that `end` writes is computed from what `start` does."""
    maker = {node: kernel for kernel in kernels for node in kernel}
    seen: set[fx.Node] = set()
    waiting = set().union(*end.values()) - end.keys()
    while waiting:
        node = waiting.pop()
        if node in start:
            return True
        if node not in seen and node in maker:
            seen.add(node)
            waiting |= set().union(*maker[node].values())
    return False


def _written(graph: fx.Graph) -> dict[fx.Node, set[fx.Node]]:
    """What kernels other than products and attention write, and what in memory each of it is computed from."""
    return {node: _sources(node) for node in graph.nodes if _is_fusible(node) and _is_written(node)}


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
    return _packet(node) in PRODUCTS | ATTENTION | OF_FP8


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


def _size(node: fx.Node, rows: int) -> tuple[int, int]:
    """Bytes of a node's value: (of each row, whatever the rows)."""
    sizes = [(t.numel(), t.element_size()) for t in _values(node)]
    of_row = sum(numel // rows * size for numel, size in sizes if numel % rows == 0)
    return of_row, sum(numel * size for numel, size in sizes if numel % rows)


def _total(nodes: Iterable[fx.Node], rows: int) -> tuple[int, int]:
    sizes = [_size(node, rows) for node in nodes]
    return sum(of_row for of_row, _ in sizes), sum(fixed for _, fixed in sizes)


def _numel(node: fx.Node) -> int:
    return sum(t.numel() for t in _values(node))


def _values(node: fx.Node) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(node.meta.get("val")) if isinstance(leaf, Tensor)]
