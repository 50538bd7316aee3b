"""Attention that keeps what its backward needs, so that recomputing a layer leaves it out.

A recomputed layer computes its attention's forward twice: four of the nine matmuls that attention
then takes. The first forward, which runs without gradients, keeps the output and the log-sum-exp of
every query; where the layer runs again they take the place of the kernel, and its backward starts
from them. The kernels are PyTorch's own, so gradients have the bits of full recomputation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

from megatrain.errors import ConfigError
from megatrain.models.meta import blank_call, without_data
from megatrain.models.recorder import LayerCall, by_kind

aten = torch.ops.aten
States = tuple[Tensor, Tensor, Tensor]  # query, key, value
WIDEST, COLUMNS, AMPERE = 256, 8, (8, 0)  # of a head, its multiples; the first GPUs with kernels
NONE_KEPT = "no layer of this model has attention that can be kept: causal, by scaled-dot-product "
NONE_KEPT += "kernels (on a GPU in bf16), without masks; set it to 0"
CUDNN = SDPBackend.CUDNN_ATTENTION.value


@dataclass
class _Kept:
    """Outputs [batch, tokens, heads, width] and log-sum-exps, fp32 [batch, heads, tokens], in turn,
    of the layer that runs. mode: "keep" adds to them, "reuse" takes them out again."""

    mode: str = "off"
    tensors: list[Tensor] = field(default_factory=list)


KEPT = _Kept()


@contextmanager
def _mode(mode: str, tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    KEPT.mode, KEPT.tensors = mode, tensors
    try:
        yield tensors
    finally:
        KEPT.mode, KEPT.tensors = "off", []


def keeping_attention(wanted: bool = True) -> Any:
    """A context in which the layer that runs without gradients gives what its attention keeps."""
    return _mode("keep" if wanted else "off", [])


def reusing_attention(tensors: Sequence[Tensor]) -> Any:
    """A context in which a layer that runs again uses what `keeping_attention` has given."""
    return _mode("reuse" if tensors else "off", [*tensors])


def attention_bytes(
    layer: nn.Module, hidden_shape: Sequence[int], dtype: torch.dtype, call: LayerCall, runs_on: str
) -> int:
    """Bytes a token that a layer's attention keeps; 0 where there is none that can. Its parameters
    are on the meta device."""
    if runs_on == "cuda" and dtype == torch.float32:  # no kernel has its log-sum-exp
        return 0
    forward, _ = blank_call(layer, hidden_shape, dtype, call)
    with without_data(runs_on), torch.no_grad(), keeping_attention() as kept:
        forward()
    return int(sum(tensor.nbytes for tensor in kept)) // prod(hidden_shape[:2])


def most_kept(skeleton: Any, runs_on: str) -> int:
    """The largest `attention_bytes` of a skeleton's layers. Raises ConfigError if it is 0."""
    hidden, calls = skeleton.dry_call(1, 2)
    how = hidden.shape, skeleton.dtype

    def kept_by(layer: nn.Module, call: LayerCall) -> int:
        return attention_bytes(layer, *how, call, runs_on)

    if most := max(by_kind(skeleton.layers, calls, kept_by)):
        return most
    raise ConfigError(f"keep_attention: {NONE_KEPT}")


