"""Resolve a text that names data: a file, a folder, a glob or a data set of the hub.

Its existence is checked; nothing of it is read.
"""

from __future__ import annotations

import difflib
import glob
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatrain.data.readers import PACKED, READERS, type_of
from megatrain.errors import DataError, if_forbidden

HUB_TIMEOUT_S = 4.0
_IN_PYTHON = re.compile(r"[\d,]+ rows given in Python, digest [0-9a-f]{32}")  # see given.py
SAVED = ({"dataset_dict.json"}, {"dataset_info.json", "state.json"})  # a DatasetDict, a Dataset
# A folder's README and notes are about the data; named, or in a glob, such a file is data.
NOT_IN_FOLDERS = {".md"}
ABOUT_DATA = {"dataset_infos.json"}


@dataclass(frozen=True)
class Named:
    """The data that `spec` names: `paths` (a folder, a file or the files of a glob), or a data set
    of the hub where there are none. A folder or a data set of the hub may name a split."""

    spec: str
    name: str
    paths: tuple[Path, ...] = ()
    config: str | None = None
    split: str | None = None

    @property
    def folder(self) -> Path | None:
        return self.paths[0] if self.paths and self.paths[0].is_dir() else None


def check_source(spec: str) -> None:
    """Raises DataError unless `spec` names a file or files of known types, a folder that holds
    such, or a name that the hub knows. Takes HUB_TIMEOUT_S at most."""
    named = resolve_name(spec)
    if folder := named.folder:
        if not is_saved(folder):
            files_in(folder)
    elif not named.paths:
        _ask_hub(named)


def resolve_name(spec: str) -> Named:
    """Resolve `spec`. Raises DataError for a path that does not exist."""
    if _IN_PYTHON.fullmatch(spec):
        again = "mt.resume(run, data={'train': rows}), and 'eval' if it was given so"
        raise DataError(f"{spec}: are in no file; give them again in Python, as {again}")
    path = _path(spec)
    if path.is_dir():
        return Named(spec, spec, (path,))
    if path.exists():
        return Named(spec, spec, (_known(path),))
    if re.search(r"[*?]", spec):
        found = sorted(map(Path, glob.glob(str(path), recursive=True)))
        files = tuple(_known(file) for file in found if not file.is_dir())
        if not files:
            raise DataError(f"{spec}: no file matches")
        return Named(spec, spec, files)
    name, config, split = parse_hub_spec(spec)
    folder = _path(name)
    if folder.is_dir():
        return Named(spec, name, (folder,), config, split)
    if folder.is_file():
        raise DataError(f"{spec}: {name} is a file, which has no split {split!r}; name it alone")
    if type_of(path) in READERS or spec.startswith((".", "/", "~")):
        raise DataError(f"{path}: no such file{_nearest(path)}")
    return Named(spec, name, (), config, split)


def parse_hub_spec(spec: str) -> tuple[str, str | None, str | None]:
    """(name, config, split) of `name`, `name:split` or `name:config:split`; slices are splits."""
    parts = re.split(r":(?![^\[]*\])", spec)  # not the colon inside brackets
    if len(parts) > 3 or not all(parts):
        forms = "a file, a folder, or a data set as name, name:split or name:config:split"
        raise DataError(f"{spec}: expected {forms}")
    config = parts[1] if len(parts) == 3 else None
    return parts[0], config, parts[-1] if len(parts) > 1 else None


def is_saved(folder: Path) -> bool:
    """True if `save_to_disk` wrote the folder."""
    with if_forbidden(DataError, folder):
        names = {found.name for found in folder.iterdir()}
    return any(marks <= names for marks in SAVED)


