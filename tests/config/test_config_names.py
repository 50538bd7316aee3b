"""Names of other trainers: aliases mean our keys, the rest is refused by name."""

from pathlib import Path
from typing import Any

import pytest

from megatrain.config import Config, load_config
from megatrain.config.document import write_yaml
from megatrain.config.load import SECTIONS
from megatrain.config.names import ALIASES, REFUSED, refusal_of
from megatrain.errors import ConfigError

BASE = {"model": "model: some/folder", "data": "data: {train: rows.jsonl}"}

# alias -> (value in YAML, our key, our value). Every alias has a row; that of
# gradient_accumulation_steps is beside per_device_train_batch_size: 2.
MEANINGS = {
    "model_name_or_path model_name base_model": ("x/y", "model.path", "x/y"),
    "model_revision revision": ("v1", "model.revision", "v1"),
    "trust_remote_code": ("true", "model.trust_remote_code", True),
    "per_device_train_batch_size micro_batch_size": ("4", "train.rows_per_step", 4),
    "gradient_accumulation_steps": ("4", "train.rows_per_step", 8),
    "num_train_epochs": ("2.5", "train.epochs", 2.5),
    "num_epochs": ("2", "train.epochs", 2.0),
    "max_steps": ("-1", "train.max_steps", None),
    "max_length max_seq_length max_seq_len sequence_len cutoff_len block_size": (
        "64",
        "train.seq_len",
        64,
    ),
    "learning_rate lr": ("3e-5", "train.learning_rate", 3e-05),
    "lr_scheduler_type": ("warmup_stable_decay", "train.schedule", "wsd"),
    "lr_scheduler": ("constant_with_warmup", "train.schedule", "constant"),
    "warmup_ratio": ("0.1", "train.warmup", 0.1),
    "warmup_steps": ("20", "train.warmup", 20.0),
    "max_grad_norm": ("0.3", "train.max_grad_norm", 0.3),
    "router_aux_loss_coef moe_aux_loss_coef": ("0.01", "train.router_aux_loss_coef", 0.01),
    "seed": ("42", "train.seed", 42),
    "full_determinism": ("true", "train.deterministic", True),
    "logging_steps": ("5", "train.log_every", 5),
    "eval_steps": ("50", "train.eval_every", 50),
    "max_eval_samples": ("50", "train.eval_rows", 50),
    "save_steps": ("500", "checkpoint.every", 500),
    "save_total_limit": ("3", "checkpoint.keep", 3),
    "early_stopping_patience": ("3", "checkpoint.patience", 3),
    "metric_for_best_model": ("quiz_acc", "checkpoint.metric", "eval_quiz_acc"),
    "greater_is_better": ("true", "checkpoint.greater_is_better", True),
    "output_dir": ("out", "output", Path("out")),
    "optim": ("adamw_torch_fused", "optimizer.name", "adamw"),
    "weight_decay": ("0.01", "optimizer.weight_decay", 0.01),
    "adam_beta1": ("0.85", "optimizer.betas", (0.85, 0.999)),
    "adam_beta2": ("0.95", "optimizer.betas", (0.9, 0.95)),
    "adam_epsilon": ("1e-6", "optimizer.eps", 1e-06),
    "bf16": ("true", "precision", "bfloat16"),
    "fp8": ("true", "precision", "fp8"),
    "dtype": ("float32", "precision", "float32"),
    "torch_dtype": ("bfloat16", "precision", "bfloat16"),
    "attn_implementation": ("eager", "attention", "eager"),
    "train_file": ("t.jsonl", "data.train", "t.jsonl"),
    "dataset_name dataset": ("org/set", "data.train", "org/set"),
    "validation_file eval_file": ("v.jsonl", "data.eval", "v.jsonl"),
    "val_set_size": ("0.1", "data.eval", 0.1),
    "dataset_train_split": ("train_sft", "data.split", "train_sft"),
    "dataset_text_field": ("body", "data.text_field", "body"),
    "dataset_num_proc dataset_processes preprocessing_num_workers": (8, "data.processes", 8),
    "assistant_only_loss": ("false", "data.train_on", "all"),
    "completion_only_loss": ("true", "data.train_on", "assistant"),
    "evals_per_epoch": (4, "train.eval_every", 0.25),
    "saves_per_epoch": (1, "checkpoint.every", "epoch"),
    "eval_strategy evaluation_strategy": ("no", "data.eval", None),
    "stage": ("pt", "method", "pretrain"),
    "train_on_inputs": ("true", "data.train_on", "all"),
    "chat_template": ("chatml", "data.chat_template", "chatml"),
    "chat_template_path": ("a.jinja", "data.chat_template", "a.jinja"),
    "torch_compile": ("true", "compile", True),
    "packing": ("true", "data.packing", True),
    "sample_packing": ("false", "data.packing", False),
    "use_cpu no_cuda": ("true", "device", "cpu"),
    "freeze": ("lm_head.weight", "train.freeze", ("lm_head.weight",)),
    "report_to": ("tensorboard", "track", ("tensorboard",)),
}
MEANINGS = {name: row for names, row in MEANINGS.items() for name in names.split()}


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Load a config of BASE (less the section `without`, or all) followed by `text`."""
    monkeypatch.chdir(tmp_path)

    def load_text(text: str, *overrides: str, without: str = "") -> Config:
        lines = [line for section, line in BASE.items() if without not in (section, "all")]
        Path("cfg.yaml").write_text("\n".join([*lines, text]))
        return load_config("cfg.yaml", overrides)

    return load_text


def value_of(config: Config, dotted: str) -> object:
    value: Any = config.model_dump()
    for name in dotted.split("."):
        value = value[name]
    return value


def section_replaced_by(key: str) -> str:
    return {"model.path": "model", "data.train": "data"}.get(key, "")


def test_every_alias_is_described():
    assert set(MEANINGS) == set(ALIASES)


def test_an_alias_means_our_key(load):
    trusted = {"model": {"path": "some/folder", "trust_remote_code": True}, "data": {"train": "x"}}
    load_config(trusted)  # a file alone does not say so
    for alias in set(MEANINGS) - {"gradient_accumulation_steps"}:
        value, key, ours = MEANINGS[alias]
        texts = [f"{alias}: {value}\n", f"train:\n  {alias}: {value}\n"]
        for text in texts[: 1 if alias in SECTIONS["train"] else 2]:  # our own key there
            assert value_of(load(text, without=section_replaced_by(key)), key) == ours, text


def test_an_alias_beside_our_own_key_is_refused(load):
    for alias in set(MEANINGS) - {"gradient_accumulation_steps", "adam_beta1", "adam_beta2"}:
        value, key, ours = MEANINGS[alias]
        tree: dict[str, Any] = {"model": {"path": "a"}, "data": {"train": "x"}}
        section, _, name = key.rpartition(".")
        keys = tree.setdefault(section, {}) if section else tree
        keys[name] = str(ours) if isinstance(ours, Path) else ours
        own = write_yaml(tree)
        with pytest.raises(ConfigError) as caught:
            load(f"{own}{alias}: {value}", without="all")
        assert str(caught.value).startswith(f"cfg.yaml:{own.count(chr(10)) + 1}: {alias}: ")
        assert str(caught.value).endswith("; keep one")


def test_no_evaluation_beside_rows_for_one_is_a_contradiction(load):
    words = r"data\.eval: contradicts eval_strategy at cfg\.yaml:1: one names rows to evaluate on"
    with pytest.raises(ConfigError, match=words):
        load("eval_strategy: no\ndata: {train: x, eval: y}", without="all")


def test_rows_of_a_step_are_rows_a_device_times_accumulation(load):
    train = load("train: {per_device_train_batch_size: 2, gradient_accumulation_steps: 4}").train
    assert (train.rows_per_step, train.tokens_per_step) == (8, None)


def test_halves_may_come_from_file_and_command_line(load):
    text = "per_device_train_batch_size: 2\noptimizer: {betas: [0.8, 0.9]}"
    config = load(text, "gradient_accumulation_steps=16", "adam_beta2=0.99")
    assert config.train.rows_per_step == 32
    assert config.optimizer.betas == (0.8, 0.99)


def test_a_fault_is_told_in_the_words_of_the_user(load):
    both = "train: {tokens_per_step: 100, per_device_train_batch_size: 2}"
    for text, words in {
        "gradient_accumulation_steps: 4": r"cfg\.yaml:3: .*: needs per_device_train_batch_size",
        both: r"excludes train\.tokens_per_step",
        "max_seq_length: long": r"3: max_seq_length: must be a whole number .*, not 'long'$",
    }.items():
        with pytest.raises(ConfigError, match=words):
            load(text)


def test_an_alias_on_the_command_line_beats_our_key_in_the_file(load):
    text = "train: {epochs: 3, rows_per_step: 4}"
    assert load(text, "num_train_epochs=1", "train.tokens_per_step=64").train.epochs == 1.0


WITHOUT_A_MEANING = """optim: adafactor|optim: paged_adamw_8bit|lr_scheduler_type: polynomial
bf16: 1|dtype: float16|warmup_ratio: 2|per_device_train_batch_size: 0
per_device_train_batch_size: true|gradient_accumulation_steps: auto|assistant_only_loss: perhaps"""


def test_alias_values_without_a_meaning_are_refused(load):
    for text in WITHOUT_A_MEANING.replace("\n", "|").split("|"):
        with pytest.raises(ConfigError, match=rf"cfg\.yaml:3: {text.split(':')[0]}: "):
            load(text)


# What other trainers' own examples hold: the whole sentence begins so; None: it asks for nothing.
OF_OTHERS = {
    "tokenizer_type: AutoTokenizer": None,
    "tokenizer_type: Other": "the model's own tokenizer is used; remove it",
    "eval_steps: 0.1": "must be a whole number of at least 1, not 0.1",
    "max_samples: 1000": "all rows of data.train are used; name a smaller file",
    "optim: adafactor": "adafactor is not offered; use Lion (optimizer.name: lion), or AdamW",
    "eval_strategy: steps": None,
    "eval_strategy: epoch": "'epoch' cannot be honoured: set train.eval_every to steps, a share",
    "strict: false": None,
    "do_train: true": None,
    "do_train: false": "`megatrain train` trains",
    "stage: sft": None,
    "stage: dpo": "'dpo' cannot be honoured; known are 'sft', 'pt'",
    "overwrite_cache: true": None,
    "plot_loss: false": None,
    "plot_loss: true": "no plot is drawn; metrics.jsonl has the losses",
    "trackio: true": "write `track: trackio`",
    # near in spelling to a key of another type, or far from any
    "train: {max_step: soon}": "unknown key; known here are tokens_per_step",
    "train: {max_step: 5}": "did you mean max_steps?",
}


def test_a_hint_is_true_or_there_is_none(load):
    for text, told in OF_OTHERS.items():
        if told is None:
            assert load(text) == load("")
            continue
        with pytest.raises(ConfigError) as caught:
            load(text)
        name = text.partition("{")[2].partition(":")[0]
        dotted = f"train.{name}" if name else text.partition(":")[0]
        assert str(caught.value).startswith(f"cfg.yaml:3: {dotted}: {told}")


def test_a_config_of_another_trainer_is_told_of_the_import(load):
    few = "adapter: lora\nload_in_4bit: true\n"
    for text, told in ((few, False), (few + "deepspeed: a.json\n", True)):
        with pytest.raises(ConfigError) as caught:
            load(text)
        assert ("`megatrain import cfg.yaml --output my.yaml`" in str(caught.value)) is told


def test_what_cannot_be_honoured_is_refused_with_the_reason(load):
    for name in (name.replace("*", "anything") for name in REFUSED):
        for text, dotted in ((f"\n{name}: [9]", name), (f"train:\n  {name}: [9]", f"train.{name}")):
            with pytest.raises(ConfigError) as caught:
                load(text)
            place, reason = str(caught.value).split(f": {dotted}: ")
            assert place == "cfg.yaml:4"
            assert len(reason) > 20


def test_values_that_ask_for_nothing_are_accepted(load):
    plain = load("")
    for name, refusal in REFUSED.items():
        for harmless in refusal.harmless:
            text = write_yaml({name.replace("*", "anything"): harmless})
            assert load(text) == plain, text


def test_no_name_is_both_taken_and_refused():
    taken = {*ALIASES, *(key for keys in SECTIONS.values() for key in keys)}
    assert not [name for name in taken if refusal_of(name)]