def attend_once(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' interface of scaled-dot-product attention, and its own outside of the contexts:
    ([batch, tokens, heads, width], None). Causal attention without masks keeps and reuses.

    Args:
        query: [batch, heads, tokens, width].
        key, value: [batch, heads or groups of heads, tokens, width].
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if KEPT.mode == "off" or not _is_kept(module, (query, key, value), attention_mask, options):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    scale = options.get("scaling") or query.shape[-1] ** -0.5
    if KEPT.mode == "reuse":
        out, sums = KEPT.tensors.pop(0), KEPT.tensors.pop(0)
        return _reuse(query, key, value, out, sums, scale), None
    out, sums = torch.ops.megatrain.attention(query, key, value, scale)
    KEPT.tensors.extend((out, sums))
    return out, None


def _is_kept(
    module: nn.Module, states: States, mask: Tensor | None, options: dict[str, Any]
) -> bool:
    """True if kernels compute it that hand out their log-sum-exp."""
    query, key, value = states
    causal = options.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    plain = mask is None and causal and not options.get("dropout")
    plain = plain and options.get("position_bias") is None and options.get("softcap") is None
    width, tokens = query.shape[-1], query.shape[2]
    alike = key.shape[-1] == value.shape[-1] == width and key.shape[2] == tokens > 1
    if query.is_cuda:
        suits = query.itemsize == 2 and width % COLUMNS == 0
        alike = alike and suits and torch.cuda.get_device_capability(query.device) >= AMPERE
    return plain and alike and width <= WIDEST


class _Reused(torch.autograd.Function):
    """Attention whose forward has been computed."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, scale: float
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.scale = scale
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        given = grad, *ctx.saved_tensors, ctx.scale
        return *torch.ops.megatrain.attention_backward(*given), None, None, None


_reuse: Any = _Reused.apply


# Operators, so that compiled layers neither look inside nor choose the kernel when they are traced.


def _on_cudnn(query: Tensor, key: Tensor, value: Tensor, scale: float) -> bool:
    """True where PyTorch would take cuDNN's kernel, False where flash attention's."""
    grouped = query.shape[1] != key.shape[1]
    options: Any = {"scale": scale, "enable_gqa": grouped}
    chosen = torch._fused_sdp_choice(query, key, value, None, 0.0, True, **options)
    assert chosen in (CUDNN, SDPBackend.FLASH_ATTENTION.value), "kernels with a log-sum-exp"
    return chosen == CUDNN


def _laid(states: Tensor) -> Tensor:
    """[batch, heads, tokens, width] with all heads of a token side by side in memory."""
    return states.transpose(1, 2).contiguous().transpose(1, 2)


@torch.library.custom_op("megatrain::attention", mutates_args=())
def _attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Output [batch, tokens, heads, width], and log-sum-exp, fp32 [batch, heads, tokens]."""
    given, causal = (query, key, value), (0.0, True)
    if not query.is_cuda:
        flash = aten._scaled_dot_product_flash_attention_for_cpu
        out, sums = flash(*given, *causal, scale=scale)
    elif _on_cudnn(*given, scale):
        cudnn = aten._scaled_dot_product_cudnn_attention
        out, sums = cudnn(*given, None, True, *causal, False, scale=scale)[:2]
    else:
        out, sums = aten._scaled_dot_product_flash_attention(*given, *causal, scale=scale)[:2]
    return out.transpose(1, 2).contiguous(), sums.reshape(query.shape[:3]).contiguous()


@_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    batch, heads, tokens, width = query.shape
    out = query.new_empty(batch, tokens, heads, width)
    return out, query.new_empty(batch, heads, tokens, dtype=torch.float32)


@torch.library.custom_op("megatrain::attention_backward", mutates_args=())
def _attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value. grad, out: [batch, tokens, heads, width]."""
    given = grad.transpose(1, 2), query, key, value, out.transpose(1, 2)
    tokens, causal = (query.shape[2], key.shape[2]), (0.0, True)
    if not query.is_cuda:
        flash = aten._scaled_dot_product_flash_attention_for_cpu_backward
        found = flash(*given, sums, *causal, scale=scale)
    elif _on_cudnn(query, key, value, scale):
        cudnn = aten._scaled_dot_product_cudnn_attention_backward
        seeds = [query.new_zeros((), dtype=torch.int64)] * 2  # of dropout
        more = sums.unsqueeze(-1), *seeds, None, None, None
        found = cudnn(*given, *more, *tokens, *causal, scale=scale)
    else:
        flash = aten._scaled_dot_product_flash_attention_backward
        found = flash(*given, sums, None, None, *tokens, *causal, None, None, scale=scale)
    return tuple(map(_laid, found))  # type: ignore[return-value]


@_attention_backward.register_fake
def _(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(_laid(torch.empty_like(one)) for one in (query, key, value))  # type: ignore[return-value]
