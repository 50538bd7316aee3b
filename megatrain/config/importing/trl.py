"""Configs of TRL's commands, and dumps of its configurations or of TrainingArguments."""

from __future__ import annotations

from typing import Any

from megatrain.config import names as n
from megatrain.config.importing import shared
from megatrain.config.importing.shared import Source, paths_of, put_sources
from megatrain.config.importing.sheet import NOTHING_ASKED, Sheet, Table, ignored, never, refused

MARKS = """
    dataset_name dataset_train_split dataset_test_split dataset_config dataset_mixture
    per_device_train_batch_size max_length max_seq_length assistant_only_loss completion_only_loss
    num_train_epochs use_peft gradient_checkpointing_kwargs dataset_text_field attn_implementation
    desirable_weight center_rewards_coefficient cpo_alpha optim lr_scheduler_type
    max_prompt_length"""
# Keys that only one method's configuration has.
OF_METHOD = {
    "kto": "desirable_weight undesirable_weight",
    "reward": "center_rewards_coefficient",
    "cpo": "cpo_alpha simpo_gamma",
    "dpo": """f_divergence_type discopop_tau loss_weights use_weighting label_smoothing ld_alpha
        rpo_alpha precompute_ref_log_probs ref_model_mixup_alpha""",
    "sft": "assistant_only_loss completion_only_loss dataset_text_field packing",
}
RATES = {"sft": 2e-5, "reward": 1e-4}  # of the methods that have others than 1e-6
OF_SECTIONS = """beta loss_type loss_weights label_smoothing discopop_tau simpo_gamma cpo_alpha
    desirable_weight undesirable_weight center_rewards_coefficient"""
ENTRY = ("path", "id", "name", "config", "split", "data_files", "weight")


def read(sheet: Sheet, gpus: int, method: str | None) -> None:
    """Decide of every key."""
    method = method or _method(sheet)
    if method == "cpo" and sheet.get("loss_type") == "simpo" and not sheet.get("cpo_alpha", 1.0):
        method = "simpo"
    sheet.put("method", method, *(["loss_type"] if method == "simpo" else []))
    sheet.origins["method"] = "by the keys of the file"
    length = "max_seq_length" if sheet.get("max_seq_length") else "max_length"
    if length in sheet.given and sheet.get(length) is None:
        sheet.refuse(length, "rows of any length: name the longest in tokens")
    shared.arguments(
        sheet,
        gpus,
        ["packing"] if sheet.get("packing") else [],
        rows=("per_device_train_batch_size", 8),
        length=(length, 1024),
        epochs=("num_train_epochs", 3.0),
        rate=RATES.get(method, 1e-6),
        schedule=("lr_scheduler_type", "linear"),
        often={"save": 500, "logging": 10},
    )
    if method == "sft" and sheet.get("packing") is not None:
        sheet.put("data.packing", sheet.get("packing"), "packing")
    _data(sheet, method)
    if method == "kto":  # whose rows come in the file's order unless that is changed
        sheet.drop("rows are shuffled, by train.seed", "train_sampling_strategy")
    if sheet.get("loss_type") in ("nll", "kto"):
        sheet.drop("the loss of the method", "loss_type")
    if method == "cpo":
        sheet.drop("of loss_type: simpo alone", "simpo_gamma")
    shared.of_method(sheet, {name: name for name in OF_SECTIONS.split()})
    sheet.finish(TABLE)


def _method(sheet: Sheet) -> str:
    for method, keys in OF_METHOD.items():
        if any(key in sheet.given for key in keys.split()):
            return method
    losses = sheet.get("loss_type", [])
    if isinstance(losses, str | list) and losses:
        return "dpo"
    if sheet.get("beta") is not None:
        sheet.refuse("beta", "dpo, kto, orpo and cpo have one: say which, --method dpo")
    sheet.assume("method: sft, as no key is of another method; --method says otherwise")
    return "sft"


