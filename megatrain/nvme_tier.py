"""What the third tier takes and where: which arrays of which blocks lie on NVMe, and how many of them are in host RAM at a time."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Final, Literal

PAGE: Final = 4096  # O_DIRECT wants addresses, offsets and sizes in multiples of a drive's blocks, which are this at most
Level = Literal["state", "gradients", "all"]  # each holds what those before it hold

# Arrays are taken to the drive in the order of how seldom a step touches them: what only the update reads and writes; gradients, which are
# written and read once; weights, which every sweep reads.
LEVELS: tuple[Level, ...] = ("state", "gradients", "all")
# So many blocks of an array are in staging at a time: one is read, one is updated, one is written back. Weights are besides on their way to
# the device, and a gradient is on its way from there.
STAGES = {"weight": 5, "grad": 4}
STATE_STAGES = 3
# So many of an array's staging buffers are left to those who only read it and do not queue behind updates: what is read for the device
# while something else is on its way there.
READERS = {"weight": 2}
# Boundary activations pass through pieces that are a drive's queue several times over: some leave or arrive while others are copied to or
# from the device. A micro-batch of long sequences may be a hundred times as large.
BOUNDARY_PIECES, BOUNDARY_PIECE_BYTES = 8, 64 << 20


def stages(array: str, blocks: int) -> int:
    """Staging buffers of one array of which so many blocks lie on NVMe."""
    return min(blocks, STAGES.get(array, STATE_STAGES))


def stages_for_updates(array: str, blocks: int) -> int:
    """An update takes one only while fewer than so many of them hold what is being changed, or was and is not on the drive yet."""
    count = stages(array, blocks)
    return count if count == blocks else max(1, count - READERS.get(array, 0))


def boundary_share(nbytes: int, far: int, layers: int) -> int:
    """Bytes of a boundary that go to the drive, where of so many layers' as much does as `far` of them are. What stays is whole pages."""
    return nbytes - nbytes * (layers - far) // layers // PAGE * PAGE if far else 0


def boundary_pages(nbytes: int, far: int, layers: int, varied: bool = False) -> int:
    """`boundary_share` in whole pages. varied: of any boundary of at most so many bytes, whose share may begin a page earlier."""
    return (-(-boundary_share(nbytes, far, layers) // PAGE) + varied) * PAGE if far else 0


def boundary_room(sizes: Iterable[int], far: int, layers: int, varied: bool = False) -> int:
    """Bytes in files for the boundaries of micro-batches of these many bytes. varied: of as many that have no more bytes together, however
    they share them; each has two pages that are not full."""
    return layers * sum(boundary_pages(nbytes, far, layers) + (2 * PAGE if varied and far else 0) for nbytes in sizes)


def boundary_staging(micro_batch_bytes: int) -> tuple[int, int]:
    """(pieces, bytes of each) through which boundaries of so many bytes go to the drive and return."""
    return BOUNDARY_PIECES, min(micro_batch_bytes, BOUNDARY_PIECE_BYTES)


def holds(level: Level, array: str) -> bool:
    """Whether `array` (weight, grad, or one that only the update uses) is taken to the drive at this level."""
    return array not in {"state": ("weight", "grad"), "gradients": ("weight",), "all": ()}[level] and array != "grad_sum"


@lru_cache(maxsize=1024)  # a search asks for the same few again and again
def blocks_on_nvme(blocks: int, resident: int, count: int) -> tuple[int, ...]:
    """Ascending, `count` of the blocks that are not resident: the last layers first, then the head and the embedding.

    The update reaches the last layers last, so that the drive has the longest to bring them. Embedding and head may be several times as
    large as a layer, and staging buffers must hold the largest block.
    """
    order = [*range(blocks - 2, 0, -1), blocks - 1, 0]
    return tuple(sorted([block for block in order if block >= resident][:count]))
