"""`samples.jsonl` of a run folder: what the model answered at each evaluation."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

from megatrain.errors import StorageError
from megatrain.reporting.metrics import APPENDED

logger = logging.getLogger("megatrain")

SAMPLES_FILE = "samples.jsonl"


def write_samples(folder: Path, step: int, answers: list[dict[str, Any]]) -> None:
    """Append answers to the samples of a run folder. That they cannot be written is logged."""
    if not answers:
        return
    text = "".join(
        json.dumps({"step": step, **answer}, ensure_ascii=False) + "\n" for answer in answers
    )
    path = folder / SAMPLES_FILE
    try:
        fd = os.open(path, APPENDED, 0o600)
        with os.fdopen(fd, "ab") as file:
            file.write(text.encode(errors="replace"))
    except OSError as error:
        logger.error(f"{path}: cannot be written ({error.strerror}); training goes on")


def cut_samples(folder: Path, step: int) -> None:
    """Drop the answers after `step`: a resumed run gives them again. Raises StorageError."""
    path = folder / SAMPLES_FILE
    if not path.is_file():
        return
    try:
        kept = [line for line in path.read_bytes().splitlines(keepends=True) if _is_of(line, step)]
        path.write_bytes(b"".join(kept))
    except OSError as error:
        raise StorageError(f"{path}: cannot be cut back ({error.strerror}); remove it") from error


def _is_of(line: bytes, step: int) -> bool:
    try:
        row = json.loads(line)
    except ValueError:
        return False  # a torn last line
    return isinstance(row, dict) and isinstance(row.get("step"), int) and row["step"] <= step
