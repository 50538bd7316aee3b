"""Experiment trackers, against the real packages, offline."""

from __future__ import annotations

import json
import os
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatrain.errors import ConfigError
from megatrain.reporting import trackers
from megatrain.reporting.metrics import METRICS_FILE, MetricsWriter, read_metrics
from megatrain.reporting.trackers import check_installed, tracking
from tests.helpers.commands import wait_for
from tests.reporting.one_step import STEP

ABOUT = {"config": {"model": "m", "train": {"seq_len": 16}}, "plan": {"fits": True}}


class Fake:
    """Keeps what it is given; raises at the n-th line."""

    kept: list[Any] = []  # noqa: RUF012
    fails_at: int | None = None

    @classmethod
    def opened(cls, _dir: Path, run_id: str, first_step: int, about: Any) -> trackers.Tracker:
        cls.kept.append((run_id, first_step, dict(about)))
        return cls().log, cls().finish

    def log(self, row: trackers.Row) -> None:
        if row["step"] == self.fails_at:
            raise ConnectionError("no route to host")
        self.kept.append(dict(row))

    def finish(self, failed: bool) -> None:
        self.kept.append(failed)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[Fake]:
    monkeypatch.setitem(trackers.TRACKERS, "wandb", Fake.opened)
    monkeypatch.setattr(Fake, "kept", [])
    return Fake


def written(run_dir: Path, names: tuple[str, ...], first: int, last: int) -> None:
    """Steps first + 1 to last of a run, and an evaluation after the last."""
    file = run_dir / METRICS_FILE
    with tracking(names, run_dir, first, ABOUT) as also, MetricsWriter(file) as writer:
        writer.also = (also,)
        for step in range(first + 1, last + 1):
            writer.write_step(replace(STEP, step=step, loss=5.0 / step))
        writer.write_eval(last, 2.5, 100, 0.1)


def test_every_line_is_sent_and_a_resumed_run_is_the_same_run(tmp_path, fake):
    written(tmp_path, ("wandb",), 0, 3)
    written(tmp_path, ("wandb",), 2, 4)
    first, *rows, failed, again = fake.kept[:7]
    assert first[0] == again[0] and (first[1], again[1]) == (0, 2)
    assert (first[2], failed) == (ABOUT, False)
    lines = [*read_metrics(tmp_path)][: len(rows)]
    for row, line in zip(rows, lines, strict=True):
        assert row["step"] == line["step"]
        numbers = {name: value for name, value in line.items() if isinstance(value, int | float)}
        assert numbers.items() <= row.items()
    assert rows[0]["time/compute"] == lines[0]["time"]["compute"]


def test_one_that_fails_is_left_out_and_said(tmp_path, fake, monkeypatch, caplog):
    monkeypatch.setattr(fake, "fails_at", 2)
    written(tmp_path, ("wandb",), 0, 4)
    assert [row["step"] for row in fake.kept[1:]] == [1]
    assert len([*read_metrics(tmp_path)]) == 5
    (said,) = caplog.messages
    assert said == "wandb: failed and is left out from here on (no route to host)"


def test_an_id_that_cannot_be_kept_is_logged_and_no_link_is_followed(tmp_path, fake, caplog):
    mine = tmp_path / "mine"
    mine.write_text("precious")
    for name, make in (
        ("a link", lambda file: file.symlink_to(mine)),
        ("a link to nothing", lambda file: file.symlink_to(tmp_path / "none")),
        ("a pipe", os.mkfifo),
    ):
        run_dir = tmp_path / name
        run_dir.mkdir()
        make(run_dir / "tracking.json")
        caplog.clear()
        written(run_dir, ("wandb",), 0, 2)
        (warning,) = caplog.messages
        assert f"{name}/tracking.json: cannot be written (" in warning
        assert "trackers will take a resume for another run" in warning
    assert mine.read_text() == "precious" and not (tmp_path / "none").exists()


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_folder_that_is_a_link_is_not_written_through(tmp_path, caplog, name):
    pytest.importorskip(name)
    run_dir, outside = tmp_path / "run", tmp_path / "outside"
    run_dir.mkdir()
    outside.mkdir()
    (run_dir / name).symlink_to(outside)
    written(run_dir, (name,), 0, 2)
    assert not [*outside.iterdir()]
    (said,) = caplog.messages
    assert f"{name}: failed and is left out from here on (" in said
    assert f"run/{name} is a symbolic link; remove it" in said
    assert len([*read_metrics(run_dir)]) == 3


def test_an_error_of_the_run_is_told(tmp_path, fake):
    with pytest.raises(KeyError), tracking(("wandb",), tmp_path, 0, ABOUT):
        raise KeyError
    assert fake.kept[-1] is True


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"cfg.yaml:3: track: wandb is not installed; pip in.*\["):
        check_installed(["wandb"], "cfg.yaml:3: track")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_reads_it_back(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    written(tmp_path, ("tensorboard",), 0, 3)
    written(tmp_path, ("tensorboard",), 2, 4)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(one.step, one.value) for one in events.Scalars("loss")] == [
        (step, pytest.approx(5.0 / step)) for step in (1, 2, 3, 4)
    ]
    assert [one.step for one in events.Scalars("eval_loss")] == [4]
    assert b"seq_len" in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_wandb_keeps_it_offline(tmp_path, monkeypatch, capfd):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    written(tmp_path, ("wandb",), 0, 3)
    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    assert json.loads((tmp_path / "tracking.json").read_text())["id"] in file.name
    # its own process writes it
    wait_for(lambda: all(one in file.read_bytes() for one in (b"eval_loss", b"grad_norm")))
    assert b"seq_len" in file.read_bytes()
    assert not capfd.readouterr().out


@pytest.mark.filterwarnings("ignore")
def test_trackio_keeps_it_in_its_database(tmp_path, monkeypatch, capfd):
    trackio = pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_PROJECT", tmp_path.name)
    written(tmp_path, ("trackio",), 0, 3)
    database = Path(trackio.utils.TRACKIO_DIR) / f"{tmp_path.name}.db"
    with sqlite3.connect(database) as opened:
        rows = opened.execute("SELECT step, metrics FROM metrics ORDER BY step, id").fetchall()
    losses = {step: json.loads(metrics).get("loss") for step, metrics in rows[:3]}
    assert losses == {step: 5.0 / step for step in (1, 2, 3)}
    assert not capfd.readouterr().out
