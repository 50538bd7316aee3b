"""A config of another trainer on its way into ours: what became of each of its keys.

Every key ends in one list: mapped, without effect here, impossible, or unknown. A rule is one row
of a trainer's table; names that a config of ours takes or refuses too (`names.ALIASES`,
`names.REFUSED`) need none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from megatrain.config import names as n
from megatrain.config.document import Located, plain
from megatrain.config.load import takes
from megatrain.config.values import shown

NOT_SET = "not set"
NOTHING_ASKED = "asks for nothing that is not done anyway"
EMPTY: tuple[object, ...] = (None, "", [], {})
KINDS: dict[type, str] = {str: "a text", list: "a list", dict: "a mapping"}
T = TypeVar("T")
OFF: tuple[object, ...] = (*EMPTY, False, 0, "no", "none")


@dataclass(frozen=True)
class Line:
    """One of their keys, and what became of it: our keys, or the reason why there are none."""

    name: str
    value: object
    place: str
    said: tuple[str, ...]


class Sheet:
    """The keys of one file.

    Attributes:
        config: our values by dotted key; `origins` says where each came from.
        mapped, dropped, refused, unknown: a line for each of their keys, in one of these.
        assumed: sentences about what the file does not say.
        files: texts that the config names, to be written beside it.
    """

    def __init__(self, given: Mapping[str, Located], folder: Path, trainer: str) -> None:
        self.given = {name: Located(plain(entry), entry.place) for name, entry in given.items()}
        self.folder, self.trainer = folder, trainer
        self.left = set(self.given)
        self.config: dict[str, object] = {}
        self.origins: dict[str, str] = {}
        self.mapped: dict[str, Line] = {}
        self.dropped: dict[str, Line] = {}
        self.refused: dict[str, Line] = {}
        self.unknown: dict[str, Line] = {}
        self.assumed: list[str] = []
        self.files: dict[str, str] = {}

    def get(self, name: str, default: Any = None) -> Any:
        """Their value; `default` where there is none, or null."""
        entry = self.given.get(name)
        return default if entry is None or entry.value is None else entry.value

    def typed(self, name: str, kind: type[T], default: T) -> T:
        """Their value if it is of this type; another is refused, and `default` is taken."""
        value = self.get(name, default)
        if isinstance(value, kind):
            return value
        self.refuse(name, f"must be {KINDS[kind]}, not {shown(value)}")
        return default

    def count(self, name: str, default: int) -> int:
        """Their whole number of at least 1, else `default`; another value is refused."""
        value = self.get(name, default)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
            return value
        self.refuse(name, f"must be a whole number of at least 1, not {shown(value)}")
        return default

    def put(self, key: str, value: object, *names: str, note: str = "") -> None:
        """Set our key as their keys `names` say, or, without any in the file, as it is there."""
        given = [name for name in names if name in self.given and name not in self.refused]
        path = tuple(key.split("."))
        wrong = "" if takes(path, lambda x: x, value) else f"{key} does not take {shown(value)}"
        if key in self.config and self.config[key] != value:
            wrong = f"{key} is {shown(self.config[key])} already ({self.origins[key]})"
        for name in given:
            if wrong:
                self.refuse(name, wrong)
                continue
            before = self.mapped[name].said if name in self.mapped else ()
            said = f"{key}: {shown(value)}{f' ({note})' * bool(note)}"
            self._settle(self.mapped, name, (*before, said))
        if not wrong:
            # `datasets[0]` for all keys of that entry
            briefly = dict.fromkeys(re.sub(r"(\]).*", r"\1", name) for name in given)
            origin = ", ".join(briefly) or f"{self.trainer}'s default"
            self.config[key], self.origins[key] = value, f"{origin}; {note}" if note else origin

    def drop(self, why: str, *names: str) -> None:
        """Their keys have no effect here, unless they had one already."""
        for name in names:
            if name in self.left:
                empty = any(self.given[name].value == one for one in EMPTY)
                self._settle(self.dropped, name, (NOT_SET if empty else why,))

    def refuse(self, name: str, why: str) -> None:
        """Record that their key cannot be honoured, and that the result would differ without it."""
        self.mapped.pop(name, None)
        self._settle(self.refused, name, (why,))

    def assume(self, sentence: str) -> None:
        if sentence not in self.assumed:
            self.assumed.append(sentence)

    def open(self, name: str) -> list[tuple[str, dict[str, Any]]]:
        """The mappings in a list of theirs, each with the beginning of its keys' names, `name[0].`:
        these keys stand for the list from now on."""
        entries = self.get(name, [])
        entries = [entries] if isinstance(entries, dict) else entries
        if not isinstance(entries, list) or not all(isinstance(one, dict) for one in entries):
            self.refuse(name, "must be a list of mappings")
            return []
        opened = [(f"{name}[{number}].", dict(one)) for number, one in enumerate(entries)]
        if opened:
            place = self.given.pop(name).place
            self.left.discard(name)
            keys = {at + key: value for at, one in opened for key, value in one.items()}
            self.given |= {key: Located(value, place) for key, value in keys.items()}
            self.left |= set(keys)
        return opened

    def finish(self, table: Rules) -> None:
        """Decide of all keys that are left, by the table of their trainer."""
        for name in [name for name in self.given if name in self.left]:
            entry = self.given[name]
            rule = _rule(name, table)
            if any(entry.value == empty for empty in EMPTY):
                self.drop(NOT_SET, name)
            elif rule is not None:
                rule(self, name, entry.value)
            else:
                self._settle(self.unknown, name, ())

    def _settle(self, lines: dict[str, Line], name: str, said: tuple[str, ...]) -> None:
        self.left.discard(name)
        entry = self.given.get(name, Located(None, f"{self.trainer}'s default"))
        lines[name] = Line(name, entry.value, entry.place, said)


Rule: TypeAlias = Callable[[Sheet, str, Any], None]
Rules: TypeAlias = Mapping[str, Rule]  # by name; `liger_*` is of all names that begin so


def to(key: str, convert: Callable[[Any], object] = lambda value: value) -> Rule:
    """The rule of a name that means our key. `convert` raises ValueError for other values."""

    def rule(sheet: Sheet, name: str, value: Any) -> None:
        try:
            ours = convert(value)
        except ValueError as error:
            sheet.refuse(name, str(error))
            return
        if ours is n.NOTHING:
            sheet.drop(NOTHING_ASKED, name)
        else:
            sheet.put(key, ours, name)

    return rule


def nothing(why: str) -> Rule:
    """The rule of a name that changes nothing that is learnt, whatever its value."""
    return lambda sheet, name, _: sheet.drop(why, name)


def never(why: str, *harmless: object) -> Rule:
    """The rule of a name that cannot be honoured, unless it is off or one of `harmless`."""

    def rule(sheet: Sheet, name: str, value: Any) -> None:
        if any(value == one for one in (*OFF, *harmless)):
            sheet.drop(NOTHING_ASKED, name)
        else:
            sheet.refuse(name, why)

    return rule


def _rule(name: str, table: Rules) -> Rule | None:
    last = name.rpartition("].")[2]  # of `datasets[0].type`
    prefixes = [rule for key, rule in table.items() if key[-1] == "*" and last.startswith(key[:-1])]
    if last != name:
        return table.get(f"[].{last}")
    if found := table.get(name) or next(iter(prefixes), None):
        return found
    if alias := n.ALIASES.get(name):
        return to(".".join(alias.key), alias.convert)
    refusal = n.refusal_of(name)
    return None if refusal is None else _refused(refusal)


def _refused(refusal: n.Refusal) -> Rule:
    """The rule of a name that a config of ours refuses."""
    reason = refusal.reason.removesuffix("; remove it")

    def rule(sheet: Sheet, name: str, value: Any) -> None:
        if n.is_harmless(refusal, value):
            sheet.drop(NOTHING_ASKED, name)
        elif refusal.teaches:
            sheet.refuse(name, reason)
        else:
            sheet.drop(reason, name)

    return rule
