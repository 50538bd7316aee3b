"""Configs of the public MegaTrain repository (github.com/DLYuanGod/MegaTrain), whose keys are named
with their sections here: `training.batch_size`."""

from __future__ import annotations

from collections.abc import Mapping

from megatrain.config.document import Located
from megatrain.config.importing.llama_factory import info_of, set_of
from megatrain.config.importing.shared import put_sources
from megatrain.config.importing.sheet import Sheet, tables_of


def flattened(given: Mapping[str, Located]) -> dict[str, Located]:
    """The keys of all sections, and those that are none."""
    flat: dict[str, Located] = {}
    for name, one in given.items():
        if isinstance(one.value, dict):
            flat |= {f"{name}.{key}": Located(v, one.place) for key, v in one.value.items()}
        else:
            flat[name] = one
    return flat


def read(sheet: Sheet, gpus: int, method: str | None) -> None:
    """Decide of every key. gpus: have equal parts of a batch, whose size is for all."""
    sheet.put("method", method or "sft")
    names = ("training.batch_size", "training.gradient_accumulation_steps")
    rows, times, steps = sheet.get(names[0], 96), sheet.get(names[1], 1), "training.num_steps"
    if not all(isinstance(one, int) and one > 0 for one in (rows, times, sheet.get(steps, 100))):
        for name in (*names, steps):
            sheet.refuse(name, "batches, their number and that of steps must be whole numbers")
    else:
        sheet.put("train.rows_per_step", rows * times, *names)
        sheet.put("train.max_steps", max(1, sheet.get(steps, 100) // times), steps, names[1])
    for ours, (theirs, default) in sheet.said["values"].items():
        sheet.put(ours, sheet.get(theirs, default), theirs)
    betas = ("optimizer.beta1", "optimizer.beta2")
    pairs = zip(betas, (0.9, 0.999), strict=True)
    sheet.put("optimizer.betas", [sheet.get(name, value) for name, value in pairs], *betas)
    sheet.put("train.schedule", "constant")
    sheet.put("train.warmup", 0.0)
    if isinstance(devices := sheet.get("model.devices"), list):
        sheet.put("gpus", len(devices), "model.devices")
    every = "all" if sheet.get("dataset.train_on_prompt") else "assistant"
    sheet.put("data.train_on", every, "dataset.train_on_prompt")
    sheet.put("data.truncation_mode", "context")
    sheet.put("data.eval", None)
    name, path = sheet.get("dataset.name"), sheet.get("dataset.path")
    if name:
        sheet.said |= {part: tables_of("llama-factory")[part] for part in ("columns", "tags")}
        found = set_of(sheet, "dataset.name", str(name), *info_of(sheet, "dataset.dataset_dir"))
        put_sources(sheet, "data.train", [found] if found else [], "dataset.name")
    elif path:
        fields = {"prompt": "dataset.query_field", "completion": "dataset.response_field"}
        columns = {ours: sheet.get(theirs, theirs[8:-6]) for ours, theirs in fields.items()}
        source = {"path": str(path), "format": "prompt_completion", "columns": columns}
        put_sources(sheet, "data.train", [source], "dataset.path", *fields.values())
        sheet.put("data.prompts", "chat")
    sheet.assume(
        "rows are shuffled by train.seed, and every answer of a conversation is trained on"
    )
    sheet.assume("norms and biases are not decayed")
    sheet.finish({})
