"""Token ids, masks, cuts and dropped rows of pairs and of judged answers against those of TRL's
trainers, with the chat templates of real models. docs/rows.md lists what differs."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from megatrain.data.build import AskedSet
from megatrain.data.encoding import RowOptions
from megatrain.data.rows import TokenRows
from megatrain.data.samples import JUDGED, PAIRS
from tests.data.test_against_trl import CALL, RESULT, WEATHER, of_model, says, user
from tests.helpers.commands import CHATML

trl = pytest.importorskip("trl", reason="trl is not installed (pip install --no-deps trl)")

pytestmark = pytest.mark.filterwarnings("ignore")  # TRL's own, and transformers' about it
MODELS = ("llama3", "qwen2_5", "qwen3", "qwen3_5_nothink", "gemma3", "phi3", "cohere2", "lfm2_v2")
# as (prompt, chosen, rejected)
ASKED = [user("one?"), says("It is 1."), user("two?")]
CONVERSATIONS: dict[str, tuple[list[Any], list[Any], list[Any]]] = {
    "question": ([user("one?")], [says("It is 1.")], [says("It is not 2, but 4.")]),
    "turns": (ASKED, [says("It is 2.")], [says("No.")]),
    "system": ([{"role": "system", "content": "be"}, *ASKED], [says("It is 2.")], [says("No.")]),
    "alike": ([user("one?")], [says("It is 1.")], [says("It is 1. Or 2?")]),
    "thinking": (ASKED, [says("<think>\nhm\n</think>\n\nIt is 2.")], [says("No.")]),
}
TEXTS = {
    "space": ("two plus two?", " It is four.", " No."),
    "joined": ("two plus two is fo", "ur", "rty"),
    "merged": ("What is two plus ", "two?", "four?"),
    "line": ("What?\n", "\nIt is four", "It is not"),
    "ended": ("What?", " four<|endoftext|>", " five"),
}
# as (chosen, rejected)
IN_BOTH = [
    ("Q: a? A: yes", "Q: a? A: no"),
    ("Q: a? A: forty", "Q: a? A: four"),
    ("Q: a? A: four", "Q: a? A: four plus"),
    ("Q: a? A: four plus", "Q: a? A: four"),
    ("The sky is blue.", "The sky is green."),
]
Sides = list[tuple[list[int], list[bool]]]


@pytest.fixture(scope="module")
def tokenizers(make_tokenizer: Any) -> dict[str, Any]:
    return {name: of_model(make_tokenizer, name) for name in MODELS}


def prepared(trainer: Any, rows: list[dict[str, Any]], tokenizer: Any, **args: Any) -> list[Any]:
    """The rows as a trainer of TRL has them before it makes batches of them."""
    import datasets

    datasets.disable_progress_bars()
    asked = {"max_length": None, "truncation_mode": "keep_start", "dataset_num_proc": None, **args}
    options = SimpleNamespace(per_device_train_batch_size=len(rows), **asked)
    of_kto = {"calculate_KL": True, "desirable_weight": 1.0, "undesirable_weight": 1.0}
    self = SimpleNamespace(_tokenizer=tokenizer, **of_kto)
    data = datasets.Dataset.from_list(rows)
    return list(trainer._prepare_dataset(self, data, tokenizer, options, "train"))


def pairs_of_trl(rows: list[dict[str, Any]], tokenizer: Any, **args: Any) -> list[Sides]:
    """(ids, mask) of both answers of each row that is left, after TRL's own cut."""
    from trl.trainer.dpo_trainer import DataCollatorForPreference

    found = prepared(trl.DPOTrainer, rows, tokenizer, **args)
    cut = {name: args[name] for name in ("max_length", "truncation_mode") if name in args}
    collate = DataCollatorForPreference(pad_token_id=0, **cut)
    return [unpadded(collate([one])) for one in found]


def unpadded(batch: Any, prefix: str = "") -> Sides:
    names = ("input_ids", "attention_mask", "completion_mask")
    tensors = zip(*(batch[prefix + name] for name in names), strict=True)
    return [
        (ids[real == 1].tolist(), mask[real == 1].bool().tolist()) for ids, real, mask in tensors
    ]


