"""Rows of two sequences as they are stored: counts, cuts, cache, digests and holding out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatrain.data.build import AskedSet, Expected, hold_out, load_data
from megatrain.data.encoding import RowOptions
from megatrain.data.rows import TokenRows
from megatrain.data.samples import JUDGED, PAIRS, PLAIN
from megatrain.data.show import describe
from megatrain.errors import DataError
from tests.helpers.commands import CHATML, chat_rows, tiny_tokenizer

OPTIONS = {kind: RowOptions(seq_len=64, kind=kind) for kind in (PAIRS, JUDGED)}
SKIP = {kind: replace(options, on_bad_row="skip") for kind, options in OPTIONS.items()}
LONG = "y" * 90
Sides = list[list[tuple[list[int], list[bool]]]]


def pair(number: int, answer: int = 0, **more: Any) -> dict[str, Any]:
    answers = {"chosen": f"it is {number} {answer}", "rejected": f"no {answer}"}
    return {"prompt": f"what is {number}?", **answers, **more}


def judged(number: int, answer: int = 0, label: bool = True) -> dict[str, Any]:
    texts = {"prompt": f"what is {number}?", "completion": f"it is {number} {answer}"}
    return {**texts, "label": label}


MAKE: dict[str, Callable[..., dict[str, Any]]] = {PAIRS: pair, JUDGED: judged}


def sides_of(data: Any) -> Sides:
    return [
        [(ids.tolist(), mask.tolist()) for ids, mask in (data.side(row, side) for side in (0, 1))]
        for row in range(len(data))
    ]


def test_a_pair_is_one_row_of_two_sequences(encode, make_tokenizer):
    tokenizer = make_tokenizer()
    rows = [pair(n, margin=n / 2) for n in range(300)] + [pair(300)]  # more than one batch
    data = encode(rows, OPTIONS[PAIRS], tokenizer)
    assert (len(data), data.sides, data.kind, data.counts.read) == (301, 2, PAIRS, 301)
    for row in (0, 255, 256, 300):
        texts = [tokenizer.decode(data.side(row, side)[0]) for side in (0, 1)]
        assert texts == [f"what is {row}?{end}<|endoftext|>" for end in (f"it is {row} 0", "no 0")]
    lengths = [[len(ids) for ids, _ in row] for row in sides_of(data)]
    assert data.side_lengths.tolist() == lengths
    assert data.lengths.tolist() == [sum(both) for both in lengths]
    targets = [sum(sum(mask) for _, mask in row) for row in sides_of(data)]
    assert data.target_counts.tolist() == targets
    assert data.values.dtype == np.float32
    assert data.values[:300].tolist() == [n / 2 for n in range(300)]
    assert np.isnan(data.values[300])


def test_a_judged_row_has_a_mismatch_that_is_not_trained_on(encode, make_tokenizer):
    tokenizer = make_tokenizer()
    data = encode([judged(n, label=n != 1) for n in range(3)], OPTIONS[JUDGED], tokenizer)
    texts = [[tokenizer.decode(ids) for ids, _ in row] for row in sides_of(data)]
    asked = [text.partition("?")[0] + "?" for text, _ in texts]
    answers = [text.partition("?")[2] for text, _ in texts]
    assert [other for _, other in texts] == [
        asked[0] + answers[1], asked[1] + answers[0], asked[2] + answers[1]
    ]  # fmt: skip
    assert data.values.tolist() == [1.0, 0.0, 1.0]
    assert data.lengths.tolist() == [len(row[0][0]) for row in sides_of(data)]
    assert data.target_counts.tolist() == [sum(row[0][1]) for row in sides_of(data)]
    for row in sides_of(data):
        assert [token for token, flag in zip(*row[1], strict=True) if flag]


def test_one_judged_row_has_no_mismatch_and_is_refused(encode):
    with pytest.raises(
        DataError, match=r"holds one row; method: kto also takes each prompt with a"
    ):
        encode([judged(1)], OPTIONS[JUDGED])


def test_a_pair_without_a_target_on_one_side_is_dropped_whole(encode, make_tokenizer):
    rows = [pair(1), {**pair(2), "prompt": LONG}, {**pair(3), "rejected": LONG}]
    data = encode(rows, OPTIONS[PAIRS], make_tokenizer(None))
    whole = encode(rows, replace(OPTIONS[PAIRS], seq_len=None), make_tokenizer(None))
    assert len(data) == 2
    counts = data.counts
    assert (counts.truncated, counts.without_target, counts.cut_answers) == (2, 1, 2)
    assert counts.truncated_tokens == int((whole.side_lengths - 64).clip(0).sum())
    assert counts.parts == [2]
    assert "1 row dropped, because no token to train on is left in one of their answers" in (
        describe(data)
    )
    with pytest.raises(DataError, match=r"seq_len 64 cuts it off \(rows cut: 1, "):
        encode(rows[1:2], OPTIONS[PAIRS])


@pytest.mark.parametrize("kind", MAKE)
def test_the_end_of_a_row_may_be_what_stays(encode, make_tokenizer, kind):
    rows = [{**MAKE[kind](n), "prompt": "x" * (50 + 10 * n)} for n in range(4)]
    options, tokenizer = replace(OPTIONS[kind], truncation_mode="keep_end"), make_tokenizer(None)
    data = encode(rows, options, tokenizer)
    whole = encode(rows, replace(options, seq_len=None), tokenizer)
    assert len(data) == 4
    assert (data.counts.truncated, data.counts.without_target, data.counts.cut_answers) == (3, 0, 0)
    for mine, full in zip(sides_of(data), sides_of(whole), strict=True):
        assert mine == [(ids[-64:], mask[-64:]) for ids, mask in full]


def answered(kind: str, messages: list[dict[str, str]]) -> dict[str, Any]:
    """A row of this kind in which the last turn is an answer."""
    if kind != PAIRS:
        return {"messages": messages} | ({"label": True} if kind == JUDGED else {})
    worse = {**messages[-1], "content": "no"}
    return {"prompt": messages[:-1], "chosen": messages[-1:], "rejected": [worse]}


@pytest.mark.parametrize("kind", [PLAIN, *MAKE])
def test_context_is_cut_from_the_system_prompt_on_so_that_the_answer_stays(
    write_jsonl, make_tokenizer, cache, kind
):
    """As few whole turns as are enough; then the last question's beginning."""

    def encoded(turns: list[Any], mode: str, seq_len: int | None) -> TokenRows:
        options = RowOptions(seq_len, kind=kind, truncation_mode=mode)
        rows = write_jsonl([answered(kind, turns)] * 2)
        return AskedSet(rows, make_tokenizer(), options, cache).rows()

    system = {"role": "system", "content": "be brief " * 3}
    names = ("user", "assistant")
    turns = [{"role": role, "content": f"{role} {n}"} for n in range(4) for role in names]
    called = [turns[0], {**turns[1], "content": "a"}, {"role": "tool", "content": "b"}, *turns[1:4]]
    long = [{**turns[2], "content": "x" * 90}, turns[3]]
    for messages, left in [
        ([system, *turns[:4]], turns[:4]),
        ([system, *turns], turns[4:]),
        ([turns[1], *turns], turns[4:]),
        ([system, *called, *turns[:4]], turns[:4]),
        ([system, *turns[:2], *long], long),
        ([*turns[:2], *long], long),
    ]:
        data, expected = encoded(messages, "context", 64), encoded(left, "keep_end", 64)
        for side in range(2 if kind == PAIRS else 1):
            ids, mask = data.side(0, side)
            assert (ids.tolist(), mask.tolist()) == tuple(
                one.tolist() for one in expected.side(0, side)
            )
        lost = encoded(messages, "context", None).lengths.sum() - data.lengths.sum()
        assert (data.counts.truncated, data.counts.truncated_tokens) == (2, lost)


