"""Generation settings know the tokens that end answers."""

from __future__ import annotations

from typing import Any

import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from megatrain.models.pretrained import about_added, stop_ids, with_stops
from tests.commands import CHATML

CONFIG = transformers.LlamaConfig(
    hidden_size=8, num_attention_heads=2, bos_token_id=0, eos_token_id=1, pad_token_id=None
)
HEADS = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"


def tokenizer(template: Any, eos: str = "</s>") -> Any:
    words = ["<s>", "</s>", "<|im_end|>", "<|im_start|>", "<|user|>", "<|assistant|>"]
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({w: n for n, w in enumerate(words)}, unk_token="<s>")),
        eos_token=eos,
        extra_special_tokens=words[2:],
    )
    made.chat_template = template
    return made


def test_what_ends_answers_is_added():
    for template, known, expected, added in (
        (CHATML, [1], [1, 2], ["<|im_end|>"]),
        (CHATML, 1, [1, 2], ["<|im_end|>"]),
        (CHATML, [2], [2, 1], ["</s>"]),
        (CHATML, [1, 2, 7], [1, 2, 7], []),
        (HEADS, 1, [1, 4], ["<|user|>"]),
        (None, [5], [5, 1], ["</s>"]),
        ({"tool_use": CHATML}, 1, [1], []),  # none of several is the default
    ):
        given = transformers.GenerationConfig(eos_token_id=known, top_p=0.8)
        settings, lacking = with_stops(CONFIG, tokenizer(template), given)
        assert (stop_ids(settings), lacking) == (expected, added)
        assert settings is not None
        assert settings.top_p == 0.8
        assert given.eos_token_id == known  # not changed in place


def test_settings_are_made_where_there_are_none_and_something_is_lacking():
    made, lacking = with_stops(CONFIG, tokenizer(CHATML), None)
    assert made is not None
    assert (made.eos_token_id, made.bos_token_id, lacking) == ([1, 2], 0, ["<|im_end|>"])
    assert "<|im_end|> ends answers" in about_added(lacking)
    assert with_stops(CONFIG, tokenizer(None), None) == (None, [])
    assert about_added([]) == ""
