"""Rules that several trainers share: transformers' TrainingArguments, chat templates, sources."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatrain.config import names as n
from megatrain.config.importing.sheet import NOTHING_ASKED, Sheet, Table
from megatrain.config.load import SECTIONS
from megatrain.config.values import TRACKERS, shown
from megatrain.data.samples import ROLES, SHAREGPT_ROLES
from megatrain.errors import ConfigError

LOADERS = ("json", "csv", "parquet", "text", "arrow")  # of `datasets`, in the place of a path
KNOWN_ROLES = {**ROLES, **SHAREGPT_ROLES}
OFTEN: dict[str, tuple[str, int, tuple[str, ...]]] = {  # our key, its default, names of theirs
    "eval": ("train.eval_every", 100, n.STRATEGIES),
    "save": ("checkpoint.every", 200, ("save_strategy",)),
    "logging": ("train.log_every", 1, ("logging_strategy",)),
}
# Moments in 8 bits, or in 4. `paged_` before a name moves state to host RAM, where ours is.
FEW_BITS = {
    **n.of_each("adamw_bnb_8bit adamw_8bit adamw_torch_8bit adamw_torch_4bit", "adamw"),
    "lion_8bit": "lion",
}
ONE_METHOD = "belongs to another method"

Source = dict[str, Any]  # path, split, format, weight; columns and text_field hold for all of a run


def arguments(sheet: Sheet, gpus: int, packed: Sequence[str], **other: Any) -> None:
    """Read the training arguments.

    Args:
        packed: names of the keys by which rows are full sequences, if they are.
        other: what differs from `training` in the trainer's tables: `rows` (of a device), `length`
            (of the longest row), `epochs` and `schedule`, each their name and its default; and
            defaults: `rate`, `warmup`, `precision` (none: auto), `save_steps`, `logging_steps`.
    """
    said = sheet.said["training"] | other
    _size_of_steps(sheet, said["rows"], said["length"], packed, gpus)
    steps, epochs = sheet.get("max_steps", -1), said["epochs"]
    if isinstance(steps, int) and steps > 0:
        sheet.put("train.max_steps", steps, "max_steps")
        sheet.drop("max_steps ends the run", epochs[0])
    else:
        sheet.put("train.epochs", sheet.get(*epochs), epochs[0])
        sheet.drop("epochs end the run", "max_steps")
    rate = sheet.get("learning_rate", said["rate"])
    sheet.put("train.learning_rate", rate, "learning_rate")
    schedule = said["schedule"]
    _schedule(sheet, schedule[0], sheet.get(*schedule), said.get("warmup", 0.0))
    _optimizer(sheet, said.get("optimizer", "optim"))
    _precision(sheet, said.get("precision"))
    sheet.put("train.seed", sheet.get("seed", 42), "seed")
    for what in OFTEN:
        _how_often(sheet, what, said.get(f"{what}_steps"))
    reports = sheet.get("report_to", [])
    reports = [str(name) for name in (reports if isinstance(reports, list) else [reports])]
    if known := [name for name in dict.fromkeys(reports) if name in TRACKERS]:
        sheet.put("track", known, "report_to")
    nothing = NOTHING_ASKED if reports in ([], ["none"]) else n.REFUSED["mlflow_*"].reason
    sheet.drop(nothing, "report_to")


def method_of(sheet: Sheet, name: str, otherwise: str) -> str:
    """The method by the value of their key, which is refused if it is another."""
    methods, asked = sheet.said["methods"], str(sheet.get(name, otherwise))
    if asked not in methods and asked != otherwise:
        sheet.refuse(name, f"{asked} is not imported; known are {', '.join(methods)}")
    return str(methods.get(asked, otherwise))


def _size_of_steps(
    sheet: Sheet, rows: list[Any], length: list[Any], packed: Sequence[str], gpus: int
) -> None:
    """Rows or tokens of a step: rows a device x accumulated batches x processes."""
    a_device, times, tokens = counts_of(sheet, rows, ("gradient_accumulation_steps", 1), length)
    sheet.put("train.seq_len", tokens, length[0])
    names, total = [rows[0], "gradient_accumulation_steps"], a_device * times * gpus
    words = f"{a_device} x {times} accumulated x {gpus} process{'es' * (gpus > 1)}"
    if packed:
        note = f"{words} x {tokens:,} tokens"
        sheet.put("train.tokens_per_step", total * tokens, *names, length[0], *packed, note=note)
    else:
        sheet.put("train.rows_per_step", total, *names, note=words)


def counts_of(sheet: Sheet, *given: Sequence[Any]) -> list[int]:
    """Values of keys, each a name and its default; what is no count is refused."""
    counts = []
    for name, default in given:
        value = sheet.get(name, default)
        if type(value) is not int or value < 1:
            sheet.refuse(name, f"must be a whole number of at least 1, not {shown(value)}")
            value = default
        counts.append(value)
    return counts


def _schedule(sheet: Sheet, name: str, kind: Any, warmup: float) -> None:
    more = sheet.get("lr_scheduler_kwargs", {})
    more = dict(more) if isinstance(more, dict) else {"": more}
    if kind == "cosine_with_min_lr":
        floor, least = more.pop("min_lr_rate", None), more.pop("min_lr", None)
        rate = sheet.get("learning_rate")
        if floor is None and isinstance(least, float | int) and isinstance(rate, float | int):
            floor = least / rate
        sheet.put("train.min_lr_ratio", floor, "lr_scheduler_kwargs")
        kind = "cosine"
    sheet.follow(name, kind, n.ALIASES["lr_scheduler"])
    if more:
        sheet.refuse("lr_scheduler_kwargs", n.REFUSED["lr_scheduler_kwargs"].reason)
    steps, share = sheet.get("warmup_steps"), sheet.get("warmup_ratio")
    if kind == "constant":
        sheet.put("train.warmup", 0.0, note="constant has no warm-up")
    else:
        by_steps = steps or share is None
        value = share if not by_steps else warmup if steps is None else steps
        note = "step i of w has i/w of the rate, where transformers begins at 0" if value else ""
        sheet.put("train.warmup", value, "warmup_steps" if by_steps else "warmup_ratio", note=note)
    sheet.drop(sheet.origins.get("train.warmup", ""), "warmup_steps", "warmup_ratio")


def _optimizer(sheet: Sheet, name: str) -> None:
    """The optimizer, its moments' type and its betas; theirs are AdamW's for Lion, too."""
    kind = str(sheet.get(name, "adamw_torch")).removeprefix("paged_")
    if kind == "muon":
        reason = "set optimizer.name: muon and its keys yourself"
        sheet.refuse(name, f"scales its rates otherwise here; {reason}")
    elif kind in FEW_BITS:
        sheet.put("optimizer.name", FEW_BITS[kind], name)
        sheet.put("optimizer.moments", "int8", name)
        sheet.assume(
            f"{name}: moments of few bits are int8 with stochastic rounding here, not the same bits"
        )
    else:
        sheet.follow(name, kind.replace("adamw_32bit", "adamw"), n.ALIASES["optim"])
    lion, names = sheet.config.get("optimizer.name") == "lion", ("adam_beta1", "adam_beta2")
    if lion or any(sheet.get(beta) is not None for beta in names):
        pairs = zip(names, n.ADAM_BETAS, strict=True)
        sheet.put("optimizer.betas", [sheet.get(beta, value) for beta, value in pairs], *names)
    if lion:
        sheet.drop("lion has no epsilon", "adam_epsilon")


def _precision(sheet: Sheet, default: str | None) -> None:
    """bf16 and fp8; the type that weights are read in does not count."""
    halves = [name for name in ("fp16", "float16", "half") if sheet.get(name)]
    if sheet.get("fp8"):
        sheet.put("precision", "fp8", "fp8")
    elif halves:
        sheet.drop(n.REFUSED["fp16"].reason, *halves)
        sheet.assume(f"{halves[0]}: computed in bfloat16, or in float32 where that is slow")
    elif sheet.get("pure_bf16"):
        sheet.put("precision", "bfloat16", "pure_bf16")
        sheet.assume("pure_bf16: weights and moments are fp32 here, the computing is bf16")
    elif sheet.get("bf16") is not None:
        sheet.follow("bf16", sheet.get("bf16"), n.ALIASES["bf16"])
    elif default is not None:
        sheet.put("precision", default)
    sheet.drop("fp8, fp16 or pure_bf16 goes before", "bf16")
    types = ("dtype", "torch_dtype", "pure_bf16", "bfloat16")
    sheet.drop("computed over fp32 master weights, in whatever type they are read", *types)


def _how_often(sheet: Sheet, what: str, default: int | None) -> None:
    """Every so many steps, where they count steps. what: eval, save or logging."""
    (key, ours, strategies), name = OFTEN[what], f"{what}_steps"
    strategy = next((v for one in strategies if (v := sheet.get(one)) is not None), "steps")
    every = sheet.get(name, default)
    if strategy in ("no", False):
        if what == "save":
            sheet.put(key, None, *strategies)
        sheet.drop(f"{strategies[0]} says no", *strategies, name)
    elif strategy == "epoch" and what != "logging":
        sheet.put(key, "epoch", *strategies)
        sheet.drop(f"{strategies[0]} says epoch", name)
    elif strategy == "steps" and isinstance(every, int) and every >= 1:
        sheet.put(key, every, name)
        sheet.drop(NOTHING_ASKED, *strategies)
    offered = f"only counting steps or epochs is offered: {key} ({ours} unless set)"
    sheet.drop(offered, *strategies, name)


def of_method(sheet: Sheet, **other: str) -> None:
    """Keys of the method's own section. other: names of theirs that differ from `section` in the
    trainer's tables, by ours."""
    method, names = sheet.config["method"], sheet.said["section"] | other
    own = SECTIONS.get(method, ())
    if method == "simpo" and sheet.get(names["beta"]) is None:
        sheet.put("simpo.beta", 0.1)
    for ours, theirs in names.items():
        value = sheet.get(theirs)
        if ours in own and value is not None:
            sheet.put(f"{method}.{ours}", value, theirs)
        if theirs != "loss_type":  # which all methods of TRL have
            sheet.drop(ONE_METHOD, theirs)


