"""The model card of a finished run: README.md of `final/`, as the hub shows it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from operator import attrgetter
from os.path import expanduser  # leaves `~nobody` as it is, where Path's raises
from pathlib import Path
from typing import Any

from megatrain.config import Config
from megatrain.config.document import plain, read_yaml
from megatrain.config.sections import SourceOptions
from megatrain.data.files import resolve_name
from megatrain.data.show import describe
from megatrain.errors import ConfigError, DataError
from megatrain.machine.hardware import GIB
from megatrain.methods import METHODS
from megatrain.models.pretrained import HUB_ID, cached_source
from megatrain.recipes.report import Reported
from megatrain.recipes.state import Run
from megatrain.reporting.metrics import History
from megatrain.reporting.words import human_seconds
from megatrain.storage.run_folder import CARD

HEAD = re.compile(r"---\r?\n(.*?\n)---\s*(?:\n|$)", re.DOTALL)  # of a card: YAML
LICENSE = ("license", "license_name", "license_link")
VERSIONS = ("megatrain", "torch", "transformers")
SETTINGS = (  # keys that a card tells
    *("train.tokens_per_step", "train.rows_per_step", "train.seq_len", "train.learning_rate"),
    *("train.schedule", "train.max_grad_norm", "train.seed"),
    *("optimizer.name", "optimizer.weight_decay"),
)


def model_card(run: Run) -> str:
    """Markdown with the hub's metadata, from the run and its folder. A card is published: of local
    files it has the names only."""
    config, anatomy, method = run.config, run.engine.anatomy, METHODS[run.config.method]
    every = anatomy.parameters + anatomy.frozen_parameters
    base = f"`{public_name(config.model.source)}`"
    start = base if config.model.init == "pretrained" else f"the shape of {base}, at random"
    frozen = anatomy.frozen_parameters
    trained = f"{anatomy.parameters:,} of its {every:,} parameters" if frozen else "every parameter"
    words = f"{method.words.format(config.method)} {start}, with {trained} trained by MegaTrain."
    settings, found = {"method": config.method, "parameters": f"{every:,}"}, Reported(config.output)
    text = [
        *("---", metadata_of(config), "---", ""),
        *(f"# `{in_a_cell(config.output.resolve().name)}`", "", words),
        *_table("Data", data_of(run)),
        *_held_out(found.history),
        *_table("Settings", settings | settings_of(config, run.engine.precision)),
        *_table("Training", training_of(run, found)),
    ]
    return "\n".join([*text, ""])


def metadata_of(config: Config) -> str:
    """The head of the card, as the hub wants it: YAML without a last line end."""
    from huggingface_hub import ModelCardData

    named: dict[str, Any] = {}
    if config.model.init == "pretrained":
        named |= license_of(config.model.source, config.model.revision)
        named["base_model"] = hub_name(config.model.source)
    datasets = filter(None, (hub_name(one.path) for one in config.data.train))
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag=METHODS[config.method].task,
        tags=["megatrain", config.method],
        datasets=[*dict.fromkeys(datasets)] or None,
        **named,
    )
    return data.to_yaml().strip()


def license_of(source: str, revision: str | None = None) -> dict[str, str]:
    """The license in the model card of the base, as far as that is on this machine."""
    folder = Path(expanduser(source))
    if hub_name(source):
        cached = cached_source(source, revision)
        folder = folder if cached is None else cached.path
    try:
        head = HEAD.match((folder / CARD).read_text(encoding="utf-8", errors="replace"))
        found = plain(read_yaml(head[1], CARD)) if head else None
    except (OSError, ConfigError):  # there is none, or it is of no use
        return {}
    found = found if isinstance(found, dict) else {}
    return {name: value for name in LICENSE if isinstance(value := found.get(name), str)}


def data_of(run: Run) -> dict[str, object]:
    """Names, rows and tokens of what was trained on and evaluated on."""
    data = run.config.data
    rows: dict[str, object] = {"trained on": public_name(data.train)}
    rows["rows"] = run.loader.used() or describe(run.loader.rows)[0]
    if run.held_out is not None:
        own = isinstance(data.eval, tuple)
        rows["held out"] = public_name(data.eval) if own else "of these, and not trained on"
        rows["held-out rows"] = describe(run.held_out)[0]
    return rows


def _held_out(history: History) -> list[str]:
    """The figures of the first and the last evaluation that has them; nothing without one."""
    found = {name: line.values for name, line in history.lines.items() if name.startswith("eval_")}
    lines = [f"| {in_a_cell(name)} | {v[0]:.4f} | {v[-1]:.4f} |" for name, v in found.items()]
    return ["", "## Evaluation", "", "| | first | last |", "|---|---|---|", *lines] * bool(found)


def settings_of(config: Config, precision: str) -> dict[str, object]:
    found = {key: attrgetter(key)(config) for key in SETTINGS} | {"precision": precision}
    of_method = {**config.of_method}
    if (teacher := of_method.get("teacher_model_name_or_path")) is not None:
        of_method["teacher_model_name_or_path"] = public_name(teacher)
    found |= {f"{config.method}.{name}": one for name, one in sorted(of_method.items())}
    return {key: value for key, value in found.items() if value is not None}


def training_of(run: Run, found: Reported) -> dict[str, object]:
    """Steps, tokens and time of the run, hardware and versions of its last process."""
    hardware, packages = (found.environment.get(name) or {} for name in ("hardware", "packages"))
    gpu = (hardware.get("gpu") or {}).get("name", "no GPU")
    ram = hardware.get("host_total_bytes", 0) / GIB
    versions = [f"{name} {packages[name]}" for name in VERSIONS if name in packages]
    return {
        "steps": f"{run.step:,}",
        "tokens": f"{run.tokens:,}",
        "time": f"{human_seconds(found.history.totals['step_s'])} in steps",
        "hardware": f"{gpu}, {hardware.get('physical_cores')} cores, {ram:.0f} GiB of RAM",
        "versions": ", ".join([f"Python {found.environment.get('python')}", *versions]),
    }


def _table(title: str, rows: Mapping[str, object]) -> list[str]:
    lines = (f"| {name} | `{in_a_cell(str(value))}` |" for name, value in rows.items())
    return ["", f"## {title}", "", "| | |", "|---|---|", *lines]


def public_name(source: object) -> str:
    """Name of a source on the hub, or the last part of a local path."""
    if isinstance(source, SourceOptions | Mapping):
        return public_name(source.path if isinstance(source, SourceOptions) else source["path"])
    if isinstance(source, list | tuple):
        return ", ".join(map(public_name, source))
    text = str(source)
    return in_a_cell(text if hub_name(text) else Path(text).name)


def hub_name(source: str) -> str | None:
    """Name of a source on the hub, without config and split; None: it is on this machine."""
    try:
        named = resolve_name(source)
    except (DataError, OSError):  # no data, such as a GGUF file, or gone
        return None
    return named.name if not named.paths and HUB_ID.fullmatch(named.name) else None


def in_a_cell(text: str) -> str:
    """Replace what would end the line, or the code, that a name stands in."""
    return "".join("?" if not c.isprintable() or c in "`|" else c for c in text)
