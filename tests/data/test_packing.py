"""Documents end to end in blocks: nothing lost, nothing twice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatrain.data.build import DataOptions, encode_source, load_data
from megatrain.data.packing import best_fit, pack
from megatrain.errors import DataError

WHOLE = DataOptions(seq_len=None, train_on="all")


@pytest.mark.parametrize("seq_len", [2, 7, 16, 10_000])
def test_blocks_join_to_the_documents(
    write_jsonl: Callable[..., Path], make_tokenizer: Callable[..., Any], cache: Path, seq_len: int
):
    documents = encode_source(
        write_jsonl([{"text": "hello world " * (n % 5 + 1)} for n in range(30)]),
        make_tokenizer(),
        WHOLE,
        cache,
    )
    packed = pack(documents, seq_len)
    blocks = [packed.row(index) for index in range(len(packed))]
    joined = np.concatenate([ids for ids, _ in blocks])
    expected = np.concatenate([documents.row(index)[0] for index in range(len(documents))])
    lost = packed.remainder if packed.remainder < 2 else 0
    assert joined.tolist() == expected[: len(expected) - lost].tolist()
    assert packed.lengths.tolist() == [len(ids) for ids, _ in blocks]
    assert packed.target_counts.tolist() == [int(mask.sum()) for _, mask in blocks]
    assert all(mask.tolist() == [False] + [True] * (len(mask) - 1) for _, mask in blocks)
    assert set(packed.lengths[:-1].tolist()) <= {seq_len}


def test_held_out_documents_are_taken_whole(
    write_jsonl: Callable[..., Path], make_tokenizer: Callable[..., Any], cache: Path
):
    tokenizer = make_tokenizer()
    file = write_jsonl([{"text": f"document {n} of many"} for n in range(50)])
    train, held = load_data(
        file, 5, tokenizer, DataOptions(seq_len=16), seed=0, pack_to=16, cache=cache
    )
    assert held is not None
    texts = [
        "".join(tokenizer.decode(rows.row(index)[0]) for index in range(len(rows)))
        for rows in (train, held)
    ]
    documents = [text.removesuffix("<|endoftext|>").split("<|endoftext|>") for text in texts]
    assert [len(found) for found in documents] == [45, 5]
    assert not set(documents[0]) & set(documents[1])


def test_a_text_file_comes_back_whole(
    tmp_path: Path, make_tokenizer: Callable[..., Any], cache: Path
):
    text = "".join(f"line {n}\n" for n in range(4000))
    (tmp_path / "a.txt").write_text(text)
    tokenizer = make_tokenizer(bos=True)
    packed, _ = load_data(
        tmp_path / "a.txt",
        None,
        tokenizer,
        DataOptions(seq_len=100),
        seed=0,
        pack_to=100,
        cache=cache,
    )
    ids = np.concatenate([packed.row(index)[0] for index in range(len(packed))])
    assert tokenizer.decode(ids) == f"<|im_start|>{text}<|endoftext|>"


def test_the_digest_knows_the_block_length(
    write_jsonl: Callable[..., Path], make_tokenizer: Callable[..., Any], cache: Path
):
    documents = encode_source(
        write_jsonl([{"text": "hello world"}]), make_tokenizer(), WHOLE, cache
    )
    assert pack(documents, 4).digest != pack(documents, 5).digest


def test_no_documents_are_refused(
    write_jsonl: Callable[..., Path], make_tokenizer: Callable[..., Any], cache: Path
):
    documents = encode_source(write_jsonl([{"text": "hello"}]), make_tokenizer(), WHOLE, cache)
    with pytest.raises(DataError, match="fewer than two tokens"):
        pack(documents.choose(np.zeros(0, np.int64)), 4)


@pytest.mark.parametrize(
    "lengths",
    [[], [8], [8, 8], [5, 3, 3, 2, 2, 1], [1] * 20, sorted(range(1, 9), reverse=True) * 9],
)
def test_rows_share_sequences_and_none_is_split(lengths: list[int]):
    sequences = best_fit(lengths, 8)
    assert sorted(number for sequence in sequences for number in sequence) == list(
        range(len(lengths))
    )
    filled = [sum(lengths[number] for number in sequence) for sequence in sequences]
    assert all(tokens <= 8 for tokens in filled)
    assert sum(tokens <= 4 for tokens in filled) <= 1, "two half empty ones would have been one"


def test_a_row_goes_where_it_leaves_least_room():
    assert best_fit([6, 5, 3, 2, 2], 8) == [[0, 3], [1, 2], [4]]
