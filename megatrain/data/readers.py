"""Readers of data files, one for each type; each row has its place for error messages.

Files that end in .gz as well are unpacked while they are read.
"""

from __future__ import annotations

import csv
import gzip
import json
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from io import TextIOWrapper
from pathlib import Path
from typing import Any, BinaryIO, cast

from megatrain.data.fields import is_given, json_value, without_nulls
from megatrain.errors import DataError

TEXT_PIECE_BYTES = 8192  # pieces of a text file: small enough to hold out a share of one file
NEARBY = 200  # characters on each side of a piece's borders that may change its tokens
PACKED = ".gz"
TABLE_ROWS = 1024  # rows in memory at a time
# not only broken texts: numbers of thousands of digits, thousands of nested brackets
UNREADABLE_JSON = (ValueError, RecursionError)


@dataclass(frozen=True)
class RawRow:
    """One row as read. `where` is `file:line` or `file row n`; rows of one `file` share a format.

    A piece of a document has the text `before` and `after` it beside it: tokenizers look there.
    `problem` says why it could not be read. `part` is the number of its source among several, and
    `format` the one named for that source.
    """

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


def numbered(rows: Iterable[object], name: str) -> Iterator[RawRow]:
    """Rows whose place is `name row 1` and so on."""
    for number, row in enumerate(rows, start=1):
        yield RawRow(f"{name} row {number}", name, row)


def read_jsonl(path: Path) -> Iterator[RawRow]:
    """One JSON value a line; blank lines are no rows. Only newlines end a line."""
    with _open(path) as lines:
        for number, line in enumerate(lines, start=1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            row = RawRow(f"{path}:{number}", str(path))
            try:
                yield replace(row, value=json_value(line.decode()))
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
        with _open(path) as file:
            value = json_value(file.read().decode("utf-8-sig"))
    except UNREADABLE_JSON as error:
        line = ""
        if isinstance(error, json.JSONDecodeError):
            if error.msg == "Extra data":
                yield from read_jsonl(path)
                return
            line = f":{error.lineno}"
        raise DataError(f"{path}{line}: {_problem_of(error)}") from error
    if isinstance(value, dict):
        inner = value.get("data")
        lists = [name for name, of in value.items() if isinstance(of, list) and is_given(of)]
        if isinstance(inner, list) and (others := [name for name in lists if name != "data"]):
            raise DataError(
                f"{path}: of its lists 'data' and {others[0]!r} only the first would be read; put "
                "each into a file of its own"
            )
        value = inner if isinstance(inner, list) else [value]
    if not isinstance(value, list):
        raise DataError(f"{path}: expected a list of rows or an object with a list under 'data'")
    yield from numbered(value, str(path))


def read_text(path: Path) -> Iterator[RawRow]:
    """A text file is one document in pieces cut at line ends; each says if it begins or ends it."""
    piece: list[str] = []
    size, first, file, before = 0, 1, str(path), ""

    def row(after: str, ends: bool) -> RawRow:
        value, begins = {"text": "".join(piece)}, first == 1
        return RawRow(f"{path}:{first}", file, value, None, begins, ends, before, after[:NEARBY])

    with _open(path) as lines:
        for number, line in enumerate(lines, start=1):
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
    csv.field_size_limit(sys.maxsize)  # the default refuses texts over 128 KiB
    try:
        with _open(path) as file, TextIOWrapper(file, "utf-8-sig", newline="") as lines:
            reader = csv.DictReader(lines, strict=True, delimiter=delimiter)
            for name in reader.fieldnames or ():
                if name and list(reader.fieldnames or ()).count(name) > 1:
                    raise DataError(f"{path}:1: the header has the column {name!r} twice; keep one")
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
            for start in range(0, len(batch), TABLE_ROWS):
                for row in batch.slice(start, TABLE_ROWS).to_pylist():
                    number += 1
                    yield RawRow(f"{path} row {number}", str(path), without_nulls(row))
    # flipped bytes also end in these
    except (pyarrow.ArrowException, ValueError, KeyError, MemoryError) as error:
        kind, reason = type_of(path)[1:].capitalize(), str(error).splitlines()[0]
        raise DataError(f"{path}: broken {kind} after row {number}: {reason}") from error


def _open_table(path: Path) -> Any:
    """A file that can be read from anywhere; what is packed is unpacked into memory."""
    import pyarrow

    if path.suffix.lower() != PACKED:
        return pyarrow.OSFile(str(path))
    with _open(path) as file:
        return pyarrow.BufferReader(file.read())


def _batches(path: Path) -> Iterator[Any]:
    from pyarrow import ipc, parquet

    with _open_table(path) as stream:
        if type_of(path) == ".parquet":
            yield from parquet.ParquetFile(stream).iter_batches(TABLE_ROWS)
            return
        if stream.read(6) == b"ARROW1":
            file = ipc.open_file(stream)
            yield from map(file.get_batch, range(file.num_record_batches))
        else:  # what `datasets` writes
            stream.seek(0)
            yield from ipc.open_stream(stream)


READERS: dict[str, Callable[[Path], Iterator[RawRow]]] = {
    ".jsonl": read_jsonl,
    ".ndjson": read_jsonl,
    ".json": _read_json,
    ".txt": read_text,
    ".md": read_text,
    ".csv": read_csv,
    ".tsv": read_csv,
    ".parquet": read_table,
    ".arrow": read_table,
}
