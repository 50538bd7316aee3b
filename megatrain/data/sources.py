"""Where rows come from: local files, folders and Hugging Face data sets, each row with its place for error messages."""

from __future__ import annotations

import csv
import difflib
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain.errors import DataError

if TYPE_CHECKING:
    import datasets

TEXT_PIECE_BYTES = 8192  # a text file is cut at line ends into pieces of about this size: small enough to hold out a share of one file
PARQUET_ROWS = 1024  # rows in memory at a time


@dataclass(frozen=True)
class RawRow:
    """One row as read. `where` is `file:line` or `file row n`, `file` what shares a format; `problem` says why it could not be read."""

    where: str
    file: str
    value: object = None
    problem: str | None = None
    begins: bool = True
    ends: bool = True  # False: the next row is the next piece of the same document


@dataclass(frozen=True)
class Source:
    """Rows that can be read again and again. `identity` changes when the rows may have changed."""

    name: str
    identity: str
    read: Callable[[], Iterator[RawRow]]


def open_source(spec: str | Path, split: str | None = None) -> Source:
    """A file, a folder of files, or a Hugging Face data set (`name`, `name:split`, `name:config:split`; split defaults to train).

    Raises DataError when it does not exist, has no known type or cannot be reached. Broken rows are not errors here: they are
    yielded with their problem, because whether to skip them is the caller's policy.
    """
    path = Path(spec).expanduser()
    if path.is_dir():
        files = sorted(found for found in path.rglob("*") if found.suffix.lower() in READERS and not _hidden(found.relative_to(path)))
        if not files:
            raise DataError(f"{path}: no data files in this folder; known types are {', '.join(READERS)}")
        return _file_source(str(spec), files)
    if path.is_file():
        return _file_source(str(spec), [path])
    if path.suffix.lower() in READERS or str(spec).startswith((".", "/", "~")):
        raise DataError(f"{path}: no such file{_nearest(path)}")
    return _hub_source(str(spec), split)


def _file_source(name: str, files: list[Path]) -> Source:
    for path in files:
        if path.suffix.lower() not in READERS:
            raise DataError(f"{path}: unknown type of data file; known are {', '.join(READERS)}")

    def read() -> Iterator[RawRow]:
        for path in files:
            try:
                yield from READERS[path.suffix.lower()](path)
            except OSError as error:
                raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error

    stats = [(str(path.resolve()), path.stat()) for path in files]
    identity = json.dumps([(place, stat.st_size, stat.st_mtime_ns) for place, stat in stats])
    return Source(name, identity, read)


