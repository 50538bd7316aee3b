"""Codecs: hidden states in fewer bits, for as long as they wait for backward.

Elements are taken in groups, row after row, and every group has a scale: its largest magnitude over the largest code, as a bfloat16 that
is rounded up, so that no code is cut off. Codes are integers, rounded to the nearest, ties to even. Before they are made of a group it is
turned by a Hadamard matrix, which spreads its few large elements over all (Ashkboos et al., 2024: QuaRot). A group that holds what is not
finite comes back as NaN, whole. On the CPU this is plain PyTorch; on CUDA a kernel each (codec_kernels.py) has the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from megatrain.engine.activations import codec_kernels
from megatrain.schedule import FORMS, SCALE_BYTES, Form

SMALLEST_SCALE = 1e-30  # what is smaller than half of it becomes zero; inverses stay finite
NAN = 0x7FC0  # bfloat16
ELEMENTS = 8  # whose codes are packed together, into as many bytes as a code has bits
AT_ONCE = 1 << 30  # elements: kernels count them in 32 bits. Whole groups of every form


class Codec(Protocol):
    """Hidden states of any shape, in bfloat16 or float32, to bytes and back."""

    def nbytes(self, numel: int) -> int:
        """Of so many elements."""

    def encode(self, hidden: Tensor, out: Tensor) -> None:
        """Write `hidden` to `out`, uint8 [nbytes], on the same device, at an address that is a multiple of 16."""

    def decode(self, flat: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """What `encode` wrote, as near as it kept it: a new tensor."""


@dataclass(frozen=True)
class GroupScaled(Codec):
    """Integers of `form.bits` bits."""

    form: Form

    @property
    def largest(self) -> float:
        """Code that a group's largest magnitude gets."""
        return float((1 << self.form.bits - 1) - 1)

    @property
    def scale_cap(self) -> float:
        """A bfloat16; with a larger one, the largest code would be no bfloat16."""
        return float(
            torch.tensor(
                torch.finfo(torch.bfloat16).max / self.largest * (1 - 2**-8), dtype=torch.bfloat16
            )
        )

    def nbytes(self, numel: int) -> int:
        return self.form.nbytes(numel)

    def encode(self, hidden: Tensor, out: Tensor) -> None:
        for values, codes, scales in self._pieces(hidden.reshape(-1), out):
            if hidden.is_cuda:
                codec_kernels.encode(
                    values,
                    codes,
                    scales,
                    self.form,
                    1 / self.largest,
                    SMALLEST_SCALE,
                    self.scale_cap,
                )
            else:
                self._encode(values, codes, scales)

    def decode(self, flat: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        hidden = torch.empty(shape, dtype=dtype, device=flat.device)
        for values, codes, scales in self._pieces(hidden.view(-1), flat):
            if flat.is_cuda:
                codec_kernels.decode(codes, scales, values, self.form)
            else:
                values.copy_(self._decoded(codes, scales)[: values.numel()])
        return hidden

    def _pieces(self, values: Tensor, flat: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Views of so many elements, their codes and their scales as are taken at once."""
        codes, scales = self._split(flat)
        split = torch.split
        return zip(
            split(values, AT_ONCE),
            split(codes, AT_ONCE // ELEMENTS),
            split(scales, AT_ONCE // self.form.group),
            strict=True,
        )

    def _encode(self, values: Tensor, codes: Tensor, scales: Tensor) -> None:
        """The formula. It writes to `codes` and `scales`."""
        padding = scales.numel() * self.form.group - values.numel()
        groups = turned(
            functional.pad(values.float(), (0, padding)).view(-1, self.form.group)
            * (1 / self.form.group)
        )
        most = groups.abs().amax(1)
        found = (most * (1 / self.largest)).clamp(SMALLEST_SCALE, self.scale_cap).view(
            torch.int32
        ) + 0xFFFF >> 16
        found = torch.where(most.isfinite(), found, NAN)
        scaled = groups * (1 / (found << 16).view(torch.float32)).unsqueeze(1)
        codes.copy_(self._packed(scaled.nan_to_num_(nan=0.0).clamp_(-self.largest, self.largest)))
        scales.copy_(found)

    def _decoded(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Whole groups of values, fp32."""
        values = self._unpacked(codes).view(-1, self.form.group) * (
            scales.to(torch.int32) << 16
        ).view(torch.float32).unsqueeze(1)
        return turned(values).view(-1)

    def _split(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Codes, uint8 [elements / 8, bits], and scales, int16 [groups]: views."""
        per_group = self.form.group * self.form.bits // 8
        groups = flat.numel() // (per_group + SCALE_BYTES)
        codes = flat[: groups * per_group].view(-1, self.form.bits)
        return codes, flat[groups * per_group :].view(torch.int16)

    def _packed(self, scaled: Tensor) -> Tensor:
        """Codes of eight elements each, in two's complement, the first in the lowest bits."""
        codes = scaled.round_().to(torch.int64).view(-1, ELEMENTS) & (1 << self.form.bits) - 1
        together = (codes << self._shifts).sum(1)  # bits do not meet, so this is their union
        return together.unsqueeze(1).view(torch.uint8)[:, : self.form.bits]

    def _unpacked(self, codes: Tensor) -> Tensor:
        """Of packed codes the values, fp32."""
        together = functional.pad(codes, (0, ELEMENTS - self.form.bits)).view(torch.int64)
        unused = 64 - self.form.bits
        return (
            together << unused - self._shifts >> unused
        ).float()  # the shift back brings the sign

    @property
    def _shifts(self) -> Tensor:
        return torch.arange(ELEMENTS) * self.form.bits


def turned(groups: Tensor) -> Tensor:
    """`groups` [n, a power of two] times the Hadamard matrix of ones and minus ones; twice, and they are as many times what they were.

    Sums of pairs, of pairs of sums and so on: their order is what the kernels have.
    """
    shape, distance = groups.shape, 1
    while distance < shape[1]:
        low, high = groups.reshape(-1, 2, distance).unbind(1)
        groups = torch.stack((low + high, low - high), 1)
        distance *= 2
    return groups.view(shape)


CODECS: dict[str, Codec] = {name: GroupScaled(form) for name, form in FORMS.items()}
