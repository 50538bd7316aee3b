"""The launcher of one host: starts a command once for each GPU, and waits for all.

torchrun starts ranks of several hosts. It is not used for one: it kills ranks 30 s after a signal,
which a save may outlast (torch 2.11), and reports a failure that the rank has shown already.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from ctypes import CDLL
from pathlib import Path
from secrets import token_hex
from types import FrameType
from typing import Any

import typer

from megatrain.config import Config
from megatrain.config.resuming import ENVIRONMENT_FILE
from megatrain.errors import UNEXPECTED, ConfigError, StorageError
from megatrain.machine.hardware import built_for_cuda, visible_gpus
from megatrain.machine.launcher import HERE, MEETING, NAMES, place_of
from megatrain.recipes.signals import INTERRUPTED, SAVES, STOPPED, STOPS
from megatrain.reporting.metrics import read_metrics
from megatrain.storage.run_folder import checkpoints, has_begun

LAUNCHER = "MEGATRAIN_LAUNCHER"  # our own process number, for the ranks
OWN_LAUNCH = "MEGATRAIN_LAUNCH"  # the name of this launcher's run, by which restarted ranks know it
LAUNCH, UNNAMED = "TORCHELASTIC_RUN_ID", "none"  # torchrun's
JOB, REQUEUED = "SLURM_JOB_ID", "SLURM_RESTART_COUNT"
OWN_JOB = "MEGATRAIN_JOB"  # the same whenever a scheduler starts the command again
SECRET = "MEGATRAIN_SECRET"  # by which ranks of one start know each other's words
# C++ adds dozens of lines to what ends all; it reads this when torch is loaded
QUIET = {"TORCH_CPP_LOG_LEVEL": "FATAL"}
COMMAND = (sys.executable, "-m", "megatrain")
LOOKS_EVERY_S = 0.1
ENDS_WITHIN_S = 20.0  # of each other, once one has failed
FAILURES_AT_A_STEP = 3  # after which a run stays down
PR_SET_PDEATHSIG = 1  # prctl(2)


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
            words = f"a step has work for {busy} of {there} GPUs (train.rows_per_step)"
            typer.echo(words, err=True)
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


def is_launched() -> bool:
    """True in a process that `run_ranks` has started."""
    return os.environ.get(LAUNCHER) == str(os.getppid())


def end_with_launcher() -> None:
    """Have this process asked to stop when its launcher dies: nobody would pass signals on."""
    if is_launched():
        with suppress(AttributeError):  # not Linux
            CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def launched_by() -> dict[str, str]:
    """Names of the launcher that starts ranks again when one has died, and of the scheduler's job,
    for env.json; empty: there is none."""
    name = os.environ.get(LAUNCH) or os.environ.get(OWN_LAUNCH, "")
    launch = f"{socket.gethostname()} {os.getppid()}" if name == UNNAMED else name
    return {"launch": launch, "job": os.environ.get(OWN_JOB) or os.environ.get(JOB, "")}


def goes_on(config: Config) -> bool:
    """True if the folder holds a run that the launcher of this process has begun, or its
    scheduler's job, which was started again since: that has the same command. False: it holds none.
    Raises ConfigError for another run, and StorageError."""
    if not has_begun(config.output):
        return False
    now, then = launched_by(), dict[str, Any]()
    with suppress(OSError, ValueError):
        then = environment(config.output)
    again = bool(os.environ.get(OWN_JOB)) or os.environ.get(REQUEUED, "0") != "0"
    if any(now[name] and now[name] == then.get(name) for name in ["launch", "job"][: 1 + again]):
        return True
    raise ConfigError(
        f"{config.where('output')}: {config.output} holds a run already; continue it with "
        f"`megatrain resume {config.output}`, or choose another folder"
    )


def environment(run_dir: Path) -> dict[str, Any]:
    """Read the file that `describe_run` has written. Raises OSError and ValueError."""
    return dict(json.loads((run_dir / ENVIRONMENT_FILE).read_text()))


class Restarts:
    """Restarts of a run that died or failed unexpectedly: at most `most`, and none once it has
    failed three times without a new step. run_dir: its folder."""

    def __init__(self, most: int, run_dir: Path) -> None:
        self.most, self._run_dir = most, run_dir
        self._done, self._failures, self._furthest = 0, 0, -1

    def follow(self, code: int, reason: str) -> bool:
        """True if the run is to be started again; shows so, or why not. code, reason: of its end.
        Refusals and requests to stop have codes of their own."""
        if code != UNEXPECTED or self.most == 0:
            return False
        step = 0
        with suppress(StorageError):  # it had not begun
            step = max((row.get("step", 0) for row in read_metrics(self._run_dir)), default=0)
        self._failures = 1 if step > self._furthest else self._failures + 1
        self._furthest = step = max(step, self._furthest)
        saved, stuck = bool(checkpoints(self._run_dir)), self._failures == FAILURES_AT_A_STEP
        if may := not stuck and self._done < self.most:
            self._done += 1
            begin = "its newest checkpoint" if saved else "its beginning"
            said = f"the run failed after step {step}; starting it again from {begin}"
            said = f"{said} (restart {self._done} of {self.most})"
        else:
            again = f"`megatrain resume {self._run_dir}`" if saved else "the same command"
            often = f"{self._failures} times without getting past" if stuck else "again, after"
            said = f"error: the run failed {often} step {step} and stays down: {reason}; remove"
            said = f"{said} the cause (exit code {code}), then go on with {again}"
        typer.echo(said, err=True)
        return may


# why: decision 0100
def run_ranks(
    arguments: Sequence[str],
    size: int,
    command: Sequence[str] | None = None,
    restarts: Restarts | None = None,
) -> int:
    """Run `megatrain` with these arguments as `size` ranks; the exit code of the first rank to
    fail, or of the first one. Signals are passed on once, to all. When one fails the others end by
    themselves (recipes/ranks/liveness.py), or are killed. command: in place of `megatrain`."""
    own = {LAUNCHER: str(os.getpid()), OWN_LAUNCH: token_hex(8), SECRET: token_hex()}
    given, asked = [*(command or COMMAND), *arguments], list[int]()
    ranks: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, _frame: FrameType | None) -> None:
        asked.extend([number] if number in STOPS else ())
        for rank in ranks:
            if rank.poll() is None:
                rank.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (*STOPS, SAVES)}
    try:
        while True:
            ranks[:] = _start(given, size, own)
            if asked:  # before they could heed it
                return INTERRUPTED if asked[0] == signal.SIGINT else STOPPED
            code, reason = _wait(ranks)
            if asked or restarts is None or not restarts.follow(code, reason):
                return code
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for rank in ranks:
            rank.kill()


def _start(
    command: Sequence[str], size: int, own: Mapping[str, str]
) -> list[subprocess.Popen[bytes]]:
    port, ours = free_port(), {**QUIET, **os.environ, **own}
    return [
        subprocess.Popen(
            command,
            env=ours | (environment_of(rank, size, port) if size > 1 else {}),
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # a terminal's Ctrl-C would reach them beside the one passed on
        )
        for rank in range(size)
    ]


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> tuple[int, str]:
    """(exit code of all, why it is not 0), once they have ended."""
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
    who, also = (f"rank {failed}", ", so all have ended") if len(ranks) > 1 else ("the run", "")
    if codes[failed] >= 0:
        return codes[failed], f"{who} ended with exit code {codes[failed]}, as is said above"
    reason = f"{who} was killed by {signal.Signals(-codes[failed]).name}"
    typer.echo(f"error: {reason}{also}", err=True)
    return next((code for code in codes if code > 0), UNEXPECTED), reason
