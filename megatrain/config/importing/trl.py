"""Configs of TRL's commands, and dumps of its configurations or of TrainingArguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatrain.config import names as n
from megatrain.config.importing import shared
from megatrain.config.importing.shared import Source, counts_of, paths_of, put_sources
from megatrain.config.importing.sheet import NOTHING_ASKED, OF_ANSWERS, Sheet, Table

ENTRY = ("path", "id", "name", "config", "split", "data_files", "weight")
SCALES = ((True, "group"), (False, "none"))
RULES: Table = {
    "scale_rewards": n.Alias(
        ("policy", "scale_rewards"), lambda value: next((o for v, o in SCALES if v is value), value)
    ),
    "top_k": n.Alias(("rollout", "top_k"), lambda value: value or None),
}


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
    room = length_of_answers(sheet, "vllm_max_model_length") if method in OF_ANSWERS else None
    shared.arguments(
        sheet,
        gpus,
        ["packing"] if sheet.get("packing") else [],
        length=room or [length, said["length"][1]],
        rate=sheet.said["rates"].get(method, said["rate"]),
    )
    if method == "sft" and sheet.get("packing") is not None:
        sheet.put("data.packing", sheet.get("packing"), "packing")
    _data(sheet, method)
    if method in OF_ANSWERS:
        rollouts_of(sheet, gpus, said["rows"])
    if method == "kto":  # whose rows come in the file's order unless that is changed
        sheet.drop("rows are shuffled, by train.seed", "train_sampling_strategy")
    if sheet.get("loss_type") in ("nll", "kto"):
        sheet.drop("the loss of the method", "loss_type")
    if method == "cpo":
        sheet.drop("of loss_type: simpo alone", "simpo_gamma")
    shared.of_method(sheet)
    sheet.finish({**shared.RULES, **RULES, "eos_token": _eos_token})


def _method(sheet: Sheet) -> str:
    for method, keys in sheet.said["methods"].items():
        if any(key in sheet.given for key in keys.split()):
            if method == "grpo":
                sheet.assume("method: grpo, as no key is of `trl rloo` alone; --method rloo")
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


def length_of_answers(sheet: Sheet, name: str, at: str = "") -> list[Any]:
    """Name and default of the tokens of a prompt and an answer. at: how TRL's names begin."""
    answer, prompt = ((f"{at}max_{part}_length", 512) for part in ("completion", "prompt"))
    for limit in (answer[0], f"{at}vllm_importance_sampling_clip_max"):
        if limit in sheet.given and sheet.get(limit) is None:
            sheet.refuse(limit, "no limit; name one")
    most, before = counts_of(sheet, answer, prompt)
    sheet.put("policy.max_completion_length", most, answer[0])
    sheet.assume("prompts that leave no room for an answer in train.seq_len are bad rows here")
    return [name, before + most]


def rollouts_of(sheet: Sheet, gpus: int, rows: list[Any], at: str = "") -> None:
    """Decide of rollouts and rewards, after the training arguments. rows: name and default of the
    answers of a device, which make the steps; TRL's steps_per_generation are micro-batches."""
    size, parts = at + "generation_batch_size", at + "steps_per_generation"
    names = (rows[0], "gradient_accumulation_steps", size, parts)
    of_group = at + "num_generations", 8 if sheet.config["method"] == "grpo" else 2
    a_device, times, number = counts_of(sheet, rows, (names[1], 1), of_group)
    (micro_batches,) = counts_of(sheet, (parts, times))
    found, step = a_device * gpus * micro_batches, a_device * gpus * times
    (written,) = counts_of(sheet, (size, found))
    if written % step or (sheet.get(parts) and written != found):
        why = f"{written} answers of a rollout are no whole number of steps of {step}"
        sheet.refuse(size if sheet.get(size) else parts, f"{why}, or {parts} says other ones")
    if not (sheet.get("sequence_len") or sheet.get("vllm_max_model_length")):
        limits = (at + "max_prompt_length", at + "max_completion_length")
        note = "prompt, 512 unless it is set, and answer"
        sheet.put("train.seq_len", sheet.config["train.seq_len"], *limits, note=note)
    sheet.drop("prompts are not cut; train.seq_len is set", at + "max_prompt_length")
    sheet.put("rollout.generation_batch_size", written, *names)
    sheet.put("rollout.steps_per_generation", max(1, written // step), *names)
    sheet.put("policy.num_generations", number, at + "num_generations")
    drawn, asked = at + "num_generations_eval", at + "use_vllm"
    sheet.put("rollout.eval_generations", sheet.get(drawn, number), drawn)
    correction = at + "vllm_importance_sampling_correction"
    if sheet.config["method"] == "grpo":
        corrected = bool(sheet.get(asked)) and sheet.get(correction, True)
        note = "TRL corrects what vLLM writes, and nothing else"
        sheet.put("grpo.importance_sampling_correction", corrected, asked, correction, note=note)
    sheet.drop("answers are written by MegaTrain itself", asked)
    name, functions = at + "reward_funcs", list[str]()
    given = sheet.get(name, [])
    for one in given if isinstance(given, list) else [given]:
        module, _, function = str(one).rpartition(".")
        file = f"{module.replace('.', '/')}.py"
        there = [str(path) for path in (Path(file), sheet.folder / file) if path.is_file()]
        functions += [f"{path}:{function}" for path in there[:1]]
        if not there:
            why = f"{one}: no file of it is here or beside the config; import it in one of yours"
            own = f"(TRL's own are in trl.rewards), rewards.functions=[FILE.py:{function}], --force"
            sheet.refuse(name, f"{why} {own}")
    if functions and not sheet.is_refused(name):
        sheet.put("rewards.functions", functions, name)


def _eos_token(sheet: Sheet, name: str, value: Any) -> None:
    if value == "<EOS_TOKEN>":  # a dump's placeholder
        sheet.drop(NOTHING_ASKED, name)
        return
    sheet.drop("the chat template ends answers", name)
    sheet.assume(
        f"eos_token: {value}: rows are conversations, whose answers end with what the chat "
        "template writes; texts end with the tokenizer's own"
    )
