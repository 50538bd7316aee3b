"""Rules that several trainers share: transformers' TrainingArguments, chat templates, sources."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatrain.config import names as n
from megatrain.config.importing.sheet import NOTHING_ASKED, Sheet
from megatrain.config.load import SECTIONS
from megatrain.config.values import TRACKERS, shown
from megatrain.data.samples import ROLES, SHAREGPT_ROLES

LOADERS = ("json", "csv", "parquet", "text", "arrow")  # of `datasets`, in the place of a path
KNOWN_ROLES = {**ROLES, **SHAREGPT_ROLES}

NO_ROWS = "names no rows; say their path"
Source = dict[str, Any]  # path, split, format, weight; columns and text_field hold for all of a run


def arguments(sheet: Sheet, gpus: int, texts: str = "", length: list[Any] | None = None) -> None:
    """Read the training arguments, as `training` in the trainer's tables names them.

    Args:
        texts: name of the key by which rows are full sequences, packed or not, if they are.
        length: name and default of the longest row in tokens, and keys of which that is made.
    """
    said, method = sheet.said["training"], sheet.config["method"]
    flags = said["packing"].split()
    packed = [name for name in flags if sheet.get(name)] or texts.split()
    if method == "sft" and any(sheet.get(name) is not None for name in flags):
        sheet.put("data.packing", sheet.get(packed[0]) if packed else False, *flags)
    if method == "sft" and "inputs" in said:
        every = "all" if sheet.get(said["inputs"]) else "assistant"
        sheet.put("data.train_on", every, said["inputs"])
    size, *sets = said.get("held_out", ["", ""])
    if size and not any(sheet.get(name) for name in sets):
        share = sheet.get(size, 0)
        rounded = int(share) if isinstance(share, float) and share >= 1 else share
        sheet.put("data.eval", rounded or None, size)
    rows, accumulation = said["rows"], "gradient_accumulation_steps"
    row, default, *parts = length or said["length"]
    a_device, times, tokens = counts_of(sheet, rows, (accumulation, 1), (row, default))
    sheet.put("train.seq_len", tokens, row, *parts)
    total, words = a_device * times * gpus, f"{a_device} x {times} accumulated x {gpus} process"
    note, names = f"{words}{'es' * (gpus > 1)}", [rows[0], accumulation]
    if packed:
        note = f"{note} x {tokens:,} tokens"
        sheet.put("train.tokens_per_step", total * tokens, *names, row, *packed, note=note)
    else:
        sheet.put("train.rows_per_step", total, *names, note=note)
    steps, epochs = sheet.get("max_steps", -1), said["epochs"]
    if isinstance(steps, int) and steps > 0:
        sheet.put("train.max_steps", steps, "max_steps")
        sheet.drop("max_steps ends the run", epochs[0])
    else:
        sheet.put("train.epochs", sheet.get(*epochs), epochs[0])
        sheet.drop("epochs end the run", "max_steps")
    if sheet.get("max_grad_norm") == 0:
        sheet.put("train.max_grad_norm", None, "max_grad_norm")
    _schedule(sheet, said["schedule"], said.get("warmup", 0.0))
    _optimizer(sheet, said.get("optimizer", "optim"))
    _precision(sheet, said.get("precision"))
    for name in sheet.said["often"]:
        _how_often(sheet, name, said.get(name))
    reports = sheet.get("report_to", [])
    reports = [str(name) for name in (reports if isinstance(reports, list) else [reports])]
    if known := [name for name in dict.fromkeys(reports) if name in TRACKERS]:
        sheet.put("track", known, "report_to")


def method_of(sheet: Sheet, name: str, otherwise: str) -> str:
    """The method by the value of their key, which is refused if it is another."""
    methods, asked = sheet.said["methods"], str(sheet.get(name, otherwise))
    if asked not in methods and asked != otherwise:
        sheet.refuse(name, f"{asked} is not imported; known are {', '.join(methods)}")
    return str(methods.get(asked, otherwise))


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


def _schedule(sheet: Sheet, given: Sequence[Any], warmup: float) -> None:
    """The schedule, of which `given` are name and default, and its warm-up."""
    name, kind, more = given[0], sheet.get(*given), sheet.get("lr_scheduler_kwargs")
    match kind, more, sheet.get("learning_rate"):  # of both, or of more, none is known
        case "cosine_with_min_lr", {"min_lr_rate": floor}, _ if len(more) == 1:
            kind = "cosine"
            sheet.put("train.min_lr_ratio", floor, "lr_scheduler_kwargs")
        case "cosine_with_min_lr", {"min_lr": float(least)}, float(rate) if rate and len(more) == 1:
            kind = "cosine"
            sheet.put("train.min_lr_ratio", least / rate, "lr_scheduler_kwargs")
    sheet.follow(name, kind, n.ALIASES["lr_scheduler"])
    share, steps = sheet.get("warmup_ratio"), sheet.get("warmup_steps", warmup)
    if kind == "constant":
        sheet.put("train.warmup", 0.0, note="constant has no warm-up")
    else:
        by_share = share is not None and not sheet.get("warmup_steps")
        name, value = ("warmup_ratio", share) if by_share else ("warmup_steps", steps)
        note = "step i of w has i/w of the rate, where transformers begins at 0" if value else ""
        sheet.put("train.warmup", value, name, note=note)
    sheet.drop(sheet.origins.get("train.warmup", ""), "warmup_steps", "warmup_ratio")


def _optimizer(sheet: Sheet, name: str) -> None:
    """The optimizer, its moments' type and its betas; theirs are AdamW's for Lion, too."""
    kind = str(sheet.get(name, "adamw_torch")).removeprefix("paged_")
    if kind == "muon":
        sheet.refuse(name, "scales its rates otherwise here; set optimizer.name and its keys")
    elif kind in sheet.said["few_bits"]:
        sheet.put("optimizer.name", sheet.said["few_bits"][kind], name)
        sheet.put("optimizer.moments", "int8", name)
        sheet.assume(
            f"{name}: moments of few bits are int8 with stochastic rounding here, not the same bits"
        )
    else:
        sheet.follow(name, kind.replace("adamw_32bit", "adamw"), n.ALIASES["optim"])
    lion, betas = sheet.config.get("optimizer.name") == "lion", ("adam_beta1", "adam_beta2")
    if lion or any(sheet.get(beta) is not None for beta in betas):
        values = [sheet.get(*pair) for pair in zip(betas, n.ADAM_BETAS, strict=True)]
        sheet.put("optimizer.betas", values, *betas)
    if lion:
        sheet.drop("lion has no epsilon", "adam_epsilon")


def _precision(sheet: Sheet, default: str | None) -> None:
    """bf16 and fp8; the type that weights are read in does not count."""
    asked = ("fp8", "fp16", "float16", "half", "pure_bf16")
    match next((name for name in asked if sheet.get(name)), None):
        case "fp8":
            sheet.put("precision", "fp8", "fp8")
        case "pure_bf16":
            sheet.put("precision", "bfloat16", "pure_bf16")
            sheet.assume("pure_bf16: weights and moments are fp32 here, the computing is bf16")
        case str(half):
            sheet.assume(f"{half}: computed in bfloat16, or in float32 where that is slow")
        case None if sheet.get("bf16") is not None:
            sheet.follow("bf16", sheet.get("bf16"), n.ALIASES["bf16"])
        case None if default is not None:
            sheet.put("precision", default)
    sheet.drop("fp8, fp16 or pure_bf16 goes before", "bf16")


def _how_often(sheet: Sheet, name: str, default: int | None) -> None:
    """Every so many steps, where they count steps. name: of the key that has their number."""
    key, *strategies = sheet.said["often"][name]
    strategy = next((v for one in strategies if (v := sheet.get(one)) is not None), "steps")
    every = sheet.get(name, default)
    if strategy in ("no", False) and name == "save_steps":
        sheet.put(key, None, *strategies)
    elif strategy == "epoch" and name != "logging_steps":
        sheet.put(key, "epoch", *strategies)
    elif strategy == "steps" and isinstance(every, int) and every >= 1:
        sheet.put(key, every, name)
        sheet.drop(NOTHING_ASKED, *strategies)
    sheet.drop(f"{key} counts steps, or epochs, and stays as it is", *strategies, name)


def of_method(sheet: Sheet) -> None:
    """Keys of the method's own section: `section` of the trainer's tables has theirs by ours, and
    `own` those of one method alone."""
    method, names = sheet.config["method"], sheet.said["section"]
    own = {ours: theirs for ours, theirs in names.items() if ours in SECTIONS.get(method, ())}
    own |= sheet.said.get("own", {}).get(method, {})
    for ours, theirs in own.items():
        if (value := sheet.get(theirs)) is not None:
            sheet.put(f"{method}.{ours}", value, theirs)
    sheet.drop("belongs to another method", *names.values())


def file_beside(sheet: Sheet, name: str) -> str | None:
    """The file of this name here or beside the config; None if there is none."""
    files = [] if len(name) > 255 else [Path(name), sheet.folder / name]
    return next((str(file) for file in files if file.is_file()), None)


def template(sheet: Sheet, name: str, value: Any) -> None:
    """A chat template by their name, as text or of a file. By `templates` in the trainer's tables
    they are ours of the same names, and others are taken for the model's own; without these, names
    are refused."""
    known = sheet.said.get("templates", "").split()
    ours = value if value in known else file_beside(sheet, str(value))
    if not isinstance(value, str):
        sheet.refuse(name, "must be a template's name, its text or a file")
    elif "{%" in value:
        file = str(sheet.output.with_suffix(".chat_template.jinja"))
        sheet.files[file] = value
        sheet.put("data.chat_template", file, name)
    elif ours:
        sheet.put("data.chat_template", ours, name)
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
        sheet.refuse(names[0], NO_ROWS)
        return
    of_one = ("path", "weight", "split", "format")
    short = [{name: one[name] for name in of_one if one.get(name) is not None} for one in found]
    entries = [one["path"] if len(one) == 1 else one for one in short]
    sheet.put(key, entries[0] if len(entries) == 1 else entries, *names)
    columns = [{k: v for k, v in one.get("columns", {}).items() if k != v} for one in found]
    texts = [one.get("text_field", "text") for one in found]
    for ours, every, usual in (("columns", columns, {}), ("text_field", texts, "text")):
        if any(one != every[0] for one in every):
            reason = f"data.{ours} is one for all sources, and these differ in it"
            sheet.refuse(names[0], f"{reason}; rename columns in the files")
        elif every[0] != usual:
            sheet.put(f"data.{ours}", every[0], *names)


def put_entries(
    sheet: Sheet, key: str, name: str, read: Callable[[Sheet, str, Any], list[Source]]
) -> None:
    """Set data.train or data.eval by a list of theirs. `read` has an entry's sources; `entry` of
    the trainer's tables are the keys that it answers for."""
    found, settled, lost = list[Source](), list[str](), list[str]()
    for at, one in sheet.open(name):
        sources, names = read(sheet, at, one), [at + key for key in one]
        if not sources and not any(map(sheet.is_refused, names)):
            sheet.refuse(names[0], NO_ROWS)
        found += sources
        of_rows = settled if sources else lost
        of_rows += [at + key for key in one if key in sheet.said["entry"].split()]
    if found:
        put_sources(sheet, key, found, *settled)
    sheet.drop("of a set that cannot be read", *settled, *lost)


