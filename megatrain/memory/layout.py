"""Where each tensor of a block lies inside the block's flat arrays."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch

TENSOR_ALIGNMENT = 64  # elements: 128 bytes of bf16, so that every view starts on a cache line and suits vector loads
GROUP = TENSOR_ALIGNMENT  # consecutive elements that may share one of another array: a scale, say
BLOCK_ALIGNMENT = 1024  # elements: a block's flat array is a whole number of rows for the row-wise norm and of pages' halves


# What an array of a block has one element for: every parameter, every GROUP of them, every row or column of each tensor (of the last two
# dimensions; a tensor of one dimension is its own row), or every parameter that is not in a hidden matrix (TensorSpec.hidden).
Per = Literal["element", "group", "row", "column", "unhidden"]


def round_up(value: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def part(per: Per, start: int, stop: int) -> slice:
    """Where elements [start, stop) of a block lie in an array that has one element for each, or for each GROUP of them."""
    if per == "element":
        return slice(start, stop)
    assert per == "group", per
    assert start % GROUP == stop % GROUP == 0, (start, stop)
    return slice(start // GROUP, stop // GROUP)


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a block. `offset` and `numel` count elements; `decay` says whether weight decay applies.

    `hidden`: a matrix inside a decoder layer, or one for each expert; not an embedding, an LM head, a norm or a bias.
    """

    name: str  # the model's own parameter name, as in its state dict
    shape: tuple[int, ...]
    offset: int
    decay: bool
    hidden: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Segment:
    """Elements [start, stop) of a block's flat arrays that share all hyper-parameters."""

    start: int
    stop: int
    decay: bool


@dataclass(frozen=True)
class FlatLayout:
    """The tensors of one block, packed. The arrays of the block (weight, moments, gradient) use it, or one that follows from it: `per`."""

    tensors: tuple[TensorSpec, ...]
    numel: int  # padded; padding is zero in every array and stays zero under every optimizer

    @classmethod
    def pack(cls, tensors: Iterable[tuple[str, tuple[int, ...], bool]], *, layer: bool = False) -> FlatLayout:
        """Lay out (name, shape, decay) triples in the given order. `layer`: they are a decoder layer's."""
        specs = []
        offset = 0
        for name, shape, decay in tensors:
            hidden = layer and decay and len(shape) in (2, 3) and min(shape[-2:]) > 1
            spec = TensorSpec(name, tuple(shape), offset, decay, hidden)
            specs.append(spec)
            offset = round_up(offset + spec.numel, TENSOR_ALIGNMENT)
        return cls(tuple(specs), round_up(max(offset, 1), BLOCK_ALIGNMENT))

    @property
    def parameters(self) -> int:
        """Number of real parameters, without padding."""
        return sum(spec.numel for spec in self.tensors)

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors of the block as views into `flat`, a contiguous array of `numel` elements of any dtype."""
        assert flat.numel() == self.numel, (flat.numel(), self.numel)
        return {t.name: flat.narrow(0, t.offset, t.numel).view(t.shape) for t in self.tensors}

    def flats(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors as 1-D views with the padding up to their alignment."""
        return {t.name: flat.narrow(0, t.offset, round_up(t.numel, TENSOR_ALIGNMENT)) for t in self.tensors}

    def per(self, what: Per) -> FlatLayout:
        """The layout of an array that has one element per element, group, row or column of this one; tensors keep their names."""
        if what == "element":
            return self
        if what == "unhidden":
            return FlatLayout.pack((t.name, t.shape, t.decay) for t in self.tensors if not t.hidden)
        if what == "group":
            grouped = (TensorSpec(t.name, (round_up(t.numel, GROUP) // GROUP,), t.offset // GROUP, t.decay) for t in self.tensors)
            return FlatLayout(tuple(grouped), self.numel // GROUP)
        return FlatLayout.pack((t.name, _without(t.shape, what), t.decay) for t in self.tensors)

    def gaps(self) -> list[tuple[int, int]]:
        """(start, stop) of the padding behind each tensor that has some."""
        ends = [*(t.offset for t in self.tensors[1:]), self.numel]
        spans = [(t.offset + t.numel, end) for t, end in zip(self.tensors, ends, strict=True)] if self.tensors else [(0, self.numel)]
        return [(start, stop) for start, stop in spans if start < stop]

    def segments(self) -> list[Segment]:
        """The whole block cut into runs of equal hyper-parameters; padding belongs to the tensor before it."""
        segments: list[Segment] = []
        ends = [*(t.offset for t in self.tensors[1:]), self.numel][: len(self.tensors)]  # a block may have no tensor
        for tensor, end in zip(self.tensors, ends, strict=True):
            if segments and segments[-1].decay == tensor.decay:
                segments[-1] = Segment(segments[-1].start, end, tensor.decay)
            else:
                segments.append(Segment(tensor.offset, end, tensor.decay))
        return segments


def _without(shape: tuple[int, ...], what: Per) -> tuple[int, ...]:
    """The shape of what there is per row, or per column, of a tensor."""
    if len(shape) < 2:
        return shape if what == "row" else (1,)
    return shape[:-1] if what == "row" else (*shape[:-2], shape[-1])
