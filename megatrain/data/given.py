"""Rows that are given in Python, and the text that stands for them in a config."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from megatrain.data.fields import without_nulls
from megatrain.data.sources import open_source
from megatrain.errors import DataError

SOURCE_KEYS = {"path", "weight", "split", "format"}  # of a mapping that names a source
Given = Any  # a datasets.Dataset or a list of mappings


def named(value: object) -> tuple[object, dict[str, Given]]:
    """A config's source or sources with names in the place of rows; and the rows, by name.

    Rows are a `datasets.Dataset`, a list of mappings or a mapping of columns. All are read once,
    for the digest in their name. Raises DataError for what cannot be read so.
    """
    if (rows := rows_in(value)) is not None:
        name = name_of(rows)
        return name, {name: rows}
    found: dict[str, Given] = {}
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


def rows_in(value: object) -> Given | None:
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
            return _of_columns(value)
    if kind == "DataFrame":
        raise DataError("a DataFrame is not read; give datasets.Dataset.from_pandas(frame)")
    if isinstance(value, list | tuple) and value:
        rows = all(isinstance(row, Mapping) and "path" not in row for row in value)
        return [*value] if rows else None
    return None


def _of_columns(columns: Mapping[Any, Sequence[object]]) -> Given:
    sizes = {name: len(column) for name, column in columns.items()}
    if len({*sizes.values()}) > 1:
        told = ", ".join(f"{name} {size:,}" for name, size in sizes.items())
        raise DataError(f"columns must have as many values each, not {told}")
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def name_of(rows: Given) -> str:
    """The text that stands for rows: it has a digest of what they say, in whatever form they are
    given, so that a run which goes on knows them again."""
    digest, count = hashlib.blake2b(digest_size=16), 0
    for row in open_source(rows, identity="").read():
        digest.update(repr(without_nulls(row.value)).encode(errors="backslashreplace") + b"\n")
        count += 1
    return f"{count:,} rows given in Python, digest {digest.hexdigest()}"
