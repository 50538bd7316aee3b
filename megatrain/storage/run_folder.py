"""A run's folder: its lock, and its checkpoints with the names `last`, `best` and `final`.

Every change is one rename: a kill at any instant leaves either the old state or the new one. Names
that end in `.tmp` are work in progress and never read; the next save removes them.
"""

from __future__ import annotations

import fcntl
import math
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from os.path import isfile  # false where Path's raises: in an unreadable folder
from pathlib import Path, PurePath
from threading import Lock

from megatrain.durable import sync_folder
from megatrain.errors import ConfigError, StorageError, logger, storage_error, system_errors
from megatrain.storage.hashed_file import write_bytes
from megatrain.storage.manifest import CHECKPOINT, MANIFEST, REPLACED, Manifest, read_manifest

LINKS = ("last", "best", "proven")
FINAL = "final"
CONFIG = "config.json"  # of a model
CARD = "README.md"  # of `final/`
UPLOADING = "uploading"  # links to a checkpoint that goes to the hub
PASSENGERS = "passengers"  # files of tensors that are the same in all checkpoints
# Work in progress. Only names that are written here: others that end so are somebody else's.
UNFINISHED = re.compile(
    rf"(checkpoint-\d+|{FINAL}|{PASSENGERS})({REPLACED}|({REPLACED})?(\.deleted)?\.tmp)"
    rf"|({'|'.join(LINKS)})\.link\.tmp"
)
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_PRUNING = Lock()  # a save beside training may, while a step proves the one before
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


@dataclass(frozen=True)
class RunLock:
    """The lock of a run's folder. warning: of a folder that may not be ours alone."""

    run_dir: Path
    descriptor: int
    warning: str

    def in_place(self) -> bool:
        """False if the folder was removed or replaced since it was locked."""
        try:
            there, held = (self.run_dir / LOCK).stat(), os.fstat(self.descriptor)
        except FileNotFoundError:
            return False
        except OSError:  # which the save itself meets
            return True
        return (there.st_dev, there.st_ino) == (held.st_dev, held.st_ino)


@contextmanager
def run_lock(run_dir: Path) -> Iterator[RunLock]:
    """Keep other runs out of a run's folder while the block lasts, or until the process dies.

    Makes the folder if needed, readable by its owner only.

    Raises:
        ConfigError: another process holds it, or others may write in it.
        StorageError: the folder cannot be made.
    """
    warning = "" if make_run_dir(run_dir) else f"{run_dir}: {WITHOUT_MODES}"
    with system_errors(run_dir / LOCK, "write it", ANOTHER_OUTPUT):
        fd = os.open(run_dir / LOCK, LOCK_FILE, 0o600)
    _locks.add(fd)
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
        yield RunLock(run_dir, fd, warning)
    finally:
        if fd in _locks:  # not in a fork
            _locks.remove(fd)
            os.close(fd)  # releases the lock


def holder(run_dir: Path) -> int:
    """The process of this host that runs in the folder. Raises ConfigError and StorageError."""
    lock = run_dir / LOCK
    with system_errors(lock, "read it"):
        number = lock.read_text(errors="replace").strip() if lock.exists() else ""
    files = Path(f"/proc/{number}/fd")
    with suppress(OSError):  # a file was closed meanwhile, or the process is another user's
        if number.isdecimal() and any(
            isfile(file) and file.samefile(lock) for file in files.iterdir()
        ):
            return int(number)
    raise ConfigError(
        f"{run_dir}: no process of yours on this host runs in it; where it runs, send SIGUSR2 to it"
    )


