"""Several ranks in processes of their own: forked from the tests', or with a GPU each."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, ClassVar

import torch
from torch import distributed

from megatrain import cli
from megatrain.recipes.ranks.launch import environment_of, free_port
from megatrain.recipes.signals import STOPS
from megatrain.world import World

LIMIT_S = 60.0
SPAWNED_S = 120.0  # to load CUDA and NCCL takes longer than a job
RunRanks = Callable[..., list[Any]]


def run_ranks(
    size: int,
    job: Callable[[World], Any],
    folder: Path,
    *,
    hosts: int = 1,
    first: Callable[[int], object] | None = None,
) -> list[Any]:
    """What `job` returns on each of so many ranks. Fails with the first error of one.

    hosts: as if the ranks were on so many.
    first: what each does before they meet, told its rank.
    """
    meeting = folder / f"meeting-{len(list(folder.iterdir()))}"
    context: Any = multiprocessing.get_context("fork")
    ends, processes = [], []
    for rank in range(size):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_rank, args=(rank, size, meeting, job, hosts, theirs, first)
        )
        process.start()
        theirs.close()
        ends.append(ours)
        processes.append(process)
    try:
        return _results(ends)
    finally:
        for process in processes:
            process.kill()
            process.join()


class Staying:
    """Ranks that do one job after another, forked from the tests' at the first: to begin as such a
    process takes as long as a tiny model's steps. What is patched for a test does not reach them.

    gpus: each has a GPU, and is no fork: CUDA does not survive one.
    """

    def __init__(self, size: int, folder: Path, *, gpus: bool = False) -> None:
        context: Any = multiprocessing.get_context("spawn" if gpus else "fork")
        self.limit_s = SPAWNED_S if gpus else LIMIT_S
        self.ends: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            others = [] if gpus else [*self.ends, ours]
            given = (rank, size, folder / f"meeting-of-{size}", gpus, theirs, others)
            process = context.Process(target=_stay, args=given, daemon=True)
            process.start()
            theirs.close()
            self.ends.append(ours)
            self.processes.append(process)

    def do(self, job: Callable[[World], Any], hosts: int = 1) -> list[Any]:
        """As `run_ranks`; the job is handed over as bytes."""
        for end in self.ends:
            end.send_bytes(pickle.dumps((job, hosts)))
        return _results(self.ends, self.limit_s)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


@contextmanager
def staying_ranks(folder: Path, *, gpus: bool = False) -> Iterator[RunRanks]:
    """As `run_ranks`, of processes that stay while jobs succeed."""
    teams: dict[int, Staying] = {}

    def run(size: int, job: Callable[[World], Any], *, hosts: int = 1) -> list[Any]:
        if size not in teams:
            teams[size] = Staying(size, Path(mkdtemp(dir=folder)), gpus=gpus)
        try:
            return teams[size].do(job, hosts)
        except BaseException:
            teams.pop(size).end()  # one of them may wait for ever
            raise

    try:
        yield run
    finally:
        for team in teams.values():
            team.end()


def _results(ends: Sequence[Connection], limit_s: float = LIMIT_S) -> list[Any]:
    found = [_received(end, rank, limit_s) for rank, end in enumerate(ends)]
    errors = [said for said, _ in found if said]
    assert not errors, errors[0]
    return [result for _, result in found]


def _received(end: Connection, rank: int, limit_s: float) -> tuple[str, Any]:
    if not end.poll(limit_s):
        return f"rank {rank} said nothing for {limit_s:.0f} s", None
    try:
        said: tuple[str, Any] = pickle.loads(end.recv_bytes())
    except EOFError:
        return f"rank {rank} died", None
    return said


def _rank(
    rank: int,
    size: int,
    meeting: Path,
    job: Callable[[World], Any],
    hosts: int,
    end: Connection,
    first: Callable[[int], object] | None,
) -> None:
    if first is not None:
        first(rank)
    _do(job, hosts, _meet(rank, size, meeting), end)


def _stay(
    rank: int, size: int, meeting: Path, gpus: bool, end: Connection, others: list[Connection]
) -> None:
    for other in others:
        other.close()  # the tests' ends, which tell when those are over
    device = _meet(rank, size, meeting, gpus)
    with suppress(EOFError):
        while True:
            job, hosts = pickle.loads(end.recv_bytes())
            _do(job, hosts, device, end)


def _meet(rank: int, size: int, meeting: Path, gpus: bool = False) -> torch.device:
    """Returns the device that the rank computes on."""
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if gpus else "gloo"
    distributed.init_process_group(
        backend, init_method=f"file://{meeting}", rank=rank, world_size=size
    )
    return device


def _do(job: Callable[[World], Any], hosts: int, device: torch.device, end: Connection) -> None:
    try:
        each = distributed.get_world_size() // hosts
        local = distributed.get_rank() % each, each
        found = "", job(World.joined(device, local=local))
    except BaseException:  # noqa: BLE001  the test says it
        found = traceback.format_exc(), None
    end.send_bytes(pickle.dumps(found))  # whole: tensors would be lent, and end with the process


class Started:
    """A command line as several ranks, each a process forked from the tests' that writes into a
    file of its own; they run in the current folder. None outlives its test (conftest.py)."""

    all: ClassVar[list[Started]] = []

    def __init__(
        self, size: int, line: str | list[str], *, first: Callable[[int], object] | None = None
    ) -> None:
        """line: of all, or of each. first: what each process does before, told its rank."""
        port = free_port()
        self.logs = [Path.cwd() / f"rank-{rank}.log" for rank in range(size)]
        context: Any = multiprocessing.get_context("fork")
        self.ranks = []
        self.all.append(self)
        for log in self.logs:
            log.write_text("")  # what an earlier start has said is not this one's
        for rank, log in enumerate(self.logs):
            environ = environment_of(rank, size, port)
            own = line if isinstance(line, str) else line[rank]
            process = context.Process(target=_command, args=(own, environ, log, first, rank))
            process.start()
            self.ranks.append(process)

    def wait(self, seconds: float = LIMIT_S) -> list[int]:
        """Exit codes, once all have ended; negative: the signal that ended one."""
        until = time.monotonic() + seconds
        try:
            for process in self.ranks:
                process.join(max(0.0, until - time.monotonic()))
            late = [rank for rank, process in enumerate(self.ranks) if process.is_alive()]
            assert not late, f"ranks {late} live after {seconds} s: {self.said()}"
        finally:
            for process in self.ranks:
                process.kill()
        return [process.exitcode for process in self.ranks]

    @classmethod
    def end_all(cls) -> None:
        for rank in chain.from_iterable(started.ranks for started in cls.all):
            rank.kill()
        cls.all.clear()

    def said(self) -> list[str]:
        return [log.read_text() if log.exists() else "" for log in self.logs]

    def errors(self) -> list[list[str]]:
        """Lines of each rank."""
        return [[line for line in text.splitlines() if "error" in line] for text in self.said()]


def _command(
    line: str,
    environ: dict[str, str],
    log: Path,
    first: Callable[[int], object] | None,
    rank: int,
) -> None:
    os.environ |= environ
    torch.set_num_threads(1)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = os.fdopen(os.dup(1), "w"), os.fdopen(os.dup(2), "w")
    for number in STOPS:
        signal.signal(number, signal.SIG_DFL)
    if first is not None:
        first(rank)
    code = cli.main(shlex.split(line))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
