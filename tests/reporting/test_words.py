"""Figures in words: bytes, durations, and where a step's time goes."""

from __future__ import annotations

from megatrain.reporting.metrics import StepTime
from megatrain.reporting.summary import bound_in_words, human_bytes, human_seconds, time_in_words


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


def test_human_bytes():
    for count, digits, text in [
        (None, 1, "-"),
        (0, 1, "0 B"),
        (1023, 2, "1023 B"),
        (1536, 2, "1.5 KiB"),
        (-1536, 1, "-1.5 KiB"),
        (2**30 - 1, 1, "1024.0 MiB"),
        (2.5 * 2**30, 2, "2.50 GiB"),
        (2**40, 1, "1.0 TiB"),
        (2**50, 1, "1024.0 TiB"),
    ]:
        assert human_bytes(count, digits) == text


def test_human_seconds():
    for seconds, text in [(8.44, "8.4s"), (192, "3m12s"), (7500, "2h05m"), (97200, "1d03h")]:
        assert human_seconds(seconds) == text
