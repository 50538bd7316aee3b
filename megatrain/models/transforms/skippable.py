"""Matmuls whose outputs no gradient needs, so that recomputing a layer may leave them out.

In most families the last matmul of a layer is only added to the residual stream: its gradients need
its inputs, not its output. Such matmuls are observed, not assumed: one run on the meta device
follows all values derived from a matmul's output, and sees if autograd keeps any for backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from megatrain.models.meta import Watch, blank_call, storage_of, without_data
from megatrain.models.recorder import LayerCall, by_kind
from megatrain.models.transforms.chunked import chunks_of, uninitialised
from megatrain.models.transforms.fp8 import Fp8Linear

MATMULS = {  # modules that are nothing else
    "megatrain.models.transforms.fp8.Fp8Linear",
    "torch.nn.modules.linear.Linear",
    "transformers.models.falcon.modeling_falcon.FalconLinear",
    "transformers.pytorch_utils.Conv1D",
}


def skippable_in(
    layers: Sequence[nn.Module],
    hidden_shape: Sequence[int],
    dtype: torch.dtype,
    calls: Sequence[LayerCall],
) -> list[tuple[str, ...]]:
    """`skippable` of each layer."""
    return by_kind(layers, calls, lambda *each: skippable(each[0], hidden_shape, dtype, each[1]))


def skippable(
    layer: nn.Module, hidden_shape: Sequence[int], dtype: torch.dtype, call: LayerCall
) -> tuple[str, ...]:
    """Names of the modules that recomputing the layer may leave out, such as ("mlp.down_proj",).
    Only single matmuls count, and whole modules that are computed in chunks. None if the layer
    cannot run without data. It is in training mode, since dropout needs a matmul's output."""
    forward, _ = blank_call(layer, hidden_shape, dtype, call)
    matmuls = dict(_matmuls(layer))
    trail = Trail()
    watching = saved_tensors_hooks(trail.note_saved, lambda tensor: tensor)
    with ExitStack() as hooks:
        for name, module in matmuls.items():
            hooks.enter_context(module.register_forward_hook(partial(trail.begin, name)))
        try:
            with without_data(), trail, watching:
                forward()
        except (NotImplementedError, RuntimeError):
            return ()
    return tuple(name for name in matmuls if name in trail.begun - trail.needed)


