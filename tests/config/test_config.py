"""The config: fields, precedence, places in errors, and every key mutated."""

import json
from operator import attrgetter
from pathlib import Path

import pytest

from megatrain.cli import main
from megatrain.config import Config, config_schema, example_config, load_config
from megatrain.config.load import SECTIONS, TOP
from megatrain.config.resuming import with_absolute_paths
from megatrain.errors import ConfigError

FULL = """\
model:
  path: some/folder
  init: pretrained
  revision: main
  images: true
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
  date: 2026-11-23
  text_field: body
  columns: {text: body}
  chat_template: chatml
  prompts: chat
  truncation_mode: keep_end
  processes: 3
  streaming: false
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
  router_aux_loss_coef: 0.01
  context_parallel: 2
  wire: bfloat16
  freeze: [model.embed_tokens.weight]
  eval_every: 10
  eval_rows: 16
  log_every: 2
  seed: 7
  deterministic: true
checkpoint:
  every: 10
  keep: 3
  patience: 5
  push_to: me/model
  push_every: 0.5
  metric: eval_quiz_acc
  greater_is_better: true
  final: full
eval:
  prompts: asked.txt
  max_new_tokens: 64
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
  replicated: 3
  offload_activations: true
  retained_on_host: 1
  keep_attention: 0
  second_backward: false
  sums_on_device: 2
  transport: gather
  activations: int8
  nvme: [/mnt/one, /mnt/two]
  nvme_size: 800GiB
  nvme_blocks: 3
economy:
  price_per_hour: 3.5
  price_per_kwh: 0.3
  currency: EUR
  gpu_power_w: 600
  host_power_w: 250
dpo:
  beta: 0.1
  loss_type: sigmoid
  loss_weights: null
  label_smoothing: 0.0
  discopop_tau: 0.05
orpo:
  beta: 0.1
simpo:
  beta: null
  simpo_gamma: 0.5
cpo:
  beta: 0.1
  cpo_alpha: 1.0
  loss_type: sigmoid
  label_smoothing: 0.0
kto:
  beta: 0.1
  desirable_weight: 1.0
  undesirable_weight: 1.0
grpo:
  num_generations: 8
  max_completion_length: 256
  num_iterations: 1
  loss_type: "dapo"
  beta: 0.0
  epsilon: 0.2
  epsilon_high: null
  delta: null
  importance_sampling_level: "token"
  off_policy_mask_threshold: null
  importance_sampling_correction: true
  importance_sampling_mode: "sequence_mask"
  importance_sampling_clip_max: 3.0
  scale_rewards: "group"
  multi_objective_aggregation: "sum_then_normalize"
  mask_truncated_completions: false
  dynamic_sampling: false
distill:
  teacher_model_name_or_path: null
  signal: "distribution"
  beta: 1.0
  teacher_top_k: null
  temperature: 1.0
  lmbda: 0.0
  max_completion_length: 256
rloo:
  num_generations: 2
  max_completion_length: 256
  num_iterations: 1
  beta: 0.05
  epsilon: 0.2
  epsilon_high: null
  mask_truncated_completions: false
  dynamic_sampling: false
  normalize_advantages: false
  reward_clip_range: null
rollout:
  generation_batch_size: 64
  steps_per_generation: 1
  temperature: 1.0
  top_p: null
  top_k: null
  min_p: null
  eval_generations: 1
  vllm_server_base_url: null
  vllm_server_timeout: 240.0
tools:
  functions: []
  environment_factory: null
  max_tool_calling_iterations: null
  timeout_s: 60.0
  max_result_characters: 8192
rewards:
  functions: []
  reward_weights: null
  timeout_s: 60.0
  processes: "auto"
  on_bad_reward: "refuse"
reward:
  center_rewards_coefficient: null
precision: float32
attention: sdpa
compile: false
threads: 2
track: [tensorboard]
gpus: 2
hang_timeout: 900
on_end: echo $MEGATRAIN_STATUS
device: cuda
output: runs/full
sample_prompt: Who are you?
"""
MINIMAL = "model: some/folder\ndata: {train: rows.jsonl}\n"
OTHER_WAYS = {"model.config", "train.rows_per_step"}  # rivals of keys in FULL


