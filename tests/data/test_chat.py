"""The loss mask, token by token, under templates of every temper."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from megatrain.data.formats import Chat, Message, RowError
from megatrain.data.tokenize import Encoder

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
)
NO_GENERATION_PROMPT = CHATML.partition("{% if add")[0]
# like Qwen3: an answer's thinking is shown only in the last turn
FORGETS_THINKING = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% if loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ m['content'].split('</think>')[-1].strip() + '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# like Llama 2: no headers, the end of turn is the end-of-sequence token, nothing for a generation prompt
INST = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + eos_token }}"
    "{% else %}{{ raise_exception('System role not supported') }}{% endif %}{% endfor %}"
)
SHUFFLES = "{% for m in messages %}{{ m['content'] | upper }}{% endfor %}"
TEXTUAL = (
    "{% for m in messages %}{{ '### ' + m['role'] + ': ' + m['content'] + '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}### assistant: {% endif %}"
)

MULTI = [
    ("system", "be brief"),
    ("user", "one?"),
    ("assistant", "1\n\nyes"),
    ("user", "two?"),
    ("assistant", " naïve ☕日本\n"),
]


def chat(turns: list[tuple[str, str]]) -> Chat:
    return Chat(tuple(Message(role, content) for role, content in turns))


def targets(tokenizer: Any, conversation: Chat) -> list[str]:
    """The text of each run of target tokens."""
    encoder = Encoder(tokenizer)
    ((ids, mask),) = encoder.encode([encoder.mark(conversation)])
    runs = itertools.groupby(
        zip(mask.tolist(), ids.tolist(), strict=True), key=lambda pair: pair[0]
    )
    return [
        tokenizer.decode([token for _, token in run], clean_up_tokenization_spaces=False)
        for target, run in runs
        if target
    ]


@pytest.mark.parametrize("trim_offsets", [True, False])
@pytest.mark.parametrize("template", [CHATML, MARKED, NO_GENERATION_PROMPT])
def test_every_answer_with_its_end_of_turn_is_a_target(
    make_tokenizer: Callable[..., Any], template: str, trim_offsets: bool
):
    tokenizer = make_tokenizer(template, trim_offsets)
    assert targets(tokenizer, chat(MULTI)) == ["1\n\nyes<|im_end|>", " naïve ☕日本\n<|im_end|>"]


def test_the_real_tokenizer_token_by_token(smollm2: Any):
    encoder = Encoder(smollm2)
    ((ids, mask),) = encoder.encode(
        [encoder.mark(chat([("user", "Hi there"), ("assistant", "Hello\n\nyou")]))]
    )
    tokens = smollm2.convert_ids_to_tokens(ids.tolist())
    start = tokens.index("Hello")
    assert tokens[start:] == ["Hello", "Ċ", "Ċ", "you", "<|im_end|>", "Ċ"]
    assert mask.tolist() == [False] * start + [True] * 5 + [False]
    assert ids.tolist() == smollm2.apply_chat_template(
        [{"role": "user", "content": "Hi there"}, {"role": "assistant", "content": "Hello\n\nyou"}],
        return_dict=False,
    )


def test_the_real_tokenizer_over_many_turns(smollm2: Any):
    assert targets(smollm2, chat(MULTI)) == ["1\n\nyes<|im_end|>", " naïve ☕日本\n<|im_end|>"]


def test_own_marks_of_the_template_agree_with_transformers(make_tokenizer: Callable[..., Any]):
    tokenizer = make_tokenizer(
        MARKED, trim_offsets=False
    )  # with trimming, transformers loses answers that start with a space
    encoder = Encoder(tokenizer)
    ((ids, mask),) = encoder.encode([encoder.mark(chat(MULTI))])
    messages = [{"role": role, "content": content} for role, content in MULTI]
    theirs = tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    assert ids.tolist() == theirs["input_ids"]
    assert mask.tolist() == [bool(flag) for flag in theirs["assistant_masks"]]


def test_rewritten_turns_are_found_and_counted(make_tokenizer: Callable[..., Any]):
    tokenizer = make_tokenizer(FORGETS_THINKING)
    conversation = chat(
        [
            ("user", "one?"),
            ("assistant", "<think>hm</think>\n1"),
            ("user", "two?"),
            ("assistant", "2"),
        ]
    )
    assert targets(tokenizer, conversation) == ["1<|im_end|>", "<think>\n\n</think>\n\n2<|im_end|>"]
    assert Encoder(tokenizer).mark(conversation).rewritten == 1


def test_eos_ends_the_turns_of_templates_without_headers(make_tokenizer: Callable[..., Any]):
    tokenizer = make_tokenizer(INST)
    conversation = chat([("user", "a"), ("assistant", "b c"), ("user", "d"), ("assistant", "e")])
    assert [run.strip() for run in targets(tokenizer, conversation)] == [
        "b c<|endoftext|>",
        "e<|endoftext|>",
    ]


def test_a_token_written_when_the_next_turn_begins_ends_the_answer(
    make_tokenizer: Callable[..., Any],
):
    late = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% if not loop.last %}{{ eos_token }}{% endif %}{% endfor %}"
    late += "{% if add_generation_prompt %}{{ eos_token + 'assistant: ' }}{% endif %}"
    conversation = chat([("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")])
    assert targets(make_tokenizer(late), conversation) == ["b<|endoftext|>", "d"]


def test_white_space_that_ends_a_turn_is_a_target_where_no_token_does(
    make_tokenizer: Callable[..., Any],
):
    tokenizer = make_tokenizer(TEXTUAL)
    conversation = chat([("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")])
    assert targets(tokenizer, conversation) == ["b\n\n", "d\n\n"]


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_context_only_answers_are_no_targets(make_tokenizer: Callable[..., Any], template: str):
    first, *rest = chat([("assistant", "a"), ("user", "b"), ("assistant", "c")]).messages
    conversation = Chat((Message("assistant", first.content, trained=False), *rest))
    assert targets(make_tokenizer(template), conversation) == ["c<|im_end|>"]


def test_a_conversation_may_start_with_the_answer(make_tokenizer: Callable[..., Any]):
    assert targets(make_tokenizer(CHATML), chat([("assistant", "hello"), ("user", "b")])) == [
        "hello<|im_end|>"
    ]


def test_the_same_text_in_question_and_answer_is_told_apart(make_tokenizer: Callable[..., Any]):
    for template in (CHATML, NO_GENERATION_PROMPT, FORGETS_THINKING):
        runs = targets(
            make_tokenizer(template),
            chat([("user", "yes"), ("assistant", "yes"), ("user", "yes"), ("assistant", "yes")]),
        )
        assert [run.removeprefix("<think>\n\n</think>\n\n") for run in runs] == [
            "yes<|im_end|>",
            "yes<|im_end|>",
        ]


def test_refusals_name_the_template(make_tokenizer: Callable[..., Any]):
    with pytest.raises(RowError, match="System role not supported"):
        targets(make_tokenizer(INST), chat(MULTI))
    with pytest.raises(
        RowError, match=r"messages\[1\]: the chat template rewrites the conversation"
    ):
        targets(make_tokenizer(SHUFFLES), chat([("user", "a"), ("assistant", "b")]))
