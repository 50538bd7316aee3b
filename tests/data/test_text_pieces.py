"""Text files are read in pieces, which must not show: not in the tokens, and not where one is held
out of the middle."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from megatrain.data.build import load_data
from megatrain.data.encoding import RowOptions
from megatrain.data.files import TEXT_PIECE_BYTES
from megatrain.data.rows import Rows

SEQ_LEN = 64
LLAMA_3 = r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
WORDS = ("one", "two", "naïve café", "日本語", "x = 1", "don't", "  indented", "3.14", "☕")


def text_of(seed: int, pieces: int = 6) -> str:
    draw, lines, size = random.Random(seed), list[str](), 0
    while size < pieces * TEXT_PIECE_BYTES:
        start = draw.choice(["", "", "", " ", "    ", "\t", "\n", "\n\n\n"])
        lines.append(start + " ".join(draw.choices(WORDS, k=draw.randrange(1, 12))) + "\n")
        size += len(lines[-1].encode())
    return "".join(lines)


def byte_level(split: str | None) -> Tokenizer:
    """As GPT-2's, or with another way to split words."""
    made = Tokenizer(models.BPE())
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    steps = [pre_tokenizers.Split(Regex(split), "isolated")] if split else []
    made.pre_tokenizer = pre_tokenizers.Sequence([*steps, plain])
    made.decoder = decoders.ByteLevel()
    return made


def sentence_piece(way: str) -> Tokenizer:
    """As Llama 2's, which puts a space in front of every text it is given."""
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    if way == "metaspace":
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        replaced = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        made.normalizer = normalizers.Sequence(replaced)
    return made


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "gpt-2": lambda: byte_level(None),
    "llama-3": lambda: byte_level(LLAMA_3),
    "llama-2": lambda: sentence_piece("normalizer"),
    "metaspace": lambda: sentence_piece("metaspace"),
}


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    from transformers import PreTrainedTokenizerFast

    made = KINDS[request.param]()
    all_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=["<unk>", "</s>", *all_bytes], show_progress=False
    )
    made.train_from_iterator(text_of(9, pieces=1).splitlines(keepends=True), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", unk_token="<unk>")


@pytest.fixture
def load(tmp_path, tokenizer, cache):
    """load(text, held_out): the text as a file, packed, and what is held out of it."""

    def run(text: str, held_out: Any = None, **options: Any) -> Any:
        (tmp_path / "a.txt").write_text(text)
        asked = RowOptions(seq_len=SEQ_LEN)
        given: Any = (tmp_path / "a.txt", held_out, tokenizer, asked)
        return load_data(*given, seed=1, pack_to=SEQ_LEN, cache=cache, **options)

    return run


def stream(rows: Rows) -> list[int]:
    ids: list[int] = np.concatenate([rows.row(index)[0] for index in range(len(rows))]).tolist()
    return ids


def test_the_tokens_of_the_pieces_are_those_of_the_text(load, tokenizer):
    for seed in range(3):
        text = text_of(seed)
        rows, _ = load(text)
        assert rows.counts.read > 4
        expected = tokenizer(text, add_special_tokens=False)["input_ids"]
        found = stream(rows)
        assert found == [*expected, tokenizer.eos_token_id][: len(found)]
        assert len(found) >= len(expected)


def test_no_document_goes_over_a_piece_that_is_held_out(load, tokenizer):
    text = text_of(0)
    whole, _ = load(text)
    rows, held = load(text, 3)
    eos, original = str(tokenizer.eos_token_id), " ".join(map(str, stream(whole)))
    for part in (rows, held):
        ids = " ".join(map(str, stream(part)))
        found = [one.strip() for one in f" {ids} ".split(f" {eos} ") if one.strip()]
        assert all(f" {one} " in f" {original} " for one in found)
        gaps = int((np.diff(part.documents.chosen) != 1).sum())
        assert len(found) == gaps + 1
    assert len(rows.documents) + len(held.documents) == len(whole.documents)
    assert rows.digest != whole.digest
