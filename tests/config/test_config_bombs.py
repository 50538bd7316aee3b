"""Configs made to hang, to fill memory or to crash the reader: one sentence, and soon."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatrain.config import load_config
from megatrain.config.load import SECTIONS
from megatrain.errors import ConfigError

MINIMAL = "model: some/folder\ndata: {train: rows.jsonl}\n"
Write = Callable[[str], Path]


@pytest.fixture
def within_seconds() -> Iterator[None]:
    """And within 1 GiB more of address space."""
    before, started = resource.getrlimit(resource.RLIMIT_AS), time.process_time()
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)
    assert time.process_time() - started < 5


def aliases(levels: int, times: int) -> str:
    lines = [f"a0: &a0 [{', '.join(['x'] * times)}]"]
    for level in range(1, levels):
        inside = ", ".join([f"*a{level - 1}"] * times)
        lines.append(f"a{level}: &a{level} [{inside}]")
    return "\n".join(lines)


BOMBS = {
    "aliases": (aliases(7, 20), "more than 10,000 values"),
    "a long list": ("x: [" + "1," * 10**6 + "]", "more than 10,000 values"),
    "unknown keys": ("\n".join(f"key{n}: 1" for n in range(1500)), "and 1,490 more"),
    "more of them": ("\n".join(f"key{n}: 1" for n in range(50_000)), "more than 10,000 values"),
    "brackets": ("x: " + "[" * 20_000, "nested more than 8 deep"),
    "braces": ("x: " + "{a: " * 20_000, "nested more than 8 deep"),
    "an anchor in itself": ("x: &x [*x]", "nested more than 8 deep"),
    "dashes": ("x:\n  " + "- " * 20_000, "nested more than 8 deep"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("text", "reason"), BOMBS.values(), ids=BOMBS.keys())
def test_a_bomb_is_refused_soon(write: Write, within_seconds, text, reason):
    with pytest.raises(ConfigError, match=reason):
        load_config(write(MINIMAL + text))


ONE_WORD = """~nosuchuser/x "\\ud800" "nul\\0" 1e400 {} [] %x &a *a ` !!binary|x !!int|x ?|x
    !!python/object/apply:os.system|[true] !!timestamp|2001-01-01"""
HOSTILE = [text.replace("|", " ") for text in ONE_WORD.split()]
HOSTILE += ["n" * 300, "a/" + "n" * 300 + "/b", "9" * 400, "-" + "9" * 400, "9" * 5000]
HOSTILE += ["9" * 400 + "GiB", "[" * 9, "\t"]
KEYS = [f"{section}.{name}".lstrip(".") for section, keys in SECTIONS.items() for name in keys]
TABLE = [(key, value) for key in KEYS for value in HOSTILE]


@pytest.mark.slow
def test_a_hostile_value_of_any_key_is_taken_or_refused_in_a_sentence(write: Write):
    path = write(MINIMAL)
    refused = 0
    for key, value in TABLE[::2]:
        try:
            load_config(path, [f"{key}={value}"])
        except ConfigError:
            refused += 1
    assert refused > 0.8 * len(TABLE[::2]), "free texts take what they like"


NO_PATHS = {
    "~nosuchuser/x": "there is no user of the name nosuchuser",
    "n" * 300: "cannot be the name of a file",
    '"\\ud800"': "cannot be written as UTF-8",
}


def test_a_path_that_cannot_be_and_a_number_beyond_arithmetic_are_refused(write: Write):
    paths = ("model.path", "data.train", "output", "memory.nvme")
    cases = [(key, value, reason) for key in paths for value, reason in NO_PATHS.items()]
    numbers = ("threads", "train.tokens_per_step", "checkpoint.every")
    cases += [(key, "9" * 400, "is too large a number") for key in numbers]
    for key, value, reason in cases:
        with pytest.raises(ConfigError, match=f"command line: {key}: .*{reason}"):
            load_config(write(MINIMAL), [f"{key}={value}"])
