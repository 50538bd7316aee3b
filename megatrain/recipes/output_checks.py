"""Checks of a run's folder: nothing that somebody else put there is overwritten or removed."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

from megatrain.config import Config
from megatrain.config.resuming import RESOLVED_FILE
from megatrain.errors import ConfigError, StorageError
from megatrain.recipes.describe import DESCRIPTION
from megatrain.reporting.metrics import METRICS_FILE, SAMPLES_FILE
from megatrain.reporting.page import REPORT_FILE
from megatrain.reporting.progress import LOG_FILE
from megatrain.reporting.trackers import ID_FILE
from megatrain.storage.hashed_file import storage_error, system_errors
from megatrain.storage.manifest import MANIFEST
from megatrain.storage.run_folder import (
    ANOTHER_OUTPUT,
    CHECKPOINT,
    FINAL,
    LINKS,
    LOCK,
    PASSENGERS,
    UNFINISHED,
)

FILES = (*DESCRIPTION, METRICS_FILE, SAMPLES_FILE, LOG_FILE, ID_FILE, REPORT_FILE)
FOLDERS = (*LINKS, FINAL, PASSENGERS, "tensorboard", "wandb")
BATCHES = r"(bad-batch|spike)-\d+(-rank-\d+)?\.safetensors"
# All names that a run writes, but for its lock.
WRITTEN = re.compile(
    "|".join(
        [
            rf"({'|'.join(map(re.escape, FILES))})(\.tmp)?",
            "|".join(FOLDERS),
            *(CHECKPOINT.pattern, BATCHES, UNFINISHED.pattern),
        ]
    )
)
MODEL = "config.json"  # a folder that has it is taken for a model, not for a run


def check_output(config: Config) -> None:
    """Check that a run may be written into `output`, before anything is loaded or written.

    A folder with a resolved config or a checkpoint is a run's. Any other may hold anything but
    names that a run writes.

    Raises ConfigError, and StorageError where no folder can be made or written in.
    """
    folder = config.output
    _check_writable(folder)
    if not os.path.lexists(folder):
        return
    with system_errors(folder, "look into it"):
        there = sorted(path.name for path in folder.iterdir())
        if _is_run(folder, there):
            check_links(folder)
            return
        # of a start that failed before it had written more
        ours = {LOG_FILE} if (folder / LOCK).is_file() else set()
    taken = [name for name in there if WRITTEN.fullmatch(name) and name not in ours]
    problem = ""
    if taken:
        more = f" and {len(taken) - 1} more" if len(taken) > 1 else ""
        problem = f"{taken[0]}{more}, which a run would write, and is no run's folder"
    elif MODEL in there:
        problem = f"{MODEL}, so it would be taken for a model, not for a run"
    if problem:
        where = config.where("output")
        raise ConfigError(f"{where}: {folder} holds {problem}; choose another folder")


def check_links(run_dir: Path) -> None:
    """Raise StorageError if something lies where a save puts a link."""
    for path in (run_dir / name for name in LINKS):
        if path.exists() and not path.is_symlink():
            raise StorageError(f"{path}: is no link, and a save puts one there; move it away")


def _is_run(folder: Path, names: list[str]) -> bool:
    saved = (name for name in names if name == FINAL or CHECKPOINT.fullmatch(name))
    return RESOLVED_FILE in names or any((folder / name / MANIFEST).is_file() for name in saved)


def _check_writable(folder: Path) -> None:
    """Raise the error of a start that cannot make the folder, or write in it."""
    whole = folder.absolute()
    nearest = next(path for path in (whole, *whole.parents) if os.path.lexists(path))
    if not nearest.is_dir():
        number = errno.EEXIST if nearest == whole else errno.ENOTDIR
    elif not os.access(nearest, os.W_OK | os.X_OK, effective_ids=True):
        number = errno.EACCES
    else:
        return
    error = OSError(number, os.strerror(number))
    raise storage_error(folder, error, "make the run folder", ANOTHER_OUTPUT)
