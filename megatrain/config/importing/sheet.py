"""A config of another trainer on its way into ours, and what becomes of each of its keys.

Every key ends in one list: mapped, without effect here, impossible, or unknown. Rows of a trainer's
TOML file decide of most; names that a config of ours takes or refuses too (`names.ALIASES`,
`names.REFUSED`) need none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from megatrain.config import names as n
from megatrain.config.document import Located, write_yaml
from megatrain.config.fields import OF_ROLLOUTS, Config
from megatrain.config.load import SECTIONS, takes
from megatrain.config.values import shown
from megatrain.errors import printable

LIMITS = {key: (values, why) for key, values, why in OF_ROLLOUTS}
OF_ANSWERS = ("grpo", "rloo")  # whose sections are called `policy` where both are meant
NOT_SET = "not set"
NOTHING_ASKED = "asks for nothing that is not done anyway"
EMPTY: tuple[object, ...] = (None, "", [], {})
OFF: tuple[object, ...] = (*EMPTY, False, 0, "no", "none")

Sentences: TypeAlias = tuple[str, ...]
Rule: TypeAlias = "n.Alias | n.Refusal | Callable[[Sheet, str, Any], None]"
Table: TypeAlias = Mapping[str, Rule]  # `liger_*` is of names that begin so, `[].type` of entries


def tables_of(trainer: str) -> dict[str, Any]:
    """Read what is said of a trainer's names."""
    return n.read_names(Path(__file__).with_name(f"{trainer}.toml"))


def table_of(said: Mapping[str, Any]) -> dict[str, Rule]:
    """Rows of names: what changes nothing that is learnt whatever its value, what cannot be
    honoured unless it is off or has one of some values, and what is called otherwise here, of
    which one value may ask for nothing."""
    table: dict[str, Rule] = {}
    for kind, teaches in (("ignored", False), ("refused", True)):
        for why, names in said.get(kind, {}).items():
            table |= n.of_each(names, n.Refusal(why, (), teaches))
    for names, (why, *harmless) in said.get("unless", {}).items():
        table |= n.of_each(names, n.Refusal(why, tuple(harmless), teaches=True))
    means = n.same_as(said.get("means", {}))
    for name, nothing in said.get("nothing", {}).items():
        means[name] = n.Alias((n.ALIASES | means)[name].key, n.but(nothing, n.NOTHING))
    return table | means


