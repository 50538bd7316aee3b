"""The config: fields, precedence, places in errors, and every key mutated."""

import json
import math
from pathlib import Path

import pytest

from megatrain.cli import main
from megatrain.config import Config, config_schema, example_config, load_config
from megatrain.config.load import SECTIONS, TOP

FULL = """\
model:
  path: some/folder
  init: pretrained
  revision: main
  trust_remote_code: false
method: sft
data:
  train: rows.jsonl
  eval: 40
  format: messages
  train_on: all
  on_bad_row: skip
  packing: true
  split: train
  text_field: body
train:
  tokens_per_step: 2048
  micro_batch_tokens: 512
  groups: 1
  head_chunk_tokens: 256
  layer_chunk_tokens: null
  retained: 4
  cheap_retention: false
  seq_len: 512
  epochs: 2
  max_steps: 24
  learning_rate: 2e-5
  schedule: wsd
  warmup: 0.1
  min_lr_ratio: 0.1
  decay: 0.3
  max_grad_norm: 0.5
  eval_every: 10
  eval_rows: 16
  log_every: 2
  seed: 7
  deterministic: true
checkpoint:
  every: 10
  keep: 3
optimizer:
  name: adamw
  moments: float32
  betas: [0.8, 0.95]
  eps: 1e-6
  weight_decay: 0.1
  momentum: auto
  nesterov: auto
  ns_steps: auto
  adjust_lr_fn: auto
  adamw_lr: auto
memory:
  gpu: 70GiB
  host: 512 MB
  resident: auto
  offload_activations: true
  retained_on_host: 1
  second_backward: false
  activations: int8
  nvme: [/mnt/one, /mnt/two]
  nvme_size: 800GiB
  nvme_blocks: 3
  nvme_arrays: gradients
economy:
  price_per_hour: 3.5
  price_per_kwh: 0.3
  currency: EUR
  gpu_power_w: 600
  host_power_w: 250
precision: float32
attention: sdpa
compile: false
threads: 2
device: cpu
output: runs/full
sample_prompt: Who are you?
"""
MINIMAL = "model: some/folder\ndata: {train: rows.jsonl}\n"
OTHER_WAYS = {"model.config", "train.rows_per_step"}  # rivals of keys in FULL


def keys_of(text: str) -> list[tuple[int, str]]:
    """(line index, dotted key) of every key of a block-style config."""
    keys, section = [], ""
    for index, line in enumerate(text.splitlines()):
        name = line.split(":")[0]
        if not name.startswith(" "):
            section = name
        keys.append((index, f"{section}.{name.strip()}" if name.startswith(" ") else name))
    return keys


FREE_TEXT = (
    "model.path",
    "model.revision",
    "data.train",
    "data.eval",
    "data.split",
    "data.text_field",
    "economy.currency",
    "output",
    "sample_prompt",
)
LEAVES = [(index, key) for index, key in keys_of(FULL) if "." in key or key not in SECTIONS]


def test_full_config_holds_every_key():
    every = {
        f"{section}.{key}" if section else key for section, keys in SECTIONS.items() for key in keys
    }
    assert {key for _, key in keys_of(FULL)} == every - OTHER_WAYS


def test_full_config_is_read_as_written(write):
    config = load_config(write(FULL))
    assert (config.model.path, config.model.source, config.model.revision) == (
        "some/folder",
        "some/folder",
        "main",
    )
    assert (config.data.eval, config.data.on_bad_row, config.data.text_field) == (
        40,
        "skip",
        "body",
    )
    assert (config.train.learning_rate, config.train.epochs, config.train.decay) == (2e-5, 2.0, 0.3)
    assert (config.optimizer.betas, config.optimizer.eps) == ((0.8, 0.95), 1e-6)
    assert (config.memory.gpu, config.memory.host) == (70 * 2**30, 512_000_000)
    assert (config.output, config.threads, config.sample_prompt) == (
        Path("runs/full"),
        2,
        "Who are you?",
    )


def test_defaults(write):
    config = load_config(write(MINIMAL))
    assert (config.method, config.model.init, config.data.eval, config.data.train_on) == (
        "sft",
        "pretrained",
        0.02,
        "assistant",
    )
    assert (config.train.tokens_per_step, config.train.rows_per_step, config.train.seq_len) == (
        65536,
        None,
        4096,
    )
    assert (config.train.epochs, config.train.max_steps, config.train.learning_rate) == (
        1.0,
        None,
        1e-5,
    )
    assert (
        config.train.schedule,
        config.train.warmup,
        config.train.decay,
        config.train.max_grad_norm,
    ) == ("cosine", 0.03, None, 1.0)
    assert (config.checkpoint.every, config.checkpoint.keep, config.optimizer.weight_decay) == (
        200,
        2,
        0.0,
    )
    assert (config.memory.gpu, config.memory.host, config.memory.nvme, config.precision) == (
        "auto",
        "auto",
        None,
        "auto",
    )


@pytest.mark.parametrize(("index", "key"), keys_of(FULL))
def test_a_typo_in_any_key_names_the_line_and_the_nearest_key(write, capsys, index, key):
    lines = FULL.splitlines()
    name = key.rpartition(".")[2]
    typo = name[:-1] if len(name) < 5 else name[:2] + name[3:]
    lines[index] = lines[index].replace(name, typo, 1)
    assert main(["train", str(write("\n".join(lines)))]) == 2
    dotted = f"{key.rpartition('.')[0]}.{typo}".lstrip(".")
    assert (
        f"error: cfg.yaml:{index + 1}: {dotted}: did you mean {name}?"
        in capsys.readouterr().err.splitlines()
    )


