"""A run's folder while a command works in it: its lock, its log, and signals."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from rich.console import Console

from megatrain.errors import ConfigError, MegaTrainError
from megatrain.machine.address_space import address_space_errors
from megatrain.recipes.describe import DESCRIPTION
from megatrain.recipes.setup import quiet_libraries
from megatrain.recipes.signals import Stopped, StopRequest, stop_requests
from megatrain.recipes.watchdog import Watch, watchdog
from megatrain.reporting.progress import LOG_FILE, logging_to
from megatrain.reporting.streams import console_on
from megatrain.reporting.summary import RunSummary
from megatrain.storage.manifest import UNVERIFIED, verifies
from megatrain.storage.run_folder import RunLock, checkpoints, forget_unused, run_lock
from megatrain.world import LOOKS_EVERY_S, World

SEEN_WITHIN_S = 90.0  # by other hosts, whose view of a folder may be a minute old (nfs(5))

logger = logging.getLogger("megatrain")


@dataclass(frozen=True)
class Opened:
    """A run folder that is ours alone, the console, stderr, to which its log goes, too, what asks
    the run to stop, and what ends it if it hangs."""

    lock: RunLock | None  # None: another rank has it
    console: Console
    stop: StopRequest
    watch: Watch
    world: World


def in_run_folder(
    path: Path, hang_timeout: int | None, world: World, work: Callable[[Opened], RunSummary]
) -> RunSummary:
    """What `work` returns, with the folder locked and its log written; signals ask it to stop, and
    a watchdog ends it after `hang_timeout` seconds without a sign of life.

    A folder that was made for a run which failed or was stopped before its first step is removed.
    Of several ranks the first one has the folder, and speaks.
    """
    console, made = console_on(stderr=True), world.is_first and not os.path.exists(path)
    who = "" if world.is_first else f"[rank {world.rank} {socket.gethostname()}] "
    with stop_requests() as stop, run_lock(path) if world.is_first else nullcontext() as lock:
        try:
            seen_by_all(path, world)
            watched = watchdog(hang_timeout, path / LOG_FILE)
            with logging_to(path, console, who), address_space_errors(), watched as watch:
                world.every(None)  # all have opened their log, before one may remove the folder
                if lock is not None and lock.warning:
                    logger.warning(lock.warning)
                if not verifies() and world.is_first:
                    logger.warning(UNVERIFIED)
                quiet_libraries()
                shown = console if world.is_first else Console(quiet=True)
                return _unless_stopped(path, work, Opened(lock, shown, stop, watch, world))
        except MegaTrainError:  # of any other the log has the traceback
            if made:
                forget_unused(path)
            raise
        finally:
            if made and stop.came() and stop.early:
                forget_unused(path, DESCRIPTION)


def seen_by_all(path: Path, world: World) -> None:
    """Return once all ranks see the run folder, which the first one has.

    Raises ConfigError if one of another host does not: checkpoints would lack what it writes.
    """
    mark = path / world.told(f".seen-{uuid4().hex}")  # now there is a folder
    if world.hosts == 1:
        return
    try:
        if world.is_first:
            mark.touch()
        world.every(None)
        until = time.monotonic() + SEEN_WITHIN_S
        while not (seen := mark.exists()) and time.monotonic() < until:
            time.sleep(LOOKS_EVERY_S)
        for rank, (sees, host) in enumerate(world.every((seen, socket.gethostname()))):
            if not sees:
                raise ConfigError(
                    f"{path}: rank {rank} on {host} does not see what the first one writes there; "
                    "put output on a file system that all hosts share"
                )
    finally:
        if world.is_first:
            mark.unlink(missing_ok=True)


def _unless_stopped(path: Path, work: Callable[[Opened], RunSummary], opened: Opened) -> RunSummary:
    try:
        opened.stop.stop_if_early()  # a signal may have come while libraries were imported
        return work(opened)
    except Stopped:
        opened.stop.says("before the first step: nothing was trained and nothing is lost")
        resumable, code = bool(checkpoints(path)), opened.stop.exit_code
        return RunSummary(path, 0, 0, 0.0, resumable=resumable, exit_code=code)
