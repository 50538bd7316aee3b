"""The loss mask, token by token, under templates of every temper."""

from __future__ import annotations

import itertools
from datetime import date
from typing import Any

import pytest

from megatrain.data.encoding import Encoder
from megatrain.data.samples import Chat, Message, RowError
from megatrain.data.template import NAMED_TEMPLATES, Scene, Template, use_template
from megatrain.errors import DataError
from tests.helpers.commands import OF_PARTS

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


def test_a_template_that_takes_parts_only_gets_them(make_tokenizer):
    for train_on in ["assistant", "all"]:
        of_texts, of_parts = (
            Encoder(make_tokenizer(source), train_on) for source in (CHATML, OF_PARTS)
        )
        for turns in (SHORT, MULTI, [("system", "be brief"), *SHORT]):
            assert of_parts.mark(chat(turns)) == of_texts.mark(chat(turns))


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


# -- Text that a chat template leaves out refuses the row or is counted ----------------------------


# A turn of each role as it is, but for one that is left out or changed.
OTHERS = "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"


def template(condition: str, instead: str = "") -> str:
    turn = f"{{% if {condition} %}}{instead}{{% else %}}{OTHERS}{{% endif %}}"
    prompt = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    return f"{{% for m in messages %}}{turn}{{% endfor %}}{prompt}"


NO_SYSTEM = template("m['role'] == 'system'")
NO_DEVELOPER = template("m['role'] == 'developer'")
NO_TOOL = template("m['role'] == 'tool'")
NO_LATER_SYSTEM = template("m['role'] == 'system' and not loop.first")
# like DeepSeek-V3
NO_THINKING = template(
    "m['role'] == 'assistant'",
    "<|im_start|>assistant\n{{ m['content'].split('</think>')[-1] }}<|im_end|>\n",
)
# like Qwen3
THINKS_LAST = template(
    "m['role'] == 'assistant'",
    "<|im_start|>assistant\n{% if loop.last and m.reasoning_content %}<think>\n"
    "{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m['content'] }}<|im_end|>\n",
)
INDENTS = template("m['role'] == 'user'", "> {{ m['content'] | trim | indent(4) }}<|im_end|>")
AS_JSON = template("m['role'] == 'tool'", "{{ m['content'] | tojson }}<|im_end|>")

ASK, SAY = Message("user", "two  and\ntwo?\n"), Message("assistant", "It is 4.")
KINDS: dict[str, tuple[Message, ...]] = {
    "system": (Message("system", 'be "brief"'), ASK, SAY),
    "developer": (Message("developer", "be brief"), ASK, SAY),
    "later system": (Message("system", "a"), ASK, SAY, Message("system", "be brief"), ASK, SAY),
    "tool": (ASK, Message("tool", '{"a": "4\n"}'), SAY),
    "name": (Message("user", "hi", extra={"name": "eve"}), SAY),
    "thinking": (ASK, Message("assistant", "<think>hm</think>It is 4.")),
    "reasoning": (ASK, Message("assistant", "It is 4.", extra={"reasoning_content": "hm"})),
    "earlier reasoning": (
        *(ASK, Message("assistant", "It is 4.", extra={"reasoning_content": "hm"})),
        *(ASK, SAY),
    ),
}  # fmt: skip
REFUSED = r"^messages\[{}\]: the chat template leaves out {}"
TABLE: dict[tuple[str, str], Any] = {
    (CHATML, "system"): None,
    (CHATML, "developer"): None,
    (CHATML, "later system"): None,
    (CHATML, "tool"): None,
    (CHATML, "name"): "fields 'name' of messages are left out",
    (CHATML, "thinking"): None,
    (CHATML, "reasoning"): RowError(REFUSED.format(1, "the reasoning_content of this answer")),
    (NO_SYSTEM, "system"): RowError(REFUSED.format(0, "this system message")),
    (NO_DEVELOPER, "developer"): RowError(REFUSED.format(0, "this developer message")),
    (NO_LATER_SYSTEM, "later system"): RowError(REFUSED.format(3, "this system message")),
    (NO_TOOL, "tool"): "tool messages are left out by the chat template",
    (AS_JSON, "tool"): None,
    (INDENTS, "system"): None,
    (NO_THINKING, "thinking"): RowError(REFUSED.format(1, "the text of this answer")),
    (NO_THINKING, "reasoning"): RowError(REFUSED.format(1, "the reasoning_content")),
    (THINKS_LAST, "reasoning"): None,
    (THINKS_LAST, "earlier reasoning"): "earlier answers lose their reasoning_content once",
}


def test_what_does_not_arrive_is_refused_or_counted(make_tokenizer):
    for train_on in ["assistant", "all"]:
        for source, kind in TABLE:
            encoder, expected = Encoder(make_tokenizer(source), train_on), TABLE[source, kind]
            if isinstance(expected, RowError):
                with pytest.raises(RowError, match=str(expected)):
                    encoder.mark(Chat(KINDS[kind]))
                continue
            notes = encoder.mark(Chat(KINDS[kind])).notes
            assert len(notes) == (expected is not None)
            assert all(note.startswith(expected) for note in notes)


def test_what_is_left_out_of_an_answer_that_is_context_is_counted(make_tokenizer):
    thought = Message("assistant", "3", trained=False, extra={"reasoning_content": "hm"})
    marked = Encoder(make_tokenizer(CHATML)).mark(Chat((ASK, thought, ASK, SAY)))
    assert marked.notes == (
        "fields 'reasoning_content' of messages are left out by the chat template",
    )


