"""Tools and calls of them, in OpenAI's form, from the forms in which rows have them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatrain.data.fields import Row, RowError, is_given, json_value, kind_of, label, text_of

Tool = Mapping[str, Any]


def tools_of(row: Row, bare: bool = False) -> tuple[Tool, ...]:
    """The row's tools: a list of objects or JSON text of one. Raises RowError.

    bare: wrap functions that are given without `type`, as those of the former field `functions`.
    """
    given = [name for name in ("tools", "functions") if is_given(row.get(name))]
    if not given:
        return ()
    if len(given) > 1:
        raise RowError("field 'functions': 'tools' says the same; keep one")
    (name,) = given
    tools = _objects(row[name], f"field {name!r}")
    if bare or name == "functions":
        tools = [tool if "function" in tool else _function(tool) for tool in tools]
    for number, tool in enumerate(tools):
        function = tool.get("function", tool)
        if not isinstance(function, Mapping):
            raise RowError(f"{name}[{number}].function: expected an object")
        text_of(function, "name", f"{name}[{number}]")
    return tuple(tools)


def calls_of(turn: Row, place: str) -> list[dict[str, Any]]:
    """The calls of an assistant's turn, their arguments as objects. Raises RowError."""
    old = turn.get("function_call")
    if is_given(old):
        return parsed_calls(old, label("function_call", place))
    if is_given(turn.get("tool_calls")):
        return parsed_calls(turn["tool_calls"], label("tool_calls", place))
    return []


def parsed_calls(value: object, place: str) -> list[dict[str, Any]]:
    """Calls, or one call, as objects or JSON text, with or without a `function` around name and
    arguments. Raises RowError."""
    calls = []
    for number, call in enumerate(_objects(value, place)):
        where = f"{place}[{number}]"
        wrapped = call if "function" in call else _function(call)
        function = wrapped["function"]
        if not isinstance(function, Mapping):
            raise RowError(f"{where}.function: expected an object, found {kind_of(function)}")
        name = text_of(function, "name", where)
        arguments = _arguments(function.get("arguments"), f"{where}.arguments")
        kind = wrapped.get("type") or "function"
        function = {**function, "name": name, "arguments": arguments}
        calls.append({**wrapped, "type": kind, "function": function})
    return calls


def texts_of(value: object) -> Iterator[str]:
    """Every text in nested objects and lists, keys left out."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from texts_of(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from texts_of(entry)


def _function(function: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": dict(function)}


def _arguments(value: object, place: str) -> dict[str, Any]:
    if not is_given(value) or (isinstance(value, str) and not value.strip()):
        return {}
    found = _parsed(value, place) if isinstance(value, str) else value
    if not isinstance(found, Mapping):
        raise RowError(f"{place}: expected an object or JSON text of one, found {kind_of(found)}")
    return dict(found)


def _objects(value: object, place: str) -> list[Mapping[str, Any]]:
    found = _parsed(value, place) if isinstance(value, str) else value
    entries = [found] if isinstance(found, Mapping) else found
    if not isinstance(entries, list | tuple):
        raise RowError(f"{place}: expected a list of objects, found {kind_of(found)}")
    for entry in entries:
        if not isinstance(entry, Mapping):
            raise RowError(f"{place}: expected a list of objects, found {kind_of(entry)} in it")
    return list(entries)


def _parsed(text: str, place: str) -> object:
    try:
        found = json_value(text)
    except (ValueError, RecursionError) as error:
        raise RowError(f"{place}: not JSON: {error}") from None
    return found
