"""Where the ranks of one start meet, in a store that may be older than they are.

torchrun keeps its store when it starts all ranks again (torch 2.13), with the addresses and the
last words of those that died. The number of a restart does not tell starts apart: each host counts
its own failures. So the first rank makes up a name, and gives it to whoever answers now.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any
from uuid import uuid4

from torch.distributed.distributed_c10d import PrefixStore

LOOKS_EVERY_S = 0.05


def fresh_part(store: Any, rank: int, size: int, patience: timedelta) -> PrefixStore:
    """A part of the store in which nobody but the ranks of this start has written.

    Raises RuntimeError if not all come in time.
    """
    until = time.monotonic() + patience.total_seconds()
    name = _invite(store, size, until) if rank == 0 else _answer(store, rank, until)
    return PrefixStore(name, store)


def _invite(store: Any, size: int, until: float) -> str:
    name, missing = uuid4().hex, list(range(1, size))
    while missing:
        _check_time(until, f"ranks {missing} did not come")
        for rank in missing:
            if (token := _read(store, f"hello/{rank}")) is not None:  # perhaps of one that died
                store.set(f"welcome/{rank}", f"{token} {name}")
        missing = [rank for rank in missing if _read(store, f"here/{rank}") != name]
        time.sleep(LOOKS_EVERY_S if missing else 0)
    return name


def _answer(store: Any, rank: int, until: float) -> str:
    token = uuid4().hex
    store.set(f"hello/{rank}", token)
    while True:
        _check_time(until, "the first rank did not come")
        given, _, name = (_read(store, f"welcome/{rank}") or "").partition(" ")
        if given == token:
            store.set(f"here/{rank}", name)
            return name
        time.sleep(LOOKS_EVERY_S)


def _read(store: Any, key: str) -> str | None:
    return store.get(key).decode() if store.check([key]) else None


def _check_time(until: float, what: str) -> None:
    if time.monotonic() > until:
        raise RuntimeError(what)
