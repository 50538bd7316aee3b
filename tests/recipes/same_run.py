"""Two runs of ten steps that must be one and the same, whatever happened on the way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.helpers.commands import Row, metrics_of
from tests.helpers.compare import differing, distance

# What may differ between two runs of the same steps.
CLOCK = (
    "step_s",
    "tokens_per_s",
    "tflops",
    "host_bytes",
    "time",
    "shares",
    "advice",
    "eval_s",
    "slowest_rank",
)


def everything(checkpoint: Path) -> dict[str, Any]:
    """Every tensor of a checkpoint, weights and optimizer state, by file and name."""
    files = sorted(checkpoint.rglob("*.safetensors"))
    assert len(files) == 1 + 4, "weights, and a file for each block"
    return {
        f"{path.name}/{name}": value for path in files for name, value in load_file(path).items()
    }


def without_clock(rows: list[Row]) -> list[Row]:
    return [{key: value for key, value in row.items() if key not in CLOCK} for row in rows]


def same_run(
    one: Path, other: Path, but_evaluations_of: int | None = None, *, rounding: bool = False
) -> None:
    """Every bit of the last checkpoint is equal, and every line of the metrics but for times.

    but_evaluations_of: a step after which one of the runs was stopped before it could evaluate.
    rounding: figures may differ in their last digits.
    """
    states = [state_of(run / "checkpoint-10") for run in (one, other)]
    lines = [
        [
            row
            for row in without_clock(metrics_of(run))
            if not is_evaluation(row, but_evaluations_of)
        ]
        for run in (one, other)
    ]
    tensors = [everything(run / "checkpoint-10") for run in (one, other)]
    assert states[0] == states[1]
    if not rounding:
        assert differing(*tensors) == []
        assert lines[0] == lines[1]
        return
    assert tensors[0].keys() == tensors[1].keys()
    for name, value in tensors[0].items():
        if value.is_floating_point():  # others are the lower halves of weights
            assert distance(tensors[1][name], value) < 1e-5, name
    for row, again in zip(*lines, strict=True):
        close = {
            name: pytest.approx(value, rel=1e-4, abs=1e-5) if isinstance(value, float) else value
            for name, value in again.items()
        }
        assert row == close


def state_of(checkpoint: Path) -> Row:
    """state.json but for the config, in which a resumed run fixes what was chosen, and for where
    the model came from."""
    about: Row = json.loads((checkpoint / "state.json").read_text())
    about["made_of"].pop("source")
    for key in ("config", "chosen"):
        about["state"].pop(key, None)
    return about


def is_evaluation(row: Row, step: int | None) -> bool:
    return "eval_loss" in row and row["step"] == step
