"""From a file and `key=value` arguments to a Config, with errors that say where."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from megatrain.config import names as n
from megatrain.config.document import COMMAND_LINE, IN_PYTHON, Located, plain, read_text, read_yaml
from megatrain.config.fields import Config, check_readers, check_sources
from megatrain.config.names import ALIASES, RIVALS, Alias, Key
from megatrain.config.values import nearest, shown
from megatrain.data.samples import digest_of
from megatrain.data.sources import named
from megatrain.errors import ConfigError, DataError
from megatrain.machine.profile import cache_folder

TOP = ""  # the section of top-level keys
ANCHORS = "x-"  # begins the names of keys that hold what others repeat, as in Compose files
ALIAS_SECTIONS = (TOP, "train")
MISSPELT = 0.8  # as like as a word is to itself with one letter wrong, or two in a long one
_MODELS: dict[str, type[BaseModel]] = {TOP: Config} | {
    name: field.annotation
    for name, field in Config.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
}
# Keys of the top level and of every section.
SECTIONS = {name: tuple(model.model_fields) for name, model in _MODELS.items()}
MANY_FOREIGN = 3  # names of other trainers that make a config one of theirs
IMPORT = "if it is of axolotl, LLaMA-Factory or TRL: `megatrain import {} --output my.yaml`"
MOST_PROBLEMS = 10  # that are shown at once
BETAS: Key = ("optimizer", "betas")
OF_ROWS: tuple[Key, ...] = (("data", "train"), ("data", "eval"))
_HINTS = {
    ("model",): "name a hub id, a folder, or {config: folder, init: random}",
    ("data",): "name what to train on: data: {train: rows.jsonl}",
    ("data", "train"): "name a file, a folder or a hub id",
}


@dataclass(frozen=True)
class Leaf:
    """One value on its way into the config."""

    key: Key  # ours
    value: Any
    place: str
    typed: str  # the dotted name its user wrote

    def problem(self, reason: str) -> str:
        return f"{self.place}: {self.typed}: {reason}"


Leaves = dict[Key, Leaf]


def names_config(target: str | Path) -> bool:
    """True for a config file, False for a model: by the suffix, or any file that is no GGUF."""
    path = Path(target)
    return path.suffix in (".yaml", ".yml") or (path.is_file() and path.suffix != ".gguf")


def load_config(
    source: str | Path | Mapping[str, Any],
    overrides: Sequence[str] | Mapping[str, Any] = (),
    *,
    of_run: bool = False,
) -> Config:
    """Read a config from a file or a mapping, then set keys over it.

    Args:
        overrides: `key=value` arguments (dotted keys, YAML values), or a mapping of keys, which
            may be dotted or nested, to values.
        of_run: a run wrote it, and overrides may leave keys of it that nothing reads.

    Raises ConfigError with a line per fault: `cfg.yaml:7: train.learning_rte: did you mean
    learning_rate?`
    """
    if isinstance(source, Mapping):
        name, document = IN_PYTHON, Located.of(source, IN_PYTHON)
    elif isinstance(source, (str, Path)):
        name, document = str(source), read_yaml(read_text(Path(source)), str(source))
    else:
        raise ConfigError(f"a config is a file or a mapping of keys, not {shown(source)}")
    if document.value is not None and not isinstance(document.value, dict):
        raise ConfigError(
            f"{document.place}: a config is a mapping of keys, such as `model: folder`, not "
            f"{shown(plain(document))}"
        )
    if {"model_type", "architectures"} <= {*(document.value or {})}:
        described = "describes a model, not a run"
        raise ConfigError(f"{name}: {described}; name the model's folder, {Path(name).parent}")
    collector = _Collector()
    collector.mapping(document.value or {})
    in_file = collector.taken()
    if isinstance(overrides, Mapping):
        for dotted, value in overrides.items():
            collector.mapping(_nested(dotted.split("."), Located.of(value, IN_PYTHON)))
    else:
        for override in overrides:
            collector.mapping(parse_override(override))
    leaves = _overlay(in_file, collector.taken())
    try:
        config = _validate(leaves, name, collector.problems).with_rows(collector.rows)
        if not of_run:
            check_readers(config)
        if not (of_run and isinstance(source, Mapping)):  # of a checkpoint, which nobody typed
            check_trust(config)
        return config
    except ConfigError as error:
        if collector.foreign < MANY_FOREIGN:
            raise
        raise ConfigError(f"{error}\n{name}: {IMPORT.format(name)}") from None


def bench_config(target: str, overrides: Sequence[str] | Mapping[str, Any] = ()) -> Config:
    """The config of a benchmark, whose weights start at random whatever a file says. target: a
    config file, or a model folder, hub id or named shape, for which defaults are taken. Raises
    ConfigError."""
    full_rows = {  # pre-training of the model on rows of full length
        "model": {"config": target, "init": "random"},
        "method": "pretrain",
        "data": {"train": "random tokens", "eval": None},
    }
    found = load_config(target if names_config(target) else full_rows, overrides)
    return with_random_weights(found)


def with_random_weights(config: Config) -> Config:
    """The config of the same run from random weights."""
    if config.model.init == "random":
        return config
    drawn = {"model.path": None, "model.config": config.model.source, "model.init": "random"}
    return config.with_values(drawn)


def check_trust(config: Config) -> None:
    """Raise ConfigError where a file alone says that a model's code may run: files may be anyone's.
    What was said on a command line or in Python is kept for the user of this machine."""
    if not config.model.trust_remote_code:
        return
    place, source = config.where("model.trust_remote_code"), config.model.source
    source = os.path.abspath(source) if os.path.exists(source) else source
    known = cache_folder() / "trusted" / digest_of(f"{source}@{config.model.revision}")
    if place.startswith((COMMAND_LINE, IN_PYTHON)):
        with suppress(OSError):  # else it is to be said each time
            known.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            known.write_text(source)
    elif not known.exists():
        raise ConfigError(
            f"{place}: true in a file does not run code; read that of {source}, and add "
            "model.trust_remote_code=true to a command once"
        )


def load_run(
    source: str | Path | Mapping[str, Any], overrides: Sequence[str] | Mapping[str, Any] = ()
) -> Config:
    """`load_config`, and a look whether data and prompts are there. Raises DataError, too."""
    config = load_config(source, overrides)
    check_sources(config)
    return config


def _nested(names: Sequence[str], tree: Located) -> dict[str, Located]:
    """The mapping {train: {seq_len: tree}} of the names train and seq_len."""
    for name in reversed(names):
        tree = Located({name: tree}, tree.place)
    assert isinstance(tree.value, dict)
    return tree.value


def parse_override(override: str) -> dict[str, Located]:
    """`train.seq_len=512` as the mapping {train: {seq_len: 512}}."""
    dotted, equals, text = override.partition("=")
    names = dotted.split(".")
    if not equals or not all(name.strip() for name in names):
        expected = "key=value, such as train.learning_rate=1e-5"
        raise ConfigError(f"{COMMAND_LINE}: {override!r} is not {expected}")
    if text.startswith("*"):  # a glob: to YAML it would be an alias, of which there are none here
        return _nested(names, Located(text, COMMAND_LINE))
    try:
        tree = read_yaml(text, COMMAND_LINE)
    except ConfigError as error:
        reason = str(error).removeprefix(COMMAND_LINE)
        raise ConfigError(f"{COMMAND_LINE}: {dotted}{reason}") from None
    return _nested(names, Located(tree.value, COMMAND_LINE))


class _Collector:
    """Gathers the leaves of one source and every fault in its names."""

    def __init__(self) -> None:
        self.leaves: Leaves = {}
        self.problems: list[str] = []
        self.foreign = 0  # names of other trainers among them
        self.rows: dict[str, Any] = {}  # that were given in Python, by their names

    def taken(self) -> Leaves:
        """The leaves gathered so far, without rivals; starts anew, but for the problems."""
        for ways in RIVALS:
            given = [leaf for keys in ways for leaf in [_first_set(self.leaves, keys)] if leaf]
            for leaf in given[1:]:
                reason = f"excludes {given[0].typed} at {given[0].place}; keep one"
                self.problems.append(leaf.problem(reason))
        leaves, self.leaves = self.leaves, {}
        return leaves

    def mapping(self, entries: dict[str, Located], section: str = TOP) -> None:
        """Take in the keys of one section."""
        for name, entry in entries.items():
            if section == TOP and name.startswith(ANCHORS):
                continue
            key = (section, name) if section else (name,)
            leaf = Leaf(key, plain(entry), entry.place, ".".join(key))
            if section == TOP and name in SECTIONS and name != TOP:
                self._section(name, entry, leaf)
            elif name in SECTIONS[section]:
                self._add(leaf)
            elif section in ALIAS_SECTIONS and name in ALIASES:
                self._alias(ALIASES[name], leaf)
            elif refusal := n.refusal_of(name):
                if not n.is_harmless(refusal, leaf.value):
                    self.problems.append(leaf.problem(refusal.reason))
                    self.foreign += 1
            else:
                told = len(self.problems) < MOST_PROBLEMS  # a hint takes milliseconds
                reason = unknown(section, name, leaf.value) if told else "unknown"
                self.problems.append(leaf.problem(reason))

    def _section(self, name: str, entry: Located, leaf: Leaf) -> None:
        if isinstance(entry.value, dict):
            self.mapping(entry.value, name)
        elif name == "model" and isinstance(entry.value, str):
            self._add(replace(leaf, key=("model", "path")))
        elif entry.value is not None or entry.place == COMMAND_LINE:
            own = "a hub id, a folder or a mapping" if name == "model" else "a mapping"
            example = f"{name}: {{{SECTIONS[name][0]}: ...}}"
            reason = f"must be {own} such as `{example}`, not {shown(leaf.value)}"
            self.problems.append(leaf.problem(reason))

    def _alias(self, alias: Alias, leaf: Leaf) -> None:
        try:
            value = alias.convert(leaf.value)
        except ValueError as error:
            self.problems.append(leaf.problem(str(error)))
            return
        if value is not n.NOTHING:
            self._add(replace(leaf, key=alias.key, value=value))

    def _add(self, leaf: Leaf) -> None:
        if leaf.key in OF_ROWS and leaf.place == IN_PYTHON:
            try:
                value, rows = named(leaf.value)
            except DataError as error:
                self.problems.append(leaf.problem(str(error)))
                return
            leaf, self.rows = replace(leaf, value=value), self.rows | rows
        if leaf.key == BETAS and isinstance(leaf.value, list) and len(leaf.value) == 2:
            for key, beta in zip((n.BETA1, n.BETA2), leaf.value, strict=True):
                self._add(replace(leaf, key=key, value=beta))
            return
        first = self.leaves.get(leaf.key)
        if first is not None:
            self.problems.append(leaf.problem(f"{_clash(leaf, first)}; keep one"))
        self.leaves[leaf.key] = leaf


def _clash(leaf: Leaf, first: Leaf) -> str:
    """The problem of two values for one key."""
    if first.typed == leaf.typed:  # only on the command line and in keywords
        return "is set twice"
    given = f"{first.typed} at {first.place}"
    if leaf.key == ("data", "eval") and any(one.typed in n.STRATEGIES for one in (leaf, first)):
        return f"contradicts {given}: one names rows to evaluate on, one asks for no evaluation"
    return f"means the same as {given}"


def _first_set(leaves: Leaves, keys: Iterable[Key]) -> Leaf | None:
    found = (leaves[key] for key in keys if key in leaves)
    return next((leaf for leaf in found if leaf.value is not None), None)


def _overlay(lower: Leaves, upper: Leaves) -> Leaves:
    """Upper over lower. One of several rival keys retires the others, another model the first."""
    retired: set[Key] = set()
    for ways in RIVALS:
        if any(_first_set(upper, keys) for keys in ways):
            retired |= {key for keys in ways if not _first_set(upper, keys) for key in keys}
    if any(key[0] == "rollout" for key in upper):
        retired.add(n.ROWS_OF_A_STEP)  # which follow, and stand in a run's config
    path = upper.get(("model", "path"))
    if path is not None and path.typed != "model.path":
        retired |= {key for key in lower if key[0] == "model"}
    return {key: leaf for key, leaf in lower.items() if key not in retired} | upper


def _combine_halves(leaves: Leaves, problems: list[str]) -> Leaves:
    """Join keys that are halves of one: rows per device with accumulation, beta1 with beta2."""
    halves = (n.ROWS_PER_DEVICE, n.ACCUMULATION, n.BETA1, n.BETA2)
    whole = {key: leaf for key, leaf in leaves.items() if key not in halves}
    rows, times = leaves.get(n.ROWS_PER_DEVICE), leaves.get(n.ACCUMULATION)
    if rows is None and times is not None:
        reason = "needs per_device_train_batch_size beside it: their product is the rows of a step"
        if not problems:  # else the other half may be among them
            problems.append(times.problem(reason))
    if rows is not None:
        key = n.ROWS_OF_A_STEP
        whole[key] = replace(rows, key=key, value=rows.value * (times.value if times else 1))
    betas = [leaves.get(n.BETA1), leaves.get(n.BETA2)]
    given = next((beta for beta in betas if beta), None)
    # a whole `betas` that is no pair is refused as it stands
    if given is not None and BETAS not in whole:
        pairs = zip(betas, n.ADAM_BETAS, strict=True)
        values = [beta.value if beta else default for beta, default in pairs]
        whole[BETAS] = replace(given, key=BETAS, value=values)
    return whole


def _validate(leaves: Leaves, source: str, problems: list[str]) -> Config:
    """The config of `leaves`. Raises ConfigError with all faults, those of names first. problems:
    of the names. A key that they leave unset is not missed, nor held against another."""
    misnamed = bool(problems)
    leaves = _combine_halves(leaves, problems)
    tree: dict[str, Any] = {}
    for (*sections, name), leaf in leaves.items():
        target = tree.setdefault(sections[0], {}) if sections else tree
        target[name] = leaf.value
    config = None
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        found: list[dict[str, Any]] = [*map(dict, error.errors())]
        if misnamed:
            found = [f for f in found if f["type"] != "missing" and not f.get("ctx", {}).get("key")]
        problems += [_problem(leaves, source, fault) for fault in found]
    problems = list(dict.fromkeys(problems))
    if config is None or problems:
        more = len(problems) - MOST_PROBLEMS
        rest = [f"and {more:,} more"] if more > 0 else []
        raise ConfigError("\n".join([*problems[:MOST_PROBLEMS], *rest]))
    places = {key: f"{leaf.place}: {leaf.typed}" for key, leaf in leaves.items()}
    return config.noting(by_key={".".join(key): place for key, place in places.items()})


def _problem(leaves: Leaves, source: str, fault: dict[str, Any]) -> str:
    """One line for one of pydantic's errors."""
    inside: str = fault.get("ctx", {}).get("key", "")
    key: Key = (*(str(part) for part in fault["loc"]), *(inside.split(".") if inside else ()))[:2]
    leaf = leaves.get(key) or leaves.get(key[:1])
    if fault["type"] == "missing":
        return f"{source}: {'.'.join(key)}: missing; {_HINTS[key]}"
    return leaf.problem(fault["msg"]) if leaf else f"{source}: {'.'.join(key)}: {fault['msg']}"


