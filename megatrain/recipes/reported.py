"""A run as its folder describes it, for a report. Imports nothing heavy."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain.config.document import plain, read_yaml
from megatrain.config.resuming import RESOLVED_FILE
from megatrain.errors import ConfigError, printable
from megatrain.reporting.history import History, Row
from megatrain.reporting.samples import SAMPLES_FILE

ENVIRONMENT_FILE, PLAN_FILE = "env.json", "plan.json"


@dataclass(frozen=True)
class Reported:
    """A run, as its folder describes it. What cannot be read is empty."""

    name: str
    history: History
    plan: dict[str, Any]
    environment: dict[str, Any]
    config: dict[str, Any]
    config_text: str
    samples: list[Row]

    @classmethod
    def of(cls, folder: Path, history: History, name: str = "") -> Reported:
        """name: by default the folder's."""
        described = _read(folder / RESOLVED_FILE)
        try:
            config: Any = plain(read_yaml(described, RESOLVED_FILE))
        except ConfigError:
            config = {}  # the text is shown as it is
        return cls(
            printable(name or folder.resolve().name),
            history,
            _object(_read(folder / PLAN_FILE)),
            _object(_read(folder / ENVIRONMENT_FILE)),
            config if isinstance(config, dict) else {},
            described,
            [row for line in _read(folder / SAMPLES_FILE).splitlines() if (row := _object(line))],
        )

    def planned(self, tier: str) -> int | None:
        """Bytes at the peak."""
        need = self.plan.get("totals", {}).get(tier, {}).get("need")
        return need if isinstance(need, int) else None

    def asked(self, section: str) -> dict[str, Any]:
        given = self.config.get(section)
        return given if isinstance(given, dict) else {}

    def values(self, name: str) -> list[float]:
        return self.history.values(name)

    def peak(self, name: str) -> float | None:
        return max(self.values(name), default=None)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _object(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
