"""The terminal: a live panel, or plain lines where there is none, and the log in both cases."""

from __future__ import annotations

import io
import logging
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console
from tqdm import tqdm

from megatrain.errors import logger
from megatrain.heartbeat import beat, under_way
from megatrain.reporting import progress as panel
from megatrain.reporting import streams
from megatrain.reporting.metrics import StepTime
from megatrain.reporting.progress import LOG_FILE, Progress, logging_to
from megatrain.reporting.streams import bars_as_work
from tests.helpers.files import largest_file
from tests.reporting.one_step import STEP


def screen_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def run(tmp_path, console: Console, steps: int = 7, log_every: int = 3, **changes) -> str:
    progress = Progress(console, log_every=log_every)
    with logging_to(tmp_path, console), progress:
        progress.begin(steps)
        progress.evaluated(0, 3.25, 1.5, "held-out loss")
        for step in range(1, steps + 1):
            progress.step(replace(STEP, step=step, **changes))
    return screen_of(console)


@pytest.fixture
def pipe() -> Console:
    return Console(file=io.StringIO(), stderr=True)


@pytest.fixture
def terminal() -> Console:
    size: Any = {"width": 100, "height": 30, "color_system": "standard"}
    return Console(file=io.StringIO(), force_terminal=True, _environ={}, **size)


def test_a_pipe_gets_one_plain_line_every_log_every_steps_and_the_ends(tmp_path, pipe):
    lines = run(tmp_path, pipe).splitlines()
    first, *others = (line.split("  ")[0] for line in lines)
    assert first == "step 0: held-out loss 3.2500"
    assert others == ["step 1/7", "step 3/7", "advice: raise the roof", "step 6/7", "step 7/7"]
    assert lines[1] == (
        "step 1/7  loss 2.5000  lr 1.00e-05  gradient norm 0.75  tokens/s 1,000  TFLOP/s 1.6  "
        "host 1.5 GiB  bound by computing 75%  time left 12.0s"
    )
    assert all(line.isprintable() for line in lines)


def test_what_is_unknown_is_a_dash_and_what_is_there_is_shown(tmp_path, pipe):
    text = run(tmp_path, pipe, grad_norm=None, gpu_peak_bytes=2**30, skipped=True)
    assert "gradient norm -" in text
    assert "GPU 1.0 GiB" in text
    assert "skipped 7" in text


def test_a_terminal_gets_a_panel_and_its_lines_go_to_the_log_alone(tmp_path, terminal):
    screen = run(tmp_path, terminal)
    assert re.search(r"step 7 of 7, epoch 0\.10, \d+\.\ds", screen)
    assert "held-out loss" in screen
    assert "raise the roof" in screen
    assert "step 3/7" not in screen
    assert "step 3/7  loss 2.5000" in (tmp_path / LOG_FILE).read_text()


def test_warnings_reach_both_and_the_logger_is_left_as_it_was(tmp_path, pipe):
    handlers = list(logger.handlers)
    with logging_to(tmp_path, pipe):
        logging.getLogger("megatrain.engine").warning("step %d skipped: not finite", 7)
    assert pipe.file.getvalue() == "warning: step 7 skipped: not finite\n"
    assert "WARNING step 7 skipped" in (tmp_path / LOG_FILE).read_text()
    assert logger.handlers == handlers


def test_on_a_full_disk_the_log_s_lines_wait_and_the_run_goes_on(tmp_path, pipe, capsys):
    with logging_to(tmp_path, pipe):
        logger.info("one")
        with largest_file(0):
            logger.info("two")
        logger.info("three")
        with largest_file(0):
            logger.info("four")
            written = (tmp_path / LOG_FILE).read_text()
    assert [line.split()[-1] for line in written.splitlines()] == ["one", "two", "three"]
    assert pipe.file.getvalue().split() == ["one", "two", "three", "four"]
    assert capsys.readouterr().err == ""


