"""Configs of axolotl."""

from __future__ import annotations

from typing import Any

from megatrain.config import names as n
from megatrain.config.document import Located
from megatrain.config.importing import shared, trl
from megatrain.config.importing.shared import KNOWN_ROLES, Source, paths_of, put_sources, turns
from megatrain.config.importing.sheet import NOTHING_ASKED, Sheet, table_of, tables_of

LONG = {"drop": "drop", "truncate": "keep_start"}
HARMLESS_PLUGINS = ("liger", "cut_cross_entropy", "kernels", "spectrum", "expert_parallel")
# The text's part of a vision-language model, as it is written there.
TEXT_ALONE = {"model.language_model.*", "lm_head", "lm_head.*", "embed_tokens", "embed_tokens.*"}
# Keys of an entry of `datasets` that path and format answer for.
ENTRY = (
    *("path", "split", "type", "data_files", "name", "field", "text_column", "field_messages"),
    *("field_chosen", "field_rejected", "message_property_mappings"),
    *("message_field_role", "message_field_content"),
)


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
    packed = ["sample_packing"] if sheet.get("sample_packing") else []
    whole = ["pretraining_dataset"] if method == "pretrain" else []
    other: dict[str, list[Any]] = {}
    if method == "grpo":  # whose keys are TRL's, in a section
        section = sheet.get("trl")
        place = sheet.given.pop("trl").place if isinstance(section, dict) else ""
        inner = section if isinstance(section, dict) else {}
        sheet.given |= {f"trl.{name}": Located(value, place) for name, value in inner.items()}
        other["length"] = trl.length_of_answers(sheet, "sequence_len", "trl.")
    if sheet.get("batch_size") is not None and sheet.get("gradient_accumulation_steps") is None:
        other["rows"] = ["batch_size", 1]
        sheet.drop("batch_size is its product with the accumulated batches", "micro_batch_size")
    shared.arguments(sheet, gpus, packed or whole, **other)
    if method == "sft" and sheet.get("sample_packing") is not None:
        sheet.put("data.packing", sheet.get("sample_packing"), "sample_packing")
    trackers = sheet.said["trackers"]
    if given := [key for key in trackers if sheet.get(key)]:
        used = [trackers[key] for key in given]
        sheet.put("track", used, *given, note="project and names by the environment")
    _evaluation(sheet)
    _data(sheet, method)
    if method == "grpo":
        trl.rollouts_of(sheet, gpus, other.get("rows") or sheet.said["training"]["rows"], "trl.")
    if sheet.get("rl") == "gdpo":
        sheet.put("grpo.multi_objective_aggregation", "normalize_then_sum", "rl")
    if sheet.get("rl") == "ipo":
        sheet.put("dpo.loss_type", ["ipo"], "rl")
    if method == "simpo" and sheet.get("cpo_alpha", 1.0) != 0:
        sheet.refuse("rl", "simpo with the likelihood beside it (cpo_alpha, 1 unless set); set 0")
    shared.of_method(sheet, **({"beta": "orpo_alpha"} if method == "orpo" else {}))
    rules = {"plugins": _plugins, "unfrozen_parameters": _unfrozen, "[].roles": _roles}
    rules["shuffle_merged_datasets"] = _shuffled
    theirs = {**table_of(tables_of("shared")), **table_of(tables_of("trl")), **trl.RULES}
    own = {f"trl.{name}": rule for name, rule in theirs.items()} | table_of(sheet.said)
    rules["[].chat_template"] = lambda sheet, name, value: shared.template(sheet, name)
    sheet.finish({**own, **shared.RULES, **n.of_each("special_tokens tokens", _tokens), **rules})


def _evaluation(sheet: Sheet) -> None:
    if sheet.get("test_datasets"):
        sheet.drop("test_datasets go before", "val_set_size")
    else:
        shared.held_out(sheet, "val_set_size")
    off = any(sheet.get(name) in ("no", False) for name in n.STRATEGIES)
    if (off or sheet.get("evals_per_epoch") == 0) and sheet.get("eval_steps") is None:
        sheet.put("train.eval_every", None, *n.STRATEGIES, "evals_per_epoch")


def _data(sheet: Sheet, method: str) -> None:
    long = str(sheet.get("excess_length_strategy", "drop"))
    if long not in LONG:
        sheet.refuse("excess_length_strategy", "long rows are dropped or cut, and counted")
    elif method != "pretrain":
        sheet.put("data.truncation_mode", LONG[long], "excess_length_strategy")
    if method == "sft":
        inputs = bool(sheet.get("train_on_inputs"))
        sheet.put("data.train_on", "all" if inputs else "assistant", "train_on_inputs")
    name = "pretraining_dataset" if method == "pretrain" else "datasets"
    for given, key in ((name, "data.train"), ("test_datasets", "data.eval")):
        value = sheet.get(given)
        if isinstance(value, str) and given == name:
            put_sources(sheet, key, [{"path": value}], given)
        if isinstance(value, str):
            continue
        found: list[Source] = []
        settled = []
        for at, one in sheet.open(given):
            found += _sources(sheet, at, one, method)
            names = [at + key for key in one if key in ENTRY]
            settled += [name for name in names if not sheet.is_refused(name)]
        put_sources(sheet, key, found, *settled)
    jinja, chosen = sheet.get("chat_template_jinja"), sheet.get("chat_template")
    if "data.chat_template" in sheet.config or method == "pretrain":
        sheet.drop("the type of the rows says", "chat_template", "chat_template_jinja")
    elif chosen is not None and chosen != "jinja":
        shared.template(sheet, "chat_template")
    elif jinja:
        shared.template(sheet, "chat_template_jinja")
        sheet.drop("chat_template_jinja is it", "chat_template")
    if method == "pretrain" and "train.max_steps" in sheet.config:
        sheet.put("data.streaming", True, "streaming", "pretraining_dataset")


