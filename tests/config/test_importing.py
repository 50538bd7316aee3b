"""Configs of other trainers: what each key becomes, and that none is lost without a word."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path

import pytest

from megatrain.config import load_config
from megatrain.config.document import write_yaml
from megatrain.config.importing import TRAINERS, import_config
from megatrain.config.importing.sheet import Sheet, tables_of
from megatrain.errors import ConfigError, DataError
from tests.helpers.theirs import AXOLOTL, BASES, UPSTREAM, Given, imported, make_sets, value


@pytest.fixture(autouse=True)
def _there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_sets()
    Path("lib").mkdir()
    Path("lib/rewards.py").touch()


def test_a_plain_config_is_whole_and_loads_and_its_trainer_is_known_by_the_keys():
    for trainer, keys in BASES.items():
        Path("theirs.yaml").write_text(json.dumps(keys))  # JSON is YAML
        found = import_config("theirs.yaml")
        assert found.trainer == trainer
        assert found.faithful and not found.missing, found.report()
        Path("ours.yaml").write_text(found.text)
        config = load_config("ours.yaml")
        model = (config.model.source, config.method, str(config.output))
        assert model == ("org/base", "sft", "out")
        assert config == load_config(dict(found.tree()))


def test_the_public_repositorys_config_is_read_by_its_sections():
    config = load_config(dict(of_upstream({}).tree()))
    train = config.train
    assert (config.model.source, train.rows_per_step, train.max_steps) == ("org/base", 12, 25)
    assert (train.schedule, train.warmup, config.gpus) == ("constant", 0, 2)
    assert config.optimizer.betas == (0.8, 0.999) and config.data.truncation_mode == "context"
    assert config.data.train[0].path == "sets/ours.json"
    rows = {"path": "rows", "query_field": "q", "train_on_prompt": True}
    config = load_config(dict(of_upstream({"dataset": rows}).tree()))
    assert config.data.columns == {"prompt": "q", "completion": "response"}
    assert (config.data.prompts, config.data.train_on) == ("chat", "all")
    lost = {"optimizer": "type", "dataset": "system_prompt", "training": "num_steps"}
    for section, key in lost.items():
        found = of_upstream({section: {**UPSTREAM[section], key: "else"}})
        assert f"{section}.{key}" in found.refused
    with pytest.raises(ConfigError, match="training: is a section of the public MegaTrain"):
        load_config("theirs.yaml")


def of_upstream(changes: Given) -> Sheet:
    Path("theirs.yaml").write_text(json.dumps(UPSTREAM | changes))
    found = import_config("theirs.yaml")
    assert found.trainer == "megatrain-upstream" and not found.unknown, found.report()
    return found


def test_what_is_no_ones_config_says_so():
    Path("theirs.yaml").write_text("compute_environment: LOCAL_MACHINE\nnum_machines: 2\n")
    with pytest.raises(
        ConfigError, match=r"theirs\.yaml: cannot tell whose config it is; say --from"
    ):
        import_config("theirs.yaml")
    with pytest.raises(ConfigError, match="--from: torchtune is none of axolotl"):
        import_config("theirs.yaml", "torchtune")


SET: Given = {"path": "sets/ours.json", "type": "chat_template"}
# asks for what is done anyway, and for a template
SAID: Given = {"roles": {"user": ["human"]}, "chat_template": "llama3"}
SAID |= {"field_thinking": "thinking", "template_thinking_key": "thinking"}
ENTRY = tables_of("axolotl")["entry"].split()
OF_ENTRY = ("roles", "roles_to_train", "train_on_eos")
GRPO: Given = {"reward_funcs": ["lib.rewards.right"], "num_generations": 4, "max_length": None}
GRPO |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
THEIR_KEYS: Given = {"reward_funcs": ["lib.rewards.right"], "num_generations": 4, "top_k": 5}
RL: Given = {"rl": "grpo", "datasets": [{"path": "org/rows"}], "trl": THEIR_KEYS}
# trainer, keys over its base, our key, our value
MEANINGS: list[tuple[str, Given, str, object]] = [
    ("axolotl", {}, "train.rows_per_step", 8),
    ("axolotl", {"batch_size": 6, "gradient_accumulation_steps": None}, "train.rows_per_step", 6),
    ("axolotl", {"sample_packing": True}, "train.tokens_per_step", 2 * 4 * 2048),
    ("axolotl", {"sample_packing": True}, "data.packing", True),
    ("axolotl", {}, "train.warmup", 0.03),
    ("axolotl", {"warmup_ratio": 0.1, "warmup_steps": 9}, "train.warmup", 9),
    ("axolotl", {"warmup_steps": 0}, "train.warmup", 0),
    ("axolotl", {}, "train.schedule", "cosine"),
    ("axolotl", {"cosine_min_lr_ratio": 0.1}, "train.min_lr_ratio", 0.1),
    ("axolotl", {"max_steps": 7}, "train.max_steps", 7),
    ("axolotl", {"optimizer": "adamw_bnb_8bit"}, "optimizer.moments", "int8"),
    ("axolotl", {"optimizer": "paged_adamw_32bit"}, "optimizer.name", "adamw"),
    ("axolotl", {"optimizer": "lion_32bit"}, "optimizer.betas", [0.9, 0.999]),
    ("axolotl", {}, "data.eval", None),
    ("axolotl", {"val_set_size": 100.0}, "data.eval", 100),
    ("axolotl", {}, "data.train_on", "assistant"),
    ("axolotl", {}, "data.truncation_mode", "drop"),
    ("axolotl", {"excess_length_strategy": "truncate"}, "data.truncation_mode", "keep_start"),
    ("axolotl", {"wandb_project": "p"}, "track", ["wandb"]),
    ("axolotl", {"chat_template": "llama3"}, "data.chat_template", "llama3"),
    ("axolotl", {"reinit_weights": True}, "model.config", "org/base"),
    ("axolotl", {"tokenizer_config": "org/base"}, "model.path", "org/base"),
    ("axolotl", {"chat_template": "phi_3"}, "data.chat_template", None),
    ("axolotl", {"bf16": "auto"}, "precision", "auto"),
    ("axolotl", {"unfrozen_parameters": ["model.language_model.*"]}, "method", "sft"),
    ("axolotl", {"datasets": [SET | SAID]}, "data.chat_template", "llama3"),
    ("axolotl", {"rl": "ipo"}, "dpo.loss_type", ["ipo"]),
    ("axolotl", {"save_strategy": "no"}, "checkpoint.every", None),
    ("axolotl", {"evals_per_epoch": 0}, "train.eval_every", None),
    ("axolotl", {"evals_per_epoch": 4}, "train.eval_every", 0.25),
    ("axolotl", {"saves_per_epoch": 1}, "checkpoint.every", "epoch"),
    ("trl", {"eval_strategy": "epoch"}, "train.eval_every", "epoch"),
    ("llama-factory", {}, "train.rows_per_step", 8),
    ("llama-factory", {}, "train.learning_rate", 5e-5),
    ("llama-factory", {"packing": True}, "train.tokens_per_step", 8 * 512),
    ("llama-factory", {"neat_packing": True}, "data.packing", True),
    ("llama-factory", {"train_on_prompt": True}, "data.train_on", "all"),
    ("llama-factory", {"eval_dataset": "ours"}, "data.eval", None),
    ("llama-factory", {"stage": "pt", "dataset": "texts"}, "data.text_field", "body"),
    ("llama-factory", {"stage": "pt", "dataset": "texts"}, "train.tokens_per_step", 8 * 512),
    ("llama-factory", {"max_samples": 3}, "data.train", None),
    ("llama-factory", {"train_from_scratch": True}, "model.init", "random"),
    ("llama-factory", {"pure_bf16": True, "bf16": False}, "precision", "bfloat16"),
    ("llama-factory", {}, "precision", "float32"),
    ("llama-factory", {"stage": "rm", "dataset": "pairs"}, "data.truncation_mode", "keep_start"),
    ("trl", {"max_grad_norm": 0}, "train.max_grad_norm", None),
    ("trl", {"cpo_alpha": 0.0, "loss_type": "simpo"}, "simpo.beta", 0.1),
    ("llama-factory", {"fp8": True, "bf16": True}, "precision", "fp8"),
    ("llama-factory", {"report_to": ["wandb", "mlflow"]}, "track", ["wandb"]),
    ("trl", {}, "train.rows_per_step", 2),
    ("trl", {"learning_rate": None}, "train.learning_rate", 2e-5),
    ("trl", {"packing": True}, "train.tokens_per_step", 2 * 512),
    ("trl", {}, "data.train_on", "all"),
    ("trl", {"assistant_only_loss": True}, "data.train_on", "assistant"),
    ("trl", {"eval_strategy": "steps"}, "data.eval", {"path": "org/rows", "split": "test"}),
    ("trl", {"dataset_config": "en"}, "data.train", "org/rows:en:train"),
    ("trl", {"dataset_train_split": "s[:9]"}, "data.train", {"path": "org/rows", "split": "s[:9]"}),
    ("trl", {"lr_scheduler_type": "constant", "warmup_steps": 9}, "train.warmup", 0.0),
    ("trl", {"warmup_steps": 0.1}, "train.warmup", 0.1),
    ("trl", {"loss_type": "apo_zero", "beta": 0.2}, "dpo.beta", 0.2),
    ("trl", {"cpo_alpha": 0.0, "loss_type": "simpo", "beta": 2.0}, "method", "simpo"),
    ("trl", {"cpo_alpha": 0.5}, "cpo.cpo_alpha", 0.5),
    ("trl", {"save_steps": 0.5, "logging_steps": 3}, "train.log_every", 3),
    *(
        ("trl", GRPO | keys, key, ours)
        for keys, key, ours in (
            ({}, "method", "grpo"),
            ({}, "rewards.functions", ["lib/rewards.py:right"]),
            ({}, "rollout.generation_batch_size", 8),
            ({}, "rollout.steps_per_generation", 1),
            ({"steps_per_generation": 4}, "rollout.generation_batch_size", 16),
            ({"steps_per_generation": 4}, "rollout.steps_per_generation", 2),
            ({"generation_batch_size": 24}, "rollout.steps_per_generation", 3),
            ({"generation_batch_size": 24}, "train.rows_per_step", 8),
            ({}, "grpo.max_completion_length", 512),
            ({}, "train.seq_len", 1024),
            ({"max_prompt_length": 100, "max_completion_length": 28}, "train.seq_len", 128),
            ({"vllm_max_model_length": 4096}, "train.seq_len", 4096),
            ({}, "rollout.eval_generations", 4),
            ({"num_generations_eval": 2}, "rollout.eval_generations", 2),
            ({"top_k": 0, "top_p": 0.9}, "rollout.top_p", 0.9),
            ({"scale_rewards": False}, "grpo.scale_rewards", "none"),
            ({"loss_type": "dr_grpo", "beta": 0.0}, "grpo.loss_type", "dr_grpo"),
            ({"beta": 0.04}, "grpo.beta", 0.04),
            ({"use_vllm": False}, "grpo.importance_sampling_correction", False),
            ({"use_vllm": True}, "grpo.importance_sampling_correction", True),
            (
                {"use_vllm": True, "vllm_importance_sampling_cap": 2.0, "vllm_mode": "server"},
                "grpo.importance_sampling_clip_max",
                2.0,
            ),
            ({"reward_weights": [0.5], "log_completions": True}, "rewards.reward_weights", [0.5]),
        )
    ),
    *(
        ("trl", GRPO | {"reward_clip_range": [-1, 1.5]} | keys, key, ours)
        for keys, key, ours in (
            ({}, "method", "rloo"),
            ({}, "rloo.reward_clip_range", [-1, 1.5]),
            ({"normalize_advantages": True}, "rloo.normalize_advantages", True),
            ({"beta": 0.0}, "rloo.beta", 0.0),
            ({"num_generations": None}, "rloo.num_generations", 2),
            ({"epsilon_high": 0.3, "use_vllm": True}, "rloo.epsilon_high", 0.3),
            ({"max_completion_length": 28}, "rloo.max_completion_length", 28),
            ({"num_iterations": 2}, "rloo.num_iterations", 2),
        )
    ),
    ("axolotl", RL, "rollout.generation_batch_size", 8),
    ("axolotl", RL, "rollout.top_k", 5),
    ("axolotl", RL, "rewards.functions", ["lib/rewards.py:right"]),
    ("axolotl", RL, "train.seq_len", 2048),
    ("axolotl", RL | {"rl": "gdpo"}, "grpo.multi_objective_aggregation", "normalize_then_sum"),
]


def in_one_list(found: Sheet, given: Given) -> bool:
    """True if each key is in exactly one list, or all of its entries' keys are."""
    lines = [*found.mapped, *found.dropped, *found.refused, *found.unknown]
    names = {re.split(r"[\[.]", name)[0] for name in lines}
    keys = {name for name, value in (BASES[found.trainer] | given).items() if value is not None}
    return keys <= names and len(lines) == len({*lines})