def paths_of(sheet: Sheet, at: str, given: Mapping[str, Any]) -> list[Source]:
    """Files or a set of the hub, of their path, data_files, split and name, a configuration. at:
    how the names of these keys begin."""
    path, split, named = str(given.get("path") or ""), given.get("split"), given.get("name")
    files = given.get("data_files") or []
    files = [str(file) for file in (files if isinstance(files, list) else [files])]
    if path in LOADERS or not path:
        paths = files
    elif files and Path(path).is_dir():
        paths = [f"{path}/{file}" for file in files]
    else:
        paths = [path]
        if files:
            sheet.refuse(f"{at}data_files", "one file of a set of the hub; download and name it")
    split = None if split == "train" else split
    if path in LOADERS or any(Path(one).is_file() for one in paths):
        if split is not None:
            sheet.refuse(f"{at}split", "a file has no splits; name a file of these rows")
        return [{"path": one} for one in paths]
    if named not in (None, "default"):
        return [{"path": f"{path}:{named}:{split or 'train'}"}]
    return [{"path": one, "split": split} for one in paths]


def turns(field: str, role: str, content: str) -> tuple[str, dict[str, str]] | None:
    """(format, columns) of rows whose conversations lie in a column, or None for unknown turns."""
    if (role, content) == ("role", "content") and field != "conversations":
        return "messages", {"messages": field}
    known = (role, content) in (("role", "content"), ("from", "value"))
    return ("sharegpt", {"conversations": field}) if known else None
