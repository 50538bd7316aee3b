"""Every argument of TRL's configurations, at its default, has a rule: a dump imports as it is."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest

from megatrain.config import load_config
from megatrain.config.importing import import_config


def configurations() -> dict[str, tuple[Any, dict[str, Any]]]:
    """By method: TRL's class, and what ours have in its section by default."""
    import trl
    from trl.experimental.cpo import CPOConfig
    from trl.experimental.orpo import ORPOConfig

    return {
        "sft": (trl.SFTConfig, {}),
        "dpo": (trl.DPOConfig, {"beta": 0.1, "loss_type": ["sigmoid"]}),
        "kto": (trl.KTOConfig, {"beta": 0.1, "desirable_weight": 1.0}),
        "reward": (trl.RewardConfig, {}),
        "orpo": (ORPOConfig, {"beta": 0.1}),
        "grpo": (trl.GRPOConfig, {"epsilon": 0.2, "importance_sampling_correction": False}),
        "rloo": (trl.RLOOConfig, {"beta": 0.05, "num_generations": 2, "num_iterations": 1}),
        "cpo": (CPOConfig, {"beta": 0.1, "cpo_alpha": 1.0, "loss_type": "sigmoid"}),
    }


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, about its own defaults
@pytest.mark.parametrize("method", ["sft", "dpo", "kto", "reward", "orpo", "cpo", "grpo", "rloo"])
def test_a_dump_of_a_configuration(method, tmp_path, monkeypatch):
    import trl

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    kind, section = configurations()[method]
    dump = kind(output_dir="out", bf16=False, use_cpu=True).to_dict()
    for part in (trl.ScriptArguments, trl.ModelConfig):
        dump |= {one.name: one.default for one in fields(part) if one.default is not MISSING}
    dump |= {"model_name_or_path": "org/base", "dataset_name": "org/rows"}
    if method in ("grpo", "rloo"):
        Path("rewards.py").touch()
        dump["reward_funcs"] = "rewards.right"
    Path("dump.json").write_text(json.dumps(dump))
    # of these keys alone, dpo and kto have the same ones
    found = import_config("dump.json", method="orpo" if method == "orpo" else None)
    assert (found.trainer, found.faithful, found.missing) == ("trl", True, ""), found.report()
    config = load_config(dict(found.tree()))
    assert config.method == method
    rate = {"sft": 2e-5, "reward": 1e-4}.get(method, 1e-6)
    train = config.train
    assert (train.learning_rate, train.rows_per_step, train.seq_len) == (rate, 8, 1024)
    assert (train.epochs, train.schedule, train.warmup) == (3.0, "linear", 0.0)
    assert (config.data.eval, config.optimizer.name, config.device) == (None, "adamw", "cpu")
    given = found.tree().get(method, {})
    assert given.items() >= section.items()