def read_jsonl(path: Path) -> Iterator[RawRow]:
    """One JSON value a line; blank lines are no rows. Lines end at a newline only, since JSON text may hold other separators."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.strip():
                yield _parsed(line, f"{path}:{number}", str(path))


def _parsed(line: bytes, where: str, file: str) -> RawRow:
    try:
        return RawRow(where, file, json.loads(line.decode()))
    except UnicodeDecodeError as error:
        return RawRow(where, file, problem=f"not UTF-8 at byte {error.start}")
    except json.JSONDecodeError as error:
        return RawRow(where, file, problem=f"broken JSON at column {error.colno}: {error.msg}")
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, thousands of nested brackets
        return RawRow(where, file, problem=f"unreadable JSON: {error}")


def read_json(path: Path) -> Iterator[RawRow]:
    """A list of rows, `{"data": [rows]}`, a single row, or JSON lines under another name."""
    try:
        value = json.loads(path.read_bytes().decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 at byte {error.start}") from error
    except json.JSONDecodeError as error:
        if error.msg != "Extra data":
            raise DataError(f"{path}:{error.lineno}: broken JSON at column {error.colno}: {error.msg}") from error
        yield from read_jsonl(path)
        return
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: unreadable JSON: {error}") from error
    if isinstance(value, dict):
        inner = value.get("data")
        value = inner if isinstance(inner, list) else [value]
    if not isinstance(value, list):
        raise DataError(f"{path}: expected a list of rows or an object with a list under 'data'")
    for number, row in enumerate(value, start=1):
        yield RawRow(f"{path} row {number}", str(path), row)


def read_text(path: Path) -> Iterator[RawRow]:
    """A text file is one document, handed out in pieces cut at line ends; each says whether the document begins and ends with it."""
    piece: list[str] = []
    size, first = 0, 1
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if size >= TEXT_PIECE_BYTES and line.strip():  # a piece starts with a filled line, so that no piece is blank
                yield RawRow(f"{path}:{first}", str(path), {"text": "".join(piece)}, begins=first == 1, ends=False)
                piece, size, first = [], 0, number
            try:
                piece.append(line.decode("utf-8-sig" if number == 1 else "utf-8"))
                size += len(line)
            except UnicodeDecodeError as error:
                yield RawRow(f"{path}:{number}", str(path), problem=f"not UTF-8 at byte {error.start} of the line")
    if piece:
        yield RawRow(f"{path}:{first}", str(path), {"text": "".join(piece)}, begins=first == 1)


def read_csv(path: Path) -> Iterator[RawRow]:
    """Comma-separated rows under a header line."""
    csv.field_size_limit(sys.maxsize)  # the default refuses texts over 128 KiB
    try:
        with path.open(newline="", encoding="utf-8-sig") as lines:
            reader = csv.DictReader(lines, strict=True)
            for row in reader:
                problem = "more fields than the header has" if None in row else None
                filled = {key: value for key, value in row.items() if value != ""}  # CSV cannot tell an empty text from none
                yield RawRow(f"{path}:{reader.line_num}", str(path), filled, problem)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8: {error.reason}") from error
    except csv.Error as error:
        raise DataError(f"{path}: broken CSV: {error}") from error


def read_parquet(path: Path) -> Iterator[RawRow]:
    """Rows of a Parquet file, a batch in memory at a time."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(PARQUET_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield RawRow(f"{path} row {number}", str(path), row)
    except arrow.ArrowException as error:
        raise DataError(f"{path}: broken Parquet after row {number}: {error}") from error


READERS: dict[str, Callable[[Path], Iterator[RawRow]]] = {
    ".jsonl": read_jsonl,
    ".ndjson": read_jsonl,
    ".json": read_json,
    ".txt": read_text,
    ".csv": read_csv,
    ".parquet": read_parquet,
}


def _hub_source(spec: str, split: str | None) -> Source:
    name, config, chosen = parse_hub_spec(spec)
    if split is not None and chosen is not None and split != chosen:
        raise DataError(f"{spec}: data.split says {split!r}; name the split once")
    rows = _load_from_hub(name, config, chosen or split or "train", spec)

    def read() -> Iterator[RawRow]:
        for number, row in enumerate(rows, start=1):
            yield RawRow(f"{spec} row {number}", spec, row)

    return Source(spec, json.dumps([spec, rows._fingerprint]), read)  # the only name `datasets` has for "these very rows"


def parse_hub_spec(spec: str) -> tuple[str, str | None, str | None]:
    """`name`, `name:split` or `name:config:split` as (name, config, split); a split may be a slice such as `train[:1%]`."""
    parts = re.split(r":(?![^\[]*\])", spec)  # not the colon inside brackets
    if len(parts) > 3 or not all(parts):
        raise DataError(f"{spec}: expected a file, a folder, or a data set as name, name:split or name:config:split")
    config = parts[1] if len(parts) == 3 else None
    return parts[0], config, parts[-1] if len(parts) > 1 else None


def _load_from_hub(name: str, config: str | None, split: str, spec: str) -> datasets.Dataset:
    import datasets

    try:
        loaded: Any = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # foreign code with dozens of error types (network, hub, arrow); the user needs one sentence
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise DataError(f"{spec}: neither a local file nor a data set that can be loaded: {reason[0]}") from error
    rows: datasets.Dataset = loaded
    return rows


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _nearest(path: Path) -> str:
    if not path.parent.is_dir():
        return f", and no folder {path.parent}"
    close = difflib.get_close_matches(path.name, [found.name for found in path.parent.iterdir()], n=1)
    return f"; did you mean {path.parent / close[0]}?" if close else ""
