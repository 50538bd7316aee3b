"""The loss mask, token by token, under templates of every temper."""

from __future__ import annotations

import itertools
from datetime import date
from typing import Any

import pytest

from megatrain.data.encoding import Encoder
from megatrain.data.samples import Chat, Message, RowError
from megatrain.data.template import Scene, Template

TURN = "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
CHATML = "{% for m in messages %}" + TURN + "{% endfor %}" + PROMPT
NO_GENERATION_PROMPT = CHATML.removesuffix(PROMPT)
IF_ANSWER = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
)
ELSE = "{% else %}" + TURN + "{% endif %}{% endfor %}"
ANSWER = "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
MARKED = IF_ANSWER + ANSWER + ELSE
# like Qwen3: an answer's thinking is shown only in the last turn, and there also if it is empty
FORGETS_THINKING = (
    IF_ANSWER + "{% if not loop.last %}{{ m['content'].split('</think>')[-1].strip() }}"
    "{% else %}{{ '' if '</think>' in m['content'] else '<think>\n\n</think>\n\n' }}"
    "{{ m['content'] }}{% endif %}{{ '<|im_end|>\n' }}" + ELSE + PROMPT
)
# like Llama 2: no headers, the end of turn is the end-of-sequence token, nothing for a generation
# prompt
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

ANSWERS = ("1\n\nyes", " naïve ☕日本\n")
MULTI = [("system", "be brief"), ("user", "one?"), ("assistant", ANSWERS[0])]
MULTI += [("user", "two?"), ("assistant", ANSWERS[1])]
SHORT = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
ENDED = [f"{answer}<|im_end|>" for answer in ANSWERS]


