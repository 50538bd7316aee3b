"""What a run prints last, and hands to a program."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from megatrain.reporting.meters import Load, LoadMeter, read_processors
from megatrain.reporting.metrics import StepTime
from megatrain.reporting.summary import (
    Facts,
    Predicted,
    RunSummary,
    advise,
    bound_in_words,
    step_seconds,
    time_in_words,
)
from megatrain.reporting.words import human_bytes, human_seconds, three_digits

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


# -- figures in words ------------------------------------------------------------------------------


def test_the_bound_is_said_in_words():
    for time, words in [
        (StepTime(compute=1.0), "computing 100%"),
        (StepTime(compute=1.0, wait_upload=3.0), "waiting for weights 75%"),
        (StepTime(wait_update=2.0, wait_download=1.0), "waiting for the update 67%"),
        (StepTime(wait_download=1.0), "waiting for gradients to leave 100%"),
        (StepTime(compute=0.1, data=0.9), "waiting for data 90%"),
    ]:
        assert bound_in_words(time) == words


def test_shares_are_named_largest_first_and_small_ones_not_at_all():
    assert (
        time_in_words(StepTime(compute=96.0, wait_update=3.5, data=0.5))
        == "computing 96%, waiting for the update 4%"
    )
    words = "waiting for weights 50%, computing 40%, waiting for gradients to leave 10%"
    assert time_in_words(StepTime(compute=4.0, wait_upload=5.0, wait_download=1.0)) == words


def test_figures_are_short():
    sizes = {None: "-", 0: "0 B", -1536: "-1.5 KiB", 2**30 - 1: "1024.0 MiB", 2**40: "1.0 TiB"}
    for count, text in {**sizes, 2**50: "1024.0 TiB"}.items():
        assert human_bytes(count) == text
    for size, text in [(1023, "1023 B"), (1536, "1.5 KiB"), (2.5 * 2**30, "2.50 GiB")]:
        assert human_bytes(size, 2) == text
    for value, text in [(55.512, "55.5"), (4080.4, "4,080"), (0.4923, "0.492")]:
        assert three_digits(value) == text
    for seconds, text in [(8.44, "8.4s"), (192, "3m12s"), (7500, "2h05m"), (97200, "1d03h")]:
        assert human_seconds(seconds) == text


# -- the advice ------------------------------------------------------------------------------------


H200 = Facts(
    cuda=True,
    compiled=True,
    tokens_per_step=16_384,
    groups=1,
    layers=28,
    recomputed=28,
    streams=True,
    update_threads=14,
    idle_threads=0,
)


def asked(*keys: str, **facts: Any) -> Facts:
    """A run on an H200 with these keys set by hand."""
    return replace(H200, asked=frozenset(keys), **facts)


CAPPED = asked("memory.gpu")
CPU: Any = {"cuda": False, "compiled": False, "update_threads": 1}
COMPUTING = StepTime(compute=9.8, wait_upload=0.2)
UPLOADING = StepTime(compute=8.0, wait_upload=2.0)
UPDATING = StepTime(compute=6.0, wait_update=3.6, wait_upload=0.4)
READING = StepTime(compute=5.0, data=5.0)
DOWNLOADING = StepTime(compute=9.0, wait_download=1.0)
ON_DRIVE = StepTime(compute=9.0, wait_nvme=1.0)
IDLE_CORES = asked(update_threads=2, idle_threads=12)
TWICE = asked("memory.second_backward", "memory.host", second_backward=True)
HOST = frozenset({"memory.host"})
NOTHING = "nothing is worth changing"
RAISE = "raise train.tokens_per_step"

# name: (time, facts, words of the sentence); a row for each sentence, and its neighbours
CASES: dict[str, tuple[StepTime, Facts, str]] = {
    "slow rows": (READING, H200, "put the rows on a local disk"),
    "idle cores": (UPDATING, IDLE_CORES, "raise threads from 2 to 14"),
    "capped, bound by the update": (UPDATING, CAPPED, "raise memory.gpu: blocks that stay"),
    "streamed by request": (UPLOADING, asked("memory.resident"), "set memory.resident: auto"),
    "all resident": (UPLOADING, replace(CAPPED, streams=False), RAISE),
    "capped, bound by uploads": (UPLOADING, CAPPED, "raise memory.gpu: blocks that stay"),
    "too many groups": (UPLOADING, asked("train.groups", groups=4), "lower train.groups from 4"),
    "bound by the update": (UPDATING, H200, f"{RAISE} to about 49,152"),
    "only the first group hides": (UPDATING, asked(groups=2), f"{RAISE} to about 81,920"),
    "bound by uploads": (UPLOADING, H200, f"{RAISE} to about 20,480"),
    "bound by downloads": (DOWNLOADING, H200, f"{RAISE} to about 18,432"),
    "bound by the drive": (ON_DRIVE, H200, "name folders on more drives in memory.nvme"),
    "recomputing under a cap": (COMPUTING, CAPPED, "for lack of it 28 of 28 layers are computed"),
    "recomputing by request": (COMPUTING, asked("train.retained"), "set train.retained: auto: 28"),
    "recomputing for want of memory": (COMPUTING, H200, NOTHING),
    "gradients twice by request": (COMPUTING, TWICE, "set memory.second_backward: auto"),
    "twice under a cap": (COMPUTING, replace(TWICE, asked=HOST), "raise memory.host"),
    "twice for want of memory": (COMPUTING, asked(second_backward=True), NOTHING),
}
OF_RATES = [  # time, facts, model FLOPs utilisation, words
    (UPDATING, replace(CAPPED, **CPU), None, RAISE),  # nothing is uploaded to a CPU
    (COMPUTING, asked(compiled=False), 0.1, "set compile: true, or raise train.micro_batch_tokens"),
    (COMPUTING, H200, 0.1, f"{NOTHING}: the GPU computes 98% of the time"),
    (COMPUTING, replace(CAPPED, recomputed=0), 0.6, NOTHING),
    (COMPUTING, asked(**CPU), None, f"{NOTHING}: the CPU computes 98% of the time"),
]


def test_the_advice_fits_the_cause_and_the_rate_of_the_matmuls():
    for name, (time, facts, words) in CASES.items():
        assert words in advise(time, facts, 0.4), name
    for time, facts, mfu, words in OF_RATES:
        assert words in advise(time, facts, mfu)


def test_there_is_advice_whatever_the_times_and_none_for_a_small_wait():
    for time in [StepTime(), StepTime(wait_update=1.0), StepTime(compute=1e-9, data=1.0)]:
        sentence = advise(time, H200)
        assert sentence
        assert "\n" not in sentence
    assert advise(StepTime(compute=96.0, wait_update=4.0), H200, 0.4).startswith("nothing")
    assert not advise(StepTime(compute=94.0, wait_update=6.0), H200, 0.4).startswith("nothing")
    planned = replace(H200, planned_s=2.0)
    assert advise(COMPUTING, planned, 0.4, step_s=3.9).startswith("nothing")
    short = replace(H200, planned_s=0.02)
    assert advise(COMPUTING, short, 0.4, step_s=0.9).startswith("nothing")
    late = advise(COMPUTING, planned, 0.4, step_s=174.0)
    assert late.startswith("a step takes 87.0 times as long as planned, and no setting explains it")


# -- other processes' load on the machine, and the advice that knows of it -------------------------


def load_of(own: float, others: float, count: int) -> Load:
    """On a machine where this run and others use this many of `count` cores, after 40 s."""
    readings = iter([(0.0, 0.0, 0.0), (40.0, 40.0 * (own + others), 40.0 * own)])
    found = LoadMeter(lambda: next(readings), count)
    assert not found.read().contended
    return found.read()


def test_load_counts_where_nothing_is_left():
    for own, others, count, contended in [
        (0.2, 1.8, 2, True),
        (1.0, 0.9, 2, True),
        (2.0, 0.0, 2, False),  # it is this run
        (1.9, 0.1, 2, False),  # a tenth of a core is not worth a word
        (0.5, 0.5, 2, False),  # a core is free
        (2.0, 30.0, 64, False),
        (2.0, 60.0, 64, True),
    ]:
        assert load_of(own, others, count).contended is contended


def test_the_advice_knows_of_it():
    taken = load_of(0.2, 1.8, 2)
    for time, facts, load, words in [
        (COMPUTING, asked(**CPU), taken, "other processes use 1.8 of 2 cores: stop them"),
        (UPDATING, H200, taken, "other processes use 1.8 of 2 cores"),
        (COMPUTING, H200, taken, NOTHING),  # the GPU computes, whatever the cores do
        (COMPUTING, asked(**CPU), Load(2, 2.0, 0.0), NOTHING),
        (UPDATING, H200, None, "raise train.tokens_per_step"),
    ]:
        assert advise(time, facts, 0.4, load).startswith(words)


def test_the_real_meter_counts_what_this_process_does():
    wall, busy, own = read_processors()
    while read_processors()[2] - own < 0.05:
        sum(range(10_000))
    later, busy_later, _ = read_processors()
    assert later - wall >= 0.02 and busy_later >= busy
