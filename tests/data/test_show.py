"""What the user is shown of the data."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from megatrain.data.build import DataOptions, load_data
from megatrain.data.show import describe, show_rows, summary, warnings

ROWS = [
    {"prompt": "what [b]is[/b] it?", "completion": "it is\n\x1b[31mfour"},
    {"prompt": "x", "completion": "y" * 90},
    {"prompt": "x"},
]
OPTIONS = DataOptions(seq_len=64, on_bad_row="skip", prompts="chat")


@pytest.fixture
def shown(encode: Callable[..., Any], make_tokenizer: Callable[..., Any]) -> Callable[[bool], str]:
    def show(colour: bool) -> str:
        out, tokenizer = io.StringIO(), make_tokenizer()
        system: Any = "standard" if colour else None
        console = Console(file=out, force_terminal=colour, color_system=system, width=80)
        show_rows(encode(ROWS, OPTIONS, tokenizer), tokenizer, 5, console)
        return out.getvalue()

    return show


def test_targets_are_bracketed_where_there_is_no_colour(shown):
    text = shown(False)
    assert "<|im_start|>user\nwhat [b]is[/b] it?<|im_end|>" in text
    assert "⟦it is\n\\x1b[31mfour<|im_end|>⟧" in text
    assert "\x1b" not in text


def test_targets_are_green_where_there_is_colour(shown):
    text = shown(True)
    assert "\x1b[32mit is" in text
    assert "\x1b[1;32m<|im_end|>" in text
    assert "⟦" not in text
    assert "\x1b[31m" not in text  # colour of the data's own


def test_what_was_lost_is_said(encode):
    data = encode(ROWS, OPTIONS)
    text = "\n".join(describe(data))
    assert "2 rows," in text
    assert "1 of 3 rows are bad and skipped; the first: " in text
    assert "1 rows cut to seq_len" in text
    found = json.loads(json.dumps(summary(data)))
    keys = ("rows", "rows_read", "bad_rows", "truncated_rows", "longest")
    assert [found[key] for key in keys] == [2, 3, 1, 1, 64]
    assert found["tokens"] == int(data.lengths.sum())
    assert found["target_tokens"] == int(data.target_counts.sum())


def test_packed_rows_have_their_remainder_said(write_jsonl, make_tokenizer, cache):
    file, options = write_jsonl([{"text": "hello world"}] * 20), replace(OPTIONS, text_field="text")
    packed, _ = load_data(file, None, make_tokenizer(), options, seed=0, pack_to=7, cache=cache)
    found = summary(packed)
    assert found["packed"]
    assert found["remainder_tokens"] == found["tokens"] % 7
    said = "the last block holds" in "\n".join(describe(packed))
    assert said == (found["remainder_tokens"] > 0)


def test_columns_that_are_not_read_are_named(encode):
    said = describe(encode([{"prompt": "x", "completion": "y", "id\x1b[31m": 1}], OPTIONS))
    assert said[-1] == "columns that are not read: id\\x1b[31m"


def test_what_a_template_leaves_out_is_a_warning(encode, make_tokenizer):
    turns = [{"role": "user", "content": "x", "name": "e\x1bve"}]
    turns += [{"role": "assistant", "content": "y"}]
    tokenizer, out = make_tokenizer(), io.StringIO()
    data = encode([{"messages": turns}] * 2, OPTIONS, tokenizer)
    words = "2 fields 'name' of messages are left out by the chat template"
    assert warnings(data) == [words]
    show_rows(data, tokenizer, 0, Console(file=out, width=80))
    assert out.getvalue().endswith(f"warning: {words}\n")


def test_how_rows_became_text_is_said(encode):
    rows: list[Any] = [{"prompt": "a", "completion": "b"}]
    rows.append({"prompt": [{"role": "user", "content": "a"}], "completion": "b"})
    data = encode(rows, DataOptions(seq_len=64))
    words = "1 as they are: prompt, completion, end of sequence (data.prompts: chat makes turns); "
    assert f"rows became text: {words}1 by the chat template" in describe(data)
