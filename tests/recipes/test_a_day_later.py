"""Chat templates that ask for the date are told that of the run's first start."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from datetime import date
from pathlib import Path

import pytest

from megatrain.config import load_config
from megatrain.recipes import rows as clock
from tests.commands import evaluations_of
from tests.recipes.conftest import cut_back
from tests.recipes.same_run import same_run

FIRST, SECOND = date(2026, 11, 23), date(2026, 11, 24)
AtDay = Callable[[date], None]


@pytest.fixture
def at_day(project: Path, monkeypatch: pytest.MonkeyPatch) -> AtDay:
    """at_day(day): it is another day, and nothing is cached. The model's template says the date."""
    model = project / "model"
    source = model.resolve()
    model.unlink()
    shutil.copytree(source, model)
    template = model / "chat_template.jinja"
    template.write_text("{{ strftime_now('%d %b %Y, %H:%M') }}\n" + template.read_text())

    def go(day: date) -> None:
        monkeypatch.setattr(clock, "today", lambda: day)
        monkeypatch.setenv("MEGATRAIN_CACHE", str(project / f"cache-{day}"))

    return go


@pytest.mark.slow
def test_a_run_that_goes_on_a_day_later_has_equal_bits(megatrain, project, at_day):
    at_day(FIRST)
    megatrain("train cfg.yaml output=whole")
    cut_back(Path(shutil.copytree(project / "whole", project / "halves", symlinks=True)))
    at_day(SECOND)
    megatrain("resume halves")
    same_run(project / "whole", project / "halves")
    assert load_config("whole/config.yaml").data.date == "auto", "as it was asked for"
    for run in ("whole", "halves"):
        assert load_config(f"{run}/config.resolved.yaml").data.date == "2026-11-23"
    at_day(date(2026, 11, 25))
    loss = evaluations_of(project / "halves")[-1]["eval_loss"]
    assert megatrain("eval halves --json").json["eval_loss"] == pytest.approx(loss, rel=1e-6)


def test_a_new_run_is_told_its_own_day_or_the_one_that_is_set(megatrain, at_day, monkeypatch):
    at_day(FIRST)
    assert "23 Nov 2026, 00:00" in megatrain("data cfg.yaml --rows 1").out
    monkeypatch.setattr(clock, "today", lambda: SECOND)  # the rows of the day before are cached
    assert "24 Nov 2026, 00:00" in megatrain("data cfg.yaml --rows 1").out
    assert "26 Jul 2024, 00:00" in megatrain("data cfg.yaml --rows 1 data.date=2024-07-26").out


@pytest.mark.parametrize("day", ["2026-02-30", "20261123", "today", "5"])
def test_other_texts_are_no_dates(megatrain, day):
    words = "data.date: must be a date such as 2026-11-23, or auto, not "
    assert words in megatrain("data cfg.yaml", f"data.date={day}", code=2).err