@pytest.mark.parametrize("bad", ["{a: [1]}", "[[]]", "-3", "'  '", "0x"])
@pytest.mark.parametrize(("index", "key"), LEAVES)
def test_a_wrong_value_of_any_key_names_the_line(write, capsys, index, key, bad):
    if bad == "0x" and key in {*FREE_TEXT, "memory.nvme"}:
        pytest.skip("a text like any other")
    lines = FULL.splitlines()
    lines[index] = lines[index].split(":")[0] + ": " + bad
    assert main(["train", str(write("\n".join(lines)))]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith(f"error: cfg.yaml:{index + 1}: {key}: ")
    assert "must be" in error or "not built yet" in error


def test_command_line_over_file_over_defaults(write):
    config = load_config(
        write(MINIMAL + "train: {seq_len: 128, seed: 1}\n"),
        ["train.seed=2", "checkpoint.keep=5", "train.seed=3"],
    )
    assert (
        config.train.seq_len,
        config.train.seed,
        config.checkpoint.keep,
        config.train.log_every,
    ) == (128, 3, 5, 1)


def test_a_section_on_the_command_line_is_merged(write):
    config = load_config(
        write(MINIMAL + "train: {seq_len: 128, seed: 1}\n"), ["train={seed: 4}", "data.eval=null"]
    )
    assert (config.train.seq_len, config.train.seed, config.data.eval) == (128, 4, None)


def test_another_model_forgets_the_first(write):
    config = load_config(
        write("model: {config: shape, init: random, trust_remote_code: true}\ndata: {train: x}\n"),
        ["model=other"],
    )
    assert (config.model.source, config.model.init, config.model.trust_remote_code) == (
        "other",
        "pretrained",
        False,
    )


def test_a_shape_starts_at_random(write):
    config = load_config(write("model: {config: shape}\nmethod: pretrain\ndata: {train: x}\n"))
    assert (config.model.source, config.model.init, config.data.train_on) == (
        "shape",
        "random",
        "all",
    )


def test_rows_on_the_command_line_retire_tokens_in_the_file(write):
    train = load_config(
        write(MINIMAL + "train: {tokens_per_step: 10}\n"), ["train.rows_per_step=2"]
    ).train
    assert (train.tokens_per_step, train.rows_per_step) == (None, 2)


def test_steps_alone_decide_the_length(write):
    train = load_config(write(MINIMAL), ["train.max_steps=5"]).train
    assert (train.max_steps, train.epochs) == (5, None)


@pytest.mark.parametrize("text", [MINIMAL, FULL])
def test_written_out_and_read_back_it_is_the_same(write, text):
    config = load_config(write(text))
    again = load_config(write(config.to_yaml()))
    assert again == config
    assert again.to_yaml() == config.to_yaml()


def test_texts_that_look_like_numbers_survive(write):
    config = load_config(
        write(MINIMAL), ["model.revision='12e4567'", "sample_prompt='1e5'", "data.split='null'"]
    )
    again = load_config(write(config.to_yaml()))
    assert (again.model.revision, again.sample_prompt, again.data.split) == (
        "12e4567",
        "1e5",
        "null",
    )


def test_resolved_values_are_checked_and_written_back(write):
    config = load_config(write(MINIMAL + "train: {micro_batch_tokens: auto}\n"))
    resolved = config.with_values({"train.micro_batch_tokens": 8192, "precision": "bfloat16"})
    assert (resolved.train.micro_batch_tokens, resolved.precision, resolved.train.seq_len) == (
        8192,
        "bfloat16",
        4096,
    )
    assert (config.train.micro_batch_tokens, config.precision) == ("auto", "auto")
    with pytest.raises(ValueError, match="must be a whole number"):
        config.with_values({"train.groups": 0})


def test_a_key_can_be_placed_in_a_later_error(write):
    config = load_config(write(MINIMAL + "train:\n  max_length: 64\n"), ["train.seed=1"])
    assert config.where("train.seq_len") == "cfg.yaml:4: train.max_length"
    assert config.where("train.seed") == "command line: train.seed"
    assert config.where("train.epochs") == "train.epochs"
    assert config.with_values({"train.groups": 1}).where("train.seed") == "command line: train.seed"


def test_a_config_is_frozen(write):
    config = load_config(write(MINIMAL))
    with pytest.raises(ValueError, match="frozen"):
        config.train.seed = 3


def test_home_is_expanded(write, monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    config = load_config(write("model: ~/m\ndata: {train: ~/d.jsonl}\noutput: ~/runs\n"))
    assert (config.model.path, config.data.train, config.output) == (
        "/home/somebody/m",
        "/home/somebody/d.jsonl",
        Path("/home/somebody/runs"),
    )


def test_the_example_is_a_config_with_the_defaults(write):
    config = load_config(write(example_config()))
    assert config == Config.model_validate(
        {"model": config.model.source, "data": {"train": "train.jsonl"}}
    )


def test_the_schema_knows_every_key():
    schema = json.loads(json.dumps(config_schema()))
    assert set(schema["properties"]) == set(SECTIONS[TOP])
    assert schema["additionalProperties"] is False
    for section in set(SECTIONS) - {TOP, "model"}:
        properties = schema["$defs"][f"{section.capitalize()}Options"]["properties"]
        assert set(properties) == set(SECTIONS[section])
        assert all(entry.get("description") for entry in properties.values())


def test_the_schema_takes_a_model_as_text_or_mapping():
    text, mapping = config_schema()["$defs"]["ModelOptions"]["anyOf"]
    assert text == {"type": "string"}
    assert set(mapping["properties"]) == set(SECTIONS["model"])


def test_not_a_number_never_gets_in(write):
    config = load_config(write(FULL))
    assert all(
        math.isfinite(value)
        for value in config.train.model_dump().values()
        if isinstance(value, float)
    )
