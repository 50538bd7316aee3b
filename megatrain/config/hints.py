"""Which key was meant by one that is unknown: one near in spelling, and of the value's type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BaseModel, TypeAdapter

from megatrain.config.fields import Config
from megatrain.config.names import ALIASES, Key
from megatrain.config.values import nearest

TOP = ""  # the section of top-level keys
ALIAS_SECTIONS = (TOP, "train")
MISSPELT = 0.8  # as like as a word is to itself with one letter wrong, or two in a long one
_MODELS: dict[str, type[BaseModel]] = {TOP: Config} | {
    name: field.annotation
    for name, field in Config.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
}
# Keys of the top level and of every section.
SECTIONS = {name: tuple(model.model_fields) for name, model in _MODELS.items()}


def unknown(section: str, name: str, value: object) -> str:
    """The problem of an unknown key: the key that was probably meant, or those that are known."""
    homes = [other for other, keys in SECTIONS.items() if name in keys and other != section]
    if not homes and name in ALIASES:
        homes, name = [ALIASES[name].key[0]], ALIASES[name].key[-1]
    if homes:
        return f"did you mean {homes[0] + '.' if homes[0] else ''}{name}?"
    here = {key: (key, (section, key), _as_it_is) for key in SECTIONS[section]}
    aliases = {alias: (alias, means.key, means.convert) for alias, means in ALIASES.items()}
    pairs = ((other, key) for other, keys in SECTIONS.items() if other for key in keys)
    inside = {key: (f"{other}.{key}", (other, key), _as_it_is) for other, key in pairs}
    for names in (here, aliases if section in ALIAS_SECTIONS else {}, inside):
        near = nearest(name, names, MISSPELT)
        if near is not None and takes(*names[near][1:], value):
            return f"did you mean {names[near][0]}?"
    return f"unknown key; known here are {', '.join(SECTIONS[section])}"


def _as_it_is(value: object) -> object:
    return value


def takes(key: Key, convert: Callable[[object], object], value: object) -> bool:
    """Whether a key takes the value that `convert` makes of this one."""
    section, name = key if len(key) == 2 else (TOP, key[0])
    field = _MODELS[section].model_fields.get(name)
    if field is None:  # half of a key, such as beta1
        return True
    kind: Any = Annotated[field.annotation, field]
    try:
        TypeAdapter(kind).validate_python(convert(value), strict=True)
    except ValueError:  # which pydantic's error is, too
        return False
    return True
