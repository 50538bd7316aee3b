"""Configs of axolotl, LLaMA-Factory, TRL and the public MegaTrain repository into ours.

What becomes of each of their keys is said: mapped, without effect here, impossible or unknown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatrain.config.document import COMMAND_LINE, Located, plain, read_text, read_yaml
from megatrain.config.importing import axolotl, llama_factory, trl, upstream
from megatrain.config.importing.sheet import Sheet, tables_of
from megatrain.config.load import load_config, parse_override
from megatrain.config.names import RIVALS
from megatrain.errors import ConfigError

UPSTREAM = "megatrain-upstream"
TRAINERS = {"axolotl": axolotl, "llama-factory": llama_factory, "trl": trl, UPSTREAM: upstream}
YAML_1_1 = {"yes": True, "on": True, "off": False, "no": False}  # as their reader has these words


def import_config(
    source: str | Path,
    trainer: str | None = None,
    processes: int | None = None,
    method: str | None = None,
    overrides: Sequence[str] = (),
    output: Path | None = None,
) -> Sheet:
    """Read a YAML or JSON file of another trainer.

    trainer: one of TRAINERS; None finds it out by the keys.
    processes: on which it was trained; None: one is assumed, and said.
    method: of the run, where the file does not say it.
    overrides: `key=value` of ours, as after a command.
    output: the file that the config will be; a chat template that is written out lies beside it.

    Raises ConfigError for a file that cannot be read, or is no config of theirs.
    """
    name = str(source)
    document = read_yaml(read_text(Path(source)), name).value
    if not isinstance(document, dict):
        raise ConfigError(f"{name}: is no mapping of keys")
    given = {}
    for key, one in document.items():
        value = plain(one)
        said = YAML_1_1.get(value, value) if isinstance(value, str) else value
        given[key] = Located(said, one.place)
    trainer = trainer or _trainer_of(given, name)
    if trainer not in TRAINERS:
        raise ConfigError(f"--from: {trainer} is none of {', '.join(TRAINERS)}")
    sheet = Sheet(name, trainer, given, Path("imported") if output is None else output)
    if processes is None and trainer != UPSTREAM:
        sheet.assume("one process trained it; for N GPUs: --processes N, which multiplies the step")
    TRAINERS[trainer].read(sheet, processes or 1, method)
    if method is not None:
        sheet.origins["method"] = "--method"
    for override in overrides:
        _override(sheet, override)
    try:
        load_config(sheet.tree())
    except ConfigError as error:
        sheet.missing = str(error).replace("keywords: ", "")
    return sheet


def _trainer_of(given: Mapping[str, Any], name: str) -> str:
    """The trainer of which the file has most keys."""
    counts = {
        trainer: sum(key in given for key in tables_of(trainer)["marks"].split())
        for trainer in TRAINERS
    }
    best = max(counts.values())
    found = [trainer for trainer, count in counts.items() if count == best]
    if best == 0 or len(found) > 1:
        known = ", ".join(TRAINERS)
        raise ConfigError(f"{name}: cannot tell whose config it is; say --from, one of {known}")
    return found[0]


def _override(sheet: Sheet, override: str) -> None:
    """Set one of our keys, in the place of those that exclude it."""
    key, value = override.partition("=")[0], plain(parse_override(override))
    for name in key.split("."):
        value = value[name]
    ways = [[".".join(one) for keys in rivals for one in keys] for rivals in RIVALS]
    others = [one for keys in ways if key in keys for one in keys]
    for other in [*others, *(one for one in sheet.config if one.startswith(f"{key}."))]:
        sheet.config.pop(other, None)
    sheet.config[key], sheet.origins[key] = value, COMMAND_LINE
