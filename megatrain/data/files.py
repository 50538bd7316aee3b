"""Resolve a text that names data: a file, a folder, a glob or a data set of the hub.

Its existence is checked; nothing of it is read.
"""

from __future__ import annotations

import csv
import difflib
import glob
import gzip
import json
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from io import TextIOWrapper
from pathlib import Path
from typing import IO, Any, AnyStr, BinaryIO, cast

from megatrain.data.samples import is_given, json_value, unpadded, without_nulls
from megatrain.errors import DataError, if_forbidden
from megatrain.heartbeat import DATA_READ, beat

TEXT_PIECE_BYTES = 8192  # pieces of a text file: small enough to hold out a share of one file
NEARBY = 200  # characters on each side of a piece's borders that may change its tokens
PACKED = ".gz"
TABLE_ROWS = 1024  # rows in memory at a time
# of a line, unpacked: many times any context, and text8 is a line of 95 MiB; a line that a .gz
# of megabytes makes of one letter must not fill the memory
LINE_BYTES = 256 << 20
UNPACKED_BYTES = 4 << 30  # of what is read whole
# not only broken texts: numbers of thousands of digits, thousands of nested brackets
UNREADABLE_JSON = (ValueError, RecursionError)


@dataclass(frozen=True)
class RawRow:
    """One row as read. `where` is `file:line` or `file row n`; rows of one `file` share a format. A
    piece of a document has the text `before` and `after` it beside it: tokenizers look there.
    `problem` says why it could not be read. `part` is the number of its source among several, and
    `format` the one named for that source."""

    where: str
    file: str
    value: object = None
    problem: str | None = None
    begins: bool = True
    ends: bool = True  # False: the next row is the next piece of the same document
    before: str = ""
    after: str = ""
    part: int = 0
    format: str = "auto"


def type_of(path: Path) -> str:
    """The suffix of a data file, without that of its packing: `.jsonl` of `rows.jsonl.gz`."""
    name = path.name.lower()
    return Path(name.removesuffix(PACKED)).suffix


def read_file(path: Path) -> Iterator[RawRow]:
    """The rows of a file of a known type. Raises DataError if it cannot be read."""
    try:
        yield from READERS[type_of(path)](path)
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise DataError(f"{path}: broken gzip file: {error}") from error
    except OSError as error:
        reason = (error.strerror or str(error)).splitlines()[0]
        raise DataError(f"{path}: cannot be read: {reason}") from error


def _open(path: Path) -> BinaryIO:
    if path.suffix.lower() == PACKED:
        return cast(BinaryIO, gzip.open(path, "rb"))
    return path.open("rb")


def _lines(path: Path, file: IO[AnyStr]) -> Iterator[AnyStr]:
    """The lines of a data file. Raises DataError for one over LINE_BYTES, before it is all read."""
    number, packed = 0, path.suffix.lower() == PACKED
    while line := file.readline(LINE_BYTES + 1):
        number += 1
        if not packed:
            beat(DATA_READ, len(line))
        if len(line) > LINE_BYTES:
            advice = "a row's text must be shorter, each row in a line of its own"
            raise DataError(f"{path}:{number}: a line of over {LINE_BYTES >> 20} MiB; {advice}")
        yield line


def _whole(path: Path) -> bytearray:
    """All bytes of a file, unpacked. Raises DataError for a packed one over UNPACKED_BYTES."""
    data, packed = bytearray(), path.suffix.lower() == PACKED
    with _open(path) as file:
        while piece := file.read(1 << 20):
            data += piece
            if packed and len(data) > UNPACKED_BYTES:
                size = f"{UNPACKED_BYTES >> 30} GiB"
                raise DataError(f"{path}: over {size} unpacked; unpack it first")
    return data


def numbered(rows: Iterable[object], name: str, size: int = 0) -> Iterator[RawRow]:
    """Rows whose place is `name row 1` and so on; each counts as `size` of what is read."""
    for number, row in enumerate(rows, start=1):
        beat(DATA_READ, size)
        yield RawRow(f"{name} row {number}", name, row)


