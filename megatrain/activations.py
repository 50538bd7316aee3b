"""Forms in which the inputs of recomputed layers are kept between forward and backward, and their bytes. Arithmetic only."""

from __future__ import annotations

from dataclasses import dataclass

SCALE_BYTES = 2  # a bfloat16


@dataclass(frozen=True)
class Form:
    """Elements in groups, row after row: a code of `bits` each, and a scale for every group."""

    bits: int
    group: int  # a multiple of 8, so that codes fill whole bytes

    def nbytes(self, numel: int) -> int:
        """Of so many elements; the last group is whole."""
        return self.groups(numel) * (self.group * self.bits // 8 + SCALE_BYTES)

    def groups(self, numel: int) -> int:
        return -(-numel // self.group)


FORMS = {"fp8": Form(8, 64), "int8": Form(8, 64), "int6": Form(6, 64), "int4": Form(4, 32)}
UNCHANGED = "none"


def kept_row_bytes(activations: str, width: int, element_bytes: int) -> int:
    """Of a hidden state of `width` elements, at most: a micro-batch of n of them takes no more than n times that."""
    return width * element_bytes if activations == UNCHANGED else FORMS[activations].nbytes(width)
