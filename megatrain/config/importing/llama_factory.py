"""Configs of LLaMA-Factory, with the data sets of its dataset_info.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatrain.config import names as n
from megatrain.config.importing import shared
from megatrain.config.importing.shared import KNOWN_ROLES, Source, put_sources, turns
from megatrain.config.importing.sheet import Sheet
from megatrain.data.files import read_file, type_of

COUNTED = (".json", ".jsonl", ".csv", ".parquet")  # files whose rows can be counted


def read(sheet: Sheet, gpus: int, method: str | None) -> None:
    """Decide of every key."""
    stage, loss = shared.method_of(sheet, "stage", "sft"), str(sheet.get("pref_loss"))
    of_loss = stage == "dpo" and loss in ("orpo", "simpo")
    method = method or (loss if of_loss else stage)
    sheet.put("method", method, "stage", *["pref_loss"] * of_loss)
    if (kind := sheet.get("finetuning_type", "lora")) != "full":
        why = "adapters and parts of layers are not built; finetuning_type: full trains"
        sheet.refuse("finetuning_type", f"{kind}: {why}")
    if sheet.get("train_from_scratch"):
        sheet.put("model.config", sheet.get("model_name_or_path"), "model_name_or_path")
        sheet.put("model.init", "random", "train_from_scratch")
    texts = stage == "pretrain" and sheet.get("packing") is None
    shared.arguments(sheet, gpus, "stage" * texts)
    if method == "sft" and sheet.get("packing") and not sheet.get("neat_packing"):
        sheet.assume("packing: rows of one sequence do not see each other here (neat_packing)")
    name = sheet.get("template")
    if name in ("default", "empty", "fewshot", "alpaca") and method != "pretrain":
        sheet.refuse("template", "of no model; name a model's, or write one into a jinja file")
    elif name is not None and method != "pretrain":
        shared.template(sheet, "template", name)
    for name, key in (("dataset", "data.train"), ("eval_dataset", "data.eval")):
        given = sheet.get(name, [])
        sets = given if isinstance(given, list) else str(given).split(",")
        each = [set_of(sheet, name, str(one).strip()) for one in sets]
        if found := [one for one in each if one]:
            put_sources(sheet, key, found, name)
        if len(each) > 1 and name == "dataset" and sheet.get("mix_strategy", "concat") != "concat":
            sheet.refuse("mix_strategy", "sets follow each other; give each of data.train a weight")
    shared.of_method(sheet)
    sheet.finish({})


def set_of(sheet: Sheet, name: str, wanted: str, key: str = "dataset_dir") -> Source | None:
    """The source of a set of dataset_info.json; None, and the key refused, if there is none. The
    file lies in the key's folder, here or above the config, or beside the config."""
    named, info = Path(str(sheet.get(key, "data"))), "dataset_info.json"
    above = [folder / named for folder in (sheet.folder, *sheet.folder.parents)]
    folders = [one for one in (named, *above, sheet.folder) if (one / info).is_file()]
    sets = [row.value for row in read_file(folders[0] / info)] if folders else []
    entry = sets[0].get(wanted) if sets and isinstance(sets[0], dict) else None
    if not isinstance(entry, dict):
        sheet.refuse(name, f"{wanted} is not in {info}; name its folder (dataset_dir)")
        return None
    columns, tags = entry.get("columns") or {}, entry.get("tags") or {}
    if not isinstance(columns, dict) or not isinstance(tags, dict):
        sheet.refuse(name, f"{wanted}: columns and tags must be mappings")
        return None
    hub, subset, split = entry.get("hf_hub_url"), entry.get("subset"), entry.get("split", "train")
    shape, roles = _shape(sheet, entry, columns, tags), sheet.said["tags"].items()
    why = ""
    if media := [kind for kind in ("videos", "audios") if columns.get(kind)]:
        why = f"has {', '.join(media)}; only texts and images are read"
    elif shape is None or any(KNOWN_ROLES.get(tags.get(tag, one)) != one for tag, one in roles):
        why = f"has roles or turns of other names; known are {[*KNOWN_ROLES]}"
    elif entry.get("num_samples"):
        why = "num_samples draws some rows; write a file of them"
    elif not hub and "file_name" not in entry:
        why = "is run by a script or lies elsewhere; download its rows"
    if shape is None or why:
        sheet.refuse(name, f"{wanted}: {why}")
        return None
    file = folders[0] / str(entry.get("file_name"))
    path = f"{hub}:{subset}:{split}" if hub and subset else str(hub or file)
    split = None if split == "train" or (hub and subset) else str(split)
    if isinstance(most := sheet.get("max_samples"), int):
        known = not hub and file.is_file() and type_of(file) in COUNTED
        rows = sum(1 for _ in read_file(file)) if known else None
        if rows is None or rows > most:
            found = "are not known" if rows is None else f"are {rows:,}"
            reason = n.REFUSED["max_samples"].reason
            sheet.refuse("max_samples", f"rows of {wanted} {found}; {reason}")
    return shape | {"path": path, "split": split}


def _shape(
    sheet: Sheet, entry: dict[str, Any], columns: dict[str, str], tags: dict[str, str]
) -> Source | None:
    """Format, columns (theirs by ours) and text column of a set; None for unknown turns."""
    if sheet.config["method"] == "pretrain":
        return {"format": "text", "text_field": columns.get("prompt", "text")}
    form, ranking = entry.get("formatting", "alpaca"), bool(entry.get("ranking"))
    if form == "alpaca":
        named = {sheet.said["columns"].get(name, name): one for name, one in columns.items()}
        return {"format": "alpaca_ranking" if ranking else "alpaca", "columns": named}
    column = columns.get("messages", "messages" if form == "openai" else "conversations")
    role, content = tags.get("role_tag", "from"), tags.get("content_tag", "value")
    found = turns(column, *(("role", "content") if form == "openai" else (role, content)))
    if found is None:
        return None
    name, of_turns = ("ranking", {"conversations": column}) if ranking else found
    others = {name: one for name, one in columns.items() if name not in ("messages", "kto_tag")}
    judged = {"label": columns["kto_tag"]} if "kto_tag" in columns else {}
    return {"format": name, "columns": others | judged | of_turns}
