"""Rendezvous of the ranks of one start: those of torchrun, Slurm, Kubernetes or our own launcher.

The store may be older than they are: torchrun keeps its own when it starts all ranks again (torch
2.13), with the last words of those that died. The number of a restart does not tell starts apart:
each host counts its own failures. So the first rank makes up a name, and gives it to the
ranks that answer now.

Waits of this module can be interrupted, those of the library cannot: so it is only asked to connect
all ranks once all have come.
"""

from __future__ import annotations

import hmac
import json
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, suppress
from dataclasses import astuple
from datetime import timedelta
from functools import partial
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryDirectory
from typing import Any, TypeVar
from uuid import uuid4

import torch
import typer
from torch import distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore

from megatrain.config import Config
from megatrain.config.resuming import PATHS, flatten
from megatrain.data.loader import Loader, StepBatch
from megatrain.engine.request import choose_device
from megatrain.errors import (
    ConfigError,
    DataError,
    MegaTrainError,
    exit_code_of,
    logger,
    number_of,
    system_errors,
)
from megatrain.heartbeat import beat, ending, may_end_here, total
from megatrain.machine import launcher
from megatrain.machine.hardware import built_for_cuda, physical_cores, visible_gpus
from megatrain.machine.profile import PACKAGES, cache_folder, installed_version
from megatrain.measure.ranks import measure_together
from megatrain.planner.job import too_many_ranks
from megatrain.recipes.ranks.launch import SECRET, end_with_launcher, run_ranks
from megatrain.recipes.ranks.liveness import Liveness, OtherFailed, end_of, sign_of_life, started
from megatrain.recipes.signals import Stopped, StopRequest, early_request
from megatrain.settings import KEYS
from megatrain.world import ALONE, LOOKS_EVERY_S, World

ALL_COME_WITHIN = timedelta(minutes=10)
LOOPBACK = (launcher.HERE, "localhost")
POLL_S = 0.05
SAYS_AFTER_S = 10.0
FIRST = "the first rank"
OF_TORCHRUN = "TORCHELASTIC_USE_AGENT_STORE"
T = TypeVar("T")
ROWS_DIFFER = (
    "the source, or the token cache (MEGATRAIN_CACHE), is not the same on their hosts; make it the "
    "same"
)
Await = Callable[[Future[StepBatch]], StepBatch]


def as_rank(device: str, work: Callable[[World], T]) -> T:
    """Run `work` alone, or beside the other ranks that a launcher has started.

    A rank gets a GPU of its own. If one fails, all end, and one of them says why. A result may have
    the `exit_code` of its process.

    device: as in the config.

    Raises:
        ConfigError: there are fewer GPUs than ranks on this host.
        OtherFailed: another rank has failed, for the reason it gives.
        SystemExit: a signal has come before all ranks have met.
    """
    end_with_launcher()
    place = launcher.place_of(os.environ)
    if place is None:
        return work(ALONE)
    if distributed.is_initialized():
        raise ConfigError(
            "torch.distributed: the program has started it; leave that to the run, which ranks of "
            "a launcher begin together"
        )
    own, job = own_device(place, device), launcher.job_of(os.environ)
    meeting = launcher.first_host(os.environ, place), launcher.port_of(job)
    for name, default in zip(launcher.MEETING, meeting, strict=True):
        os.environ.setdefault(name, str(default))
    if place.size == place.local_size and os.environ[launcher.MEETING[0]] in LOOPBACK:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # all of them: from here on `place_of` finds these names, also under Slurm
    os.environ |= zip(launcher.NAMES, map(str, astuple(place)), strict=True)
    with ExitStack() as stack:
        alive = _meet(place, job, stack)
        try:
            alive.world = _connected(own, place, alive.world)
            summary = work(alive.world)
        except BaseException as error:
            raise end_of(error, alive) from error
        alive.leave(getattr(summary, "exit_code", 0))
        return summary


def _meet(place: launcher.Place, job: str, stack: ExitStack) -> Liveness:
    """Meet the other ranks of this start and job; they are watched until `stack` is closed."""
    rank, size, here = place.rank, place.size, socket.gethostname()
    host, port = (os.environ[name] for name in launcher.MEETING)
    patience = Wait(ALL_COME_WITHIN, f"{host}:{port}")
    try:
        opened = meeting_store(host, int(port), rank, size, patience)
        sealed = Sealed(PrefixStore(job, opened), secret_of(place), job)
        store = fresh_part(sealed, rank, size, patience, sign_of_life(rank, here))
        # when nobody is looked after any more
        stack.callback(lambda: distributed.is_initialized() and distributed.destroy_process_group())
        alive = Liveness(World(rank, size, place.local_rank, place.local_size, store=store), here)
        stack.enter_context(alive.watched())
        return alive
    except (RuntimeError, Stopped) as error:
        raise _as_asked() or MegaTrainError(_not_all(size, error)) from error


