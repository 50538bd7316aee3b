"""Documents end to end in blocks: nothing lost, nothing twice."""

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
from megatrain.data.rows import Rows, best_fit, pack
from megatrain.errors import DataError

WHOLE = RowOptions(seq_len=None, train_on="all")


@pytest.mark.parametrize("seq_len", [2, 7, 16, 10_000])
def test_blocks_join_to_the_documents(encode, seq_len):
    documents = encode([{"text": "hello world " * (n % 5 + 1)} for n in range(30)], WHOLE)
    packed = pack(documents, seq_len, eos=0)
    blocks = [packed.row(index) for index in range(len(packed))]
    joined = np.concatenate([ids for ids, _ in blocks])
    expected = np.concatenate([documents.row(index)[0] for index in range(len(documents))])
    lost = packed.remainder if packed.remainder < 2 else 0
    assert joined.tolist() == expected[: len(expected) - lost].tolist()
    assert packed.lengths.tolist() == [len(ids) for ids, _ in blocks]
    assert packed.target_counts.tolist() == [int(mask.sum()) for _, mask in blocks]
    assert all(mask.tolist() == [False] + [True] * (len(mask) - 1) for _, mask in blocks)
    assert set(packed.lengths[:-1].tolist()) <= {seq_len}


def test_held_out_documents_are_taken_whole(write_jsonl, make_tokenizer, cache):
    tokenizer, options = make_tokenizer(), RowOptions(seq_len=16)
    file = write_jsonl([{"text": f"document {n} of many"} for n in range(50)])
    train, held = load_data(file, 5, tokenizer, options, seed=0, pack_to=16, cache=cache)
    assert held is not None
    documents = []
    for rows in (train, held):
        text = "".join(tokenizer.decode(rows.row(index)[0]) for index in range(len(rows)))
        documents.append(text.removesuffix("<|endoftext|>").split("<|endoftext|>"))
    assert [len(found) for found in documents] == [45, 5]
    assert not set(documents[0]) & set(documents[1])


def test_a_text_file_comes_back_whole(tmp_path, make_tokenizer, cache):
    text, file = "".join(f"line {n}\n" for n in range(4000)), tmp_path / "a.txt"
    file.write_text(text)
    tokenizer, options = make_tokenizer(bos=True), RowOptions(seq_len=100)
    packed, _ = load_data(file, None, tokenizer, options, seed=0, pack_to=100, cache=cache)
    ids = np.concatenate([packed.row(index)[0] for index in range(len(packed))])
    assert tokenizer.decode(ids) == f"<|im_start|>{text}<|endoftext|>"


def test_the_digest_knows_the_block_length(encode):
    documents = encode([{"text": "hello world"}], WHOLE)
    assert pack(documents, 4, 0).digest != pack(documents, 5, 0).digest


def test_no_documents_are_refused(encode):
    documents = encode([{"text": "hello"}], WHOLE)
    with pytest.raises(DataError, match="fewer than two tokens"):
        pack(documents.choose(np.zeros(0, np.int64)), 4, eos=0)


@pytest.mark.parametrize(
    "lengths",
    [[], [8], [8, 8], [5, 3, 3, 2, 2, 1], [1] * 20, sorted(range(1, 9), reverse=True) * 9],
)
def test_examples_are_packed_into_sequences_and_none_is_split(lengths):
    sequences = best_fit(lengths, 8)
    numbers = [number for sequence in sequences for number in sequence]
    assert sorted(numbers) == list(range(len(lengths)))
    filled = [sum(lengths[number] for number in sequence) for sequence in sequences]
    assert all(tokens <= 8 for tokens in filled)
    assert sum(tokens <= 4 for tokens in filled) <= 1, "two half empty ones would have been one"


def test_a_row_goes_where_it_leaves_least_room():
    assert best_fit([6, 5, 3, 2, 2], 8) == [[0, 3], [1, 2], [4]]


# -- Text files are read in pieces -----------------------------------------------------------------


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
