"""Configs of TRL's commands, and dumps of its configurations or of TrainingArguments."""

from __future__ import annotations

from typing import Any

from megatrain.config import names as n
from megatrain.config.importing import shared
from megatrain.config.importing.shared import Source, paths_of, put_sources
from megatrain.config.importing.sheet import NOTHING_ASKED, Sheet

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
    said = sheet.said["training"]
    shared.arguments(
        sheet,
        gpus,
        ["packing"] if sheet.get("packing") else [],
        length=[length, said["length"][1]],
        rate=sheet.said["rates"].get(method, said["rate"]),
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
    shared.of_method(sheet)
    sheet.finish({**shared.RULES, "eos_token": _eos_token})


def _method(sheet: Sheet) -> str:
    for method, keys in sheet.said["methods"].items():
        if any(key in sheet.given for key in keys.split()):
            return str(method)
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
        if sheet.get(name) is not None:
            shared.template(sheet, name)
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
