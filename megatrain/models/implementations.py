"""Our implementations of transformers' functions, which lets such be registered.

Experts' matmuls, grouped: one over all rows, which are ordered by expert. It differs from
transformers' own in what a GPU spends most of its time on beside the matmuls, moving rows:
- Rows go to experts, and come back, by the order of their experts and its inverse. Either is the
  other's gradient, a gather and a sum. Autograd, which cannot know that no two rows meet, would add
  them up one by one.
- A row is weighted while it is narrow, between an expert's matrices, so that neither the wide rows
  nor their products are kept for the weights' gradient.
- The gradient of experts' biases is a matmul.

Attention with sinks, by scaled-dot-product attention. A sink is a learned logit of each head that
takes part in the softmax and has no value (GPT-OSS). A key of its own stands for it, whose value is
zero: queries get one more column, which holds the sink, and only that key reads it. So no score
matrix is ever made, and the sink's gradient comes with the queries'. Where tokens see no more than
a window and nothing else hides some, it is computed in blocks as long as the window, each with the
block before it: for 128 tokens of 4,096 a sixteenth of the work.
"""

from __future__ import annotations

from collections.abc import Iterable
from inspect import signature
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import pad

from megatrain.models.transforms import kept_attention
from megatrain.models.transforms.kept_attention import States

NAME = "megatrain"  # in transformers' registry
ALIGNMENT = 16  # bytes: grouped kernels take only rows that begin at multiples


