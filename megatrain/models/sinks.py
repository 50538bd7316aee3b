"""Attention with sinks by scaled-dot-product attention.

A sink is a learned logit of each head that takes part in the softmax and has no value (GPT-OSS). A
key of its own stands for it here, whose value is zero: queries get one more column, which holds the
sink, and only that key reads it. So no score matrix is ever made, and the sink's gradient comes
with the queries'.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

NAME = "megatrain"  # in transformers' registry
ALIGNMENT = 8  # columns of a head: fused kernels take only multiples


def use_fused_sinks(model: Any) -> None:
    """Have a model whose attention is eager because of sinks use `attend`, if it lets one choose.

    Whether its sinks reach `attend` is not known here: models/verify tries it.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    sinks = any(name.endswith("sinks") for name, _ in model.named_parameters())
    if not sinks or model.config._attn_implementation != "eager":
        return
    if getattr(model, "_supports_attention_backend", False):
        AttentionInterface.register(NAME, attend)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        model.config._attn_implementation = NAME


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' interface of attention: ([batch, tokens, heads, width of values], None).

    Args:
        query: [batch, heads, tokens, width].
        key, value: [batch, heads or groups of heads, tokens, width].
        attention_mask: bool or additive, broadcast to [batch, heads, tokens, tokens]. None: tokens
            see themselves and earlier ones.
        s_aux: sinks [heads]; None: plain attention.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if s_aux is None:
        given = query, key, value, attention_mask
        return sdpa_attention_forward(module, *given, scaling=scaling, **options)
    width, width_of_values = query.shape[-1], value.shape[-1]
    scaling = width**-0.5 if scaling is None else scaling
    columns = -(width + 1) % ALIGNMENT  # of zeros behind the sink's
    sinks = (s_aux / scaling).to(query.dtype).view(1, -1, 1, 1).expand(*query.shape[:3], 1)
    query = pad(torch.cat([query, sinks], -1), (0, columns))
    sinks_key = pad(key.new_ones(1, 1, 1, 1), (width, columns)).expand(*key.shape[:2], 1, -1)
    key = torch.cat([sinks_key, pad(key, (0, 1 + columns))], 2)
    value = pad(value, (0, max(0, key.shape[-1] - width_of_values), 1, 0))
    if attention_mask is None:
        query = pad(query, (0, 0, 1, 0))  # its place, so that the mask stays causal
    else:
        sees = True if attention_mask.dtype == torch.bool else 0.0
        attention_mask = pad(attention_mask, (1, 0), value=sees)
    given = query, key, value, attention_mask
    out, _ = sdpa_attention_forward(module, *given, scaling=scaling, **options)
    return out[:, int(attention_mask is None) :, :, :width_of_values], None
