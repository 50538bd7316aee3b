"""Frozen models beside the one that learns: the reference of `beta`, and reward models."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from megatrain.recipes.frozen import _lasts
from megatrain.recipes.rl.advantages import leave_one_out
from tests.helpers.commands import metrics_of, write_jsonl
from tests.recipes.rl.test_rollout_runs import task
from tests.recipes.test_preference_runs import pairs

__all__ = ["task"]  # the fixture

JUDGE = ("method=reward", "train.learning_rate=1e-3", "precision=float32", "output=judge")


def divergences(run: Path) -> list[float]:
    return [line["kl"] for line in metrics_of(run) if "kl" in line]


def test_the_reference_is_the_model_as_the_run_begins_and_holds_it(megatrain, task):
    for name, beta in (("loose", 0.01), ("held", 3.0)):
        megatrain("train rl.yaml grpo.scale_rewards=none", f"grpo.beta={beta}", f"output={name}")
    loose, held = divergences(task / "loose"), divergences(task / "held")
    assert len(loose) == len(held) == 10
    assert max(loose[0], held[0]) < 1e-6, "nothing was learnt before the first step"
    assert 0 < max(held[5:]) < max(loose[5:])
    assert megatrain("rollout rl.yaml grpo.beta=3 --prompts 1").err.count("reading 37,792") == 1
    weights = task / "model" / "model.safetensors"
    shutil.copytree(weights.parent.resolve(), task / "own")
    own = ("model=own", "output=other", "grpo.beta=0.1", "train.max_steps=2")
    megatrain("train rl.yaml", *own)
    data = (task / "own" / "model.safetensors").read_bytes()
    (task / "own" / "model.safetensors").write_bytes(data[:-8] + bytes(8))
    assert "its reference (the model" in megatrain("resume other train.max_steps=4", code=7).err
    random = "train rl.yaml grpo.beta=0.1 model.path=null model.config=model model.init=random"
    assert "random weights are no reference" in megatrain(random, code=2).err
    ranks = megatrain("plan rl.yaml grpo.beta=0.1 --gpu H100 --ram 256GiB --gpus 2", code=2)
    assert "frozen models beside a run on several GPUs are not built yet" in ranks.err


def test_rewards_of_rloo_lose_by_the_divergence(megatrain, task):
    keys = ("method=rloo", "rloo.num_generations=4", "rloo.max_completion_length=2")
    lines = (task / "rl.yaml").read_text().splitlines(keepends=True)
    (task / "rl.yaml").write_text("".join(one for one in lines if not one.startswith("grpo:")))
    megatrain("train rl.yaml rloo.beta=0.5", *keys)
    found = divergences(task / "run")
    assert abs(found[0]) < 1e-6 < max(map(abs, found[5:]))
    rewards, apart = np.array([[0.0], [1.0], [0.5], [1.0]]), np.array([0.1, 0.2, -0.3, 0.4])
    held = leave_one_out(rewards, ["right"], None, 4, beta=0.5, divergences=apart)
    less = leave_one_out(rewards - 0.5 * apart[:, None], ["right"], None, 4)
    np.testing.assert_allclose(held.values, less.values)
    assert held.metrics["reward"] == 0.625, "as functions gave them"


def test_a_reward_model_judges_as_in_transformers(megatrain, task):
    write_jsonl(task / "rows.jsonl", pairs())
    megatrain("train cfg.yaml", *JUDGE)
    text = (task / "rl.yaml").read_text().replace(':copies"', ':copies", judge')
    (task / "rl.yaml").write_text(text)
    found = megatrain("rollout rl.yaml --prompts 4 --json").json
    assert found["names"] == ["copies", "judge"] and len(found["answers"]) == 16
    loading: Any = transformers.AutoModelForSequenceClassification
    model = loading.from_pretrained(task / "judge" / "final", dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(task / "judge" / "final")
    # where padding is an end that rows may have, the token before it counts, as in transformers
    for one in found["answers"]:
        ids = tokenizer(one["prompt"] + one["answer"], return_tensors="pt").input_ids
        with torch.no_grad():
            score = float(model(ids).logits[0, 0])
        assert one["rewards"][1] == pytest.approx(score, abs=1e-4)
    last, scores = found["answers"][-1], [one["rewards"][1] for one in found["answers"]]
    tokenizer.save_pretrained(task / "bare")
    for pad in (None, *tokenizer(last["prompt"] + last["answer"]).input_ids[-2:]):
        model.config.pad_token_id = pad  # what is padding the tokenizer says
        model.save_pretrained(task / "bare")
        own = megatrain("rollout rl.yaml --prompts 4 --json rewards.functions=bare").json
        assert [one["rewards"][0] for one in own["answers"]] == pytest.approx(scores, abs=1e-6)
    megatrain("train rl.yaml train.max_steps=4 rewards.reward_weights=[0,1]")
    for line in metrics_of(task / "run"):
        assert {"rewards/judge/mean", "rewards/copies/std"} <= line.keys()
    assert '"rewards"' in next((task / "run" / "rollouts").glob("*.jsonl")).read_text()
    assert "judge's weights" in megatrain("plan rl.yaml --json").json["host"]


def test_what_a_frozen_model_takes_is_planned(megatrain, task):
    alone = megatrain("plan rl.yaml --json").json
    held = megatrain("plan rl.yaml grpo.beta=0.1 --json").json
    assert held["host"].keys() - alone["host"].keys() == {"reference's weights"}
    assert held["host"]["reference's weights"] >= 4 * 37_792
    assert held["timing"]["phases"]["reference"] > 0


def test_a_row_that_ends_with_padding_is_scored_where_transformers_does():
    ids = torch.tensor([[5, 6, 2, 2], [5, 2, 7, 8], [2, 2, 2, 2]])
    at, _ = _lasts(ids, 2)
    assert at.tolist() == [1, 7, 8]
