"""Bytes a piece of the model needs while it computes, found by running it on the meta device and counting storages.

The module is the family's own, so the figure holds for every family by construction; nothing is allocated and no device
is touched. Every storage that an operation creates under `LiveBytes` is counted once when it appears and given back
when its last tensor dies, through forward and backward, as an eager allocator would see it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from megatrain.errors import ModelError


@dataclass(frozen=True)
class Footprint:
    """Bytes beyond parameters and inputs: alive between forward and backward, and at the worst moment of both.

    `saved_bytes` includes the output; `peak_bytes` includes all gradients that the backward returns at once.
    """

    saved_bytes: int
    peak_bytes: int


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all storages created while the mode is active: `live` now, `peak` at the worst moment."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        for tensor in _tensors((args, kwargs)):
            self._notice(tensor, counted=False)  # an input of ours was noticed when it was made; any other is the caller's
        out = func(*args, **kwargs)
        for tensor in _tensors(out):
            self._notice(tensor, counted=True)
        return out

    def _notice(self, tensor: Tensor, *, counted: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        nbytes = storage.nbytes() if counted else 0
        # torch keeps a storage's Python object alive as long as the storage itself, so the callback runs when the bytes are freed
        self._known[key] = weakref.ref(storage, lambda _: self._forget(key, nbytes))
        self.live += nbytes
        self.peak = max(self.peak, self.live)

    def _forget(self, key: int, nbytes: int) -> None:
        self._known.pop(key, None)
        self.live -= nbytes


class AssumeYes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers yes to every yes-or-no question about values of meta tensors, which have none.

    Models ask only whether nothing is padded and nothing is packed, to leave out the attention mask. Runs with masks pass one.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta and args[0].dtype == torch.bool:
            return True
        return func(*args, **(kwargs or {}))


class FusedAttention(TorchFunctionMode):
    """Replaces scaled_dot_product_attention by a stand-in that allocates what the fused kernels do.

    On the meta device torch decomposes attention into matrix products, whose tokens x tokens matrices no fused kernel allocates.

    Args:
        device_type: where it will run, "cpu" or "cuda"; not every kernel exists on both.
        stand_in: called with the function's own arguments; by default `fused_attention`.
    """

    def __init__(self, device_type: str, stand_in: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.device_type = device_type
        self.stand_in = stand_in or partial(fused_attention, runs_on=device_type)

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is functional.scaled_dot_product_attention and self._has_kernel(*args, **(kwargs or {})):
            return self.stand_in(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _has_kernel(self, query: Tensor, key: Tensor, *_: Any, enable_gqa: bool = False, **__: Any) -> bool:
        """Whether torch has more than matrix products for it. Heads that merely broadcast (Falcon's multi-query form) get no kernel.

        Nor do shared ones in float32 on CUDA: flash and cuDNN know half precision alone, and the memory-efficient kernel no groups.
        """
        if query.shape[1] == key.shape[1]:
            return True
        return enable_gqa and not (self.device_type == "cuda" and query.dtype == torch.float32)


class _FusedAttentionFunction(torch.autograd.Function):
    """Shapes of fused attention: keeps query, key, value [B, heads, T, d], the output and the fp32 log-sum-exp [B, heads, T]."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, runs_on: str) -> Tensor:
        batch, heads, tokens, _ = query.shape
        # flash and cuDNN lay the output out as the query, which decides whether the transpose after attention has to copy
        out = torch.empty_like(query) if value.shape[-1] == query.shape[-1] else query.new_empty(batch, heads, tokens, value.shape[-1])
        logsumexp = query.new_empty(batch, heads, tokens, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, logsumexp, bias)
        ctx.runs_on = runs_on
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, *_ = ctx.saved_tensors
        scratch = []
        if ctx.runs_on == "cuda":  # flash and cuDNN alike, at every length (docs/log.md)
            scratch.append(torch.empty_like(query, dtype=torch.float32))  # where dquery is added up, before it is rounded
            if (heads := query.shape[1]) > key.shape[1]:  # each head's own gradients of what heads share, before those are added up
                scratch += [shared.new_empty(shared.shape[0], heads, *shared.shape[2:]) for shared in (key, value)]
        grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        del scratch
        return *grads, None, None


def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *_: Any, runs_on: str = "cpu", **__: Any
) -> Tensor:
    """Takes the arguments of scaled_dot_product_attention; allocates what a fused kernel does, forward and backward."""
    out: Tensor = _FusedAttentionFunction.apply(query, key, value, additive(attn_mask, query), runs_on)  # type: ignore[no-untyped-call]
    return out


