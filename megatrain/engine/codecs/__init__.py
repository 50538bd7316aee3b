"""Codecs: hidden states in fewer bits between forward and backward.

Elements are taken in groups, row after row, and every group has a scale: its largest magnitude over
the largest code, as a bfloat16 that is rounded up, so that no code is cut off. Codes are integers,
rounded to the nearest, ties to even. A group is first rotated by a Hadamard transform, which
spreads its few large elements over all (Ashkboos et al., 2024: QuaRot). A group with an element
that is not finite comes back as NaN, whole. On the CPU this is plain PyTorch; on CUDA two kernels
(kernels.py) have the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from megatrain.engine.codecs import kernels
from megatrain.schedule import FORMS, SCALE_BYTES, Form

SMALLEST_SCALE = 1e-30  # what is smaller than half of it becomes zero; inverses stay finite
NAN = 0x7FC0  # bfloat16
ELEMENTS = 8  # their codes are packed together, into as many bytes as a code has bits
AT_ONCE = 1 << 30  # elements, whole groups of every form: kernels count them in 32 bits


@dataclass(frozen=True)
class GroupScaled:
    """Hidden states of any shape, bfloat16 or float32, as integers of `form.bits` bits and back."""

    form: Form

    @property
    def largest(self) -> float:
        """The code of a group's largest magnitude."""
        return float((1 << self.form.bits - 1) - 1)

    @property
    def scale_cap(self) -> float:
        """The largest scale, a bfloat16: with it the largest code is still a finite bfloat16."""
        cap = torch.finfo(torch.bfloat16).max / self.largest * (1 - 2**-8)
        return float(torch.tensor(cap, dtype=torch.bfloat16))

    def nbytes(self, numel: int) -> int:
        """Bytes of `numel` elements."""
        return self.form.nbytes(numel)

    def encode(self, hidden: Tensor, out: Tensor) -> None:
        """Write `hidden` to `out`, uint8 [nbytes], on the same device, aligned to 16 bytes."""
        limits = (1 / self.largest, SMALLEST_SCALE, self.scale_cap)
        for values, codes, scales in self._pieces(hidden.reshape(-1), out):
            if hidden.is_cuda:
                kernels.encode(values, codes, scales, self.form, limits)
            else:
                self._encode(values, codes, scales)

    def decode(self, flat: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A new tensor of what `encode` wrote to `flat`."""
        hidden = torch.empty(shape, dtype=dtype, device=flat.device)
        for values, codes, scales in self._pieces(hidden.view(-1), flat):
            if flat.is_cuda:
                kernels.decode(codes, scales, values, self.form)
            else:
                values.copy_(self._decoded(codes, scales)[: values.numel()])
        return hidden

    def _pieces(self, values: Tensor, flat: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Views of AT_ONCE elements each, of their codes, uint8 [elements / 8, bits], and of their
        scales, int16 [groups]."""
        per_group = self.form.group * self.form.bits // 8
        codes_end = flat.numel() // (per_group + SCALE_BYTES) * per_group
        codes, scales = flat[:codes_end].view(-1, self.form.bits), flat[codes_end:]
        return zip(
            torch.split(values, AT_ONCE),
            torch.split(codes, AT_ONCE // ELEMENTS),
            torch.split(scales.view(torch.int16), AT_ONCE // self.form.group),
            strict=True,
        )

    def _encode(self, values: Tensor, codes: Tensor, scales: Tensor) -> None:
        """The formula. It writes to `codes` and `scales`."""
        group, padding = self.form.group, scales.numel() * self.form.group - values.numel()
        groups = functional.pad(values.float(), (0, padding)).view(-1, group) * (1 / group)
        groups = turned(groups)
        most = groups.abs().amax(1)
        found = (most * (1 / self.largest)).clamp(SMALLEST_SCALE, self.scale_cap)
        found = found.view(torch.int32) + 0xFFFF >> 16  # to bfloat16, rounded up
        found = torch.where(most.isfinite(), found, NAN)
        scaled = groups * (1 / (found << 16).view(torch.float32)).unsqueeze(1)
        codes.copy_(self._packed(scaled.nan_to_num_(nan=0.0).clamp_(-self.largest, self.largest)))
        scales.copy_(found)

    def _decoded(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Whole groups of values, fp32."""
        factors = (scales.to(torch.int32) << 16).view(torch.float32).unsqueeze(1)
        return turned(self._unpacked(codes).view(-1, self.form.group) * factors).view(-1)

    def _packed(self, scaled: Tensor) -> Tensor:
        """Codes of eight elements each, in two's complement, the first in the lowest bits."""
        codes = scaled.round_().to(torch.int64).view(-1, ELEMENTS) & (1 << self.form.bits) - 1
        together = (codes << self._shifts).sum(1)  # bits do not meet, so this is their union
        return together.unsqueeze(1).view(torch.uint8)[:, : self.form.bits]

    def _unpacked(self, codes: Tensor) -> Tensor:
        """The values of packed codes, fp32."""
        together = functional.pad(codes, (0, ELEMENTS - self.form.bits)).view(torch.int64)
        unused = 64 - self.form.bits
        return (together << unused - self._shifts >> unused).float()  # back: with its sign

    @property
    def _shifts(self) -> Tensor:
        return torch.arange(ELEMENTS) * self.form.bits


def turned(groups: Tensor) -> Tensor:
    """`groups` [n, a power of two] times the Hadamard matrix of ones and minus ones.

    Applied twice it multiplies by the size of a group. Sums of pairs, of pairs of sums and so on,
    in the order of the kernels.
    """
    shape, distance = groups.shape, 1
    while distance < shape[1]:
        low, high = groups.reshape(-1, 2, distance).unbind(1)
        groups = torch.stack((low + high, low - high), 1)
        distance *= 2
    return groups.view(shape)


# why: decision 0024
CODECS = {name: GroupScaled(form) for name, form in FORMS.items()}
