"""Every row format, and every way a row can be wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatrain.data.formats import (
    MATTERS,
    ROW_FORMATS,
    convert_row,
    detect_format,
    formats_of,
    unread_columns,
)
from megatrain.data.samples import MANY, PLAIN, Chat, Document, Message, RowError, read_prompts
from megatrain.errors import DataError


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
    (found,) = convert_row(form, row).texts
    return found


def turns(chat: Chat) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in chat.messages]


def test_every_format_has_a_good_row():
    assert set(GOOD) == set(formats_of(PLAIN))


@pytest.mark.parametrize("name", GOOD)
def test_is_found_by_its_columns(name):
    found = detect_format({**GOOD[name], "id": 7})
    assert found is not None
    assert found == name


@pytest.mark.parametrize("name", [name for name in GOOD if name != "text"])
def test_all_chat_formats_say_the_same(name):
    assert turns(read(GOOD[name])) == [("user", "hi"), ("assistant", "yo")]


def test_text_is_a_document():
    assert read(GOOD["text"]) == Document("hi yo")


def test_null_columns_count_as_absent():
    form = detect_format({"messages": None, "prompt": "a", "completion": "b", "text": None})
    assert form == "prompt_completion"
    assert detect_format({"text": None}) is None
    assert detect_format([1]) is None


def test_only_the_completion_is_trained():
    prompt = [said("a"), said("b", "assistant"), said("c")]
    chat = read({"prompt": prompt, "completion": [said("d", "assistant")]})
    assert [message.trained for message in chat.messages] == [False, False, False, True]
    assert chat.plain is None


def test_text_parts_are_joined_and_strings_reach_the_template():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    row = {"messages": [said(parts, name="eve", id=3)]}
    assert read(row).messages[0] == Message("user", "ab", extra={"name": "eve"})


def test_fields_of_text_parts_are_refused_or_named():
    part: dict[str, Any] = {"type": "text", "text": "yo", "cache_control": {"x": 1}, "id": None}
    row = {"messages": [said("hi"), said([part], "assistant")]}
    assert read(row).unread == {"messages[].content[].cache_control"}
    part["train"] = False
    with pytest.raises(RowError, match=r"^messages\[1\]\.content\[0\]\.train: parts of a turn"):
        read(row)


@pytest.mark.parametrize("value", [0, False])
@pytest.mark.parametrize(
    ("column", "expected"), [("input", "text"), ("chat_template_kwargs", "an")]
)
def test_a_zero_where_something_else_is_expected_is_refused(column, value, expected):
    with pytest.raises(RowError, match=f"field '{column}': expected {expected}"):
        read({"instruction": "hi", "output": "yo", column: value})


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


SAYS = {  # each column of MATTERS with something that it could say
    "chosen": "yes", "rejected": "no", "label": False, "kto_tag": True, "score": 0.0, "margin": 2,
    "weight": 0, "images": ["a.png"], "videos": ["a.mp4"], "audios": ["a.wav"], "image": "a.png",
    "video": "a.mp4", "audio": "a.wav", "system": "be kind",
    "system_prompt": "be kind", "history": [["a", "b"]],
    "chat_template_kwargs": {"enable_thinking": False}, "tools": [{"name": "f"}],
    "functions": [{"name": "f"}], "tool_calls": [{"name": "f"}], "function_call": {"name": "f"},
}  # fmt: skip
READ = {
    (name, column)
    for name in GOOD
    for column in ("system", "system_prompt", "chat_template_kwargs")
    if name != "text"
} | {("alpaca", "history")}
READ |= {
    (name, column)
    for name in ("messages", "sharegpt", "prompt_completion")
    for column in ("tools", "functions")
}


def test_a_column_that_matters_changes_the_sample_or_refuses_the_row():
    for name in GOOD:
        for column in MATTERS:
            row = {**GOOD[name], column: SAYS[column]}
            if (name, column) in READ:
                assert read(row) != read(GOOD[name])
                assert column in ROW_FORMATS[name].reads()
            else:
                with pytest.raises(RowError, match=f"^field '{column}': "):
                    read(row)
            nothing: Any
            for nothing in (None, "", [], {}):
                assert read({**GOOD[name], column: nothing}) == read(GOOD[name])


def test_labels_and_scores_of_documents_do_not_matter_to_pre_training():
    row = {"text": "hi yo", "score": 3.1, "label": 0}
    assert convert_row("text", row, pretrain=True).texts == (Document("hi yo"),)
    with pytest.raises(RowError, match="'rejected'"):
        convert_row("text", {**row, "rejected": "no"}, pretrain=True)
    with pytest.raises(RowError, match="'label'"):
        convert_row("messages", {**GOOD["messages"], "label": 0}, pretrain=True)


def test_other_columns_and_fields_are_named():
    row = {**GOOD["alpaca"], "id": 7, "source": "x", "empty": None}
    assert unread_columns(row, ROW_FORMATS["alpaca"].reads()) == ["id", "source"]
    chat = read({"messages": [said("hi", id=3, tags=None), said("yo", "assistant", name="eve")]})
    assert chat.unread == {"messages[].id"}
    turns_of = [{"from": "human", "value": "a", "x": 1}, {"from": "gpt", "value": "b"}]
    assert read({"conversations": turns_of}).unread == {"conversations[].x"}


@pytest.mark.parametrize("flag", ["weight", "train", "training", "loss"])
def test_every_name_of_the_flag_makes_a_turn_context(flag):
    openai = {"messages": [said("a"), said("b", "assistant", **{flag: 0})]}
    theirs = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", flag: False}]
    for row in (openai, {"conversations": theirs}):
        assert read(row).messages[1] == Message("assistant", "b", trained=False)


def test_history_becomes_turns_before_the_instruction():
    chat = read({**GOOD["alpaca"], "history": [["a", "b"], ["c", "d"]]})
    said_before = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    assert turns(chat) == [*said_before, ("user", "hi"), ("assistant", "yo")]
    assert chat.plain is None


def test_a_system_column_is_the_first_message():
    for name in [name for name in GOOD if name != "text"]:
        for column in ["system", "system_prompt"]:
            assert turns(read({**GOOD[name], column: "be kind"}))[0] == ("system", "be kind")


def test_two_system_prompts_are_refused():
    row = {"messages": [said("be", "system"), *GOOD["messages"]["messages"]], "system": "kind"}
    with pytest.raises(RowError, match=r"'system': a system turn says the same"):
        read(row)
    with pytest.raises(RowError, match=r"'system': system_prompt says the same"):
        read({**GOOD["alpaca"], "system": "a", "system_prompt": "b"})


def test_variables_of_the_template_are_the_row_s():
    row = {**GOOD["messages"], "chat_template_kwargs": {"enable_thinking": False, "other": None}}
    assert read(row).variables == {"enable_thinking": False}


BAD = [
    ({"messages": [said("hi", train=True)]}, r"messages\[0\].train: only the assistant's turns"),
    ({"messages": [said("hi", train_detail=[{}])]}, "train_detail: parts of a turn"),
    ({"instruction": "a", "output": "b", "history": [["a"]]}, r"history\[0\]: expected a list of"),
    ({"instruction": "a", "output": "b", "history": [["a", ""]]}, r"history\[0\].1 is empty"),
    ({"messages": [said("hi")], "chat_template_kwargs": "x"}, "expected an object, found text"),
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
    ({"messages": [said([{"type": "image"}])]}, r"messages\[0\]: images are not read"),
    ({"messages": [said([{"type": "image_url"}])]}, "images are not read"),
    ({"messages": [said([{"type": "video"}])]}, "only texts and images"),
    ({"text": "<image> a cat", "image": "cat.png"}, "field 'image': images are not read"),
    ({"messages": [said("x", tool_calls=[{"name": "f"}])]}, "only the assistant's turns have c"),
    ({"text": "hi", "tools": [{"name": "f"}]}, "field 'tools': a row of this format has no place"),
    ({"instruction": "a", "output": "b", "tools": [{"name": "f"}]}, "field 'tools': a row of this"),
    ({"conversations": [{"from": "alien", "value": "hi"}]}, "unknown role 'alien'"),
    ({"conversations": [{"from": "human"}]}, "value is missing"),
    ({"prompt": "", "completion": "x"}, "'prompt' is empty"),
    ({"prompt": "a", "completion": 1}, "expected text, found a number"),
    ({"prompt": [], "completion": "x"}, "'prompt' is empty"),
    ({"instruction": "a", "output": ""}, "'output' is empty"),
    ({"instruction": "a", "output": "b", "input": 5}, "'input': expected text"),
    ({"text": True}, "expected text, found true or false"),
]


def test_bad_rows_are_named():
    for row, message in BAD:
        with pytest.raises(RowError, match=message):
            read(row)


# -- Files of prompts that evaluations answer ------------------------------------------------------


def of_user(*texts: str) -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": text}] for text in texts]


def test_a_text_file_has_a_prompt_a_line(tmp_path):
    (tmp_path / "asked.txt").write_text("Who are you?\n\n  What is 2 + 2?\n")
    found = read_prompts(str(tmp_path / "asked.txt"))
    assert found == of_user("Who are you?", "  What is 2 + 2?")


def test_a_jsonl_file_has_texts_or_turns(tmp_path):
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    path = tmp_path / "asked.jsonl"
    path.write_text(f'{{"prompt": "Who are you?", "id": 7}}\n\n{json.dumps({"messages": turns})}\n')
    assert read_prompts(str(path)) == [*of_user("Who are you?"), turns]


REFUSED = {
    "{": "asked.jsonl:1: Expecting property name",
    '"Hi"': "asked.jsonl:1: expected an object, found text",
    '\n{"prompt": ""}': "asked.jsonl:2: field 'prompt' is empty",
    '{"messages": []}': "asked.jsonl:1: field 'messages' is empty",
    '{"messages": [{"role": "user"}]}': "asked.jsonl:1: messages[0].content is missing",
    '{"messages": [{"role": "assistant", "content": "Hi"}]}': "asked.jsonl:1: ends with an answer",
    "\n \n": "asked.jsonl: holds 0 prompts; write one a line",
    '{"prompt": "Hi"}\n' * (MANY + 1): "asked.jsonl: holds 1,001 prompts",
}


def test_what_is_no_prompt_is_refused_with_its_line(tmp_path, monkeypatch):
    for text in REFUSED:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "asked.jsonl").write_text(text)
        with pytest.raises(DataError) as caught:
            read_prompts("asked.jsonl")
        assert str(caught.value).startswith(REFUSED[text])


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "asked.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="cannot be read as text"):
        read_prompts(str(tmp_path / "asked.txt"))
    with pytest.raises(DataError, match="no such file"):
        read_prompts(str(tmp_path / "none.txt"))
