"""The keys of a config that may differ when a run is resumed."""

from __future__ import annotations

import glob
import os
import tomllib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatrain.config.document import COMMAND_LINE, IN_PYTHON
from megatrain.config.fields import Config
from megatrain.config.load import SECTIONS, load_config
from megatrain.errors import ConfigError
from megatrain.methods import METHODS
from megatrain.settings import EXCLUSIONS, KEYS, OPTIONS, SPENT

# Files of a run folder: the config as asked for, and with what was decided.
CONFIG_FILE, RESOLVED_FILE = "config.yaml", "config.resolved.yaml"
ENVIRONMENT_FILE = "env.json"  # versions, hardware, and who started the run
NEW_ORDER = "sums are added in another order from here on"
KEPT_OPTIONS = {option.key: option.resumed for option in OPTIONS if option.resumed}

_ROWS = tomllib.loads(Path(__file__).with_name("resuming.toml").read_text(encoding="utf-8"))
REFUSED, FLAGGED = (
    {key: reason for keys, reason in _ROWS[table].items() for key in keys.split()}
    for table in ("refused", "flagged")
)
_METHODS = (name for name in METHODS if name in SECTIONS)
FLAGGED |= dict.fromkeys(_METHODS, "the loss is another from here on") | KEPT_OPTIONS
# Keys whose chosen values a resumed run keeps, or sums would be rounded in another order.
KEPT_CHOICES = (*KEPT_OPTIONS, *_ROWS["kept_choices"].split())
PATHS = _ROWS["paths"].split()  # keys that name files


def asked_again(run_dir: Path, overrides: Sequence[str] | Mapping[str, Any]) -> Config:
    """Read what the run's config.yaml asks for now, with keys set over it. Raises ConfigError for a
    folder that holds no run, and for wrong overrides."""
    path = run_dir / CONFIG_FILE
    if not path.is_file():
        raise ConfigError(
            f"{run_dir}: is not a run folder (no {CONFIG_FILE}); name the folder that a run wrote "
            "(`output` in its config)"
        )
    return with_absolute_paths(load_config(path, overrides, of_run=True), but=("output",))


def for_state(config: Config, decided: Mapping[str, Any]) -> dict[str, Any]:
    """The part of the config that a checkpoint keeps: as asked for, and what was chosen for it."""
    asked = with_absolute_paths(config).model_dump(mode="json", exclude={"output"})
    chosen = _flat(config.with_values(decided))
    return {"config": asked, "chosen": {key: chosen[key] for key in KEPT_CHOICES}}


def resumed_configs(
    run_dir: Path, asked: Config, saved: Mapping[str, Any]
) -> tuple[Config, Config]:
    """(the config that `saved` is of, the config to go on with), both with the run's choices.

    A choice is kept unless its key was changed since: on the command line or in config.yaml.

    Args:
        asked: as `asked_again`.
        saved: of a checkpoint, as `for_state`.
    """
    then = load_config(saved["config"], of_run=True)
    kept = {"output": str(run_dir), **saved["chosen"]}  # the folder may have been moved
    now, before = (_flat(config) for config in (asked, then))
    for rule in (*EXCLUSIONS, SPENT):  # an option that is set now gives up what it excludes
        key, other = KEYS[rule.field], KEYS[rule.other]
        if now[key] not in ("auto", 0, False) and other in kept:
            kept[other] = rule.needs
        elif now[other] is False and key in kept:
            kept[key] = type(kept[key])()  # 0 or false
    typed = {key for key in kept if asked.where(key).startswith((COMMAND_LINE, IN_PYTHON))}
    edited = {key for key in saved["chosen"] if now[key] != before[key]}
    after = asked.with_values({key: kept[key] for key in kept if key not in typed | edited})
    return then.with_values(kept), after


def is_open(asked: Config, key: str) -> bool:
    """True if a key is auto, and was not set so on the command line or in Python, which asks for
    another choice than the run's. asked: as `asked_again`."""
    typed = asked.where(key).startswith((COMMAND_LINE, IN_PYTHON))
    return not typed and _flat(asked)[key] == "auto"


def with_absolute_paths(config: Config, but: Collection[str] = ()) -> Config:
    """The same with what names files here told from the root: a resume may be started elsewhere."""
    given = _flat(config)
    keys = [key for key in PATHS if key not in but]
    always = {"memory.nvme", "output"}
    return config.with_values({key: _absolute(given[key], key in always) for key in keys})


def _absolute(value: Any, always: bool) -> Any:
    if isinstance(value, list):
        return [_absolute(one, always) for one in value]
    if isinstance(value, dict):  # a source with a weight or a split
        return {**value, "path": _absolute(value["path"], always)}
    if not isinstance(value, str):
        return value
    folder, colon, split = value.partition(":")
    if always or os.path.exists(value) or glob.glob(value, recursive=True):
        return os.path.abspath(value)
    return os.path.abspath(folder) + colon + split if colon and os.path.exists(folder) else value


def check_changes(before: Config, after: Config) -> list[str]:
    """Warnings for changes that alter the run. Raises ConfigError for a key that cannot change."""
    old, new = _flat(before), _flat(after)
    warnings = []
    for key in (key for key in {**old, **new} if old.get(key) != new.get(key)):
        change = f"from {old.get(key)!r} to {new.get(key)!r}"
        if reason := _reason(key, REFUSED):
            cannot = f"cannot change {change} in a resumed run"
            raise ConfigError(f"{after.where(key)}: {cannot}, since {reason}")
        if reason := _reason(key, FLAGGED):
            warnings.append(f"{key} changed {change}: {reason}")
    return warnings


def unheeded(command: Config, run: Config) -> list[str]:
    """Keys that a command asks otherwise than the run that it goes on with. What it leaves "auto"
    may have been chosen by a resume."""
    said, kept = (_flat(with_absolute_paths(one)) for one in (command, run))
    others = [key for key, value in said.items() if value not in ("auto", kept.get(key))]
    return [key for key in others if key != "output"]


def _reason(key: str, table: Mapping[str, str]) -> str | None:
    """The first row of the key or of its section."""
    rows = (row for row in table if f"{key}.".startswith(f"{row}."))
    return table.get(next(rows, ""))


def _flat(config: Config) -> dict[str, Any]:
    return flatten(config.model_dump(mode="json"))


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys of a nested dict."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        inside = isinstance(value, dict)
        flat |= flatten(value, f"{prefix}{key}.") if inside else {prefix + key: value}
    return flat
