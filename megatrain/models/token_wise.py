"""The modules of a decoder layer that treat every token alike, found by trying them and not by their names.

A run on the meta device shows which modules take one tensor of hidden states and return another. Each of these is then computed on a few
tokens with arbitrary weights: some tokens must come out the same alone as beside others that are NaN, whatever they were mixed with would
be NaN too, and no random number may be drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatrain.models.footprint import AssumeYes
from megatrain.models.probe import to_meta
from megatrain.models.recorder import LayerCall, kind_of
from megatrain.models.skippable import is_product, skippable, skipping

ROWS, TOKENS = 2, 11  # of the try-out: no model has so many heads, which could be taken for tokens
ALONE = slice(4, 9)  # of the tokens
TOLERANCE = 0.05  # of the largest value: products of few rows are rounded otherwise than those of many
Modules = dict[nn.Module, Callable[[], AbstractContextManager[None]]]


def token_wise_modules(layers: Sequence[nn.Module], dtype: torch.dtype, hidden: int, calls: Sequence[LayerCall]) -> Modules:
    """Of all layers, with the context for their gradients alone. Layers of one kind are tried once. Arguments as `token_wise`."""
    known: dict[Any, dict[str, tuple[str, ...]]] = {}
    modules: Modules = {}
    for layer, call in zip(layers, calls, strict=True):
        kind = kind_of(layer, call)
        if kind not in known:
            known[kind] = token_wise(layer, dtype, hidden, call)
        for name, unread in known[kind].items():
            module = layer.get_submodule(name)
            modules[module] = partial(skipping, module, unread)
    return modules


def token_wise(layer: nn.Module, dtype: torch.dtype, hidden: int, call: LayerCall) -> dict[str, tuple[str, ...]]:
    """Names of the layer's outermost modules that may be computed in chunks of tokens, with those of products inside them whose values
    their own gradients do not need.

    Args:
        layer: a decoder layer in the mode in which it trains, parameters on any device; only shapes are read.
        dtype: of parameters and hidden states. hidden: width of these.
        call: what the layer receives besides hidden states [ROWS, TOKENS, hidden].
    """
    found: dict[str, tuple[str, ...]] = {}
    for name, shape in _candidates(layer, dtype, hidden, call).items():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if not inside and treats_tokens_alike(module := layer.get_submodule(name), shape, dtype):
            found[name] = skippable(module, (1, 2, *shape[2:]), dtype, LayerCall((), {}))
    return found


def _candidates(layer: nn.Module, dtype: torch.dtype, hidden: int, call: LayerCall) -> dict[str, tuple[int, ...]]:
    """Modules that run once, from one tensor [ROWS, TOKENS, ...] to one of its shape and dtype; outer ones first. With that shape."""
    shapes: dict[str, tuple[int, ...] | None] = {}

    def note(name: str, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        alone = len(args) == 1 and not kwargs and isinstance(args[0], Tensor) and isinstance(output, Tensor)
        alike = alone and args[0].shape == output.shape and args[0].dtype == output.dtype == dtype
        fits = alike and args[0].ndim > 2 and args[0].shape[:2] == (ROWS, TOKENS)
        shapes[name] = tuple(output.shape) if fits and name not in shapes else None

    modules = {name: module for name, module in layer.named_modules() if name and not _holds_nothing(module)}
    weights = {name: torch.empty_like(p, dtype=dtype, device="meta") for name, p in layer.named_parameters()}
    buffers = {name: to_meta(buffer) for name, buffer in layer.named_buffers()}
    args, kwargs = to_meta((call.args, call.kwargs))
    handles = [module.register_forward_hook(partial(note, name), with_kwargs=True) for name, module in modules.items()]
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), AssumeYes():  # type: ignore[no-untyped-call]
            x = torch.empty(ROWS, TOKENS, hidden, dtype=dtype, device="meta")
            torch.func.functional_call(layer, {**weights, **buffers}, (x, *args), kwargs)
    except (NotImplementedError, RuntimeError):
        return {}  # it cannot run without data
    finally:
        for handle in handles:
            handle.remove()
    return {name: shape for name in modules if (shape := shapes.get(name)) is not None}


def _holds_nothing(module: nn.Module) -> bool:
    """Whether it is one kernel, which has nothing in between for chunks to save."""
    return is_product(module) or (type(module).__module__.startswith("torch.nn.modules.") and not any(True for _ in module.children()))


def treats_tokens_alike(module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether what the module makes of a token [ROWS, TOKENS, ...] depends on no other token and on no random number."""
    generator = torch.Generator().manual_seed(0)
    tensors = {name: _arbitrary(p.shape, dtype, generator) for name, p in module.named_parameters()}
    tensors |= {name: buffer.cpu() for name, buffer in module.named_buffers() if not buffer.is_meta}
    x = torch.randn(shape, generator=generator).to(dtype)
    among_nan = torch.full_like(x, float("nan"))
    among_nan[:, ALONE] = x[:, ALONE]
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            before = torch.get_rng_state()
            alone, among = (torch.func.functional_call(module, tensors, (given,)) for given in (x[:, ALONE].contiguous(), among_nan))
            drew = not torch.equal(before, torch.get_rng_state())
    except (NotImplementedError, RuntimeError, IndexError, ValueError):
        return False
    alone, among = alone.float(), among[:, ALONE].float()
    if drew or alone.shape != among.shape or not bool(alone.isfinite().all()):
        return False
    return bool((alone - among).abs().max() <= TOLERANCE * alone.abs().max())  # NaN is no less than anything


def _arbitrary(shape: torch.Size, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Weights w[i, j, ...] = r[i + j + ...], which take next to no memory until a product lays them out; of experts, it wants them so."""
    values = torch.randn(sum(shape) + 1, generator=generator) * 0.1
    weights = values.to(dtype).as_strided(shape, [1] * len(shape))
    return weights.contiguous() if len(shape) > 2 else weights
