"""Numbers of blocks and layers to try, and which of equally fast layouts is the simplest."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator

from megatrain.planner.memory import Layout

# Parts of their range at which numbers of retained layers, and of layers that send saved
# activations to host RAM, are tried first; those between are tried next to the fastest.
PARTS = 8


def most(count: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `count` that fits, if all numbers below one that fits do; else 0."""
    if fits(count):  # the last block takes the slots with it: all can fit where all but one do not
        return count
    return max(0, bisect_right(range(count), False, key=lambda number: not fits(number)) - 1)


def around(found: int, largest: int) -> Iterator[int]:
    """Numbers up to `largest` that are nearer to `found` than the next part of the range."""
    step = -(-largest // PARTS)
    near = range(max(0, found - step + 1), min(largest, found + step - 1) + 1)
    return (number for number in near if number != found)


def complexity(layout: Layout) -> tuple[bool, int, int, bool, bool, bool, bool, int]:
    """Order among choices that are equally fast, the simplest first."""
    choices = layout.choices
    return (
        choices.second_backward,
        choices.nvme_blocks,
        choices.groups,
        choices.offload_activations,
        choices.retained_on_host > 0,
        choices.cheap_retention,
        choices.layer_chunk_tokens is not None,
        layout.device_bytes + layout.host_bytes,
    )
