"""YAML in and out: values that keep the line they came from, under the number rules of YAML 1.2."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatrain.errors import ConfigError

COMMAND_LINE = "command line"
MAX_DEPTH = 8  # ours go to 3; a self-referring anchor has no end

_TAG = "tag:yaml.org,2002:"
# PyYAML follows YAML 1.1, in which 1e-5 is a text, `no` is false and 1:30 is ninety. These are the rules of 1.2.
_RULES = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9][0-9_]*|0x[0-9a-fA-F]+", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list("-+.0123456789")),
)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  the base's name and type


class _Dumper(yaml.SafeDumper):
    # The reader's rules: a text that the reader would take for a number is quoted.
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  the base's name and type


for _name, _pattern, _first in _RULES:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_TAG + _name, re.compile(f"^(?:{_pattern})$"), _first)


@dataclass(frozen=True)
class Located:
    """A value and the place that set it. A mapping's value is a dict of Located; a list's is a list of plain values."""

    value: Any
    place: str  # "cfg.yaml:7" or "command line"


def plain(value: Any) -> Any:
    """A value without its places."""
    if isinstance(value, Located):
        return plain(value.value)
    return {key: plain(entry) for key, entry in value.items()} if isinstance(value, dict) else value


def write_yaml(value: object) -> str:
    """YAML text in the order of the dicts."""
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text


def read_text(path: Path) -> str:
    """The text of a config file. Raises ConfigError when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; write one with `megatrain init {path}`") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a folder; name the config file itself") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def read_yaml(text: str, name: str, numbered: bool = True) -> Located:
    """Parse one YAML document. Places are `name:line`, or `name` alone if not numbered. Raises ConfigError naming the line."""
    reader = _Reader(name, numbered)
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = reader.place(mark.line) if mark else name
        raise ConfigError(f"{place}: not valid YAML: {error.problem or error.context}") from None
    except yaml.reader.ReaderError as error:
        raise ConfigError(f"{name}: not valid YAML: {error.reason} at character {error.position}") from None
    if node is None:
        return Located(None, reader.place(0))
    return Located(reader.value(node, 0), reader.place(node.start_mark.line))


class _Reader:
    """Turns YAML nodes into values."""

    def __init__(self, name: str, numbered: bool) -> None:
        self.name = name
        self.numbered = numbered

    def place(self, line: int) -> str:
        return f"{self.name}:{line + 1}" if self.numbered else self.name

    def value(self, node: yaml.Node, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ConfigError(f"{self.place(node.start_mark.line)}: nested more than {MAX_DEPTH} deep; no key is")
        if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            return self._mapping(node.value, depth)
        if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            return [plain(self.value(item, depth + 1)) for item in node.value]
        return self._scalar(node)

    def _mapping(self, pairs: Iterable[tuple[yaml.Node, yaml.Node]], depth: int) -> dict[str, Located]:
        entries: dict[str, Located] = {}
        for key_node, value_node in pairs:
            place = self.place(key_node.start_mark.line)
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigError(f"{place}: a key must be a single word")
            if key_node.value in entries:
                raise ConfigError(f"{place}: {key_node.value}: set twice, first at {entries[key_node.value].place}; keep one")
            entries[key_node.value] = Located(self.value(value_node, depth + 1), place)
        return entries

    def _scalar(self, node: yaml.Node) -> object:
        text = str(node.value) if isinstance(node, yaml.ScalarNode) else "a list or mapping"
        kind = node.tag.removeprefix(_TAG)
        try:
            match kind:
                case "null":
                    return None
                case "bool":
                    return {"true": True, "false": False}[text.lower()]
                case "int":
                    return int(text, 16 if text.startswith("0x") else 10)
                case "float":
                    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
                case "str":
                    return text
        except (KeyError, ValueError):
            pass
        raise ConfigError(f"{self.place(node.start_mark.line)}: {text!r} cannot be read as {node.tag}; write a plain value")