def values(config: Config, keys: str) -> list[object]:
    """The values of dotted keys, which are separated by blanks."""
    return [attrgetter(key)(config) for key in keys.split()]


def keys_of(text: str) -> list[tuple[int, str]]:
    """(line index, dotted key) of every key of a block-style config."""
    keys, section = [], ""
    for index, line in enumerate(text.splitlines()):
        name = line.split(":")[0]
        if not name.startswith(" "):
            section = name
        keys.append((index, f"{section}.{name.strip()}" if name.startswith(" ") else name))
    return keys


FREE_TEXT = {f"data.{key}" for key in ("train", "eval", "split", "text_field", "chat_template")}
FREE_TEXT |= {"model.path", "model.revision", "economy.currency", "output", "sample_prompt"}
FREE_TEXT |= {"memory.nvme", "train.freeze", "rewards.functions", "tools.functions"}
FREE_TEXT |= {"tools.environment_factory", "distill.teacher_model_name_or_path"}
FREE_TEXT |= {"eval.prompts", "checkpoint.push_to", "on_end"}
LEAVES = [(index, key) for index, key in keys_of(FULL) if "." in key or key not in SECTIONS]


def test_full_config_holds_every_key():
    every = {f"{section}.{key}".lstrip(".") for section, keys in SECTIONS.items() for key in keys}
    assert {key for _, key in keys_of(FULL)} == every - OTHER_WAYS


def test_full_config_is_read_as_written(write):
    config = load_config(write(FULL))
    texts = "model.path model.source model.revision data.on_bad_row data.text_field sample_prompt"
    folder = "some/folder"
    assert values(config, texts) == [folder, folder, "main", "skip", "body", "Who are you?"]
    numbers = "data.eval train.learning_rate train.epochs train.decay optimizer.eps threads"
    assert values(config, numbers) == [40, 2e-5, 2.0, 0.3, 1e-6, 2]
    assert config.optimizer.betas == (0.8, 0.95)
    assert values(config, "memory.gpu memory.host") == [70 * 2**30, 512_000_000]
    assert config.output == Path("runs/full")


DEFAULTS = {
    "method model.init data.eval data.train_on": ["sft", "pretrained", 0.02, "assistant"],
    "train.tokens_per_step train.rows_per_step train.seq_len": [65536, None, 4096],
    "train.epochs train.max_steps train.learning_rate": [1.0, None, 1e-5],
    "train.schedule train.warmup train.decay train.max_grad_norm": ["cosine", 0.03, None, 1.0],
    "checkpoint.every checkpoint.keep optimizer.weight_decay": [200, 2, 0.0],
    "memory.gpu memory.host memory.nvme precision": ["auto", "auto", None, "auto"],
}


def test_defaults(write):
    config = load_config(write(MINIMAL))
    for keys, expected in DEFAULTS.items():
        assert values(config, keys) == expected


def section_of(index: int) -> list[str]:
    """FULL with the section of a line, what every config needs, and empty lines for the rest."""
    found = [key.partition(".")[0] for _, key in keys_of(FULL)]
    needed = ("model", "data", found[index])
    lines = zip(FULL.splitlines(), found, strict=True)
    return [line if section in needed else "" for line, section in lines]


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as refused:
        load_config(path)
    return str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize(("index", "key"), keys_of(FULL))
def test_a_typo_in_any_key_names_the_line_and_the_nearest_key(write, index, key):
    lines = section_of(index)
    name = key.rpartition(".")[2]
    typo = name + name[-1] if len(name) < 5 else name[:2] + name[3:]
    lines[index] = lines[index].replace(name, typo, 1)
    dotted = f"{key.rpartition('.')[0]}.{typo}".lstrip(".")
    error = f"cfg.yaml:{index + 1}: {dotted}: did you mean {name}?"
    assert error in refusal(write("\n".join(lines))).splitlines()