@contextmanager
def skipping(layer: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Inside, the named modules (from `skippable`) return uninitialised memory. Gradients keep
    their bits, but for compiled layers, whose other graph may round differently."""
    modules = [layer.get_submodule(name) for name in names]
    try:
        for module in modules:
            _leave_out(module, True)
        yield
    finally:
        for module in modules:
            _leave_out(module, False)


def _leave_out(module: nn.Module, absent: bool) -> None:
    """torch.compile guards what changes here, and so keeps a graph for each of the two states."""
    if chunks := chunks_of(module):
        chunks.absent = absent
    elif isinstance(module, Fp8Linear):
        module.output = "none" if absent else module.policy.output
    elif absent:
        vars(module)["forward"] = MethodType(_gradients, module)
    else:
        vars(module).pop("forward", None)


def _matmuls(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of single matmuls, and of whole modules that are computed in chunks."""
    if chunks_of(module) or is_matmul(module):
        yield name, module
        return
    for leaf, child in module.named_children():
        yield from _matmuls(child, f"{name}.{leaf}" if name else leaf)


class Trail(Watch):  # type: ignore[no-untyped-call]
    """Follows values that derive from matmuls' outputs, and notes which matmuls are `needed`."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: set[str] = set()
        self.needed: set[str] = set()  # something of them is kept for backward, or decides
        self._sources: dict[int, set[str]] = {}
        self._alive: list[Any] = []  # storages seen: the address of a freed one could come again

    def begin(self, name: str, _module: nn.Module, _args: Any, output: Tensor) -> None:
        """A forward hook: the output of matmul `name` begins a trail."""
        self.begun.add(name)
        self._extend(output, {name})

    def note_saved(self, tensor: Tensor) -> Tensor:
        """A hook of autograd, called with every tensor that it keeps."""
        self.needed |= self._sources_of(tensor)
        return tensor

    def saw(self, func: Any, read: list[Tensor], written: list[Tensor]) -> None:
        sources: set[str] = set().union(*map(self._sources_of, read))
        if func is torch.ops.aten._local_scalar_dense.default:
            self.needed |= sources
        for tensor in written:
            self._extend(tensor, sources)

    def _sources_of(self, tensor: Tensor) -> set[str]:
        return self._sources.get(storage_of(tensor), set())

    def _extend(self, tensor: Tensor, sources: set[str]) -> None:
        self._alive.append(tensor.untyped_storage())
        self._sources[storage_of(tensor)] = self._sources_of(tensor) | sources


class _MatmulGradients(torch.autograd.Function):
    """The gradients of x W^T + b, or of x W + b if `input_first`; the output is not computed. The
    same matmuls as PyTorch's own backward, for the same bits."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, input_first: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.input_first = input_first
        return uninitialised(x, len(x), weight.shape[1 if input_first else 0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), (dy,) = ctx.saved_tensors, grads
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = dy.mm(weight.t() if ctx.input_first else weight)
        if ctx.needs_input_grad[1]:
            dw = x.t().mm(dy) if ctx.input_first else dy.t().mm(x)
        return dx, dw, dy.sum(0) if ctx.needs_input_grad[2] else None, None


def _gradients(module: Any, x: Tensor) -> Tensor:
    """Forward of a module that is a matmul, x [..., in] -> [..., out], without the matmul."""
    flat, input_first = x.reshape(-1, x.shape[-1]), not isinstance(module, nn.Linear)
    rows: Tensor = _MatmulGradients.apply(flat, module.weight, module.bias, input_first)  # type: ignore[no-untyped-call]
    return rows.view(*x.shape[:-1], rows.shape[-1])


def is_matmul(module: nn.Module) -> bool:
    """True if the module is nothing but a matmul."""
    return f"{type(module).__module__}.{type(module).__qualname__}" in MATMULS


# -- token-wise modules: those that treat every token alike ----------------------------------------

# They are found by trying them and not by their names. A run on the meta device shows which modules
# turn one tensor of hidden states into another. Each of these computes a few tokens with arbitrary
# weights, alone and beside tokens that are NaN, which must not change them.

ROWS, TOKENS = 2, 11  # of the try-out: no model has 11 heads, which could be taken for tokens
ALONE = slice(4, 9)  # the tokens that are computed alone
TOLERANCE = 0.05  # of the largest value: matmuls of few rows round differently from those of many
Modules = dict[nn.Module, Callable[[], AbstractContextManager[None]]]


def token_wise_modules(
    layers: Sequence[nn.Module],
    dtype: torch.dtype,
    dry_call: Callable[[int, int], tuple[Tensor, list[LayerCall]]],
) -> Modules:
    """The token-wise modules of all layers, each with the context for its gradients alone."""
    hidden, calls = dry_call(ROWS, TOKENS)
    found = by_kind(
        layers, calls, lambda *each: token_wise(each[0], dtype, hidden.shape[-1], each[1])
    )
    named = [
        (layer.get_submodule(name), unread)
        for layer, of in zip(layers, found, strict=True)
        for name, unread in of.items()
    ]
    return {module: partial(skipping, module, unread) for module, unread in named}


def token_wise(
    layer: nn.Module, dtype: torch.dtype, hidden: int, call: LayerCall
) -> dict[str, tuple[str, ...]]:
    """The layer's outermost token-wise modules, each with its `skippable`, by name."""
    found: dict[str, tuple[str, ...]] = {}
    for name, shape in _candidates(layer, dtype, hidden, call).items():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if not inside and treats_tokens_alike(module := layer.get_submodule(name), shape, dtype):
            found[name] = skippable(module, (1, 2, *shape[2:]), dtype, LayerCall((), {}))
    return found


def _candidates(
    layer: nn.Module, dtype: torch.dtype, hidden: int, call: LayerCall
) -> dict[str, tuple[int, ...]]:
    """Shapes [ROWS, TOKENS, ...] of modules that run once and keep shape and dtype, outer first."""
    shapes: dict[str, tuple[int, ...] | None] = {}

    def note(
        name: str, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        tensors = [t for t in (*args, output) if isinstance(t, Tensor) and t.dtype == dtype]
        alone = len(tensors) == len(args) + 1 == 2 and not kwargs
        alike = alone and args[0].shape == output.shape and output.ndim > 2
        fits = alike and output.shape[:2] == (ROWS, TOKENS) and name not in shapes
        shapes[name] = tuple(output.shape) if fits else None

    named = layer.named_modules()
    modules = {name: module for name, module in named if name and not _holds_nothing(module)}
    forward, _ = blank_call(layer, (ROWS, TOKENS, hidden), dtype, call)
    with ExitStack() as hooks:
        for name, module in modules.items():
            hook = partial(note, name)
            hooks.enter_context(module.register_forward_hook(hook, with_kwargs=True))
        try:
            with without_data(), torch.no_grad():
                forward()
        except (NotImplementedError, RuntimeError):
            return {}  # it cannot run without data
    return {name: shape for name in modules if (shape := shapes.get(name)) is not None}


def _holds_nothing(module: nn.Module) -> bool:
    """True if it is one kernel, with no intermediate values that chunks would save."""
    return is_matmul(module) or (
        type(module).__module__.startswith("torch.nn.modules.")
        and not any(True for _ in module.children())
    )


def treats_tokens_alike(module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """True if a token's output depends on no other token of `shape` and on no random number."""
    generator = torch.Generator().manual_seed(0)
    tensors = {name: _arbitrary(p.shape, dtype, generator) for name, p in module.named_parameters()}
    tensors |= {name: buffer.cpu() for name, buffer in module.named_buffers() if not buffer.is_meta}
    x = torch.randn(shape, generator=generator).to(dtype)
    among_nan = torch.full_like(x, float("nan"))
    among_nan[:, ALONE] = x[:, ALONE]
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            before = torch.get_rng_state()
            alone, among = (
                torch.func.functional_call(module, tensors, (given,))
                for given in (x[:, ALONE].contiguous(), among_nan)
            )
            drew = not torch.equal(before, torch.get_rng_state())
    except (NotImplementedError, RuntimeError, IndexError, ValueError):
        return False
    alone, among = alone.float(), among[:, ALONE].float()
    if drew or alone.shape != among.shape or not bool(alone.isfinite().all()):
        return False
    # False if anything is NaN, which is no less than anything
    return bool((alone - among).abs().max() <= TOLERANCE * alone.abs().max())


def _arbitrary(shape: torch.Size, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Weights w[i, j, ...] = r[i + j + ...], quickly drawn; contiguous for fast matmuls."""
    values = torch.randn(sum(shape) + 1, generator=generator) * 0.1
    return values.to(dtype).as_strided(shape, [1] * len(shape)).contiguous()


# -- modules that are recomputed inside a graph ----------------------------------------------------


def recompute_inside(modules: Sequence[nn.Module]) -> int:
    """Have modules that train keep no more than their inputs for backward; returns their number.
    transformers' own checkpoints are for training mode alone, and for classes that know of them."""
    trained = [m for m in modules if any(p.requires_grad for p in m.parameters())]
    for module in trained:
        if "forward" not in vars(module):
            module.forward = partial(_recomputed, module.forward)
    return len(trained)


def _recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)
