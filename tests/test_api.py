"""`import megatrain as mt`: plans and engines from Python are those of the commands, and wrong
arguments get a sentence."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import megatrain as mt
from megatrain.cli import main
from megatrain.engine.engine import Engine
from megatrain.engine.request import Request
from megatrain.errors import ModelError
from megatrain.models.pretrained import resolve_source
from megatrain.recipes.api import config_of
from tests.helpers.once import commands_dry_run_models_once, engines_are_built_fast
from tests.helpers.support import engine_of, full_batches, micro_batches, plain_model, tiny_config

BATCHES = full_batches(0, [(2, 16), (2, 16)])
PLANNED: dict[str, Any] = {"tokens_per_step": 64, "seq_len": 16}


@pytest.fixture(scope="module", autouse=True)
def once() -> Iterator[None]:
    # shapes by all of their arguments: Python's and the command's
    with engines_are_built_fast(), commands_dry_run_models_once():
        yield


def test_every_name_is_there_and_listed_once():
    assert sorted(mt.__all__) == sorted(set(mt.__all__))
    for name in mt.__all__:
        assert getattr(mt, name) is not None
    assert {name for name in dir(mt) if not name.startswith("_")} == {*mt.__all__}
    assert {"AdamW", "Lion", "Muon", "Config", "Engine", "Settings", "StepResult"} <= {*mt.__all__}
    assert {"errors", "losses", "load_config", "plan", "train", "resume"} <= {*mt.__all__}
    assert {"evaluate", "export"} <= {*mt.__all__}
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        mt.trian  # noqa: B018


def test_keywords_are_spelled_out_and_the_same_in_both_constructors():
    def keywords(make: Any) -> dict[str, Any]:
        found = inspect.signature(make).parameters.values()
        return {each.name: each.default for each in found if each.kind is each.KEYWORD_ONLY}

    ours, theirs = keywords(Engine.from_pretrained), keywords(Engine.from_config)
    assert ours.pop("revision") is None
    assert ours == theirs
    assert ours["settings"] == "auto"


# -- planning ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def config_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all, as the shape of a model is known by its folder, too."""
    folder = tmp_path_factory.mktemp("config") / "model"
    tiny_config("llama").save_pretrained(folder)
    return folder