def test_a_row_whose_template_refuses_what_is_left_of_it_is_named(encode, make_tokenizer):
    needs = "{% if messages[0]['role'] != 'system' %}{{ raise_exception('no system') }}{% endif %}"
    turns = [{"role": role, "content": "hello"} for role in ("system", "user", "assistant")]
    long = [{**turns[0], "content": "hello " * 90}, *turns[1:]]
    options, tokenizer = RowOptions(64, truncation_mode="context"), make_tokenizer(needs + CHATML)
    rows = [{"messages": turns}, {"messages": long}]
    with pytest.raises(DataError, match=r"rows.jsonl:2: the chat template refuses .* no system"):
        encode(rows, options, tokenizer)
    data = encode(rows, replace(options, on_bad_row="skip"), tokenizer)
    assert (len(data), data.counts.bad, data.counts.read) == (1, 1, 2)


def test_a_longer_row_may_be_dropped(encode, make_tokenizer):
    rows = [pair(1), {**pair(2), "chosen": LONG}, pair(3)]
    options = replace(OPTIONS[PAIRS], truncation_mode="drop")
    data = encode(rows, options, make_tokenizer(None))
    assert (len(data), data.counts.too_long, data.counts.truncated) == (2, 1, 0)
    assert "1 row dropped, because they are longer than seq_len" in describe(data)
    with pytest.raises(DataError, match=r"rows cut: 0, dropped: 1"):
        encode(rows[1:2], options)


def test_a_beginning_that_was_cut_is_warned_of(encode, make_tokenizer):
    options = replace(OPTIONS[PAIRS], truncation_mode="keep_end")
    data = encode([{**pair(1), "chosen": LONG}], options, make_tokenizer(None))
    assert data.side(0, 0)[1].tolist() == [False] + [True] * 63, "nothing predicts the first"
    (line,) = data.counts.warned
    assert "and the beginning of an answer in 1 row; a seq_len of" in line


