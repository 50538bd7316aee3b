"""Experiment trackers: the lines of metrics.jsonl sent on, with the config and the plan; and the
news that a run has ended.

A tracker never stops a run: one that fails is dropped with a warning, and metrics.jsonl has all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatrain.errors import ConfigError, logger

PROJECT = "megatrain"
ID_FILE = "tracking.json"

Row = dict[str, Any]


# A service: what takes the lines, and what ends it, told whether the run failed. Both, and what
# opens it, may raise anything. Opened with the run folder, the run's id, which is the same when it
# is resumed, the steps finished before this process, and config and plan, JSON-able.
Tracker = tuple[Callable[[Row], object], Callable[[bool], object]]
About = Mapping[str, Any]


def wandb(run_dir: Path, run_id: str, _first_step: int, about: About) -> Tracker:
    """https://docs.wandb.ai. Without a login it keeps the run in the run folder, to be synced."""
    import wandb

    folder = _own_folder(run_dir / "wandb")
    offline = "WANDB_MODE" not in os.environ and not wandb.api.api_key
    if offline:
        upload = "upload it with `wandb sync`, or log in with `wandb login`"
        logger.warning(f"wandb: not logged in, so the run is kept in {folder}; {upload}")
    theirs: Any = wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        id=run_id,
        name=run_dir.name,
        dir=run_dir,
        config=dict(about),
        resume="allow",
        mode="offline" if offline else None,
        settings=wandb.Settings(console="off", silent=True),
    )
    # our step is the axis: a resumed run logs some steps again, which wandb's own cannot
    theirs.define_metric("*", step_metric="step")
    return theirs.log, lambda failed: theirs.finish(exit_code=int(failed))


def tensorboard(run_dir: Path, _run_id: str, first_step: int, about: About) -> Tracker:
    """Event files in `tensorboard/` of the run folder, for `tensorboard --logdir`."""
    from torch.utils.tensorboard import SummaryWriter

    folder = _own_folder(run_dir / "tensorboard")
    purged = first_step + 1 if first_step else None
    # what an earlier process logged after the step that this one goes on from is hidden
    writer: Any = SummaryWriter(folder, purge_step=purged)
    for name, value in about.items():
        text = json.dumps(value, indent=1)
        writer.add_text(name, "    " + text.replace("\n", "\n    "), first_step)

    def log(row: Row) -> None:
        for name, value in row.items():
            writer.add_scalar(name, value, row["step"])
        writer.flush()

    return log, lambda failed: writer.close()


def trackio(run_dir: Path, run_id: str, _first_step: int, about: About) -> Tracker:
    """https://huggingface.co/docs/trackio: a local database, or what TRACKIO_SPACE_ID names."""
    import trackio

    project = os.environ.get("TRACKIO_PROJECT", PROJECT)
    name, config = f"{run_dir.name}-{run_id}", dict(about)
    trackio.init(project, name=name, config=config, resume="allow", embed=False)

    def finish(failed: bool) -> None:
        # not the run's own, after which the package prints at exit
        trackio.finish()  # type: ignore[no-untyped-call]

    return lambda row: trackio.log(row, step=row["step"]), finish


TRACKERS = {"wandb": wandb, "tensorboard": tensorboard, "trackio": trackio}


def check_installed(names: Sequence[str], where: str) -> None:
    """Raise ConfigError for a tracker whose package is missing. where: the key and its place."""
    for name in names:
        if find_spec(name) is None:
            install = f"pip install 'megatrain[{name}]'"
            raise ConfigError(f"{where}: {name} is not installed; {install}")


@contextmanager
def tracking(
    names: Sequence[str], run_dir: Path, first_step: int, about: About
) -> Iterator[Callable[[Row], None]]:
    """Yields what takes every line of metrics.jsonl; names are of TRACKERS."""
    if not names:
        yield lambda row: None
        return
    run = run_dir, _id_of(run_dir), first_step, about
    open_ones: dict[str, Tracker] = {}

    def guarded(name: str, call: Callable[[], Any]) -> Any:
        try:
            with redirect_stdout(sys.stderr):  # stdout is the result's
                return call()
        except Exception as error:  # noqa: BLE001  of a package or its network: the run goes on
            open_ones.pop(name, None)
            reason = " ".join(str(error).split()) or type(error).__name__
            logger.warning(f"{name}: failed and is left out from here on ({reason})")
            return None

    def log(row: Row) -> None:
        flat = dict(_numbers(row))
        for name, (send, _) in list(open_ones.items()):
            guarded(name, partial(send, flat))

    for name in names:
        if (tracker := guarded(name, partial(TRACKERS[name], *run))) is not None:
            open_ones[name] = tracker
    failed = True
    try:
        yield log
        failed = False
    finally:
        for name, (_, finish) in list(open_ones.items()):
            guarded(name, partial(finish, failed))


def _id_of(run_dir: Path) -> str:
    """The run's id with trackers, which is made at its beginning and kept in its folder."""
    file, new = run_dir / ID_FILE, uuid.uuid4().hex[:8]
    broken = OSError, ValueError, KeyError, TypeError  # then a new one is made
    with suppress(*broken), open(file, opener=_as_it_is) as kept:
        return str(json.load(kept)["id"])
    try:
        with open(file, "w", opener=_as_it_is) as kept:
            kept.write(json.dumps({"id": new}) + "\n")
    except OSError as error:
        later = "trackers will take a resume for another run"
        logger.warning(f"{file}: cannot be written ({error.strerror}); {later}")
    return new


def _as_it_is(path: str, flags: int) -> int:
    """Open a file of the run folder, not the target of a link, and without waiting for a pipe."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)


def _own_folder(folder: Path) -> Path:
    """The folder. Raises OSError for a link, which leads elsewhere."""
    if folder.is_symlink():
        raise OSError(f"{folder} is a symbolic link; remove it")
    return folder


def _numbers(row: Row, prefix: str = "") -> Iterator[tuple[str, float]]:
    """(name, number) of a line, nested ones as `time/compute`."""
    for name, value in row.items():
        if isinstance(value, dict):
            yield from _numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            yield prefix + name, value


# -- the end ---------------------------------------------------------------------------------------

TOLD_WITHIN_S = 30.0
OK, STOPPED = 0, (75, 130)


def tell_end(target: str, run_dir: Path, code: int, reason: str = "") -> str:
    """Tell a URL or a command (`on_end`) that a run's process ends; why that failed, or empty.

    Args:
        code: the process's exit code.
        reason: the error, in a sentence.
    """
    status = "finished" if code == OK else "stopped" if code in STOPPED else "failed"
    words = f"{run_dir} {status}" + (f" (exit code {code}): {reason}" if reason else "")
    told = {"text": words, "run": str(run_dir), "status": status, "exit_code": str(code)}
    try:
        if target.startswith(("http://", "https://")):
            body, kind = json.dumps(told).encode(), {"Content-Type": "application/json"}
            asked = urllib.request.Request(target, body, kind)
            urllib.request.urlopen(asked, timeout=TOLD_WITHIN_S).close()
        else:
            own = {f"MEGATRAIN_{name.upper()}": value for name, value in told.items()}
            every, limit = {**os.environ, **own}, TOLD_WITHIN_S
            subprocess.run(target, shell=True, env=every, timeout=limit, check=True)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return str(error).replace(target, "it")  # its path may be a secret
    return ""
