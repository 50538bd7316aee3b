"""What the user is shown of the data."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from megatrain.data.build import load_data
from megatrain.data.encoding import RowOptions
from megatrain.data.samples import JUDGED, PAIRS
from megatrain.data.show import describe, show_rows, summary, warnings

ROWS = [
    {"prompt": "what [b]is[/b] it?", "completion": "it is\n\x1b[31mfour"},
    {"prompt": "x", "completion": "y" * 90},
    {"prompt": "x"},
]
OPTIONS = RowOptions(seq_len=64, on_bad_row="skip", prompts="chat")


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
    assert "1 row cut to seq_len" in text
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
    unread = "data.prompts: chat has no effect: no row is of such a form"
    assert warnings(data) == [unread, words]
    show_rows(data, tokenizer, 0, Console(file=out, width=80))
    assert out.getvalue().endswith(f"warning: {words}\n")


TURNS = [{"role": "user", "content": "two plus two?"}]
PAIR = {"prompt": TURNS, "chosen": "it is four", "rejected": "it is \x1b[31mfive", "margin": 0.5}
OF_PAIRS, OF_JUDGED = (replace(OPTIONS, kind=kind, prompts="text") for kind in (PAIRS, JUDGED))


@pytest.fixture
def printed(encode: Callable[..., Any], make_tokenizer: Callable[..., Any]) -> Callable[..., str]:
    def show(rows: list[Any], options: RowOptions, count: int = 5) -> str:
        out, tokenizer = io.StringIO(), make_tokenizer()
        show_rows(encode(rows, options, tokenizer), tokenizer, count, Console(file=out, width=60))
        return out.getvalue()

    return show


def test_a_pair_is_shown_as_its_prompt_and_both_answers(printed):
    prompt, chosen, rejected, *rest = re.split("─+ row .*─\n", printed([PAIR], OF_PAIRS))[1:]
    assert prompt == "<|im_start|>user\ntwo plus two?<|im_end|>\n<|im_start|>assistant\n\n"
    assert chosen == "⟦it is four<|im_end|>⟧\n\n"
    assert rejected.startswith("⟦it is \\x1b[31mfive<|im_end|>⟧\n\n─")
    assert not rest
    text = printed([PAIR, {**PAIR, "margin": None}], OF_PAIRS)
    for title in ("row 0: prompt,", "row 0, chosen: ", "row 0, rejected: ", "row 1, chosen: "):
        assert title in text
    assert text.count("margin 0.5") == 2, "of both answers of the first pair"


def test_answers_whose_prompts_were_cut_apart_are_shown_whole(printed):
    prompt = "".join(chr(97 + n % 26) for n in range(90))
    long = {**PAIR, "prompt": prompt, "chosen": "y" * 50}
    text = printed([long], replace(OF_PAIRS, truncation_mode="keep_end"))
    assert "row 0: prompt," not in text
    assert re.search(r"[a-z]{5,}l⟦y{50}<\|endoftext\|>⟧", text)
    assert re.search(r"[a-z]{30,}l⟦it is .*five<\|endoftext\|>⟧", text)


def test_a_judged_row_is_shown_with_its_label(printed):
    rows = [{"prompt": "a", "completion": "b", "label": label} for label in (True, False)]
    text = printed([*rows, rows[0]], OF_JUDGED)
    assert "─ row 0: wanted, " in text
    assert "─ row 1: unwanted, " in text
    assert "3 judged rows, 2 of them wanted, " in text


def test_what_is_said_of_pairs_and_judged_rows_is_also_json(encode, make_tokenizer):
    good = {**PAIR, "prompt": "what?"}
    bad = [{**good, "chosen": "same", "rejected": "same"}, {**good, "prompt": "x" * 90}]
    data = encode([good, *bad], OF_PAIRS, make_tokenizer(None))
    found = json.loads(json.dumps(summary(data)))
    keys = ("kind", "rows", "rows_read", "bad_rows", "rows_without_target", "rows_too_long")
    assert [found[key] for key in keys] == ["pairs", 1, 3, 1, 1, 0]
    assert found["longest_sequence"] < found["longest"]
    assert found["wanted_rows"] is None
    assert "are equal: neither answer is better" in found["first_bad_rows"][0]
    said = "\n".join(describe(data))
    assert "1 pair, " in said
    assert f"(of one answer and its prompt {found['longest_sequence']})" in said
    judged = [{"prompt": "a", "completion": "b", "label": label} for label in (True, False)]
    of_judged = summary(encode(judged, OF_JUDGED))
    assert (of_judged["kind"], of_judged["wanted_rows"]) == ("judged", 1)