def read_jsonl(path: Path) -> Iterator[RawRow]:
    """One JSON value a line; blank lines are no rows. Only newlines end a line."""
    with _open(path) as file:
        for number, line in enumerate(_lines(path, file), start=1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            row = RawRow(f"{path}:{number}", str(path))
            try:
                value = json_value(line.decode())
                yield replace(row, value=unpadded(value) if b"null" in line else value)
            except UNREADABLE_JSON as error:
                yield replace(row, problem=_problem_of(error))


def _problem_of(error: ValueError | RecursionError) -> str:
    """The reason for which JSON cannot be read."""
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 at byte {error.start}"
    if isinstance(error, json.JSONDecodeError):
        return f"broken JSON at column {error.colno}: {error.msg}"
    return f"unreadable JSON: {error}"


def _read_json(path: Path) -> Iterator[RawRow]:
    """A list of rows, `{"data": [rows]}`, a single row, or JSON lines under another name."""
    try:
        value = json_value(_whole(path).decode("utf-8-sig"))
    except UNREADABLE_JSON as error:
        line = ""
        if isinstance(error, json.JSONDecodeError):
            if error.msg == "Extra data":
                yield from read_jsonl(path)
                return
            line = f":{error.lineno}"
        raise DataError(f"{path}{line}: {_problem_of(error)}") from error
    if isinstance(value, dict):
        lists = [name for name, of in value.items() if isinstance(of, list) and is_given(of)]
        if "data" in lists and len(lists) > 1:
            raise DataError(f"{path}: has several lists ({', '.join(lists)}); give each its file")
        value = value["data"] if isinstance(value.get("data"), list) else [value]
    if not isinstance(value, list):
        raise DataError(f"{path}: expected a list of rows or an object with a list under 'data'")
    each = path.stat().st_size // max(1, len(value))
    yield from numbered(map(unpadded, value), str(path), each)


def decoded(path: Path) -> Iterator[RawRow]:
    """A text file is one document in pieces cut at line ends; each says if it begins or ends it."""
    piece: list[str] = []
    size, first, file, before = 0, 1, str(path), ""

    def row(after: str, ends: bool) -> RawRow:
        value, begins = {"text": "".join(piece)}, first == 1
        return RawRow(f"{path}:{first}", file, value, None, begins, ends, before, after[:NEARBY])

    with _open(path) as opened:
        for number, line in enumerate(_lines(path, opened), start=1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                problem = f"not UTF-8 at byte {error.start} of the line"
                yield RawRow(f"{path}:{number}", file, problem=problem)
                continue
            if size >= TEXT_PIECE_BYTES and text.strip():  # so that no piece is blank
                yield row(text, ends=False)
                before = "".join(piece)[-NEARBY:]
                piece, size, first = [], 0, number
            piece.append(text)
            size += len(line)
    if piece:
        yield row("", ends=True)


def read_csv(path: Path) -> Iterator[RawRow]:
    """Rows of texts under a header line, separated by commas, or by tabs in a .tsv."""
    delimiter = "\t" if type_of(path) == ".tsv" else ","
    csv.field_size_limit(LINE_BYTES)  # the default refuses texts over 128 KiB
    try:
        with _open(path) as file, TextIOWrapper(file, "utf-8-sig", newline="") as lines:
            reader = csv.DictReader(_lines(path, lines), strict=True, delimiter=delimiter)
            named = list(filter(None, reader.fieldnames or ()))
            if twice := [name for name in named if named.count(name) > 1]:
                raise DataError(f"{path}:1: the header has the column {twice[0]!r} twice; keep one")
            for row in reader:
                problem = "more fields than the header has" if None in row else None
                # CSV cannot tell an empty text from none
                filled = {key: value for key, value in row.items() if value != ""}
                yield RawRow(f"{path}:{reader.line_num}", str(path), filled, problem)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8: {error.reason}") from error
    except csv.Error as error:
        raise DataError(f"{path}: broken {type_of(path)[1:].upper()}: {error}") from error


def read_table(path: Path) -> Iterator[RawRow]:
    """Rows of a Parquet or Arrow file, a part of it in memory at a time."""
    import pyarrow

    number = 0
    try:
        for batch in _batches(path):
            batch.validate(full=True)  # offsets that lie outside would be read all the same
            places = json_in(pyarrow.struct(batch.schema))
            for start in range(0, len(batch), TABLE_ROWS):
                part = batch.slice(start, TABLE_ROWS)
                for place in range(len(part) if part.nbytes > LINE_BYTES else 0):
                    if part.slice(place, 1).nbytes > LINE_BYTES:
                        size = f"over {LINE_BYTES >> 20} MiB; a row's text must be shorter"
                        raise DataError(f"{path} row {number + place + 1}: {size}")
                for row in part.to_pylist():
                    number += 1
                    value = without_nulls(row, places, json_value)
                    yield RawRow(f"{path} row {number}", str(path), value)
    # flipped bytes also end in these
    except (pyarrow.ArrowException, ValueError, KeyError, MemoryError) as error:
        kind, reason = type_of(path)[1:].capitalize(), str(error).splitlines()[0]
        raise DataError(f"{path}: broken {kind} after row {number}: {reason}") from error


def json_in(kind: Any) -> Any:
    """Places of JSON in a type of Arrow: True for JSON and lists of it, an object's by field."""
    if hasattr(kind, "value_type"):
        return json_in(kind.value_type)
    if str(kind).startswith("struct<"):
        return {field.name: json_in(field.type) for field in kind}
    return getattr(kind, "extension_name", "") == "arrow.json"


def _batches(path: Path) -> Iterator[Any]:
    """Batches of a file that is read from anywhere; what is packed is unpacked into memory."""
    from pyarrow import BufferReader, OSFile, ipc, parquet

    packed = path.suffix.lower() == PACKED
    with BufferReader(_whole(path)) if packed else OSFile(str(path)) as stream:
        if type_of(path) == ".parquet":
            table, size = parquet.ParquetFile(stream), path.stat().st_size
            for batch in table.iter_batches(TABLE_ROWS):
                yield batch
                beat(DATA_READ, size * len(batch) // table.metadata.num_rows)
            return
        if stream.read(6) == b"ARROW1":
            file = ipc.open_file(stream)
            for number in range(file.num_record_batches):
                yield file.get_batch(number)
                beat(DATA_READ, path.stat().st_size // file.num_record_batches)
        else:  # what `datasets` writes
            stream.seek(0)
            yield from ipc.open_stream(stream)


READERS: dict[str, Callable[[Path], Iterator[RawRow]]] = {
    ".jsonl": read_jsonl,
    ".ndjson": read_jsonl,
    ".json": _read_json,
    ".txt": decoded,
    ".md": decoded,
    ".csv": read_csv,
    ".tsv": read_csv,
    ".parquet": read_table,
    ".arrow": read_table,
}


HUB_TIMEOUT_S = 4.0
_IN_PYTHON = re.compile(r"[\d,]+ rows given in Python, digest [0-9a-f]{32}")  # see `sources.named`
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

    @property
    def is_saved(self) -> bool:
        """True if `save_to_disk` wrote the folder."""
        with if_forbidden(DataError, self.paths[0]):
            names = {found.name for found in self.paths[0].iterdir()}
        return any(marks <= names for marks in SAVED)


def check_source(spec: str) -> None:
    """Raises DataError unless `spec` names a file or files of known types, a folder that holds
    such, or a name that the hub knows. Takes HUB_TIMEOUT_S at most."""
    named = resolve_name(spec)
    if folder := named.folder:
        if not named.is_saved:
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
        raise DataError(f"{path}: no such file{near_path(path)}")
    return Named(spec, name, (), config, split)


def parse_hub_spec(spec: str) -> tuple[str, str | None, str | None]:
    """(name, config, split) of `name`, `name:split` or `name:config:split`; slices are splits."""
    parts = re.split(r":(?![^\[]*\])", spec)  # not the colon inside brackets
    if len(parts) > 3 or not all(parts):
        forms = "a file, a folder, or a data set as name, name:split or name:config:split"
        raise DataError(f"{spec}: expected {forms}")
    config = parts[1] if len(parts) == 3 else None
    return parts[0], config, parts[-1] if len(parts) > 1 else None


def files_in(folder: Path) -> tuple[list[Path], list[Path]]:
    """(data files, other files) of a folder and those below it, in order, but for hidden ones.
    Raises DataError if no file has data, and for what cannot be read."""
    files, others = list[Path](), list[Path]()
    with if_forbidden(DataError, folder):
        found = sorted(_below(folder))
    for path in found:
        if path.is_dir():
            if path.is_symlink():
                raise DataError(f"{path}: is a link to a folder; name that in data.train by itself")
            continue
        is_data = type_of(path) in READERS.keys() - NOT_IN_FOLDERS and path.name not in ABOUT_DATA
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
        raise DataError(f"{text!r}: cannot be read: {error}") from None
    return path


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


def near_path(path: Path) -> str:
    """A hint at what the user may have meant by a path that does not exist."""
    if not path.parent.is_dir():
        return f" (nor is there a folder {path.parent})"
    close = list[str]()
    with suppress(OSError):  # the folder may not be listed
        close = difflib.get_close_matches(path.name, os.listdir(path.parent), n=1)
    return f" (did you mean {path.parent / close[0]}?)" if close else ""


def _ask_hub(named: Named) -> None:
    """Raise DataError for a name that the hub does not know, or does not answer for, unless
    `datasets` has it in its caches, which takes it from there."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        hub = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
        hub.dataset_info(named.name, timeout=HUB_TIMEOUT_S)
        return
    except (HFValidationError, RepositoryNotFoundError):
        why = "no data set of the hub (owner/name)"
    except Exception as error:  # noqa: BLE001  whatever the network's library raises
        if _is_cached(named.name):
            return
        why = f"the hub does not answer ({type(error).__name__})"
    near = near_path(Path(named.name))
    raise DataError(f"{named.spec}: no such file or folder{near}; and {why}")


def _is_cached(name: str) -> bool:
    """True if `datasets` has a data set of the hub, or its files, on this machine."""
    from huggingface_hub import constants

    def bare(text: str) -> str:
        return re.sub(r"[\W_]", "", text).lower()

    made = Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME, "datasets"))
    known = [*made.glob("*"), *Path(constants.HF_HUB_CACHE).glob("datasets--*")]
    return any(bare(found.name.removeprefix("datasets--")) == bare(name) for found in known)
