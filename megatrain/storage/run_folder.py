"""A run's folder: its lock, and its checkpoints with the names `last`, `best` and `final`.

Every change is one rename: a kill at any instant leaves either the old state or the new one. Names
that end in `.tmp` are work in progress and never read; the next save removes them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from megatrain.durable import sync_folder
from megatrain.errors import ConfigError
from megatrain.storage.hashed_file import storage_error, system_errors, write_bytes

CHECKPOINT = re.compile(r"checkpoint-(\d+)")
LINKS = ("last", "best", "proven")
FINAL = "final"
CARD = "README.md"  # of `final/`
PASSENGERS = "passengers"  # files of tensors that are the same in all checkpoints
# a complete checkpoint that a new one of the same step is about to replace
REPLACED = ".replaced"
# Work in progress. Only names that are written here: others that end so are somebody else's.
UNFINISHED = re.compile(
    rf"(checkpoint-\d+|{FINAL}|{PASSENGERS})({REPLACED}|({REPLACED})?(\.deleted)?\.tmp)"
    rf"|({'|'.join(LINKS)})\.link\.tmp"
)
SMALL_FILES_BYTES = 64 << 20  # allowance for a checkpoint's tokenizer, configuration and headers
FICLONE = 0x40049409  # of linux/fs.h
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
LOCK = ".lock"
LOCK_FILE = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
LOOK = "look for checkpoints"
WITHOUT_MODES = (
    "is on a file system without owners and modes: others may be able to change the run, and the "
    "code and text that a resume reads from it; see how it is mounted, or choose another `output`"
)
ANOTHER_OUTPUT = "choose another `output`"
_locks: set[int] = set()  # descriptors of the locks that this process holds


def _without_locks() -> None:
    """In a fork: it may end a moment after its parent, whose locks are to end with that."""
    while _locks:
        os.close(_locks.pop())


os.register_at_fork(after_in_child=_without_locks)


class RunLock:
    """Keeps other runs out of a run's folder until it is closed, or until the process dies."""

    def __init__(self, run_dir: Path) -> None:
        """Makes the folder if needed, readable by its owner only.

        Raises:
            ConfigError: another process holds it, or others may write in it.
            StorageError: the folder cannot be made.
        """
        self.run_dir = run_dir
        self.warning = ""  # of a folder that may not be ours alone
        self._fd = self._take()

    def _take(self) -> int:
        path = self.run_dir / LOCK
        if not make_run_dir(self.run_dir):
            self.warning = f"{self.run_dir}: {WITHOUT_MODES}"
        try:
            fd = os.open(path, LOCK_FILE, 0o600)
        except OSError as error:
            raise storage_error(path, error, "write it", ANOTHER_OUTPUT) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(fd)
            raise ConfigError(
                f"{self.run_dir}: in use by another run (process {holder}); "
                f"wait for it, or {ANOTHER_OUTPUT} folder"
            ) from error
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
        _locks.add(fd)
        return fd

    def in_place(self) -> bool:
        """False if the folder was removed or replaced since it was locked."""
        try:
            there, held = (self.run_dir / LOCK).stat(), os.fstat(self._fd)
        except FileNotFoundError:
            return False
        except OSError:  # which the save itself meets
            return True
        return (there.st_dev, there.st_ino) == (held.st_dev, held.st_ino)

    def close(self) -> None:
        if self._fd in _locks:  # not in a fork
            _locks.remove(self._fd)
            os.close(self._fd)  # releases the lock


@contextmanager
def run_lock(run_dir: Path) -> Iterator[RunLock]:
    """A run folder's lock while the block lasts. Raises as `RunLock`."""
    lock = RunLock(run_dir)
    try:
        yield lock
    finally:
        lock.close()


def make_run_dir(run_dir: Path) -> bool:
    """Create the folder with mode 0700, if it is not there.

    False: its file system has no owners and modes, so that they say nothing of who may write in it.

    Raises:
        ConfigError: it is there, and others may write in it.
        StorageError: it cannot be made.
    """
    try:
        made = [path for path in (run_dir, *run_dir.parents) if not path.exists()]
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        run_dir.mkdir(mode=0o700, exist_ok=True)
        for path in made:
            sync_folder(path.parent)
        found = run_dir.stat()
        if found.st_uid == os.geteuid() and not found.st_mode & WRITABLE_BY_OTHERS:
            return True
        ours = _a_file_of_ours(run_dir)
    except OSError as error:
        raise storage_error(run_dir, error, "make the run folder", ANOTHER_OUTPUT) from error
    owner = os.geteuid() if ours is None else ours.st_uid
    if found.st_uid != owner:
        raise ConfigError(f"{run_dir}: belongs to another user; {ANOTHER_OUTPUT} folder")
    if owner != os.geteuid() or (ours and ours.st_mode & WRITABLE_BY_OTHERS):
        return False
    safe = f"make it yours alone (chmod go-w {run_dir})"
    raise ConfigError(f"{run_dir}: others may write in it; {safe}, or {ANOTHER_OUTPUT} folder")


def _a_file_of_ours(folder: Path) -> os.stat_result | None:
    """The stat of a new file, made for its owner alone; None if none may be made there.

    Asked of the open file: nobody can put another in its place. May raise OSError.
    """
    try:
        fd, path = tempfile.mkstemp(dir=folder, prefix=".modes-")
    except PermissionError:
        return None
    try:
        return os.fstat(fd)
    finally:
        os.close(fd)
        os.unlink(path)


def forget_unused(run_dir: Path, also: Collection[str] = ()) -> None:
    """Remove the folder of a run that ended before it wrote more than its lock and log, and `also`.

    What cannot be removed stays.
    """
    with contextlib.suppress(OSError):
        if {path.name for path in run_dir.iterdir()} <= {LOCK, "train.log", *also}:
            shutil.rmtree(run_dir)


def checkpoint_name(step: int) -> str:
    return f"checkpoint-{step}"


def checkpoints(run_dir: Path) -> list[Path]:
    """The checkpoint folders, by step, with one that was being replaced when the process died.

    Raises StorageError.
    """
    with system_errors(run_dir, LOOK):
        if not run_dir.is_dir():
            return []
        there = [path for path in run_dir.iterdir() if path.is_dir() and not path.is_symlink()]
    folders = [path for path in there if CHECKPOINT.fullmatch(path.name.removesuffix(REPLACED))]
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
    write_bytes(partial, text.encode())
    with system_errors(path, "write it"):
        partial.replace(path)
        sync_folder(path.parent)


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
    left = [path for path in run_dir.iterdir() if UNFINISHED.fullmatch(path.name)]
    for path in left:
        if not path.name.endswith(REPLACED):
            _remove(path)
    for path in (path for path in left if path.name.endswith(REPLACED)):
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
        copy_file(source, target)


def copy_file(source: Path, target: Path) -> None:
    """Copy a file; where the file system can, as a reflink, which takes no space until a change."""
    with source.open("rb") as old, target.open("xb") as new:
        try:
            fcntl.ioctl(new.fileno(), FICLONE, old.fileno())
            return
        except OSError:
            pass
    shutil.copyfile(source, target)


def held_by_a_process(folder: Path) -> bool:
    """True if a living process holds the folder by `hold`, or that cannot be known."""
    try:
        os.close(hold(folder))
    except OSError:
        return True
    return False


def hold(folder: Path) -> int:
    """Lock a folder until the descriptor is closed, or the process dies. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd
