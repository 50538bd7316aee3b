"""Configs of LLaMA-Factory, with the data sets of its dataset_info.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatrain.config import names as n
from megatrain.config.importing import shared
from megatrain.config.importing.shared import KNOWN_ROLES, Source, put_sources, read_json, turns
from megatrain.config.importing.sheet import Sheet

INFO = "dataset_info.json"


def read(sheet: Sheet, gpus: int, method: str | None) -> None:
    """Decide of every key."""
    stage, loss = shared.method_of(sheet, "stage", "sft"), str(sheet.get("pref_loss"))
    of_loss = stage == "dpo" and loss in ("orpo", "simpo")
    method = method or (loss if of_loss else stage)
    sheet.put("method", method, "stage", *["pref_loss"] * of_loss)
    if (kind := sheet.get("finetuning_type", "lora")) != "full":
        why = "adapters and parts of layers are not built; finetuning_type: full is what trains"
        sheet.refuse("finetuning_type", f"{kind}: {why}")
    if sheet.get("train_from_scratch"):
        sheet.put("model.config", sheet.get("model_name_or_path"), "model_name_or_path")
        sheet.put("model.init", "random", "train_from_scratch")
    packing = [name for name in ("packing", "neat_packing") if sheet.get(name)]
    texts = stage == "pretrain" and sheet.get("packing") is None
    shared.arguments(sheet, gpus, packing or ["stage"] * texts)
    if method == "sft" and (packing or sheet.get("packing") is False):
        sheet.put("data.packing", bool(packing), *packing, "packing")
        if packing == ["packing"]:
            said = "rows of one sequence do not see each other here (neat_packing)"
            sheet.assume(f"packing: {said}")
    _data(sheet, method)
    shared.of_method(sheet)
    sheet.finish({})


def _data(sheet: Sheet, method: str) -> None:
    if method == "sft":
        every = bool(sheet.get("train_on_prompt"))
        sheet.put("data.train_on", "all" if every else "assistant", "train_on_prompt")
    if method == "reward":  # ours drops long rows unless it is told
        sheet.put("data.truncation_mode", "keep_start")
    name = sheet.get("template")
    if name in ("default", "empty", "fewshot", "alpaca") and method != "pretrain":
        sheet.refuse("template", "of no model; name a model's, or write one into a jinja file")
    elif name is not None and method != "pretrain":
        shared.template(sheet, "template", name)
    if sheet.get("eval_dataset") is None:
        shared.held_out(sheet, "val_size")
    info, folder = info_of(sheet)
    for name, key in (("dataset", "data.train"), ("eval_dataset", "data.eval")):
        given = sheet.get(name, [])
        sets = given if isinstance(given, list) else str(given).split(",")
        each = [set_of(sheet, name, str(one).strip(), info, folder) for one in sets]
        put_sources(sheet, key, [one for one in each if one], name)
        if len(each) > 1 and name == "dataset" and sheet.get("mix_strategy", "concat") != "concat":
            sheet.refuse("mix_strategy", "sets follow each other; give each of data.train a weight")


def info_of(sheet: Sheet, key: str = "dataset_dir") -> tuple[dict[str, Any], Path]:
    """dataset_info.json and its folder: the key's, here or above the file, or beside the file."""
    named = Path(str(sheet.get(key, "data")))
    above = [folder / named for folder in (sheet.folder, *sheet.folder.parents)]
    for folder in (named, *above, sheet.folder):
        if (folder / INFO).is_file():
            found = read_json(folder / INFO)
            return (found if isinstance(found, dict) else {}), folder
    return {}, named


def set_of(
    sheet: Sheet, name: str, wanted: str, info: dict[str, Any], folder: Path
) -> Source | None:
    """The source of a set of dataset_info.json; None, and the key refused, if there is none."""
    entry = info.get(wanted)
    if not isinstance(entry, dict):
        sheet.refuse(name, f"{wanted} is not in {INFO}; name its folder (dataset_dir)")
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
    file = folder / str(entry.get("file_name"))
    path = f"{hub}:{subset}:{split}" if hub and subset else str(hub or file)
    split = None if split == "train" or (hub and subset) else str(split)
    rows, most = None if hub else _rows_in(file), sheet.get("max_samples")
    if isinstance(most, int) and (rows is None or rows > most):
        known = "are not known" if rows is None else f"are {rows:,}"
        reason = n.REFUSED["max_samples"].reason
        sheet.refuse("max_samples", f"rows of {wanted} {known}; {reason}")
    return shape | {"path": path, "split": split}


def _rows_in(path: Path) -> int | None:
    """Number of rows of a json or jsonl file; None for others."""
    if path.suffix == ".jsonl" and path.is_file():
        return sum(bool(line.strip()) for line in path.read_bytes().splitlines())
    rows = read_json(path) if path.suffix == ".json" and path.is_file() else None
    return len(rows) if isinstance(rows, list) else None


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