@pytest.mark.slow
@pytest.mark.parametrize(("index", "key"), LEAVES)
def test_a_wrong_value_of_any_key_names_the_line(write, index, key):
    for bad in ("{a: [1]}", "[[]]", "-3", "'  '", "0x"):
        if bad == "0x" and key in FREE_TEXT:
            continue  # a text like any other
        lines = section_of(index)
        lines[index] = lines[index].split(":")[0] + ": " + bad
        (error,) = refusal(write("\n".join(lines))).splitlines()
        assert error.startswith(f"cfg.yaml:{index + 1}: {key}: "), bad
        assert "must be" in error or "not built yet" in error, bad


def test_the_command_says_so_of_each_and_ends(write, capsys):
    text = FULL.replace("moments: ", "moment: ").replace("seed: 7", "seed: -3")
    assert main(["train", str(write(text))]) == 2
    lines = {key: index + 1 for index, key in keys_of(FULL)}
    assert capsys.readouterr().err.splitlines() == [
        f"error: cfg.yaml:{lines['optimizer.moments']}: optimizer.moment: did you mean moments?",
        f"error: cfg.yaml:{lines['train.seed']}: train.seed: must be a whole number from 0 to "
        "2^63 - 1, not -3",
    ]


FILE = MINIMAL + "train: {seq_len: 128, seed: 1, tokens_per_step: 10}\n"
SHAPE = "model: {config: shape, init: random, trust_remote_code: true}\ndata: {train: x}\n"
START = "model: {config: shape}\nmethod: pretrain\ndata: {train: x}\n"
MERGED, LAST = ["train={seed: 4}", "data.eval=null"], ["train.seed=3"]
ROWS = "train.tokens_per_step train.rows_per_step"
MODEL = "model.source model.init model.trust_remote_code"
PRECEDENCE = [  # file, command line, keys, values
    (FILE, LAST, "train.seq_len train.seed train.log_every", [128, 3, 1]),
    (FILE, MERGED, "train.seq_len train.seed data.eval", [128, 4, None]),
    (FILE, ["train.rows_per_step=2"], ROWS, [None, 2]),
    (MINIMAL, ["train.max_steps=5"], "train.max_steps train.epochs", [5, None]),
    (SHAPE, ["model=other"], MODEL, ["other", "pretrained", False]),
    (START, [], "model.source model.init data.train_on", ["shape", "random", "all"]),
]


def test_command_line_over_file_over_defaults(write):
    for text, overrides, keys, expected in PRECEDENCE:
        assert values(load_config(write(text), overrides), keys) == expected, overrides
    for twice in (["data.train=a", "data.train=b"], ["train={seed: 4}", "train.seed=4"]):
        with pytest.raises(ConfigError, match=r"^command line: .*: is set twice; keep one$"):
            load_config(write(MINIMAL), twice)


def test_written_out_and_read_back_it_is_the_same(write):
    for text in [MINIMAL, FULL]:
        config = load_config(write(text))
        again = load_config(write(config.to_yaml()))
        assert again == config
        assert again.to_yaml() == config.to_yaml()


def test_resolved_values_are_checked_and_written_back(write):
    config, keys = load_config(write(MINIMAL)), "train.micro_batch_tokens precision train.seq_len"
    resolved = config.with_values({"train.micro_batch_tokens": 8192, "precision": "bfloat16"})
    assert values(resolved, keys) == [8192, "bfloat16", 4096]
    assert values(config, keys) == ["auto", "auto", 4096]
    with pytest.raises(ValueError, match="must be a whole number"):
        config.with_values({"train.groups": 0})
    with pytest.raises(ValueError, match="frozen"):
        config.train.seed = 3


def test_a_key_can_be_placed_in_a_later_error(write):
    config = load_config(write(MINIMAL + "train:\n  max_length: 64\n"), ["train.seed=1"])
    assert config.where("train.seq_len") == "cfg.yaml:4: train.max_length"
    assert config.where("train.seed") == "command line: train.seed"
    assert config.where("train.epochs") == "train.epochs"
    assert config.with_values({"train.groups": 1}).where("train.seed") == "command line: train.seed"


