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


HOSTILE = [
    "~nosuchuser/x",
    "n" * 300,
    "a/" + "n" * 300 + "/b",
    '"\\ud800"',
    '"nul\\0"',
    "9" * 400,
    "-" + "9" * 400,
    "9" * 5000,
    "1e400",
    "9" * 400 + "GiB",
    "!!python/object/apply:os.system [true]",
    "!!binary x",
    "!!int x",
    "[" * 9,
    "{}",
    "[]",
    "%x",
    "&a",
    "*a",
    "\t",
    "`",
    "? x",
    "!!timestamp 2001-01-01",
]
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


@pytest.mark.parametrize("key", ["model.path", "data.train", "output", "memory.nvme"])
@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("~nosuchuser/x", "there is no user of the name nosuchuser"),
        ("n" * 300, "cannot be the name of a file"),
        ('"\\ud800"', "cannot be written as UTF-8"),
    ],
)
def test_a_path_that_cannot_be_is_refused(write: Write, key, value, reason):
    with pytest.raises(ConfigError, match=f"command line: {key}: .*{reason}"):
        load_config(write(MINIMAL), [f"{key}={value}"])


@pytest.mark.parametrize("key", ["threads", "train.tokens_per_step", "checkpoint.every"])
def test_a_number_beyond_arithmetic_is_refused(write: Write, key):
    with pytest.raises(ConfigError, match="is too large a number"):
        load_config(write(MINIMAL), [f"{key}={'9' * 400}"])
