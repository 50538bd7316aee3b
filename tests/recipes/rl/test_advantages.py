"""Advantages are those of TRL's own trainers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megatrain.recipes.rl.advantages import advantages, leave_one_out
from tests.helpers.trl_oracle import scored_by_trl

NAN = float("nan")
NAMES = ["right", "short", "polite"]
# [answers of three groups of four, functions]
REWARDS = np.array(
    [
        *([1.0, 0.2, NAN], [0.0, 0.9, NAN], [0.5, NAN, 2.0], [0.0, 0.1, NAN]),
        *([0.1, 0.7, 0.3], [0.1, 0.7, 0.3], [0.1, 0.7, 0.3], [0.1, 0.7, 0.3]),  # equal
        *([NAN, NAN, NAN], [1.0, NAN, -3.0], [0.3, 0.6, 0.2], [NAN, 0.4, NAN]),
    ]
)
ALONE = np.where(np.arange(12)[:, None] % 4 == 1, REWARDS, NAN)  # one answer of each group
TABLES = {
    "as it comes": REWARDS,
    "one function": REWARDS[:, 1:2],
    "two that cancel": np.stack([REWARDS[:, 0], -REWARDS[:, 0]], 1),
    "one answer of a group": ALONE,
    "all equal": np.full((12, 2), 0.1),
}
WEIGHTS = (None, [1.0, 0.2, -0.7])
NORMALISED = ("sum_then_normalize", "normalize_then_sum")


def test_they_equal_trl_s(tmp_path):
    ways = [("sum_then_normalize", scale) for scale in ("group", "batch", "none")]
    ways += [("normalize_then_sum", "group")]
    for name, table in TABLES.items():
        for number, (aggregation, scale) in enumerate(ways):
            functions, weights = judged_by(table, number)
            keys: dict[str, Any] = {
                "scale_rewards": scale,
                "multi_objective_aggregation": aggregation,
            }
            wanted, trainer = scored_by_trl(
                tmp_path,
                [{"prompt": "the of"}] * 12,
                ["and"] * 12,
                functions,
                rewards=torch.tensor(table),
                num_generations=4,
                reward_weights=weights,
                **keys,
            )
            found = advantages(
                table,
                NAMES[: table.shape[1]],
                weights,
                4,
                scale_rewards=scale,
                multi_objective_aggregation=aggregation,
            )
            case = f"{name}, {aggregation}, {scale}"
            np.testing.assert_allclose(found.values, wanted, atol=1e-6, rtol=0, err_msg=case)
            theirs = {one: trainer._metrics["train"][one][-1] for one in found.metrics}
            assert found.metrics == pytest.approx(theirs, abs=1e-6, nan_ok=True), case
            assert (found.values[found.without_signal] == 0).all()


def test_a_baseline_of_the_others_is_trl_s(tmp_path):
    for number, (name, table) in enumerate(TABLES.items()):
        functions, weights = judged_by(table, number)
        for keys in ({}, {"normalize_advantages": True}, {"reward_clip_range": [0.1, 0.6]}):
            wanted, trainer = scored_by_trl(
                tmp_path,
                [{"prompt": "the of"}] * 12,
                ["and"] * 12,
                functions,
                rewards=torch.tensor(table),
                rloo=True,
                num_generations=4,
                reward_weights=weights,
                **keys,
            )
            found = leave_one_out(table, NAMES[: table.shape[1]], weights, 4, **keys)
            np.testing.assert_allclose(found.values, wanted, atol=1e-6, rtol=0, err_msg=name)
            theirs = {one: trainer._metrics["train"][one][-1] for one in found.metrics}
            if "reward_clip_range" not in keys or name != "all equal":
                assert found.metrics == pytest.approx(theirs, abs=1e-6, nan_ok=True), (name, keys)
            assert (found.values[found.without_signal] == 0).all()


def judged_by(table, number):
    """Functions of a table's columns, and every other time their weights."""
    columns, weights = table.shape[1], WEIGHTS[number % 2]
    return [namer(one) for one in NAMES[:columns]], weights and weights[:columns]


def namer(name):
    def function(completions, **columns):
        return [0.0] * len(completions)

    function.__name__ = name
    return function


def test_what_has_no_signal_is_known():
    for aggregation in NORMALISED:
        for scale in ("group", "batch", "none"):
            found = advantages(
                REWARDS,
                NAMES,
                None,
                4,
                scale_rewards=scale,
                multi_objective_aggregation=aggregation,
            )
            assert found.without_signal.tolist() == [False] * 4 + [True] * 5 + [False] * 3
            assert (found.values == 0).tolist() == found.without_signal.tolist()
    found = advantages(REWARDS, NAMES, None, 4)
    assert np.isnan(found.rewards[8])
    single = advantages(REWARDS, NAMES, None, 1)  # an evaluation with one answer
    assert single.without_signal.all()
