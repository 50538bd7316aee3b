"""Starts a command once for each GPU of this host, and waits for all.

torchrun does so on several hosts. It is not used for one: it kills ranks 30 s after a signal,
which a save may outlast (torch 2.11), and reports a failure that the rank has told already.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FrameType

import typer

from megatrain.config import Config
from megatrain.errors import UNEXPECTED, ConfigError
from megatrain.machine.hardware import built_for_cuda, visible_gpus
from megatrain.recipes.signals import INTERRUPTED, STOPPED, STOPS

# What a launcher says of this process: of torchrun and Kubernetes' operators, or of Slurm.
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
OF_SLURM = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE")
MEETING = ("MASTER_ADDR", "MASTER_PORT")  # where ranks do
LAUNCHER = "MEGATRAIN_LAUNCHER"  # our own process number, for the ranks
# C++ adds dozens of lines to what ends all; it reads this when torch is loaded
QUIET = ("TORCH_CPP_LOG_LEVEL", "FATAL")
COMMAND = (sys.executable, "-m", "megatrain")
LOOKS_EVERY_S = 0.1
ENDS_WITHIN_S = 20.0  # of each other, once one has failed


@dataclass(frozen=True)
class Place:
    """Which rank a launcher has made of this process, of how many, and on its host."""

    rank: int
    size: int
    local_rank: int
    local_size: int


def started_by(environ: Mapping[str, str]) -> tuple[str, int]:
    """(the launcher's name for it, how many processes it has started); 1: there is none."""
    name = names_in(environ)[1]
    size = environ.get(name, "")
    return name, int(size) if size.isdecimal() else 1


def names_in(environ: Mapping[str, str]) -> tuple[str, str, str, str]:
    """A job's script has Slurm's names as well, but no step: it is one process."""
    script = "SLURM_JOB_ID" in environ and "SLURM_STEP_ID" not in environ
    of_slurm = "SLURM_PROCID" in environ and not script
    return OF_SLURM if of_slurm and "WORLD_SIZE" not in environ else NAMES


def place_of(environ: Mapping[str, str]) -> Place | None:
    """What the environment says; None for a process by itself. Raises ConfigError."""
    names = names_in(environ)
    _, size = started_by(environ)
    if size < 2:
        return None
    given = {name: environ.get(name, "") for name in names}
    given[names[3]] = given[names[3]] or str(size)  # all on one host
    rank, _, local_rank, local_size = (int(v) if v.isdecimal() else -1 for v in given.values())
    if not (0 <= rank < size and 0 <= local_rank < local_size <= size):
        said = ", ".join(f"{name}={value}" for name, value in given.items())
        raise ConfigError(
            f"the environment: {said}: that is no rank of a launcher; start several processes with "
            "torchrun, or unset these"
        )
    return Place(rank, size, local_rank, local_size)


def be_quiet_as_rank() -> None:
    """In a process that a launcher has started, keep C++ quiet. Called before torch is loaded."""
    if started_by(os.environ)[1] > 1:
        os.environ.setdefault(*QUIET)


def ranks_for(config: Config) -> int:
    """How many processes a command is to start; 1: none but itself. Raises ConfigError."""
    if place_of(os.environ) is not None:
        return 1  # a launcher has
    if config.device == "cpu":
        if config.gpus not in ("auto", 1):
            where, device = config.where("gpus"), config.device
            raise ConfigError(f"{where}: {config.gpus}, but device: {device}; remove one of them")
        return 1
    there = len(visible_gpus())
    wanted = there if config.gpus == "auto" else config.gpus
    if wanted > there:
        raise ConfigError(f"{config.where('gpus')}: {wanted}, but {there} are visible here")
    if wanted < 2:
        return 1
    if built_for_cuda():
        return wanted
    said = "PyTorch without CUDA is not built for several GPUs"
    if config.gpus != "auto":
        raise ConfigError(f"{said}; set gpus: 1")
    typer.echo(f"{said}: one of {there} is used", err=True)
    return 1


def free_port() -> int:
    """A port of this host at which ranks may meet."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def environment_of(rank: int, size: int, port: int) -> dict[str, str]:
    """What makes a process a rank of several on this host, who meet at a port."""
    values = dict(zip(NAMES, (rank, size, rank, size), strict=True))
    meeting = dict(zip(MEETING, ("127.0.0.1", str(port)), strict=True))
    return {name: str(value) for name, value in values.items()} | meeting


def run_ranks(arguments: Sequence[str], size: int) -> int:
    """Run `megatrain` with these arguments as so many ranks; the exit code.

    That of the first rank to fail, or of the first rank. Signals are passed on once, to all. When
    one fails the others end by themselves (recipes/others.py), or are killed.
    """
    port = free_port()
    ranks = [_start(arguments, rank, size, port) for rank in range(size)]

    def pass_on(number: int, _frame: FrameType | None) -> None:
        for rank in ranks:
            if rank.poll() is None:
                rank.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in STOPS}
    try:
        return _wait(ranks)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for rank in ranks:
            rank.kill()


def _start(arguments: Sequence[str], rank: int, size: int, port: int) -> subprocess.Popen[bytes]:
    own = {**environment_of(rank, size, port), LAUNCHER: str(os.getpid())}
    # sessions of their own: a terminal's Ctrl-C would reach them beside the one passed on
    return subprocess.Popen(
        [*COMMAND, *arguments],
        env={**dict([QUIET]), **os.environ, **own},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    failed, until = None, math.inf
    while None in (found := [rank.poll() for rank in ranks]):
        for number, code in enumerate(found):
            if failed is None and code not in (None, 0, STOPPED, INTERRUPTED):
                failed, until = number, time.monotonic() + ENDS_WITHIN_S
        if time.monotonic() > until:
            for rank in ranks:
                rank.kill()
        time.sleep(LOOKS_EVERY_S)
    codes = [rank.wait() for rank in ranks]
    if failed is None:
        failed = next((number for number, code in enumerate(codes) if code), 0)
    if codes[failed] >= 0:
        return codes[failed]
    name = signal.Signals(-codes[failed]).name
    typer.echo(f"error: rank {failed} was killed by {name}, so all have ended", err=True)
    return next((code for code in codes if code > 0), UNEXPECTED)
