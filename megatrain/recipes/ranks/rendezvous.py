"""Rendezvous of the ranks of one start: those of torchrun, Slurm, Kubernetes or our own launcher.

The store may be older than they are: torchrun keeps its own when it starts all ranks again (torch
2.13), with the last words of those that died. The number of a restart does not tell starts apart:
each host counts its own failures. So the first rank makes up a name, and gives it to the
ranks that answer now.

Waits of this module can be interrupted, those of the library cannot: so it is only asked to connect
all ranks once all have come.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import ExitStack
from dataclasses import astuple
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar
from uuid import uuid4

import torch
import typer
from torch import distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore

from megatrain.errors import ConfigError, MegaTrainError, TooManyRanks
from megatrain.heartbeat import beat, may_end_here
from megatrain.machine.launcher import MEETING, NAMES, Place, first_host, place_of
from megatrain.recipes.ranks.device import own_device
from megatrain.recipes.ranks.launch import FEWER
from megatrain.recipes.ranks.liveness import Liveness, end_of, sign_of_life, started
from megatrain.recipes.signals import Stopped, early_request
from megatrain.world import ALONE, World

ALL_COME_WITHIN = timedelta(minutes=10)
PORT = "29400"  # under Slurm, where nobody names one
POLL_S = 0.05
SAYS_AFTER_S = 10.0
FIRST = "the first rank"
OF_TORCHRUN = "TORCHELASTIC_USE_AGENT_STORE"


class Ended(Protocol):
    """The result of a command, and the exit code of its process."""

    @property
    def exit_code(self) -> int: ...


T = TypeVar("T", bound=Ended)


def as_rank(device: str, work: Callable[[World], T]) -> T:
    """Run `work` alone, or beside the other ranks that a launcher has started.

    A rank gets a GPU of its own. If one fails, all end, and one of them says why.

    device: as in the config.

    Raises:
        ConfigError: there are fewer GPUs than ranks on this host.
        OtherFailed: another rank has failed, for the reason it gives.
        SystemExit: a signal has come before all ranks have met.
    """
    place = place_of(os.environ)
    if place is None:
        return work(ALONE)
    if distributed.is_initialized():
        raise ConfigError(
            "torch.distributed: the program has started it; leave that to the run, which ranks of "
            "a launcher begin together"
        )
    own = own_device(place, device)
    for name, default in zip(MEETING, (first_host(os.environ, place), PORT), strict=True):
        os.environ.setdefault(name, default)
    # all of them: from here on `place_of` finds these names, also under Slurm
    os.environ |= zip(NAMES, map(str, astuple(place)), strict=True)
    with ExitStack() as stack:
        alive = _meet(place, stack)
        try:
            alive.world = _connected(own, place, alive.world)
            summary = work(alive.world)
        except BaseException as error:
            if isinstance(error, TooManyRanks) and (file := os.environ.get(FEWER)):
                leave_to_fewer(error, Path(file), alive.world)
            raise end_of(error, alive) from error
        alive.leave(summary.exit_code)
        return summary


def _meet(place: Place, stack: ExitStack) -> Liveness:
    """Meet the other ranks; they are looked after until `stack` is closed."""
    rank, size, here = place.rank, place.size, socket.gethostname()
    host, port = (os.environ[name] for name in MEETING)
    patience = Wait(ALL_COME_WITHIN, f"{host}:{port}")
    try:
        opened = open_store(host, int(port), rank, size, patience)
        store = fresh_part(opened, rank, size, patience, sign_of_life(rank, here))
        stack.callback(_disconnect)  # when nobody is looked after any more
        world = World(rank, size, place.local_rank, place.local_size, store=store)
        return stack.enter_context(Liveness(world, here).watched())
    except (RuntimeError, Stopped) as error:
        raise _as_asked() or MegaTrainError(_not_all(size, error)) from error


def _connected(own: torch.device, place: Place, world: World) -> World:
    """The world of ranks that have met, with their groups."""
    backend = "cpu:gloo,cuda:nccl" if own.type == "cuda" else "gloo"
    store = PrefixStore("group", world.store)
    try:
        distributed.init_process_group(
            backend, store=store, rank=world.rank, world_size=world.size, timeout=ALL_COME_WITHIN
        )
        return World.joined(own, world.store, (place.local_rank, place.local_size))
    except RuntimeError as error:
        raise _as_asked() or RuntimeError(_not_all(world.size, error)) from error


def _disconnect() -> None:
    if distributed.is_initialized():
        distributed.destroy_process_group()


def _as_asked() -> SystemExit | None:
    """The end of a rank that was asked to stop, as were others, perhaps, that are gone already."""
    asked = early_request()
    return SystemExit(asked.exit_code) if asked is not None and asked.came() else None


def _not_all(size: int, error: BaseException) -> str:
    return f"not all {size} ranks have met: {' '.join(str(error).split())}"


def leave_to_fewer(error: TooManyRanks, file: Path, world: World) -> NoReturn:
    """End all ranks together, so that the launcher, which looks into `file`, starts fewer."""
    if world.is_first:
        file.write_text(json.dumps([error.why, error.most]))
    world.all_gather(None)  # all leave at once: none is missed by another
    raise SystemExit(error.exit_code) from error


# -- the store -------------------------------------------------------------------------------------


class Wait:
    """A wait for other ranks, at `where`, that ends in time and wherever work may end."""

    def __init__(self, patience: timedelta, where: str) -> None:
        self.patience, self.where = patience, where
        self._began, self._said = time.monotonic(), False

    def goes_on(self, who: str, *, aloud: bool = True) -> None:
        """Called again and again while somebody is missing, which is shown once if it takes long.

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