def test_special_tokens_that_messages_spell_are_counted(make_tokenizer):
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<think>"])
    typed = Message("user", "what is <|im_end|> and <|im_end|>? <think>")
    marked = Encoder(tokenizer).mark(Chat((typed, SAY, ASK, SAY)))
    assert marked.notes == ("messages spell <|im_end|>, which becomes the special token itself",)


def test_variables_that_a_template_does_not_have_are_counted(make_tokenizer):
    chat = Chat((ASK, SAY), variables={"loud": True, "messages_": 1})
    own = "{% if loud %}LOUD{% endif %}" + CHATML
    said = "chat_template_kwargs set {!r}, which the template has not"
    for source, names in ((own, ["messages_"]), (CHATML, ["loud", "messages_"])):
        marked = Encoder(make_tokenizer(source)).mark(chat)
        assert marked.notes == tuple(said.format(name) for name in names)


def test_context_that_is_trained_on_is_counted(make_tokenizer):
    context = Message("assistant", "3", trained=False)
    marked = Encoder(make_tokenizer(), "all").mark(Chat((ASK, context, ASK, SAY)))
    assert marked.notes == (
        "rows have answers that are context, and data.train_on: all trains them",
    )


def test_an_answer_that_only_stands_in_the_question_did_not_arrive(make_tokenizer):
    said = template("m['role'] == 'assistant'", "<|im_start|>assistant\nfour<|im_end|>\n")
    turns = (Message("user", "repeat: It is 4."), SAY)
    with pytest.raises(RowError, match="leaves out the text of this answer"):
        Encoder(make_tokenizer(said)).mark(Chat(turns))


# -- Chat templates by name and from files ---------------------------------------------------------


TOKENS = {  # the last one ends a turn
    "chatml": ["<|im_start|>", "<|im_end|>"],
    "llama3": ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "gemma": ["<start_of_turn>", "<end_of_turn>"],
    "phi3": ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"],
    "mistral": [],
    "alpaca": [],
}
TURNS = [("system", "be brief"), ("user", "a"), ("assistant", "b"), ("user", "c")]
CHAT = Chat(tuple(Message(role, text) for role, text in [*TURNS, ("assistant", "d")]))
EOS = "<|endoftext|>"


def with_tokens(make_tokenizer: Any, tokens: list[str]) -> Any:
    tokenizer = make_tokenizer(None)
    tokenizer.add_special_tokens({"extra_special_tokens": tokens})
    return tokenizer


@pytest.mark.parametrize("name", NAMED_TEMPLATES)
def test_a_name_renders_as_transformers_does_and_trains_the_answers(make_tokenizer, name):
    tokenizer = with_tokens(make_tokenizer, TOKENS[name])
    use_template(tokenizer, name)
    encoder = Encoder(tokenizer)
    marked = encoder.mark(CHAT)
    turns = [{"role": message.role, "content": message.content} for message in CHAT.messages]
    assert marked.text == tokenizer.apply_chat_template(turns, tokenize=False)
    assert "be brief" in marked.text
    ((ids, mask),) = encoder.encode([marked])
    end = [EOS, *TOKENS[name]][-1]
    assert tokenizer.decode(ids[mask]).replace("\n", "").replace(" ", "") == f"b{end}d{end}"


@pytest.mark.parametrize("name", [name for name, tokens in TOKENS.items() if tokens])
def test_every_token_of_a_template_must_be_one_of_the_tokenizer_s(make_tokenizer, name):
    own = ["<|im_start|>", "<|im_end|>"]
    for missing in (token for token in TOKENS[name] if token not in ("<|system|>", *own)):
        others = [token for token in TOKENS[name] if token != missing]
        words = f"^{name}: the tokenizer has no token {missing}".replace("|", r"\|")
        with pytest.raises(DataError, match=words):
            use_template(with_tokens(make_tokenizer, others), name)


def test_a_file(make_tokenizer, tmp_path):
    file, tokenizer = tmp_path / "mine.jinja", make_tokenizer(None)
    file.write_text("{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}")
    use_template(tokenizer, str(file))
    turns = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(turns, tokenize=False) == "<|im_start|>hi<|im_end|>"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{% for m in messages %}<|turn|>{{ m.content }}{% endfor %}", r"no token <\|turn\|>"),
        ("{% for m in messages %}</s>{{ m.content }}{% endfor %}", "no token </s>"),
        ("{% for m in", "the chat template refuses this conversation: "),
        ("{{ raise_exception('never') }}", "the chat template refuses .*: never"),
        (None, "no such file, and no such name; known names are chatml, llama3"),
    ],
)
def test_what_cannot_be_used_is_refused(make_tokenizer, tmp_path, text, words):
    file = tmp_path / "mine.jinja"
    if text is not None:
        file.write_text(text)
    with pytest.raises(DataError, match=f"mine.jinja: .*{words}"):
        use_template(make_tokenizer(None), str(file))


def test_a_turn_without_a_place_is_refused(make_tokenizer):
    tokenizer = make_tokenizer(None)
    use_template(tokenizer, "mistral")
    turns = (Message("user", "a"), Message("tool", "b"), Message("assistant", "c"))
    with pytest.raises(RowError, match="no place for a turn of role tool"):
        Encoder(tokenizer).mark(Chat(turns))
