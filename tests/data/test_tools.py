"""Tools, calls of them and their results: as rows have them, as templates take them, and what of
them is trained on."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, Features, Json, List, Value

from megatrain.data.build import AskedSet
from megatrain.data.encoding import Encoder, RowOptions
from megatrain.data.formats import convert_row, detect_format
from megatrain.data.samples import Chat, RowError, parsed_calls
from megatrain.models.pretrained import ends_of_turns
from tests.helpers.mutated import mutated

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"name": "get_weather", "description": "Look outside.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": WEATHER}]
ARGUMENTS = {"city": 'Paris, "Tx"\né', "days": 2}


def call(arguments: Any = ARGUMENTS, **more: Any) -> dict[str, Any]:
    return {**more, "type": "function", "function": {"name": "get_weather", "arguments": arguments}}


ASK = {"role": "user", "content": "Weather?"}
RESULT = {"role": "tool", "content": "sunny"}
TELL = {"role": "assistant", "content": "It is sunny."}


def turns(*calls: dict[str, Any], content: str | None = None) -> list[dict[str, Any]]:
    return [ASK, {"role": "assistant", "content": content, "tool_calls": [*calls]}, RESULT, TELL]


def read(row: dict[str, Any]) -> Chat:
    form = detect_format(row)
    assert form is not None
    (chat,) = convert_row(form, row).texts
    assert isinstance(chat, Chat)
    return chat


PLAIN = read({"messages": turns(call()), "tools": TOOLS})
CALL_TEXT = json.dumps({"name": "get_weather", "arguments": ARGUMENTS})
SHAREGPT = [("human", "Weather?"), ("function_call", CALL_TEXT), ("observation", "sunny")]
SHAREGPT += [("gpt", "It is sunny.")]
CONVERSATIONS = [{"from": role, "value": text} for role, text in SHAREGPT]
OLD = [ASK, {"role": "assistant", "function_call": json.loads(CALL_TEXT)}]
OLD += [{"role": "function", "content": "sunny"}, TELL]


def test_every_form_says_the_same():
    row: Any
    for row in [
        {"messages": turns(call(json.dumps(ARGUMENTS))), "tools": json.dumps(TOOLS)},
        {"messages": turns({"name": "get_weather", "arguments": ARGUMENTS}), "tools": TOOLS},
        {"conversations": CONVERSATIONS, "tools": json.dumps([WEATHER])},
        {"conversations": turns(call()), "tools": TOOLS},
        {"messages": OLD, "functions": [WEATHER]},
    ]:
        assert read(row) == PLAIN


def test_what_cannot_be_read_is_named():
    row: Any
    for row, words in [
        ({"messages": turns(call("{"))}, r"tool_calls\[0\].arguments: not JSON"),
        ({"messages": turns(call("3"))}, "expected an object or JSON text of one, found a number"),
        ({"messages": turns({"function": "f"})}, r"\[0\].function: expected an object, found text"),
        ({"messages": turns({"arguments": {}})}, r"\[0\].name is missing"),
        ({"messages": [ASK, {**TELL, "tool_calls": 3}]}, "expected a list of objects, found a num"),
        ({"messages": [ASK, TELL], "tools": "nothing"}, "field 'tools': not JSON"),
        ({"messages": [ASK, TELL], "tools": [{"type": "function"}]}, r"tools\[0\].name is missing"),
        ({"messages": [ASK, TELL], "tools": TOOLS, "functions": [WEATHER]}, "keep one"),
        ({"messages": [ASK, {"role": "assistant", "content": ""}]}, r"messages\[1\].content is em"),
    ]:
        with pytest.raises(RowError, match=words):
            read(row)


# like Qwen2.5: an object, between words that are no special tokens
LIKE_QWEN = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>"
    "{% endif %}{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content if m.content else '' }}{% for c in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# like Mistral: no generation prompt and no header
LIKE_MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}{% if tools and loop.last %}[TOOLS]"
    "{{ tools | tojson }}[/TOOLS]{% endif %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'tool' %}[RESULTS] {{ m.content | tojson }} [/RESULTS]"
    "{% elif m.tool_calls %}[CALLS] {% for c in m.tool_calls %}{{ c.function | tojson }}"
    "{% endfor %}{{ eos_token }}{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
# like DeepSeek's: text of arguments, and calls only where there is no content
LIKE_DEEPSEEK = (
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{% for m in messages %}"
    "{% if m.role == 'assistant' and m.content is none %}{% for c in m.tool_calls %}"
    "<|im_start|>{{ c.function.name + '\n' + c.function.arguments }}{% endfor %}{{ eos_token }}"
    "{% elif m.role == 'assistant' %}<|im_start|>{{ m.content + eos_token }}"
    "{% else %}{{ m.role + ': ' + m.content + '\n' }}{% endif %}{% endfor %}"
)
JSON = json.dumps(ARGUMENTS, ensure_ascii=False)
FUNCTION = '{"name": "get_weather", "arguments": ' + JSON + "}"
QWEN_TARGETS = [f"<tool_call>{FUNCTION}</tool_call><|im_end|>", "It is sunny.<|im_end|>"]


def spans(tokenizer: Any, chat: Chat) -> list[str]:
    marked = Encoder(tokenizer).mark(chat)
    assert marked.spans is not None
    return [marked.text[start:stop] for start, stop in marked.spans]


def test_calls_are_targets_and_results_are_not(make_tokenizer):
    assert spans(make_tokenizer(LIKE_QWEN), PLAIN) == QWEN_TARGETS


# like GLM-4.5: a call ends where its result begins, and an answer where the next question does
LIKE_GLM = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}"
    "{{ {'user': '<|im_start|>', 'tool': '<|endoftext|>'}.get(m.role, '') + '\n' + m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}{{ '\n' }}{% endif %}"
)


def test_what_ends_a_call_is_a_stop_too(make_tokenizer):
    tokenizer = make_tokenizer(LIKE_GLM, eos="<|im_end|>")
    tokenizer.add_tokens(["</tool_call>"])
    ends = [one[one.rindex("<") :] for one in spans(tokenizer, PLAIN)]
    assert ends == ["<|endoftext|>", "<|im_start|>"]
    assert ends_of_turns(tokenizer) == ("<|im_start|>", "<|endoftext|>")
    assert Encoder(tokenizer).mark(PLAIN).notes == ()


def test_the_template_decides_on_the_form_of_arguments(make_tokenizer):
    found = spans(make_tokenizer(LIKE_DEEPSEEK), PLAIN)
    assert found[0].endswith(f"get_weather\n{JSON}<|endoftext|>")


def test_reasoning_and_content_beside_calls_are_targets(make_tokenizer):
    said = turns(call(), call({}), content="Let me look.")
    said[1]["reasoning_content"] = "hm"
    (first, _) = spans(make_tokenizer(LIKE_QWEN), read({"messages": said, "tools": TOOLS}))
    assert first.startswith("<think>hm</think>Let me look.<tool_call>")
    assert first.endswith('"arguments": {}}</tool_call><|im_end|>')


def test_masks_are_those_of_generation_blocks(make_tokenizer):
    blocks = LIKE_QWEN.replace(
        "{% if m.reasoning", "{% if m.role == 'assistant' %}{% generation %}{% if m.reasoning"
    ).replace(
        "<|im_end|>\n{% endfor %}",
        "<|im_end|>{% endgeneration %}{{ '\n' }}{% else %}{{ m.content }}<|im_end|>\n{% endif %}"
        "{% endfor %}",
    )
    tokenizer = make_tokenizer(blocks, trim_offsets=False)
    theirs = tokenizer.apply_chat_template(
        turns(call(), content=""), tools=TOOLS, return_dict=True, return_assistant_tokens_mask=True
    )
    for template in (blocks, LIKE_QWEN):
        encoder = Encoder(make_tokenizer(template, trim_offsets=False))
        ((ids, mask),) = encoder.encode([encoder.mark(PLAIN)])
        assert ids.tolist() == theirs["input_ids"]
        assert mask.astype(int).tolist() == theirs["assistant_masks"]


def test_a_template_without_tools_or_calls_refuses(make_tokenizer):
    encoder = Encoder(make_tokenizer())
    with pytest.raises(RowError, match="field 'tools': the chat template leaves them out"):
        encoder.mark(PLAIN)
    with pytest.raises(RowError, match=r"messages\[1\]: the chat template leaves "):
        encoder.mark(replace(PLAIN, tools=()))


def test_a_tokenizer_s_own_template_for_tools_is_used(make_tokenizer):
    plain = LIKE_QWEN.replace("{% if tools %}", "{% if false %}")
    both = make_tokenizer({"default": plain, "tool_use": LIKE_QWEN})
    assert spans(both, PLAIN) == QWEN_TARGETS
    assert "Look outside" in Encoder(both).mark(PLAIN).text
    with pytest.raises(RowError, match="leaves them out"):
        spans(make_tokenizer(plain), PLAIN)


def test_arrow_s_nulls_are_no_fields(make_tokenizer, cache):
    """A column's objects have the fields of all of them."""
    other = turns({"name": "get_weather", "arguments": {"town": "Oslo"}})
    rows = [{"messages": turns(call({"city": "Rome"})), "tools": TOOLS}]
    rows += [{"messages": other, "tools": TOOLS}]
    tokenizer = make_tokenizer(LIKE_QWEN)
    data = AskedSet(Dataset.from_list(rows), tokenizer, RowOptions(seq_len=None), cache).rows()
    first = tokenizer.decode(data.row(0)[0])
    assert '"arguments": {"city": "Rome"}' in first
    assert "null" not in first


