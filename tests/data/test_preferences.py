"""Rows of pairs and of judged answers: every format, and every way a row can be wrong."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from typing import Any

import pytest

from megatrain.data.build import AskedSet
from megatrain.data.encoding import RowOptions
from megatrain.data.formats import (
    MATTERS,
    ROW_FORMATS,
    convert_row,
    detect_format,
    formats_of,
    renamed,
)
from megatrain.data.formats import unknown_format as refusal
from megatrain.data.samples import JUDGED, KINDS, PAIRS, PLAIN, Chat, RowError
from megatrain.errors import DataError
from tests.helpers.mutated import mutated_line


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def human(text: str) -> dict[str, Any]:
    return {"from": "human", "value": text}


def gpt(text: str) -> dict[str, Any]:
    return {"from": "gpt", "value": text}


TURNS = [("user", "hi"), ("assistant", "yo"), ("assistant", "no")]
TURNS_FOUR = ("assistant", "It is four.")
GOOD_PAIRS: dict[str, dict[str, Any]] = {
    "preference": {"prompt": "hi", "chosen": "yo", "rejected": "no"},
    "ranking": {"conversations": [human("hi")], "chosen": gpt("yo"), "rejected": gpt("no")},
    "alpaca_ranking": {"instruction": "hi", "input": "", "chosen": "yo", "rejected": "no"},
    "implicit_prompt": {"chosen": [user("hi"), says("yo")], "rejected": [user("hi"), says("no")]},
}
OTHER_PAIRS: dict[str, dict[str, Any]] = {
    "lists": {"prompt": [user("hi")], "chosen": [says("yo")], "rejected": [says("no")]},
    "a text and lists": {"prompt": "hi", "chosen": [says("yo")], "rejected": [says("no")]},
    "turns": {"prompt": [user("hi")], "chosen": says("yo"), "rejected": says("no")},
    "whole conversations": {"prompt": "hi", **GOOD_PAIRS["implicit_prompt"]},
    "sharegpt": {"chosen": [human("hi"), gpt("yo")], "rejected": [human("hi"), gpt("no")]},
}
GOOD_JUDGED: dict[str, dict[str, Any]] = {
    "messages": {"messages": [user("hi"), says("yo")]},
    "sharegpt": {"conversations": [human("hi"), gpt("yo")]},
    "prompt_completion": {"prompt": "hi", "completion": "yo"},
    "alpaca": {"instruction": "hi", "input": "", "output": "yo"},
}


def read(row: Any, kind: str) -> Any:
    form = detect_format(row, kind)
    if form is None:
        raise refusal(row, kind)
    return convert_row(form, row, kind=kind)


def turns(chat: Chat) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in chat.messages]


def trained(chat: Chat) -> list[bool]:
    return [message.trained for message in chat.messages]


def test_every_format_has_a_good_row():
    assert set(GOOD_PAIRS) == set(formats_of(PAIRS))
    assert set(GOOD_JUDGED) == set(formats_of(JUDGED))
    assert {name for kind in KINDS for name in formats_of(kind)} == set(ROW_FORMATS)


def test_all_pairs_say_the_same():
    for row in [*GOOD_PAIRS.values(), *OTHER_PAIRS.values()]:
        pair = read(row, PAIRS)
        assert turns(pair.texts[0]) == [TURNS[0], TURNS[1]]
        assert turns(pair.texts[1]) == [TURNS[0], TURNS[2]]
        assert trained(pair.texts[0])[1:] == trained(pair.texts[1])[1:] == [True]
        assert math.isnan(pair.value)


def test_a_pair_is_found_by_its_columns():
    for name in GOOD_PAIRS:
        assert detect_format({**GOOD_PAIRS[name], "id": 3, "label": None}, PAIRS) == name


def test_a_judged_row_is_a_conversation_with_a_label():
    for name in GOOD_JUDGED:
        for column in ["label", "kto_tag"]:
            for label, wanted in [
                (True, True),
                (False, False),
                (1, True),
                (0, False),
                ("True", True),
                (" false", False),
            ]:
                judged = read({**GOOD_JUDGED[name], column: label}, JUDGED)
                assert judged.value == wanted
                assert turns(judged.texts[0]) == TURNS[:2]


def test_two_texts_mean_themselves():
    explicit = read(GOOD_PAIRS["preference"], PAIRS)
    implicit = read({"chosen": "hi yo", "rejected": "hi no"}, PAIRS)
    for pair in (explicit, implicit):
        assert pair.texts[0].literal and pair.texts[1].literal
    assert implicit.texts[0].plain == ("hi", " yo"), "the space belongs to the answer"


def test_a_common_beginning_is_a_prompt_only_where_no_column_may_hold_one():
    texts = {"chosen": "It is four.", "rejected": "It is five."}
    others = {"messages": [user("2+2?")], "context": "2+2?", "conversation": [human("2+2?")]}
    others |= {"my_column": "2+2?", "my_turns": [user("2+2?")]}
    for name, value in others.items():
        row = {**texts, "id": 7, "about": {"by": "me"}, "margin": None, name: value}
        with pytest.raises(RowError, match=rf"^field '{name}': .*columns: {{prompt: {name}}}"):
            read(row, PAIRS)
        named: Any = convert_row("implicit_prompt", row, kind=PAIRS, found=False)
        assert named.texts[0].plain == ("It is", " four.")
        asked: Any = convert_row("preference", renamed(row, {"prompt": name}), kind=PAIRS)
        assert turns(asked.texts[0]) == [("user", "2+2?"), TURNS_FOUR]


def test_a_prompt_never_ends_in_mid_word():
    for chosen, rejected, prompt in [
        ("Say: four", "Say: five", "Say:"),
        ("Say: it is", "Say: it isn", "Say: it"),
        ("Say 10", "Say 12", "Say"),
        ("A: нет", "A: нельзя", "A:"),
        ("A: e\u0301a", "A: e\u0301o", "A:"),
        ("请说：四月", "请说：四川", "请说：四"),  # no spaces, so no words to see
    ]:
        assert read({"chosen": chosen, "rejected": rejected}, PAIRS).texts[0].plain[0] == prompt


def test_earlier_answers_are_context():
    earlier = [user("a"), says("b"), user("c")]
    three = {**GOOD_PAIRS["preference"], "prompt": earlier}
    alpaca = {**GOOD_PAIRS["alpaca_ranking"], "history": [["a", "b"]]}
    whole = {"chosen": [*earlier, says("d")], "rejected": [*earlier, says("e")]}
    for row in (three, alpaca, whole):
        assert trained(read(row, PAIRS).texts[1]) == [False, False, False, True]
    judged = read({"messages": [*earlier, says("d")], "label": True}, JUDGED)
    assert trained(judged.texts[0])[1::2] == [False, True]


def test_an_answer_may_be_of_several_turns():
    several = [says("b"), user("c"), says("d")]
    pair = read({"prompt": "a", "chosen": several, "rejected": "e"}, PAIRS)
    assert trained(pair.texts[0])[1::2] == [True, True]
    whole = {"chosen": [user("a"), *several], "rejected": [user("a"), says("x"), *several[1:]]}
    assert trained(read(whole, PAIRS).texts[1])[1::2] == [True, True]
    judged = read({"prompt": [user("a")], "completion": several, "label": 1}, JUDGED)
    assert trained(judged.texts[0])[1::2] == [True, True]


def test_what_columns_say_about_a_pair_is_said_of_both_answers():
    for name in GOOD_PAIRS:
        row = {**GOOD_PAIRS[name], "system": "be", "chat_template_kwargs": {"x": 1}, "margin": 2}
        pair = read(row, PAIRS)
        for chat in pair.texts:
            assert turns(chat)[0] == ("system", "be")
            assert chat.variables == {"x": 1}
        assert pair.value == 2.0
        assert not set(row) - set(ROW_FORMATS[name].reads(PAIRS))
        if name != "alpaca_ranking":
            assert read({**row, "tools": [{"name": "f"}]}, PAIRS).texts[1].tools


READ_OF_PAIRS = {"chosen", "rejected", "margin", "system", "system_prompt", "chat_template_kwargs"}
READ_OF_PAIRS |= {"tools", "functions"}


def test_a_column_that_matters_and_is_not_read_refuses_a_pair():
    for name in GOOD_PAIRS:
        for column in sorted(set(MATTERS) - READ_OF_PAIRS - {"history"}):
            with pytest.raises(RowError, match=f"^field '{column}': "):
                read({**GOOD_PAIRS[name], column: [1]}, PAIRS)


PAIR, LISTS, WHOLE = GOOD_PAIRS["preference"], OTHER_PAIRS["lists"], GOOD_PAIRS["implicit_prompt"]
RANKING, ALPACA = GOOD_PAIRS["ranking"], GOOD_PAIRS["alpaca_ranking"]
BAD_PAIRS: list[tuple[Any, str]] = [
    (7, "expected an object, found a number"),
    ([PAIR], "expected an object, found a list"),
    ({"messages": [user("hi"), says("yo")]}, "field 'chosen' is missing: a row needs two answers"),
    ({"prompt": "hi", "completion": "yo"}, "rows of one answer are for method: sft"),
    ({"prompt": "hi", "chosen": "yo"}, "field 'rejected' is missing: a row needs two answers"),
    ({"prompt": "hi", "rejected": "no", "chosen": None}, "field 'chosen' is missing"),
    ({**PAIR, "label": True}, "field 'label': answers that are marked .* are for method: kto"),
    ({"prompt": "a", "completion": "b", "label": 1}, "'label': .* method: kto"),
    ({"id": 1}, r"no known row format has the columns found \(id\); .* preference: prompt \+ ch"),
    ({**PAIR, "chosen": "no"}, "'chosen' and 'rejected' are equal: neither answer is better"),
    ({**ALPACA, "chosen": "no"}, "are equal"),
    ({**WHOLE, "chosen": WHOLE["rejected"]}, "are equal"),
    ({"chosen": "same", "rejected": "same"}, "are equal"),
    ({**PAIR, "chosen": ""}, "field 'chosen' is empty"),
    ({**PAIR, "rejected": " \n"}, "field 'rejected' is empty"),
    ({**PAIR, "prompt": " "}, "field 'prompt' is empty"),
    ({**PAIR, "chosen": 3}, "field 'chosen': expected text, found a number"),
    ({**PAIR, "chosen": True}, "field 'chosen': expected text, found true or false"),
    ({**PAIR, "prompt": 3}, "field 'prompt': expected text, found a number"),
    ({**LISTS, "chosen": []}, "field 'chosen' is empty"),
    ({**LISTS, "prompt": []}, "field 'prompt' is empty"),
    ({**LISTS, "chosen": [[says("yo")]]}, r"chosen\[0\]: expected an object, found a list"),
    ({**LISTS, "chosen": ["yo"]}, r"chosen\[0\]: expected an object, found text"),
    ({**LISTS, "chosen": [None]}, r"chosen\[0\]: expected an object, found null"),
    ({**LISTS, "chosen": [{"role": "assistant"}]}, r"chosen\[0\].content is missing"),
    ({**LISTS, "chosen": [says("")]}, r"chosen\[0\].content is empty"),
    ({**LISTS, "chosen": {}}, r"chosen\[0\].role is missing"),
    ({**LISTS, "chosen": [user("yo")]}, "'chosen': its answer begins with a user turn"),
    ({**LISTS, "rejected": [says("a"), user("b")]}, "'rejected': its last turn is a user turn"),
    ({**LISTS, "prompt": [user("a"), says("b")]}, "its answer follows an answer, not a question"),
    ({**RANKING, "chosen": {"from": "gpt"}}, r"chosen\[0\].value is missing"),
    ({**RANKING, "chosen": {"from": "alien", "value": "x"}}, "unknown role 'alien'"),
    ({**RANKING, "rejected": human("x")}, "'rejected': its answer begins with a user turn"),
    ({**RANKING, "conversations": [human("a"), gpt("b")]}, "its answer follows an answer"),
    ({**RANKING, "conversations": "x"}, "'conversations': expected a list, found text"),
    ({**ALPACA, "rejected": ["no"]}, "'rejected': expected text, found a list"),
    ({"chosen": "Yes.", "rejected": "No."}, "do not begin alike, so there is no prompt in them"),
    ({"chosen": " Yes.", "rejected": " No."}, "do not begin alike"),
    ({"chosen": "a: yes", "rejected": [user("a")]}, "expected two texts, or two lists of turns"),
    ({"chosen": [says("a")], "rejected": [says("b")]}, "have no turn in common to begin with"),
    ({"chosen": [user("a"), says("b")], "rejected": [user("a"), user("b")]}, "begins with a user"),
    ({**WHOLE, "question": "Q"}, "'question': may hold the prompt, .*columns: {prompt: question}"),
    ({"chosen": [says("a")], "rejected": [says("b")], "messages": [user("q")]}, "prompt: messages"),
    ({"chosen": "Rot.", "rejected": "Rose."}, "do not begin alike, so there is no prompt in them"),
    ({"chosen": "Q: a\n", "rejected": "Q: a\n\n"}, "field 'chosen': holds no answer behind the p"),
    ({"chosen": {"a": 1}, "rejected": {"b": 1}}, r"chosen\[0\].role is missing"),
    ({**PAIR, "margin": "2"}, "field 'margin': expected a finite number, found '2'"),
    ({**PAIR, "margin": True}, "field 'margin': expected a finite number, found True"),
    ({**PAIR, "margin": math.nan}, "field 'margin': expected a finite number, found nan"),
    ({**PAIR, "margin": -math.inf}, "field 'margin': expected a finite number, found -inf"),
    ({**PAIR, "margin": 10**400}, "field 'margin': expected a finite number, found 1000"),
    ({**PAIR, "margin": [1]}, "field 'margin': expected a finite number, found .1."),
]


def test_bad_pairs_are_named():
    for row, message in BAD_PAIRS:
        with pytest.raises(RowError, match=message) as raised:
            read(row, PAIRS)
        assert "\n" not in str(raised.value)


JUDGED_ROW = {**GOOD_JUDGED["messages"], "label": True}
BAD_JUDGED: list[tuple[Any, str]] = [
    (None, "expected an object, found null"),
    (GOOD_JUDGED["messages"], "field 'label' is missing: each answer needs a label, true where"),
    ({**JUDGED_ROW, "label": None}, "field 'label' is missing"),
    ({**JUDGED_ROW, "label": "yes"}, "field 'label': expected true or false, found 'yes'"),
    ({**JUDGED_ROW, "label": 2}, "field 'label': expected true or false, found 2"),
    ({**JUDGED_ROW, "label": math.nan}, "field 'label': expected true or false, found nan"),
    ({**JUDGED_ROW, "label": [True]}, "field 'label': expected true or false, found .True"),
    ({**JUDGED_ROW, "label": {"a": 1}}, "field 'label': expected true or false, found {'a': 1}"),
    ({**JUDGED_ROW, "kto_tag": True}, "field 'kto_tag': 'label' says the same; keep one"),
    ({**JUDGED_ROW, "messages": [user("hi")]}, "the last turn is not the assistant's, so there"),
    ({**JUDGED_ROW, "chosen": "a"}, "'chosen': two answers, .* method: dpo, orpo, simpo"),
    ({"prompt": "a", "chosen": "b", "rejected": "c"}, "'chosen': two answers, .* method: dpo"),
    ({"prompt": "a", "completion": " ", "label": True}, "field 'completion' is empty"),
    ({"prompt": [[]], "completion": "a", "label": True}, r"prompt\[0\]: expected an object"),
    ({"text": "a", "label": True}, r"columns found \(text, label\); .* messages: messages \+ lab"),
]


def test_bad_judged_rows_are_named():
    for row, message in BAD_JUDGED:
        with pytest.raises(RowError, match=message) as raised:
            read(row, JUDGED)
        assert "\n" not in str(raised.value)


def test_a_rejected_answer_is_never_trained_on_in_silence():
    for row in [*GOOD_PAIRS.values(), *OTHER_PAIRS.values()]:
        for missing in ({}, {"chosen": None}):  # what is left is a row of sft, but for `rejected`
            with pytest.raises(RowError, match="method: dpo, orpo, simpo"):
                read({**row, **missing, "completion": "yo", "output": "yo"}, PLAIN)


@pytest.mark.parametrize(
    ("kind", "form", "words"),
    [
        (PAIRS, "messages", "'messages' is not for method: dpo, .* use one of preference, rank"),
        (JUDGED, "preference", "'preference' is not for method: kto; use one of messages"),
        (
            PLAIN,
            "preference",
            "'preference' is not for method: sft or distill; use one of messages",
        ),
    ],
)
def test_a_format_that_is_named_fits_the_method(encode, kind, form, words):
    with pytest.raises(DataError, match=words):
        encode([PAIR], RowOptions(64, kind=kind, format=form))


OPTIONS = RowOptions(seq_len=200, on_bad_row="skip")
SEEDS: list[tuple[str, dict[str, Any]]] = [
    *((PAIRS, {**row, "margin": 1.5}) for row in (*GOOD_PAIRS.values(), *OTHER_PAIRS.values())),
    (PAIRS, {"chosen": "what? this", "rejected": "what? that", "about": {"id": [1], "by": "me"}}),
    *((JUDGED, {**row, "label": True}) for row in GOOD_JUDGED.values()),
]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(SEEDS)))
def test_mutated_rows_are_bad_or_trainable_and_never_crash(number, make_tokenizer, tmp_path, cache):
    rng, file, (kind, seed) = random.Random(number), tmp_path / "mutated.jsonl", SEEDS[number]
    lines = [mutated_line(seed, rng) for _ in range(500)]
    file.write_bytes(b"\n".join([json.dumps(seed).encode(), *lines]))
    data = AskedSet(file, make_tokenizer(), replace(OPTIONS, kind=kind), cache).rows()
    counts = data.counts
    assert counts.kept == len(data) > 10
    assert counts.bad > 50
    assert data.values is not None
    for row, side in ((row, side) for row in range(len(data)) for side in (0, 1)):
        ids, mask = data.side(row, side)
        assert mask.any() and not mask[0] and len(ids) <= 200
