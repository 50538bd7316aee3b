"""Where rows come from: files, folders, saved data sets, the hub, or lists and data sets in RAM."""

from __future__ import annotations

import difflib
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from megatrain.data.fields import without_nulls
from megatrain.data.readers import READERS, RawRow, numbered
from megatrain.errors import DataError

if TYPE_CHECKING:
    import datasets

    DataSet: TypeAlias = datasets.Dataset | datasets.DatasetDict
    Given: TypeAlias = str | Path | Sequence[Mapping[str, object]] | DataSet

SAVED = ({"dataset_dict.json"}, {"dataset_info.json", "state.json"})  # a DatasetDict, a Dataset
SPLITS = {"train", "test", "validation", "valid", "val", "dev", "eval"}


@dataclass(frozen=True)
class Source:
    """Rows that can be read again and again. `identity` changes when the rows may have changed."""

    name: str
    identity: str
    read: Callable[[], Iterator[RawRow]]


def open_source(given: Given, split: str | None = None) -> Source:
    """Rows that are named or given.

    Named: a file, a folder of files, a folder that `save_to_disk` wrote, or a data set of the hub;
    all but a file also as `name:split`, the hub's as `name:config:split`. Given: a `Dataset` or
    `DatasetDict` of the library, or a list of dicts. The split of a data set is the only one or
    `train` unless named, and may be a slice such as `train[:1%]`. Without a split all files of a
    folder are read, else those that have it in their names.

    Raises DataError when it does not exist, has no known type or cannot be reached. Broken rows are
    no errors here: they are yielded with their problem, since to skip them is the caller's policy.
    """
    if isinstance(given, str | Path):
        return _named(str(given), split)
    if isinstance(given, list | tuple):
        if split not in (None, "train"):
            raise DataError(f"a list of rows has no splits; remove data.split: {split}")
        contents = hashlib.blake2b(repr(given).encode(), digest_size=16).hexdigest()
        return Source("list", contents, lambda: numbered(given, "list"))
    import datasets

    if isinstance(given, datasets.Dataset | datasets.DatasetDict):
        return _data_set(type(given).__name__, given, split)
    kinds = "a file, a folder, a hub id, a datasets.Dataset or a list of rows"
    raise DataError(f"expected {kinds}, not {type(given).__name__}")


def _named(spec: str, split: str | None) -> Source:
    path = Path(spec).expanduser()
    if path.is_file() or path.is_dir():
        return _local(spec, path, split)
    name, config, chosen = parse_hub_spec(spec)
    if split is not None and chosen is not None and split != chosen:
        raise DataError(f"{spec}: data.split says {split!r}; name the split once")
    folder = Path(name).expanduser()
    if config is None and folder.is_dir():
        return _local(spec, folder, chosen or split)
    if path.suffix.lower() in READERS or spec.startswith((".", "/", "~")):
        raise DataError(f"{path}: no such file{_nearest(path)}")
    import datasets

    with _in_one_sentence(f"{spec}: neither a local file nor a data set that can be loaded"):
        found = datasets.load_dataset(name, config, split=chosen or split or "train")
    return _data_set(spec, found)


def parse_hub_spec(spec: str) -> tuple[str, str | None, str | None]:
    """(name, config, split) of `name`, `name:split` or `name:config:split`; slices are splits."""
    parts = re.split(r":(?![^\[]*\])", spec)  # not the colon inside brackets
    if len(parts) > 3 or not all(parts):
        forms = "a file, a folder, or a data set as name, name:split or name:config:split"
        raise DataError(f"{spec}: expected {forms}")
    config = parts[1] if len(parts) == 3 else None
    return parts[0], config, parts[-1] if len(parts) > 1 else None


def _local(name: str, path: Path, split: str | None) -> Source:
    files, folder, known = [path], path.parent, ", ".join(READERS)
    if path.is_dir():
        if any(marks <= {found.name for found in path.iterdir()} for marks in SAVED):
            import datasets

            with _in_one_sentence(f"{path}: broken folder of save_to_disk"):
                saved = datasets.load_from_disk(str(path))
            return _data_set(name, saved, split)
        found = sorted(file for file in path.rglob("*") if file.suffix.lower() in READERS)
        hidden = re.compile(r"(^|/)\.")
        files = [file for file in found if not hidden.search(file.relative_to(path).as_posix())]
        folder = path
        if not files:
            raise DataError(f"{path}: no data files in this folder; known types are {known}")
    elif path.suffix.lower() not in READERS:
        raise DataError(f"{path}: unknown type of data file; known are {known}")
    return _files(name, files if split is None else _of_split(folder, files, split))


def _of_split(folder: Path, files: list[Path], split: str) -> list[Path]:
    """The files that have the split's name in theirs. Where none names a split, all are `train`."""
    names = {file: file.relative_to(folder).as_posix() for file in files}
    words = {file: set(re.split(r"[-._ /0-9]+", name)) for file, name in names.items()}
    if split == "train" and not any(SPLITS & found for found in words.values()):
        return files
    chosen = [file for file in files if split in words[file]]
    if not chosen:
        raise DataError(f"{folder}: no file of split {split!r} among {', '.join(names.values())}")
    return chosen


def _files(name: str, files: list[Path]) -> Source:
    def read() -> Iterator[RawRow]:
        for path in files:
            try:
                yield from READERS[path.suffix.lower()](path)
            except OSError as error:
                raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error

    stats = [(str(path.resolve()), path.stat()) for path in files]
    identity = json.dumps([(place, stat.st_size, stat.st_mtime_ns) for place, stat in stats])
    return Source(name, identity, read)


def _data_set(name: str, found: DataSet, split: str | None = None) -> Source:
    import datasets

    splits = dict(found) if isinstance(found, datasets.DatasetDict) else {"train": found}
    split = split or (next(iter(splits)) if len(splits) == 1 else "train")
    with _in_one_sentence(f"{name}: split {split!r}"):
        sizes = {key: len(rows) for key, rows in splits.items()}
        parts = datasets.ReadInstruction.from_spec(split).to_absolute(sizes)
    chosen = [splits[part.splitname].select(range(part.from_, part.to)) for part in parts]

    def read() -> Iterator[RawRow]:
        with _in_one_sentence(f"{name}: broken data set"):
            rows = itertools.chain.from_iterable(map(_as_python, chosen))
            yield from numbered(map(without_nulls, rows), name)

    # the only name that `datasets` has for "these very rows"
    return Source(name, json.dumps([name, *(rows._fingerprint for rows in chosen)]), read)


def _as_python(rows: datasets.Dataset) -> datasets.Dataset:
    """Rows of Python values, not of tensors or arrays; a transform of the user's own stays."""
    return rows if rows.format["type"] == "custom" else rows.with_format(None)


@contextmanager
def _in_one_sentence(problem: str) -> Iterator[None]:
    """`datasets` raises dozens of error types (network, hub, arrow); users need one sentence."""
    try:
        yield
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise DataError(f"{problem}: {reason[0]}") from error


def _nearest(path: Path) -> str:
    if not path.parent.is_dir():
        return f", and no folder {path.parent}"
    names = [found.name for found in path.parent.iterdir()]
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {path.parent / close[0]}?" if close else ""