def files_in(folder: Path) -> tuple[list[Path], list[Path]]:
    """(data files, other files) of a folder and those below it, in order, but for hidden ones.

    Raises DataError if no file has data, and for devices, pipes, links that lead out of it and
    folders that may not be read.
    """
    files, others = list[Path](), list[Path]()
    with if_forbidden(DataError, folder):
        found = sorted(_below(folder))
    for path in found:
        is_data = type_of(path) in READERS.keys() - NOT_IN_FOLDERS and path.name not in ABOUT_DATA
        if path.is_symlink() and (is_data or path.is_dir()):
            _refuse_link_out(folder, path)
        if path.is_dir():
            continue
        if is_data:
            _refuse_special(path)
        (files if is_data else others).append(path)
    if not files:
        raise DataError(f"{folder}: no data files in this folder; {_known_types()}")
    return files, others


def _below(folder: Path) -> Iterator[Path]:
    """All files and folders below a folder, but for hidden ones. May raise OSError."""

    def stop(error: OSError) -> None:  # `os.walk` and `rglob` pass over what they may not list
        raise error

    for place, folders, files in os.walk(folder, onerror=stop):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(place, name) for name in [*folders, *files] if not name.startswith("."))


def _path(text: str) -> Path:
    """The path that a text means. Raises DataError if no path can be written so or looked at."""
    path = Path(text)
    try:
        path = path.expanduser()
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError, RuntimeError) as error:  # too long, half a character, no such user
        shown = text.encode(errors="backslashreplace").decode()
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise DataError(f"{shown}: cannot be read: {reason}") from None
    return path


def _refuse_link_out(folder: Path, link: Path) -> None:
    """A folder's files are its own. The hub's cache is one, too: links into the blobs beside it."""
    base, target = folder.resolve(), link.resolve()
    blobs = (place.parent / "blobs" for place in (base, *base.parents) if place.name == "snapshots")
    if not any(target.is_relative_to(home) for home in (base, *blobs)):
        ways = "put a copy there, or name it in data.train by itself"
        raise DataError(f"{link}: is a link out of the folder, to {target}; {ways}")


def _refuse_special(path: Path) -> None:
    """Raise DataError unless it can be read to an end: a pipe may never say a word."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    if not stat.S_ISREG(mode):
        raise DataError(f"{path}: is no regular file but a pipe, a socket or a device")


def _known(path: Path) -> Path:
    _refuse_special(path)
    if type_of(path) not in READERS:
        raise DataError(f"{path}: unknown type of data file; {_known_types()}")
    return path


def _known_types() -> str:
    return f"known types are {', '.join(READERS)}, each also with {PACKED}"


def _nearest(path: Path) -> str:
    if not path.parent.is_dir():
        return f", and no folder {path.parent}"
    with if_forbidden(DataError, path.parent):
        names = [found.name for found in path.parent.iterdir()]
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {path.parent / close[0]}?" if close else ""


def _ask_hub(named: Named) -> None:
    """Raise DataError for a name that the hub does not know, or that it does not answer for.

    What is in the caches of `datasets` is left to that, which takes it without the hub.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    near, name = _nearest(Path(named.name)), named.spec
    try:
        hub = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
        hub.dataset_info(named.name, timeout=HUB_TIMEOUT_S)
        return
    except (HFValidationError, RepositoryNotFoundError):
        neither = "is neither a file or folder here nor a data set of the hub"
        raise DataError(f"{name}: {neither}{near}") from None
    except OfflineModeIsEnabled:
        why = "the hub is not asked (HF_HUB_OFFLINE)"
    except Exception as error:  # noqa: BLE001  whatever the network's library raises
        why = f"the hub does not answer ({type(error).__name__})"
    if not _is_cached(named.name):
        form = "" if "/" in named.name else "; write an id as owner/name"
        raise DataError(f"{name}: no such file or folder{near}; and {why}{form}")


def _is_cached(name: str) -> bool:
    """True if `datasets` has a data set of the hub, or its files, on this machine."""
    from huggingface_hub import constants

    def bare(text: str) -> str:
        return re.sub(r"[\W_]", "", text).lower()

    made = Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME, "datasets"))
    known = ((made, name), (Path(constants.HF_HUB_CACHE), f"datasets{name}"))
    return any(
        bare(found.name) == bare(wanted)
        for folder, wanted in known
        if folder.is_dir()
        for found in folder.iterdir()
    )
