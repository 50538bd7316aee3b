"""`megatrain init MODEL DATA`: a config that fits, from a look at the rows and a plan."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatrain.config import load_config
from megatrain.config.document import write_yaml
from megatrain.data.formats import detect_format
from megatrain.data.rows import Rows
from megatrain.data.samples import JUDGED, PAIRS, PLAIN
from megatrain.data.sources import open_source
from megatrain.errors import DataError, number_of
from megatrain.methods import METHODS
from megatrain.planner.plan import Plan, verdict
from megatrain.recipes import plan as planning
from megatrain.recipes.model import read_model
from megatrain.recipes.setup import open_rows, quiet_libraries

LONGEST = 32_768  # tokens of a row, unless the user asks for more
PACKED = 4096  # tokens of a row that documents fill
STEPS = 30  # of an epoch at least, where rows are few
STEP_TOKENS = 65_536
SCHEMA = "megatrain.schema.json"


def config_for(
    model: str, data: str, method: str | None = None, described: Mapping[str, Any] | None = None
) -> tuple[str, str, Plan]:
    """(name, YAML, plan) of a config that trains `model` on `data`, on this machine or one that is
    described.

    Args:
        method: by default that which rows of their form are for.
        described: as in `recipes.plan.plan`.

    Raises:
        DataError: the rows are of no known form, or are prompts, which need rewards.
        PlanError: it does not fit, with int8 moments either; names what would help.
    """
    quiet_libraries()
    method = method or usual_method(data)
    name = f"{Path(model).name.lower().removesuffix('.gguf')}-{method}"
    values: dict[str, Any] = {"model": model, "method": method, "output": f"runs/{name}"}
    values |= {"data": {"train": data}, "train": {"seq_len": LONGEST}}
    found = read_model(load_config(values))
    most = getattr(found.config.get_text_config(), "max_position_embeddings", None) or LONGEST
    values["train"]["seq_len"] = min(LONGEST, most)
    rows = open_rows(load_config(values), found)[0]
    packed = METHODS[method].whole_documents
    longest = PACKED if packed else int(rows.side_lengths.max())
    values["train"]["seq_len"] = min(most, -(-longest // 256) * 256)
    tokens = step_tokens(int(rows.lengths.sum()))
    values["train"]["tokens_per_step"] = max(tokens, PACKED if packed else 0)
    made = planning.plan(load_config(values), described=described)
    if not made.fits:  # exact but for the moments, which are rounded
        values |= {"optimizer": {"moments": "int8"}}
        made = planning.plan(load_config(values), described=described)
    made.check()
    return name, as_yaml(values, rows, made), made


def usual_method(data: str) -> str:
    """The method that rows of such a form are for. Raises DataError."""
    source = open_source(data)
    first = next(iter(source.read()), None)
    if first is None:
        raise DataError(f"{source.name}: has no rows")
    if first.problem is not None:
        raise DataError(f"{first.where}: {first.problem}")
    row: Mapping[str, Any] = first.value if isinstance(first.value, Mapping) else {}
    for kind, method in ((PAIRS, "dpo"), (JUDGED, "kto"), (PLAIN, "sft")):
        form = detect_format(row, kind)
        if form is not None and (kind != JUDGED or "label" in row):
            return "pretrain" if form == "text" else method
    raise DataError(
        f"{first.where}: no method is known for rows of {', '.join(row) or 'no columns'}; name one "
        "with --method, or rename columns (docs/rows.md); prompts alone are for grpo, which needs "
        "reward functions (examples/grpo)"
    )


def step_tokens(every: int) -> int:
    """Tokens of a step: a power of two, of which an epoch has some. every: tokens of all rows."""
    return min(STEP_TOKENS, 1 << max(9, (every // STEPS).bit_length() - 1))


def as_yaml(values: Mapping[str, Any], rows: Rows, made: Plan) -> str:
    """The config as YAML, with what was found beside the keys that follow from it."""
    lengths, train = rows.lengths, values["train"]
    steps = -(-int(lengths.sum()) // train["tokens_per_step"])
    found = f"{int(lengths.sum()):,} tokens"
    if not METHODS[values["method"]].whole_documents:
        found = f"{number_of(len(rows), 'row')}, {found}, longest {int(lengths.max()):,}"
    lines = [
        f"# yaml-language-server: $schema={SCHEMA}",
        f"model: {quoted(values['model'])}",
        f"method: {values['method']}",
        "",
        "data:",
        f"  train: {quoted(values['data']['train'])}  # {found}",
        "  eval: 0.02  # held out: a share, a number of rows, a source or null",
        "",
        "train:",
        f"  seq_len: {train['seq_len']}",
        f"  tokens_per_step: {train['tokens_per_step']}  # {number_of(steps, 'step')} an epoch",
        "  epochs: 1",
        f"  learning_rate: {METHODS[values['method']].learning_rate:g}",
        "",
    ]
    if not METHODS[values["method"]].scores:
        lines += ["eval: {prompts: 2}  # held-out rows that the report shows answered", ""]
    if "optimizer" in values:
        lines += ["optimizer: {moments: int8}  # to fit", ""]
    lines += [f"# {verdict(made)}", f"output: {quoted(values['output'])}"]
    return "\n".join(lines) + "\n"


def quoted(text: str) -> str:
    """A text as YAML writes it."""
    return write_yaml([text]).removeprefix("- ").rstrip()
