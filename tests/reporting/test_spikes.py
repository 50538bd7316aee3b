"""Which steps are spikes: the rule in figures."""

from __future__ import annotations

import math

from megatrain.reporting.metrics import ENOUGH, Spikes

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


def test_noise_as_large_as_the_median_hides_none_and_makes_none():
    spikes = Spikes()
    for _ in range(16):
        spikes.look(1.0, None)
        assert spikes.look(3.0, None) == []


def test_a_beginning_has_no_spikes():
    spikes = Spikes()
    for number in range(ENOUGH):
        assert spikes.look(1000.0**number, None) == []


def test_a_resumed_run_knows_the_steps_before():
    rows = [{"step": n, "loss": x, "grad_norm": x, "target_tokens": 9} for n, x in enumerate(CALM)]
    empty = {"step": 40, "loss": 0.0, "grad_norm": 0.0, "target_tokens": 0}
    evaluation = {"step": 40, "eval_loss": 2.0}
    assert len(Spikes([*rows, empty, evaluation]).look(5.0, 50.0)) == 2
