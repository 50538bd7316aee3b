"""From a file of another trainer to a config of ours and a list of what became of its keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain.config.document import COMMAND_LINE, Located, plain, read_text, read_yaml, write_yaml
from megatrain.config.fields import Config
from megatrain.config.importing import axolotl, llama_factory, trl
from megatrain.config.importing.sheet import Line, Sheet
from megatrain.config.load import load_config, parse_override
from megatrain.config.names import RIVALS
from megatrain.config.values import shown
from megatrain.errors import ConfigError, printable

Reader = Callable[[Sheet, int, str | None], None]
TRAINERS: dict[str, tuple[str, Reader]] = {
    "axolotl": (axolotl.MARKS, axolotl.read),
    "llama-factory": (llama_factory.MARKS, llama_factory.read),
    "trl": (trl.MARKS, trl.read),
}
YAML_1_1 = {"yes": True, "on": True, "off": False, "no": False}  # as their reader has these words
WIDTH = 100


@dataclass(frozen=True)
class Imported:
    """The result of importing a file.

    Attributes:
        config: our keys, nested; `text` is the same as a file with comments.
        missing: what keeps it from being a whole config, as `load_config` says it.
        files: texts to be written beside the file, by name.
    """

    source: str
    trainer: str
    config: Mapping[str, Any]
    text: str
    missing: str
    mapped: Sequence[Line]
    dropped: Sequence[Line]
    refused: Sequence[Line]
    unknown: Sequence[Line]
    assumed: Sequence[str]
    files: Mapping[str, str]

    @property
    def faithful(self) -> bool:
        """True if nothing that changes the result is lost."""
        return not (self.refused or self.unknown)

    def to_dict(self) -> dict[str, Any]:
        names = ("mapped", "dropped", "refused", "unknown")
        lists = {
            name: {line.name: list(line.said) for line in getattr(self, name)} for name in names
        }
        about = {"trainer": self.trainer, "config": self.config, "missing": self.missing}
        return {**about, **lists, "assumed": list(self.assumed)}

    def report(self) -> str:
        """The lists, for people."""
        mapped = [f"{names} -> {said}" for names, said in _by_target(self.mapped)]
        parts = {
            "mapped": mapped,
            "assumed": list(self.assumed),
            "without effect here": _by_reason(self.dropped),
            "impossible": [f"{one.place}: {one.name}: {one.said[0]}" for one in self.refused],
            "unknown": [f"{one.place}: {one.name}: {shown(one.value)}" for one in self.unknown],
            "missing or contradictory": self.missing.splitlines(),
        }
        said = [f"{self.source}: a config of {self.trainer}"]
        for title, lines in parts.items():
            said += [f"{title} ({len(lines)})", *(f"  {line}" for line in lines)] if lines else []
        return printable("\n".join(said))


def import_config(
    source: str | Path,
    trainer: str | None = None,
    processes: int | None = None,
    method: str | None = None,
    overrides: Sequence[str] = (),
    output: Path | None = None,
) -> Imported:
    """Read a YAML or JSON file of another trainer.

    trainer: axolotl, llama-factory or trl; None finds it out by the keys.
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
    given = {key: _as_theirs(entry) for key, entry in document.items()}
    trainer = trainer or _trainer_of(given, name)
    if trainer not in TRAINERS:
        raise ConfigError(f"--from: {trainer} is none of {', '.join(TRAINERS)}")
    sheet = Sheet(given, Path(source).parent, trainer)
    if processes is None:
        sheet.assume("one process trained it; for N GPUs: --processes N, which multiplies the step")
    TRAINERS[trainer][1](sheet, processes or 1, method)
    if method is not None:
        sheet.origins["method"] = "--method"
    stem = Path("imported") if output is None else output.with_suffix("")
    files = {f"{stem}.{file}": text for file, text in sheet.files.items()}
    if files:
        sheet.config["data.chat_template"] = next(iter(files))
    for override in overrides:
        _override(sheet, override)
    return _imported(sheet, name, files)


def _as_theirs(entry: Located) -> Located:
    value = plain(entry)
    return Located(YAML_1_1.get(value, value) if isinstance(value, str) else value, entry.place)


