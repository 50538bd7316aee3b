"""Configs of axolotl."""

from __future__ import annotations

from typing import Any

from megatrain.config import names as n
from megatrain.config.importing import shared, trl
from megatrain.config.importing.shared import KNOWN_ROLES, Source, paths_of, put_sources, turns
from megatrain.config.importing.sheet import Sheet, table_of, tables_of


def read(sheet: Sheet, gpus: int, method: str | None) -> None:
    """Decide of every key."""
    texts = "pretrain" if sheet.get("pretraining_dataset") else "sft"
    otherwise = "reward" if sheet.get("reward_model") else texts
    method = method or shared.method_of(sheet, "rl", otherwise)
    sheet.put("method", method, "rl", "reward_model", "pretraining_dataset")
    if sheet.get("reinit_weights"):
        sheet.put("model.config", sheet.get("base_model"), "base_model", "reinit_weights")
    for key in ("base_model_config", "tokenizer_config"):
        if sheet.get(key) == sheet.get("base_model"):
            sheet.drop("the model's own", key)
    length = None
    if method == "grpo":  # whose keys are TRL's, in a section
        sheet.open("trl")
        length = trl.length_of_answers(sheet, "sequence_len", "trl.")
    if sheet.get("batch_size") is not None and sheet.get("gradient_accumulation_steps") is None:
        sheet.said["training"] |= {"rows": ["batch_size", 1]}
        sheet.drop("batch_size is its product with the accumulated batches", "micro_batch_size")
    shared.arguments(sheet, gpus, "pretraining_dataset" * (method == "pretrain"), length)
    trackers = {key: ours for key, ours in sheet.said["trackers"].items() if sheet.get(key)}
    if trackers:
        note = "project and names by the environment"
        sheet.put("track", [*trackers.values()], *trackers, note=note)
    _data(sheet, method)
    if method == "grpo":
        trl.rollouts_of(sheet, gpus, "trl.")
    if loss := sheet.said["losses"].get(str(sheet.get("rl"))):
        sheet.put(*loss, "rl")
    if method == "simpo" and sheet.get("cpo_alpha", 1.0) != 0:
        sheet.refuse("rl", "simpo with the likelihood beside it (cpo_alpha, 1 unless set); set 0")
    shared.of_method(sheet)
    for name in ("special_tokens", "tokens"):
        sheet.open(name)
    theirs = {**table_of(tables_of("shared")), **table_of(tables_of("trl"))}
    own = {f"trl.{name}": rule for name, rule in theirs.items()} | table_of(sheet.said)
    rules = {"plugins": _plugins, "[].roles": _roles, "[].chat_template": shared.template}
    sheet.finish({**own, **rules})


def _data(sheet: Sheet, method: str) -> None:
    off = any(sheet.get(name) in ("no", False) for name in n.STRATEGIES)
    if (off or sheet.get("evals_per_epoch") == 0) and sheet.get("eval_steps") is None:
        sheet.put("train.eval_every", None, *n.STRATEGIES, "evals_per_epoch")
    long = str(sheet.get("excess_length_strategy", "drop"))
    if method != "pretrain":
        mode = "keep_start" if long == "truncate" else long
        sheet.put("data.truncation_mode", mode, "excess_length_strategy")
    name = "pretraining_dataset" if method == "pretrain" else "datasets"
    for given, key in ((name, "data.train"), ("test_datasets", "data.eval")):
        if isinstance(path := sheet.get(given), str):
            put_sources(sheet, key, [{"path": path}], given)
        else:
            shared.put_entries(sheet, key, given, _sources)
    jinja, chosen = sheet.get("chat_template_jinja"), sheet.get("chat_template")
    name = "chat_template_jinja" if jinja and chosen in (None, "jinja") else "chat_template"
    asked = method != "pretrain" and "data.chat_template" not in sheet.config
    if asked and (value := sheet.get(name)) is not None:
        shared.template(sheet, name, value)
    sheet.drop("another key or the rows' type says it", "chat_template", "chat_template_jinja")
    if method == "pretrain" and "train.max_steps" in sheet.config:
        sheet.put("data.streaming", True, "streaming", "pretraining_dataset")


def _sources(sheet: Sheet, at: str, given: dict[str, Any]) -> list[Source]:
    """The sources of one entry."""
    method = sheet.config["method"]
    kind = str(given.get("type", "pretrain" if method == "pretrain" else None))
    named = given.get("message_property_mappings") or {}
    known = ("role", "content")
    if not isinstance(named, dict) or any(k not in known and k != v for k, v in named.items()):
        sheet.refuse(at + "message_property_mappings", "turns have role and content; rename others")
        named = {}
    role, content = (named.get(k) or given.get(f"message_field_{k}") or k for k in known)
    column = str(given.get("field_messages") or "messages")
    thinking = given.get("field_thinking")
    if thinking and thinking != (given.get("template_thinking_key") or "reasoning_content"):
        sheet.refuse(at + "field_thinking", "the template looks for it under another name")
    found, row = turns(column, role, content), sheet.said["types"].get(kind, {})
    if kind == "chat_template.default" and found:
        found = "messages", {"messages": column}
        if method != "kto":
            answers = {k: str(given.get(f"field_{k}") or k) for k in ("chosen", "rejected")}
            found = "preference", {"prompt": column, **answers}
        found = None if method == "sft" else found
    elif method == "grpo" and kind == "None":
        found = "auto", {}
    elif kind != "chat_template":
        found = (row["format"], row.get("columns", {})) if row else None
    if found is None:
        sheet.refuse(at + "type", "prompts of this type are axolotl's own; write rows as messages")
        return []
    for key in ("prompts", "chat_template"):
        if key in row:
            sheet.put(f"data.{key}", row[key], at + "type")
    shape: Source = {"format": found[0], "columns": found[1]}
    if found[0] == "text":
        shape["text_field"] = str(given.get("field") or given.get("text_column") or "text")
    return [one | shape for one in paths_of(sheet, at, given)]


def _roles(sheet: Sheet, name: str, value: Any) -> None:
    lists = value.items() if isinstance(value, dict) else [("", value)]
    named = {role: each if isinstance(each, list) else [each] for role, each in lists}
    if all(KNOWN_ROLES.get(str(one)) == role for role, each in named.items() for one in each):
        sheet.drop("roles that are known anyway", name)
    else:
        sheet.refuse(name, f"known roles are {', '.join(KNOWN_ROLES)}; rename others in the rows")


def _plugins(sheet: Sheet, name: str, value: Any) -> None:
    harmless = sheet.said["harmless_plugins"].split()
    named = [str(one) for one in (value if isinstance(value, list) else [value])]
    if others := [one for one in named if not any(known in one for known in harmless)]:
        sheet.refuse(name, f"{', '.join(others)}: trains otherwise than by its loss on rows")
    else:
        sheet.drop("other kernels, or another distribution of the same work", name)