def test_counts_may_have_a_unit(write):
    for text, number in {"64k": 64_000, "64Ki": 65_536, "1.5M": 1_500_000, "2mi": 2**21}.items():
        config = load_config(write(MINIMAL), [f"train.tokens_per_step={text}"])
        assert config.train.tokens_per_step == number
    for text in ("64 k", "1.5", "0.0001k", "k", "1G", "-1k"):
        with pytest.raises(ConfigError, match="must be a whole number of at least 1"):
            load_config(write(MINIMAL), [f"train.tokens_per_step={text}"])


def test_what_is_repeated_is_merged(write):
    shared = "x-of-all: &a {seq_len: 64, seed: 1}\nx-more: &b {seed: 2, epochs: 3}\n"
    config = load_config(write(MINIMAL + shared + "train: {<<: [*a, *b], seed: 7}\n"))
    assert (config.train.seq_len, config.train.seed, config.train.epochs) == (64, 7, 3)
    assert config.where("train.seq_len") == "cfg.yaml:3: train.seq_len"
    with pytest.raises(ConfigError, match=r"cfg.yaml:3: << takes a mapping, or a list of them"):
        load_config(write(MINIMAL + "train: {<<: 3}\n"))


def test_environment_variables_are_expanded_in_paths(write, monkeypatch):
    monkeypatch.setenv("DISK", "/mnt/b")
    config = load_config(write("model: ${DISK}/m\ndata: {train: $DISK/d.jsonl}\noutput: a$b\n"))
    (source,) = config.data.train
    assert [config.model.path, source.path, str(config.output)] == [
        "/mnt/b/m",
        "/mnt/b/d.jsonl",
        "a$b",
    ]
    with pytest.raises(
        ConfigError, match=r"cfg.yaml:1: model: there is no environment variable NO"
    ):
        load_config(write("model: ${NO}/m\n"))


def test_home_is_expanded(write, monkeypatch):
    home = "/home/somebody"
    monkeypatch.setenv("HOME", home)
    config = load_config(write("model: ~/m\ndata: {train: ~/d.jsonl}\noutput: ~/runs\n"))
    (source,) = config.data.train
    assert [config.model.path, source.path] == [f"{home}/m", f"{home}/d.jsonl"]
    assert config.output == Path(home, "runs")


def test_the_example_is_a_config_with_the_defaults(write):
    config = load_config(write(example_config()))
    given = {"model": config.model.source, "data": {"train": "train.jsonl"}}
    assert config == Config.model_validate(given)


def test_the_schema_knows_every_key():
    schema = json.loads(json.dumps(config_schema()))
    assert set(schema["properties"]) == set(SECTIONS[TOP])
    assert schema["additionalProperties"] is False
    for section in set(SECTIONS) - {TOP, "model"}:
        properties = schema["$defs"][f"{section.capitalize()}Options"]["properties"]
        assert set(properties) == set(SECTIONS[section])
        assert all(entry.get("description") for entry in properties.values())


def test_sources_of_every_kind_are_told_from_the_root(tmp_path, monkeypatch):
    for name in ("a.jsonl", "b.jsonl", "c.jinja"):
        (tmp_path / name).write_text("")
    monkeypatch.chdir(tmp_path)
    sources = [{"path": path, "weight": 2} for path in ("*.jsonl", "b.jsonl", "owner/name")]
    data = {"train": sources, "eval": "a.jsonl", "chat_template": "c.jinja"}
    told = with_absolute_paths(load_config({"model": "owner/model", "data": data}))
    here = str(tmp_path)
    found = [source.path for source in told.data.train]
    assert found == [f"{here}/*.jsonl", f"{here}/b.jsonl", "owner/name"]
    assert told.data.chat_template == f"{here}/c.jinja"
    assert (told.model.path, str(told.output)) == ("owner/model", f"{here}/runs/my-first")
