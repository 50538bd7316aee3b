"""The adaptation of `examples/adaptation`: its rows, its configs, and what its check lets pass."""

from __future__ import annotations

import copy
import json
import random
from itertools import pairwise
from pathlib import Path

import pytest

from examples.adaptation import check
from examples.adaptation.rows import (
    Line,
    both_spellings,
    by_skeleton,
    next_speeches,
    pair,
    passages,
    skeleton,
    speeches,
    spellings,
)
from megatrain.config import load_config

HERE = Path(check.__file__).parent
LINE = Line("I haue vpon a high and pleasant hill", "I have upon a high and pleasant hill", "")
THREE = Line("Haue wish'd the sleepe vpon vs", "Have wish'd the sleep upon us", "Ham. Goe.")
PLAY = """The Tragedie

Enter Hamlet.

  Ham. I haue vpon a high and pleasant hill
Feign'd Fortune to be thron'd

   Hor. My Lord, {n}, and speake no more of that
  Ham. Doe not

"""


def test_a_line_has_the_same_skeleton_in_both_spellings():
    assert skeleton(LINE.folio) == skeleton(LINE.modern) != skeleton("I have a hill")


def test_words_of_a_line_become_modern_one_by_one():
    assert LINE.apart == [1, 2]
    assert LINE.mixed([2]) == "I haue upon a high and pleasant hill"
    assert LINE.mixed(LINE.apart) == LINE.modern


def test_lines_are_found_in_both_editions(tmp_path):
    (tmp_path / "hamlet_gut.txt").write_text(f"HAMLET.\n{LINE.modern}\n")
    (found,) = both_spellings([PLAY], by_skeleton(tmp_path))
    assert (found.folio, found.modern) == (LINE.folio, LINE.modern)
    assert found.before == "The Tragedie\nEnter Hamlet."


def test_speeches_end_at_the_next_speaker_or_an_empty_line():
    assert [*speeches(PLAY)] == [
        ("Ham", "I haue vpon a high and pleasant hill Feign'd Fortune to be thron'd"),
        ("Hor", "My Lord, {n}, and speake no more of that"),
        ("Ham", "Doe not"),
    ]


@pytest.mark.parametrize("seed", range(8))
def test_answers_of_a_pair_differ_and_choices_are_four(seed):
    draw = random.Random(seed)
    found = pair(LINE, draw)
    assert found["chosen"][0]["content"] == LINE.folio != found["rejected"][0]["content"]
    (asked,) = spellings([THREE], draw)
    assert len({*asked["choices"]}) == 4 and asked["choices"][asked["right"]] == THREE.folio


def test_the_right_speech_is_the_next_one():
    play = "".join(PLAY.replace("{n}", f"number {n}") for n in range(12))
    said = "\n".join(f"{who}. {words}" for who, words in speeches(play))
    for asked in next_speeches([play], random.Random(0)):
        ways = [f"{asked['before']} {choice}" in said for choice in asked["choices"]]
        assert ways[asked["right"]] and len(ways) == 4


def test_passages_do_not_overlap():
    words = " ".join(f"{n:05}" for n in range(5000))
    found = [row["text"].split() for row in passages([words, words[::-1]], random.Random(0))]
    assert len({word for part in found[::2] for word in part}) == sum(map(len, found[::2]))


def test_each_stage_begins_with_the_model_of_the_one_before():
    stages = [load_config(HERE / f"{stage}.yaml") for stage in check.STAGES]
    for stage, config in zip(check.STAGES, stages, strict=True):
        assert config.output == Path("runs/adaptation") / stage
    for before, after in pairwise(stages):
        assert after.model.source == str(before.output / "final")


RESULT: check.Row = {
    "tasks": {
        stage: {name: 1.0 - at / 10 if "bits" in name else at / 10 for name in check.FIGURES}
        for at, stage in enumerate(("before", *check.STAGES))
    },
    "held_out": {
        stage: [
            {"loss": 1.0, **dict.fromkeys(check.OF_PAIRS, 0.0)},
            {"loss": 0.5, **dict.fromkeys(check.OF_PAIRS, 0.75)},
        ]
        for stage in check.STAGES
    },
    "seconds": {name: {"wall": 61.2, "processor": 90.0} for name in ("fetch", "2-sft")},
}


def test_a_good_result_passes_and_is_a_table():
    assert [*check.failures(RESULT)] == []
    text = "\n".join(check.table(RESULT))
    assert "| 2-sft | 0.800 | 0.800 | 0.200 | 0.200 | 0.200 | 1.000 -> 0.500 | 61 s |" in text


def test_what_did_not_improve_fails():
    bad = copy.deepcopy(RESULT)
    bad["tasks"]["3-dpo"].update({"folio_text bits_per_byte": 1.0, "folio_spelling acc": 0.0})
    bad["tasks"]["3-dpo"]["general_text bits_per_byte"] = 1.1
    bad["held_out"]["3-dpo"][-1].update({"rewards/accuracies": 0.5, "loss": 1.0})
    assert [*check.failures(bad)] == [
        "folio_text bits_per_byte went from 1.000 to 1.000",
        "general_text bits_per_byte went from 1.000 to 1.100",
        "3-dpo: the held-out loss did not fall",
        "held-out pairs are not told apart: accuracy 0.500",
        "the Folio's spelling is chosen no more often",
    ]


def test_figures_are_read_from_the_runs(tmp_path):
    tasks = {name: {"bits_per_byte,none": 2.0, "acc,none": 0.25, "acc_norm,none": 0.25} for name in
             {figure.split()[0] for figure in check.FIGURES}}  # fmt: skip
    for name in ("before", *check.STAGES):
        (tmp_path / check.TASKS.format(name)).write_text(json.dumps({"results": tasks}))
        tasks = {task: dict.fromkeys(figures, 0.5) for task, figures in tasks.items()}
    for stage in check.STAGES:
        (tmp_path / stage).mkdir()
        lines = [{"eval_loss": 2.0}, {"loss": 1.0}, {"eval_loss": 1.0}]
        (tmp_path / stage / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = check.read(tmp_path)
    assert found["tasks"]["before"]["folio_spelling acc"] == 0.25
    assert {*found["tasks"]["3-dpo"].values()} == {0.5}
    assert found["held_out"]["2-sft"] == [{"loss": 2.0}, {"loss": 1.0}]
