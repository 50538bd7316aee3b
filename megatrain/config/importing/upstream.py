"""Configs of the public MegaTrain repository (github.com/DLYuanGod/MegaTrain), whose keys are named
with their sections here: `training.batch_size`."""

from __future__ import annotations

from megatrain.config.importing.llama_factory import set_of
from megatrain.config.importing.shared import counts_of, put_sources
from megatrain.config.importing.sheet import Sheet, tables_of


def read(sheet: Sheet, gpus: int, method: str | None) -> None:
    """Decide of every key. gpus: have equal parts of a batch, whose size is for all."""
    for name, one in [*sheet.given.items()]:
        if isinstance(one.value, dict):
            sheet.open(name)
    sheet.put("method", method or "sft")
    batch, accumulated = "training.batch_size", "training.gradient_accumulation_steps"
    number = "training.num_steps"
    rows, times, steps = counts_of(sheet, (batch, 96), (accumulated, 1), (number, 100))
    sheet.put("train.rows_per_step", rows * times, batch, accumulated)
    sheet.put("train.max_steps", max(1, steps // times), number, accumulated)
    betas = ("optimizer.beta1", "optimizer.beta2")
    values = [sheet.get(name, value) for name, value in zip(betas, (0.9, 0.999), strict=True)]
    sheet.put("optimizer.betas", values, *betas)
    sheet.put("data.eval", None)
    if isinstance(devices := sheet.get("model.devices"), list):
        sheet.put("gpus", len(devices), "model.devices")
    every = "all" if sheet.get("dataset.train_on_prompt") else "assistant"
    sheet.put("data.train_on", every, "dataset.train_on_prompt")
    if name := sheet.get("dataset.name"):
        sheet.said |= {part: tables_of("llama-factory")[part] for part in ("columns", "tags")}
        if found := set_of(sheet, "dataset.name", str(name), "dataset.dataset_dir"):
            put_sources(sheet, "data.train", [found], "dataset.name")
    elif path := sheet.get("dataset.path"):
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
