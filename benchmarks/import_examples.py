"""Writes the table of docs/import.md: the examples of axolotl, LLaMA-Factory and TRL, imported.

    python -m benchmarks.import_examples            # downloads their source packages with pip
    python -m benchmarks.import_examples --folder F # F holds them already, or takes them
    python -m benchmarks.import_examples --recipes R # also a copy of the alignment handbook's

axolotl and LLaMA-Factory carry their examples in the source package, TRL as command lines in its
scripts. Every example is read; those of adapters and quantised models are read once more as if they
were of full parameters. Nothing of theirs is kept in this repository.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import tarfile
import tempfile
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.records import RESULTS, ROOT
from benchmarks.write_page import filled
from megatrain.config.document import plain, read_yaml, write_yaml
from megatrain.config.importing import Imported, import_config
from megatrain.errors import ConfigError

WIDTH = 118
PAGE, FILE = ROOT / "docs" / "import.md", RESULTS / "import.json"
PACKAGES = {
    "axolotl": "axolotl==0.19.0",
    "llama-factory": "llamafactory==0.9.5",
    "trl": "trl==1.16.0",
}
# Keys that ask for an adapter or quantised weights, and what is put in their place.
ADAPTERS: dict[str, object] = dict.fromkeys(
    ("adapter", "load_in_4bit", "load_in_8bit", "use_peft", "quantization_bit", "relora"), None
) | {"finetuning_type": "full"}
NO_TRAINING = ("merge_lora", "inference", "accelerate", "deepspeed", "cloud", "multi_tokens")
COMMAND = re.compile(
    r"^(?:python|accelerate launch|trl) [^`]*?(\w+)(?:\.py)? \\\n((?:.*\\\n)*.*)", re.M
)


def unpacked(folder: Path) -> dict[str, Path]:
    """The folder of each source package, downloaded unless it is there."""
    found = {}
    for trainer, package in PACKAGES.items():
        name = package.replace("==", "-")
        if not (folder / name).is_dir():
            pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:"]
            subprocess.run([*pip, "-d", str(folder), package], check=True)
            with tarfile.open(folder / f"{name}.tar.gz") as archive:
                archive.extractall(folder, filter="data")
        found[trainer] = folder / name
    return found


def examples(trainer: str, package: Path, made: Path) -> Iterator[tuple[str, Path, str | None]]:
    """(name, file, method) of each example; command lines become files in `made`."""
    if trainer != "trl":
        for path in sorted((package / "examples").rglob("*.y*ml")):
            if not any(word in path.parts or word in path.stem for word in NO_TRAINING):
                yield str(path.relative_to(package)), path, None
        return
    for script in sorted((package / "trl").rglob("*.py")):
        for number, (method, words) in enumerate(COMMAND.findall(script.read_text())):
            path = made / f"{script.stem}-{number}.yaml"
            path.write_text(write_yaml(keys_of(words)))
            yield f"{script.relative_to(package)} {number + 1}", path, method


def recipes(folder: Path) -> Iterator[tuple[str, Path, str | None]]:
    """The alignment handbook's recipes, in folders that name their method."""
    for path in sorted(folder.rglob("*/*/*.yaml")):
        yield str(path.relative_to(folder)), path, path.parent.name


def keys_of(words: str) -> dict[str, Any]:
    """A command line's `--key value` as keys; a key alone is true, `--no_key` is false."""
    keys: dict[str, Any] = {}
    for word in shlex.split(words.replace("\\\n", " ")):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            negative = name.startswith("no_")
            keys[name.removeprefix("no_") if negative else name] = value if equals else not negative
        elif keys:
            keys[next(reversed(keys))] = word
    return {
        name: plain(read_yaml(str(value).lower() if isinstance(value, bool) else value, name))
        for name, value in keys.items()
    }


def read(path: Path, trainer: str, method: str | None) -> Imported | str:
    """What the import says, or why it says nothing."""
    try:
        return import_config(path, trainer, processes=1, method=method)
    except ConfigError as error:
        return str(error).rpartition(": ")[2]


