"""The charts and tables of runs that are made up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatrain.recipes.report import report_of
from megatrain.recipes.reported import Reported
from megatrain.reporting.history import History
from tests.pages import block, curve, data_of
from tests.reporting.one_step import STEP

PREFERENCE = {"rewards/chosen": 0.5, "rewards/rejected": -0.5, "rewards/accuracies": 0.75}


def reported(name: str = "run", steps: int = 3, **fields: Any) -> Reported:
    rows = [replace(STEP, step=step + 1, **fields).to_dict() for step in range(steps)]
    return Reported(name, History(rows), {}, {}, {}, "", [])


def titles(data: dict[str, Any]) -> list[str]:
    return [one.get("title", "") for one in data["blocks"]]


def test_preference_metrics_share_a_chart_but_for_accuracies():
    run = reported(metrics={**PREFERENCE, "logps/chosen": -9.0})
    run.history.add({"step": 3, "eval_loss": 1.0, "eval_s": 1.0, "eval_rewards/chosen": 0.25})
    data = data_of(report_of([run]))
    assert curve(data, "rewards", "chosen") == {1: 0.5, 2: 0.5, 3: 0.5}
    assert curve(data, "rewards", "rejected") == {1: -0.5, 2: -0.5, 3: -0.5}
    assert curve(data, "rewards", "chosen (held out)") == {3: 0.25}
    assert curve(data, "rewards, accuracy", "accuracy")[1] == 0.75
    assert curve(data, "logps", "chosen")[1] == -9.0


def test_experts_spikes_and_skipped_steps_are_shown():
    run = reported(expert_load_max=1.5, aux_loss=2.0, skipped=True, spike=True)
    data = data_of(report_of([run]))
    assert curve(data, "busiest expert", "tokens over the mean") == {1: 1.5, 2: 1.5, 3: 1.5}
    assert curve(data, "routers' balancing loss", "without its coefficient")[2] == 2.0
    assert set(curve(data, "loss", "spike")) == {1, 2, 3}
    glance = {card["name"]: card["values"] for card in data["blocks"][0]["cards"]}
    assert glance["steps without an update"] == ["3: 1, 2, 3"]


def test_what_a_run_has_not_is_left_out():
    shown = titles(data_of(report_of([reported()])))
    assert not {"MFU", "GPU memory", "busiest expert", "rewards", "samples"} & set(shown)
    assert "memory, as planned" not in shown


def test_a_long_run_has_a_small_page():
    fields: dict[str, Any] = {"metrics": PREFERENCE, "mfu": 0.5, "gpu_peak_bytes": 2**30}
    runs = [reported(steps=steps, **fields) for steps in (5_000, 7_500)]
    short, long = (len(report_of([run])) for run in runs)
    assert long < 1.2 * short < 300_000


def test_lines_of_a_long_run_have_their_means():
    run = reported(steps=2000)
    lines = block(data_of(report_of([run])), "loss")["lines"]
    assert [line["style"] for line in lines] == ["faint", "trend"]
    assert set(lines[1]["y"]) == {STEP.loss}