def judged_of_trl(rows: list[dict[str, Any]], tokenizer: Any, **args: Any) -> list[Sides]:
    """(ids, mask) of each row that is left and of its mismatch."""
    from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference

    collate = DataCollatorForUnpairedPreference(0, max_length=args.get("max_length"))
    batches = [collate([one]) for one in prepared(trl.KTOTrainer, rows, tokenizer, **args)]
    return [[*unpadded(batch), *unpadded(batch, "KL_")] for batch in batches]


@pytest.fixture
def ours(cache: Any) -> Any:
    """ours(rows, tokenizer, kind, ...): (ids, mask) of both sequences of each row."""

    def run(rows: list[Any], tokenizer: Any, kind: str, **options: Any) -> list[Sides]:
        asked = RowOptions(options.pop("seq_len", None), kind=kind, **options)
        data: TokenRows = AskedSet(rows, tokenizer, asked, cache).rows()
        sides = [[data.side(row, side) for side in (0, 1)] for row in range(len(data))]
        return [[(ids.tolist(), mask.tolist()) for ids, mask in row] for row in sides]

    return run


def assert_same(own: Sides, theirs: Sides, tokenizer: Any) -> None:
    """The same ids, and masks that are equal but for white space behind the end of a turn."""
    for (ids, mask), (other_ids, other_mask) in zip(own, theirs, strict=True):
        assert ids == other_ids
        differ = [place for place in range(1, len(ids)) if mask[place] != other_mask[place]]
        assert all(other_mask[place] for place in differ)
        behind = [place for place in differ if not tokenizer.decode(ids[place:]).strip()]
        assert differ == behind


def row_of(prompt: Any, chosen: Any, rejected: Any) -> dict[str, Any]:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_conversations_with_a_prompt_of_their_own_or_in_both(tokenizers, ours, name):
    tokenizer, rows = tokenizers[name], [row_of(*turns) for turns in CONVERSATIONS.values()]
    theirs, own = pairs_of_trl(rows, tokenizer), ours(rows, tokenizer, PAIRS)
    assert len(own) == len(theirs) == len(CONVERSATIONS)
    for mine, other in zip(own, theirs, strict=True):
        assert_same(mine, other, tokenizer)
    implicit: list[dict[str, Any]] = [
        {"chosen": prompt + chosen, "rejected": prompt + rejected}
        for prompt, chosen, rejected in CONVERSATIONS.values()
    ]
    assert ours(implicit, tokenizer, PAIRS) == own
    assert pairs_of_trl(implicit, tokenizer) == theirs


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "lfm2_v2"])
def test_tools_and_an_answer_of_several_turns(tokenizers, ours, name):
    """TRL also trains on results of tools and on headers of turns, which the model never writes."""
    tokenizer, tools = tokenizers[name], [{"type": "function", "function": WEATHER}]
    called = [says("", tool_calls=[CALL]), RESULT, says("It is sunny.")]
    row = {"prompt": [user("Sunny?")], "chosen": called, "rejected": [says("No.")]}
    (theirs,) = pairs_of_trl([{**row, "tools": json.dumps(tools)}], tokenizer)
    (own,) = ours([{**row, "tools": tools}], tokenizer, PAIRS)
    assert_same(own[1:], theirs[1:], tokenizer)
    (ids, mask), (other_ids, other_mask) = own[0], theirs[0]
    assert ids == other_ids
    assert all(theirs for mine, theirs in zip(mask, other_mask, strict=True) if mine)
    only_theirs = [ids[place] for place, mine in enumerate(mask) if other_mask[place] and not mine]
    text = tokenizer.decode([token for token, mine in zip(ids, mask, strict=True) if mine])
    assert "sunny" in tokenizer.decode(only_theirs)
    assert "get_weather" in text
    assert text.rstrip().endswith("It is sunny.<|im_end|>")


