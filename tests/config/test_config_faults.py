"""Configs that are refused: keys that contradict each other, and keys that are missing."""

import shlex
from pathlib import Path
from typing import Any

import pytest

from megatrain.config import load_config
from megatrain.config.fields import READERS
from megatrain.errors import ConfigError

MINIMAL = "model: some/folder\ndata: {train: rows.jsonl}\n"


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


TWICE = "memory.second_backward=true "
NVME_FOLDER = "memory.nvme: must be a folder, a list of folders, or null, not"
UNKNOWN = (
    "memory.zzz: unknown key; known here are gpu, host, resident, replicated, offload_activations"
)
CONTRADICTIONS = {
    "train.epochs=null": "train.epochs: without epochs and max_steps the run has no end",
    "train.tokens_per_step=null": "the size of a step is tokens_per_step or rows_per_step",
    "train.decay=0.1": "train.decay: belongs to schedule: wsd",
    "train.schedule=wsd train.decay=0.9 train.warmup=0.2": "with warmup 0.2 it exceeds the run",
    "train.schedule=constant train.min_lr_ratio=0.1": "a constant learning rate has no end value",
    "method=pretrain data.train_on=assistant": "method: pretrain trains on every token",
    "'model={config: a, path: b}'": "model.path at command line; keep one",
    "'model={config: a, init: pretrained}'": "`config` gives a shape and no weights",
    "train=5": "train: must be a mapping",
    "model=": "model: must be a hub id, a folder or a mapping such as `model: {path: ...}`",
    "=5": "'=5' is not key=value",
    "train.": "'train.' is not key=value",
    "train..seed=1": "is not key=value",
    "train.seed=[1": "command line: train.seed: not valid YAML",
    "train.seed.deep=1": "train.seed: must be a whole number",
    "learning_rte=1": "command line: learning_rte: did you mean learning_rate?",
    "seq_len=1": "command line: seq_len: did you mean train.seq_len?",
    "optimizer.lr=1": "command line: optimizer.lr: did you mean train.learning_rate?",
    "train.keep=1": "command line: train.keep: did you mean checkpoint.keep?",
    "memory.nvme_blocks=2": "no folder on NVMe is named; set memory.nvme: [FOLDER] as well",
    "memory.nvme=[]": f"{NVME_FOLDER} []",
    "memory.nvme=5": f"{NVME_FOLDER} 5",
    "memory.offload_activations=false memory.retained_on_host=2": "saved activations are offloaded",
    TWICE + "train.max_grad_norm=null": "is waited for; set train.max_grad_norm: 1.0 as well",
    TWICE + "train.groups=2": "set train.groups: 1 as well",
    TWICE + "train.retained=3": "spends what retained layers save; lower it or train.retained",
    "memory.second_backward=-1": "must be true, false, a whole number of at least 0 or auto",
    TWICE + "memory.retained_on_host=1": "set memory.retained_on_host: 0",
    "compile=false train.cheap_retention=true": "only compiled layers can save selectively",
    "memory.zzz=1": UNKNOWN,
}


# Key -> a value, and the key and value by which something reads it.
READ = {
    "dpo.label_smoothing": (0.1, "dpo.loss_type", "robust"),
    "dpo.discopop_tau": (0.5, "dpo.loss_type", ["sigmoid", "discopop"]),
    "cpo.label_smoothing": (0.1, "cpo.loss_type", "sigmoid"),
    "train.eval_rows": (9, "data.eval", 0.1),
    "checkpoint.patience": (9, "data.eval", 0.1),
    "checkpoint.metric": ("eval_margin", "data.eval", 0.1),
    "checkpoint.greater_is_better": (True, "data.eval", 0.1),
    "checkpoint.push_every": (9, "checkpoint.push_to", "me/model"),
    "eval.prompts": (9, "data.eval", 0.1),
    "eval.max_new_tokens": (9, "eval.prompts", "file"),
    "memory.nvme_size": ("9GiB", "memory.nvme", ["folder"]),
    "memory.gpu": ("9GiB", "device", "cuda"),
    "economy.gpu_power_w": (9, "device", "cuda"),
    "model.revision": ("main", "model.path", "owner/model"),
}


