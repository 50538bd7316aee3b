"""Rows that other trainers' configs name: files, sets of the hub, formats, columns, mixtures."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain.config import load_config
from megatrain.config.document import write_yaml
from megatrain.config.importing import import_config
from tests.helpers.theirs import FACTORY, Given, imported, make_sets, value


@pytest.fixture(autouse=True)
def _there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_sets()


# an entry of axolotl's `datasets`, and the keys of `data` that follow
SOURCES: list[tuple[Given, Given]] = [
    ({"path": "o/r", "type": "alpaca"}, {"train": ("o/r", "alpaca"), "prompts": "alpaca"}),
    (
        {"path": "o/r", "type": "completion", "field": "b"},
        {"train": ("o/r", "text"), "text_field": "b"},
    ),
    ({"path": "o/r", "type": "chat_template"}, {"train": ("o/r", "messages")}),
    (
        {"path": "o/r", "type": "chat_template", "field_messages": "turns"},
        {"train": ("o/r", "messages"), "columns": {"messages": "turns"}},
    ),
    (
        {
            "path": "o/r",
            "type": "chat_template",
            "field_messages": "conversations",
            "message_property_mappings": {"role": "from", "content": "value"},
        },
        {"train": ("o/r", "sharegpt")},
    ),
    (
        {"path": "json", "data_files": ["sets/ours.json"], "ds_type": "json", "type": "alpaca"},
        {"train": ("sets/ours.json", "alpaca")},
    ),
    ({"path": "sets/ours.json", "split": "train", "type": "alpaca"}, {"prompts": "alpaca"}),
    ({"path": "o/r", "name": "en", "type": "alpaca"}, {"train": ("o/r:en:train", "alpaca")}),
]


def test_a_data_set_of_axolotl():
    for entry, expected in SOURCES:
        found = imported("axolotl", datasets=[entry])
        assert found.faithful, found.report()
        for key, ours in expected.items():
            path = {"path": ours[0], "format": ours[1]} if key == "train" else ours
            assert value(found, f"data.{key}") == path


def test_pairs_and_judged_rows_of_axolotl():
    entry = {"path": "o/r", "type": "chat_template.default", "field_messages": "talk"}
    found = imported("axolotl", rl="dpo", rl_beta=0.2, datasets=[entry])
    assert value(found, "data.columns") == {"prompt": "talk"}
    assert (value(found, "dpo.beta"), value(found, "data.train")["format"]) == (0.2, "preference")
    found = imported("axolotl", rl="dpo", datasets=[{"path": "o/r", "type": "chatml.intel"}])
    assert value(found, "data.chat_template") == "chatml"
    assert (value(found, "data.prompts"), value(found, "data.columns")) == (
        "chat",
        {"prompt": "question"},
    )
    simpo = imported("axolotl", rl="simpo", datasets=[{"path": "o/r", "type": "chatml.ultra"}])
    assert "cpo_alpha" in simpo.refused["rl"][0]
    entry = {"path": "o/r", "type": "bradley_terry.chat_template"}
    assert value(imported("axolotl", reward_model=True, datasets=[entry]), "method") == "reward"


def test_pretraining_of_axolotl_streams():
    entry = {"path": "o/r", "name": "en", "type": "pretrain", "split": "train"}
    found = imported("axolotl", datasets=None, pretraining_dataset=[entry], max_steps=9)
    assert found.faithful and not found.missing, found.report()
    config = load_config(dict(found.tree()))
    assert (config.method, config.data.streaming, config.train.max_steps) == ("pretrain", True, 9)
    assert config.train.tokens_per_step == 2 * 4 * 2048


def test_sets_of_llama_factory():
    found = imported("llama-factory", dataset="ours, more")
    files = [
        {"path": "sets/ours.json", "format": "alpaca"},
        {"path": "org/more", "format": "messages"},
    ]
    assert value(found, "data.train") == files
    mixed = imported("llama-factory", dataset="ours,more", mix_strategy="interleave_under")
    assert "give each of data.train a weight" in mixed.refused["mix_strategy"][0]
    pairs = imported("llama-factory", stage="dpo", dataset="pairs", pref_loss="ipo", pref_beta=0.3)
    assert value(pairs, "data.train") == {"path": "org/pairs:en:train", "format": "ranking"}
    assert (value(pairs, "dpo.loss_type"), value(pairs, "dpo.beta")) == ("ipo", 0.3)
    assert (
        value(imported("llama-factory", stage="dpo", dataset="pairs", pref_loss="orpo"), "method")
        == "orpo"
    )
    seen = imported("llama-factory", dataset="seen")
    assert value(seen, "data.columns") == {"instruction": "q", "images": "pictures"}
    judged = imported("llama-factory", stage="kto", dataset="judged")
    columns = {"instruction": "question", "output": "answer", "label": "good"}
    assert value(judged, "data.columns") == columns


def test_dataset_info_is_found_beside_the_file_and_above_it():
    Path("sets/deep").mkdir()
    Path("sets/deep/theirs.yaml").write_text(write_yaml(FACTORY))
    assert import_config("sets/deep/theirs.yaml").faithful
    Path("sets/theirs.yaml").write_text(write_yaml(FACTORY | {"dataset_dir": "none"}))
    assert import_config("sets/theirs.yaml").faithful
