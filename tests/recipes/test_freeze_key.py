"""`train.freeze`: a run from the command line, planned, stopped, resumed and exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatrain.config import Config, load_config
from megatrain.config.resuming import check_changes
from megatrain.engine.resolved import packs, with_lighter_moments
from megatrain.errors import ConfigError
from megatrain.models.skeleton import Skeleton
from megatrain.optim import AdamW, Lion
from megatrain.recipes.setup import decided_of_optimizer, make_optimizer
from tests.helpers.commands import steps_of
from tests.helpers.compare import differing
from tests.helpers.support import RECURRENT, tiny_config

KEY = "train.freeze=[model.embed_tokens.*, 'model.layers.0.*']"


def tensors_in(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.rglob("*.safetensors"))
    return {f"{file.name}/{n}": t for file in files for n, t in load_file(file).items()}


def weights_in(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.mark.slow
def test_a_run_that_was_stopped_is_the_run_that_was_not(megatrain, project, stop_after):
    options = [KEY, "precision=bfloat16"]
    options += ["train.max_steps=5", "checkpoint.every=null"]
    megatrain("train cfg.yaml", *options, "output=whole")
    stop_after(3)
    megatrain("train cfg.yaml", *options, "output=halves", code=75)
    stop_after(10**9)
    megatrain("resume halves")
    whole, halves = (tensors_in(Path(run) / "checkpoint-5") for run in ("whole", "halves"))
    assert differing(whole, halves) == []
    assert [row["grad_norm"] for row in steps_of(Path("whole"))] == [
        row["grad_norm"] for row in steps_of(Path("halves"))
    ]
    megatrain("export whole out")
    given, trained, out = map(weights_in, (Path("model"), Path("whole/final"), Path("out")))
    assert given.keys() == trained.keys() == out.keys()
    for name, tensor in given.items():
        frozen = name.startswith(("model.embed_tokens.", "model.layers.0."))
        for found in (trained[name], out[name]):
            assert found.dtype == (tensor.dtype if frozen else torch.bfloat16)
            assert torch.equal(found.float(), tensor.float()) == frozen, name
    assert "perplexity" in megatrain("eval out --data rows.jsonl").out


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("model.embed_token.*", "'model.embed_token.*' is the name of no tensor of this model; did "
         "you mean model.embed_tokens.weight?"),
        ("['*.norm.*', '*']", "takes every tensor of the model, which leaves nothing to train"),
    ],
)  # fmt: skip
def test_a_wrong_pattern_is_refused_before_anything_is_read(value, reason, megatrain, project):
    said = megatrain("train cfg.yaml", f"train.freeze={value}", code=2).err
    assert f"command line: train.freeze: {reason}" in said
    assert not Path("run/config.yaml").exists()


def test_the_plan_says_what_is_frozen_and_what_that_saves(megatrain, project):
    whole = megatrain("plan cfg.yaml --json precision=bfloat16").json
    frozen = megatrain("plan cfg.yaml --json precision=bfloat16", KEY).json
    assert frozen["parameters"] + frozen["frozen_parameters"] == whole["parameters"]
    assert frozen["frozen_saves"] == 12 * frozen["frozen_parameters"]
    table = megatrain("plan cfg.yaml precision=bfloat16", KEY).out
    count, every = frozen["frozen_parameters"], whole["parameters"]
    assert f"frozen: {count:,} of {every:,} parameters, which saves" in table
    assert "and backward visits the last layer alone" in " ".join(table.split())
    assert "frozen:" not in megatrain("plan cfg.yaml").out


def test_steps_count_the_work_that_is_left(megatrain, project, monkeypatch):
    from megatrain.reporting.mfu import ModelFlops

    seen: list[ModelFlops] = []
    tflops = ModelFlops.tflops

    def noted(work: ModelFlops, tokens: int, seconds: float) -> float:
        seen.append(work)
        return tflops(work, tokens, seconds)

    monkeypatch.setattr(ModelFlops, "tflops", noted)
    for number, key in enumerate(("train.freeze=[]", KEY)):
        keys = ("precision=bfloat16", "train.max_steps=1", f"output=run-{number}")
        megatrain("train cfg.yaml", key, *keys)
    whole, frozen = seen[0], seen[-1]
    about = json.loads(Path("run-1/plan.json").read_text())
    # forward alone of what is frozen: a third
    assert frozen.active_parameters == about["parameters"] + about["frozen_parameters"] // 3
    assert whole.active_parameters == about["parameters"] + about["frozen_parameters"]


def test_the_key_takes_a_name_or_a_list_and_may_not_change(tmp_path):
    (tmp_path / "cfg.yaml").write_text("model: m\ndata: {train: t.jsonl}\n")
    loaded = [
        load_config(tmp_path / "cfg.yaml", [f"train.freeze={value}"])
        for value in ("'*.gate.*'", "['*.gate.*']", "null", "lm_head.weight")
    ]
    assert [config.train.freeze for config in loaded] == [
        *2 * [("*.gate.*",)],
        None,
        ("lm_head.weight",),
    ]
    assert check_changes(loaded[0], loaded[1]) == []
    for other in loaded[2:]:
        words = r"train\.freeze: cannot change from .* since the checkpoint has the state of"
        with pytest.raises(ConfigError, match=words):
            check_changes(loaded[0], other)
    with pytest.raises(ConfigError, match="must be a tensor's name with wildcards, a list"):
        load_config(tmp_path / "cfg.yaml", ["train.freeze=7"])


# -- packing key -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "packing", "seq_len", "packed"),
    [
        ("llama", None, 2048, True),  # the default is auto
        ("llama", "auto", 4096, True),
        ("llama", "auto", 4097, False),
        ("llama", "true", 4097, True),
        ("llama", "false", 2048, False),
        ("opt", "auto", 2048, False),  # its rows would see each other
        ("falcon-h1", "auto", 2048, False),
    ],
)
def test_auto_packs_short_sequences_on_a_gpu(project, family, packing, seq_len, packed):
    asked = [f"data.packing={packing}"] if packing else []
    config = load_config("cfg.yaml", [f"train.seq_len={seq_len}", *asked])
    skeleton = Skeleton(tiny_config(family))
    assert (
        packs(skeleton, config.data.packing, config.train.seq_len, torch.device("cuda")) == packed
    )


@pytest.mark.parametrize("family", RECURRENT)
def test_packing_is_refused_where_rows_would_see_each_other(megatrain, project, tokenizer, family):
    tiny_config(family, vocab_size=len(tokenizer)).save_pretrained(project / "other")
    tokenizer.save_pretrained(project / "other")
    done = megatrain("plan cfg.yaml model=other sample_packing=true", code=2)
    kind = family.replace("-", "_")
    assert f"a {kind} model does not keep examples apart that are packed into one" in done.err
    assert "set data.packing: false" in done.err


# -- optimizer keys --------------------------------------------------------------------------------


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
