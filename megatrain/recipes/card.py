"""The model card of a finished run: README.md of `final/`, as the hub shows it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from os.path import expanduser  # leaves `~nobody` as it is, where Path's raises
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain.config import Config
from megatrain.config.sources import SourceOptions
from megatrain.methods import METHODS

if TYPE_CHECKING:
    from megatrain.recipes.loop import Run


def model_card(run: Run, losses: Mapping[str, float | None]) -> str:
    """Markdown with the hub's metadata. losses: held-out ones by name, None where there is none.

    Of local files only the names are told: a card is published.
    """
    config, anatomy, method = run.config, run.engine.anatomy, METHODS[run.config.method]
    base = public_name(config.model.source)
    metadata: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": method.task}
    if config.model.init == "pretrained" and not is_local(config.model.source):
        metadata["base_model"] = base
    metadata["tags"] = ["megatrain", config.method]
    start = (
        f"`{base}`" if config.model.init == "pretrained" else f"the shape of `{base}`, at random"
    )
    rows: dict[str, object] = {"data": public_name(config.data.train), "steps": f"{run.step:,}"}
    every = anatomy.parameters + anatomy.frozen_parameters
    rows |= {"tokens": f"{run.tokens:,}", "parameters": f"{every:,}"}
    rows |= {f"held-out loss {when}": f"{x:.4f}" for when, x in losses.items() if x is not None}
    rows |= settings_of(config, run.engine.precision)
    table = [f"| {name} | `{value}` |" for name, value in rows.items()]
    head = [f"{name}: {json.dumps(value)}" for name, value in metadata.items()]
    trained = "every parameter"
    if anatomy.frozen_parameters:
        trained = f"{anatomy.parameters:,} of its {every:,} parameters"
    words = f"{method.words.format(config.method)} {start}, with {trained}"
    title = f"# {printable(config.output.resolve().name)}"
    text = [title, "", f"{words} trained by MegaTrain.", "", "| | |", "|---|---|", *table]
    return "\n".join(["---", *head, "---", "", *text, ""])


def settings_of(config: Config, precision: str) -> dict[str, object]:
    train, optimizer = config.train, config.optimizer
    size = "tokens per step" if train.tokens_per_step else "rows per step"
    return {
        size: train.tokens_per_step or train.rows_per_step,
        "longest row": f"{train.seq_len} tokens",
        "learning rate": f"{train.learning_rate:g}, {train.schedule}",
        "optimizer": f"{optimizer.name}, weight decay {optimizer.weight_decay:g}",
        "precision": precision,
        "seed": train.seed,
    }


def public_name(source: object) -> str:
    """A source's name: of a local file or folder the last part of its path, of others all."""
    if isinstance(source, SourceOptions | Mapping):
        return public_name(source.path if isinstance(source, SourceOptions) else source["path"])
    if isinstance(source, list | tuple):
        return ", ".join(map(public_name, source))
    text = str(source)
    return printable(Path(text).name if is_local(text) else text)


def is_local(source: str) -> bool:
    """True unless it is the name of something on the hub."""
    path = Path(expanduser(source))
    return path.is_absolute() or path.exists()


def printable(text: str) -> str:
    """Without what would end the line or the code that the name stands in."""
    return "".join("?" if not c.isprintable() or c in "`|" else c for c in text)
