"""Prompts, completions and documents as tokens, and what a tokenizer must offer."""

from __future__ import annotations

from itertools import compress
from typing import Any

import pytest

from megatrain.data.fields import RowError
from megatrain.data.formats import FORMATS, Chat, Document, convert_row
from megatrain.data.messages import Message
from megatrain.data.tokenize import Encoder, target_mask
from megatrain.errors import DataError

ROW = {"prompt": "What is it?\n", "completion": "four\nhello"}
PAIR = convert_row(FORMATS["prompt_completion"], ROW)


def encoded(tokenizer: Any, sample: Any, train_on: str = "assistant") -> Any:
    """The text of each token, and whether it is a target."""
    encoder = Encoder(tokenizer, train_on)
    ((ids, mask),) = encoder.encode([encoder.mark(sample)])
    return [tokenizer.decode([token]) for token in ids.tolist()], mask.tolist()


@pytest.mark.parametrize("trim_offsets", [True, False])
def test_without_a_template_the_completion_and_eos_are_targets(make_tokenizer, trim_offsets):
    tokens, mask = encoded(make_tokenizer(None, trim_offsets), PAIR)
    assert "".join(tokens) == "What is it?\nfour\nhello<|endoftext|>"
    assert "".join(compress(tokens, mask)) == "four\nhello<|endoftext|>"


def test_with_a_template_a_pair_is_a_conversation(make_tokenizer):
    tokens, mask = encoded(make_tokenizer(), PAIR)
    assert "".join(tokens).startswith("<|im_start|>user\nWhat is it?\n<|im_end|>")
    assert "".join(compress(tokens, mask)) == "four\nhello<|im_end|>"


def test_train_on_all(make_tokenizer):
    for tokenizer in (make_tokenizer(), make_tokenizer(None)):
        _, mask = encoded(tokenizer, PAIR, "all")
        assert mask == [False] + [True] * (len(mask) - 1)  # nothing predicts the first token


def test_a_document_is_all_target_and_ends_once(make_tokenizer):
    tokens, mask = encoded(make_tokenizer(bos=True), Document("hello world"))
    assert tokens[0] == "<|im_start|>"
    assert tokens[-1] == "<|endoftext|>"
    assert tokens.count("<|endoftext|>") == 1
    assert mask == [False] + [True] * (len(mask) - 1)


def test_pieces_of_a_document_are_bare(make_tokenizer):
    tokens, _ = encoded(make_tokenizer(bos=True), Document("hello world", begins=False, ends=False))
    assert "".join(tokens) == "hello world"


def test_rows_come_back_in_order(make_tokenizer):
    encoder = Encoder(make_tokenizer())
    samples = [Document("a"), PAIR, Document("b", begins=False), PAIR, Document("c")]
    together = encoder.encode([encoder.mark(sample) for sample in samples])
    alone = [encoder.encode([encoder.mark(sample)])[0] for sample in samples]
    assert [ids.tolist() for ids, _ in together] == [ids.tolist() for ids, _ in alone]


def test_conversations_need_a_template(make_tokenizer):
    with pytest.raises(RowError, match="no chat template"):
        encoded(make_tokenizer(None), Chat((Message("user", "a"), Message("assistant", "b"))))


def test_a_text_needs_an_eos(make_tokenizer):
    with pytest.raises(DataError, match="no eos_token"):
        encoded(make_tokenizer(None, eos=None), Document("a"))


def test_unknown_train_on(make_tokenizer):
    with pytest.raises(DataError, match=r"data\.train_on: 'answers' is unknown"):
        Encoder(make_tokenizer(), "answers")


def test_target_mask_of_trimmed_and_straddling_tokens():
    # "abc", "\n" trimmed to nothing, "de", " fg" trimmed, "\n", appended eos
    offsets = [(0, 3), (4, 4), (4, 6), (7, 9), (10, 10), (0, 0)]
    assert target_mask(offsets, [(4, 9)]).tolist() == [False, False, True, True, False, False]
    assert target_mask(offsets, [(3, 10)]).tolist() == [False, True, True, True, True, False]
    assert target_mask(offsets, [(5, 6)]).tolist() == [False, False, True, False, False, False]
    assert target_mask([], [(0, 1)]).tolist() == []