def _trainer_of(given: Mapping[str, Any], name: str) -> str:
    """The trainer of which the file has most keys."""
    counts = {
        trainer: sum(key in given for key in marks.split())
        for trainer, (marks, _) in TRAINERS.items()
    }
    best = max(counts.values())
    found = [trainer for trainer, count in counts.items() if count == best]
    if best == 0 or len(found) > 1:
        known = ", ".join(TRAINERS)
        raise ConfigError(f"{name}: cannot tell whose config it is; say --from, one of {known}")
    return found[0]


def _override(sheet: Sheet, override: str) -> None:
    """Set one of our keys, in the place of those that exclude it."""
    key, tree = override.partition("=")[0], parse_override(override)
    entry = Located(tree, COMMAND_LINE)
    for name in key.split("."):
        entry = entry.value[name]
    ways = [[".".join(one) for keys in rivals for one in keys] for rivals in RIVALS]
    others = [one for keys in ways if key in keys for one in keys]
    for other in [*others, *(one for one in sheet.config if one.startswith(f"{key}."))]:
        sheet.config.pop(other, None)
    sheet.config[key] = plain(entry)
    sheet.origins[key] = COMMAND_LINE


def _imported(sheet: Sheet, name: str, files: Mapping[str, str]) -> Imported:
    tree = _nested(sheet.config)
    missing = ""
    try:
        load_config(tree)
    except ConfigError as error:
        missing = str(error).replace("keywords: ", "")
    order = {key: place for place, key in enumerate(sheet.given)}
    mapped, dropped, refused, unknown = (
        sorted(lines.values(), key=lambda line: order.get(line.name, len(order)))
        for lines in (sheet.mapped, sheet.dropped, sheet.refused, sheet.unknown)
    )
    text = _text(sheet, name, [*refused, *unknown])
    lists = (mapped, dropped, refused, unknown)
    return Imported(name, sheet.trainer, tree, text, missing, *lists, sheet.assumed, files)


def _nested(config: Mapping[str, object]) -> dict[str, Any]:
    """Dotted keys as a tree, in the order of the config's sections."""
    tree: dict[str, Any] = {}
    order = list(Config.model_fields)
    for key in sorted(config, key=lambda key: order.index(key.partition(".")[0])):
        section, _, name = key.rpartition(".")
        target = tree.setdefault(section, {}) if section else tree
        target[name] = config[key]
    return tree


def _text(sheet: Sheet, name: str, lost: Sequence[Line]) -> str:
    """The config with a comment on where each value came from."""
    source = f"Imported from {sheet.trainer}'s {Path(name).name} by `megatrain import`."
    lines = [_comment(source)]
    lines += [_comment(f"NOT HONOURED: {one.name}: {shown(one.value)}") for one in lost]
    lines += [_comment(f"assumed: {sentence}") for sentence in sheet.assumed]
    for section, value in _nested(sheet.config).items():
        inside = section not in sheet.config
        lines += ["", f"{section}:"] if inside else [""]
        for key, one in value.items() if inside else [(section, value)]:
            origin = _comment(sheet.origins[f"{section}.{key}" if inside else key])
            written = write_yaml({key: one}).rstrip("\n").split("\n")
            written = [f"{'  ' * inside}{line}" for line in written]
            if len(written) == 1 and len(written[0]) + len(origin) < WIDTH:
                lines.append(f"{written[0]}  {origin}")
            else:
                lines += [f"{'  ' * inside}{origin}", *written]
    return "\n".join(lines) + "\n"


def _comment(text: str) -> str:
    """A comment of one line, whatever the text of another's file holds."""
    return f"# {printable(' '.join(text.split()))}"


def _by_target(lines: Sequence[Line]) -> Iterator[tuple[str, str]]:
    """(keys with their values, our keys) of lines that say the same."""
    targets: dict[tuple[str, ...], list[str]] = {}
    for line in lines:
        targets.setdefault(line.said, []).append(f"{line.name}: {shown(line.value)}")
    yield from ((", ".join(names), ", ".join(said)) for said, names in targets.items())


def _by_reason(lines: Sequence[Line]) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for line in lines:
        reasons.setdefault(line.said[0], []).append(line.name)
    return [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()]