def as_full(path: Path, trainer: str, method: str | None) -> Imported | str:
    """The same of a config without its adapter; the file lies beside the other for a moment."""
    document = plain(read_yaml(path.read_text(), str(path)))
    given = {name: ADAPTERS.get(name, value) for name, value in document.items()}
    if trainer == "llama-factory":
        given["finetuning_type"] = "full"
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", dir=path.parent) as file:
        file.write(write_yaml({k: v for k, v in given.items() if v is not None}))
        file.flush()
        return read(Path(file.name), trainer, method)


def outcome(found: Imported | str) -> tuple[str, list[str]]:
    """(imported or refused, the keys by which it is refused)."""
    if isinstance(found, str):
        return "refused", [found]
    if found.faithful and not found.missing:
        return "imported", []
    lines = [*found.refused, *found.unknown]
    names = [re.sub(r"\[\d+\]", "[]", line.name) for line in lines] or ["a key is missing"]
    return "refused", list(dict.fromkeys(names))


def examined(
    trainer: str, found_in: Iterable[tuple[str, Path, str | None]]
) -> Iterator[dict[str, Any]]:
    for name, path, method in found_in:
        how, why = outcome(found := read(path, trainer, method))
        adapter = not isinstance(found, str) and any(
            line.name in ADAPTERS and line.said[0].partition(":")[0] != "freeze"
            for line in found.refused
        )
        row = {"example": name, "adapter": adapter, "outcome": how, "why": why}
        if adapter:
            row["as_full"], row["why"] = outcome(as_full(path, trainer, method))
        yield row


def table(results: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    yield "| examples of | of full parameters | imported | of adapters | imported without adapter |"
    yield "|---|---|---|---|---|"
    for trainer, rows in results.items():
        adapters = [row for row in rows if row["adapter"]]
        full = [row for row in rows if not row["adapter"]]
        done = sum(row["outcome"] == "imported" for row in full)
        again = sum(row.get("as_full") == "imported" for row in adapters)
        yield f"| {trainer} | {len(full)} | {done} | {len(adapters)} | {again} |"


def reasons(results: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    """Keys by which full-parameter examples are refused, the rare ones in one sentence."""
    refused = [
        (trainer, row["why"])
        for trainer, rows in results.items()
        for row in rows
        if not row["adapter"] and row["outcome"] == "refused"
    ]
    counts = Counter(key for _, why in refused for key in why)
    yield "| key | examples | of |"
    yield "|---|---|---|"
    for key, count in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])):
        if count > 1:
            trainers = dict.fromkeys(trainer for trainer, why in refused if key in why)
            yield f"| `{key}` | {count} | {', '.join(trainers)} |"
    once = sorted(key for key, count in counts.items() if count == 1)
    yield ""
    yield from textwrap.wrap(f"Once each: {', '.join(f'`{key}`' for key in once)}.", WIDTH)


def measured(records: dict[str, Any]) -> dict[str, Sequence[str]]:
    results = records["results"]
    return {
        "examples": [f"On {records['date']}:", "", *table(results)],
        "refused": [*reasons(results)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--folder", type=Path, help="where the packages are, or are put")
    parser.add_argument("--recipes", type=Path, help="the alignment handbook's folder of recipes")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = given.folder or Path(made)
        results = {
            PACKAGES[trainer]: [*examined(trainer, examples(trainer, package, Path(made)))]
            for trainer, package in unpacked(folder).items()
        }
        if given.recipes:
            results["alignment-handbook (TRL)"] = [*examined("trl", recipes(given.recipes))]
    records = {"date": date.today().isoformat(), "results": results}
    FILE.write_text(json.dumps(records, indent=1) + "\n")
    PAGE.write_text(filled(PAGE.read_text(), measured(records)))


if __name__ == "__main__":
    main()
