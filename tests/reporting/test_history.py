"""Figures over steps, thinned."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatrain.errors import StorageError
from megatrain.reporting.metrics import BUCKETS, History, Line, read_history
from tests.reporting.one_step import STEP


def row(step: int, loss: float = 1.0, **others: Any) -> dict[str, Any]:
    return replace(STEP, step=step, loss=loss).to_dict() | others


def evaluation(step: int, loss: float) -> dict[str, Any]:
    return {"step": step, "eval_loss": loss, "eval_target_tokens": 9, "eval_s": 0.5}


def written(folder: Path, rows: list[dict[str, Any]], torn: str = "") -> Path:
    lines = [json.dumps(one) + "\n" for one in rows]
    (folder / "metrics.jsonl").write_text("".join(lines) + torn)
    return folder


def test_a_short_line_has_every_point():
    line = Line()
    given = [(step, math.sin(step)) for step in range(1, 2 * BUCKETS + 1)]
    for step, value in given:
        line.add(step, value)
    assert line.points() == given
    assert Line().points() == []


def test_a_long_line_keeps_its_extremes_and_its_ends():
    for steps in [1000, 12_345, 100_000]:
        line, given = Line(), {}
        for step in range(1, steps + 1):
            given[step] = math.sin(step / 500) + (step == 9001) * 50.0 - (step == 777) * 50.0
            line.add(step, given[step])
        points = line.points()
        assert len(points) <= 2 * BUCKETS + 2
        assert all(given[step] == value for step, value in points)
        assert [step for step, _ in points] == sorted(step for step, _ in points)
        assert {step for step, _ in points} >= {1, 777, steps, *([9001] if steps > 9000 else [])}
        # a chart has no hole: a bucket is a small part of it
        gaps = [b[0] - a[0] for a, b in itertools.pairwise(points)]
        assert max(gaps) <= 2 * steps / BUCKETS


def test_the_trend_is_of_true_means():
    short, long = Line(), Line()
    for step in range(1, 100):
        short.add(step, 1.0)
    for step in range(1, 5001):
        long.add(step, float(step) + 1000 * (step % 2))
    assert short.trend() == (0, [])
    each, means = long.trend()
    assert 60 <= len(means) <= 120
    for step, mean in means:
        assert mean == pytest.approx(step + 500, abs=each / 2 + 1)


def test_what_is_summed_and_counted():
    steps = [row(step, tokens=10, skipped=step % 2 == 0, energy_j=5.0) for step in range(1, 5)]
    history = History([evaluation(0, 3.0), *steps, row(5, 9.0, spike=True), evaluation(5, 2.0)])
    assert history.totals["tokens"] == 40 + 2000 and history.totals["energy_j"] == 20
    assert history.step_time.total_s == pytest.approx(5 * 2.0)
    assert history.skipped == [2, 4] and history.median_s == 2.0
    assert history.lines["spike"].points() == [(5, 9.0)]
    assert [*history.values("eval_loss")] == [3.0, 2.0] and not history.values("mfu")


def test_a_torn_last_line_is_left_out(tmp_path):
    folder = written(tmp_path, [row(1), row(2)], '{"step": 3, "lo')
    assert read_history(folder).step == 2


def test_two_evaluations_of_a_step_both_count(tmp_path):
    rows = [row(1), evaluation(1, 3.0), {"step": 1, "eval_arc/acc": 0.5, "eval_s": 1.0}]
    history = read_history(written(tmp_path, rows))
    assert [*history.values("eval_loss")] == [3.0]
    assert [*history.values("eval_arc/acc")] == [0.5]


def test_a_folder_without_metrics_is_no_run(tmp_path):
    with pytest.raises(StorageError, match=r"metrics\.jsonl: cannot be read"):
        read_history(tmp_path)