def additive(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """A boolean mask turned into a bias of query's dtype, as scaled_dot_product_attention does."""
    return mask.to(query.dtype) if mask is not None and mask.dtype == torch.bool else mask


def layer_peak_bytes(
    layer: nn.Module,
    hidden_shape: tuple[int, int, int],
    dtype: torch.dtype,
    kwargs: Mapping[str, Any],
    args: tuple[Any, ...] = (),
    *,
    fused_attention: bool = True,
    device: torch.device | str = "meta",
    runs_on: str = "cpu",
    output_stays: bool = True,
) -> Footprint:
    """Footprint of one decoder layer's forward and backward for one micro-batch.

    layer: a transformers decoder layer, parameters on any device (only shapes are read unless `device` is a real one).
    hidden_shape: (batch, tokens, hidden). dtype: of parameters and hidden states.
    kwargs, args: what the model's own forward passes to this layer besides the hidden states. fused_attention: False for eager attention.
    device: where this dry run computes. runs_on: "cpu" or "cuda", whose attention kernels count.
    output_stays: as `call_peak_bytes`.
    Raises ModelError when the layer cannot run without data (its shapes depend on values).
    """
    forward, inputs = _blank_call(layer, hidden_shape, dtype, kwargs, args, device)
    with torch.random.fork_rng(devices=[]):  # a dry run must not move the caller's random state
        return call_peak_bytes(
            forward,
            inputs,
            fused_attention=fused_attention,
            runs_on=runs_on,
            what=type(layer).__name__,
            output_stays=output_stays,
        )


def graph_keeps_input(
    layer: nn.Module, hidden_shape: tuple[int, int, int], dtype: torch.dtype, kwargs: Mapping[str, Any], args: tuple[Any, ...] = ()
) -> bool:
    """Whether the graph of a decoder layer saves the hidden states that it was given. Arguments as `layer_peak_bytes`."""
    forward, (hidden, *_) = _blank_call(layer, hidden_shape, dtype, kwargs, args, "meta")
    address, seen = hidden.untyped_storage()._cdata, set()

    def pack(tensor: Tensor) -> Tensor:
        seen.add(tensor.untyped_storage()._cdata)
        return tensor.detach()

    watching = saved_tensors_hooks(pack, lambda tensor: tensor)
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), AssumeYes(), FusedAttention("cpu"), watching:  # type: ignore[no-untyped-call]
        forward()
    return address in seen


def _blank_call(
    layer: nn.Module,
    hidden_shape: tuple[int, int, int],
    dtype: torch.dtype,
    kwargs: Mapping[str, Any],
    args: tuple[Any, ...],
    device: torch.device | str,
) -> tuple[Callable[[], Tensor], list[Tensor]]:
    """A layer's forward on tensors without meaning; and its inputs, hidden states [B, T, hidden] first, then what is trained."""
    parameters = {name: _blank(p, dtype, device).requires_grad_(p.requires_grad) for name, p in layer.named_parameters()}
    buffers = {name: _blank(b, b.dtype, device) for name, b in layer.named_buffers()}
    blank_args, blank_kwargs = tree_map_only(Tensor, lambda t: _blank(t, t.dtype, device), (args, dict(kwargs)))
    hidden_btd = torch.empty(hidden_shape, dtype=dtype, device=device, requires_grad=True)

    def forward() -> Tensor:
        out = torch.func.functional_call(layer, {**parameters, **buffers}, (hidden_btd, *blank_args), blank_kwargs)
        return out[0] if isinstance(out, tuple) else out  # type: ignore[no-any-return]

    return forward, [hidden_btd, *(p for p in parameters.values() if p.requires_grad)]


def call_peak_bytes(
    forward: Callable[[], Tensor],
    inputs: Iterable[Tensor],
    *,
    fused_attention: bool = True,
    runs_on: str = "cpu",
    what: str = "this computation",
    output_stays: bool = True,
) -> Footprint:
    """Footprint of `forward()` and of the gradient of its output with respect to all `inputs` at once.

    inputs: leaf tensors that require gradients, made before the call and so not counted. Used as it is for the LM head and its
    loss on one chunk: pass a closure from hidden states and head weights to the summed loss. The incoming gradient is not counted.
    output_stays: somebody holds on to the output while gradients are computed.
    """
    wanted = list(inputs)
    live = LiveBytes()
    try:
        with torch.enable_grad(), AssumeYes():  # type: ignore[no-untyped-call]
            with FusedAttention(runs_on) if fused_attention else nullcontext(), live:
                out = forward()
            saved_bytes = live.live
            grad_out = torch.ones_like(out)  # outside the mode: it belongs to the caller
            root = get_gradient_edge(out)
            if not output_stays:
                del out
            with live:
                torch.autograd.grad([root], wanted, [grad_out], allow_unused=True)
    except (NotImplementedError, RuntimeError) as error:
        raise ModelError(f"{what}: its memory cannot be found without data ({error}); set train.micro_batch_tokens by hand") from error
    return Footprint(saved_bytes, live.peak)


def tensor_bytes(tree: Any) -> int:
    """Bytes of all distinct storages in a nest of dicts, lists and tensors, such as a micro-batch's captured keyword arguments."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in _tensors(tree)}.values())


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _blank(tensor: Tensor, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """A tensor of the same shape; ones, so that a real run stays finite."""
    return torch.ones(tensor.shape, dtype=dtype, device=device)
