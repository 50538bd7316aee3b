"""The matrix products whose values no gradient needs, so that computing a layer again for its gradients may leave them out.

In most families the last product of a layer is only added to the residual stream: its gradient needs its inputs, not its output.
Which products these are is observed and not assumed: one run on the meta device follows every value derived from a product's output,
and sees whether autograd keeps any of them for the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatrain.models.chunked import Chunks, chunks_of
from megatrain.models.footprint import AssumeYes
from megatrain.models.fp8 import Fp8LinearWithoutProduct
from megatrain.models.probe import to_meta
from megatrain.models.recorder import LayerCall


def skippable(layer: nn.Module, hidden_shape: tuple[int, ...], dtype: torch.dtype, call: LayerCall) -> tuple[str, ...]:
    """Names of the layer's modules whose products recomputation may leave out, such as ("mlp.down_proj",), in the layer's order.

    Only modules that are nothing but a product count (STAND_INS), and whole ones that are computed in chunks; none with dropout behind it.
    None of a layer that cannot run without data, which is not an error: it is recomputed whole.

    layer: a decoder layer in the mode in which it trains, parameters on any device; only shapes are read.
    hidden_shape: (batch, tokens, hidden). dtype: of parameters and hidden states. call: what the layer receives besides hidden states.
    """
    weights = {name: torch.empty_like(p, dtype=dtype, device="meta", requires_grad=p.requires_grad) for name, p in layer.named_parameters()}
    buffers = {name: to_meta(buffer) for name, buffer in layer.named_buffers()}
    hidden = torch.empty(hidden_shape, dtype=dtype, device="meta", requires_grad=True)
    args, kwargs = to_meta((call.args, call.kwargs))
    products = dict(_products(layer))
    trail = Trail()
    handles = [module.register_forward_hook(partial(trail.begin, name)) for name, module in products.items()]
    try:
        with torch.random.fork_rng(devices=[]), AssumeYes(), trail, saved_tensors_hooks(trail.note_saved, lambda tensor: tensor):  # type: ignore[no-untyped-call]
            torch.func.functional_call(layer, {**weights, **buffers}, (hidden, *args), kwargs)
    except (NotImplementedError, RuntimeError):
        return ()
    finally:
        for handle in handles:
            handle.remove()
    return tuple(name for name in products if name in trail.begun - trail.needed)


@contextmanager
def skipping(layer: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """While the context lasts, the named modules return uninitialised memory; the gradients through them are bit for bit their own.

    names: from `skippable`. A layer that torch.compile compiled runs another of its graphs inside, without these products; the compiler
    may fuse and so round the rest of it in another way.
    """
    named = [layer.get_submodule(name) for name in names]
    chunked = [chunks for module in named if (chunks := chunks_of(module))]
    modules = [module for module in named if not chunks_of(module)]
    classes = [type(module) for module in modules]
    stand_ins = [STAND_INS[_kind(module)] for module in modules]
    try:
        _become(modules, stand_ins)
        _leave_out(chunked, True)
        yield
    finally:
        _become(modules, classes)
        _leave_out(chunked, False)


def _products(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of what may be left out: modules that are nothing but a product, and whole ones that are computed in chunks."""
    if chunks_of(module) or is_product(module):
        yield name, module
        return
    for leaf, child in module.named_children():
        yield from _products(child, f"{name}.{leaf}" if name else leaf)


def _leave_out(chunked: Sequence[Chunks], absent: bool) -> None:
    for chunks in chunked:
        chunks.absent = absent


def _become(modules: Sequence[nn.Module], classes: Sequence[type[nn.Module]]) -> None:
    for module, its_class in zip(modules, classes, strict=True):
        module.__class__ = its_class


class Trail(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows values through all operations under it: whatever has an input derived from a product's output derives from it too."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.begun: set[str] = set()
        self.needed: set[str] = set()  # those of which something is kept for the backward pass, or decides what is computed
        self._sources: dict[int, set[str]] = {}
        self._alive: list[Any] = []  # storages that were met: a freed one's address could come again

    def begin(self, name: str, _module: nn.Module, _args: Any, output: Tensor) -> None:
        """A forward hook: the output of the product `name` begins a trail."""
        self.begun.add(name)
        self._extend(output, {name})

    def note_saved(self, tensor: Tensor) -> Tensor:
        """A hook of autograd, called with every tensor that it keeps."""
        self.needed |= self._sources_of(tensor)
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        sources: set[str] = set().union(*(self._sources_of(t) for t in _tensors((args, kwargs))))
        if func is torch.ops.aten._local_scalar_dense.default:
            self.needed |= sources
        out = func(*args, **kwargs)
        for tensor in _tensors(out):
            self._extend(tensor, sources)
        return out

    def _sources_of(self, tensor: Tensor) -> set[str]:
        return self._sources.get(tensor.untyped_storage()._cdata, set())

    def _extend(self, tensor: Tensor, sources: set[str]) -> None:
        storage = tensor.untyped_storage()
        self._alive.append(storage)
        self._sources[storage._cdata] = self._sources_of(tensor) | sources


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


# -- leaving them out ---------------------------------------------------------------------------------------------------------------


class _LinearGradients(torch.autograd.Function):
    """The gradients of x W^T + b, W [out, in], by the same products as PyTorch's own; the output is not computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return uninitialised(x, weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (x, weight), (dy,) = ctx.saved_tensors, grads
        dx = dy.mm(weight) if ctx.needs_input_grad[0] else None
        dw = dy.t().mm(x) if ctx.needs_input_grad[1] else None
        return dx, dw, dy.sum(0) if ctx.needs_input_grad[2] else None


class _Conv1DGradients(torch.autograd.Function):
    """The same of x W + b, W [in, out]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return uninitialised(x, weight.shape[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (x, weight), (dy,) = ctx.saved_tensors, grads
        dx = dy.mm(weight.t()) if ctx.needs_input_grad[0] else None
        dw = x.t().mm(dy) if ctx.needs_input_grad[1] else None
        return dx, dw, dy.sum(0) if ctx.needs_input_grad[2] else None


class _WithoutProduct(nn.Module):
    """Stands in for a module that is a product: x [..., in] -> [..., out]."""

    gradients: type[torch.autograd.Function]

    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor = self.gradients.apply(x.reshape(-1, x.shape[-1]), self.weight, self.bias)  # type: ignore[no-untyped-call]
        return rows.view(*x.shape[:-1], rows.shape[-1])


class _LinearWithoutProduct(_WithoutProduct):
    gradients = _LinearGradients


class _Conv1DWithoutProduct(_WithoutProduct):
    gradients = _Conv1DGradients


# The modules that are nothing but a product, and what they become. Class and not instance changes: torch.compile keeps a graph for each.
STAND_INS: dict[str, type[nn.Module]] = {
    "megatrain.models.fp8.Fp8Linear": Fp8LinearWithoutProduct,
    "torch.nn.modules.linear.Linear": _LinearWithoutProduct,
    "transformers.models.falcon.modeling_falcon.FalconLinear": _LinearWithoutProduct,
    "transformers.pytorch_utils.Conv1D": _Conv1DWithoutProduct,
}


def is_product(module: nn.Module) -> bool:
    """Whether the module is nothing but a matrix product."""
    return _kind(module) in STAND_INS


def _kind(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def uninitialised(x: Tensor, width: int) -> Tensor:
    """[rows, width] of whatever the memory holds: nothing that reads it matters."""
    return x.new_empty(len(x), width)
