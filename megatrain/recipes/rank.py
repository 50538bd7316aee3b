"""This process as one of the ranks that a launcher has started: torchrun, Slurm, Kubernetes, or
`megatrain train` itself (recipes/launch.py)."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import astuple
from datetime import timedelta
from pathlib import Path
from typing import NoReturn, Protocol, TypeVar

import torch
from torch import distributed
from torch.distributed.distributed_c10d import PrefixStore

from megatrain.config import Config
from megatrain.data.loader import Loader
from megatrain.errors import ConfigError, DataError, MegaTrainError, TooManyRanks
from megatrain.machine.affinity import share_of_cores
from megatrain.machine.hardware import built_for_cuda, physical_cores, visible_gpus
from megatrain.machine.launcher import MEETING, NAMES, Place, first_host, place_of
from megatrain.planner.reasons import counted, too_many_ranks
from megatrain.recipes.awaiting import ROWS_DIFFER
from megatrain.recipes.launch import FEWER
from megatrain.recipes.meeting import Wait, fresh_part, open_store
from megatrain.recipes.others import Others, end_of, sign_of_life
from megatrain.recipes.signals import Stopped, early_request
from megatrain.settings import KEYS
from megatrain.world import ALONE, World

ALL_COME_WITHIN = timedelta(minutes=10)
PORT = "29400"  # under Slurm, where nobody names one


class Ended(Protocol):
    """The result of a command, and the exit code of its process."""

    @property
    def exit_code(self) -> int: ...


T = TypeVar("T", bound=Ended)


def as_rank(device: str, work: Callable[[World], T]) -> T:
    """What `work` returns, alone or beside the other ranks that a launcher has started.

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
        others = _meet(place, stack)
        try:
            others.world = _connected(own, place, others.world)
            summary = work(others.world)
        except BaseException as error:
            if isinstance(error, TooManyRanks) and (told := os.environ.get(FEWER)):
                leave_to_fewer(error, Path(told), others.world)
            raise end_of(error, others) from error
        others.leave(summary.exit_code)
        return summary


def _meet(place: Place, stack: ExitStack) -> Others:
    """Meet the other ranks; they are looked after until `stack` is closed."""
    rank, size, here = place.rank, place.size, socket.gethostname()
    host, port = (os.environ[name] for name in MEETING)
    wait = Wait(ALL_COME_WITHIN, f"{host}:{port}")
    try:
        opened = open_store(host, int(port), rank, size, wait)
        store = fresh_part(opened, rank, size, wait, sign_of_life(rank, here))
        stack.callback(_disconnect)  # when nobody is looked after any more
        world = World(rank, size, place.local_rank, place.local_size, store=store)
        return stack.enter_context(Others.watched(world, here))
    except (RuntimeError, Stopped) as error:
        raise _as_asked() or MegaTrainError(_not_all(size, error)) from error


def _connected(own: torch.device, place: Place, world: World) -> World:
    """The world of ranks that have met, with their groups. The library may wait long for one that
    has died, and cannot be interrupted."""
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
    """What ends a rank that was asked to stop, as were others, perhaps, that are gone already."""
    asked = early_request()
    return SystemExit(asked.exit_code) if asked is not None and asked.came() else None


def _not_all(size: int, error: BaseException) -> str:
    return f"not all {size} ranks have met: {' '.join(str(error).split())}"


def leave_to_fewer(error: TooManyRanks, told: Path, world: World) -> NoReturn:
    """End all ranks, which call it together, so that the launcher begins again with fewer.

    told: the file in which it looks.
    """
    if world.is_first:
        told.write_text(json.dumps([error.why, error.most]))
    world.every(None)  # all leave at once: none is missed by another
    raise SystemExit(error.exit_code) from error


def own_device(place: Place, device: str) -> torch.device:
    """The GPU of a rank, the only one that it sees from now on, or the CPU. Raises ConfigError.

    CUDA is not asked which there are: it would see all of them ever after.
    """
    gpus = visible_gpus() if device != "cpu" and built_for_cuda() else []
    if not gpus:
        if device == "cuda":
            raise ConfigError(f"device: {device} was asked for, but PyTorch sees no CUDA device")
        return torch.device("cpu")
    # a launcher may have given each its own already
    index = 0 if len(gpus) == 1 and place.local_size > 1 else place.local_rank
    if index >= len(gpus):
        raise ConfigError(
            f"{place.local_size} ranks on {socket.gethostname()}, which has {len(gpus)} GPUs; "
            "start as many"
        )
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # in which they were counted
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus[index]
    return torch.device("cuda", 0)


def bind(world: World, device: torch.device) -> None:
    """Keep this rank to its share of the host's cores: threads that begin from now on, and memory
    that they touch first. On a CPU PyTorch computes with as many threads, since more would wait for
    each other. All ranks call it."""
    if world.is_alone:
        return
    number, of = on_the_same_cores(world)
    cores = max(1, physical_cores() // of)
    os.sched_setaffinity(0, share_of_cores(number, of))
    if device.type == "cpu":
        torch.set_num_threads(min(cores, torch.get_num_threads()))


def cores_of_host(world: World) -> int:
    """Physical cores of all ranks of this host. All ranks call it."""
    _, sharing = on_the_same_cores(world)
    return physical_cores() * world.local_size // sharing


def on_the_same_cores(world: World) -> tuple[int, int]:
    """(Which of them this rank is, how many they are) of this host's ranks that may use the same
    cores: launchers, such as Slurm's, may have given each its own. All ranks call it."""
    masks = world.every(os.sched_getaffinity(0))
    first = world.rank - world.local_rank
    here = masks[first : first + world.local_size]
    same = [number for number, mask in enumerate(here) if mask == here[world.local_rank]]
    return same.index(world.local_rank), len(same)


def check_ranks(config: Config, world: World) -> None:
    """Raise ConfigError for another number of ranks than the config's, before anything is
    loaded."""
    if config.gpus not in ("auto", world.local_size):
        raise ConfigError(
            f"{config.where('gpus')}: {config.gpus}, but {world.local_size} process(es) of this "
            "host take part; `megatrain train` and torchrun start several; or remove it"
        )


def check_alike(world: World, how: Mapping[str, object], rows: Sequence[str]) -> None:
    """Raise ConfigError or DataError if ranks would train in different ways, or on other rows: each
    decides by itself, from what it finds on its host. All call it at the same place.

    how: settings and the like, by field. rows: digests.
    """
    (_, first, ours), *others = world.every((socket.gethostname(), how, rows))
    for rank, (host, theirs, digests) in enumerate(others, 1):
        for name in how:
            if theirs[name] != first[name]:
                raise ConfigError(
                    f"ranks 0 and {rank}, on {host}, would train with {KEYS.get(name, name)} "
                    f"{first[name]} and {theirs[name]}; set it in the config, or take hosts that "
                    "are alike"
                )
        if digests != ours:
            raise DataError(f"ranks 0 and {rank}, on {host}, have different rows: {ROWS_DIFFER}")


def check_rows_of_a_step(loader: Loader) -> None:
    """Raise TooManyRanks if half of the steps have fewer rows than there are ranks."""
    world = loader.world
    if world.size == 1 or (rows := loader.rows_of_a_step()) >= world.teams:
        return
    found = f"half of the steps have at most {counted(rows, 'row')}"
    way_on = "raise train.tokens_per_step"
    if loader.windows is None and (there := len(loader.rows)) < world.teams:  # no step has more
        rows, found, way_on = there, f"the set has {counted(there, 'row')}", "add rows"
    raise too_many_ranks(f"{found},", rows * world.pieces, world.size, way_on)
