"""metrics.jsonl: its keys, valid JSON whatever the loss, and a clean cut on resume."""

from __future__ import annotations

import json
import math
import os
import random
import resource
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from megatrain.errors import StorageError
from megatrain.reporting.metrics import (
    METRICS_FILE,
    RECENT_STEPS,
    MetricsWriter,
    SteadyTime,
    StepMetrics,
    StepTime,
    read_metrics,
)

STEP = StepMetrics(
    step=1,
    loss=2.5,
    grad_norm=0.75,
    lr=1e-5,
    tokens=2000,
    target_tokens=1500,
    epoch=0.1,
    step_s=2.0,
    tokens_per_s=1000.0,
    tflops=1.6,
    mfu=None,
    gpu_peak_bytes=None,
    host_bytes=2**30,
    skipped=False,
    energy_j=None,
    time=StepTime(compute=1.5, wait_update=0.5),
    advice="nothing is worth changing",
)


def write(run_dir: Path, steps: int, eval_every: int = 2) -> None:
    with MetricsWriter(run_dir) as writer:
        writer.write_eval(0, 3.0, 100, 1.5)
        for step in range(1, steps + 1):
            writer.write_step(replace(STEP, step=step))
            if step % eval_every == 0:
                writer.write_eval(step, 3.0 - step / 10, 100, 1.5)


def test_a_step_has_exactly_the_documented_keys_in_their_order(tmp_path):
    write(tmp_path, 1)
    row = json.loads((tmp_path / METRICS_FILE).read_text().splitlines()[1])
    assert " ".join(row) == (
        "step loss grad_norm lr tokens target_tokens epoch step_s tokens_per_s tflops mfu "
        "gpu_peak_bytes host_bytes skipped energy_j time shares advice"
    )
    assert (
        list(row["time"])
        == list(row["shares"])
        == ["compute", "wait_upload", "wait_update", "wait_download", "wait_nvme", "data"]
    )
    waits = dict.fromkeys(("wait_upload", "wait_download", "wait_nvme", "data"), 0.0)
    assert row["shares"] == {"compute": 0.75, "wait_update": 0.25, **waits}
    assert row["loss"] == 2.5
    assert row["skipped"] is False


def test_an_evaluation_has_its_own_keys(tmp_path):
    write(tmp_path, 0)
    assert read_metrics(tmp_path) == [
        {"step": 0, "eval_loss": 3.0, "eval_target_tokens": 100, "eval_s": 1.5}
    ]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_null(tmp_path, value):
    with MetricsWriter(tmp_path) as writer:
        writer.write_step(replace(STEP, loss=value, grad_norm=value, skipped=True))
        writer.write_eval(1, value, 5, 0.5)
    text = (tmp_path / METRICS_FILE).read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    step, evaluation = read_metrics(tmp_path)
    assert step["loss"] is None
    assert step["grad_norm"] is None
    assert evaluation["eval_loss"] is None


def test_every_line_survives_a_kill(tmp_path):
    child = os.fork()
    if child == 0:
        writer = MetricsWriter(tmp_path)
        writer.write_step(STEP)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert [row["step"] for row in read_metrics(tmp_path)] == [1]


def test_opening_again_appends(tmp_path):
    write(tmp_path, 2)
    with MetricsWriter(tmp_path) as writer:
        writer.write_step(replace(STEP, step=3))
    assert [row["step"] for row in read_metrics(tmp_path)] == [0, 1, 2, 2, 3]


@pytest.mark.parametrize("step", [0, 1, 2, 3, 5, 9])
def test_resume_cuts_back_to_the_checkpoint_and_writes_on(tmp_path, step):
    write(tmp_path, 5)
    before = [row for row in read_metrics(tmp_path) if row["step"] <= step]
    with MetricsWriter(tmp_path) as writer:
        writer.truncate_to(step)
        writer.write_step(replace(STEP, step=step + 1))
    rows = read_metrics(tmp_path)
    assert rows[:-1] == before
    assert rows[-1]["step"] == step + 1


def test_a_file_torn_anywhere_is_cut_to_whole_lines(tmp_path):
    write(tmp_path, 6)
    path = tmp_path / METRICS_FILE
    whole = path.read_bytes()
    for length in random.Random(0).sample(range(len(whole)), 200):
        path.write_bytes(whole[:length])
        with MetricsWriter(tmp_path) as writer:
            writer.truncate_to(4)
            writer.write_step(replace(STEP, step=5))
        lines = path.read_bytes().splitlines(keepends=True)
        assert b"".join(lines[:-1]) == whole[: sum(map(len, lines[:-1]))]
        assert json.loads(lines[-1])["step"] == 5


def test_a_folder_that_is_not_there_is_a_storage_error(tmp_path):
    with pytest.raises(
        StorageError, match=r"nowhere.metrics\.jsonl: cannot be written \(No such file"
    ):
        MetricsWriter(tmp_path / "nowhere")


def test_on_a_full_disk_lines_wait_and_are_written_when_there_is_room(tmp_path, caplog):
    write(tmp_path, 20)
    whole = (tmp_path / METRICS_FILE).read_bytes()
    (tmp_path / METRICS_FILE).unlink()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with MetricsWriter(tmp_path) as writer:
        try:
            for number, row in enumerate(map(json.loads, whole.splitlines())):
                room = {3: len(whole) // 4, 9: len(whole) // 2, 15: soft}.get(
                    number
                )  # the first two end within lines
                if room is not None:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
                writer._write(row)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / METRICS_FILE).read_bytes() == whole
    assert (
        len(caplog.messages) == 1 and "training goes on, and its lines wait" in caplog.messages[0]
    )


def test_what_waits_is_written_at_the_end_too(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with MetricsWriter(tmp_path) as writer:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
        try:
            writer.write_step(STEP)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [row["step"] for row in read_metrics(tmp_path)] == [STEP.step]


def test_lines_for_which_there_never_was_room_are_missed_aloud(tmp_path, caplog):
    (tmp_path / METRICS_FILE).symlink_to("/dev/full")
    with MetricsWriter(tmp_path) as writer:
        writer.write_step(STEP)
        writer.write_step(STEP)
    assert [
        "No space left" in caplog.messages[0],
        "lacks its last 2 lines" in caplog.messages[1],
    ] == [True, True]


def test_times_add_up_and_the_largest_share_bounds_the_step():
    both = StepTime(compute=1.0, data=0.5) + StepTime(compute=2.0, wait_update=6.5)
    assert both == StepTime(compute=3.0, wait_update=6.5, data=0.5)
    assert both.bound() == ("wait_update", 0.65)
    assert StepTime().bound()[1] == 0.0


def test_what_no_wait_explains_is_computation():
    assert StepTime.of(2.0, {"wait_update": 0.5, "data": 0.25}) == StepTime(
        compute=1.25, wait_update=0.5, data=0.25
    )
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


def test_old_steps_are_forgotten():
    steady = SteadyTime()
    for seconds in (1.0, 5.0, *[2.0] * RECENT_STEPS):
        steady.add(StepTime(compute=seconds))
    assert steady.total == StepTime(compute=2.0 * RECENT_STEPS)


def test_a_line_that_is_written_in_parts_is_whole(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        real = writer._file

        class Reluctant:
            def write(self, data: bytes) -> int:
                return real.write(data[:7])

            def __getattr__(self, name: str):
                return getattr(real, name)

        writer._file = Reluctant()  # type: ignore[assignment]
        writer._write({"step": 1, "loss": 2.5})
        writer._write({"step": 2, "loss": 2.25})
        writer._file = real
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]