def use_grouped_rows(config: Any) -> None:
    """Have the models of `config` compute their experts by `forward`, where they let one choose."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, forward)
    config._experts_implementation = NAME


def holds_experts(layers: Iterable[nn.Module]) -> bool:
    """True for decoder layers of which one has experts that are computed by `forward`."""
    return any(hasattr(module, "is_transposed") for layer in layers for module in layer.modules())


# why: decision 0083
def forward(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Compute the weighted output of the chosen experts for every token: [tokens, hidden]. experts:
    transformers' module. chosen, weights: [tokens, experts of a token]."""
    tokens, each = chosen.shape
    of_row, order = torch.sort(chosen.reshape(-1), stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    every = torch.arange(experts.num_experts, device=order.device)
    ends = torch.searchsorted(of_row, every, right=True, out_int32=True)

    rows = _rows(hidden, order, inverse, each, True)
    matrix = "gate_up_proj" if experts.has_gate else "up_proj"
    rows = _product(rows, getattr(experts, matrix), ends, experts.is_transposed)
    if experts.has_bias:
        rows = rows + _biases(getattr(experts, f"{matrix}_bias"), of_row)
    rows = experts._apply_gate(rows) if experts.has_gate else experts.act_fn(rows)
    weight_of_row = _rows(weights.reshape(-1, 1), order, inverse, 1, True)
    normed = getattr(experts, "has_post_expert_norm", False)
    if not normed:
        rows = (rows * weight_of_row).to(rows.dtype)
    rows = _product(rows, experts.down_proj, ends, experts.is_transposed)
    if normed:
        if experts.has_bias:
            rows = rows + _biases(experts.down_proj_bias, of_row)
        rows = (experts.post_expert_norm(rows) * weight_of_row).to(rows.dtype)
    out = _rows(rows, order, inverse, each, False)
    if experts.has_bias and not normed:
        shares = weights.new_zeros(tokens, experts.num_experts).scatter_add(1, chosen, weights)
        out = out + shares.to(out.dtype) @ experts.down_proj_bias
    return cast(Tensor, out.to(hidden.dtype))


def _product(rows: Tensor, matrices: Tensor, ends: Tensor, transposed: bool) -> Tensor:
    """[rows, out] of [rows, in] x [experts, out, in], or [experts, in, out] if `transposed`."""
    from transformers.integrations.moe import _can_use_grouped_mm

    rows = rows.to(matrices.dtype)
    widths = matrices.shape[-2:]
    aligned = not any(width * matrices.itemsize % ALIGNMENT for width in widths)
    if aligned and _can_use_grouped_mm(rows, matrices, ends):
        return cast(Tensor, _grouped(rows, matrices, ends, transposed))
    matrices = matrices if transposed else matrices.transpose(-2, -1)
    return cast(Tensor, torch.ops.transformers.grouped_mm_fallback(rows, matrices, offs=ends))


def _moved(states: Tensor, order: Tensor, inverse: Tensor, each: int, there: bool) -> Tensor:
    """[tokens x each, hidden] of [tokens, hidden], in the order of experts, if `there`; else back,
    each token's rows added up in float32, one by one: the compiler makes one kernel of that."""
    if there:
        return states.index_select(0, order // each)
    of_token = inverse.view(-1, each)
    out = states.index_select(0, of_token[:, 0]).float()
    for nth in range(1, each):
        out = out + states.index_select(0, of_token[:, nth])
    return out.to(states.dtype)


@torch.library.custom_op("megatrain::matrices_gradient", mutates_args=())
def matrices_gradient(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """[experts, m, n]: left.T @ right of the rows of each expert, [rows, m] and [rows, n]. An
    operator, so that the compiler keeps the layout of its inputs: kernels take columns only if
    every expert has a multiple of 8 rows."""
    return F.grouped_mm(left.T, right, offs=ends)


@matrices_gradient.register_fake
def _(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    return left.new_empty(len(ends), left.shape[1], right.shape[1])


MATRICES_GRADIENT = torch.ops.megatrain.matrices_gradient


class _Grouped(torch.autograd.Function):
    """Grouped matmul whose matrices' gradient is laid out as they are."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrices: Tensor, ends: Tensor, transposed: bool) -> Tensor:
        ctx.save_for_backward(rows, matrices, ends)
        ctx.transposed = transposed
        right = matrices if transposed else matrices.transpose(-2, -1)
        return F.grouped_mm(rows, right, offs=ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, matrices, ends = ctx.saved_tensors
        right = matrices.transpose(-2, -1) if ctx.transposed else matrices
        grad = grad.contiguous()
        to_rows = F.grouped_mm(grad, right, offs=ends)
        if not ctx.needs_input_grad[1]:
            return to_rows, None, None, None
        pair = (rows, grad) if ctx.transposed else (grad, rows)
        return to_rows, matrices_gradient(*pair, ends), None, None


class _Moved(torch.autograd.Function):
    """Rows on their way to experts, and back: either is the other's gradient."""

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, order: Tensor, inverse: Tensor, each: int, there: bool
    ) -> Tensor:
        ctx.save_for_backward(order, inverse)
        ctx.each, ctx.there = each, there
        return _moved(states, order, inverse, each, there)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        order, inverse = ctx.saved_tensors
        return _moved(grad, order, inverse, ctx.each, not ctx.there), None, None, None, None


class _Biases(torch.autograd.Function):
    """[rows, width]: each row's expert's bias."""

    @staticmethod
    def forward(ctx: Any, biases: Tensor, of_row: Tensor) -> Tensor:
        ctx.save_for_backward(of_row)
        ctx.experts = len(biases)
        return biases.index_select(0, of_row)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (of_row,) = ctx.saved_tensors
        return F.one_hot(of_row, ctx.experts).to(grad.dtype).T @ grad, None


_grouped: Any = _Grouped.apply
_rows: Any = _Moved.apply
_biases: Any = _Biases.apply


# -- attention with sinks --------------------------------------------------------------------------

COLUMNS = 8  # of a head: fused kernels take only multiples


def use_fused_sinks(model: Any) -> None:
    """Have a model whose attention is eager because of sinks use `attend`, if it lets one choose.
    (engine/verify.py tries if its sinks reach it.)"""
    from transformers import AttentionInterface, AttentionMaskInterface

    sinks = any(name.endswith("sinks") for name, _ in model.named_parameters())
    if not sinks or model.config._attn_implementation != "eager":
        return
    if getattr(model, "_supports_attention_backend", False):
        AttentionInterface.register(NAME, attend)
        AttentionMaskInterface.register(NAME, mask_of)
        model.config._attn_implementation = NAME


def mask_of(*args: Any, **options: Any) -> Tensor | None:
    """transformers' mask, but None also where only a window, which `attend` knows, hides tokens."""
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
    states, options = (query, key, value), {**options, "s_aux": s_aux}
    if attention_mask is not None or sliding_window is None or sliding_window >= tokens:
        return _with_sinks(module, states, attention_mask, options), None
    out = _with_sinks(module, *_in_blocks(*states, sliding_window), options)
    return out.reshape(batch, -1, *out.shape[2:])[:, :tokens], None


def _with_sinks(
    module: nn.Module, states: States, mask: Tensor | None, options: dict[str, Any]
) -> Tensor:
    """As `attend`, which knows the arguments, without a window."""
    (query, key, value), sinks = states, options.pop("s_aux")
    if sinks is None:
        return kept_attention.attend_once(module, query, key, value, mask, **options)[0]
    width, width_of_values = query.shape[-1], value.shape[-1]
    scaling = options.get("scaling") or width**-0.5
    columns = -(width + 1) % COLUMNS  # of zeros behind the sink's
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
    out, _ = kept_attention.attend_once(module, query, key, value, mask, **options)
    return out[:, first:, :, :width_of_values]


def _in_blocks(query: Tensor, key: Tensor, value: Tensor, window: int) -> tuple[States, Tensor]:
    """Blocks of `window` queries, with the keys and values of their own block and the one before.
    Queries are [batch x blocks, heads, window, width]; keys, values and mask have 2 x window."""
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
    return (query.transpose(1, 2).flatten(0, 1), key, value), mask


# -- attention of images laid end to end -----------------------------------------------------------

# in transformers' registry, which tells kernels that are told of lengths by "flash"
OF_IMAGES = f"{NAME}_flash_of_images"
FLASH = (8, 0)  # capability of the first GPUs that have the kernel


def use_one_kernel_for_images(model: Any) -> None:
    """Have towers that lay their images end to end compute attention by `attend_images`."""
    from transformers import AttentionInterface

    AttentionInterface.register(OF_IMAGES, attend_images)
    text = model.config.get_text_config()
    for module in model.modules():
        config = getattr(module, "config", None)
        fused = getattr(config, "_attn_implementation", None) == "sdpa"
        if config is not text and fused and "cu_seqlens" in signature(module.forward).parameters:
            config._attn_implementation = OF_IMAGES  # type: ignore[union-attr]


def attend_images(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention inside each image, ([1, patches, heads, width], None): one kernel on a GPU, where
    transformers runs one for each image, which takes the host longer than the GPU.

    Args:
        query, key, value: [1, heads, patches, width].
        cu_seq_lens_q: where images begin, and the number of patches; max_length_q: of the largest.
    """
    from transformers.integrations import sdpa_attention

    width, given = query.shape[-1], (query, key, value)
    fits = query.is_cuda and query.itemsize == 2 and width % COLUMNS == 0
    fits = fits and torch.cuda.get_device_capability(query.device) >= FLASH
    if fits and not options.get("dropout"):
        from torch.nn.attention.varlen import varlen_attn

        if scaling is not None:  # the kernel has the usual one
            given = query * (scaling * width**0.5), key, value
        q, k, v = (each[0].transpose(0, 1) for each in given)
        ends = cu_seq_lens_q.int()
        out: Any = varlen_attn(q, k, v, ends, ends, max_length_q, max_length_q)
        return out.unsqueeze(0), None
    attend: Any = sdpa_attention.sdpa_attention_forward
    lengths = cu_seq_lens_q.diff().tolist()
    of_images = zip(*(torch.split(each, lengths, dim=2) for each in given), strict=True)
    kept = {"dropout": options.get("dropout", 0.0), "scaling": scaling, "is_causal": False}
    return torch.cat([attend(module, *one, None, **kept)[0] for one in of_images], dim=1), None
