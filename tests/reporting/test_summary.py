"""What a run prints last, and hands to a program."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

from rich.console import Console

from megatrain.reporting.metrics import StepTime
from megatrain.reporting.summary import Predicted, RunSummary, human_bytes, step_seconds

DONE = RunSummary(
    run_dir=Path("runs/a"),
    steps=24,
    tokens=48_000,
    seconds=192.0,
    eval_loss_before=1.9,
    eval_loss_after=1.7,
    best_step=24,
    best_value=1.7,
    final_dir=Path("runs/a/final"),
    prompt="Name a [red] fruit.",
    answer="An apple [1].",
    host=Predicted(predicted=2**31, measured=2**31 + 2**25),
    step_s=Predicted(predicted=8.0, measured=7.6),
    time=StepTime(compute=180.0, wait_update=12.0),
    eval_s=12.0,
    save_s=3.5,
    advice="raise the roof",
    skipped=1,
)


def rendered(summary: RunSummary) -> str:
    console = Console(file=io.StringIO(), width=120)
    summary.render(console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_finished_run_says_what_was_gained_and_where_it_lies():
    text = rendered(DONE)
    for words in (
        "24 steps, 48,000 tokens in 3m12s (250 tokens/s)",
        "1.9000 before, 1.7000 after, best 1.7000 at step 24 in runs/a/checkpoint-24",
        "2.0 GiB, planned 2.0 GiB (+1.6%)",
        "7.6 s, planned 8 s (-5.0%)",
        "computing 94%, waiting for the update 6%; besides, 12.0s evaluating and 3.5s saving",
        "raise the roof",
        "runs/a/final",
        "Name a [red] fruit.",
        "An apple [1].",
        "1 steps without an update",
    ):
        assert words in text
    assert "GPU memory" not in text


def test_a_stopped_run_says_how_to_go_on():
    stopped = RunSummary(run_dir=Path("runs/a"), steps=3, tokens=10, seconds=0.0, exit_code=75)
    text = rendered(stopped)
    assert "megatrain resume runs/a" in text
    assert "held-out" not in text
    assert "advice" not in text


def test_a_figure_without_a_prediction_stands_alone():
    assert Predicted(measured=6.4712).words(step_seconds) == "6.47 s"
    assert Predicted(measured=2**30).words(human_bytes) == "1.0 GiB"
    assert Predicted(predicted=2**30).words(human_bytes) == "-"


def test_it_is_json():
    empty = RunSummary(Path("runs/a"), 1, 2, 3.0, eval_loss_after=math.nan).to_dict()
    read_back = json.loads(json.dumps(empty, allow_nan=False))
    assert read_back["run_dir"] == "runs/a"
    assert read_back["eval_loss_after"] is None
    host = {"predicted": 2**31, "measured": 2**31 + 2**25}
    assert json.loads(json.dumps(DONE.to_dict()))["host"] == host