def _connected(own: torch.device, place: launcher.Place, world: World) -> World:
    """The world of ranks that have met, with their groups."""
    backend = "cpu:gloo,cuda:nccl" if own.type == "cuda" else "gloo"
    store = PrefixStore("group", world.store.store)
    allow_sockets()
    try:
        distributed.init_process_group(
            backend, store=store, rank=world.rank, world_size=world.size, timeout=ALL_COME_WITHIN
        )
        return World.joined(own, world.store, (place.local_rank, place.local_size))
    except RuntimeError as error:
        raise _as_asked() or RuntimeError(_not_all(world.size, error)) from error


def allow_sockets() -> None:
    """Raise the soft limit of open files to the hard one: a rank has several sockets to each other
    rank, and 1,024 is a common limit."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(OSError, ValueError):  # as much as the system allows
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _as_asked() -> SystemExit | None:
    """The end of a rank that was asked to stop, as were others, perhaps, that are gone already."""
    asked = early_request()
    return SystemExit(asked.exit_code) if asked is not None and asked.came() else None


def _not_all(size: int, error: BaseException) -> str:
    return f"not all {size} ranks have met: {' '.join(str(error).split())}"


# -- the store -------------------------------------------------------------------------------------


class Wait:
    """A wait for other ranks, at `where`, that ends in time and wherever work may end."""

    def __init__(self, patience: timedelta, where: str) -> None:
        self.patience, self.where = patience, where
        self._began, self._said = time.monotonic(), False

    def goes_on(self, who: str, *, aloud: bool = True) -> None:
        """Called again and again while somebody is missing, which is shown once if it takes long.
        Raises RuntimeError when it has taken too long."""
        beat()
        may_end_here()
        waited = time.monotonic() - self._began
        if waited > self.patience.total_seconds():
            raise RuntimeError(f"{who} did not come to {self.where}")
        if aloud and not self._said and waited > SAYS_AFTER_S:
            self._said = True
            typer.echo(f"waiting for {who} at {self.where}", err=True)


def meeting_store(host: str, port: int, rank: int, size: int, patience: Wait) -> TCPStore:
    """The store at this address, which the first rank opens unless torchrun has. Raises
    RuntimeError if it cannot be opened, or nobody opens it in time."""
    opens = rank == 0 and os.environ.get(OF_TORCHRUN) != "True"

    def connect() -> TCPStore:
        listening = None
        if opens and host in LOOPBACK:  # the library would listen to all networks
            with suppress(OSError):  # the port is taken, perhaps by this process itself
                listening = socket.create_server((launcher.HERE, port)).detach()
        return TCPStore(
            host,
            port,
            size,
            is_master=opens,
            timeout=patience.patience,
            wait_for_workers=False,  # the first rank would not learn who is missing
            multi_tenant=True,
            master_listen_fd=listening,
        )

    # nobody can interrupt it: it tries again and again, or for ever if a stranger has the port
    opened = started(connect, "megatrain-rendezvous")
    while wait([opened], POLL_S).not_done:
        patience.goes_on(FIRST)
    return opened.result()


def secret_of(place: launcher.Place) -> bytes:
    """The secret that a start's ranks share: $MEGATRAIN_SECRET, which our launcher makes up; else,
    on one host, that of the user, in a file that nobody else may read; else none: then the network
    between hosts is trusted. Raises StorageError."""
    if given := os.environ.get(SECRET):
        return given.encode()
    if place.size > place.local_size:
        return b""
    file = cache_folder() / "secret"
    with system_errors(file, "write it", f"set {SECRET}"):
        file.parent.mkdir(parents=True, exist_ok=True)
        own = file.with_name(f"secret-{uuid4().hex}")
        with open(own, "x", opener=partial(os.open, mode=0o600)) as made:
            made.write(token_hex())
        with suppress(FileExistsError):
            os.link(own, file)  # whole, and by one alone
        own.unlink()
        return file.read_bytes()


class Sealed:
    """A store whose values have a seal (HMAC-SHA256 of key and value): what somebody without the
    secret has written is not there. store: the library's. name: of this part of it."""

    def __init__(self, store: Any, secret: bytes, name: str) -> None:
        self.store, self._secret, self._name = store, secret, name

    def part(self, name: str) -> Sealed:
        return Sealed(PrefixStore(name, self.store), self._secret, f"{self._name}/{name}")

    def clone(self, timeout: timedelta) -> Sealed:
        """The same store by a connection of its own."""
        store = self.store.clone()
        store.set_timeout(timeout)
        return Sealed(store, self._secret, self._name)

    def set(self, key: str, value: str) -> None:
        self.store.set(key, self._sealed(key, value))

    def get(self, key: str) -> str | None:
        return self._opened(key, self.store.get(key)) if self.store.check([key]) else None

    def check(self, keys: Sequence[str]) -> bool:
        """True if all of these are there."""
        return bool(self.store.check([*keys])) and None not in map(self.get, keys)

    def get_all(self, keys: Sequence[str]) -> list[str | None]:
        """The values of keys that are there, in one message: one thread serves all ranks."""
        return [*map(self._opened, keys, self.store.multi_get([*keys]))]

    def first(self, key: str, value: str) -> str:
        """The first value that anybody has set, which is this one where there is none."""
        found = self._opened(key, self.store.compare_set(key, "", self._sealed(key, value)))
        if found is None:
            self.set(key, value)
        return found or value

    def _sealed(self, key: str, value: str) -> str:
        words = f"{self._name}/{key}\n{value}".encode()
        return f"{hmac.new(self._secret, words, 'sha256').hexdigest()} {value}"

    def _opened(self, key: str, sealed: bytes) -> str | None:
        value = sealed.decode(errors="replace").partition(" ")[2]
        own = self._sealed(key, value).encode()
        return value if hmac.compare_digest(own, sealed) else None


