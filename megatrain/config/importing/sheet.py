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
    honoured unless it is off or has one of some values, and what is called otherwise here."""
    table: dict[str, Rule] = {}
    for why, names in said.get("ignored", {}).items():
        table |= n.of_each(names, n.Refusal(why, ()))
    for why, names in said.get("refused", {}).items():
        table |= n.of_each(names, never(why))
    for names, (why, *harmless) in said.get("unless", {}).items():
        table |= n.of_each(names, never(why, *harmless))
    return table | n.same_as(said.get("means", {}))


def never(why: str, *harmless: object) -> n.Refusal:
    return n.Refusal(why, harmless, teaches=True)


class Sheet:
    """The keys of one file, and what became of them: the result of an import.

    Attributes:
        config: our values by dotted key; `origins` says where each came from.
        fate: the list that each of their keys is in, and the sentences about it.
        mapped, dropped, refused, unknown: the lists, once all is decided: sentences by key.
        assumed: sentences about what the file does not say.
        said: the trainer's TOML file.
        files: texts that the config names, to be written beside it, by name.
        missing: what keeps it from being a whole config, as `load_config` says it.
    """

    def __init__(self, source: str, trainer: str, given: dict[str, Located]) -> None:
        self.source, self.trainer, self.given = source, trainer, given
        self.said = tables_of(trainer)
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
        method = self.config.get("method")
        if answers := method in OF_ANSWERS:
            key = key.replace("policy.", f"{method}.")
        ours = n.Alias(tuple(key.split(".")))
        wrong = "" if takes(ours, value) else f"{key} does not take {shown(value)}"
        if answers and ours.key[0] == method and ours.key[1] not in SECTIONS[method]:
            wrong = f"{key}: belongs to method: {OF_ANSWERS[method == 'grpo']}"
        if answers and key in LIMITS:
            values, why = LIMITS[key]
            wrong = wrong if value in values else why
        if not answers and ours.key[0] in (*OF_ANSWERS, "policy", "rollout", "rewards"):
            wrong = "belongs to method: grpo or rloo"
        if key in self.config and self.config[key] != value:
            wrong = f"{key} is {shown(self.config[key])} already ({self.origins[key]})"
        given = [name for name in names if name in self.given and not self.is_refused(name)]
        for name in given:
            said = f"{key}: {shown(value)}{f' ({note})' * bool(note)}"
            if wrong:
                self.refuse(name, wrong)
            else:
                kind, before = self.fate.get(name, ("mapped", ()))
                self.fate[name] = "mapped", (*(before if kind == "mapped" else ()), said)
        if not wrong:
            # `datasets[0]` for all keys of that entry
            briefly = dict.fromkeys(re.sub(r"(\]).*", r"\1", name) for name in given)
            origin = ", ".join(briefly) or f"{self.trainer}'s default"
            self.config[key], self.origins[key] = value, f"{origin}; {note}" if note else origin

    def drop(self, why: str, *names: str) -> None:
        """Their keys have no effect here, unless they had one already."""
        for name in names:
            if name in self.given and name not in self.fate:
                said = NOT_SET if self.given[name].value in EMPTY else why
                self.fate[name] = "dropped", (said,)

    def refuse(self, name: str, why: str) -> None:
        """Record that their key cannot be honoured, and that the result would differ without it."""
        self.fate[name] = "refused", (why,)

    def is_refused(self, name: str) -> bool:
        return name in self.fate and self.fate[name][0] == "refused"

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
        opened = [(f"{name}[{number}].", one) for number, one in enumerate(entries)]
        if opened:
            place = self.given.pop(name).place
            for at, one in opened:
                self.given |= {at + key: Located(value, place) for key, value in one.items()}
        return opened

    def finish(self, rules: Table) -> None:
        """Decide of all keys that are left, by `rules` and the tables of their trainer."""
        table = {**table_of(tables_of("shared")), **table_of(self.said), **rules}
        prefixes = [name[:-1] for name in table if name.endswith("*")]
        for name, entry in self.given.items():
            if name in self.fate:
                continue
            inner = name.rpartition("].")[2]  # of `datasets[0].type`
            if entry.value in EMPTY:
                self.drop(NOT_SET, name)
            elif inner != name:
                self.follow(name, entry.value, table.get(f"[].{inner}"))
            else:
                begun = next((table[f"{one}*"] for one in prefixes if name.startswith(one)), None)
                ours = n.ALIASES.get(name) or n.refusal_of(name)
                self.follow(name, entry.value, table.get(name) or begun or ours)

        for name in dict.fromkeys([*self.given, *self.fate]):  # in the file's order
            if name in self.fate:
                kind, sentences = self.fate[name]
                getattr(self, kind)[name] = sentences

    def follow(self, name: str, value: Any, rule: Rule | None) -> None:
        """Decide of one key by a row."""
        match rule:
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
                if n.is_harmless(rule, value) or (teaches and value in OFF):
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
            "mapped": [f"{', '.join(v)} -> {', '.join(k)}" for k, v in self._grouped(self.mapped)],
            "assumed": self.assumed,
            "without effect here": [
                f"{', '.join(name.partition(': ')[0] for name in names)}: {why[0]}"
                for why, names in self._grouped(self.dropped)
            ],
            "impossible": [f"{self._place(k)}: {k}: {why[0]}" for k, why in self.refused.items()],
            "unknown": [f"{self._place(k)}: {k}: {shown(self.get(k))}" for k in self.unknown],
            "missing or contradictory": self.missing.splitlines(),
        }
        said = [f"{self.source}: a config of {self.trainer}"]
        for title, lines in parts.items():
            said += [f"{title} ({len(lines)})", *(f"  {line}" for line in lines)] if lines else []
        return printable("\n".join(said))

    def _place(self, name: str) -> str:
        return self.given[name].place if name in self.given else f"{self.trainer}'s default"

    def _grouped(self, lines: Mapping[str, tuple[str, ...]]) -> list[tuple[tuple[str, ...], Any]]:
        """(sentences, keys with their values) of keys of which the same is said."""
        groups: dict[tuple[str, ...], list[str]] = {}
        for name, said in lines.items():
            groups.setdefault(said, []).append(f"{name}: {shown(self.get(name))}")
        return list(groups.items())

    @property
    def text(self) -> str:
        """The config with a comment on where each value came from."""
        name = Path(self.source).name
        lines = [_comment(f"Imported from {self.trainer}'s {name} by `megatrain import`.")]
        lost = [*self.refused, *self.unknown]
        lines += [_comment(f"NOT HONOURED: {name}: {shown(self.get(name))}") for name in lost]
        lines += [_comment(f"assumed: {sentence}") for sentence in self.assumed]
        for section, value in self.tree().items():
            inside = section not in self.config
            lines += ["", f"{section}:"] if inside else [""]
            for key, one in value.items() if inside else [(section, value)]:
                origin = _comment(self.origins[f"{section}.{key}" if inside else key])
                written = write_yaml({key: one}).rstrip("\n").split("\n")
                if len(written) == 1:
                    written = [f"{written[0]}  {origin}"]
                else:
                    written.insert(0, origin)
                lines += [f"{'  ' * inside}{line}" for line in written]
        return "\n".join(lines) + "\n"


def _comment(text: str) -> str:
    """A comment of one line, whatever the text of another's file holds."""
    return f"# {printable(' '.join(text.split()))}"
