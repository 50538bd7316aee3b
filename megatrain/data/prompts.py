"""Prompts that evaluations answer, read from a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatrain.errors import DataError

Turns = Sequence[dict[str, str]]
MANY = 1_000  # each is answered token by token


def read_prompts(name: str) -> list[Turns]:
    """The turns of each prompt of a file, of which the last is the user's.

    Of a .jsonl file each line holds `prompt`, a text, or `messages`; of any other file each line
    that is not blank is a prompt. Raises DataError.
    """
    path = Path(name)
    try:
        if not path.is_file():
            raise DataError(f"{path}: no such file; it holds one prompt a line")
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise DataError(f"{path}: cannot be read ({reason})") from None
    of_json = path.suffix in (".jsonl", ".json")
    found = [
        _turns(line, f"{path}:{number}") if of_json else [{"role": "user", "content": line}]
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not found:
        raise DataError(f"{path}: holds no prompt; write one a line")
    if len(found) > MANY:
        raise DataError(f"{path}: holds {len(found):,} prompts; at most {MANY:,} are answered")
    return found


def _turns(line: str, where: str) -> Turns:
    try:
        row: Any = json.loads(line)
    except ValueError:
        raise DataError(f"{where}: is no JSON; write an object a line") from None
    given = row if isinstance(row, dict) else {}
    prompt, messages = given.get("prompt"), given.get("messages")
    turns = [{"role": "user", "content": prompt}] if messages is None else messages
    if not isinstance(turns, list) or not turns or not all(map(_is_turn, turns)):
        raise DataError(f"{where}: needs prompt, a text, or messages with role and content")
    if turns[-1]["role"] == "assistant":
        raise DataError(f"{where}: ends with an answer; the last turn is the one to answer")
    return turns


def _is_turn(turn: Any) -> bool:
    texts = [turn.get(name) for name in ("role", "content")] if isinstance(turn, dict) else [None]
    return all(isinstance(text, str) and text.strip() for text in texts)
