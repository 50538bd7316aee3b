"""The terminal: plain lines where nobody watches, a panel where somebody does, and the log in both cases."""

from __future__ import annotations

import io
import logging
import resource
from dataclasses import replace

import pytest
from rich.console import Console

from megatrain.metrics import StepMetrics, StepTime
from megatrain.report import LOG_FILE, Progress, bound_in_words, human_bytes, human_seconds, logger, logging_to, time_in_words

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
    host_bytes=3 * 2**29,
    skipped=False,
    energy_j=None,
    time=StepTime(compute=1.4, wait_update=0.6),
    advice="raise the roof",
)


def run(tmp_path, console: Console, steps: int = 7, log_every: int = 3, **changes) -> str:
    with logging_to(tmp_path, console), Progress(console, total_steps=steps, log_every=log_every) as progress:
        progress.evaluated(0, 3.25, 1.5)
        for step in range(1, steps + 1):
            progress.step(replace(STEP, step=step, **changes))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture
def pipe() -> Console:
    return Console(file=io.StringIO(), stderr=True)


@pytest.fixture
def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=100, height=30, color_system="standard", _environ={})


def test_a_pipe_gets_one_plain_line_every_log_every_steps_and_the_ends(tmp_path, pipe):
    lines = run(tmp_path, pipe).splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "step 0: held-out loss 3.2500", "step 1/7", "step 3/7", "advice: raise the roof", "step 6/7", "step 7/7",
    ]  # fmt: skip
    assert lines[1] == (
        "step 1/7  loss 2.5000  lr 1.00e-05  gradient norm 0.75  tokens/s 1,000  TFLOP/s 1.6  "
        "time left 12.0s  host 1.5 GiB  bound by computing 70%"
    )
    assert all(line.isprintable() for line in lines)


def test_what_is_unknown_is_a_dash_and_what_is_there_is_shown(tmp_path, pipe):
    text = run(tmp_path, pipe, grad_norm=None, gpu_peak_bytes=2**30, skipped=True)
    assert "gradient norm -" in text
    assert "GPU 1.0 GiB" in text
    assert "skipped 7" in text


def test_a_terminal_gets_a_panel_and_its_lines_go_to_the_log_alone(tmp_path, terminal):
    screen = run(tmp_path, terminal)
    assert "step 3 of 7" in screen
    assert "held-out loss" in screen
    assert "raise the roof" in screen
    assert "step 3/7" not in screen
    assert "step 3/7  loss 2.5000" in (tmp_path / LOG_FILE).read_text()


def test_warnings_reach_both_and_the_logger_is_left_as_it_was(tmp_path, pipe):
    handlers = list(logger.handlers)
    with logging_to(tmp_path, pipe):
        logging.getLogger("megatrain.engine").warning("step %d skipped: the gradient is not finite", 7)
    assert pipe.file.getvalue() == "warning: step 7 skipped: the gradient is not finite\n"
    assert "WARNING step 7 skipped" in (tmp_path / LOG_FILE).read_text()
    assert logger.handlers == handlers


def test_on_a_full_disk_the_log_s_lines_wait_and_the_run_goes_on(tmp_path, pipe, capsys):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with logging_to(tmp_path, pipe):
            logger.info("one")
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
            logger.info("two")
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            logger.info("three")
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
            logger.info("four")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [line.split()[-1] for line in (tmp_path / LOG_FILE).read_text().splitlines()] == ["one", "two", "three"]
    assert pipe.file.getvalue().split() == ["one", "two", "three", "four"]
    assert capsys.readouterr().err == ""


def test_a_long_line_is_not_wrapped_in_a_pipe(tmp_path, pipe):
    with logging_to(tmp_path, pipe):
        logger.info("word " * 100)
    assert pipe.file.getvalue().count("\n") == 1


def test_a_path_or_a_bracket_is_not_markup(tmp_path, pipe):
    with logging_to(tmp_path, pipe):
        logger.info("rows [3/4] of [bold]x[/bold]")
    assert pipe.file.getvalue() == "rows [3/4] of [bold]x[/bold]\n"


def test_a_resumed_run_of_unknown_length_shows_its_first_step_and_no_time_left(tmp_path, pipe):
    with logging_to(tmp_path, pipe), Progress(pipe, total_steps=None, first_step=40, log_every=100) as progress:
        progress.step(replace(STEP, step=41))
        progress.step(replace(STEP, step=42))
    assert pipe.file.getvalue().startswith("step 41  loss")
    assert "time left -" in pipe.file.getvalue()
    assert len(pipe.file.getvalue().splitlines()) == 1
    assert progress.time == StepTime(compute=2.8, wait_update=1.2)


@pytest.mark.parametrize(
    ("time", "words"),
    [
        (StepTime(compute=1.0), "computing 100%"),
        (StepTime(compute=1.0, wait_upload=3.0), "waiting for weights 75%"),
        (StepTime(wait_update=2.0, wait_download=1.0), "waiting for the update 67%"),
        (StepTime(wait_download=1.0), "waiting for gradients to leave 100%"),
        (StepTime(compute=0.1, data=0.9), "waiting for data 90%"),
    ],
)
def test_the_bound_is_said_in_words(time, words):
    assert bound_in_words(time) == words


def test_shares_are_named_largest_first_and_small_ones_not_at_all():
    assert time_in_words(StepTime(compute=96.0, wait_update=3.5, data=0.5)) == "computing 96%, waiting for the update 4%"
    words = "waiting for weights 50%, computing 40%, waiting for gradients to leave 10%"
    assert time_in_words(StepTime(compute=4.0, wait_upload=5.0, wait_download=1.0)) == words


def test_what_happens_between_steps_is_timed(tmp_path, pipe):
    with logging_to(tmp_path, pipe), Progress(pipe, total_steps=3) as progress:
        progress.evaluated(0, 3.25, 1.5)
        progress.saved(tmp_path / "checkpoint-1", 2.0)
        progress.saved(tmp_path / "checkpoint-2", 61.0)
    assert progress.outside_s == {"evaluating": 1.5, "saving": 63.0}
    assert f"saved {tmp_path / 'checkpoint-2'} in 1m01s" in pipe.file.getvalue()


@pytest.mark.parametrize(
    ("count", "text"),
    [(None, "-"), (0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**40, "1.0 TiB"), (2**50, "1024.0 TiB")],
)
def test_human_bytes(count, text):
    assert human_bytes(count) == text


@pytest.mark.parametrize(("seconds", "text"), [(8.44, "8.4s"), (192, "3m12s"), (7500, "2h05m"), (97200, "1d03h")])
def test_human_seconds(seconds, text):
    assert human_seconds(seconds) == text