def as_command(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


def comparable(plan: dict[str, Any]) -> dict[str, Any]:
    kept = ("choices", "device", "host", "nvme", "disk", "job", "timing", "steps")
    return {name: plan[name] for name in kept}


@pytest.mark.slow
@pytest.mark.parametrize(
    "elsewhere",
    [
        {"gpu": "RTX 4090", "ram": "64GiB"},
        {"ram": "64GiB", "cores": 8, "gpu_memory": "12GiB", "gpu_tflops": 60, "pcie": 25},
    ],
)
def test_plan_is_the_command_s(config_folder, capsys, elsewhere: dict[str, Any]):
    eager: dict[str, Any] = {"optimizer": {"moments": "int8"}, "compile": False}
    ours = mt.plan(config_folder, **PLANNED, **elsewhere, **eager)
    words = "train.tokens_per_step=64 train.seq_len=16 optimizer.moments=int8 compile=false"
    keys = words.split()
    flags = (f"--{name.replace('_', '-')}={value}" for name, value in elsewhere.items())
    held = torch.ones(50 << 20)  # of this process, not of that machine
    theirs = as_command(capsys, str(config_folder), *flags, *keys)
    assert held.numel()
    assert comparable(json.loads(json.dumps(ours.to_dict()))) == comparable(theirs)


def test_plan_takes_a_file_a_mapping_and_a_config(config_folder, tmp_path):
    given = {
        "model": {"config": str(config_folder), "init": "random"},
        "method": "pretrain",
        "data": {"train": "rows.txt"},
        "train": {"tokens_per_step": 32, "seq_len": 16},
    }
    file = tmp_path / "cfg.yaml"
    file.write_text(json.dumps(given))
    config = mt.load_config(file)
    targets: list[Any] = [str(file), given, config]
    for target in targets:
        with pytest.raises(mt.errors.ModelError, match="tokenizer"):
            mt.plan(target)  # as the command: a config names rows, which want a tokenizer
    named = {"model": "tiny", "data": {"train": "rows.txt"}, "compile": False}
    assert mt.plan(named, gpu="H200", ram="128GiB").fits
    assert mt.load_config(given) == config
    changed = mt.load_config(given, {"train.seq_len": 8})
    assert changed.train.seq_len == 8
    assert config_of(config, {"train": {"seq_len": 8}}) == changed
    assert mt.load_config(given, {"train": {"seq_len": 8}}) == changed


@pytest.mark.slow
@pytest.mark.parametrize("clip", [1.0, None], ids=["clipped", "unclipped"])
def test_an_engine_planned_from_keywords_is_the_plan_s_and_trains_the_same(config_folder, clip):
    plan = mt.plan(config_folder, **PLANNED, train={"max_grad_norm": clip}, precision="float32")
    same: dict[str, Any] = {**PLANNED, "max_grad_norm": clip, "precision": "float32"}
    with Engine.from_plan(plan) as planned:
        assert planned.settings == plan.choices.settings(plan.job)
        assert planned.plan == plan
        losses = [planned.train_step(BATCHES, lr=1e-3).loss for _ in range(3)]
    with Engine.from_config(config_folder, **same, seed=0) as engine:
        assert engine.settings == planned.settings
        assert engine.plan is not None
        assert engine.plan.choices == plan.choices
        assert [engine.train_step(BATCHES, lr=1e-3).loss for _ in range(3)] == losses
    assert losses[2] < losses[0]


@pytest.mark.slow
def test_an_engine_may_be_planned_for_another_loss(config_folder):
    keys: dict[str, Any] = {**PLANNED, "precision": "float32"}
    plan = mt.plan(config_folder, **keys, method="dpo")
    with Engine.from_config(config_folder, **keys, loss=mt.losses.Dpo()) as engine:
        assert engine.plan is not None
        assert engine.plan.choices == plan.choices
        job = engine.plan.job
        assert (job.head_twice, job.refers, job.least_tokens) == (True, True, 32)


def test_without_a_step_s_size_everything_is_streamed_and_that_is_said(caplog):
    with caplog.at_level(logging.WARNING), Engine.from_config(tiny_config("llama")) as engine:
        assert (engine.settings.resident, engine.settings.retained) == (0, 0)
        assert engine.plan is None
    assert "tokens_per_step and seq_len" in caplog.text


def test_settings_are_taken_at_their_word(caplog):
    settings = mt.Settings(resident=2, update_threads=3)
    with Engine.from_config(tiny_config("llama"), settings=settings) as engine:
        assert engine.settings == settings
    assert caplog.text == ""


def test_a_folder_on_nvme_may_be_named_alone():
    for nvme in ("swap", ["swap"], Path("swap")):
        request = Request.of_keywords(None, **PLANNED, memory={"nvme": nvme})
        assert request.nvme_folders == (Path("swap"),)


def test_what_names_no_model_is_said():
    with pytest.raises(ModelError, match="123: names no model; give a folder, a GGUF file"):
        Engine.from_pretrained(123)  # type: ignore[arg-type]


@pytest.mark.slow
def test_from_pretrained_plans_and_reads_the_weights(tmp_path):
    model = plain_model(tiny_config("llama"))
    model.save_pretrained(tmp_path / "model")  # type: ignore[operator]
    how: Any = {"precision": "float32", "memory": {"host": "4GiB", "nvme": None}}
    with Engine.from_pretrained(tmp_path / "model", **PLANNED, **how) as engine:
        weights = dict(engine.iter_weights())
        for name, parameter in model.named_parameters():
            assert torch.equal(weights[name], parameter), name


def test_weights_that_are_read_anew_are_computed_with(tmp_path):
    """Those of a sweep before are still on the device."""
    how: Any = {"precision": "float32", "settings": mt.Settings()}
    for seed in range(2):
        model: Any = plain_model(tiny_config("llama"), seed=seed)
        model.save_pretrained(tmp_path / f"model-{seed}")
    one, other = (Engine.from_pretrained(tmp_path / f"model-{seed}", **how) for seed in range(2))
    with one, other:
        before, expected = (engine.evaluate(BATCHES).loss for engine in (one, other))
        one.load_weights(resolve_source(tmp_path / "model-1"))
        assert one.evaluate(BATCHES).loss == expected != before


@pytest.mark.slow
def test_a_plan_that_does_not_fit_opens_no_engine(config_folder):
    with pytest.raises(mt.errors.PlanError, match="does not fit"):
        Engine.from_config(config_folder, **PLANNED, memory={"host": "8MiB"})
    plan = mt.plan(config_folder, **PLANNED, memory={"host": "8MiB"})
    with pytest.raises(mt.errors.PlanError, match="does not fit"):
        Engine.from_plan(plan)


def test_a_plan_for_another_machine_opens_no_engine(config_folder):
    elsewhere: dict[str, Any] = {"gpu": "RTX 4090", "ram": "64GiB"}  # of which the shape is known
    eager: dict[str, Any] = {"optimizer": {"moments": "int8"}, "compile": False}
    plan = mt.plan(config_folder, **PLANNED, **elsewhere, **eager)
    with pytest.raises(mt.errors.PlanError, match=r"another machine .*RTX 4090"):
        Engine.from_plan(plan)
    with pytest.raises(mt.errors.PlanError, match="make it with"):
        Engine.from_plan(replace(plan, made_of=None))


# -- wrong arguments -----------------------------------------------------------------------------

LLAMA = tiny_config("llama")
make: Any = Engine.from_config  # wrong types are the point here
plan: Any = mt.plan
load_config: Any = mt.load_config


def given(**more: Any) -> None:
    make(LLAMA, settings=mt.Settings(), **more)


WRONG: dict[str, tuple[Any, str]] = {
    "optimizer class": (lambda: make(LLAMA, optimizer=mt.AdamW), "optimizer: .* is none"),
    "optimizer name": (lambda: make(LLAMA, optimizer="adamw"), "optimizer: 'adamw' is none"),
    "settings": (lambda: make(LLAMA, settings={"groups": 2}), "settings: .* neither"),
    "seed": (lambda: make(LLAMA, seed="7"), "seed: '7'"),
    "clip": (lambda: make(LLAMA, max_grad_norm=-1), "max_grad_norm: -1 is out of range"),
    "one of two": (lambda: make(LLAMA, seq_len=16), "both tokens_per_step and seq_len"),
    "tokens": (lambda: make(LLAMA, tokens_per_step="64", seq_len=16), "tokens_per_step: '64'"),
    "too long": (lambda: make(LLAMA, tokens_per_step=640, seq_len=640), "seq_len: 640 exceeds"),
    "memory key": (lambda: make(LLAMA, **PLANNED, memory={"ram": "1GiB"}), "'ram' is unknown"),
    "memory size": (lambda: make(LLAMA, **PLANNED, memory={"host": "much"}), "host must be a size"),
    "memory beside settings": (lambda: given(memory={"host": "1GiB"}), "are for settings='auto'"),
    "size beside settings": (lambda: given(**PLANNED), "are for settings='auto'"),
    "loss beside settings": (lambda: given(loss=mt.losses.Dpo()), "are for settings='auto'"),
    "loss": (lambda: make(LLAMA, **PLANNED, loss="dpo"), "loss: 'dpo' is none"),
    "plan cores alone": (lambda: plan("tiny", cores=4), "and --cores to them"),
    "model": (lambda: make({"model_type": "llama"}), "config: dict is neither"),
    "plan key": (lambda: plan("tiny", optimiser={"name": "lion"}), "did you mean optimizer"),
    "plan nested key": (lambda: plan("tiny", train={"seqlen": 8}), "train.seqlen: did you mean"),
    "plan gpu alone": (lambda: plan("tiny", gpu="H200"), "--gpu and --ram belong together"),
    "plan of nothing": (lambda: plan(None), "neither a path nor a name"),
    "config of a list": (lambda: load_config(["a"]), "a file or a mapping"),
    "dtype": (lambda: mt.export("run", "out", dtype="fp16"), "dtype must be"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_argument_gets_a_sentence(case):
    call, message = WRONG[case]
    with pytest.raises(mt.errors.MegaTrainError, match=message):
        call()


BATCH = micro_batches(0, [(2, 8)])[0]
LISTS = {name: value.tolist() for name, value in BATCH.items()}
WRONG_BATCHES: dict[str, tuple[Any, str]] = {
    "a dict": (BATCH, "micro_batches must be a list of dicts of tensors, not dict"),
    "a tensor": (BATCH["input_ids"], "not Tensor"),
    "nothing": (None, "not NoneType"),
    "a list of tensors": ([BATCH["input_ids"]], "micro-batch 0 has no input_ids"),
    "lists for tensors": ([LISTS], "input_ids of micro-batch 0 are list"),
    "a missing key": ([{"input_ids": BATCH["input_ids"]}], "micro-batch 0 has no labels"),
}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with engine_of(tiny_config("llama")) as engine:
        yield engine


@pytest.mark.parametrize("case", WRONG_BATCHES)
@pytest.mark.parametrize("call", ["train_step", "forward_backward", "evaluate"])
def test_wrong_micro_batches_get_a_sentence(engine, case, call):
    batches, message = WRONG_BATCHES[case]
    with pytest.raises(mt.errors.DataError, match=message):
        getattr(engine, call)(batches)
    assert engine.train_step([BATCH]).target_tokens > 0


def test_a_wrong_loss_or_rate_gets_a_sentence(engine):
    train: Any = engine.train_step
    with pytest.raises(mt.errors.MegaTrainError, match=r"loss: .* has no denominator"):
        train([BATCH], loss=lambda *_: 0)
    with pytest.raises(mt.errors.MegaTrainError, match="lr: 'fast' is not a number"):
        train([BATCH], lr="fast")
    assert engine.train_step([BATCH]).target_tokens > 0


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("given", ["tokens", "position_ids"])
def test_a_sequence_that_is_too_long_is_refused_before_it_computes(family, given):
    longest = {"gpt2": {"n_positions": 8}, "llama": {"max_position_embeddings": 8}}[family]
    ids = torch.zeros(1, 9 if given == "tokens" else 4, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids}
    if given == "position_ids":
        batch["position_ids"] = torch.arange(5, 9)[None]
    settings: dict[str, Any] = {"precision": "float32", "settings": mt.Settings(), "device": "cpu"}
    with mt.Engine.from_config(tiny_config(family, **longest), **settings) as engine:
        for call in (engine.forward_backward, engine.evaluate):
            with pytest.raises(mt.errors.DataError, match="a sequence of 9 tokens, but the model"):
                call([batch])