def make_run_dir(run_dir: Path) -> bool:
    """Create the folder with mode 0700, if it is not there. False: its file system has no modes to
    say who may write in it. Raises ConfigError if others may write in it, and StorageError."""
    try:
        made = [path for path in (run_dir, *run_dir.parents) if not path.exists()]
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        run_dir.mkdir(mode=0o700, exist_ok=True)
        for path in made:
            sync_folder(path.parent)
        found = run_dir.stat()
        if found.st_uid == os.geteuid() and not found.st_mode & WRITABLE_BY_OTHERS:
            return True
        with tempfile.TemporaryFile(dir=run_dir) as file:  # which is made for its owner alone
            ours = os.fstat(file.fileno())
    except OSError as error:
        raise storage_error(run_dir, error, "make the run folder", ANOTHER_OUTPUT) from error
    if found.st_uid != ours.st_uid:
        raise ConfigError(f"{run_dir}: belongs to another user; {ANOTHER_OUTPUT} folder")
    if ours.st_uid != os.geteuid() or ours.st_mode & WRITABLE_BY_OTHERS:
        return False
    safe = f"make it yours alone (chmod go-w {run_dir})"
    raise ConfigError(f"{run_dir}: others may write in it; {safe}, or {ANOTHER_OUTPUT} folder")


def checkpoint_name(step: int) -> str:
    return f"checkpoint-{step}"


def checkpoints(run_dir: Path) -> list[Path]:
    """Checkpoint folders by step, with one whose replacement was cut off. Raises StorageError."""
    with system_errors(run_dir, LOOK):
        if not run_dir.is_dir():
            return []
        there = [path for path in run_dir.iterdir() if path.is_dir() and not path.is_symlink()]
    folders = [path for path in there if CHECKPOINT.fullmatch(path.name.removesuffix(REPLACED))]
    return sorted(folders, key=lambda p: (int(re.findall(r"\d+", p.name)[0]), p.name))


def has_begun(run_dir: Path) -> bool:
    """True if the folder holds a run that has saved something. Raises StorageError."""
    return bool(checkpoints(run_dir)) or (run_dir / FINAL).exists()


def bytes_needed(folders: Iterable[Path]) -> int:
    """Disk space of folders, a file with several names once; 0 if a file cannot be read."""
    try:
        stats = [path.stat() for folder in folders for path in folder.rglob("*") if path.is_file()]
    except OSError:  # removed by another process, or unreadable: not ours to count on
        return 0
    return sum({(stat.st_dev, stat.st_ino): stat.st_size for stat in stats}.values())


def bytes_of_checkpoints(run_dir: Path) -> int:
    """Disk space that the run's checkpoints take."""
    return bytes_needed([*checkpoints(run_dir), run_dir / FINAL])


def write_text(path: Path, text: str) -> None:
    """Replace a small file as a whole; a kill leaves the old one. Raises StorageError."""
    partial = path.with_name(path.name + ".tmp")
    write_bytes(partial, text.encode())
    with system_errors(path, "write it"):
        partial.replace(path)
        sync_folder(path.parent)


@contextmanager
def new_folder(target: Path, partial: Path) -> Iterator[Path]:
    """Give the empty folder `partial` to fill, and rename it to `target` at the end. A failure
    removes it; an OSError becomes a StorageError."""
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
    """Remove or finish what a killed process left half done, and mend links that lead nowhere."""
    left = (path for path in run_dir.iterdir() if UNFINISHED.fullmatch(path.name))
    for path in sorted(left, key=lambda path: path.name.endswith(REPLACED)):
        original = run_dir / path.name.removesuffix(REPLACED)
        if original == path:
            _remove(path)
        elif original.exists():
            discard(path)
        else:
            path.rename(original)
    mend_links(run_dir)


def discard(folder: Path) -> None:
    """Remove a folder; after a kill in between its name ends in `.tmp`, for `tidy` to remove."""
    doomed = folder.with_name(folder.name + ".deleted.tmp")
    _remove(doomed)
    folder.rename(doomed)
    _remove(doomed)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)  # what stays is never read
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


# -- saves ----------------------------------------------------------------------------------------

STATE = "state.json"  # where the run is; a folder without it holds a model, and no run to resume
RUN_ONLY = (STATE, "optimizer")  # of a checkpoint, what is no part of a model folder


def manifest_of(folder: Path) -> Manifest | None:
    """The folder's manifest; None if it has none that is intact."""
    try:
        return read_manifest(folder)
    except StorageError:
        return None


def sequence_of(folder: Path, unreadable: float = 0) -> float:
    """The save number of a folder; `unreadable` if its manifest is missing or damaged."""
    manifest = manifest_of(folder)
    return unreadable if manifest is None else manifest.sequence


