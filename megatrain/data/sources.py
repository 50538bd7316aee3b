"""Sources of rows: files, folders, saved data sets, the hub, or lists and data sets in RAM."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from megatrain.data.files import Named, RawRow, files_in, json_in, numbered, read_file, resolve_name
from megatrain.data.samples import digest_of, unpadded, without_nulls
from megatrain.errors import DataError

if TYPE_CHECKING:
    import datasets

    DataSet: TypeAlias = datasets.Dataset | datasets.DatasetDict
    Rows: TypeAlias = Sequence[Mapping[str, object]]
    Given: TypeAlias = str | Path | Rows | DataSet | Sequence["Part"]

# Words in the names of files and folders that make a folder one with splits, as for `datasets`.
_SPLITS = dict.fromkeys(("train", "training"), "train")
_SPLITS |= dict.fromkeys(("test", "testing", "eval", "evaluation"), "test")
_SPLITS |= dict.fromkeys(("validation", "valid", "val", "dev"), "validation")
HASHED_WHOLE, ENDS = 1 << 30, 1 << 20  # bytes of a file, and of each end of a larger one
_CARD = "README.md"  # may say in its head which files are which split


@dataclass(frozen=True)
class Part:
    """One of several sources: with all of them, a share of an epoch's rows that is proportional to
    its `weight`; without, its rows as it has them.

    rows: of Python, whose name `path` is (see `named`); None: they are where `path` says."""

    path: str
    weight: float | None = None
    split: str | None = None
    format: str = "auto"
    rows: Rows | DataSet | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Source:
    """Rows that can be read again and again. `identity` changes when the rows may have changed;
    `notes` say what was chosen of what the name stands for; `parts` name its sources. `size` is
    the bytes of its files, or its rows, where that is known."""

    name: str
    identity: str
    read: Callable[[], Iterator[RawRow]]
    notes: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    size: int | None = None


def open_source(
    given: Given, split: str | None = None, streaming: bool = False, identity: str | None = None
) -> Source:
    """Rows that are named or given.

    Named: a file, a glob of files, a folder of files, a folder that `save_to_disk` wrote, or a data
    set of the hub; folders and saved data sets also as `name:split`, the hub's as
    `name:config:split`. Given: a `Dataset` or `DatasetDict` of the library, or a list of dicts.
    A list of `Part` is its sources one after the other. The split of a data set is the only one or
    `train` unless named, and may be a slice such as `train[:1%]`. A folder whose files or README
    name splits is such a data set, without slices; of another, all files are read.

    streaming: what is on the hub is read from there, row by row, and not downloaded before.
    identity: of rows that are given, if it is known.

    Raises DataError when it does not exist, has no known type or cannot be reached. Broken rows are
    no errors here: they are yielded with their problem, since to skip them is the caller's policy.
    """
    if isinstance(given, str | Path):
        return _named(resolve_name(str(given)), split, streaming)
    if isinstance(given, list | tuple):
        parts = [part for part in given if isinstance(part, Part)]
        if parts and len(parts) == len(given):
            return _several(parts, split, streaming)
        if split not in (None, "train"):
            raise DataError(f"a list of rows has no splits; remove data.split: {split}")
        if identity is None:
            identity = digest_of(repr(given))
        return Source(
            "list", identity, lambda: numbered(map(unpadded, given), "list", 1), size=len(given)
        )
    import datasets

    if isinstance(given, datasets.Dataset | datasets.DatasetDict):
        found = _data_set(type(given).__name__, given, split)
        return found if identity is None else replace(found, identity=identity)
    kinds = "a file, a folder, a hub id, a datasets.Dataset or a list of rows"
    raise DataError(f"expected {kinds}, not {type(given).__name__}")


def _several(parts: Sequence[Part], split: str | None, streaming: bool) -> Source:
    opened = [
        open_source(part.path, part.split or split, streaming)
        if part.rows is None
        else open_source(part.rows, part.split or split, identity=part.path)
        for part in parts
    ]

    def read() -> Iterator[RawRow]:
        for number, (part, source) in enumerate(zip(parts, opened, strict=True)):
            for row in source.read():
                yield replace(row, part=number, format=part.format)

    name = opened[0].name + (f" and {len(parts) - 1} more" if len(parts) > 1 else "")
    identity = json.dumps([[source.identity for source in opened], [part.format for part in parts]])
    notes = tuple(chain.from_iterable(source.notes for source in opened))
    sizes = [source.size for source in opened]
    size = None if None in sizes else sum(filter(None, sizes))
    return Source(name, identity, read, notes, tuple(source.name for source in opened), size)


def _named(named: Named, split: str | None, streaming: bool) -> Source:
    spec, chosen = named.spec, named.split
    if split is not None and chosen is not None and split != chosen:
        raise DataError(f"{spec}: data.split says {split!r}; name the split once")
    split = chosen or split
    import datasets

    if folder := named.folder:
        if not named.is_saved:
            return _folder(spec, named, split)
        if named.config is not None:
            raise DataError(f"{spec}: a folder of save_to_disk has splits only, no configurations")
        with _in_one_sentence(f"{folder}: broken folder of save_to_disk"):
            saved = datasets.load_from_disk(str(folder))
        return _data_set(spec, saved, split)
    if named.paths:
        if split not in (None, "train"):
            raise DataError(
                f"{spec}: a file has no split {split!r}; name a folder with splits, or remove "
                "data.split"
            )
        return _files(spec, list(named.paths))
    notes = () if split else (f"{spec}: split 'train'",)
    with _in_one_sentence(f"{spec}: neither a local file nor a data set that can be loaded"):
        if streaming:
            builder = datasets.load_dataset_builder(named.name, named.config)
            return replace(_streamed(spec, builder, split or "train"), notes=notes)
        found = datasets.load_dataset(named.name, named.config, split=split or "train")
    return replace(_data_set(spec, found), notes=notes)


def _streamed(name: str, builder: datasets.DatasetBuilder, split: str) -> Source:
    """A data set of the hub that is read over the network as often as its rows are read."""
    rows = builder.as_streaming_dataset(split)

    def read() -> Iterator[RawRow]:
        with _in_one_sentence(f"{name}: cannot be read on"):
            yield from numbered(_as_written(rows), name)

    # of the files: their commit on the hub, or when they were written
    files = builder.config.data_files or {}
    origins = {str(key): files[key].origin_metadata for key in files}
    return Source(name, json.dumps([name, split, builder.cache_dir, origins], default=str), read)


def _folder(name: str, named: Named, split: str | None) -> Source:
    """The files of a folder; of one with splits, those of the split, `train` unless named."""
    folder = named.paths[0]
    files, others = files_in(folder)
    notes = []
    if others:
        some = ", ".join(_inside(folder, file) for file in others[:3])
        notes.append(f"{name}: {len(others)} files that hold no rows are not read: {some}")
    if splits := _splits_of(folder, files, named.config):
        known = ", ".join(splits)
        if split is None:
            (first, of_first), *_ = splits.items()
            split = first if len(of_first) == len(files) else "train"
        if split not in splits:
            ways = f"its splits are {known}; name one in data.split, or the files themselves"
            raise DataError(f"{folder}: no file of split {split!r}; {ways}")
        chosen = [file for file in files if _inside(folder, file) in splits[split]]
        notes.append(f"{name}: split {split!r} of {known}, {len(chosen)} of {len(files)} files")
        files = chosen
    elif split not in (None, "train"):
        raise DataError(f"{folder}: has no splits, so no {split!r}; remove data.split")
    return replace(_files(name, files), notes=tuple(notes))


def _splits_of(folder: Path, files: Sequence[Path], config: str | None) -> dict[str, set[str]]:
    """The splits that the folder's README declares, or else the words in the names of its folders
    or files; none if there are none."""
    card = folder / _CARD
    if config is None and not (card.is_file() and b"data_files" in card.read_bytes()):
        return _splits_named([_inside(folder, file) for file in files])
    import datasets

    # which files they are; the files are read here, which keeps their lines' places
    problem = f"{folder}: its splits cannot be found"
    with _in_one_sentence(problem), tempfile.TemporaryDirectory() as scratch:
        builder = datasets.load_dataset_builder(str(folder), config, cache_dir=scratch)
        found = builder.config.data_files or {}
    base = folder.resolve()
    return {str(split): {_inside(base, Path(file)) for file in found[split]} for split in found}


def _splits_named(names: Sequence[str]) -> dict[str, set[str]]:
    folders = [name.rpartition("/")[0] for name in names]
    for places in (folders, names):
        found: dict[str, set[str]] = {split: set() for split in _SPLITS.values()}
        for name, place in zip(names, places, strict=True):
            for word in re.split(r"[-._ /0-9]+", place.lower()):
                if split := _SPLITS.get(word):
                    found[split].add(name)
        if splits := {split: members for split, members in found.items() if members}:
            return splits
    return {}


def _inside(folder: Path, file: Path) -> str:
    return file.relative_to(folder).as_posix()


def _files(name: str, files: list[Path]) -> Source:
    identity = json.dumps([(str(path.resolve()), *_content_of(path)) for path in files])
    size = sum(path.stat().st_size for path in files)
    return Source(name, identity, lambda: chain.from_iterable(map(read_file, files)), size=size)


def _content_of(path: Path) -> tuple[object, ...]:
    """A hash of a file; of a large one its clocks, too (that of the inode is not copied by any
    tool), and a hash of both ends."""
    with path.open("rb") as file:
        stat = os.fstat(file.fileno())
        if stat.st_size <= HASHED_WHOLE:
            return (hashlib.file_digest(file, "blake2b").hexdigest(),)
        begin = file.read(ENDS)
        file.seek(-ENDS, os.SEEK_END)
        return (digest_of(begin + file.read()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


def _data_set(name: str, found: DataSet, split: str | None = None) -> Source:
    import datasets

    splits = dict(found) if isinstance(found, datasets.DatasetDict) else {"train": found}
    named, known = split is not None, ", ".join(splits)
    split = split or (next(iter(splits)) if len(splits) == 1 else "train")
    with _in_one_sentence(f"{name}: split {split!r}"):
        sizes = {key: len(rows) for key, rows in splits.items()}
        parts = datasets.ReadInstruction.from_spec(split).to_absolute(sizes)
    chosen = [splits[part.splitname].select(range(part.from_, part.to)) for part in parts]

    def read() -> Iterator[RawRow]:
        # Python values, not tensors or arrays; a transform of the user's own stays
        forms = (one if one.format["type"] == "custom" else one.with_format(None) for one in chosen)
        with _in_one_sentence(f"{name}: broken data set"):
            yield from numbered(chain.from_iterable(map(_as_written, forms)), name, 1)

    # the only name that `datasets` has for "these very rows"
    identity = json.dumps([name, *(rows._fingerprint for rows in chosen)])
    notes = () if named or len(splits) == 1 else (f"{name}: split {split!r} of {known}",)
    return Source(name, identity, read, notes, size=sum(map(len, chosen)))


def _as_written(rows: DataSet | datasets.IterableDataset) -> Iterator[object]:
    """Rows of the library without what Arrow fills objects with."""
    import pyarrow

    places = json_in(pyarrow.struct(rows.features.arrow_schema)) if rows.features else None
    return (without_nulls(row, places) for row in rows)


@contextmanager
def _in_one_sentence(problem: str) -> Iterator[None]:
    """`datasets` raises dozens of error types (network, hub, arrow); users need one sentence."""
    try:
        yield
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise DataError(f"{problem}: {reason[0]}") from error


SOURCE_KEYS = {"path", "weight", "split", "format"}  # of a mapping that names a source
InMemory = Any  # a datasets.Dataset or a list of mappings


def named(value: object) -> tuple[object, dict[str, InMemory]]:
    """A config's source or sources with names in the place of rows; and the rows, by name. All are
    read once, for the digest in their name. Raises DataError for what cannot be read so."""
    if (rows := _rows_in(value)) is not None:
        name = name_of_rows(rows)
        return name, {name: rows}
    found: dict[str, InMemory] = {}
    if isinstance(value, list | tuple):
        names = []
        for one in value:
            name_or_one, more = named(one)
            names.append(name_or_one)
            found |= more
        return names, found
    if isinstance(value, Mapping) and "path" in value:
        path, found = named(value["path"])
        return {**value, "path": path}, found
    return value, found


def _rows_in(value: object) -> InMemory | None:
    """Rows, if the value is or holds such. Raises DataError for rows in a form that is not read."""
    library = sys.modules.get("datasets")  # without it nothing can be one of its kinds
    kind = type(value).__name__
    if library is not None and isinstance(value, library.Dataset):
        return value
    if library is not None and isinstance(value, library.IterableDataset):
        raise DataError(
            f"an {kind} has no rows that could be known again; name its files or hub id and set "
            "data.streaming, or give a Dataset"
        )
    if isinstance(value, Mapping) and value and not value.keys() <= SOURCE_KEYS:
        if library is not None and all(isinstance(one, library.Dataset) for one in value.values()):
            splits = ", ".join(map(str, value))
            raise DataError(f"a DatasetDict has several splits ({splits}); give one of them")
        if all(isinstance(column, list | tuple) for column in value.values()):
            sizes = [len(column) for column in value.values()]
            if len({*sizes}) > 1:
                raise DataError(f"columns must have as many values each, not {sizes}")
            return [dict(zip(value, row, strict=True)) for row in zip(*value.values(), strict=True)]
    if kind == "DataFrame":
        raise DataError("a DataFrame is not read; give datasets.Dataset.from_pandas(frame)")
    if isinstance(value, list | tuple) and value:
        rows = all(isinstance(row, Mapping) and "path" not in row for row in value)
        return [*value] if rows else None
    return None


def name_of_rows(rows: InMemory) -> str:
    """The text that stands for rows: it has a digest of what they say, in whatever form they are
    given, so that a run which goes on knows them again."""
    digest, count = hashlib.blake2b(digest_size=16), 0
    for row in open_source(rows, identity="").read():
        digest.update(repr(row.value).encode(errors="backslashreplace") + b"\n")
        count += 1
    return f"{count:,} rows given in Python, digest {digest.hexdigest()}"