def held_out(sheet: Sheet, name: str) -> None:
    """Set data.eval by their share or number of rows."""
    size = sheet.get(name, 0)
    share = int(size) if isinstance(size, float) and size >= 1 else size
    sheet.put("data.eval", share or None, name)


def template(sheet: Sheet, name: str) -> None:
    """A chat template by their name, as text or of a file. By `templates` in the trainer's tables
    they are ours of the same names, and others are taken for the model's own; without these, names
    are refused."""
    value, known = sheet.get(name), sheet.said.get("templates", "").split()
    if not isinstance(value, str):
        sheet.refuse(name, "must be a template's name, its text or a file")
        return
    files = [] if len(value) > 255 else [Path(value), sheet.folder / value]
    found = next((str(file) for file in files if file.is_file()), None)
    if "{%" in value:
        sheet.files["chat_template.jinja"] = value
        sheet.put("data.chat_template", "chat_template.jinja", name)
    elif value in known or found:
        sheet.put("data.chat_template", value if value in known else found, name)
    elif not known:
        sheet.refuse(name, "another model's; save it as a file and name that")
    else:
        sheet.put("data.chat_template", None, name)
        if value != "tokenizer_default":
            sheet.assume(
                f"{name}: {value}: the model's own chat template is used, which may differ from "
                f"{sheet.trainer}'s in its system prompt or in white space; "
                "`megatrain data` shows it"
            )


