"""Other processes' load on the machine, and the advice that knows of it."""

from __future__ import annotations

from megatrain.reporting.meters import Load, LoadMeter, Reading, read_processors
from megatrain.reporting.summary import advise
from tests.reporting.test_advice import COMPUTING, CPU, H200, NOTHING, UPDATING, asked


def load_of(own: float, others: float, count: int) -> Load:
    """On a machine where this run and others use this many of `count` cores, after 40 s."""
    readings = iter([Reading(0.0, 0.0, 0.0), Reading(40.0, 40.0 * (own + others), 40.0 * own)])
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
    before = read_processors()
    while read_processors().own - before.own < 0.05:
        sum(range(10_000))
    after = read_processors()
    assert after.wall - before.wall >= 0.02
    assert after.busy >= before.busy