def test_a_line_in_a_pipe_is_neither_wrapped_nor_markup(tmp_path, pipe):
    lines = ["word " * 100, "rows [3/4] of [bold]x[/bold]"]
    with logging_to(tmp_path, pipe):
        for line in lines:
            logger.info(line)
    assert pipe.file.getvalue() == "".join(f"{line}\n" for line in lines)


def test_a_resumed_run_shows_its_first_step(tmp_path, pipe):
    progress = Progress(pipe, log_every=100)
    with logging_to(tmp_path, pipe), progress:
        progress.begin(50, first_step=40)
        for step in (41, 42):
            progress.step(replace(STEP, step=step))
    (line,) = pipe.file.getvalue().splitlines()
    assert line.startswith("step 41/50  loss")
    assert progress.time == StepTime(compute=3.0, wait_update=1.0)


def test_what_happens_between_steps_is_timed(tmp_path, pipe):
    with logging_to(tmp_path, pipe), Progress(pipe) as progress:
        progress.evaluated(0, 3.25, 1.5, "held-out loss")
        progress.saved(tmp_path / "checkpoint-1", 2.0)
        progress.saved(tmp_path / "checkpoint-2", 61.0)
    assert progress.outside_s == {"evaluating": 1.5, "saving": 63.0}
    assert f"saved {tmp_path / 'checkpoint-2'} in 1m01s" in pipe.file.getvalue()


# -- the panel's own thread ----------------------------------------------------------------------


@pytest.fixture
def redrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(panel, "REDRAWS_PER_S", 100)


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60  # the machine may be busy
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def until_shown(terminal: Console, words: str) -> None:
    until(lambda: words in screen_of(terminal))


def figures_after(words: str, terminal: Console) -> list[float]:
    """The seconds that followed these words, each as it was shown first."""
    found = re.findall(rf"{words}.*?(\d+\.\d)s", screen_of(terminal), re.DOTALL)
    return list(dict.fromkeys(map(float, found)))


def shown_lines(screen: str) -> list[str]:
    """What remains on a terminal of this output: cursor movements and erased lines are obeyed."""
    lines, row = [""], 0
    for part in re.split(r"(\x1b\[[0-9;?]*[A-Za-z]|\r|\n)", screen):
        if part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part == "\x1b[2K":
            lines[row] = ""
        elif moved := re.fullmatch(r"\x1b\[(\d+)A", part):
            row -= int(moved[1])
        elif part and not part.startswith(("\x1b", "\r")):
            lines[row] += part
    return [line.rstrip() for line in lines if line.strip()]


def test_the_panel_moves_while_a_slow_step_an_evaluation_or_a_save_goes_on(
    tmp_path, terminal, redrawn
):
    """The second time it is known how many beats one takes."""
    with logging_to(tmp_path, terminal), Progress(terminal) as progress:
        progress.begin(2)
        for kind, words in (("step", "step 1"), ("saving", "")):
            with progress.doing(kind, words):
                beat(amount=10)
                until_shown(terminal, words or kind)
            with progress.doing(kind, words):
                for amount, share in ((1, "10%"), (1, "20%"), (8, "100%")):
                    beat(amount=amount)
                    until_shown(terminal, f"{words or kind} {share}")
        with progress.doing("reading", total=200, counted="bytes"):
            beat("bytes", 150)
            until_shown(terminal, "reading 75%")


def test_a_library_s_bar_is_work_on_the_panel_and_nothing_besides(
    tmp_path, terminal, redrawn, capsys
):
    with bars_as_work(), logging_to(tmp_path, terminal), Progress(terminal):
        for done in tqdm(range(4), desc="Fetching", mininterval=0):
            until_shown(terminal, f"Fetching {done / 4:.0%}")
        until(lambda: under_way() is None)
        with suppress(ValueError), tqdm(total=2) as bar:
            raise ValueError(bar)
        assert under_way() is None
    assert capsys.readouterr().err == ""


