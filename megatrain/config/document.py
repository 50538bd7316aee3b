"""YAML in and out: values that keep the line they came from, under the number rules of YAML 1.2."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from megatrain.errors import ConfigError

if TYPE_CHECKING:
    from ruamel.yaml import YAML
    from ruamel.yaml.constructor import SafeConstructor
    from ruamel.yaml.error import StreamMark

COMMAND_LINE = "command line"
IN_PYTHON = "keywords"  # the place of values that are given in Python
MAX_DEPTH = 8  # ours go to 3; a self-referring anchor has no end
MAX_NODES = 10_000  # ours have a hundred; aliases can multiply a few lines to billions
_TOO_MANY = f"more than {MAX_NODES:,} values; a config has a few dozen"
_TOO_DEEP = f"nested more than {MAX_DEPTH} deep; no key is"

_TAG = "tag:yaml.org,2002:"
_DIGITS = "[0-9]+(_[0-9]+)*"
# The core schema of YAML 1.2, with 65_536 and without octals. The rules of ruamel.yaml also take
# 0b11, dates and merge keys, and leave .5e3 a text.
_RULES = {
    "null": "~|null|Null|NULL|",
    "bool": "true|True|TRUE|false|False|FALSE",
    "int": f"[-+]?{_DIGITS}|0x[0-9a-fA-F]+",
    "float": rf"[-+]?(\.[0-9]+|{_DIGITS}(\.[0-9]*)?)([eE][-+]?[0-9]+)?"
    r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
}


@dataclass(frozen=True)
class Located:
    """A value and the place that set it. A mapping's value is a dict of Located, a list's a list of
    plain values."""

    value: Any
    place: str  # "cfg.yaml:7" or "command line"

    @classmethod
    def of(cls, value: Any, place: str) -> Self:
        """A tree of mappings with `place` beside every value."""
        if isinstance(value, Mapping):
            value = {key: cls.of(entry, place) for key, entry in value.items()}
        return cls(value, place)


def plain(value: Any) -> Any:
    """A value without its places."""
    if isinstance(value, Located):
        return plain(value.value)
    return {key: plain(entry) for key, entry in value.items()} if isinstance(value, dict) else value


def write_yaml(value: object) -> str:
    """YAML text in the order of the dicts."""
    text = io.StringIO()
    _yaml().dump(value, text)
    return text.getvalue()


def read_text(path: Path) -> str:
    """The text of a config file. Raises ConfigError when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; write one with `megatrain init {path}`") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a folder; name the config file itself") from None
    except UnicodeDecodeError as error:
        reason = f"not UTF-8 text (byte {error.start}); save it as UTF-8"
        raise ConfigError(f"{path}: {reason}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def read_yaml(text: str, name: str) -> Located:
    """Parse one YAML document. Places are `name:line`; the command line has no lines. Raises
    ConfigError naming the line."""
    from ruamel.yaml.composer import MaxDepthExceededError
    from ruamel.yaml.error import MarkedYAMLError
    from ruamel.yaml.reader import ReaderError

    reader = _Reader(name, _yaml().constructor)
    try:
        node = _composed(text)
    except MaxDepthExceededError as error:
        raise reader.wrong(error.problem_mark, _TOO_DEEP) from None
    except RecursionError:
        raise reader.wrong(None, _TOO_DEEP) from None
    except MarkedYAMLError as error:
        problem = error.problem or error.context
        problem = problem.replace("('", "'").replace("',)", "'")  # it shows some as tuples of one
        if problem.startswith("found undefined alias"):
            problem += "; put quotes around a text that begins with *"
        mark = error.problem_mark or error.context_mark
        raise reader.wrong(mark, f"not valid YAML: {problem}") from None
    except ReaderError as error:
        reason = f"not valid YAML: {error.reason} at character {error.position}"
        raise reader.wrong(None, reason) from None
    if node is None:
        return Located(None, name)
    return Located(reader.value(node, 0), reader.place(node.start_mark))


@lru_cache(maxsize=8)
def _composed(text: str) -> Any:
    """The tree of a document, which nobody changes: a run reads its own at every report, and a
    hundred lines take 25 ms."""
    return _yaml().compose(text)


def _yaml() -> YAML:
    """A reader and writer under the rules above, also of a document that begins with %YAML 1.1."""
    from ruamel.yaml import YAML
    from ruamel.yaml.composer import Composer
    from ruamel.yaml.error import MarkedYAMLError
    from ruamel.yaml.resolver import VersionedResolver

    rules = [(_TAG + kind, re.compile(rf"(?:{rule})\Z")) for kind, rule in _RULES.items()]

    class Resolver(VersionedResolver):
        processing_version = (1, 2)
        versioned_resolver: Any = {None: rules}  # noqa: RUF012  None: whatever a text begins with

    class Bounded(Composer):
        nodes = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            self.nodes += 1
            if self.nodes > MAX_NODES:  # while it is read, which is what takes long
                mark = self.parser.peek_event().start_mark
                raise MarkedYAMLError(problem=_TOO_MANY, problem_mark=mark)
            return super().compose_node(parent, index)

    yaml = YAML(typ="safe", pure=True)
    yaml.Resolver = Resolver
    yaml.Composer = Bounded
    yaml.composer.warn_double_anchors = False
    yaml.max_depth = MAX_DEPTH + 1  # counted from 1
    yaml.default_flow_style = False
    yaml.width = 10**6  # a long path stays on the line of its key
    yaml.representer.sort_base_mapping_type_on_output = False
    return yaml


@dataclass(frozen=True)
class _Reader:
    """Turns YAML nodes into values."""

    name: str
    constructor: SafeConstructor
    values: count[int] = field(default_factory=lambda: count(1))

    def place(self, mark: StreamMark | None) -> str:
        return f"{self.name}:{mark.line + 1}" if mark and self.name != COMMAND_LINE else self.name

    def wrong(self, mark: StreamMark | None, reason: str) -> ConfigError:
        return ConfigError(f"{self.place(mark)}: {reason}")

    def value(self, node: Any, depth: int) -> Any:
        if depth > MAX_DEPTH:  # only through an anchor, as what follows
            raise self.wrong(node.start_mark, _TOO_DEEP)
        if next(self.values) > MAX_NODES:
            raise self.wrong(node.start_mark, _TOO_MANY)
        match node.id, node.tag.removeprefix(_TAG):
            case "mapping", "map":
                return self.mapping(node, depth)
            case "sequence", "seq":
                return [plain(self.value(item, depth + 1)) for item in node.value]
            case "scalar", kind if kind in (*_RULES, "str"):
                try:
                    return self.constructor.construct_object(node)
                except (ValueError, LookupError):  # such as `!!int abc`
                    pass
        text = repr(node.value) if node.id == "scalar" else "a list or mapping"
        reason = f"{text} cannot be read as {node.tag}; write a plain value"
        raise self.wrong(node.start_mark, reason)

    def mapping(self, node: Any, depth: int) -> dict[str, Located]:
        entries: dict[str, Located] = {}
        merged: dict[str, Located] = {}
        for key, value in node.value:
            if key.id == "scalar" and key.value == "<<":  # the first of several maps counts
                for other in value.value if value.id == "sequence" else [value]:
                    if other.id != "mapping":
                        raise self.wrong(key.start_mark, "<< takes a mapping, or a list of them")
                    merged = self.mapping(other, depth + 1) | merged
                continue
            if key.id != "scalar" or not key.value:
                raise self.wrong(key.start_mark, "a key must be a single word")
            if first := entries.get(key.value):
                reason = f"{key.value}: set twice, first at {first.place}; keep one"
                raise self.wrong(key.start_mark, reason)
            entries[key.value] = Located(self.value(value, depth + 1), self.place(key.start_mark))
        return merged | entries
