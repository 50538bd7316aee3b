"""Input that nobody meant: rows, configs and model folders with something wrong in them. A command
takes it or refuses it in a sentence, soon, and in bounded memory."""

from __future__ import annotations

import gzip
import json
import random
import shutil
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.campaign.children import command
from benchmarks.campaign.damage import damage, files_in
from benchmarks.campaign.project import new_project, put_back
from benchmarks.campaign.trials import Trial, check_told
from benchmarks.config_reference import OUTSIDE_SECTIONS, sections
from megatrain.config import config_schema
from megatrain.config.names import ALIASES
from tests.helpers.mutated import JUNK, SEEDS, mutated, mutated_line

A_FILE = 30  # rows
LARGE = 10**12
NUMBERS = [0, 1, -1, 2, 3, 7, 255, 2**31, 2**63, LARGE, -LARGE, 0.5, -0.5, 1e-30, 1e300]
NUMBERS += [float("inf"), float("nan")]
WORDS = [
    "", " ", "auto", "null", "none", "true", "x" * 300, "\x1b[2J", "\u202e", "../..", "a\nb",
    "/dev/null", "/dev/zero", "~nosuchuser/x", "é☕", "[", "{", "*a", "&a", "!!python/name:os",
    "rows.jsonl", "model", "cfg.yaml", "1e5", "12GiB", "-1GiB", "0x10", "1_000", "int8", "fp8",
]  # fmt: skip
CONTAINERS: list[Any] = [[], {}, [[]], ["a", 1], {"a": {"b": 1}}, [None], {"path": "rows.jsonl"}]
VALUES: list[Any] = [None, True, False, *NUMBERS, *WORDS, *CONTAINERS]


def keys() -> list[str]:
    """Every key of a config, with its section, and every name that another trainer has for one."""
    found = []
    for section, _, properties in sections(config_schema()):
        prefix = "" if section == OUTSIDE_SECTIONS else f"{section}."
        found += [prefix + key for key in properties]
    return [*found, *ALIASES]


class Fuzz(Trial):
    """A project in which one thing is odd, and a command on it."""

    def __init__(self, folder: Path) -> None:
        self.project, self.copy = new_project(folder), folder / "copy"
        command(self.project, "data", "cfg.yaml")
        shutil.copytree(self.project, self.copy, symlinks=True)

    def attempt(self, case: str) -> int:
        put_back(self.copy, self.project)
        what, words = self.odd(random.Random(case))
        try:
            check_told(command(self.project, *words))
        except AssertionError as error:
            raise AssertionError(f"{what}: {words}: {error}") from error
        return 1

    @abstractmethod
    def odd(self, draw: random.Random) -> tuple[str, list[str]]:
        """Change the project; what was done, and a command line."""


# -- rows ----------------------------------------------------------------------------------------


def write_lines(path: Path, row: Any, draw: random.Random) -> None:
    lines = [mutated_line(row, draw) for _ in range(A_FILE)]
    if draw.random() < 0.7:
        lines.insert(0, json.dumps(row).encode())
    path.write_bytes(b"\n".join(lines))


def rows_of(row: Any, draw: random.Random) -> list[Any]:
    return [row, *(mutated(row, draw) for _ in range(A_FILE))]


def write_json(path: Path, row: Any, draw: random.Random) -> None:
    path.write_text(json.dumps(rows_of(row, draw)))


def write_packed(path: Path, row: Any, draw: random.Random) -> None:
    write_lines(path, row, draw)
    path.write_bytes(gzip.compress(path.read_bytes()))


def write_table(path: Path, row: Any, draw: random.Random, delimiter: str) -> None:
    rows = [one if isinstance(one, dict) else {"": one} for one in rows_of(row, draw)]
    texts = [str(value) for one in rows for value in one.values()]
    width = draw.randint(1, 4)
    lines = [texts[at : at + draw.choice([width, width, 1, 5])] for at in range(0, len(texts), 3)]
    header = delimiter.join(draw.choice([row, {"prompt": 1, "completion": 2}, {"text": 1}]))
    text = "\n".join([header, *(delimiter.join(line) for line in lines)])
    path.write_bytes(text.encode(errors="surrogatepass"))


def write_columns(path: Path, row: Any, draw: random.Random) -> None:
    import pyarrow
    from pyarrow import feather, parquet

    try:
        table = pyarrow.Table.from_pylist([row] * 3 + [mutated(row, draw)])
    except (pyarrow.ArrowException, TypeError, AttributeError, OverflowError, ValueError):
        table = pyarrow.Table.from_pylist([row])  # no table has such columns
    write = parquet.write_table if path.suffix == ".parquet" else feather.write_feather
    write(table, path)


WRITERS: dict[str, Callable[[Path, Any, random.Random], None]] = {
    ".jsonl": write_lines,
    ".jsonl.gz": write_packed,
    ".json": write_json,
    ".csv": partial(write_table, delimiter=","),
    ".tsv": partial(write_table, delimiter="\t"),
    ".txt": write_lines,
    ".parquet": write_columns,
    ".arrow": write_columns,
}