def open_store(host: str, port: int, rank: int, size: int, patience: Wait) -> TCPStore:
    """The store at this address, which the first rank opens unless torchrun has.

    Raises RuntimeError if it cannot be opened, or nobody opens it in time.
    """
    opens = rank == 0 and os.environ.get(OF_TORCHRUN) != "True"

    def connect() -> TCPStore:
        return TCPStore(
            host,
            port,
            size,
            is_master=opens,
            timeout=patience.patience,
            wait_for_workers=False,  # the first rank would not learn who is missing
            multi_tenant=True,
        )

    # nobody can interrupt it: it tries again and again, or for ever if a stranger has the port
    opened = started(connect, "megatrain-rendezvous")
    while wait([opened], POLL_S).not_done:
        patience.goes_on(FIRST)
    return opened.result()


def fresh_part(
    store: Any, rank: int, size: int, patience: Wait, sign: tuple[str, str]
) -> PrefixStore:
    """A part of the store that only the ranks of this start write, once all have come.

    sign: key and value that this rank leaves there; every rank finds those of all.

    Raises RuntimeError if not all come in time.
    """
    if rank == 0:
        name, missing = uuid4().hex, list(range(1, size))
        while missing:
            patience.goes_on(f"ranks {missing}")
            for other in missing:
                if (token := _read(store, f"hello/{other}")) is not None:  # perhaps of a dead one
                    store.set(f"welcome/{other}", f"{token} {name}")
            missing = [other for other in missing if _read(store, f"here/{other}") != name]
            time.sleep(POLL_S if missing else 0)
        part = PrefixStore(name, store)
        part.set(*sign)
        part.set("all", "here")
        return part
    mine, name, answered = uuid4().hex, "", ""
    store.set(f"hello/{rank}", mine)
    while answered != mine:
        patience.goes_on(FIRST)
        time.sleep(POLL_S)
        answered, _, name = (_read(store, f"welcome/{rank}") or "").partition(" ")
    part = PrefixStore(name, store)
    part.set(*sign)
    store.set(f"here/{rank}", name)
    while not part.check(["all"]):
        patience.goes_on("other ranks", aloud=False)  # the first one says which
        time.sleep(POLL_S)
    return part


def _read(store: Any, key: str) -> str | None:
    return store.get(key).decode() if store.check([key]) else None