def messages(turns: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


def chat(turns: list[tuple[str, str]]) -> Chat:
    return Chat(tuple(Message(role, content) for role, content in turns))


def encoded(tokenizer: Any, conversation: Chat) -> tuple[list[int], list[bool]]:
    encoder = Encoder(tokenizer)
    ((ids, mask),) = encoder.encode([encoder.mark(conversation)])
    return ids.tolist(), mask.tolist()


def targets(tokenizer: Any, conversation: Chat) -> list[str]:
    """The text of each run of target tokens."""
    ids, mask = encoded(tokenizer, conversation)
    runs = itertools.groupby(zip(mask, ids, strict=True), key=lambda pair: pair[0])
    return [
        tokenizer.decode([token for _, token in run], clean_up_tokenization_spaces=False)
        for target, run in runs
        if target
    ]


def test_every_answer_with_its_end_of_turn_is_a_target(make_tokenizer):
    for trim_offsets in [True, False]:
        for template in [CHATML, MARKED, NO_GENERATION_PROMPT]:
            tokenizer = make_tokenizer(template, trim_offsets)
            assert targets(tokenizer, chat(MULTI)) == ENDED


def test_the_real_tokenizer_token_by_token(smollm2):
    turns = [("user", "Hi there"), ("assistant", "Hello\n\nyou")]
    ids, mask = encoded(smollm2, chat(turns))
    tokens = smollm2.convert_ids_to_tokens(ids)
    start = tokens.index("Hello")
    assert tokens[start:] == ["Hello", "Ċ", "Ċ", "you", "<|im_end|>", "Ċ"]
    assert mask == [False] * start + [True] * 5 + [False]
    assert ids == smollm2.apply_chat_template(messages(turns), return_dict=False)


def test_own_marks_of_the_template_agree_with_transformers(make_tokenizer):
    # with trimming, transformers loses answers that start with a space
    tokenizer = make_tokenizer(MARKED, trim_offsets=False)
    ids, mask = encoded(tokenizer, chat(MULTI))
    theirs = tokenizer.apply_chat_template(
        messages(MULTI), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    assert ids == theirs["input_ids"]
    assert mask == [bool(flag) for flag in theirs["assistant_masks"]]


def test_rewritten_turns_are_found_and_counted(make_tokenizer):
    tokenizer = make_tokenizer(FORGETS_THINKING)
    thought = ("assistant", "<think>hm</think>\n1")
    conversation = chat([("user", "one?"), thought, ("user", "two?"), ("assistant", "2")])
    assert targets(tokenizer, conversation) == ["1<|im_end|>", "<think>\n\n</think>\n\n2<|im_end|>"]
    marked = Encoder(tokenizer).mark(conversation)
    assert marked.rewritten == 1
    assert marked.notes == ("earlier answers lose their text once other turns follow",)
    alone = chat([("user", "one?"), thought])
    assert targets(tokenizer, alone) == ["<think>hm</think>\n1<|im_end|>"]


def test_eos_ends_the_turns_of_templates_without_headers(make_tokenizer):
    found = targets(make_tokenizer(INST), chat(SHORT))
    assert [run.strip() for run in found] == ["b<|endoftext|>", "d<|endoftext|>"]


def test_a_token_written_when_the_next_turn_begins_ends_the_answer(make_tokenizer):
    late = (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}"
        "{% if not loop.last %}{{ eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ eos_token + 'assistant: ' }}{% endif %}"
    )
    assert targets(make_tokenizer(late), chat(SHORT)) == ["b<|endoftext|>", "d<|endoftext|>"]


def test_eos_ends_the_last_answer_of_a_template_without_tokens(make_tokenizer):
    tokenizer = make_tokenizer(TEXTUAL)
    assert targets(tokenizer, chat(SHORT[:2])) == ["b\n\n<|endoftext|>"]
    untrained = Message("assistant", "b", trained=False)
    question, _, *rest = chat(SHORT).messages
    assert targets(tokenizer, Chat((question, untrained, *rest))) == ["d\n\n<|endoftext|>"]
    with pytest.raises(RowError, match=r"messages\[1\]: the chat template writes no token after"):
        targets(tokenizer, chat(SHORT))
    with pytest.raises(RowError, match=r"the\s+tokenizer has no eos_token"):
        targets(make_tokenizer(TEXTUAL, eos=None), chat(SHORT[:2]))


# like GLM-4: a turn ends where the next role begins
HEADED = (
    "{% for m in messages %}{{ ('<|im_start|>' if m['role'] == 'user' else '<|im_end|>') }}"
    "{{ '\n' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_end|>' }}{% endif %}"
)


def test_where_no_token_ends_a_turn_the_next_one_s_first_does(make_tokenizer):
    tokenizer = make_tokenizer(HEADED)
    found = targets(tokenizer, chat(SHORT))
    assert found == ["\nb<|im_start|>", "\nd<|im_start|>"]
    marked = HEADED.replace("{{ '\n' + m['content'] }}", BLOCK)
    assert targets(make_tokenizer(marked), chat(SHORT)) == found
    assert Template(tokenizer).stop == "<|im_start|>"


BLOCK = (
    "{% if m['role'] == 'user' %}{{ '\n' + m['content'] }}{% else %}"
    "{% generation %}{{ '\n' + m['content'] }}{% endgeneration %}{% endif %}"
)


def test_a_token_in_the_answer_s_own_text_does_not_end_it(make_tokenizer):
    tokenizer = make_tokenizer(HEADED)
    tokenizer.add_tokens(["</tool_call>"])
    turns = [("user", "a"), ("assistant", "b</tool_call>"), ("user", "c")]
    assert targets(tokenizer, chat(turns)) == ["\nb</tool_call><|im_start|>"]


def test_an_ending_of_two_tokens_is_whole_also_where_turns_are_rewritten(make_tokenizer):
    two = FORGETS_THINKING.replace("'<|im_end|>\n'", "'<|endoftext|><|im_end|>\n'")
    tokenizer = make_tokenizer(two)
    thinking = "<think>\n\n</think>\n\n"
    ends = "<|endoftext|><|im_end|>"
    assert targets(tokenizer, chat(SHORT)) == [f"b{ends}", f"{thinking}d{ends}"]
    assert Template(tokenizer).stop == "<|im_end|>"


def test_everything_ends_too_where_all_is_trained_on(make_tokenizer):
    encoder = Encoder(make_tokenizer(HEADED), "all")
    for turns, ended in ((SHORT, True), (SHORT[:3], False)):
        assert encoder.mark(chat(turns)).text.endswith("<|im_start|>") == ended


# like gpt-oss: earlier answers end in another token than the last
RETURNS = (
    "{% for m in messages %}{{ m['role'] + ':' + m['content'] }}"
    "{{ '<|im_end|>' if loop.last else '<|im_start|>' }}{% endfor %}"
)


def test_answers_that_end_otherwise_in_mid_conversation_are_counted(make_tokenizer):
    tokenizer = make_tokenizer(RETURNS)
    assert targets(tokenizer, chat(SHORT)) == ["b<|im_start|>", "d<|im_end|>"]
    note = "answers end in <|im_start|>, where the chat template ends the last one in <|im_end|>"
    assert Encoder(tokenizer).mark(chat(SHORT)).notes == (note,)
    assert Template(tokenizer).stop == "<|im_end|>"
    assert Encoder(make_tokenizer()).mark(chat(SHORT)).notes == ()


def test_context_only_answers_are_no_targets(make_tokenizer):
    for template in [CHATML, MARKED]:
        first, *rest = chat([("assistant", "a"), ("user", "b"), ("assistant", "c")]).messages
        conversation = Chat((Message("assistant", first.content, trained=False), *rest))
        assert targets(make_tokenizer(template), conversation) == ["c<|im_end|>"]


def test_the_same_text_in_question_and_answer_is_told_apart(make_tokenizer):
    for template in [CHATML, NO_GENERATION_PROMPT, FORGETS_THINKING]:
        runs = targets(make_tokenizer(template), chat([(role, "yes") for role, _ in SHORT]))
        assert [run.removeprefix("<think>\n\n</think>\n\n") for run in runs] == [
            "yes<|im_end|>"
        ] * 2


def test_variables_of_a_row_reach_the_template(make_tokenizer):
    template = "{% if loud is defined and loud %}LOUD {% endif %}" + CHATML
    turns = chat(SHORT).messages
    tokenizer = make_tokenizer(template)
    for loud in (True, False):
        ids, mask = encoded(tokenizer, Chat(turns, variables={"loud": loud}))
        theirs = tokenizer.apply_chat_template(messages(SHORT), loud=loud, return_dict=False)
        assert ids == theirs
        assert tokenizer.decode(ids).startswith("LOUD") == loud
        assert sum(mask) == 4


def test_refusals_name_the_template(make_tokenizer):
    with pytest.raises(RowError, match="System role not supported"):
        targets(make_tokenizer(INST), chat(MULTI))
    words = r"messages\[1\]: the chat template rewrites the conversation"
    with pytest.raises(RowError, match=words):
        targets(make_tokenizer(SHUFFLES), chat(SHORT[:2]))


CLOCKS = {
    "{{ strftime_now('%d %b %Y') }}": "04 Jul 2024",
    "{% if strftime_now is defined %}{{ strftime_now('%-d.' + '%m.%y') }}{% endif %}": "4.07.24",
    "{% macro at(f) %}{{ strftime_now(f) }}{% endmacro %}{{ at('%A 9%% %T') }}": "Thursday 9% 00:",
    "\n  {{ strftime_now('no directive') }}": "\n  no directive",
}


def test_a_template_that_asks_for_the_time_is_told_the_day(make_tokenizer):
    for clock in CLOCKS:
        tokenizer, scene = (
            make_tokenizer(clock + CHATML),
            Scene(({"role": "user", "content": "hi"},)),
        )
        text = Template(tokenizer, date(2024, 7, 4)).render(scene)
        assert text.startswith(CLOCKS[clock])
        assert text.endswith("<|im_start|>user\nhi<|im_end|>\n")
        assert Template(tokenizer).render(scene) != text or "%" not in clock, "the clock's"
        plain = make_tokenizer()
        assert Template(plain, date(2024, 7, 4)).render(scene) == Template(plain).render(scene)
