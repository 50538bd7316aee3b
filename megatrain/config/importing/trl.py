"""Configs of TRL's commands, and dumps of its configurations or of TrainingArguments."""

from __future__ import annotations

from typing import Any

from megatrain.config import names as n
from megatrain.config.importing import shared
from megatrain.config.importing.shared import Source, counts_of, file_beside, paths_of, put_sources
from megatrain.config.importing.sheet import OF_ANSWERS, Sheet


def read(sheet: Sheet, gpus: int, method: str | None) -> None:
    """Decide of every key."""
    method = method or _method(sheet)
    if method == "cpo" and sheet.get("loss_type") == "simpo" and not sheet.get("cpo_alpha", 1.0):
        method = "simpo"
    sheet.put("method", method, *(["loss_type"] if method == "simpo" else []))
    sheet.origins["method"] = "by the keys of the file"
    length = sheet.said["training"]["length"]
    if sheet.get("max_seq_length"):
        length = ["max_seq_length", length[1]]
    sheet.need(length[0], "rows of any length: name the longest in tokens")
    if method in OF_ANSWERS:
        length = length_of_answers(sheet, "vllm_max_model_length")
    shared.arguments(sheet, gpus, length=length)
    _data(sheet, method)
    if method in OF_ANSWERS:
        rollouts_of(sheet, gpus)
    if method == "kto":  # whose rows come in the file's order unless that is changed
        sheet.drop("rows are shuffled, by train.seed", "train_sampling_strategy")
    shared.of_method(sheet)
    sheet.finish({})


def _method(sheet: Sheet) -> str:
    for method, keys in sheet.said["methods"].items():
        if any(key in sheet.given for key in keys.split()):
            if method == "grpo":
                sheet.assume("method: grpo, as no key is of `trl rloo` alone; --method rloo")
            return str(method)
    if sheet.get("loss_type"):
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
    for name in ("chat_template", "chat_template_path"):
        if sheet.get(name) is not None:
            shared.template(sheet, name, sheet.get(name))
    strategies = [sheet.get(name) for name in n.STRATEGIES]
    off = next((one for one in strategies if one is not None), "no") in ("no", False)
    if path := sheet.get("dataset_name"):
        for part, split in (("train", "train"), ("eval", "test"))[: 1 if off else 2]:
            at = f"dataset_{split}_"
            given = {"path": path, "split": sheet.get(f"{at}split", split)}
            found = paths_of(sheet, at, given | {"name": sheet.get("dataset_config")})
            names = ("dataset_name", "dataset_config", f"{at}split")
            put_sources(sheet, f"data.{part}", found, *names)
    if isinstance(sheet.get("dataset_mixture"), dict):
        sheet.open("dataset_mixture")
    for name in ("datasets", "dataset_mixture.datasets"):
        shared.put_entries(sheet, "data.train", name, _sources)
    if off or "data.eval" not in sheet.config:
        sizes = ("test_split_size", "dataset_mixture.test_split_size")
        size = next((size for name in sizes if (size := sheet.get(name)) is not None), None)
        sheet.put("data.eval", None if off else size, *sizes, *(n.STRATEGIES if off else ()))


def _sources(sheet: Sheet, at: str, given: dict[str, Any]) -> list[Source]:
    """The sources of one entry, of a mixture's with its names."""
    return paths_of(sheet, at, {"path": given.get("id"), "name": given.get("config"), **given})


def length_of_answers(sheet: Sheet, name: str, at: str = "") -> list[Any]:
    """Name and default of the tokens of a prompt and an answer, and of what that is made. at: how
    TRL's names begin."""
    answer, prompt = (f"{at}max_{part}_length" for part in ("completion", "prompt"))
    sheet.need(answer, "no limit; name one")
    sheet.need(f"{at}vllm_importance_sampling_clip_max", "no limit; name one")
    most, before = counts_of(sheet, (answer, 512), (prompt, 512))
    sheet.put("policy.max_completion_length", most, answer)
    sheet.assume("prompts that leave no room for an answer in train.seq_len are bad rows here")
    return [name, before + most, *([] if sheet.get(name) else [prompt, answer])]


def rollouts_of(sheet: Sheet, gpus: int, at: str = "") -> None:
    """Decide of rollouts and rewards, after the training arguments. at: how TRL's names begin. The
    rows of a device are answers, which make the steps; TRL's steps_per_generation are
    micro-batches."""
    grpo, rows = sheet.config["method"] == "grpo", sheet.said["training"]["rows"]
    size, parts, group = (
        at + name for name in ("generation_batch_size", "steps_per_generation", "num_generations")
    )
    names = (rows[0], "gradient_accumulation_steps", size, parts)
    a_device, times, number = counts_of(sheet, rows, (names[1], 1), (group, 8 if grpo else 2))
    (micro_batches,) = counts_of(sheet, (parts, times))
    found, step = a_device * gpus * micro_batches, a_device * gpus * times
    (written,) = counts_of(sheet, (size, found))
    if written % step or (sheet.get(parts) and written != found):
        why = f"{written} answers of a rollout are no whole number of steps of {step}"
        sheet.refuse(size if sheet.get(size) else parts, f"{why}, or {parts} says other ones")
    sheet.put("rollout.generation_batch_size", written, *names)
    sheet.put("rollout.steps_per_generation", max(1, written // step), *names)
    sheet.put("policy.num_generations", number, group)
    drawn, asked = at + "num_generations_eval", at + "use_vllm"
    sheet.put("rollout.eval_generations", sheet.get(drawn, number), drawn)
    correction = at + "vllm_importance_sampling_correction"
    if grpo:
        corrected = bool(sheet.get(asked)) and sheet.get(correction, True)
        note = "TRL corrects what vLLM writes, and nothing else"
        sheet.put("grpo.importance_sampling_correction", corrected, asked, correction, note=note)
    sheet.drop("answers are written by MegaTrain itself", asked)
    if isinstance(scale := sheet.get(at + "scale_rewards"), bool):
        sheet.put("policy.scale_rewards", "group" if scale else "none", at + "scale_rewards")
    name, functions = at + "reward_funcs", list[str]()
    given = sheet.get(name, [])
    for one in given if isinstance(given, list) else [given]:
        module, _, function = str(one).rpartition(".")
        if file := file_beside(sheet, f"{module.replace('.', '/')}.py"):
            functions.append(f"{file}:{function}")
        else:
            why = f"{one}: no file of it is here or beside the config; import it in one of yours"
            own = f"(TRL's own are in trl.rewards), rewards.functions=[FILE.py:{function}], --force"
            sheet.refuse(name, f"{why} {own}")
    if functions and not sheet.is_refused(name):
        sheet.put("rewards.functions", functions, name)
