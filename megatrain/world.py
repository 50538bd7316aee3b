"""The ranks that train one model together: processes with a device each.

Every rank owns the same share of every block's arrays, computes gradients of micro-batches of its
own, and updates its share. Sums over ranks are ours, in the order of ranks: their bits depend
neither on the library that carries the bytes nor on its algorithms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import distributed

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """All ranks, and which of them this one is. The default is a rank alone.

    Attributes:
        hosts: the process group over which small messages travel, from the main thread.
        devices: the one over which blocks travel, from a thread of its own.
    """

    rank: int = 0
    size: int = 1
    hosts: Any = None
    devices: Any = None

    @classmethod
    def joined(cls, device: torch.device) -> World:
        """That of torch.distributed, which has been initialised. All ranks call it."""
        size = distributed.get_world_size()
        if size == 1:
            return cls()
        hosts = distributed.new_group(backend="gloo")
        devices = distributed.new_group(backend="nccl" if device.type == "cuda" else "gloo")
        return cls(distributed.get_rank(), size, hosts, devices)

    @property
    def is_alone(self) -> bool:
        return self.size == 1

    def every(self, mine: T) -> list[T]:
        """What every rank has given, in the order of ranks. All call it at the same place."""
        if self.is_alone:
            return [mine]
        found: list[Any] = [None] * self.size
        distributed.all_gather_object(found, mine, group=self.hosts)
        return found

    def number(self, local: int) -> int:
        """The number among all ranks' of a rank's micro-batch `local`."""
        return local * self.size + self.rank


ALONE = World()
