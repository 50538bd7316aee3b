"""Which rank writes a file, and which one hashes it while all read it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

from megatrain.world import World

File = TypeVar("File", str, Path)


class Reading(NamedTuple):
    """How a rank reads a file: the arguments of `HashedReader`."""

    hashes: bool
    kept: bool


def readings(sizes: Mapping[File, int], world: World, verified: bool = True) -> dict[File, Reading]:
    """How this rank reads each file, the largest first; all ranks read all of them.

    verified: one rank hashes a file; else none does.
    """
    found = {}
    for file, rank in deal(sizes, world.size).items():
        hashes = verified and rank == world.rank
        # who hashes is slower, and finds in RAM what the others of its host have read
        found[file] = Reading(hashes, kept=verified and not hashes and world.hosts == 1)
    return found


def deal(sizes: Mapping[File, int], hands: int) -> dict[File, int]:
    """A hand for each file, the largest first: the one that has least so far."""
    held, dealt = [0] * hands, {}
    for file in largest_first(sizes):
        dealt[file] = held.index(min(held))
        held[dealt[file]] += sizes[file]
    return dealt


def largest_first(sizes: Mapping[File, int]) -> list[File]:
    """A large file that came last would be alone in the end."""
    return sorted(sizes, key=lambda file: -sizes[file])