def fresh_part(
    store: Sealed, rank: int, size: int, patience: Wait, sign: tuple[str, str]
) -> Sealed:
    """A part of the store that only the ranks of this start write, once all have come. sign: key
    and value that this rank leaves there for all. Raises RuntimeError if not all come in time."""
    if rank == 0:
        name, missing = uuid4().hex, list(range(1, size))
        while missing:
            patience.goes_on(f"ranks {missing}")
            for other in missing:
                if (token := store.get(f"hello/{other}")) is not None:  # perhaps of a dead one
                    store.set(f"welcome/{other}", f"{token} {name}")
            missing = [other for other in missing if store.get(f"here/{other}") != name]
            time.sleep(POLL_S if missing else 0)
        part = store.part(name)
        part.set(*sign)
        part.set("all", "here")
        return part
    mine, name, answered = uuid4().hex, "", ""
    store.set(f"hello/{rank}", mine)
    while answered != mine:
        patience.goes_on(FIRST)
        time.sleep(POLL_S)
        answered, _, name = (store.get(f"welcome/{rank}") or "").partition(" ")
    part = store.part(name)
    part.set(*sign)
    store.set(f"here/{rank}", name)
    while not part.check(["all"]):
        patience.goes_on("other ranks", aloud=False)  # the first one says which
        time.sleep(POLL_S)
    return part


# -- the GPU and the cores of a rank ---------------------------------------------------------------


def own_device(place: launcher.Place, device: str) -> torch.device:
    """The GPU of a rank, the only one that it sees from now on, or the CPU. Raises ConfigError.
    CUDA is not asked which there are: it would see all of them ever after."""
    gpus = visible_gpus() if device != "cpu" and built_for_cuda() else []
    if not gpus:
        if device == "cuda":
            raise ConfigError(f"device: {device} was asked for, but PyTorch sees no CUDA device")
        return torch.device("cpu")
    # a launcher may show each rank its own already
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
    that they touch first. All ranks call it. On a CPU PyTorch computes with as many threads, since
    more would wait for each other."""
    if world.is_alone:
        return
    number, of = on_the_same_cores(world)
    cores = max(1, physical_cores() // of)
    os.sched_setaffinity(0, launcher.share_of_cores(number, of))
    if device.type == "cpu":
        torch.set_num_threads(min(cores, torch.get_num_threads()))


def cores_of_host(world: World) -> int:
    """Physical cores of all ranks of this host. All ranks call it."""
    _, sharing = on_the_same_cores(world)
    return physical_cores() * world.local_size // sharing


def on_the_same_cores(world: World) -> tuple[int, int]:
    """(number of this rank, count) among this host's ranks that may use the same cores. Launchers,
    such as Slurm's, may have bound each rank to its own. All ranks call it."""
    masks = world.all_gather(os.sched_getaffinity(0))
    first = world.rank - world.local_rank
    here = masks[first : first + world.local_size]
    same = [number for number, mask in enumerate(here) if mask == here[world.local_rank]]
    return same.index(world.local_rank), len(same)


# -- points that all ranks pass --------------------------------------------------------------------


def check_ranks(config: Config, world: World) -> None:
    """Raise ConfigError for another number of ranks than the config's."""
    if config.gpus not in ("auto", world.local_size):
        raise ConfigError(
            f"{config.where('gpus')}: {config.gpus}, but {world.local_size} process(es) of this "
            "host take part; `megatrain train` and torchrun start several; or remove it"
        )