@pytest.mark.slow
def test_a_key_means_ours():
    for trainer, keys, key, ours in MEANINGS:
        found = imported(trainer, **keys)
        assert in_one_list(found, keys), keys
        assert found.faithful and not found.missing, found.report()
        given = {"path": "sets/ours.json", "format": "alpaca"}
        expected = given if ours is None and "data" in key and trainer == "llama-factory" else ours
        assert value(found, key) == expected, found.report()
        load_config(dict(found.tree()))


def test_processes_multiply_a_step_and_one_is_assumed_aloud():
    assert value(imported("axolotl", processes=4), "train.rows_per_step") == 32
    packed = imported("trl", processes=8, packing=True, gradient_accumulation_steps=3)
    assert value(packed, "train.tokens_per_step") == 2 * 3 * 8 * 512
    assert "(2 x 3 accumulated x 8 processes x 512 tokens)" in packed.report()
    alone = import_config("theirs.yaml", "trl")
    assert "one process trained it; for N GPUs: --processes N" in alone.assumed[0]


LAST = {"min_lr_rate": 0.1}


def test_a_cosine_that_ends_above_nothing():
    found = imported("trl", lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs=LAST)
    assert (value(found, "train.schedule"), value(found, "train.min_lr_ratio")) == ("cosine", 0.1)
    keys: Given = {"lr_scheduler_kwargs": {"min_lr": 1e-6}, "learning_rate": 1e-5}
    found = imported("trl", lr_scheduler_type="cosine_with_min_lr", **keys)
    assert value(found, "train.min_lr_ratio") == pytest.approx(0.1)
    assert [*imported("trl", lr_scheduler_kwargs=LAST).refused] == ["lr_scheduler_kwargs"]