def example_config() -> str:
    """A commented config to start from."""
    return Path(__file__).with_name("example.yaml").read_text(encoding="utf-8")


def config_schema() -> dict[str, Any]:
    """JSON schema of the config, for editors."""
    return Config.model_json_schema()


def unknown(section: str, name: str, value: object) -> str:
    """The problem of an unknown key: the key that was probably meant, or those that are known."""
    homes = [other for other, keys in SECTIONS.items() if name in keys and other != section]
    if not homes and name in ALIASES:
        homes, name = [ALIASES[name].key[0]], ALIASES[name].key[-1]
    if homes:
        return f"did you mean {homes[0] + '.' if homes[0] else ''}{name}?"
    here = {key: (key, Alias((section, key))) for key in SECTIONS[section]}
    aliases = {alias: (alias, means) for alias, means in ALIASES.items()}
    pairs = ((other, key) for other, keys in SECTIONS.items() if other for key in keys)
    inside = {key: (f"{other}.{key}", Alias((other, key))) for other, key in pairs}
    for names in (here, aliases if section in ALIAS_SECTIONS else {}, inside):
        near = nearest(name, names, MISSPELT)
        if near is not None and takes(names[near][1], value):
            return f"did you mean {names[near][0]}?"
    return f"unknown key; known here are {', '.join(SECTIONS[section])}"


def takes(alias: Alias, value: object) -> bool:
    """True if the key of an alias accepts this value."""
    section, name = alias.key if len(alias.key) == 2 else (TOP, alias.key[0])
    field = _MODELS[section].model_fields.get(name)
    if field is None:  # half of a key, such as beta1
        return True
    kind: Any = Annotated[field.annotation, field]
    try:
        TypeAdapter(kind).validate_python(alias.convert(value), strict=True)
    except ValueError:  # which pydantic's error is, too
        return False
    return True
