"""What the user is shown of the data."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megatrain.data.build import DataOptions, encode_source, load_data
from megatrain.data.show import describe, show_rows, summary

ROWS = [
    {"prompt": "what [b]is[/b] it?", "completion": "it is\n\x1b[31mfour"},
    {"prompt": "x", "completion": "y" * 90},
    {"prompt": "x"},
]
OPTIONS = DataOptions(seq_len=64, on_bad_row="skip")


@pytest.fixture
def shown(
    write_jsonl: Callable[..., Path], make_tokenizer: Callable[..., Any], cache: Path
) -> Callable[[bool], str]:
    def show(colour: bool) -> str:
        console = Console(
            file=io.StringIO(),
            force_terminal=colour,
            color_system="standard" if colour else None,
            width=80,
        )
        tokenizer = make_tokenizer()
        show_rows(
            encode_source(write_jsonl(ROWS), tokenizer, OPTIONS, cache), tokenizer, 5, console
        )
        text: str = console.file.getvalue()  # type: ignore[attr-defined]
        return text

    return show


def test_targets_are_bracketed_where_there_is_no_colour(shown: Callable[[bool], str]):
    text = shown(False)
    assert "<|im_start|>user\nwhat [b]is[/b] it?<|im_end|>" in text
    assert "⟦it is\n\\x1b[31mfour<|im_end|>⟧" in text
    assert "\x1b" not in text


def test_targets_are_green_where_there_is_colour(shown: Callable[[bool], str]):
    text = shown(True)
    assert "\x1b[32mit is" in text
    assert "\x1b[1;32m<|im_end|>" in text
    assert "⟦" not in text
    assert "\x1b[31m" not in text  # colour of the data's own


def test_what_was_lost_is_said(
    write_jsonl: Callable[..., Path], make_tokenizer: Callable[..., Any], cache: Path
):
    data = encode_source(write_jsonl(ROWS), make_tokenizer(), OPTIONS, cache)
    text = "\n".join(describe(data))
    assert "2 rows," in text
    assert "1 of 3 rows are bad and skipped; the first: " in text
    assert "1 rows cut to seq_len" in text
    found = json.loads(json.dumps(summary(data)))
    assert (
        found["rows"],
        found["rows_read"],
        found["bad_rows"],
        found["truncated_rows"],
        found["longest"],
    ) == (2, 3, 1, 1, 64)
    assert found["tokens"] == int(data.lengths.sum())
    assert found["target_tokens"] == int(data.target_counts.sum())


def test_packed_rows_have_their_remainder_said(
    write_jsonl: Callable[..., Path], make_tokenizer: Callable[..., Any], cache: Path
):
    file = write_jsonl([{"text": "hello world"}] * 20)
    packed, _ = load_data(
        file,
        None,
        make_tokenizer(),
        replace(OPTIONS, text_field="text"),
        seed=0,
        pack_to=7,
        cache=cache,
    )
    found = summary(packed)
    assert found["packed"]
    assert found["remainder_tokens"] == found["tokens"] % 7
    assert ("the last block holds" in "\n".join(describe(packed))) == (
        found["remainder_tokens"] > 0
    )