# key of a set, value, words of the reason
OF_A_SET: list[tuple[str, object, str]] = [
    ("type", "jeopardy", "own"),
    ("train_on_eos", "last", "with their end"),
    ("field_thinking", "thoughts", "another name"),
    ("message_field_training", "learn", "weight, train, training, loss"),
    ("message_property_mappings", {"weight": "learn"}, "role and content"),
    ("split", "train[:2]", "a file has no splits"),
    ("roles", {"user": ["narrator"]}, "rename others in the rows"),
]
TWO = [{"path": "o/r", "type": f"{family}.intel"} for family in ("chatml", "llama3")]
# trainer, keys, the key that is refused, words of the reason
REFUSED: list[tuple[str, Given, str, str]] = [
    ("axolotl", {"shuffle_merged_datasets": False}, "shuffle_merged_datasets", "are shuffled"),
    ("axolotl", {"sample_packing_sequentially": True}, "sample_packing_sequentially", "shuffled"),
    ("axolotl", {"adapter": "qlora"}, "adapter", "no adapters"),
    ("axolotl", {"rl": "ebft"}, "rl", "ebft is not imported; known are"),
    ("axolotl", RL | {"trl": {"async_prefetch": True}}, "trl.async_prefetch", "earlier weights"),
    ("axolotl", RL | {"datasets": [SET | {"type": "f.g"}]}, "datasets[0].type", "own; write"),
    ("axolotl", {"batch_size": 6}, "batch_size", "gradient_accumulation_steps instead"),
    ("axolotl", {"tokenizer_config": "org/other"}, "tokenizer_config", "put them into one"),
    ("axolotl", {"rl": "dpo", "datasets": TWO}, "datasets[1].type", "is 'chatml' already"),
    ("axolotl", {"optimizer": "muon"}, "optimizer", "rates otherwise"),
    ("axolotl", {"optimizer": "adafactor"}, "optimizer", "adafactor is not offered"),
    ("axolotl", {"lr_scheduler": "polynomial"}, "lr_scheduler", "cannot be honoured"),
    ("axolotl", {"unfrozen_parameters": ["lm_head"]}, "unfrozen_parameters", "train.freeze"),
    ("axolotl", {"plugins": ["x.DiffusionPlugin"]}, "plugins", "DiffusionPlugin"),
    ("axolotl", {"special_tokens": {"more": "<a>"}}, "special_tokens.more", "stay as they are"),
    *(
        ("axolotl", {"datasets": [SET | {key: value}]}, f"datasets[0].{key}", words)
        for key, value, words in OF_A_SET
    ),
    ("axolotl", {"datasets": [SET, {"type": "chat_template"}]}, "datasets[1].type", "no rows"),
    ("trl", {"dataset_name": "json"}, "dataset_name", "names no rows"),
    ("trl", {"train_sampling_strategy": "sequential"}, "train_sampling_strategy", "shuffled"),
    ("axolotl", {"micro_batch_size": "auto"}, "micro_batch_size", "whole number"),
    ("llama-factory", {"finetuning_type": None}, "finetuning_type", "lora: adapters"),
    ("llama-factory", {"max_samples": 2}, "max_samples", "rows of ours are 3"),
    ("llama-factory", {"dataset": "more", "max_samples": 2}, "max_samples", "are not known"),
    ("llama-factory", {"dataset": "none"}, "dataset", "none is not in dataset_info.json"),
    ("llama-factory", {"dataset": "films"}, "dataset", "only texts and images"),
    ("llama-factory", {"dataset": "odd"}, "dataset", "roles or turns"),
    ("llama-factory", {"dataset": "script"}, "dataset", "script"),
    ("llama-factory", {"template": "default"}, "template", "of no model"),
    ("llama-factory", {"stage": "ppo"}, "stage", "ppo is not imported"),
    ("llama-factory", {"stage": "grpo"}, "stage", "grpo is not imported"),
    ("trl", {"chat_template_path": "org/other"}, "chat_template_path", "save it as a file"),
    ("trl", {"packing": True, "packing_strategy": "wrapped"}, "packing_strategy", "as wholes"),
    (
        "trl",
        {"dataset_name": "sets/ours.json", "dataset_train_split": "train[:2]"},
        "dataset_train_split",
        "a file has no splits",
    ),
    *(
        ("trl", GRPO | {key: value}, key, words)
        for key, value, words in (
            ("reward_funcs", ["accuracy_reward"], "TRL's own are in trl.rewards"),
            ("loss_type", "sapo", "does not take 'sapo'"),
            ("generation_batch_size", 12, "12 answers of a rollout are no whole number"),
            ("max_completion_length", "long", "whole number"),
            ("repetition_penalty", 1.1, "by their own probabilities"),
            ("entropy_coef", 0.01, "not built"),
            ("vllm_structured_outputs_regex", "[0-9]+", "which tokens are drawn"),
            ("vllm_importance_sampling_clip_min", 0.5, "not built"),
        )
    ),
    ("trl", GRPO | {"normalize_advantages": True, "delta": 2.0}, "delta", "no such key"),
    ("trl", GRPO | {"normalize_advantages": True, "loss_type": "grpo"}, "loss_type", "not built"),
    ("trl", {"label_smoothing": 0.1, "temperature": 0.5}, "temperature", "method: dpo has"),
    ("trl", {"max_length": None, "beta": 0.1}, "beta", "say which, --method dpo"),
    ("trl", {"loss_type": "dft", "packing": False}, "loss_type", "not built"),
    ("trl", {"resume_from_checkpoint": "x"}, "resume_from_checkpoint", "megatrain resume"),
]


