"""Sizes of memory on which engine and planner agree: huge pages, shares of ranks, and what is on
NVMe. Pure functions of integers, without torch.

`numels` are the elements of every block, in execution order: embedding, layers, head.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

HUGE_PAGE: Final = 2 << 20  # bytes; host memory is taken in whole ones
BLOCK_ALIGNMENT: Final = 1024  # elements: of bf16 half a page, and whole rows for row-wise norms
EXCHANGE_BYTES: Final = 512 << 20  # of sums that ranks exchange at a time
SHARE_BUFFERS: Final = 2  # on the device: one share of a block comes up while another is gathered

SCORE_BYTES = 32  # of a drawn token's scores, for each token of the vocabulary


def slab_bytes(nbytes: int) -> int:
    """Bytes of the host memory that holds `nbytes`: whole huge pages, one at least."""
    return max(1, -(-nbytes // HUGE_PAGE)) * HUGE_PAGE


def shared_bytes(sizes: Sequence[int], ranks: int) -> int:
    """Bytes of the mapping that holds arrays of these sizes for all of a host's ranks: whole pages,
    and then for each rank and array the number of its updates."""
    return sum(-(-size // PAGE) * PAGE for size in sizes) + 8 * ranks * len(sizes)


def share(numel: int, ranks: int) -> int:
    """Elements of a block that each of the ranks owns; the last ones may own fewer, or none."""
    return -(-numel // (ranks * BLOCK_ALIGNMENT)) * BLOCK_ALIGNMENT


def exchange_bytes(whole: int) -> int:
    """Bytes through which ranks exchange fp32 sums of `whole` elements: as sent, and received."""
    return min(2 * 4 * whole, EXCHANGE_BYTES)


@lru_cache(maxsize=64)
def padded(numels: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    """Elements of every block with whole shares for all ranks; of one alone as they are."""
    return numels if ranks == 1 else tuple(ranks * share(numel, ranks) for numel in numels)


@lru_cache(maxsize=64)
def owned(numels: tuple[int, ...], before: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    """Elements that the first rank owns of every block's first `before`: none owns more."""
    if ranks == 1:
        return before
    return tuple(min(share(n, ranks), end) for n, end in zip(numels, before, strict=True))


# -- NVMe ------------------------------------------------------------------------------------------

PAGE: Final = 4096  # bytes; O_DIRECT wants addresses, offsets and sizes in multiples of them
# Staging buffers of an array in host RAM: one is read, one is updated, one is written back.
STATE_STAGES = 3
# Arrays that never go to NVMe: a step touches them more often than once. What is left, only the
# update reads and writes.
IN_MEMORY = ("weight", "grad", "grad_sum")


def stages(blocks: int) -> int:
    """Staging buffers of one array that `blocks` blocks keep on NVMe."""
    return min(blocks, STATE_STAGES)


@lru_cache(maxsize=1024)  # a search asks for the same few again and again
def blocks_on_nvme(blocks: int, resident: int, count: int) -> tuple[int, ...]:
    """`count` of the blocks that are not resident, ascending: the last layers, then head,
    embedding.

    The update reaches the last layers last, so the drive has the longest to bring them. Staging
    buffers must hold the largest block, and embedding and head may be far larger than a layer.
    """
    order = [*range(blocks - 2, 0, -1), blocks - 1, 0]
    return tuple(sorted([block for block in order if block >= resident][:count]))