# -- cache and digests ---------------------------------------------------------------------------


def test_digests_of_plain_rows_are_those_of_earlier_releases(cache: Path):
    """A run that goes on finds the rows that it knows."""
    options = RowOptions(seq_len=32)
    train, held = load_data(chat_rows(), 0.1, tiny_tokenizer(), options, seed=0, cache=cache)
    assert held is not None
    assert (train.digest, held.digest) == ("6467a120706f8d92", "12c4cdac227233d7")


def test_a_digest_knows_all_that_a_row_holds(encode):
    def digest(rows: list[Any], kind: str) -> str:
        return str(encode(rows, OPTIONS[kind]).digest)

    pairs = [pair(n) for n in range(4)]
    changed: list[list[Any]] = [
        [{**pairs[0], "rejected": "other"}, *pairs[1:]],
        [{**pairs[0], "chosen": "other"}, *pairs[1:]],
        [{**pairs[0], "chosen": pairs[0]["rejected"], "rejected": pairs[0]["chosen"]}, *pairs[1:]],
        [{**pairs[0], "margin": 0.5}, *pairs[1:]],
        pairs[::-1],
    ]
    assert len({digest(rows, PAIRS) for rows in (pairs, *changed)}) == 6
    assert digest(pairs, PAIRS) == digest([{**row, "margin": None} for row in pairs], PAIRS)
    rows = [judged(n) for n in range(4)]
    others = [judged(0, label=False), *rows[1:]], [rows[0], rows[2], rows[1], rows[3]]
    assert len({digest(given, JUDGED) for given in (rows, *others)}) == 3


def test_a_mismatch_is_part_of_the_digest_and_not_of_the_row(encode):
    """References of another mismatch would be wrong, but the row is the same."""
    rows = encode([judged(n) for n in range(4)], OPTIONS[JUDGED])
    other = encode([judged(7), *(judged(n) for n in (3, 2, 1, 0))], OPTIONS[JUDGED])
    same = other.choose(np.array([4, 3, 2, 1]))
    assert same.hashes[same.chosen].tolist() == rows.hashes.tolist()
    assert same.digest != rows.digest


# -- holding out and mixing ----------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", [PLAIN, *MAKE])
def test_answers_to_one_prompt_are_held_out_together(encode, kind, seed):
    rows = [MAKE.get(kind, judged)(n % 25, n) for n in range(100)]
    for row in rows if kind == PLAIN else ():
        del row["label"]
    data = encode(rows, RowOptions(seq_len=64, kind=kind))
    train, held = hold_out(data, 0.2, seed)
    assert (len(train), len(held)) == (80, 20)
    assert train.counts.choices == []

    def firsts(part: TokenRows) -> list[tuple[list[int], list[bool]]]:
        return [(ids.tolist(), mask.tolist()) for ids, mask in map(part.row, range(len(part)))]

    def prompts(part: TokenRows) -> set[str]:
        return {str(ids[: mask.index(True)]) for ids, mask in firsts(part)}

    assert len(prompts(held)) == 5
    assert not prompts(train) & prompts(held)
    again = encode(rows[::-1], RowOptions(seq_len=64, kind=kind))
    assert sorted(firsts(hold_out(again, 0.2, seed)[1])) == sorted(firsts(held)), "in any order"


def test_prompts_that_were_cut_apart_stay_together(encode, make_tokenizer):
    asked = [f"{'x' * 58} {n % 5}?" for n in range(20)]
    rows = [{**pair(n), "prompt": asked[n], "chosen": "y" * (n + 1)} for n in range(20)]
    options = replace(OPTIONS[PAIRS], truncation_mode="keep_end")
    data = encode(rows, options, make_tokenizer(None))
    assert data.counts.truncated > 10
    train, held = hold_out(data, 8, seed=0)
    assert {n % 5 for n in train.chosen.tolist()}.isdisjoint(n % 5 for n in held.chosen.tolist())


@pytest.mark.parametrize("kind", MAKE)
def test_a_run_that_goes_on_finds_its_rows_in_the_cache(kind, write_jsonl, make_tokenizer, cache):
    def load(**more: Any) -> Any:
        given = (file, 2, make_tokenizer(), OPTIONS[kind])
        return load_data(*given, seed=0, cache=cache, **more)

    file = write_jsonl([MAKE[kind](n) for n in range(12)])
    train, held = load()
    write_jsonl([MAKE[kind](n) for n in range(5, 20)])
    again, held_again = load(expected=Expected(train.digest, held.digest))
    assert (again.digest, held_again.digest) == (train.digest, held.digest)
    assert sides_of(again) == sides_of(train)
    assert again.side_lengths.tolist() == train.side_lengths.tolist()