class Sheet:
    """The keys of one file, and what became of them: the result of an import.

    Attributes:
        config: our values by dotted key; `origins` says where each came from.
        fate: the list that each of their keys is in, and the sentences about it.
        mapped, dropped, refused, unknown: the lists, once all is decided: sentences by key.
        assumed: sentences about what the file does not say.
        said: the trainer's TOML file, and what the shared one has besides.
        files: texts that the config names, to be written beside it, by name.
        missing: what keeps it from being a whole config, as `load_config` says it.
    """

    def __init__(self, source: str, trainer: str, given: dict[str, Located], output: Path) -> None:
        self.source, self.trainer, self.given, self.output = source, trainer, given, output
        self.said = {**tables_of("shared"), **tables_of(trainer)}
        self.folder = Path(source).parent
        self.config: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self.fate: dict[str, tuple[str, Sentences]] = {}
        self.mapped: dict[str, Sentences] = {}
        self.dropped: dict[str, Sentences] = {}
        self.refused: dict[str, Sentences] = {}
        self.unknown: dict[str, Sentences] = {}
        self.assumed: list[str] = []
        self.files: dict[str, str] = {}
        self.missing = ""

    def get(self, name: str, default: Any = None) -> Any:
        """Their value; `default` where there is none, or null."""
        entry = self.given.get(name)
        return default if entry is None or entry.value is None else entry.value

    def put(self, key: str, value: object, *names: str, note: str = "") -> None:
        """Set our key as their keys `names` say, or, without any in the file, as it is there."""
        if (method := self.config.get("method")) in OF_ANSWERS:
            key = key.replace("policy.", f"{method}.")
        wrong = self._fault(key, value)
        given = [name for name in names if name in self.given and not self.is_refused(name)]
        for name in given:
            if wrong:
                self.refuse(name, wrong)
            else:
                kind, before = self.fate.get(name, ("mapped", ()))
                said = f"{key}: {shown(value)}{f' ({note})' * bool(note)}"
                self.fate[name] = "mapped", (*(before if kind == "mapped" else ()), said)
        if not wrong:
            # `datasets[0]` for all keys of that entry
            briefly = dict.fromkeys(re.sub(r"(\]).*", r"\1", name) for name in given)
            origin = ", ".join(briefly) or f"{self.trainer}'s default"
            self.config[key], self.origins[key] = value, f"{origin}; {note}" if note else origin

    def _fault(self, key: str, value: object) -> str:
        """Why our key cannot have this value; empty if it can."""
        method, (section, _, name) = self.config.get("method"), key.rpartition(".")
        values, why = LIMITS.get(key, ((value,), ""))
        if method in OF_ANSWERS and value not in values:
            return why
        strange = method not in OF_ANSWERS and section in (*OF_ANSWERS, "rollout", "rewards")
        if strange or (section and name not in SECTIONS.get(section, ())):
            return f"{key}: method: {method} has no such key"
        if self.config.get(key, value) != value:
            return f"{key} is {shown(self.config[key])} already ({self.origins[key]})"
        taken = takes(n.Alias(tuple(key.split("."))), value)
        return "" if taken else f"{key} does not take {shown(value)}"

    def drop(self, why: str, *names: str) -> None:
        """Their keys have no effect here, unless they had one already."""
        for name in names:
            if name in self.given and name not in self.fate:
                said = NOT_SET if self.given[name].value in EMPTY else why
                self.fate[name] = "dropped", (said,)

    def refuse(self, name: str, why: str) -> None:
        """Record that their key cannot be honoured, and that the result would differ without it."""
        self.fate[name] = "refused", (why,)

    def need(self, name: str, why: str) -> None:
        """Refuse their key where null stands for what cannot be had."""
        if name in self.given and self.given[name].value is None:
            self.refuse(name, why)

    def is_refused(self, name: str) -> bool:
        return name in self.fate and self.fate[name][0] == "refused"

    def assume(self, sentence: str) -> None:
        if sentence not in self.assumed:
            self.assumed.append(sentence)

    def open(self, name: str) -> list[tuple[str, dict[str, Any]]]:
        """The mapping under a name of theirs, or the list of mappings, each with the beginning of
        its keys' names, `name.` or `name[0].`: these keys stand for it from now on."""
        value = self.get(name)
        if value in EMPTY:
            return []
        entries = {f"{name}.": value}
        if isinstance(value, list):
            entries = {f"{name}[{number}].": one for number, one in enumerate(value)}
        if not all(isinstance(one, dict) and one for one in entries.values()):
            self.refuse(name, "must be a mapping, or a list of them")
            return []
        place = self.given.pop(name).place
        for at, one in entries.items():
            self.given |= {at + key: Located(value, place) for key, value in one.items()}
        return [*entries.items()]

    def finish(self, rules: Table) -> None:
        """Decide of all keys that are left, by `rules` and the tables of their trainer."""
        table = {**table_of(tables_of("shared")), **table_of(self.said), **rules}
        for name, entry in self.given.items():
            if name not in self.fate:
                at, _, inner = name.rpartition("].")
                known = f"[].{inner}" if at else name  # `[].type` of `datasets[0].type`
                rule = n.row_of(table, known) or n.ALIASES.get(known) or n.refusal_of(known)
                self.follow(name, entry.value, rule)
        for name, (sentence, *nothing) in self.said.get("assumed", {}).items():
            if self.get(name) not in (*EMPTY, *nothing):
                self.assume(f"{name}: {self.get(name)}: {sentence}")
        defaults = self.said["defaults"]
        for key, ours in {**defaults["any"], **defaults.get(self.config["method"], {})}.items():
            if key not in self.config:
                self.put(key, ours)
        for name in dict.fromkeys([*self.given, *self.fate]):  # in the file's order
            if name in self.fate:
                kind, sentences = self.fate[name]
                getattr(self, kind)[name] = sentences

    def follow(self, name: str, value: Any, rule: Rule | None) -> None:
        """Decide of one key by a row."""
        match rule:
            case _ if value in EMPTY:
                self.drop(NOT_SET, name)
            case None:
                self.fate[name] = "unknown", ()
            case n.Alias(key, convert):
                try:
                    ours = convert(value)
                except ValueError as error:
                    self.refuse(name, str(error))
                    return
                if ours is n.NOTHING:
                    self.drop(NOTHING_ASKED, name)
                else:
                    self.put(".".join(key), ours, name)
            case n.Refusal(reason, _, teaches):
                # false is off, unless true is what is done anyway
                off = teaches and value in OFF and not n.is_harmless(rule, True)
                if off or n.is_harmless(rule, value):
                    self.drop(NOTHING_ASKED, name)
                elif teaches:
                    self.refuse(name, reason.removesuffix("; remove it"))
                else:
                    self.drop(reason.removesuffix("; remove it"), name)
            case _:
                rule(self, name, value)

    @property
    def faithful(self) -> bool:
        """True if nothing that changes the result is lost."""
        return not (self.refused or self.unknown)

    def tree(self) -> dict[str, Any]:
        """The config, nested, in the order of our sections."""
        tree: dict[str, Any] = {}
        order = list(Config.model_fields)
        for key in sorted(self.config, key=lambda key: order.index(key.partition(".")[0])):
            section, _, name = key.rpartition(".")
            target = tree.setdefault(section, {}) if section else tree
            target[name] = self.config[key]
        return tree

    def to_dict(self) -> dict[str, Any]:
        about = {"trainer": self.trainer, "config": self.tree(), "missing": self.missing}
        names = ("mapped", "dropped", "refused", "unknown", "assumed")
        return about | {name: getattr(self, name) for name in names}

    def report(self) -> str:
        """The lists, for people."""
        parts = {
            "mapped": [
                f"{', '.join(map(self._pair, names))} -> {said}"
                for said, names in _grouped(self.mapped)
            ],
            "assumed": self.assumed,
            "without effect here": [f"{', '.join(k)}: {why}" for why, k in _grouped(self.dropped)],
            "impossible": [f"{self._place(k)}: {k}: {why}" for k, (why,) in self.refused.items()],
            "unknown": [f"{self._place(k)}: {self._pair(k)}" for k in self.unknown],
            "missing or contradictory": self.missing.splitlines(),
        }
        said = [f"{self.source}: a config of {self.trainer}"]
        for title, lines in parts.items():
            said += [f"{title} ({len(lines)})", *(f"  {line}" for line in lines)] if lines else []
        return printable("\n".join(said))

    def _pair(self, name: str) -> str:
        return f"{name}: {shown(self.get(name))}"

    def _place(self, name: str) -> str:
        return self.given[name].place if name in self.given else f"{self.trainer}'s default"

    @property
    def text(self) -> str:
        """The config with a comment on where each value came from."""
        name = Path(self.source).name
        lines = [_comment(f"Imported from {self.trainer}'s {name} by `megatrain import`.")]
        lost = [*self.refused, *self.unknown]
        lines += [_comment(f"NOT HONOURED: {self._pair(name)}") for name in lost]
        lines += [_comment(f"assumed: {sentence}") for sentence in self.assumed]
        for section, value in self.tree().items():
            inside = section not in self.config
            lines += ["", f"{section}:"] if inside else [""]
            for key, one in value.items() if inside else [(section, value)]:
                origin = _comment(self.origins[f"{section}.{key}" if inside else key])
                written = write_yaml({key: one}).rstrip("\n").split("\n")
                written = [f"{written[0]}  {origin}"] if len(written) == 1 else [origin, *written]
                lines += [f"{'  ' * inside}{line}" for line in written]
        return "\n".join(lines) + "\n"


def _grouped(lines: Mapping[str, Sentences]) -> list[tuple[str, list[str]]]:
    """(sentences, keys) of keys of which the same is said."""
    groups: dict[str, list[str]] = {}
    for name, said in lines.items():
        groups.setdefault(", ".join(said), []).append(name)
    return [*groups.items()]


def _comment(text: str) -> str:
    """A comment of one line, whatever the text of another's file holds."""
    return f"# {printable(' '.join(text.split()))}"
