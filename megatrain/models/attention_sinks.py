"""Attention with sinks by scaled-dot-product attention.

A sink is a learned logit of each head that takes part in the softmax and has no value (GPT-OSS). A
key of its own stands for it here, whose value is zero: queries get one more column, which holds the
sink, and only that key reads it. So no score matrix is ever made, and the sink's gradient comes
with the queries'.

Where tokens see no more than a window and nothing else hides some, it is computed in blocks as long
as the window, each with the block before it: for 128 tokens of 4,096 a sixteenth of the work.
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

    Whether its sinks reach `attend` is not known here: engine/verify.py tries it.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    sinks = any(name.endswith("sinks") for name, _ in model.named_parameters())
    if not sinks or model.config._attn_implementation != "eager":
        return
    if getattr(model, "_supports_attention_backend", False):
        AttentionInterface.register(NAME, attend)
        AttentionMaskInterface.register(NAME, mask_of)
        model.config._attn_implementation = NAME


def mask_of(*args: Any, **options: Any) -> Tensor | None:
    """transformers' mask for scaled-dot-product attention, but None also where nothing besides a
    window hides earlier tokens: `attend` knows the window."""
    from transformers.masking_utils import sdpa_mask

    return sdpa_mask(*args, **options | {"local_size": None})


# why: decision 0084
def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' interface of attention: ([batch, tokens, heads, width of values], None).

    Args:
        query: [batch, heads, tokens, width].
        key, value: [batch, heads or groups of heads, tokens, width].
        attention_mask: bool or additive, broadcast to [batch, heads, tokens, tokens]. None: tokens
            see themselves and the earlier ones in the window.
        s_aux: sinks [heads]; None: none.
        sliding_window: how many tokens one sees, itself included; None: all. A mask says it, too.
    """
    batch, _, tokens, _ = query.shape
    if attention_mask is not None or sliding_window is None or sliding_window >= tokens:
        given = query, key, value, attention_mask
        return _with_sinks(module, *given, s_aux, options), None
    given = _in_blocks(query, key, value, sliding_window)
    out = _with_sinks(module, *given, s_aux, options)
    return out.reshape(batch, -1, *out.shape[2:])[:, :tokens], None


def _with_sinks(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    """As `attend`, which knows the arguments, without a window."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if sinks is None:
        return sdpa_attention_forward(module, query, key, value, mask, **options)[0]
    width, width_of_values = query.shape[-1], value.shape[-1]
    scaling = options.get("scaling") or width**-0.5
    columns = -(width + 1) % ALIGNMENT  # of zeros behind the sink's
    column = (sinks / scaling).to(query.dtype).view(1, -1, 1, 1).expand(*query.shape[:3], 1)
    query = pad(torch.cat([query, column], -1), (0, columns))
    sinks_key = pad(key.new_ones(1, 1, 1, 1), (width, columns)).expand(*key.shape[:2], 1, -1)
    key = torch.cat([sinks_key, pad(key, (0, 1 + columns))], 2)
    value = pad(value, (0, max(0, key.shape[-1] - width_of_values), 1, 0))
    first = 0
    if mask is None and query.shape[2] > 1:
        query, first = pad(query, (0, 0, 1, 0)), 1  # a query for the sink: the mask stays causal
    elif mask is not None:  # a single query sees all keys, those that a cache holds included
        mask = pad(mask, (1, 0), value=True if mask.dtype == torch.bool else 0.0)
    options = options | {"scaling": scaling}
    out, _ = sdpa_attention_forward(module, query, key, value, mask, **options)
    return out[:, first:, :, :width_of_values]


def _in_blocks(
    query: Tensor, key: Tensor, value: Tensor, window: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Blocks of `window` queries, with the keys and values of their own block and the one before.

    Returns [batch x blocks, heads, window, width], twice [batch x blocks, heads, 2 x window,
    width], and what sees what, [batch x blocks, 1, window, 2 x window].
    """
    batch, _, tokens, _ = query.shape
    blocks = -(-tokens // window)
    missing = blocks * window - tokens

    def with_the_block_before(states: Tensor) -> Tensor:
        states = pad(states, (0, 0, window, missing)).unfold(2, 2 * window, window)
        return states.permute(0, 2, 1, 4, 3).flatten(0, 1)

    query = pad(query, (0, 0, 0, missing)).unfold(2, window, window).transpose(-2, -1)
    places = torch.arange(2 * window, device=query.device)
    behind = places[:window, None] + window - places  # [window, 2 x window]
    sees = (behind >= 0) & (behind < window)
    real = (places >= window) | (torch.arange(blocks, device=query.device)[:, None] > 0)
    mask = (sees & real[:, None]).repeat(batch, 1, 1)[:, None]
    key, value = with_the_block_before(key), with_the_block_before(value)
    return query.transpose(1, 2).flatten(0, 1), key, value, mask