def _sources(sheet: Sheet, at: str, given: dict[str, Any], method: str) -> list[Source]:
    """The sources of one entry, of its keys in ENTRY."""
    kind = str(given.get("type", "pretrain" if method == "pretrain" else None))
    mappings = given.get("message_property_mappings") or {}
    others = mappings if isinstance(mappings, dict) else {"": mappings}
    others = {ours: theirs for ours, theirs in others.items() if ours not in ("role", "content")}
    if any(ours != theirs for ours, theirs in others.items()):
        sheet.refuse(at + "message_property_mappings", "turns have role and content; rename others")
        mappings = {}
    role = mappings.get("role", given.get("message_field_role") or "role")
    content = mappings.get("content", given.get("message_field_content") or "content")
    column = str(given.get("field_messages") or "messages")
    thinking = given.get("field_thinking")
    if thinking and thinking != (given.get("template_thinking_key") or "reasoning_content"):
        sheet.refuse(at + "field_thinking", "the template looks for it under another name")
    form: tuple[str, dict[str, str]] | None = None
    if kind == "chat_template":
        form = turns(column, role, content)
    elif kind == "chat_template.default" and method != "sft" and turns(column, role, content):
        answers = {name: given.get(f"field_{name}") or name for name in ("chosen", "rejected")}
        columns = {"prompt": column, **answers} if method != "kto" else {"messages": column}
        named = {ours: str(theirs) for ours, theirs in columns.items() if ours != theirs}
        form = ("messages" if method == "kto" else "preference", named)
    elif method == "grpo" and kind == "None":
        form = ("auto", {})
    elif row := sheet.said["types"].get(kind):
        form = (row["format"], {"prompt": row["prompt"]} if "prompt" in row else {})
        for key in ("prompts", "chat_template"):
            if key in row:
                sheet.put(f"data.{key}", row[key], at + "type")
    if form is None:
        reason = "prompts of this type are axolotl's own; write the rows as messages"
        sheet.refuse(at + "type", reason)
        return []
    text = str(given.get("field") or given.get("text_column") or "text")
    shape = {"format": form[0], "columns": form[1]}
    if form[0] == "text" and text != "text":
        shape["text_field"] = text
    return [one | shape for one in paths_of(sheet, at, given)]


def _roles(sheet: Sheet, name: str, value: Any) -> None:
    said = value.items() if isinstance(value, dict) else [("", value)]
    lists = [(role, names if isinstance(names, list) else [names]) for role, names in said]
    each = [(role, name) for role, names in lists for name in names]
    if all(isinstance(one, str) and KNOWN_ROLES.get(one) == role for role, one in each):
        sheet.drop("roles that are known anyway", name)
    else:
        sheet.refuse(name, f"known roles are {', '.join(KNOWN_ROLES)}; rename others in the rows")


def _unfrozen(sheet: Sheet, name: str, value: Any) -> None:
    parts = set(map(str, value)) if isinstance(value, list) else set()
    if TEXT_ALONE >= parts >= {"model.language_model.*"}:
        sheet.drop("towers are carried along unchanged; text alone is trained", name)
    else:
        sheet.follow(name, value, n.REFUSED[name])


def _shuffled(sheet: Sheet, name: str, value: Any) -> None:
    if value:
        sheet.drop(NOTHING_ASKED, name)
    else:
        sheet.refuse(name, "rows are shuffled, by train.seed")


def _plugins(sheet: Sheet, name: str, value: Any) -> None:
    named = [str(one) for one in (value if isinstance(value, list) else [value])]
    others = [one for one in named if not any(known in one for known in HARMLESS_PLUGINS)]
    if others:
        sheet.refuse(name, f"{', '.join(others)}: trains otherwise than by its loss on rows")
    else:
        sheet.drop("other kernels, or another distribution of the same work", name)


def _tokens(sheet: Sheet, name: str, value: Any) -> None:
    known = ("pad_token", "bos_token", "eos_token", "unk_token")
    if not isinstance(value, dict) or not value.keys() <= {*known}:
        stays = "the tokenizer and its vocabulary stay as they are"
        sheet.refuse(name, f"{stays}; add tokens to the model before")
        return
    ends = {key: one for key, one in value.items() if key != "pad_token"}
    if any(ends.values()):
        sheet.assume(f"{name}: {ends} are the tokenizer's own; its eos_token ends texts")
    sheet.drop("the tokenizer's own tokens are used, and padding never counts", name)