def test_a_key_that_nothing_reads_is_refused_but_not_of_a_run(tmp_path):
    assert list(READ) == [key for key, *_ in READERS]
    for key, (value, other, read_with) in READ.items():
        given: dict[str, Any] = {"model.path": str(tmp_path), "data.train": "rows", key: value}
        given |= {
            "data.eval": None,
            "device": "cpu",
            "method": key[:3] if key[1:3] == "po" else "sft",
        }
        given |= {"cpo.loss_type": "ipo"} if given["method"] == "cpo" else {}
        with pytest.raises(ConfigError, match=f"^keywords: {key}: .*, or remove it$"):
            load_config({}, given)
        load_config({}, given, of_run=True)
        load_config({}, {**given, other: read_with})


def test_contradictions_are_refused_on_the_command_line(write):
    path = write(MINIMAL)
    for overrides, reason in CONTRADICTIONS.items():
        text = refusal(path, *shlex.split(overrides))
        assert reason in text
        assert "command line" in text


WHOLE = {
    "": "cfg.yaml: model: missing; name a hub id",
    "data: {train: x}\n": "cfg.yaml: model: missing",
    "model: a\n": "cfg.yaml: data: missing; name what to train on",
    "model: a\ndata:\n  eval: 3\n": "cfg.yaml: data.train: missing",
    "just text": "cfg.yaml:1: a config is a mapping of keys",
    "- a\n- b\n": "cfg.yaml:1: a config is a mapping of keys",
    "architectures: []\nmodel_type: llama\n": "cfg.yaml: describes a model, not a run; name",
    MINIMAL + "train:\n  tokens_per_step: 10\n  rows_per_step: 2\n": "cfg.yaml:5: "
    "train.rows_per_step: excludes train.tokens_per_step at cfg.yaml:4; keep one",
}


def test_what_must_be_there_and_may_not_be_together(write):
    for text, reason in WHOLE.items():
        assert refusal(write(text)).startswith(reason), text


def test_faults_of_names_and_values_are_told_together(write):
    path = write(
        MINIMAL + "train:\n  seq_len: many\n  sed: 1\noptimizer: {name: adamv}\nlora_r: 8\n"
    )
    found = refusal(path, "precision=fp17", "threds=2")
    places = [line.split(": ")[0] for line in found.splitlines()]
    assert {"cfg.yaml:4", "cfg.yaml:5", "cfg.yaml:6", "cfg.yaml:7", "command line"} == {*places}
    told = {line.split(": ")[1] for line in found.splitlines()}
    named = {"train.sed", "lora_r", "threds"}
    assert told == named | {"train.seq_len", "optimizer.name", "precision"}


def test_what_a_wrong_name_leaves_unset_is_not_held_against_the_rest(write):
    for text in (
        "modle: some/folder\ndata: {train: rows.jsonl}\n",
        "model: some/folder\ndata: {train: rows.jsonl, trian: x}\ncheckpoint: {patiense: 2}\n",
        MINIMAL + "train: {epochs: null, max_step: 3}\n",
        MINIMAL + "gradient_accumulation_steps: 4\nper_device_train_batchsize: 2\n",
    ):
        assert all(" did you mean " in line for line in refusal(write(text)).splitlines())


def test_ten_faults_are_told_and_the_others_counted(write):
    wrong = "".join(f"  {name}: wrong\n" for name in ("seq_len", "epochs", "seed", "warmup"))
    keys = "".join(f"unknown_{n}: 1\n" for n in range(8))
    lines = refusal(write(MINIMAL + "train:\n" + wrong + keys)).splitlines()
    assert len(lines) == 11
    assert lines[-1] == "and 2 more"
