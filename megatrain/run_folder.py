"""A run's folder: who may write in it, which checkpoints it keeps, and what `last`, `best` and `final` mean.

Every change is one rename, so that a kill at any instant leaves either the old state or the new one. Names that end in `.tmp` are work in
progress and never read; the next save removes them.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from pathlib import Path
from typing import Final

from megatrain.errors import ConfigError, StorageError

CHECKPOINT = re.compile(r"checkpoint-(\d+)")
LINKS = ("last", "best")
SMALL_FILES_BYTES = 64 << 20  # allowance for a checkpoint's tokenizer, configuration and headers
REPLACED = ".replaced"  # a complete checkpoint that a new one of the same step is about to replace


class RunLock:
    """Makes the folder (readable by its owner only) and keeps other runs out of it while its block lasts, or until the process dies.

    Raises:
        ConfigError: another process holds it.
        StorageError: the folder cannot be made.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir: Final = run_dir
        self._fd = -1

    def __enter__(self) -> RunLock:
        make_run_dir(self.run_dir)
        try:
            fd = os.open(self.run_dir / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StorageError(
                f"{self.run_dir}: cannot write in the run folder: {error.strerror} (errno {error.errno}); choose another `output`"
            ) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(fd)
            raise ConfigError(
                f"{self.run_dir}: in use by another run (process {holder}); wait for it, or choose another `output` folder"
            ) from error
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
        self._fd = fd
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)  # releases the lock


def make_run_dir(run_dir: Path) -> None:
    """Create the folder with mode 0700; one that exists is left as it is."""
    try:
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        run_dir.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"{run_dir}: cannot make the run folder: {error.strerror} (errno {error.errno}); choose another `output`"
        ) from error


def checkpoint_name(step: int) -> str:
    return f"checkpoint-{step}"


def checkpoints(run_dir: Path) -> list[Path]:
    """The checkpoint folders, by step; one that was being replaced when the process died counts."""
    names = {path.name: path for path in run_dir.iterdir() if path.is_dir() and not path.is_symlink()} if run_dir.is_dir() else {}
    return sorted(
        (path for name, path in names.items() if CHECKPOINT.fullmatch(name.removesuffix(REPLACED))),
        key=lambda path: (int(path.name.removesuffix(REPLACED).partition("-")[2]), path.name),
    )


def bytes_of_checkpoints(run_dir: Path) -> int:
    """Disk space that the run's checkpoints take; a file with several names counts once."""
    folders = [*checkpoints(run_dir), *(path for path in [run_dir / "final"] if path.is_dir())]
    try:
        stats = [path.stat() for folder in folders for path in folder.rglob("*") if path.is_file()]
    except FileNotFoundError:  # another process is removing them: they are its own, and no use to us
        return 0
    return sum({(stat.st_dev, stat.st_ino): stat.st_size for stat in stats}.values())


def write_text(path: Path, text: str) -> None:
    """Replace a small file as a whole: killed in between, the old one is still there. Raises StorageError."""
    partial = path.with_name(path.name + ".tmp")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror} (errno {error.errno}); free some space there") from error


def find_checkpoint(run_dir: Path, which: str | None = None) -> Path:
    """The folder that `which` names: "last", "best", "final", "checkpoint-200" or "200"; by default final, else last.

    A checkpoint's own folder is accepted for `run_dir` if nothing is named.

    Raises:
        ConfigError: there is none of that name.
    """
    names = ["final", "last"] if which is None else [which, f"checkpoint-{which}"]
    if which is None and (run_dir / "MANIFEST.json").is_file():
        return run_dir
    for name in names:
        if (run_dir / name / "MANIFEST.json").is_file() and Path(name).name == name:
            return (run_dir / name).resolve()
    there = [path.name for path in checkpoints(run_dir)] + [name for name in (*LINKS, "final") if (run_dir / name).exists()]
    raise ConfigError(f"{run_dir}: has no checkpoint {which or 'to use'}; there is {', '.join(there) or 'none at all'}")


# -- renaming -----------------------------------------------------------------------------------------------------------------------


def sync_folder(folder: Path) -> None:
    """Make the folder's entries, renames included, survive a power loss."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def tidy(run_dir: Path) -> None:
    """Remove what a killed process left half done, and finish or undo a replacement it was in."""
    for path in [*run_dir.glob("checkpoint-*.tmp"), *run_dir.glob("final*.tmp"), *run_dir.glob("*.link.tmp")]:
        _remove(path)
    for path in [*run_dir.glob("checkpoint-*" + REPLACED), *run_dir.glob("final" + REPLACED)]:
        original = run_dir / path.name.removesuffix(REPLACED)
        if original.exists():
            discard(path)
        else:
            path.rename(original)


def discard(folder: Path) -> None:
    """Remove a folder; killed in between, it is already known to be rubbish."""
    doomed = folder.with_name(folder.name + ".deleted.tmp")
    _remove(doomed)
    folder.rename(doomed)
    _remove(doomed)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def put_in_place(finished: Path, target: Path) -> None:
    """Rename `finished` to `target`; an older folder of that name stays readable until the new one is there."""
    replaced = target.with_name(target.name + REPLACED)
    if target.exists():
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


def link_tree(source: Path, target: Path) -> None:
    """A second name for every file below `source`: hard links, or copies where the file system has none."""
    target.mkdir()
    for path in sorted(source.rglob("*")):
        other = target / path.relative_to(source)
        if path.is_dir():
            other.mkdir()
        else:
            link_or_copy(path, other)


def link_or_copy(source: Path, target: Path) -> None:
    """Hard-link a file; copy it if the target is on another file system or one without hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
