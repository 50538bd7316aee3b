"""Token ids, masks, cuts and dropped rows of pairs and of judged answers against what TRL's trainers
make of the same rows, with the chat templates of real models. docs/rows.md lists what differs."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from megatrain.data.build import DataOptions, encode_source
from megatrain.data.dataset import TokenRows
from megatrain.data.samples import JUDGED, PAIRS
from tests.commands import CHATML
from tests.data.test_against_trl import CALL, RESULT, WEATHER, of_model, says, user

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
ROWS = {"system": ("phi3", "gemma3"), "tools": ()}
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
        asked = DataOptions(options.pop("seq_len", None), kind=kind, **options)
        data: TokenRows = encode_source(rows, tokenizer, asked, cache)
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


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", CONVERSATIONS)
def test_conversations_with_a_prompt_of_their_own_or_in_both(tokenizers, ours, name, kind):
    prompt, chosen, rejected = CONVERSATIONS[kind]
    row: dict[str, Any] = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    tokenizer = tokenizers[name]
    (theirs,) = pairs_of_trl([row], tokenizer)
    (own,) = ours([row], tokenizer, PAIRS)
    assert_same(own, theirs, tokenizer)
    implicit: dict[str, Any] = {"chosen": prompt + chosen, "rejected": prompt + rejected}
    (of_both,) = ours([implicit], tokenizer, PAIRS)
    assert of_both == own
    assert pairs_of_trl([implicit], tokenizer) == [theirs]
