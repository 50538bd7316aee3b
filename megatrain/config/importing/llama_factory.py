"""Configs of LLaMA-Factory, with the data sets of its dataset_info.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatrain.config import names as n
from megatrain.config.importing import shared
from megatrain.config.importing.shared import KNOWN_ROLES, Source, put_sources, read_json, turns
from megatrain.config.importing.sheet import Sheet

OF_LOSS = ("orpo", "simpo")
INFO = "dataset_info.json"


def read(sheet: Sheet, gpus: int, method: str | None) -> None:
    """Decide of every key."""
    stage, loss = str(sheet.get("stage", "sft")), str(sheet.get("pref_loss", "sigmoid"))
    found = shared.method_of(sheet, "stage", "sft")
    of_loss = loss in OF_LOSS
    method = method or (loss if found == "dpo" and of_loss else found)
    sheet.put("method", method, "stage", *(["pref_loss"] if of_loss else []))
    kind = sheet.get("finetuning_type", "lora")
    if kind != "full":
        why = "parts of layers by their number" if kind == "freeze" else "adapters are not built"
        sheet.refuse("finetuning_type", f"{kind}: {why}; finetuning_type: full is what trains here")
    if sheet.get("train_from_scratch"):
        sheet.put("model.config", sheet.get("model_name_or_path"), "model_name_or_path")
        sheet.put("model.init", "random", "train_from_scratch")
    packing = [name for name in ("packing", "neat_packing") if sheet.get(name)]
    texts = ["stage"] if stage == "pt" and sheet.get("packing") is None else []
    shared.arguments(sheet, gpus, packing or texts)
    if method == "sft" and (packing or sheet.get("packing") is False):
        sheet.put("data.packing", bool(packing), *packing, "packing")
    if packing == ["packing"] and method == "sft":
        sheet.assume("packing: rows of one sequence do not see each other here (neat_packing)")
    _data(sheet, method)
    shared.of_method(sheet, **({} if of_loss else {"loss_type": "pref_loss"}))
    sheet.finish(shared.RULES)


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
        shared.template(sheet, "template")
    if sheet.get("eval_dataset") is None:
        shared.held_out(sheet, "val_size")
    info, folder = info_of(sheet)
    for name, key in (("dataset", "data.train"), ("eval_dataset", "data.eval")):
        given = sheet.get(name, [])
        sets = given.split(",") if isinstance(given, str) else given
        if not isinstance(sets, list):
            sheet.refuse(name, "must be a text or a list")
            sets = []
        each = [set_of(sheet, name, str(one).strip(), info, folder) for one in sets]
        put_sources(sheet, key, [one for one in each if one], name)
        if len(each) > 1 and name == "dataset" and sheet.get("mix_strategy", "concat") != "concat":
            reason = "sets follow each other; give each of data.train a weight"
            sheet.refuse("mix_strategy", reason)
    sheet.drop("sets follow each other", "mix_strategy", "interleave_probs")


def info_of(sheet: Sheet, key: str = "dataset_dir") -> tuple[dict[str, Any], Path]:
    """dataset_info.json and its folder: the key's, here or above the file, or beside the file."""
    named = Path(str(sheet.get(key, "data")))
    folders = [named, *(above / named for above in (sheet.folder, *sheet.folder.parents))]
    for folder in [*folders, sheet.folder]:
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
    if media := [kind for kind in ("videos", "audios") if columns.get(kind)]:
        sheet.refuse(name, f"{wanted} has {', '.join(media)}; only texts and images are read")
    shape, roles = _shape(sheet, entry, columns, tags), sheet.said["tags"].items()
    if shape is None or any(KNOWN_ROLES.get(tags.get(tag, role)) != role for tag, role in roles):
        sheet.refuse(name, f"{wanted}: roles or turns of other names; known are {[*KNOWN_ROLES]}")
        return None
    if entry.get("num_samples"):
        sheet.refuse(name, f"{wanted}: num_samples draws some rows; write a file of them")
    split = None if entry.get("split", "train") == "train" else str(entry["split"])
    hub, subset = entry.get("hf_hub_url"), entry.get("subset")
    file = folder / str(entry.get("file_name"))
    if hub and subset:
        shape |= {"path": f"{hub}:{subset}:{split or 'train'}"}
    elif hub or "file_name" in entry:
        shape |= {"path": str(hub or file), "split": split}
    else:
        sheet.refuse(name, f"{wanted} is run by a script or lies elsewhere; download its rows")
        return None
    rows = None if hub else _rows_in(file)
    most = sheet.get("max_samples")
    if isinstance(most, int) and (rows is None or rows > most):
        known = "are not known" if rows is None else f"are {rows:,}"
        reason = n.REFUSED["max_samples"].reason
        sheet.refuse("max_samples", f"rows of {wanted} {known}; {reason}")
    return shape


def _rows_in(path: Path) -> int | None:
    """Number of rows of a json or jsonl file; None for others."""
    if path.suffix == ".jsonl" and path.is_file():
        return sum(bool(line.strip()) for line in path.read_bytes().splitlines())
    rows = read_json(path) if path.suffix == ".json" and path.is_file() else None
    return len(rows) if isinstance(rows, list) else None


def _shape(
    sheet: Sheet, entry: dict[str, Any], columns: dict[str, str], tags: dict[str, str]
) -> Source | None:
    """Format, columns (ours by theirs) and text column of a set; None for unknown turns."""
    if sheet.config["method"] == "pretrain":
        text = columns.get("prompt", "text")
        return {"format": "text", "text_field": None if text == "text" else text}
    form, ranking = entry.get("formatting", "alpaca"), bool(entry.get("ranking"))
    ours = sheet.said["columns"] if form == "alpaca" else {"kto_tag": "label"}
    named = {ours.get(name, name): one for name, one in columns.items()}
    if form == "alpaca":
        name = "alpaca_ranking" if ranking else "alpaca"
    else:
        column, role, content = named.pop("messages", "conversations"), "from", "value"
        role, content = tags.get("role_tag", role), tags.get("content_tag", content)
        if form == "openai":
            column, role, content = columns.get("messages", "messages"), "role", "content"
        found = turns(column, role, content)
        if found is None:
            return None
        name, of_turns = found
        if ranking:
            name, of_turns = "ranking", {"conversations": column}
        named |= of_turns
    return {"format": name, "columns": {k: v for k, v in named.items() if k != v}}
