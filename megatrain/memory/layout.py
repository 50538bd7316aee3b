"""Layout of a block's tensors inside its flat arrays."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

import torch

from megatrain.memory import sizes
from megatrain.memory.sizes import BLOCK_ALIGNMENT as BLOCK_ALIGNMENT

# Both in elements. 64 of bf16 are 128 bytes: every view starts on a cache line, for vector loads.
TENSOR_ALIGNMENT = 64
GROUP = TENSOR_ALIGNMENT  # consecutive elements that share one element of a "group" array: a scale


# Granularity of an array of a block: one element for every parameter, for every GROUP of them, or
# for every parameter that is not in a hidden matrix (TensorSpec.hidden).
Per = Literal["element", "group", "unhidden"]


def round_up(value: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def part(per: Per, start: int, stop: int) -> slice:
    """Elements [start, stop) of a block as a slice of an array of granularity element or group."""
    if per == "element":
        return slice(start, stop)
    assert per == "group", per
    assert start % GROUP == stop % GROUP == 0, (start, stop)  # a shared scale has one writer
    return slice(start // GROUP, stop // GROUP)


@dataclass(frozen=True)
class TensorRange:
    """A tensor as a contiguous range of its block's flat arrays, from element `offset` on."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def within(self, span: Span) -> Span:
        """Its elements, counted from its first, that lie in `span` of the block's array."""
        start, stop = (min(max(end - self.offset, 0), self.numel) for end in span)
        return Span(start, stop)

    def flat_within(self, array: torch.Tensor, span: Span) -> torch.Tensor:
        """Those elements in `array`, which holds `span` alone, as a 1-D view."""
        mine = self.within(span)
        start = self.offset + mine.start - span.start if mine.numel else 0
        return array.narrow(0, start, mine.numel)

    def view(self, array: torch.Tensor) -> torch.Tensor:
        """The tensor as a view into a flat array of its block."""
        return array.narrow(0, self.offset, self.numel).view(self.shape)


@dataclass(frozen=True)
class TensorSpec(TensorRange):
    """One tensor of a block, under the model's own parameter name. decay: weight decay applies.
    hidden: a matrix inside a decoder layer, or one for each expert; no embedding, LM head, norm or
    bias. frozen: it is never updated."""

    decay: bool
    hidden: bool = False
    frozen: bool = False


class Span(NamedTuple):
    """Elements [start, stop) of a block: those that a rank owns."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def before(self, end: int) -> Span:
        """The part before an element."""
        return Span(min(self.start, end), min(self.stop, end))


class Segment(NamedTuple):
    """Elements [start, stop) of a block's flat arrays that share all hyper-parameters."""

    start: int
    stop: int
    decay: bool


