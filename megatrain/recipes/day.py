"""The day of a run, which chat templates are told."""

from __future__ import annotations

from datetime import date, datetime

from megatrain.config import Config


def day_of(config: Config) -> date:
    """The config's, else today."""
    return today() if config.data.date == "auto" else date.fromisoformat(config.data.date)


def today() -> date:
    """In the time zone of this machine."""
    return datetime.now().astimezone().date()