def test_what_would_give_another_result_is_refused():
    for trainer, keys, name, words in REFUSED:
        found = imported(trainer, **keys)
        assert not found.faithful and name in found.refused, found.report()
        assert in_one_list(found, keys), keys
        assert words in found.refused[name][0]
        assert f"# NOT HONOURED: {name}: " in found.text
        assert "  theirs.yaml:" in found.report() or found.get(name) is None


# What asks for nothing that is lost, for all trainers.
HARMLESS: Given = {
    "gradient_checkpointing": True,
    "deepspeed": "zero3.json",
    "fsdp": ["full_shard"],
    "fsdp_config": {"offload_params": True},
    "attn_implementation": "flash_attention_2",
    "tf32": True,
    "fp16": False,
    "dataloader_num_workers": 4,
    "ddp_timeout": 1800,
    "lora_r": 8,
    "lora_alpha": 16,
    "push_to_hub": True,
    "hub_model_id": "me/mine",
    "resume_from_checkpoint": None,
    "neftune_noise_alpha": None,
    "label_smoothing_factor": 0.0,
    "use_liger_kernel": True,
    "load_in_8bit": False,
    "save_total_limit": 0,
    "revision": "main",
}


def test_what_has_no_effect_is_said():
    for trainer, base in BASES.items():
        Path("theirs.yaml").write_text(write_yaml(base | HARMLESS))
        found = import_config("theirs.yaml", trainer)
        assert found.faithful, found.report()
        assert HARMLESS.keys() <= found.dropped.keys()
        assert all(said for (said,) in found.dropped.values())
        assert in_one_list(found, HARMLESS)


