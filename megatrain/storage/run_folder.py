"""A run's folder: its lock, and its checkpoints with the names `last`, `best` and `final`.

Every change is one rename: a kill at any instant leaves either the old state or the new one. Names
that end in `.tmp` are work in progress and never read; the next save removes them.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatrain.errors import ConfigError
from megatrain.storage.system_calls import storage_error, sync_folder, system_errors

CHECKPOINT = re.compile(r"checkpoint-(\d+)")
LINKS = ("last", "best", "proven")
FINAL = "final"
SMALL_FILES_BYTES = 64 << 20  # allowance for a checkpoint's tokenizer, configuration and headers
REPLACED = ".replaced"  # a complete checkpoint that a new one of the same step is about to replace
ANOTHER_OUTPUT = "choose another `output`"


@contextmanager
def run_lock(run_dir: Path) -> Iterator[None]:
    """Keep other runs out of a run's folder while the block lasts, or until the process dies.

    Makes the folder if needed, readable by its owner only.

    Raises:
        ConfigError: another process holds it.
        StorageError: the folder cannot be made.
    """
    make_run_dir(run_dir)
    try:
        fd = os.open(run_dir / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise storage_error(run_dir, error, "write in the run folder", ANOTHER_OUTPUT) from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
            raise ConfigError(
                f"{run_dir}: in use by another run (process {holder}); "
                f"wait for it, or {ANOTHER_OUTPUT} folder"
            ) from error
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(fd)  # releases the lock


def make_run_dir(run_dir: Path) -> None:
    """Create the folder with mode 0700; an existing one is left as it is. Raises StorageError."""
    try:
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        run_dir.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise storage_error(run_dir, error, "make the run folder", ANOTHER_OUTPUT) from error


def checkpoint_name(step: int) -> str:
    return f"checkpoint-{step}"


def checkpoints(run_dir: Path) -> list[Path]:
    """The checkpoint folders, by step, with one that was being replaced when the process died."""
    if not run_dir.is_dir():
        return []
    named = [p for p in run_dir.iterdir() if CHECKPOINT.fullmatch(p.name.removesuffix(REPLACED))]
    folders = [path for path in named if path.is_dir() and not path.is_symlink()]
    return sorted(folders, key=lambda p: (int(re.findall(r"\d+", p.name)[0]), p.name))


def folder_bytes(folder: Path) -> int:
    """Bytes of all files in a folder; 0 if one cannot be read."""
    try:
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    except OSError:
        return 0


def bytes_of_checkpoints(run_dir: Path) -> int:
    """Disk space that the run's checkpoints take; a file with several names counts once."""
    folders = [*checkpoints(run_dir), *(path for path in [run_dir / FINAL] if path.is_dir())]
    try:
        stats = [path.stat() for folder in folders for path in folder.rglob("*") if path.is_file()]
    except OSError:  # removed by another process, or unreadable: not ours to count on
        return 0
    return sum({(stat.st_dev, stat.st_ino): stat.st_size for stat in stats}.values())


def write_text(path: Path, text: str) -> None:
    """Replace a small file as a whole; a kill leaves the old one. Raises StorageError."""
    partial = path.with_name(path.name + ".tmp")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise storage_error(path, error, "write it") from error


@contextmanager
def new_folder(target: Path, partial: Path) -> Iterator[Path]:
    """Give the empty folder `partial` to fill, and rename it to `target` at the end.

    A failure removes it; an OSError becomes a StorageError.
    """
    with system_errors(target, "write it"):
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir(parents=True)
            yield partial
            sync_folder(partial)
            put_in_place(partial, target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def tidy(run_dir: Path) -> None:
    """Remove what a killed process left half done, and finish or undo a replacement it was in."""
    for pattern in ("checkpoint-*.tmp", "final*.tmp", "*.link.tmp"):
        for path in [*run_dir.glob(pattern)]:
            _remove(path)
    for path in [*run_dir.glob("checkpoint-*" + REPLACED), *run_dir.glob("final" + REPLACED)]:
        original = run_dir / path.name.removesuffix(REPLACED)
        if original.exists():
            discard(path)
        else:
            path.rename(original)


def discard(folder: Path) -> None:
    """Remove a folder; after a kill in between its name ends in `.tmp`, for `tidy` to remove."""
    doomed = folder.with_name(folder.name + ".deleted.tmp")
    _remove(doomed)
    folder.rename(doomed)
    _remove(doomed)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        path.chmod(0o700)  # what was made unreadable is ours all the same
        for folder, inner, _ in os.walk(path):
            for name in inner:
                if not (inside := Path(folder, name)).is_symlink():
                    inside.chmod(0o700)
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def put_in_place(finished: Path, target: Path) -> None:
    """Rename `finished` to `target`; an older folder stays readable until the new one is there."""
    replaced = target.with_name(target.name + REPLACED)
    if target.exists() and any(target.iterdir()):  # an empty folder is replaced by the rename
        target.rename(replaced)
    finished.rename(target)
    sync_folder(target.parent)
    if replaced.exists():
        discard(replaced)


def point(run_dir: Path, name: str, target: Path) -> None:
    """Make `name` a relative symbolic link to `target`, atomically."""
    link = run_dir / f"{name}.link.tmp"
    link.unlink(missing_ok=True)
    link.symlink_to(target.name)
    link.replace(run_dir / name)
    sync_folder(run_dir)


def link_or_copy(source: Path, target: Path) -> None:
    """Hard-link a file; copy it if the target is on another file system or one without links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
