"""Bytes that a part of the model needs while it computes, counted on the meta device.

The module is the family's own, so the figure holds for every family; nothing is allocated and no
device is touched. Every storage that an operation creates under `LiveBytes` is counted once when it
appears and given back when its last tensor dies, through forward and backward, as an eager
allocator would see it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from megatrain.errors import ModelError
from megatrain.models.meta import Watch, storage_of, without_data
from megatrain.models.recorder import tensors_in


@dataclass(frozen=True)
class Footprint:
    """Bytes beyond parameters and inputs."""

    saved_bytes: int  # between forward and backward, the output included
    peak_bytes: int  # at the worst moment, all gradients that backward returns included


@dataclass(frozen=True)
class LayerBytes:
    """The memory of one decoder layer for one micro-batch, beyond parameters, input and output."""

    saved: int  # between forward and backward, if it is retained
    recomputed: int  # working set, if it is recomputed; includes the output
    beyond: int  # working set of a retained layer's backward beyond `saved`
    holes: int = 0  # of a compiled one that is recomputed, as `Alive.holes`


class LiveBytes(Watch):  # type: ignore[no-untyped-call]
    """Counts the bytes of all storages created inside: `live` now, `peak` at the worst moment."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def saw(self, func: Any, read: list[Tensor], written: list[Tensor]) -> None:
        for tensor in read:  # made under this mode, and known, or the caller's
            self._notice(tensor, counted=False)
        for tensor in written:
            self._notice(tensor, counted=True)

    def _notice(self, tensor: Tensor, *, counted: bool) -> None:
        storage, key = tensor.untyped_storage(), storage_of(tensor)
        if key in self._known:
            return
        nbytes = storage.nbytes() if counted else 0
        # torch keeps a storage's Python object alive as long as the storage, so the callback runs
        # when the bytes are freed
        self._known[key] = weakref.ref(storage, lambda _: self._forget(key, nbytes))
        self.live += nbytes
        self.peak = max(self.peak, self.live)

    def _forget(self, key: int, nbytes: int) -> None:
        self._known.pop(key, None)
        self.live -= nbytes


@dataclass(frozen=True)
class Attention:
    """The arguments of scaled_dot_product_attention."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def bias(self) -> Tensor | None:
        """The mask; a boolean one of query's dtype, as scaled_dot_product_attention makes it."""
        mask = self.attn_mask
        return mask.to(self.query.dtype) if mask is not None and mask.dtype == torch.bool else mask

    def has_kernel(self, device_type: str) -> bool:
        """True if torch has a kernel for it beside matmuls: not for heads that merely broadcast
        (Falcon's multi-query form), nor, on CUDA, for grouped heads in float32."""
        if self.query.shape[1] == self.key.shape[1]:
            return True
        float32_on_cuda = device_type == "cuda" and self.query.dtype == torch.float32
        return self.enable_gqa and not float32_on_cuda


class FusedAttention(TorchFunctionMode):
    """Replaces scaled_dot_product_attention by a stand-in that allocates what fused kernels do. On
    the meta device torch decomposes attention into matmuls, whose [tokens, tokens] matrices no
    fused kernel allocates. device_type: where it will run; not every kernel exists on both."""

    def __init__(
        self, device_type: str, stand_in: Callable[[Attention], Tensor] | None = None
    ) -> None:
        super().__init__()
        self.device_type = device_type
        self.stand_in = stand_in or partial(fused_attention, runs_on=device_type)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            call = Attention(*args, **kwargs)
            if call.has_kernel(self.device_type):
                return self.stand_in(call)
        return func(*args, **kwargs)


class _FusedAttentionFunction(torch.autograd.Function):
    """Shapes of fused attention: keeps query, key, value [B, heads, T, d], the output and the fp32
    log-sum-exp [B, heads, T]."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, runs_on: str
    ) -> Tensor:
        # Flash and cuDNN lay the output out as the query, which decides whether the transpose after
        # attention has to copy.
        if value.shape[-1] == query.shape[-1]:
            out = torch.empty_like(query)
        else:
            out = query.new_empty(*query.shape[:-1], value.shape[-1])
        logsumexp = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, logsumexp, bias)
        ctx.runs_on = runs_on
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, *_ = ctx.saved_tensors
        scratch = []
        if ctx.runs_on == "cuda":  # flash and cuDNN alike, at every length
            # where dquery is added up in fp32
            scratch.append(torch.empty_like(query, dtype=torch.float32))
            if (heads := query.shape[1]) > key.shape[1]:
                # gradients of shared keys and values for each head, before they are added up
                scratch += [t.new_empty(t.shape[0], heads, *t.shape[2:]) for t in (key, value)]
        grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        del scratch
        return *grads, None, None


def fused_attention(call: Attention, runs_on: str = "cpu") -> Tensor:
    """Allocates what a fused kernel does, forward and backward."""
    given = call.query, call.key, call.value, call.bias, runs_on
    return _FusedAttentionFunction.apply(*given)  # type: ignore[no-untyped-call, no-any-return]


def graph_keeps_input(forward: Callable[[], Tensor], inputs: Sequence[Tensor]) -> bool:
    """True if the graph of a layer's `forward()` saves its hidden states, the first of `inputs`."""
    seen = set()

    def pack(tensor: Tensor) -> Tensor:
        seen.add(storage_of(tensor))
        return tensor.detach()

    watching = saved_tensors_hooks(pack, lambda tensor: tensor)
    with without_data(), torch.enable_grad(), FusedAttention("cpu"), watching:
        forward()
    return storage_of(inputs[0]) in seen


def call_peak_bytes(
    forward: Callable[[], Tensor],
    inputs: Iterable[Tensor],
    *,
    fused_attention: bool = True,
    runs_on: str = "cpu",
    what: str = "this computation",
    output_stays: bool = True,
) -> Footprint:
    """Footprint of `forward()` and of the gradient of its output by all `inputs` at once, leaves
    made before the call. Neither they nor the incoming gradient are counted.

    Args:
        fused_attention: False for eager attention.
        runs_on: "cpu" or "cuda", the device whose kernels count.
        what: names the computation in errors.
        output_stays: the output is still held while gradients are computed.

    Raises:
        ModelError: the computation cannot run without data, because shapes depend on values.
    """
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    live = LiveBytes()
    try:
        with without_data(runs_on), torch.enable_grad():
            with FusedAttention(runs_on) if fused_attention else nullcontext(), live:
                out = forward()
            saved_bytes = live.live
            if not wanted:
                return Footprint(saved_bytes, live.peak)
            grad_out = torch.ones_like(out)  # outside the mode: it belongs to the caller
            root = get_gradient_edge(out)
            if not output_stays:
                del out
            with live:
                torch.autograd.grad([root], wanted, [grad_out], allow_unused=True)
    except (NotImplementedError, RuntimeError) as error:
        raise ModelError(
            f"{what}: its memory cannot be found without data ({error}); "
            "set train.micro_batch_tokens by hand"
        ) from error
    return Footprint(saved_bytes, live.peak)


def tensor_bytes(tree: Any) -> int:
    """Bytes of all distinct storages in a nested structure of tensors."""
    return sum({storage_of(t): t.untyped_storage().nbytes() for t in tensors_in(tree)}.values())