def test_tokens_that_a_config_restates_are_assumed_to_be_the_tokenizers_own():
    found = imported("axolotl", special_tokens={"eos_token": "</s>", "pad_token": "</s>"})
    assert found.faithful
    assert found.assumed == [
        "special_tokens.eos_token: </s>: it is the tokenizer's own, whose eos_token ends texts"
    ]
    assert imported("axolotl", special_tokens={"pad_token": "</s>"}).assumed == []
    assert imported("trl", eos_token="</s>").assumed[-1].startswith("eos_token: </s>: rows are")


def test_an_unknown_key_is_named_and_keeps_the_file_from_being_written():
    found = imported("trl", lerning_rate=5, another=None)
    assert [*found.unknown] == ["lerning_rate"] and in_one_list(found, {"lerning_rate": 5})
    assert not found.faithful
    assert "unknown (1)\n  theirs.yaml:" in found.report()


def test_a_template_that_is_text_becomes_a_file():
    text = "{% for m in messages %}{{ m.content }}{% endfor %}"
    cases: dict[str, Given] = {
        "trl": {"chat_template": text},
        "axolotl": {"chat_template": "jinja", "chat_template_jinja": text},
    }
    for trainer, keys in cases.items():
        found = imported(trainer, **keys)
        assert found.files == {"imported.chat_template.jinja": text}
        assert value(found, "data.chat_template") == "imported.chat_template.jinja"


