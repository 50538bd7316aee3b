"""`megatrain init MODEL DATA` writes a config that fits, and says what to type next."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatrain.config import load_config
from megatrain.errors import PlanError
from megatrain.recipes import first_config
from megatrain.recipes import plan as planning

ANSWERS = {"prompt": "What is it?", "chosen": "It is good.", "rejected": "It is bad."}
ROWS: dict[str, dict[str, Any]] = {
    "sft": {"prompt": "What is it?", "completion": "It is good."},
    "pretrain": {"text": "It is good. " * 40},
    "dpo": ANSWERS,
    "kto": {"prompt": "What is it?", "completion": "It is good.", "label": True},
}


def write_rows(row: dict[str, Any], count: int = 60) -> None:
    first = next(iter(row))
    rows = (row | {first: f"{number} {row[first]}"} for number in range(count))
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))


@pytest.mark.parametrize("method", ROWS)
def test_the_config_is_for_the_rows_and_fits(megatrain, project, method):
    write_rows(ROWS[method])
    said = megatrain("init model rows.jsonl --gpu 'RTX 4090' --ram 64GiB").err.splitlines()
    file = f"model-{method}.yaml"
    assert said[-4].startswith(f"wrote {file}: fits: ")
    commands = [line.split("  ")[1] for line in said[-3:]]
    there = "--gpu 'RTX 4090' --ram 64GiB"
    assert [commands[0], commands[2]] == [f"megatrain data {file}", f"megatrain train {file}"]
    assert said[-2].startswith(f"  megatrain plan {file} {there} ")
    config = load_config(file)
    assert (config.method, config.train.seq_len) == (method, 128), "the model reads no more"
    schema = Path(file).read_text().splitlines()[0].rpartition("=")[2]
    assert "properties" in json.loads(Path(schema).read_text())
    megatrain(f"plan {file} {there}")
    if method == "sft":
        megatrain(f"train {file} train.max_steps=1")


def test_what_cannot_be_a_config_is_refused_before_anything_is_written(megatrain, project):
    write_rows({"prompt": "What is it?"})
    cases = {
        "init model rows.jsonl": (3, "prompts alone are for grpo, which needs reward functions"),
        "init model no.jsonl": (3, "no.jsonl: no such file"),
        "init model rows.jsonl --method magic": (2, "magic is no method; choose from sft, "),
        "init model --method sft": (2, "name a model and rows: megatrain init MODEL DATA"),
        "init model rows.jsonl third": (2, "name a model and rows: megatrain init MODEL DATA"),
        "init model rows.jsonl --output cfg.yaml": (2, "cfg.yaml: exists already"),
    }
    before = {path.name for path in project.iterdir()}
    for line, (code, words) in cases.items():
        assert words in megatrain(line, code=code).err
    write_rows(ROWS["dpo"])
    words = "two answers, of which one is better, are for method: dpo"
    assert words in megatrain("init model rows.jsonl --method sft", code=3).err
    Path("rows.jsonl").write_text("")
    assert "has no rows" in megatrain("init model rows.jsonl", code=3).err
    assert {path.name for path in project.iterdir()} == before


def test_moments_are_rounded_where_they_would_not_fit(project, monkeypatch):
    write_rows(ROWS["sft"])
    tried, plan = list[str](), planning.plan

    def nothing_fits(config, described=None):
        tried.append(config.optimizer.moments)
        return plan(config.with_values({"memory.host": 2**20}), described=described)

    monkeypatch.setattr(planning, "plan", nothing_fits)
    with pytest.raises(PlanError, match="the run does not fit"):
        first_config.config_for("model", "rows.jsonl")
    assert tried == ["auto", "int8"] or tried == ["float32", "int8"]
