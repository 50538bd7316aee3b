"""The fp32 master weight as two halves: the bf16 weight of the GPU and an int16 remainder.

With `u` the 32 bits of the master, all arithmetic modulo 2^32 (modulo 2^16 for the weight):

    weight    = (u + 0x8000) >> 16        nearest bf16, ties away from zero
    remainder = int16(u & 0xFFFF)         the low half, read as signed
    u         = (weight << 16) + sign_extend(remainder)

Every pattern comes back, NaN and infinities included. Rounding ties to even, as
`.to(torch.bfloat16)` does, would lose the direction of a tie. One consequence: a finite master
within half a bf16 step of overflow has an infinite weight. The same arithmetic, fused with the
update, is in kernels.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

# why: decision 0002
CHUNK = 1 << 23  # elements: temporaries stay at 32 MiB however large the tensor is


def split_master(master: Tensor, out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """(weight, remainder), bfloat16 and int16, of an fp32 tensor on any device. out: two contiguous
    tensors to write and return."""
    assert master.dtype == torch.float32, master.dtype
    if out is None:
        weight = torch.empty(master.shape, dtype=torch.bfloat16, device=master.device)
        out = (weight, torch.empty_like(weight, dtype=torch.int16))
    weight, remainder = out
    dtypes = (weight.dtype, remainder.dtype)
    assert dtypes == (torch.bfloat16, torch.int16), dtypes
    bits = master.detach().contiguous().view(torch.int32).view(-1)
    high, low = weight.view(torch.int16).view(-1), remainder.view(-1)
    shapes = (weight.shape, remainder.shape, master.shape)
    assert high.numel() == low.numel() == bits.numel(), shapes
    for start in range(0, bits.numel(), CHUNK):
        part = slice(start, start + CHUNK)
        low[part].copy_(bits[part])  # int32 to int16 keeps the low half
        # the sum wraps, and so does the narrowing
        high[part].copy_((bits[part] + 0x8000).bitwise_right_shift_(16))
    return out


def as_weight(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Values of any dtype as a weight of `dtype` without a remainder: rounded as `split_master`
    does, so that a tensor computes the same whether it has one."""
    if dtype != torch.bfloat16 or values.dtype == dtype:
        return values
    return split_master(values.float())[0]


def join_master(weight: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 master, bit for bit, of a bfloat16 weight and its int16 remainder of that shape."""
    dtypes = (weight.dtype, remainder.dtype)
    assert dtypes == (torch.bfloat16, torch.int16), dtypes
    assert weight.numel() == remainder.numel(), (weight.shape, remainder.shape)
    out = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
    low = remainder.contiguous().view(-1)
    bits = out.view(torch.int32).view(-1)
    bits.copy_(weight.detach().contiguous().view(torch.int16).view(-1))
    bits.bitwise_left_shift_(16).add_(low)  # int16 is sign-extended by the addition; no temporaries
    return out
