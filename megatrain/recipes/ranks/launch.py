"""The launcher of one host: starts a command once for each GPU, and waits for all.

torchrun starts ranks of several hosts. It is not used for one: it kills ranks 30 s after a signal,
which a save may outlast (torch 2.11), and reports a failure that the rank has shown already.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from secrets import token_hex
from types import FrameType

import typer

from megatrain.config import Config
from megatrain.errors import UNEXPECTED, ConfigError
from megatrain.machine.hardware import built_for_cuda, visible_gpus
from megatrain.machine.launcher import HERE, MEETING, NAMES, place_of, started_by
from megatrain.recipes.signals import INTERRUPTED, STOPPED, STOPS

LAUNCHER = "MEGATRAIN_LAUNCHER"  # our own process number, for the ranks
SECRET = "MEGATRAIN_SECRET"  # by which ranks of one start know each other's words
# C++ adds dozens of lines to what ends all; it reads this when torch is loaded
QUIET = {"TORCH_CPP_LOG_LEVEL": "FATAL"}
COMMAND = (sys.executable, "-m", "megatrain")
LOOKS_EVERY_S = 0.1
ENDS_WITHIN_S = 20.0  # of each other, once one has failed


def be_quiet_as_rank() -> None:
    """Keep C++ quiet in a process that a launcher has started, before torch is loaded."""
    if started_by(os.environ)[1] > 1:
        os.environ |= {**QUIET, **os.environ}


def ranks_for(config: Config) -> int:
    """Count of the processes that a command starts; 1: none but itself. Raises ConfigError."""
    if place_of(os.environ) is not None:
        return 1  # a launcher has
    if config.device == "cpu":
        if config.gpus not in ("auto", 1):
            where, device = config.where("gpus"), config.device
            raise ConfigError(f"{where}: {config.gpus}, but device: {device}; remove one of them")
        return 1
    seen = len(visible_gpus())
    there = seen if built_for_cuda() else 0
    if seen > there:
        typer.echo(f"PyTorch without CUDA cannot use the {seen} GPUs here", err=True)
    if config.gpus == "auto":
        busy = (config.train.rows_per_step or there) * config.train.context_parallel
        if 0 < busy < there:
            typer.echo(
                f"a step has work for {busy} of {there} GPUs (train.rows_per_step)", err=True
            )
        return max(1, min(there, busy))
    if config.gpus > max(1, there):
        raise ConfigError(f"{config.where('gpus')}: {config.gpus}, but {there} are visible here")
    return config.gpus


def free_port() -> int:
    """A free port of this host."""
    with socket.socket() as found:
        found.bind((HERE, 0))
        return int(found.getsockname()[1])


def environment_of(rank: int, size: int, port: int) -> dict[str, str]:
    """Environment that makes a process one of several ranks on this host, which meet at a port."""
    values = dict(zip(NAMES, (rank, size, rank, size), strict=True))
    meeting = dict(zip(MEETING, (HERE, str(port)), strict=True))
    return {name: str(value) for name, value in values.items()} | meeting


# why: decision 0100
def run_ranks(arguments: Sequence[str], size: int, command: Sequence[str] | None = None) -> int:
    """Run `megatrain` with these arguments as `size` ranks; the exit code of the first rank to
    fail, or of the first one. Signals are passed on once, to all. When one fails the others end by
    themselves (recipes/ranks/liveness.py), or are killed. command: in place of `megatrain`."""
    port, own = free_port(), {LAUNCHER: str(os.getpid()), SECRET: token_hex()}
    ranks = [
        subprocess.Popen(
            [*(command or COMMAND), *arguments],
            env={**QUIET, **os.environ, **environment_of(rank, size, port), **own},
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # a terminal's Ctrl-C would reach them beside the one passed on
        )
        for rank in range(size)
    ]

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