def _data(sheet: Sheet, method: str) -> None:
    answers, completions = sheet.get("assistant_only_loss"), sheet.get("completion_only_loss")
    if method == "sft":
        only = "assistant" if answers or completions else "all"
        sheet.put("data.train_on", only, "assistant_only_loss", "completion_only_loss")
        if completions is None and not answers:
            sheet.assume(
                "rows are conversations or texts, of which TRL trains every token; for rows of "
                "prompt and completion, where it trains the completion, set data.train_on=assistant"
            )
    if method != "reward" and sheet.get("truncation_mode") is not None:
        sheet.put("data.truncation_mode", sheet.get("truncation_mode"), "truncation_mode")
    for name in ("chat_template", "chat_template_path"):
        if (value := sheet.get(name)) is not None:
            shared.template(sheet, name, value, {}, own=False)
    strategies = [sheet.get(name) for name in n.STRATEGIES]
    off = next((one for one in strategies if one is not None), "no") in ("no", False)
    path, mixture = sheet.get("dataset_name"), sheet.get("dataset_mixture")
    splits = {"data.train": ("dataset_train_split", "train")}
    splits |= {} if off else {"data.eval": ("dataset_test_split", "test")}
    for key, (name, split) in splits.items() if path is not None else ():
        given = {"path": path, "name": sheet.get("dataset_config"), "split": sheet.get(name, split)}
        found = paths_of(sheet, name.removesuffix("split"), given)
        put_sources(sheet, key, found, "dataset_name", "dataset_config", name)
    size = sheet.get("test_split_size")
    if isinstance(mixture, dict):
        entries = [one for one in mixture.get("datasets") or () if isinstance(one, dict)]
        found = [one for entry in entries for one in _entry(sheet, entry)]
        put_sources(sheet, "data.train", found, "dataset_mixture")
        size = mixture.get("test_split_size")
    elif "datasets" in sheet.given:
        found, settled = [], []
        for at, entry in sheet.open("datasets"):
            found += paths_of(sheet, at, entry)
            settled += [at + key for key in entry if key in ENTRY]
        put_sources(sheet, "data.train", found, *settled)
    if off or "data.eval" not in sheet.config:
        names = ["dataset_mixture" if isinstance(mixture, dict) else "test_split_size"]
        sheet.put("data.eval", None if off else size, *names, *(n.STRATEGIES if off else ()))


def _entry(sheet: Sheet, entry: dict[str, Any]) -> list[Source]:
    """A set of a `dataset_mixture`, whose weight is the share of its rows that is drawn."""
    if entry.get("weight", 1.0) != 1.0:
        sheet.refuse("dataset_mixture", f"{entry.get('id')}: a share of its rows; name a slice")
    given = {"path": entry.get("id"), "split": entry.get("split"), "name": entry.get("config")}
    return paths_of(sheet, "dataset_mixture", given)


def _eos_token(sheet: Sheet, name: str, value: Any) -> None:
    if value == "<EOS_TOKEN>":  # a dump's placeholder
        sheet.drop(NOTHING_ASKED, name)
        return
    sheet.drop("the chat template ends answers", name)
    sheet.assume(
        f"eos_token: {value}: rows are conversations, whose answers end with what the chat "
        "template writes; texts end with the tokenizer's own"
    )


TABLE: Table = {
    **shared.TABLE,
    **ignored(
        {
            "rows are cut as wholes (data.truncation_mode)": """
                max_prompt_length max_completion_length""",
            "belongs to another f_divergence_type": "f_alpha_divergence_coef",
            "sets are cached; data.streaming reads them over the network": """
                dataset_streaming streaming""",
            "buffers are as the model has them": "ignore_bias_buffers",
            "belongs to adapters": "use_rslora use_dora bnb_* lora_*",
            "columns that are not read are named when rows are read": "[].columns",
            "nothing is evaluated": "dataset_test_split test_split_size",
        }
    ),
    **refused(
        {
            "of a method that is not built (grpo, rloo, ppo, distillation)": """
                num_generations reward_funcs reward_weights use_vllm vllm_* reward_model_path
                teacher_model_name_or_path sft_model_path num_ppo_epochs kl_coef""",
            "name what it says in the model's folder": "model_init_kwargs",
            "this loss is not built for the method": "loss_type",
            "changes the loss, and is not built": """
                use_weighting ld_alpha rpo_alpha alpha reference_free""",
            "name the folder or the files": "[].data_dir",
        }
    ),
    "eos_token": _eos_token,
    "packing_strategy": never("rows are packed as wholes", "bfd", "ffd"),
    "f_divergence_type": never("only the reverse KL divergence is built", "reverse_kl"),
}
