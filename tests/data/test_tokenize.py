"""Prompts, completions and documents as tokens, and what a tokenizer must offer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import compress
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatrain.data import rows
from megatrain.data.encoding import Encoder, RowOptions, target_mask
from megatrain.data.formats import convert_row
from megatrain.data.rows import Counts
from megatrain.data.samples import Chat, Document, Message, RowError
from megatrain.data.show import describe, warnings
from megatrain.errors import DataError
from tests.helpers.commands import CHATML, conversation, tiny_tokenizer

ROW = {"prompt": "What is it?\n", "completion": "four\nhello"}
(PAIR,) = convert_row("prompt_completion", ROW).texts


def encoded(tokenizer: Any, sample: Any, train_on: str = "assistant", prompts: str = "text") -> Any:
    """The text of each token, and whether it is a target."""
    encoder = Encoder(tokenizer, train_on, prompts)
    ((ids, mask),) = encoder.encode([encoder.mark(sample)])
    return [tokenizer.decode([token]) for token in ids.tolist()], mask.tolist()


@pytest.mark.parametrize("trim_offsets", [True, False])
@pytest.mark.parametrize("template", [None, CHATML])
def test_two_texts_mean_themselves(make_tokenizer, template, trim_offsets):
    tokens, mask = encoded(make_tokenizer(template, trim_offsets), PAIR)
    assert "".join(tokens) == "What is it?\nfour\nhello<|endoftext|>"
    assert "".join(compress(tokens, mask)) == "four\nhello<|endoftext|>"


def test_two_texts_are_turns_if_the_user_says_so(make_tokenizer):
    tokens, mask = encoded(make_tokenizer(), PAIR, prompts="chat")
    assert "".join(tokens).startswith("<|im_start|>user\nWhat is it?\n<|im_end|>")
    assert "".join(compress(tokens, mask)) == "four\nhello<|im_end|>"
    tokens, _ = encoded(make_tokenizer(None), PAIR, prompts="chat")  # without a template
    assert "".join(tokens) == "What is it?\nfour\nhello<|endoftext|>"


def test_lists_of_messages_are_turns(make_tokenizer):
    sides = {"prompt": [("user", "a")], "completion": [("assistant", "b")]}
    row = {k: [{"role": r, "content": c} for r, c in v] for k, v in sides.items()}
    (pair,) = convert_row("prompt_completion", row).texts
    tokens, mask = encoded(make_tokenizer(), pair)
    assert "".join(compress(tokens, mask)) == "b<|im_end|>"


def test_an_alpaca_row_goes_through_the_template_if_there_is_one(make_tokenizer):
    (row,) = convert_row("alpaca", {"instruction": "a", "output": "b"}).texts
    for template, start, way in ((CHATML, "<|im_start|>", "chat template"), (None, "Below", "Sta")):
        tokenizer = make_tokenizer(template)
        assert "".join(encoded(tokenizer, row)[0]).startswith(start)
        assert way in Encoder(tokenizer).mark(row).wrapping


def test_an_alpaca_row_keeps_its_own_prompt_if_the_user_says_so(make_tokenizer):
    (row,) = convert_row("alpaca", {"instruction": "a", "input": "i", "output": "b"}).texts
    tokens, mask = encoded(make_tokenizer(), row, prompts="alpaca")
    assert (tokens, mask) == encoded(make_tokenizer(None), row)  # as without a template
    text = "".join(tokens)
    assert text.startswith("Below is an instruction") and "### Input:\ni\n\n### Response:" in text
    assert "".join(compress(tokens, mask)) == "b<|endoftext|>"
    assert encoded(make_tokenizer(), PAIR, prompts="alpaca") == encoded(make_tokenizer(), PAIR)
    chat = Chat((Message("user", "a"), Message("assistant", "b")))
    assert encoded(make_tokenizer(), chat, prompts="alpaca") == encoded(make_tokenizer(), chat)


@pytest.mark.parametrize("column", ["system", "tools", "chat_template_kwargs"])
def test_nothing_else_has_a_place_beside_two_texts(make_tokenizer, column):
    value: Any = {"system": "be", "tools": [{"name": "f"}], "chat_template_kwargs": {"a": 1}}
    (sample,) = convert_row("prompt_completion", {**ROW, column: value[column]}).texts
    with pytest.raises(RowError, match=r"beside two texts; set data\.prompts: chat"):
        encoded(make_tokenizer(), sample)


def test_there_is_one_bos(make_tokenizer):
    tokenizer = make_tokenizer(bos=True)
    tokenizer.bos_token = "<|im_start|>"
    for text in ("hello", "<|im_start|>hello"):
        (pair,) = convert_row("prompt_completion", {"prompt": text, "completion": "four"}).texts
        for sample in (Document(text), pair):
            tokens, mask = encoded(tokenizer, sample)
            assert [tokens[0], tokens.count("<|im_start|>"), mask[0]] == ["<|im_start|>", 1, False]


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


def test_target_mask_of_trimmed_and_straddling_tokens():
    # "abc", "\n" trimmed to nothing, "de", " fg" trimmed, "\n", appended eos
    offsets = [(0, 3), (4, 4), (4, 6), (7, 9), (10, 10), (0, 0)]
    assert target_mask(offsets, [(4, 9)]).tolist() == [False, False, True, True, False, False]
    assert target_mask(offsets, [(3, 10)]).tolist() == [False, True, True, True, True, False]
    assert target_mask(offsets, [(5, 6)]).tolist() == [False, False, True, False, False, False]
    assert target_mask([], [(0, 1)]).tolist() == []


# -- Rows that are longer than seq_len -------------------------------------------------------------


OPTIONS = RowOptions(seq_len=64)


def text_of(length: int) -> str:
    return "".join(chr(97 + n % 26) for n in range(length))


def test_a_long_text_loses_no_target(encode):
    for length in [62, 63, 64, 65, 126, 127, 128, 1000]:
        rows = encode([{"text": text_of(length)}], OPTIONS)
        whole = encode([{"text": text_of(length)}], replace(OPTIONS, seq_len=None))
        targets = np.concatenate([ids[mask] for ids, mask in map(rows.row, range(len(rows)))])
        ids, mask = whole.row(0)
        assert targets.tolist() == ids[mask].tolist() == ids[1:].tolist()
        assert rows.lengths.max() <= 64
        assert len(rows) == -(-(len(ids) - 1) // 63), "each row but the last is full"
        assert rows.counts.truncated == rows.counts.without_target == 0
        said = "1 text longer than a row; method: pretrain packs texts" in describe(rows)
        assert said == (len(rows) > 1)
        assert warnings(rows) == []


@pytest.fixture
def lengths_of(encode, make_tokenizer) -> Callable[..., Counts]:
    """lengths_of([3, 90]): rows of so many tokens of question, with an answer of one before."""

    def run(*lengths: int) -> Any:
        rows = []
        for length in lengths:
            turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
            template = len(encode([{"messages": [*turns, turns[0]]}], OPTIONS).row(0)[0])
            question = {"role": "user", "content": "q" * (length - template + 1)}
            rows.append({"messages": [*turns, question]})
        found = encode(rows, OPTIONS, make_tokenizer())
        assert found.counts.longest == max(lengths)
        return found.counts

    return run


def test_a_cut_of_more_than_a_tenth_is_warned_of_just_above_it(lengths_of):
    at = lengths_of(64, 64, 64, 64, 64, 64, 64, 64, 120)  # 56 of 632
    assert at.truncated_tokens == 56
    assert at.warned == []
    below, above = lengths_of(*[60] * 7, 114), lengths_of(*[60] * 5, 114)
    assert (below.truncated_tokens / below.tokens < 0.1) == (below.warned == [])
    assert above.truncated_tokens / above.tokens > 0.1
    (line,) = above.warned
    assert line.startswith("1 row over train.seq_len 64: 12.1% of all tokens are cut")
    assert line.endswith("in 0 rows; a seq_len of 110 keeps 99% of the tokens, 114 keeps all")


@pytest.mark.parametrize("share", [0.0999, 0.1001])
def test_the_share_is_a_tenth(share):
    cut = round(share * 10_000)
    counts = Counts(tokens=10_000, truncated=1, truncated_tokens=cut, longest=2000)
    assert bool(rows.cut_warnings(counts, 64, "keep_start")) == (share > 0.1)
    assert rows.cut_warnings(counts, None, "keep_start") == []


def test_the_end_of_one_answer_is_worth_a_warning(encode):
    rows = [conversation("x", "y")] * 90 + [conversation("x", "y" * 53)]
    counts = encode(rows, OPTIONS).counts
    assert counts.cut_answers == counts.truncated == 1
    (line,) = counts.warned
    assert "the end of an answer in 1 row; a seq_len of" in line
    assert line.endswith(f"of {counts.longest} keeps all"), "99% of the tokens are kept already"
    fits = encode(rows, replace(OPTIONS, seq_len=counts.longest)).counts
    assert fits.warned == []
    assert fits.truncated == 0


def test_the_advised_length_is_the_smallest_that_keeps_enough():
    for seed in range(20):
        lengths = np.random.default_rng(seed).integers(1, 2000, 60)
        counts = Counts()
        rows.measure_lengths(counts, lengths)
        kept = [np.minimum(lengths, size).sum() / lengths.sum() for size in range(1, 2001)]
        assert counts.enough == next(size for size, share in enumerate(kept, 1) if share >= 0.99)


# -- text that a tokenizer loses -------------------------------------------------------------------

ENGLISH, RUSSIAN = conversation("Hello there, 2 boats?", "Four!"), conversation("Привет", "Мир")
LETTERS = sorted({*"HF,?!12\n \r", *map(chr, range(97, 123))})


def of_letters(model: Any, unk: str | None = None, **steps: Any) -> Any:
    """A tokenizer of single letters, which knows no other script."""
    base = tokenizers.Tokenizer(model)
    for name, step in steps.items():
        setattr(base, name, step)
    base.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=base, eos_token="<|im_end|>", unk_token=unk, chat_template=CHATML
    )


VOCABULARY = {letter: number for number, letter in enumerate(["<unk>", "▁", *LETTERS])}
BYTES = {f"<0x{byte:02X}>": len(VOCABULARY) + byte for byte in range(256)}
INSIDE = {f"##{letter}": len(VOCABULARY) + number for number, letter in enumerate(LETTERS)}
PIECES = [(piece, -1.0) for piece in VOCABULARY]
SPACE = pre_tokenizers.Metaspace()
LOSING: dict[str, Any] = {
    "a word is the unknown token": lambda: of_letters(
        models.WordPiece(VOCABULARY | INSIDE, unk_token="<unk>"),
        "<unk>",
        pre_tokenizer=pre_tokenizers.BertPreTokenizer(),
    ),
    "each letter is": lambda: of_letters(models.Unigram(PIECES, 0), "<unk>", pre_tokenizer=SPACE),
    "a letter is nothing": lambda: of_letters(models.BPE(VOCABULARY, []), pre_tokenizer=SPACE),
}
KEEPING: dict[str, Any] = {
    "byte-level": tiny_tokenizer,
    "bytes for the unknown": lambda: of_letters(
        models.BPE(VOCABULARY | BYTES, [], unk_token="<unk>", byte_fallback=True), "<unk>",
        normalizer=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
    ),
    "NFKC and lower case": lambda: of_letters(
        models.Unigram([*PIECES, *((chr(one), -1.0) for one in range(1072, 1104))], 0),
        "<unk>",
        normalizer=normalizers.Sequence(
            [normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()]
        ),
        pre_tokenizer=SPACE,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSING)
def test_text_that_the_tokenizer_does_not_know_is_counted_and_refused(name, encode):
    tokenizer = LOSING[name]()
    with pytest.raises(DataError, match=r"tokenizer does not know this text: .* use a model whose"):
        encode([ENGLISH, RUSSIAN] * 20, OPTIONS, tokenizer)
    counts = encode([ENGLISH] * 20 + [RUSSIAN], OPTIONS, tokenizer).counts
    assert counts.lossy == 1
    (line,) = counts.warned
    assert line.endswith("1 of 21 rows lose over 10% of their letters")
    assert (counts.unknown > 0) == (tokenizer.unk_token is not None)
    assert encode([ENGLISH] * 20, OPTIONS, tokenizer).counts.warned == []


@pytest.mark.parametrize("name", KEEPING)
def test_a_tokenizer_that_only_normalises_loses_nothing(name, encode):
    rows = [ENGLISH, RUSSIAN, conversation("ﬁve cafés, ①  ГОРА", "Йод ｆｕｌｌ\u3000x")] * 9
    counts = encode(rows, RowOptions(seq_len=512), KEEPING[name]()).counts
    assert (counts.lossy, counts.unknown, counts.warned) == (0, 0, [])
