"""The token-wise modules of a decoder layer: those that treat every token alike.

They are found by trying them and not by their names. A run on the meta device shows which modules
turn one tensor of hidden states into another. Each of these computes a few tokens with arbitrary
weights, alone and beside tokens that are NaN, which must not change them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatrain.models.meta import blank_call, without_data
from megatrain.models.recorder import LayerCall, kind_of
from megatrain.models.transforms.skippable import is_matmul, skippable, skipping

ROWS, TOKENS = 2, 11  # of the try-out: no model has 11 heads, which could be taken for tokens
ALONE = slice(4, 9)  # the tokens that are computed alone
TOLERANCE = 0.05  # of the largest value: matmuls of few rows round differently from those of many
Modules = dict[nn.Module, Callable[[], AbstractContextManager[None]]]


def token_wise_modules(
    layers: Sequence[nn.Module], dtype: torch.dtype, hidden: int, calls: Sequence[LayerCall]
) -> Modules:
    """The token-wise modules of all layers, each with the context for its gradients alone."""
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


def token_wise(
    layer: nn.Module, dtype: torch.dtype, hidden: int, call: LayerCall
) -> dict[str, tuple[str, ...]]:
    """The layer's outermost token-wise modules, each with its `skippable`, by name.

    Arguments as for `blank_call`; the layer is in training mode, with hidden states
    [ROWS, TOKENS, hidden].
    """
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
    """Weights w[i, j, ...] = r[i + j + ...], which take little time to draw.

    Contiguous: as views, matmuls in bf16 on a CPU would take fifty times as long.
    """
    values = torch.randn(sum(shape) + 1, generator=generator) * 0.1
    return values.to(dtype).as_strided(shape, [1] * len(shape)).contiguous()