def test_a_pipe_is_told_how_far_long_work_has_come_and_nothing_of_steps(
    tmp_path, pipe, monkeypatch
):
    monkeypatch.setattr(panel, "LOGGED_EVERY_S", 0.02)
    monkeypatch.setattr(streams, "TIMED_AFTER_S", 0.0)
    with logging_to(tmp_path, pipe), Progress(pipe) as progress:
        with progress.doing("step", "step 1"):
            time.sleep(0.1)
        with progress.doing("evaluating", total=200, counted="rows"):
            beat("rows", 50)
            until(lambda: "evaluating 25%, 0." in screen_of(pipe))
    assert "step 1" not in screen_of(pipe) and "s left" in screen_of(pipe)


def test_the_time_left_has_what_is_still_to_be_evaluated_and_saved(tmp_path, pipe):
    still = {4: {"evaluating": 3, "saving": 1}, 5: {"evaluating": 2, "saving": 1}}
    with logging_to(tmp_path, pipe), Progress(pipe, log_every=1) as progress:
        progress.begin(10, ahead=lambda step: still[step])
        progress.evaluated(0, 3.25, 30.0, "held-out loss")
        progress.step(replace(STEP, step=4))
        assert progress.seconds_left() == 6 * 2.0 + 3 * 30.0
        progress.saved(tmp_path / "checkpoint-4", 50.0)
        progress.evaluated(4, 3.0, 10.0, "held-out loss")
        progress.step(replace(STEP, step=5))
        assert progress.seconds_left() == 5 * 2.0 + 2 * 20.0 + 50.0
    assert "time left 1m40s" in pipe.file.getvalue()


def test_the_panel_counts_the_time_left_down(tmp_path, terminal, redrawn):
    with logging_to(tmp_path, terminal), Progress(terminal) as progress:
        progress.begin(2)
        progress.step(STEP)
        until(lambda: len(figures_after("time left", terminal)) > 2)
        first, *others = figures_after("time left", terminal)
        assert first <= 2.0 and others == sorted(others, reverse=True)


def test_lines_of_the_log_stand_whole_above_the_panel(tmp_path, terminal, redrawn):
    """Printed from several threads while another one redraws."""

    def talk(name: str) -> None:
        for number in range(50):
            logger.warning(f"{name} says {number}")

    names = ("reader", "writer", "engine")
    with logging_to(tmp_path, terminal), Progress(terminal) as progress:
        progress.begin(7)
        talkers = [threading.Thread(target=talk, args=(name,)) for name in names]
        for talker in talkers:
            talker.start()
        for step in range(1, 7):
            progress.step(replace(STEP, step=step))
            time.sleep(0.01)
        for talker in talkers:
            talker.join()
        until(lambda: "step 6 of 7" in screen_of(terminal))
    left = shown_lines(screen_of(terminal))
    assert sorted(left) == sorted(f"warning: {n} says {i}" for n in names for i in range(50))


def test_the_thread_ends_with_the_block_also_by_ctrl_c(tmp_path, terminal, redrawn):
    before = set(threading.enumerate())
    with (
        suppress(KeyboardInterrupt),
        logging_to(tmp_path, terminal),
        Progress(terminal) as progress,
    ):
        progress.begin(7)
        progress.step(STEP)
        (thread,) = set(threading.enumerate()) - before
        raise KeyboardInterrupt
    until(lambda: not thread.is_alive())
    size = len(screen_of(terminal))
    time.sleep(0.05)
    assert len(screen_of(terminal)) == size
    assert screen_of(terminal).rfind("\x1b[?25h") > screen_of(terminal).rfind("\x1b[?25l")


def test_a_terminal_that_cannot_move_its_cursor_gets_lines(tmp_path):
    dumb = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "dumb"})
    assert run(tmp_path, dumb).count("step 3/7") == 1
