"""Fields of a row: there, of their type and not empty, or the row is refused in a sentence."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping

from megatrain.errors import DataError

Row = Mapping[str, object]
NO_IMAGES = "images in the data are not supported yet"


class RowError(DataError):
    """A row cannot be trained on. The message says why; the caller adds file and line."""


def json_value(text: str) -> object:
    """The value that JSON text means. Raises ValueError, also for an object with a key twice, of
    which one would be lost."""
    return json.loads(text, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} is twice in one object; keep one")
    return found


def is_given(value: object) -> bool:
    """False for a null and for an empty text, list or object, which say nothing."""
    return bool(value) if isinstance(value, str | list | tuple | dict) else value is not None


def without_nulls(value: object) -> object:
    """The value without the fields that are null, at any depth.

    Arrow gives every object in a column the fields of all, which templates would render.
    """
    if isinstance(value, dict):
        return {key: without_nulls(one) for key, one in value.items() if one is not None}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value


def label(name: str, place: str) -> str:
    """A field as messages name it. place: of the turn that it is in, or ""."""
    return f"{place}.{name}" if place else f"field {name!r}"


def text_of(row: Row, name: str, place: str = "", may_be_empty: bool = False) -> str:
    """The field's text. Raises RowError."""
    where, value = label(name, place), row.get(name)
    if value is None:
        raise RowError(f"{where} is missing")
    if not isinstance(value, str):
        raise RowError(f"{where}: expected text, found {type_name(value)}")
    if not may_be_empty and not value.strip():
        raise RowError(f"{where} is empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
        raise RowError(f"{where}: character {error.start} is half of a surrogate pair") from None
    return value


def filled_list(row: Row, name: str) -> list[object]:
    """The field's list of at least one entry. Raises RowError."""
    value = row.get(name)
    if value is None:
        raise RowError(f"field {name!r} is missing")
    if not isinstance(value, list):
        raise RowError(f"field {name!r}: expected a list, found {type_name(value)}")
    if not value:
        raise RowError(f"field {name!r} is empty")
    return value


def numbered(entries: Iterable[object], name: str) -> Iterable[tuple[str, Row]]:
    """(place, entry) of a list of objects. Raises RowError for an entry of another type."""
    for number, entry in enumerate(entries):
        place = f"{name}[{number}]"
        if not isinstance(entry, Mapping):
            raise RowError(f"{place}: expected an object, found {type_name(entry)}")
        yield place, entry


def one_of(known: Collection[str], row: Row, name: str, place: str) -> str:
    """The field's text, which must be one of these. Raises RowError."""
    found = text_of(row, name, place)
    if found not in known:
        raise RowError(f"{place}.{name}: unknown role {found!r}; known are {', '.join(known)}")
    return found


_KINDS = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
_KINDS |= {int: "a number", float: "a number"}


def type_name(value: object) -> str:
    """A value's type, as data files name it."""
    return _KINDS.get(type(value), type(value).__name__)
