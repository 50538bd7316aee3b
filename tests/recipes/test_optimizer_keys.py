"""From the config's `optimizer` section to an optimizer: its own defaults and its own keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatrain.config import Config, load_config
from megatrain.engine.resolved import with_lighter_moments
from megatrain.errors import ConfigError
from megatrain.optim import AdamW, Lion
from megatrain.recipes.setup import decided_of_optimizer, make_optimizer


@pytest.fixture
def load(tmp_path: Path) -> Any:
    path = tmp_path / "cfg.yaml"
    path.write_text("model: m\ndata: {train: t.jsonl}\n")
    return lambda *overrides: load_config(path, overrides)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), AdamW()),
        (("optimizer.moments=int8", "optimizer.eps=1e-6"), AdamW(moments="int8", eps=1e-6)),
        (("optimizer.name=lion",), Lion(lr=1e-5)),
        (
            ("optimizer.name=lion", "optimizer.betas=[0.95, 0.98]", "optimizer.weight_decay=0.1"),
            Lion(1e-5, (0.95, 0.98), 0.1),
        ),
        (("optim=lion_32bit", "train.learning_rate=3e-6"), Lion(lr=3e-6)),
        (("adam_beta1=0.85",), AdamW(betas=(0.85, 0.999))),
    ],
)
def test_what_is_not_set_is_the_optimizer_s_own_default(load, overrides, expected):
    assert make_optimizer(load(*overrides)) == expected


def test_defaults_are_written_back(load):
    lion_defaults = {"optimizer.moments": "float32", "optimizer.betas": (0.9, 0.99)}
    adamw_defaults = {**lion_defaults, "optimizer.betas": (0.9, 0.999), "optimizer.eps": 1e-8}
    assert decided_of_optimizer(load()) == adamw_defaults
    lion = load("optimizer.name=lion")
    assert decided_of_optimizer(lion) == lion_defaults
    written: Config = lion.with_values(lion_defaults)
    assert make_optimizer(written) == make_optimizer(lion)
    assert written.optimizer.eps == "auto"  # still to be read back as a config of Lion


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [("lion", "eps", "1e-8"), ("muon", "moments", "bfloat16"), ("adamw", "momentum", "0.9")],
)
def test_a_key_that_the_optimizer_does_not_have_is_refused(load, name, key, value):
    words = rf"^command line: optimizer\.{key}: {name} has no {key}; remove the key$"
    with pytest.raises(ConfigError, match=words):
        make_optimizer(load(f"optimizer.name={name}", f"optimizer.{key}={value}"))


def test_lighter_moments_are_those_that_are_narrower():
    int8 = AdamW(moments="int8")
    lighter = {"bfloat16": AdamW(moments="bfloat16"), "int8": int8}
    assert dict(with_lighter_moments(AdamW())) == lighter
    assert [*with_lighter_moments(Lion(moments="bfloat16"))] == [("int8", Lion(moments="int8"))]
    assert [*with_lighter_moments(int8)] == []
