"""Sets of rows that other trainers name: files, sets of the hub, their columns and formats."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatrain.config.importing.sheet import Sheet
from megatrain.data.samples import ROLES, SHAREGPT_ROLES
from megatrain.errors import ConfigError

LARGE = 2**28  # bytes of a file whose rows are not counted
LOADERS = ("json", "csv", "parquet", "text", "arrow")  # of `datasets`, in the place of a path
KNOWN_ROLES = {**ROLES, **SHAREGPT_ROLES}
TURNS = (("role", "content"), ("from", "value"))


@dataclass(frozen=True)
class Found:
    """One source.

    Attributes:
        columns: theirs by ours, which hold for all sources of a run, as `text_field` does.
    """

    path: str
    split: str | None = None
    format: str | None = None
    weight: float | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    text_field: str | None = None

    def entry(self) -> object:
        """As `data.train` has it: the path alone, if that is all."""
        said = {"path": self.path, "weight": self.weight, "split": self.split}
        said |= {"format": self.format}
        given = {name: value for name, value in said.items() if value is not None}
        return self.path if len(given) == 1 else given


def put_sources(sheet: Sheet, key: str, found: Sequence[Found], *names: str) -> None:
    """Set data.train or data.eval, and the columns of all sources."""
    if not found:
        sheet.drop("of a set that cannot be read", *names)
        return
    entries = [one.entry() for one in found]
    sheet.put(key, entries[0] if len(entries) == 1 else entries, *names)
    for ours in ("columns", "text_field"):
        every = [getattr(one, ours) for one in found]
        if any(one != every[0] for one in every):
            reason = f"data.{ours} is one for all sources, and these differ in it"
            sheet.refuse(names[0], f"{reason}; rename columns in the files")
        elif every[0]:
            sheet.put(f"data.{ours}", dict(every[0]) if ours == "columns" else every[0], *names)


def paths_of(sheet: Sheet, at: str, given: Mapping[str, Any], config: str = "name") -> list[Found]:
    """Files or a set of the hub, of their path, data_files, split and configuration.

    at: how the names of these keys begin.
    """
    path, split, files = str(given.get("path") or ""), given.get("split"), given.get("data_files")
    files = [] if files is None else files if isinstance(files, list) else [files]
    if path in LOADERS or (not path and files):
        paths = [str(file) for file in files]
    elif files and Path(path).is_dir():
        paths = [f"{path}/{file}" for file in files]
    else:
        paths = [path]
        if files:
            sheet.refuse(f"{at}data_files", "one file of a set of the hub; download and name it")
    if any(Path(one).is_file() for one in paths) or path in LOADERS:
        if split not in (None, "train"):
            sheet.refuse(f"{at}split", "a file has no splits; name a file of these rows")
        return [Found(one) for one in paths]
    if (named := given.get(config)) not in (None, "default"):
        return [Found(f"{path}:{named}:{split or 'train'}")]
    return [Found(one, None if split == "train" else split) for one in paths]


def turns(field: str, role: str, content: str) -> tuple[str, dict[str, str]] | None:
    """(format, columns) of rows whose conversations lie in a column, or None for unknown turns."""
    if (role, content) not in TURNS:
        return None
    if field == "messages" and role == "role":
        return "messages", {}
    if role == "role" and field != "conversations":
        return "messages", {"messages": field}
    return "sharegpt", {} if field == "conversations" else {"conversations": field}


def rows_in(path: Path) -> int | None:
    """Number of rows of a json or jsonl file that is not large; None for others."""
    if path.suffix not in (".json", ".jsonl") or path.stat().st_size > LARGE:
        return None
    if path.suffix == ".jsonl":
        return sum(bool(line.strip()) for line in path.read_bytes().splitlines())
    rows = read_json(path)
    return len(rows) if isinstance(rows, list) else None


def read_json(path: Path) -> object:
    """Read a JSON file. Raises ConfigError for one that is broken."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from None