def next_sequence(run_dir: Path) -> int:
    """The number of the next save: above all that are there, `final/` of a lost one included."""
    return int(max(map(sequence_of, (*checkpoints(run_dir), run_dir / FINAL)))) + 1


def holds_state(folder: Path) -> bool:
    """True unless the folder is intact and holds no more than a model."""
    manifest = manifest_of(folder)
    return manifest is None or STATE in manifest.files


def model_files(manifest: Manifest) -> list[str]:
    """The names of the files that are the model's, and not the run's."""
    return [name for name in sorted(manifest.files) if PurePath(name).parts[0] not in RUN_ONLY]


def newest_first(run_dir: Path) -> list[Path]:
    """Checkpoints, and `final/` where it is one, too; it comes behind the one of the same save.
    Unreadable ones are first: each may have been the newest, so each gets its warning."""
    found, final = checkpoints(run_dir), run_dir / FINAL
    if final.is_dir() and holds_state(final):
        found.append(final)
    return sorted(found, key=lambda path: sequence_of(path, math.inf), reverse=True)


def find_checkpoint(run_dir: Path, which: str | None = None) -> Path:
    """The folder of the checkpoint "last", "best", "final", "checkpoint-200" or "200"; by default
    the newer of final and last, or `run_dir` if that is a checkpoint itself. Raises ConfigError and
    StorageError."""
    names = [FINAL, "last"] if which is None else [which, f"checkpoint-{which}"]
    inside = [run_dir / name for name in names if Path(name).name == name]
    with system_errors(run_dir, LOOK):
        if which is None and (run_dir / MANIFEST).is_file():
            return run_dir
        if found := [path for path in inside if isfile(path / MANIFEST)]:
            taken = max(found, key=sequence_of)  # of equals the first
            for path in inside:
                if path != taken and path.is_dir() and manifest_of(path) is None:
                    logger.warning(f"{path}: is damaged; {taken.resolve().name} is used instead")
            return taken.resolve()
        there = [path.name for path in checkpoints(run_dir)]
        there += [name for name in (*LINKS, FINAL) if (run_dir / name).exists()]
    raise ConfigError(
        f"{run_dir}: has no checkpoint {which or 'to use'}; "
        f"there is {', '.join(there) or 'none at all'}"
    )


def with_state(folder: Path) -> Path:
    """The checkpoint that `final/` was made of, if it is still there; else the folder itself."""
    if holds_state(folder):
        return folder
    of_the_same = (p for p in checkpoints(folder.parent) if sequence_of(p) == sequence_of(folder))
    return next(of_the_same, folder)


def newer_than(run_dir: Path, checkpoint: Path) -> list[Path]:
    """The checkpoints of later saves."""
    saved = sequence_of(checkpoint)
    return [path for path in checkpoints(run_dir) if sequence_of(path) > saved]


def mend_links(run_dir: Path) -> None:
    """Let `last` point to the newest where it leads nowhere; remove others that do."""
    for link in (run_dir / name for name in LINKS):
        if not link.is_symlink() or link.exists():
            continue
        left = sorted(checkpoints(run_dir), key=sequence_of) if link.name == "last" else []
        if left:
            point(run_dir, link.name, left[-1])
        else:
            link.unlink()


def prove(run_dir: Path, checkpoint: Path, keep: int) -> None:
    """Note that a finite step followed the checkpoint: it is kept until another is proven."""
    with system_errors(run_dir, "write in it"):
        point(run_dir, "proven", checkpoint)
        prune(run_dir, keep)


def prune(run_dir: Path, keep: int, abandoned: Collection[Path] = ()) -> None:
    """Remove all checkpoints but the newest `keep` and targets of links, and all of `abandoned`."""
    with _PRUNING:
        for path in abandoned:
            discard(path)
        if abandoned:
            mend_links(run_dir)
        by_age = sorted(checkpoints(run_dir), key=sequence_of, reverse=True)
        pointed = {(run_dir / name).resolve() for name in LINKS}
        for path in by_age[keep:]:
            if path.resolve() not in pointed:
                discard(path)  # `final` has files of its own: links