@dataclass(frozen=True)
class FlatLayout:
    """The tensors of one block, packed. Its arrays (weight, moments, gradient) have this layout.

    Frozen tensors come last and only the weight has them: the others end before (`trained`). Arrays
    of another granularity have the layout that `per` derives from it.
    """

    tensors: tuple[TensorSpec, ...]
    numel: int  # padded; padding is zero in every array and stays zero under every optimizer

    @classmethod
    def pack(
        cls, tensors: Iterable[tuple[str, tuple[int, ...], bool]], *, layer: bool = False
    ) -> FlatLayout:
        """Lay out (name, shape, decay) triples in this order. `layer`: of a decoder layer."""
        specs, offset = [], 0
        for name, shape, decay in tensors:
            # a matrix of one row or column counts as a vector
            hidden = layer and decay and len(shape) in (2, 3) and min(shape[-2:]) > 1
            specs.append(TensorSpec(name, tuple(shape), offset, decay, hidden))
            # padding: the next is aligned
            offset = round_up(offset + specs[-1].numel, TENSOR_ALIGNMENT)
        # at least one row: a block without tensors has an array, too
        return cls(tuple(specs), round_up(max(offset, 1), BLOCK_ALIGNMENT))

    @property
    def parameters(self) -> int:
        """Number of real parameters, without padding."""
        return sum(spec.numel for spec in self.tensors)

    def freeze(self, names: Collection[str]) -> FlatLayout:
        """A copy with the tensors of these names frozen."""
        kept = [spec for spec in self.tensors if spec.name not in names]
        if len(kept) == len(self.tensors):
            return self
        specs, offset = [], 0
        for spec in kept:
            specs.append(replace(spec, offset=offset))
            offset = round_up(offset + spec.numel, TENSOR_ALIGNMENT)
        offset = round_up(offset, BLOCK_ALIGNMENT)
        for spec in (spec for spec in self.tensors if spec.name in names):
            specs.append(replace(spec, offset=offset, frozen=True))
            offset = round_up(offset + spec.numel, TENSOR_ALIGNMENT)
        return FlatLayout(tuple(specs), round_up(offset, BLOCK_ALIGNMENT))

    @cached_property
    def trained(self) -> FlatLayout:
        """The layout without frozen tensors: of gradient, remainder and the optimizer's arrays."""
        ends = [spec.offset for spec in self.tensors if spec.frozen]
        if not ends:
            return self
        return FlatLayout(tuple(t for t in self.tensors if not t.frozen), min(ends))

    @property
    def trainable(self) -> int:
        """Elements before the frozen tensors."""
        return self.trained.numel

    def share(self, ranks: int) -> int:
        """Elements that each of `ranks` ranks owns; the last ones may own fewer."""
        return sizes.share(self.numel, ranks)

    def span(self, place: int, ranks: int) -> Span:
        """A rank's share, by its place among them (`World.place`); empty in a block too short."""
        share = self.share(ranks)
        return Span(min(place * share, self.numel), min((place + 1) * share, self.numel))

    def of(self, array: ArraySpec) -> FlatLayout:
        """The layout of one array of the block."""
        return (self if array.whole else self.trained).per(array.per)

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors as views into `flat`, a contiguous array [numel] of any dtype."""
        assert flat.numel() == self.numel, (flat.numel(), self.numel)
        return {tensor.name: tensor.view(flat) for tensor in self.tensors}

    def flats(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors as 1-D views with the padding up to their alignment."""
        return {
            t.name: flat[t.offset : t.offset + round_up(t.numel, TENSOR_ALIGNMENT)]
            for t in self.tensors
        }

    def per(self, what: Per) -> FlatLayout:
        """The layout of an array of granularity `what`; tensors keep their names."""
        if what == "element" or not self.numel:
            return self
        if what == "unhidden":
            return FlatLayout.pack((t.name, t.shape, t.decay) for t in self.tensors if not t.hidden)
        grouped = (
            TensorSpec(t.name, (round_up(t.numel, GROUP) // GROUP,), t.offset // GROUP, t.decay)
            for t in self.tensors
        )
        return FlatLayout(tuple(grouped), self.numel // GROUP)

    def gaps(self) -> list[tuple[int, int]]:
        """(start, stop) of the padding behind each tensor that has some."""
        stops = [t.offset + t.numel for t in self.tensors] or [0]
        return [(stop, end) for stop, end in zip(stops, self._ends(), strict=True) if stop < end]

    def _ends(self) -> list[int]:
        """The end of the padding behind each tensor."""
        return [*(t.offset for t in self.tensors[1:]), self.numel]

    def segments(self) -> list[Segment]:
        """The block cut into runs of equal hyper-parameters; padding joins the tensor before it."""
        segments: list[Segment] = []
        for tensor, end in zip(self.tensors, self._ends(), strict=False):
            if segments and segments[-1].decay == tensor.decay:  # one run: fewer kernel calls
                segments[-1] = segments[-1]._replace(stop=end)
            else:
                segments.append(Segment(tensor.offset, end, tensor.decay))
        return segments


@dataclass(frozen=True)
class ArraySpec:
    """One array that blocks have. transferred: to or from the device; pinned beside a GPU. per: its
    granularity. whole: it has frozen tensors, too. blocks: those that have it; None: all."""

    name: str
    dtype: torch.dtype
    transferred: bool = False
    per: Per = "element"
    whole: bool = False
    blocks: Collection[int] | None = None

    def among(self, blocks: Iterable[int]) -> list[int]:
        """Those of these blocks that have the array."""
        return [block for block in blocks if self.blocks is None or block in self.blocks]