# why: decision 0112
def check_alike(world: World, how: Mapping[str, object], rows: Sequence[str] = ()) -> None:
    """Raise ConfigError or DataError if ranks would train in different ways, or on other rows: each
    decides by itself, from what it finds on its host. All call it at the same place. how: settings,
    keys, digests and the like, by name. rows: digests."""
    (_, first, ours), *others = world.all_gather((socket.gethostname(), how, rows))
    for rank, (host, theirs, digests) in enumerate(others, 1):
        for name in {**first, **theirs}:
            if theirs.get(name) != first.get(name):
                raise ConfigError(
                    f"ranks 0 and {rank}, on {host}, would train with {KEYS.get(name, name)} "
                    f"{first.get(name)} and {theirs.get(name)}; make it the same on all hosts"
                )
        if digests != ours:
            raise DataError(f"ranks 0 and {rank}, on {host}, have different rows: {ROWS_DIFFER}")


def told_of(config: Config) -> dict[str, object]:
    """The keys that ranks compare when they meet: all but paths and a host's own; and versions."""
    flat = flatten(config.model_dump(mode="json"))
    alike = {key: value for key, value in flat.items() if key not in (*PATHS, "threads")}
    python = {"Python": f"{sys.version_info.major}.{sys.version_info.minor}"}
    return alike | {name: installed_version(name) for name in PACKAGES} | python


def check_rows_of_a_step(loader: Loader) -> None:
    """Raise PlanError if half of the steps have fewer rows than there are ranks."""
    world = loader.world
    if world.size > 1 and (rows := loader.rows_of_a_step()) < world.dp_size:
        found = f"half of the steps have at most {number_of(rows, 'row')},"
        way_on = "raise train.tokens_per_step, or add rows"
        raise too_many_ranks(found, rows * world.cp_size, world.size, way_on)


def awaiting(world: World, stop: StopRequest, step: Callable[[], int]) -> Await:
    """A function that waits for the next batch of rows that are still tokenised, on all ranks.

    They tell each other every LOOKS_EVERY_S how far they are, so a request to stop is heeded, and a
    dead rank is noticed. A rank that has its rows gives signs of life as long as the others do.

    stop: agreed on by all ranks. step: the number of the next step.

    Raises Stopped if any rank was asked to, DataError if ranks have different rows, and what the
    loader raises on any of them.
    """

    def arrived(pending: Future[StepBatch]) -> StepBatch:
        signs_before, shown = list[int](), False
        lacks = threading.Event()  # a window is not there
        with ending(lacks.set):
            while True:
                wait((pending,), LOOKS_EVERY_S)
                there, failure = pending.done(), None
                if there and (found := pending.exception()) is not None:
                    if not isinstance(found, Exception):
                        raise found
                    failure = found
                rows = None
                if there and failure is None:  # where they end, and all their lengths
                    rows = pending.result().after, hash(pending.result().lengths)
                states = world.all_gather((rows, world.as_told(failure), total(), lacks.is_set()))
                world.raise_first([error for _, error, _, _ in states], failure)
                signs = [count for theirs, _, count, _ in states if theirs is None]
                if not signs:
                    for rank, (theirs, *_) in enumerate(states):
                        if theirs != states[0][0]:
                            ranks = f"ranks 0 and {rank} have different rows for the next step"
                            raise DataError(f"{ranks}: {ROWS_DIFFER}")
                    return pending.result()
                if there and signs != signs_before:
                    beat()
                signs_before = signs
                if stop.came():
                    raise Stopped
                if any(lack for *_, lack in states) and not shown:
                    logger.info(f"step {step()} waits for rows, which are still being tokenised")
                    shown = True

    return arrived


# -- rates measured together -----------------------------------------------------------------------


def measure_processes(ranks: int, device: str) -> dict[str, Any]:
    """`measure_together` in new processes, each with a GPU, or on the CPU. Raises OtherFailed."""
    with TemporaryDirectory(prefix="megatrain-") as folder:
        file = Path(folder) / "found.json"
        command = [sys.executable, "-m", __name__, str(file), device]
        if code := run_ranks([], ranks, command=command):
            raise OtherFailed("the processes could not measure together, as they say above", code)
        found: dict[str, Any] = json.loads(file.read_text())
    found["update"] = tuple((threads, rate) for threads, rate in found["update"])
    return found


def measure_into(file: Path, device: str) -> None:
    """Measure as one of the ranks, of which the first writes the file."""

    def work(world: World) -> None:
        own = choose_device(device)
        cores = max(1, cores_of_host(world) // world.size)
        bind(world, own)
        found = measure_together(world, own, cores)
        if world.is_first:
            file.write_text(json.dumps(found))

    as_rank(device, work)


if __name__ == "__main__":
    try:
        measure_into(Path(sys.argv[1]), sys.argv[2])
    except MegaTrainError as error:
        code, sentence = exit_code_of(error)
        typer.echo(f"error: {sentence}", err=True)
        sys.exit(code)
