"""Text that a chat template leaves out refuses the row or is counted."""

from __future__ import annotations

from typing import Any

import pytest

from megatrain.data.encoding import Encoder
from megatrain.data.samples import Chat, Message, RowError
from tests.commands import CHATML

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