def put_sources(sheet: Sheet, key: str, found: Sequence[Source], *names: str) -> None:
    """Set data.train or data.eval, and the columns of all sources."""
    if not found:
        sheet.drop("of a set that cannot be read", *names)
        return
    of_one = ("path", "weight", "split", "format")
    short = [{name: one[name] for name in of_one if one.get(name) is not None} for one in found]
    entries = [one["path"] if len(one) == 1 else one for one in short]
    sheet.put(key, entries[0] if len(entries) == 1 else entries, *names)
    for ours in ("columns", "text_field"):
        every = [one.get(ours) or None for one in found]
        if any(one != every[0] for one in every):
            reason = f"data.{ours} is one for all sources, and these differ in it"
            sheet.refuse(names[0], f"{reason}; rename columns in the files")
        elif every[0]:
            sheet.put(f"data.{ours}", every[0], *names)


def paths_of(sheet: Sheet, at: str, given: Mapping[str, Any]) -> list[Source]:
    """Files or a set of the hub, of their path, data_files, split and name, a configuration. at:
    how the names of these keys begin."""
    path, split, files = str(given.get("path") or ""), given.get("split"), given.get("data_files")
    files = [] if files is None else files if isinstance(files, list) else [files]
    if path in LOADERS or (not path and files):
        paths = [str(file) for file in files]
    elif files and Path(path).is_dir():
        paths = [f"{path}/{file}" for file in files]
    else:
        paths = [path]
        if files:
            sheet.refuse(f"{at}data_files", "one file of a set of the hub; download and name it")
    split = None if split == "train" else split
    if any(Path(one).is_file() for one in paths) or path in LOADERS:
        if split is not None:
            sheet.refuse(f"{at}split", "a file has no splits; name a file of these rows")
        return [{"path": one} for one in paths]
    if (named := given.get("name")) not in (None, "default"):
        return [{"path": f"{path}:{named}:{split or 'train'}"}]
    return [{"path": one, "split": split} for one in paths]


def turns(field: str, role: str, content: str) -> tuple[str, dict[str, str]] | None:
    """(format, columns) of rows whose conversations lie in a column, or None for unknown turns."""
    if (role, content) not in (("role", "content"), ("from", "value")):
        return None
    if role == "role" and field != "conversations":
        return "messages", {} if field == "messages" else {"messages": field}
    return "sharegpt", {} if field == "conversations" else {"conversations": field}


def read_json(path: Path) -> Any:
    """Read a JSON file. Raises ConfigError for one that is broken."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from None


def _only(key: str, nothing: object) -> n.Alias:
    """A name of our key, one value of which asks for nothing."""
    return n.Alias(tuple(key.split(".")), lambda value: n.NOTHING if value == nothing else value)


RULES: Table = {
    "max_grad_norm": n.Alias(("train", "max_grad_norm"), lambda norm: None if norm == 0 else norm),
    "save_total_limit": _only("checkpoint.keep", 0),
    "dataset_text_field": _only("data.text_field", "text"),
    **n.of_each("model_revision revision", _only("model.revision", "main")),
}
