"""Every row format, and every way a row can be wrong."""

from __future__ import annotations

from typing import Any

import pytest

from megatrain.data.formats import (
    FORMATS,
    Chat,
    Document,
    Message,
    RowError,
    convert_row,
    detect_format,
)


def said(content: Any, role: str = "user", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


SHAREGPT = [("human", "hi"), ("gpt", "yo")]
GOOD: dict[str, dict[str, Any]] = {
    "messages": {"messages": [said("hi"), said("yo", "assistant")]},
    "sharegpt": {"conversations": [{"from": name, "value": text} for name, text in SHAREGPT]},
    "prompt_completion": {"prompt": "hi", "completion": "yo"},
    "alpaca": {"instruction": "hi", "input": "", "output": "yo"},
    "text": {"text": "hi yo"},
}


def read(row: Any) -> Any:
    form = detect_format(row)
    assert form is not None
    return convert_row(form, row)


def turns(chat: Chat) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in chat.messages]


def test_every_format_has_a_good_row():
    assert set(GOOD) == set(FORMATS)


@pytest.mark.parametrize("name", GOOD)
def test_is_found_by_its_columns(name):
    found = detect_format({**GOOD[name], "id": 7})
    assert found is not None
    assert found is FORMATS[name]


@pytest.mark.parametrize("name", [name for name in GOOD if name != "text"])
def test_all_chat_formats_say_the_same(name):
    assert turns(read(GOOD[name])) == [("user", "hi"), ("assistant", "yo")]


def test_text_is_a_document():
    assert read(GOOD["text"]) == Document("hi yo")


def test_null_columns_count_as_absent():
    form = detect_format({"messages": None, "prompt": "a", "completion": "b", "text": None})
    assert form is FORMATS["prompt_completion"]
    assert detect_format({"text": None}) is None
    assert detect_format([1]) is None


def test_only_the_completion_is_trained():
    prompt = [said("a"), said("b", "assistant"), said("c")]
    chat = read({"prompt": prompt, "completion": [said("d", "assistant")]})
    assert [message.trained for message in chat.messages] == [False, False, False, True]
    assert chat.plain is None


def test_weight_zero_is_context():
    row = {"messages": [said("a"), said("b", "assistant", weight=0)]}
    assert read(row).messages[1] == Message("assistant", "b", trained=False)


def test_text_parts_are_joined_and_strings_reach_the_template():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    row = {"messages": [said(parts, name="eve", id=3)]}
    assert read(row).messages[0].as_template_input() == said("ab", name="eve")


def test_alpaca_input_follows_the_instruction():
    chat = read({"instruction": "Add.", "input": "1 2", "output": "3"})
    assert turns(chat)[0] == ("user", "Add.\n\n1 2")
    assert chat.plain[0].endswith("### Input:\n1 2\n\n### Response:\n")
    assert "{" not in chat.plain[0]
    plain = read({"instruction": "say {input}", "output": "3"}).plain[0]
    assert plain.endswith("### Instruction:\nsay {input}\n\n### Response:\n")


def test_conversations_may_use_role_and_content_and_a_system_column():
    row = {"system": "be kind", "conversations": [said("hi"), said("yo", "assistant")]}
    assert turns(read(row))[0] == ("system", "be kind")


BAD = [
    ({"messages": []}, "'messages' is empty"),
    ({"messages": "hi"}, "'messages': expected a list, found text"),
    ({"messages": ["hi"]}, r"messages\[0\]: expected an object, found text"),
    ({"messages": [{"content": "hi"}]}, r"messages\[0\].role is missing"),
    ({"messages": [{"role": "user"}]}, r"messages\[0\].content is missing"),
    ({"messages": [said(3)]}, "expected text, found a number"),
    ({"messages": [said("  ")]}, r"messages\[0\].content is empty"),
    ({"messages": [said("hi", "robot")]}, "unknown role 'robot'"),
    ({"messages": [said("\ud800")]}, "surrogate"),
    ({"messages": [said("hi", weight=0.5)]}, "only 0 and 1"),
    ({"messages": [said([{"type": "image"}])]}, "only text parts"),
    ({"messages": [said("x", "assistant", tool_calls=[{}])]}, "tool calling is not supported"),
    ({"text": "hi", "tools": [{}]}, "tool calling is not supported"),
    ({"conversations": [{"from": "alien", "value": "hi"}]}, "unknown role 'alien'"),
    ({"conversations": [{"from": "human"}]}, "value is missing"),
    ({"prompt": "", "completion": "x"}, "'prompt' is empty"),
    ({"prompt": "a", "completion": 1}, "expected text, found a number"),
    ({"prompt": [], "completion": "x"}, "'prompt' is empty"),
    ({"instruction": "a", "output": ""}, "'output' is empty"),
    ({"instruction": "a", "output": "b", "input": 5}, "'input': expected text"),
    ({"text": True}, "expected text, found true or false"),
]


@pytest.mark.parametrize(("row", "message"), BAD)
def test_bad_rows_are_named(row, message):
    with pytest.raises(RowError, match=message):
        read(row)
