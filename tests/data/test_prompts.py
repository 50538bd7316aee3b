"""Files of prompts that evaluations answer."""

from __future__ import annotations

import json

import pytest

from megatrain.data.samples import MANY, read_prompts
from megatrain.errors import DataError


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
