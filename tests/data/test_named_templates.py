"""Chat templates by name and from files."""

from __future__ import annotations

from typing import Any

import pytest

from megatrain.data.encoding import Encoder
from megatrain.data.samples import Chat, Message, RowError
from megatrain.data.template import NAMED_TEMPLATES, use_template
from megatrain.errors import DataError

TOKENS = {
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
    end = NAMED_TEMPLATES[name] or EOS
    answers = tokenizer.decode(ids[mask]).replace("\n", "").replace(" ", "")
    assert answers == f"b{end}d{end}"


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
