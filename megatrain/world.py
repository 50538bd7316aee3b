"""The ranks that train one model together: processes with a device each.

Every rank owns the same share of every block's arrays, computes gradients of micro-batches of its
own, and updates its share. Sums over ranks are ours, in the order of ranks: their bits depend
neither on the library that carries the bytes nor on its algorithms.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed

from megatrain.heartbeat import beat, may_end_here

T = TypeVar("T")
LOOKS_EVERY_S = 0.1
# Ranks may wait long for each other, while one saves. One that has died is noticed otherwise
# (recipes/others.py).
PATIENCE = timedelta(days=30)


@dataclass(frozen=True)
class World:
    """All ranks, and which of them this one is. The default is a rank alone.

    Attributes:
        local_rank, local_size: the same among the ranks of this host.
        hosts: the process group over which small messages travel, from the main thread.
        devices: the one over which blocks travel, from a thread of its own.
        store: short texts by name, which every rank sees.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    hosts: Any = None
    devices: Any = None
    store: Any = None
    _turns: Iterator[int] = field(default_factory=itertools.count, compare=False, repr=False)

    @classmethod
    def joined(
        cls, device: torch.device, store: Any = None, local: tuple[int, int] | None = None
    ) -> World:
        """That of torch.distributed, which has been initialised. All ranks call it.

        local: rank and size on this host; None: all ranks are on it.
        """
        rank, size = distributed.get_rank(), distributed.get_world_size()
        if size == 1:
            return cls()
        hosts = distributed.new_group(backend="gloo", timeout=PATIENCE)
        devices = distributed.new_group(backend="nccl" if device.type == "cuda" else "gloo")
        return cls(rank, size, *(local or (rank, size)), hosts, devices, store)

    @property
    def is_alone(self) -> bool:
        return self.size == 1

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for all, and writes what is not shared out."""
        return self.rank == 0

    def every(self, mine: T) -> list[T]:
        """What every rank has given, in the order of ranks. All call it at the same place."""
        if self.is_alone:
            return [mine]
        found: list[Any] = [None] * self.size
        distributed.all_gather_object(found, mine, group=self.hosts)
        return found

    def first(self, work: Callable[[], T]) -> T:
        """What `work` returns, which one rank of each host does before its others: they find what
        it left on the disk. All call it at the same place.

        Waiting counts as a sign of life, and may end where work may.
        """
        if self.is_alone:
            return work()
        name = f"first/{next(self._turns)}/{self.rank - self.local_rank}"
        if self.local_rank == 0:
            found = work()
            self.store.set(name, "done")
            return found
        while not self.store.check([name]):
            beat()
            may_end_here()
            time.sleep(LOOKS_EVERY_S)
        return work()

    def number(self, local: int) -> int:
        """The number among all ranks' of a rank's micro-batch `local`."""
        return local * self.size + self.rank


ALONE = World()