FIND = {"type": "object", "properties": {"q": {"type": "string"}, "limit": {"type": "integer"}}}
FIND_TOOL = {
    "type": "function",
    "function": {"name": "find", "description": "?", "parameters": FIND},
}
FOUND = {"type": "function", "function": {"name": "find", "arguments": {"q": "a", "limit": None}}}
WITH_NULLS = [
    {"messages": turns(FOUND), "tools": [FIND_TOOL], "system": None},
    {"messages": turns(call({"city": "Rome", "days": None})), "tools": TOOLS, "system": "be"},
    {"messages": [ASK, TELL], "tools": [FIND_TOOL, *TOOLS], "system": None},
    {"messages": [ASK, TELL], "tools": [FIND_TOOL], "system": None},
]
JSON_COLUMNS = Features(
    {name: List(Json()) for name in ("messages", "tools")} | {"system": Value("string")}
)


def saved(rows: Dataset, name: str, folder: Path) -> str:
    path = folder / name
    how = {"rows.parquet": rows.to_parquet, "saved": rows.save_to_disk}
    how |= {"rows.jsonl": rows.to_json, "rows.json": partial(rows.to_json, lines=False)}
    how[name](str(path))
    return str(path)


def test_one_row_has_the_same_tokens_from_every_container(make_tokenizer, cache, tmp_path):
    """Nulls of JSON are data; Arrow's own objects have the fields of all, filled with nulls."""

    def shown(given: Any) -> list[str]:
        data = AskedSet(given, tokenizer, RowOptions(seq_len=None), cache).rows()
        return [tokenizer.decode(data.row(number)[0]) for number in range(len(data))]

    tokenizer = make_tokenizer(LIKE_QWEN)
    of_json, of_structs = Dataset.from_list(WITH_NULLS, JSON_COLUMNS), Dataset.from_list(WITH_NULLS)
    expected = shown(WITH_NULLS)
    assert '"arguments": {"q": "a", "limit": null}' in expected[0]
    for name in ("rows.jsonl", "rows.json", "rows.parquet", "saved"):
        assert shown(saved(of_json, name, tmp_path)) == expected, name
    assert shown(of_json) == expected

    without = shown(of_structs)
    assert without == [
        text.replace(', "limit": null', "").replace(', "days": null', "") for text in expected
    ]
    (other := tmp_path / "padded").mkdir()
    for name in ("rows.jsonl", "rows.json", "rows.parquet", "saved"):
        assert shown(saved(of_structs, name, other)) == without, name
    assert shown(of_structs.to_list()) == without