class Rows(Fuzz):
    """A file of odd rows of any format; in one of four cases it is damaged as a file, too."""

    def odd(self, draw: random.Random) -> tuple[str, list[str]]:
        kind, seed = draw.choice([*WRITERS]), draw.choice(SEEDS)
        path = self.project / f"odd{kind}"
        WRITERS[kind](path, seed, draw)
        what = f"{kind} of {', '.join(seed)}"
        if draw.random() < 0.25:
            what += f", {damage(path, files_in(self.project), draw)}"
        words = ["data", "cfg.yaml", f"data.train={path.name}", "data.eval=null"]
        if draw.random() < 0.5:
            words.append("data.on_bad_row=skip")
        if draw.random() < 0.2:
            words.append("method=pretrain")
        if draw.random() < 0.2:
            words.append("--json")
        return what, words


# -- configs -------------------------------------------------------------------------------------


class Configs(Fuzz):
    """Odd values of known keys, keys with letters wrong, and text that is no YAML."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.keys = keys()

    def odd(self, draw: random.Random) -> tuple[str, list[str]]:
        path, words = self.project / "cfg.yaml", ["plan", "cfg.yaml"]
        kind = draw.choice(["keys", "keys", "file", "text"])
        if kind == "keys":
            words += [self._assignment(draw) for _ in range(draw.choice([1, 1, 2, 3]))]
        elif kind == "file":
            with path.open("a") as file:
                for _ in range(draw.choice([1, 1, 2])):
                    file.write(f"{self._assignment(draw).replace('=', ': ', 1)}\n")
        else:
            text = path.read_text()
            for _ in range(draw.randint(1, 4)):
                at, end = (draw.randrange(len(text)) for _ in range(2))
                other = draw.choice([*WORDS, text[at : at + 20], "\t", ":", "- ", "#", '"'])
                text = text[:at] + other + text[min(end, at + draw.choice([0, 1, 9])) :]
            path.write_text(text, errors="surrogateescape")
        return kind, words

    def _assignment(self, draw: random.Random) -> str:
        key, value = draw.choice(self.keys), draw.choice(VALUES)
        if draw.random() < 0.1:
            at = draw.randrange(len(key))
            key = key[:at] + draw.choice("abz._=") + key[at + 1 :]
        return f"{key}={json.dumps(value) if draw.random() < 0.8 else value}"


# -- model folders -------------------------------------------------------------------------------

PIECES = [
    "{{ messages }}", "{% for m in messages %}", "{% endfor %}", "{{ 1/0 }}", "{{ x.y.z }}",
    "{% for i in range(99999) %}x{% endfor %}", "{{ 'a' * 10**9 }}", "{{ messages[9] }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% generation %}", "{% endgeneration %}", "{{ raise_exception('\x1b[2J') }}", "{{", "%}",
    "{% if m['role'] == 'assistant' %}", "{% endif %}", "{{ m['content'] }}", "{{ 10.0**400 }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ ''.__class__ }}", "{% set x = 1 %}",
]  # fmt: skip
COMMANDS = {
    "config.json": ("plan", "cfg.yaml"),
    "generation_config.json": ("data", "cfg.yaml"),
    "tokenizer.json": ("data", "cfg.yaml"),
    "tokenizer_config.json": ("data", "cfg.yaml"),
    "chat_template.jinja": ("data", "cfg.yaml"),
    "model.safetensors": ("train", "cfg.yaml", "train.max_steps=1", "data.eval=null"),
}


def odd_json(text: str, draw: random.Random) -> str:
    """One value of it is another, at any depth."""
    data = json.loads(text)
    part, inner, chosen = data, data, None
    while isinstance(part, dict | list) and part:
        inner = part
        chosen = draw.choice([*part]) if isinstance(part, dict) else draw.randrange(len(part))
        part = part[chosen]
        if draw.random() < 0.3:
            break
    else:
        if chosen is None:
            return text
    inner[chosen] = draw.choice([*NUMBERS, *NUMBERS, *JUNK, *WORDS])
    return json.dumps(data)


class Models(Fuzz):
    """Odd numbers in configurations, odd tokenizers, templates and headers of weights."""

    def odd(self, draw: random.Random) -> tuple[str, list[str]]:
        name = draw.choice([*COMMANDS, "config.json", "chat_template.jinja"])
        path = self.project / "model" / name
        if draw.random() < 0.2:
            what = damage(path, files_in(path.parent), draw)
        elif name == "model.safetensors":
            what = self._header(path, draw)
        elif name == "chat_template.jinja":
            what, text = "a piece", path.read_text()
            for _ in range(draw.randint(1, 3)):
                at = draw.randrange(len(text))
                text = text[:at] + draw.choice(PIECES) + text[at + draw.choice([0, 0, 5]) :]
            path.write_text(text)
        else:
            what = "a value"
            for _ in range(draw.choice([1, 1, 2])):
                path.write_text(odd_json(path.read_text(), draw), errors="surrogatepass")
        return f"{name}: {what}", list(COMMANDS[name])

    def _header(self, path: Path, draw: random.Random) -> str:
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        text = odd_json(data[8 : 8 + length].decode(), draw).encode(errors="surrogatepass")
        stated = draw.choice([len(text)] * 4 + [0, len(text) + 1, 2**40, 2**63])
        path.write_bytes(stated.to_bytes(8, "little") + text + data[8 + length :])
        return "its header"
