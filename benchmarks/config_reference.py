"""Writes docs/config.md, the reference of all config keys, from the config's JSON schema.

    python -m benchmarks.config_reference

Run it again when a key, a default or a description changes; tests/test_docs.py fails until then.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatrain.config import config_schema
from megatrain.config.names import ACCUMULATION, ALIASES, BETA1, BETA2, ROWS_PER_DEVICE

PAGE = Path(__file__).parent.parent / "docs" / "config.md"
SMALLEST_SIZE = 2**20  # values.py accepts no budget of fewer bytes; no other key has this bound
OUTSIDE_SECTIONS = "At the top level"
# Two names of other trainers that are combined into one key of ours.
COMBINED = {
    ROWS_PER_DEVICE: "train.rows_per_step",
    ACCUMULATION: "train.rows_per_step",
    BETA1: "optimizer.betas",
    BETA2: "optimizer.betas",
}
INTRODUCTION = """# Config reference

Generated from `megatrain schema` by `python -m benchmarks.config_reference`. `megatrain init`
writes a commented config to start from; only `model` and `data.train` have no default.

- A key is set in the YAML file (`train: {seq_len: 2048}`) or after the command
  (`megatrain train my.yaml train.seq_len=2048`), which wins over the file.
- An unknown key is refused with its file, line and the nearest known name.
- Sizes of memory are written as `80GiB`, `512MiB` or bytes, counts as `64k` (64,000) or `64Ki`
  (65,536) if you like. `1e-5` is a number.
- Paths may have `~` and `${VARIABLES}` of the environment. What keys have in common is merged from
  an anchor (`x-shared: &it {seq_len: 4096}`, then `train: {<<: *it}`); keys that begin with `x-`
  hold such and nothing else.
- `auto` leaves the choice to the planner, the hardware or the optimizer. A run writes all chosen
  values to `config.resolved.yaml` in its folder.
- `megatrain resume` refuses or flags a changed key that would change the result.
"""

Schema = Mapping[str, Any]


def main() -> None:
    PAGE.write_text(page())


def page() -> str:
    """The whole reference: one table for each section of the config, then other trainers' names."""
    schema = config_schema()
    parts = [INTRODUCTION]
    parts += [_section(name, words, keys) for name, words, keys in sections(schema)]
    parts.append(_other_names())
    return "\n".join(parts)


def sections(schema: Schema) -> Iterator[tuple[str, str, dict[str, Schema]]]:
    """(name, description, property by key) of the top level, then of each section."""
    properties: Schema = schema["properties"]
    plain = {key: one for key, one in properties.items() if "$ref" not in one}
    yield OUTSIDE_SECTIONS, "Keys outside any section.", plain
    for key, one in properties.items():
        if "$ref" in one:
            options = schema["$defs"][one["$ref"].rpartition("/")[2]]
            if "anyOf" in options:  # the section may be written as a bare text, too
                options = next(form for form in options["anyOf"] if "properties" in form)
            yield key, options["description"], options["properties"]


def _section(name: str, words: str, keys: Mapping[str, Schema]) -> str:
    prefix = "" if name == OUTSIDE_SECTIONS else f"{name}."
    rows = ["| key | takes | default | what it does |", "|---|---|---|---|"]
    for key, one in keys.items():
        cells = (f"`{prefix}{key}`", takes(one), _default(one), one.get("description", ""))
        rows.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    heading = name if name == OUTSIDE_SECTIONS else f"`{name}`"
    return "\n".join([f"## {heading}", "", words, "", *rows, ""])


def takes(one: Schema) -> str:
    """The values that a key accepts, in a few words."""
    if "anyOf" in one:
        return " or ".join(dict.fromkeys(takes(form) for form in one["anyOf"]))
    if "enum" in one:
        return ", ".join(f"`{value}`" for value in one["enum"])
    if "const" in one:
        return f"`{one['const']}`"
    kind = one["type"]
    if kind == "array":
        if "prefixItems" in one:
            return f"{len(one['prefixItems'])} numbers"
        if "enum" in one["items"]:
            return f"{takes(one['items'])} or a list of them"
        if "anyOf" in one["items"]:
            return "a list of these"
        of = "folder" if one["items"].get("format") == "path" else "text"
        return f"a {of} or a list of them"
    if kind == "object":
        return f"{{{', '.join(one['properties'])}}}" if "properties" in one else "mapping"
    if kind in ("integer", "number"):
        return _number(one)
    words = {"boolean": "`true`, `false`", "null": "`null`", "string": "text", "object": "mapping"}
    return "path" if one.get("format") == "path" else words[kind]


def _number(one: Schema) -> str:
    if one.get("minimum") == SMALLEST_SIZE:
        return "size"
    bounds = [
        f"{sign} {one[bound]:g}"
        for bound, sign in (
            ("minimum", ">="),
            ("exclusiveMinimum", ">"),
            ("maximum", "<="),
            ("exclusiveMaximum", "<"),
        )
        if bound in one and one[bound] < 2**62  # a bound that only says "fits 64 bits" is left out
    ]
    return " ".join([one["type"], " and ".join(bounds)]).strip()


def _default(one: Schema) -> str:
    if "default" not in one:
        return "required"
    value = one["default"]
    return f"`{value}`" if isinstance(value, str) else f"`{json.dumps(value)}`"


def _other_names() -> str:
    """Which names of other trainers are accepted for which key."""
    accepted: dict[str, list[str]] = {}
    for name, alias in ALIASES.items():
        accepted.setdefault(COMBINED.get(alias.key, ".".join(alias.key)), []).append(f"`{name}`")
    return "\n".join(
        [
            "## Names of other trainers",
            "",
            "Accepted at the top level and inside `train`, with the values of those trainers. "
            "Names",
            "that cannot be honoured are refused with the key to use instead, never ignored.",
            "",
            "| key | also accepted |",
            "|---|---|",
            *(f"| `{key}` | {', '.join(names)} |" for key, names in accepted.items()),
            "",
        ]
    )


if __name__ == "__main__":
    main()