def test_a_dump_without_model_and_data_takes_them_from_the_command_line():
    keys: Given = {"model_name_or_path": None, "dataset_name": None}
    found = imported("trl", **keys)
    assert "model: missing" in found.missing and "data.train: missing" in found.missing
    ours = ["model=m", "data.train=[a.jsonl, b.jsonl]", "train.tokens_per_step=64"]
    found = import_config("theirs.yaml", "trl", overrides=ours)
    assert not found.missing
    assert found.tree()["model"] == "m"
    assert "tokens_per_step: 64  # command line" in found.text
    assert "rows_per_step" not in found.tree()["train"]


def test_words_of_yaml_1_1_are_flags():
    Path("theirs.yaml").write_text(write_yaml(AXOLOTL) + "sample_packing: yes\nadapter: off\n")
    assert value(import_config("theirs.yaml"), "data.packing") is True


def test_marks_are_of_one_trainer_for_the_most_part():
    marks = {trainer: {*tables_of(trainer)["marks"].split()} for trainer in TRAINERS}
    assert all(
        len(one & other) < 3 for a, one in marks.items() for b, other in marks.items() if a != b
    )


ODD = [5, "x", [1, {}], {"a": {"b": [1]}}, True]


@pytest.mark.slow
@pytest.mark.parametrize("trainer", BASES)
def test_values_of_any_type_end_in_a_list(trainer):
    marks = tables_of(trainer)["marks"].split()
    for name in {*marks, *BASES[trainer], "plugins", "interleave_probs", "special_tokens"}:
        for odd in ODD:
            keys: Given = {name: odd}
            found = imported(trainer, **keys)
            assert in_one_list(found, keys), (name, odd)
            assert found.report() and found.text


@pytest.mark.slow
def test_values_of_any_type_in_an_entry_end_in_a_list():
    kinds = (("chat_template", None), ("chat_template.default", "dpo"))
    for key, odd, (kind, rl) in product([*ENTRY, *OF_ENTRY], ODD, kinds):
        entry = {"path": "o/r", "type": kind, key: odd}
        found = imported("axolotl", rl=rl, datasets=[entry])
        lines = [*found.mapped, *found.dropped, *found.refused, *found.unknown]
        assert f"datasets[0].{key}" in lines, (key, odd)


def test_what_a_file_holds_stays_inside_comments():
    evil = "x\nmodel: other\n\x1b[2J"
    for keys in ({"chat_template": evil}, {"a\nmodel: other": 1}, {"adapter": evil}):
        found = imported("axolotl", **keys)
        text = "\n".join(line for line in found.text.splitlines() if not line.startswith("# NOT"))
        Path("ours.yaml").write_text(text)
        assert load_config("ours.yaml").model.source == "org/base"
        assert "\x1b" not in found.report() + found.text


def test_broken_json_of_data_sets_is_an_error():
    Path("sets/dataset_info.json").write_text("{")
    with pytest.raises(DataError, match=r"dataset_info\.json:1: broken JSON"):
        imported("llama-factory")
