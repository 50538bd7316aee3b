"""Documents end to end in blocks: nothing lost, nothing twice."""

from __future__ import annotations

import numpy as np
import pytest

from megatrain.data.build import load_data
from megatrain.data.encoding import RowOptions
from megatrain.data.rows import best_fit, pack
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