def assert_texts_are_the_same(own: list[Sides], theirs: list[Sides]) -> None:
    assert [[ids for ids, _ in row] for row in own] == [[ids for ids, _ in row] for row in theirs]
    masks, other_masks = ([[mask[1:] for _, mask in row] for row in rows] for rows in (own, theirs))
    assert masks == other_masks


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("template", [None, CHATML])
def test_texts(make_tokenizer, ours, template, bos):
    tokenizer = make_tokenizer(template, trim_offsets=False, bos=bos)
    rows = [row_of(*texts) for texts in TEXTS.values()]
    assert_texts_are_the_same(ours(rows, tokenizer, PAIRS), pairs_of_trl(rows, tokenizer))


def test_the_prompt_in_two_texts(make_tokenizer, ours):
    tokenizer = make_tokenizer(trim_offsets=False)
    rows = [{"chosen": chosen, "rejected": rejected} for chosen, rejected in IN_BOTH]
    assert_texts_are_the_same(ours(rows, tokenizer, PAIRS), pairs_of_trl(rows, tokenizer))


def length_of(number: int) -> list[dict[str, Any]]:
    return [user("Why? " * number)]


LONG: list[dict[str, Any]] = [
    {
        "prompt": length_of(number % 7 + 1),
        "chosen": [says(f"Because {number}. " * (number % 5 + 1))],
        "rejected": [says(f"Who knows {number}? " * (number % 3 + 1))],
    }
    for number in range(24)
]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["keep_start", "keep_end"])
@pytest.mark.parametrize("name", ["llama3", "qwen2_5", "phi3"])
def test_cut_pairs_and_which_are_dropped(tokenizers, ours, name, mode):
    tokenizer = tokenizers[name]
    seq_len = seq_len_of(tokenizer)
    theirs = pairs_of_trl(LONG, tokenizer, max_length=seq_len, truncation_mode=mode)
    own = ours(LONG, tokenizer, PAIRS, seq_len=seq_len, truncation_mode=mode)
    assert len(own) == len(theirs)
    assert (len(theirs) < len(LONG)) == (mode == "keep_start")
    for mine, other in zip(own, theirs, strict=True):
        assert_same(mine, other, tokenizer)


def seq_len_of(tokenizer: Any) -> int:
    """As long as the prompts of half of the rows, to the token."""
    lengths = [len(one["prompt_ids"]) for one in prepared(trl.DPOTrainer, LONG, tokenizer)]
    return sorted(lengths)[len(LONG) // 2]


def judged_rows() -> list[dict[str, Any]]:
    return [
        {"prompt": row["prompt"], "completion": row["chosen"], "label": number % 3 > 0}
        for number, row in enumerate(LONG)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("name", ["llama3", "qwen2_5", "phi3"])
def test_judged_rows_and_their_mismatches(tokenizers, ours, name, cut):
    """TRL gives the first prompt of a batch the answer of its last row, here it is the second's."""
    tokenizer = tokenizers[name]
    seq_len = seq_len_of(tokenizer) if cut else None
    theirs = judged_of_trl(judged_rows(), tokenizer, max_length=seq_len)
    own = ours(judged_rows(), tokenizer, JUDGED, seq_len=seq_len)
    assert len(own) == len(theirs)
    assert (len(theirs) < len(LONG)) == cut
    for mine, other in zip(own[1:], theirs[1:], strict=True):
        assert_same(mine, other, tokenizer)
    assert_same(own[0][:1], theirs[0][:1], tokenizer)
    whole = ours(judged_rows(), tokenizer, JUDGED)
    (asked, asked_mask), (other_ids, other_mask) = whole[0][0], whole[1][0]
    begins, other_begins = asked_mask.index(True), other_mask.index(True)
    assert whole[0][1][0] == asked[:begins] + other_ids[other_begins:]
    assert whole[0][1][1] == [False] * begins + other_mask[other_begins:]


def test_rows_that_are_too_long_for_a_score_are_dropped_as_by_the_reward_trainer(tokenizers, ours):
    tokenizer = tokenizers["llama3"]
    seq_len = seq_len_of(tokenizer) + 20
    left = prepared(trl.RewardTrainer, LONG, tokenizer, max_length=seq_len)
    own = ours(LONG, tokenizer, PAIRS, seq_len=seq_len, truncation_mode="drop")
    theirs = [[one["chosen_ids"], one["rejected_ids"]] for one in left]
    assert [[ids for ids, _ in row] for row in own] == theirs
    assert 0 < len(own) < len(LONG)