def rows_to_mutate() -> list[dict[str, Any]]:
    return [
        {"messages": turns(call()), "tools": TOOLS},
        {"messages": turns(call(json.dumps(ARGUMENTS))), "tools": json.dumps(TOOLS)},
        {"conversations": CONVERSATIONS, "tools": json.dumps([WEATHER])},
        {"messages": OLD, "functions": [WEATHER], "chat_template_kwargs": {"loud": True}},
        {"instruction": "a", "output": "b", "history": [["a", "b"]], "system": "s"},
    ]


@pytest.mark.slow
@pytest.mark.parametrize("template", [LIKE_QWEN, LIKE_MISTRAL, LIKE_DEEPSEEK, LIKE_GLM])
@pytest.mark.parametrize("train_on", ["assistant", "all"])
def test_mutated_rows_with_tools_are_bad_or_trainable_and_never_crash(
    make_tokenizer, cache, template, train_on
):
    rng = random.Random(0)
    rows = [mutated(rng.choice(rows_to_mutate()), rng) for _ in range(400)]
    rows.append({"messages": turns(call()), "functions": [{**WEATHER, "description": "\ud800"}]})
    options = RowOptions(seq_len=None, train_on=train_on, on_bad_row="skip")
    data = AskedSet(rows, make_tokenizer(template), options, cache).rows()
    assert data.counts.read == data.counts.bad + data.counts.without_target + len(data)
    assert len(data) > 20
    assert data.target_counts.min() >= 1


@pytest.mark.parametrize("arguments", [0, False, '"a"', '{"a": 1, "a": 2}'])
def test_arguments_that_would_be_lost_are_refused(arguments):
    with pytest.raises(RowError, match=r"^tool_calls\[0\]\.arguments: "):
        parsed_calls([{"name": "f", "arguments": arguments}], "tool_calls")
