"""Where the ranks of one start meet, in a store that may be older than they are.

torchrun keeps its store when it starts all ranks again (torch 2.13), with the addresses and the
last words of those that died. The number of a restart does not tell starts apart: each host counts
its own failures. So the first rank makes up a name, and gives it to whoever answers now.

Whoever waits here can be interrupted, as nobody can inside the library: so it is only asked to
connect all ranks once all have come.
"""

from __future__ import annotations

import os
import threading
import time
from concurrent import futures
from datetime import timedelta
from typing import Any
from uuid import uuid4

import typer
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore

from megatrain.heartbeat import beat, may_end_here

LOOKS_EVERY_S = 0.05
SAYS_AFTER_S = 10.0
FIRST = "the first rank"
OF_TORCHRUN = "TORCHELASTIC_USE_AGENT_STORE"


class Wait:
    """A wait for other ranks, at `where`, that ends in time and wherever work may end."""

    def __init__(self, patience: timedelta, where: str) -> None:
        self.patience, self.where = patience, where
        self._began, self._said = time.monotonic(), False

    def goes_on(self, who: str, *, aloud: bool = True) -> None:
        """Called again and again while somebody is missing, which is said once if it takes long.

        Raises RuntimeError when it has taken too long.
        """
        beat()
        may_end_here()
        waited = time.monotonic() - self._began
        if waited > self.patience.total_seconds():
            raise RuntimeError(f"{who} did not come to {self.where}")
        if aloud and not self._said and waited > SAYS_AFTER_S:
            self._said = True
            typer.echo(f"waiting for {who} at {self.where}", err=True)


def launcher_keeps_store() -> bool:
    """Whether torchrun does, and not the first rank."""
    return os.environ.get(OF_TORCHRUN) == "True"


def open_store(host: str, port: int, rank: int, size: int, wait: Wait) -> TCPStore:
    """The store at this address, which the first rank opens unless the launcher has.

    Raises RuntimeError if it cannot be opened, or nobody opens it in time.
    """
    opened: futures.Future[TCPStore] = futures.Future()

    def connect() -> None:
        try:
            store = TCPStore(
                host,
                port,
                size,
                is_master=rank == 0 and not launcher_keeps_store(),
                timeout=wait.patience,
                wait_for_workers=False,  # the first rank would not be told who is missing
                multi_tenant=True,
            )
        except (RuntimeError, ValueError) as error:
            opened.set_exception(error)
        else:
            opened.set_result(store)

    # nobody can interrupt it: it tries again and again, or for ever if a stranger has the port
    threading.Thread(target=connect, name="megatrain-meeting", daemon=True).start()
    while futures.wait([opened], LOOKS_EVERY_S).not_done:
        wait.goes_on(FIRST)
    return opened.result()


def fresh_part(store: Any, rank: int, size: int, wait: Wait, said: tuple[str, str]) -> PrefixStore:
    """A part of the store in which nobody but the ranks of this start has written, once all are
    there.

    said: name and text of what this rank leaves there. Every rank finds what each has said.

    Raises RuntimeError if not all come in time.
    """
    name = _invite(store, size, wait) if rank == 0 else _answer(store, rank, wait, said)
    part = PrefixStore(name, store)
    if rank == 0:
        part.set(*said)
        part.set("all", "here")
    while not part.check(["all"]):
        wait.goes_on("other ranks", aloud=False)  # the first one says which
        time.sleep(LOOKS_EVERY_S)
    return part


def _invite(store: Any, size: int, wait: Wait) -> str:
    name, missing = uuid4().hex, list(range(1, size))
    while missing:
        wait.goes_on(f"ranks {missing}")
        for rank in missing:
            if (token := _read(store, f"hello/{rank}")) is not None:  # perhaps of one that died
                store.set(f"welcome/{rank}", f"{token} {name}")
        missing = [rank for rank in missing if _read(store, f"here/{rank}") != name]
        time.sleep(LOOKS_EVERY_S if missing else 0)
    return name


def _answer(store: Any, rank: int, wait: Wait, said: tuple[str, str]) -> str:
    token = uuid4().hex
    store.set(f"hello/{rank}", token)
    while True:
        wait.goes_on(FIRST)
        given, _, name = (_read(store, f"welcome/{rank}") or "").partition(" ")
        if given == token:
            PrefixStore(name, store).set(*said)
            store.set(f"here/{rank}", name)
            return name
        time.sleep(LOOKS_EVERY_S)


def _read(store: Any, key: str) -> str | None:
    return store.get(key).decode() if store.check([key]) else None
