"""Rows of every format with something wrong in them."""

from __future__ import annotations

import json
import random
from typing import Any

JUNK: list[Any] = [None, "", " ", "\ud800", "\x00", 0, -1.5, 1e400, True, [], {}, [[]], [None]]
JUNK += [{"a": {"b": []}}, "<|im_end|>", "a" * 300, "é☕日本"]


def mutated(value: Any, rng: random.Random) -> Any:
    """The value with one thing in it replaced, dropped, doubled or renamed."""
    if rng.random() < 0.2 or not isinstance(value, dict | list) or not value:
        return rng.choice(JUNK)
    if isinstance(value, list):
        index = rng.randrange(len(value))
        action = rng.choice(["change", "drop", "double"])
        changed = mutated(value[index], rng)
        middle = {"change": [changed], "drop": [], "double": [value[index]] * 2}[action]
        return value[:index] + middle + value[index + 1 :]
    key = rng.choice(list(value))
    kept = {name: inner for name, inner in value.items() if name != key}
    action = rng.choice(["change", "change", "drop", "rename"])
    other = rng.choice(["text", "messages", "weight", "tools", "name"])
    changes = {"change": {key: mutated(value[key], rng)}, "rename": {other: value[key]}}
    return {**kept, **changes.get(action, {})}


TURNS = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "four"},
]
SEEDS: list[Any] = [
    {"messages": TURNS * 2},
    {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]},
    {"prompt": TURNS[:2], "completion": TURNS[2:]},
    {"prompt": "what is 1?", "completion": "it is 1"},
    {"instruction": "a", "input": "b", "output": "c"},
    {"text": "hello"},
]


def mutated_line(row: Any, rng: random.Random) -> bytes:
    """A mutated row as JSON, in one of five cases broken as JSON too."""
    row = mutated(row, rng)
    line = json.dumps(mutated(row, rng) if rng.random() < 0.3 else row).encode()
    if rng.random() < 0.2:
        cut, junk = rng.randrange(len(line) + 1), rng.choice([b"", b"\xff", b"}", b'"', b"\\"])
        line = line[:cut] + junk + line[cut + rng.randrange(3) :]
    return line
