"""metrics.jsonl: its keys, valid JSON whatever the loss, and a clean cut on resume."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import signal
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatrain.errors import StorageError
from megatrain.reporting.metrics import (
    BUCKETS,
    ENOUGH,
    METRICS_FILE,
    RECENT_STEPS,
    History,
    Line,
    MetricsWriter,
    Spikes,
    SteadyTime,
    StepTime,
    cut_back,
    read_metrics,
)
from megatrain.reporting.summary import bound_in_words
from tests.helpers.files import largest_file
from tests.reporting.one_step import STEP


def write_step(writer: MetricsWriter, step: int) -> None:
    """A step, and the evaluation after every second one; step 0 is an evaluation alone."""
    if step:
        writer.write_step(replace(STEP, step=step))
    if step % 2 == 0:
        writer.write_eval(step, 3.0 - step / 10, 100, 1.5)


def write(run_dir: Path, steps: int) -> None:
    run_dir.mkdir(exist_ok=True)
    with MetricsWriter(run_dir / METRICS_FILE) as writer:
        for step in range(steps + 1):
            write_step(writer, step)


def test_a_step_has_exactly_the_documented_keys_in_their_order(tmp_path):
    write(tmp_path, 1)
    row = json.loads((tmp_path / METRICS_FILE).read_text().splitlines()[1])
    assert " ".join(row) == (
        "step loss aux_loss expert_load_max grad_norm lr tokens target_tokens epoch step_s "
        "tokens_per_s tflops mfu gpu_peak_bytes host_bytes skipped spike energy_j time "
        "shares advice"
    )
    keys = "compute wait_upload wait_update wait_download wait_nvme wait_exchange wait_network "
    keys += "data rollout reward"
    assert " ".join(row["time"]) == " ".join(row["shares"]) == keys
    none = dict.fromkeys(keys.split(), 0.0)
    assert row["shares"] == {**none, "compute": 0.75, "wait_update": 0.25}
    assert (row["loss"], row["skipped"]) == (2.5, False)
    first, _ = [*read_metrics(tmp_path)]
    assert first == {"step": 0, "eval_loss": 3.0, "eval_target_tokens": 100, "eval_s": 1.5}


def test_what_is_not_finite_is_null(tmp_path):
    values = (math.nan, math.inf, -math.inf)
    with MetricsWriter(tmp_path / METRICS_FILE) as writer:
        for value in values:
            writer.write_step(replace(STEP, loss=value, grad_norm=value, skipped=True))
            writer.write_eval(1, value, 5, 0.5)
    text = (tmp_path / METRICS_FILE).read_text()
    assert "NaN" not in text and "Infinity" not in text
    rows = [*read_metrics(tmp_path)]
    assert {row[name] for row in rows for name in ("loss", "eval_loss") if name in row} == {None}


def test_every_line_survives_a_kill(tmp_path):
    child = os.fork()
    if child == 0:
        writer = MetricsWriter(tmp_path / METRICS_FILE)
        writer.write_step(STEP)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert [row["step"] for row in [*read_metrics(tmp_path)]] == [1]


def test_a_file_or_folder_that_is_gone_is_a_storage_error(tmp_path):
    with pytest.raises(StorageError, match=r"metrics\.jsonl: cannot read it: No such file"):
        [*read_metrics(tmp_path)]
    words = r"nowhere.metrics\.jsonl: cannot write it: No such file"
    with pytest.raises(StorageError, match=words):
        MetricsWriter(tmp_path / "nowhere" / METRICS_FILE)


def test_resume_cuts_back_to_the_checkpoint_and_writes_on(tmp_path):
    for step in (0, 1, 2, 5, 9):
        write(tmp_path / str(step), 5)
        before = [row for row in [*read_metrics(tmp_path / str(step))] if row["step"] <= step]
        with MetricsWriter(tmp_path / str(step) / METRICS_FILE) as writer:
            cut_back(writer.path, step)
            writer.write_step(replace(STEP, step=step + 1))
        rows = [*read_metrics(tmp_path / str(step))]
        assert rows[:-1] == before
        assert rows[-1]["step"] == step + 1


def test_a_file_torn_anywhere_is_cut_to_whole_lines(tmp_path):
    write(tmp_path, 6)
    path = tmp_path / METRICS_FILE
    whole = path.read_bytes()
    for length in random.Random(0).sample(range(len(whole)), 200):
        path.write_bytes(whole[:length])
        with MetricsWriter(tmp_path / METRICS_FILE) as writer:
            cut_back(path, 4)
            writer.write_step(replace(STEP, step=5))
        lines = path.read_bytes().splitlines(keepends=True)
        assert b"".join(lines[:-1]) == whole[: sum(map(len, lines[:-1]))]
        assert json.loads(lines[-1])["step"] == 5


def test_a_damaged_line_costs_no_other(tmp_path, caplog):
    write(tmp_path, 6)
    path = tmp_path / METRICS_FILE
    lines = path.read_bytes().splitlines(keepends=True)
    last = max(n for n, line in enumerate(lines) if json.loads(line)["step"] <= 4)
    for damage, (number, line) in itertools.product((b"{", b"\xff", b"\n"), enumerate(lines)):
        damaged = line[:3] + damage + line[4:]
        path.write_bytes(b"".join([*lines[:number], damaged, *lines[number + 1 :]]))
        caplog.clear()
        cut_back(path, 4)
        kept = [*lines[: last + 1]]
        if number < last:
            kept[number] = damaged
            assert f"{METRICS_FILE}:{number + 1}: is damaged" in caplog.messages[0]
        elif number == last:
            kept.pop()
        assert path.read_bytes() == b"".join(kept)
        steps = {row["step"] for row in [*read_metrics(tmp_path)]}
        assert steps >= {json.loads(line)["step"] for n, line in enumerate(kept) if n != number}


def test_on_a_full_disk_lines_wait_and_are_written_when_there_is_room(tmp_path, caplog):
    write(tmp_path / "roomy", 20)
    whole = (tmp_path / "roomy" / METRICS_FILE).read_bytes()
    with MetricsWriter(tmp_path / METRICS_FILE) as writer, ExitStack() as disk:
        for step in range(21):
            if step in (2, 9, 15):
                disk.close()
            if step in (2, 9):  # the file ends within a line, and more lines wait than have room
                disk.enter_context(largest_file(len(whole) * step // 28))
            write_step(writer, step)
    assert (tmp_path / METRICS_FILE).read_bytes() == whole
    (said,) = caplog.messages
    assert "training goes on, and its lines wait" in said


def test_what_waits_is_written_at_the_end_or_missed_aloud(tmp_path, caplog):
    with MetricsWriter(tmp_path / METRICS_FILE) as writer, largest_file(10):
        writer.write_step(STEP)
    assert [row["step"] for row in [*read_metrics(tmp_path)]] == [STEP.step]
    caplog.clear()
    with largest_file(0), MetricsWriter(tmp_path / METRICS_FILE) as writer:
        writer.write_step(STEP)
        writer.write_step(STEP)
    first, second = caplog.messages
    assert "File too large" in first and "lacks its last 2 lines" in second


def test_times_add_up_and_the_largest_share_bounds_the_step():
    both = StepTime(compute=1.0, data=0.5) + StepTime(compute=2.0, wait_update=6.5)
    assert both == StepTime(compute=3.0, wait_update=6.5, data=0.5)
    assert bound_in_words(both) == "waiting for the update 65%"
    assert bound_in_words(StepTime()).endswith(" 0%")


def test_what_no_wait_explains_is_computation():
    found = StepTime.of(2.0, {"wait_update": 0.5, "data": 0.25})
    assert found == StepTime(compute=1.25, wait_update=0.5, data=0.25)
    assert StepTime.of(1.0, {"wait_upload": 1.5}).compute == 0.0
    with pytest.raises(TypeError):
        StepTime.of(1.0, {"wait_coffee": 0.5})


def test_the_first_step_counts_until_there_is_another():
    steady = SteadyTime()
    medians = [steady.median_s]
    totals = []
    for step in (StepTime(compute=30.0), StepTime(compute=1.0, data=1.0), StepTime(compute=4.0)):
        steady.add(step)
        medians.append(steady.median_s)
        totals.append(steady.total)
    assert medians == [None, 30.0, 2.0, 3.0]
    assert totals[:2] == [StepTime(compute=30.0), StepTime(compute=1.0, data=1.0)]
    for _ in range(RECENT_STEPS):  # old ones are forgotten
        steady.add(StepTime(compute=2.0))
    assert steady.total == StepTime(compute=2.0 * RECENT_STEPS)


# -- which steps are spikes ------------------------------------------------------------------------


CALM = [1.0, 1.1, 0.9, 1.05] * 8


def test_a_spike_is_far_above_the_median():
    for loss, norm, found in [
        (1.9, 9.0, 0),  # below the multiples
        (2.1, 1.0, 1),
        (1.0, 11.0, 1),
        (9.0, 99.0, 2),
        (math.nan, None, 0),  # skipped, or not computed
    ]:
        spikes = Spikes()
        for value in CALM:
            assert spikes.look(value, value) == []
        assert len(spikes.look(loss, norm)) == found


def test_noise_as_large_as_the_median_and_a_beginning_have_no_spikes():
    noisy, new = Spikes(), Spikes()
    for number in range(ENOUGH):
        noisy.look(1.0, None)
        assert noisy.look(3.0, None) == []
        assert new.look(1000.0**number, None) == []


def test_a_resumed_run_knows_the_steps_before():
    rows = [{"step": n, "loss": x, "grad_norm": x, "target_tokens": 9} for n, x in enumerate(CALM)]
    empty = {"step": 40, "loss": 0.0, "grad_norm": 0.0, "target_tokens": 0}
    evaluation = {"step": 40, "eval_loss": 2.0}
    assert len(Spikes([*rows, empty, evaluation]).look(5.0, 50.0)) == 2


# -- figures over steps, thinned -------------------------------------------------------------------


def row(step: int, loss: float = 1.0, **others: Any) -> dict[str, Any]:
    return replace(STEP, step=step, loss=loss).to_dict() | others


def evaluation(step: int, loss: float) -> dict[str, Any]:
    return {"step": step, "eval_loss": loss, "eval_target_tokens": 9, "eval_s": 0.5}


def written(folder: Path, rows: list[dict[str, Any]], torn: str = "") -> Path:
    lines = [json.dumps(one) + "\n" for one in rows]
    (folder / "metrics.jsonl").write_text("".join(lines) + torn)
    return folder


def test_a_short_line_has_every_point_and_a_long_one_its_extremes_and_its_ends():
    short = Line()
    few = [(step, math.sin(step)) for step in range(1, 2 * BUCKETS + 1)]
    for step, value in few:
        short.add(step, value)
    assert short.points() == few
    assert Line().points() == []
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


def test_two_evaluations_of_a_step_both_count(tmp_path):
    rows = [row(1), evaluation(1, 3.0), {"step": 1, "eval_arc/acc": 0.5, "eval_s": 1.0}]
    history = History(read_metrics(written(tmp_path, rows)))
    assert [*history.values("eval_loss")] == [3.0]
    assert [*history.values("eval_arc/acc")] == [0.5]
