"""A run's saves: which is the newest, which one a name means, and which may go."""

from __future__ import annotations

from collections.abc import Collection
from os.path import isfile  # false where Path's raises: in an unreadable folder
from pathlib import Path, PurePath

from megatrain.errors import ConfigError, StorageError
from megatrain.storage import run_folder
from megatrain.storage.hashed_file import system_errors
from megatrain.storage.manifest import MANIFEST, Manifest, read_manifest
from megatrain.storage.run_folder import FINAL, LINKS, LOOK, checkpoints

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


def newest_first(run_dir: Path, unreadable: float = 0) -> list[Path]:
    """Checkpoints, and `final/` where it is one, too; it comes behind the one of the same save."""
    found, final = checkpoints(run_dir), run_dir / FINAL
    if final.is_dir() and holds_state(final):
        found.append(final)
    return sorted(found, key=lambda path: sequence_of(path, unreadable), reverse=True)


def find_checkpoint(run_dir: Path, which: str | None = None) -> Path:
    """The folder of the checkpoint "last", "best", "final", "checkpoint-200" or "200".

    By default the newer of final and last; then `run_dir` may also be a checkpoint's own folder.

    Raises ConfigError if there is no such checkpoint, and StorageError if that cannot be seen.
    """
    names = [FINAL, "last"] if which is None else [which, f"checkpoint-{which}"]
    inside = [run_dir / name for name in names if Path(name).name == name]
    with system_errors(run_dir, LOOK):
        if which is None and (run_dir / MANIFEST).is_file():
            return run_dir
        if found := [path for path in inside if isfile(path / MANIFEST)]:
            return max(found, key=sequence_of).resolve()  # of equals the first
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


def tidy(run_dir: Path) -> None:
    """Remove or finish what a killed process left half done, and mend links that lead nowhere."""
    run_folder.tidy(run_dir)
    mend_links(run_dir)


def mend_links(run_dir: Path) -> None:
    """Let `last` point to the newest where it leads nowhere; remove others that do."""
    for link in (run_dir / name for name in LINKS):
        if not link.is_symlink() or link.exists():
            continue
        left = sorted(checkpoints(run_dir), key=sequence_of) if link.name == "last" else []
        if left:
            run_folder.point(run_dir, link.name, left[-1])
        else:
            link.unlink()


def prove(run_dir: Path, checkpoint: Path, keep: int) -> None:
    """Note that a finite step followed the checkpoint: it is kept until another is proven.

    Raises StorageError.
    """
    with system_errors(run_dir, "write in it"):
        run_folder.point(run_dir, "proven", checkpoint)
        prune(run_dir, keep)


def prune(run_dir: Path, keep: int, abandoned: Collection[Path] = ()) -> None:
    """Remove all checkpoints but the newest `keep` and the targets of the links.

    abandoned: checkpoints that go in any case.
    """
    for path in abandoned:
        run_folder.discard(path)
    if abandoned:
        mend_links(run_dir)
    by_age = sorted(checkpoints(run_dir), key=sequence_of, reverse=True)
    pointed = {(run_dir / name).resolve() for name in LINKS}
    for path in by_age[keep:]:
        if path.resolve() not in pointed:
            run_folder.discard(path)  # `final` has files of its own: links
