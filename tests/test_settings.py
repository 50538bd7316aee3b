"""The table of options, and what derives from it."""

from __future__ import annotations

from dataclasses import fields, replace
from operator import attrgetter
from typing import Any

import pytest

from megatrain.config import Config
from megatrain.errors import ConfigError
from megatrain.machine.profile import typical
from megatrain.planner.job import Asked, Budget, Choices, Job
from megatrain.planner.search import Search
from megatrain.settings import EXCLUSIONS, KEYS, OPTIONS, Settings, contradiction
from tests.helpers.planned import H200, JOB_7B, QWEN_7B

MINIMAL: dict[str, Any] = {"model": "m", "data": {"train": "rows.jsonl"}}
BREAKS: dict[str, Any] = {"nvme_folders": None, "compile": False, "offload_activations": False}
BREAKS |= {"activations": "int8", "groups": 2, "retained": 3, "retained_on_host": 3}


def names(kind: type) -> set[str]:
    return {field.name for field in fields(kind)}


def config_with(key: str, value: object) -> Config:
    return Config.model_validate(MINIMAL).with_values({key: value})


def test_every_option_is_a_choice_and_every_key_can_be_asked_for():
    assert names(Choices) == {option.field for option in OPTIONS}
    assert names(Asked) == {option.field for option in OPTIONS if option.key}
    assert names(Choices) - {"micro_batch_tokens"} <= names(Settings)
    assert all(getattr(Job("bfloat16", 8, 8), name) is None for name in names(Asked))


@pytest.mark.parametrize("option", [option for option in OPTIONS if option.key], ids=str)
def test_a_key_is_auto_unless_it_is_set_and_the_schema_has_its_meaning(option):
    *sections, name = option.key.split(".")
    default = Config.model_validate(MINIMAL)
    holder: Any = attrgetter(*sections)(default) if sections else default
    assert getattr(holder, name) == "auto"
    assert type(holder).model_fields[name].description == option.words
    assert default.asked()[option.field] is None


def test_what_the_config_asks_for_is_asked_of_the_planner():
    asked = config_with("train.groups", 3).asked()
    assert asked == {**dict.fromkeys(names(Asked)), "groups": 3}
    assert Job("bfloat16", 8, 8, **asked).groups == 3
    assert config_with("train.layer_chunk_tokens", None).asked()["layer_chunk_tokens"] == 0
    assert config_with("memory.second_backward", False).asked()["second_backward"] is False


def test_the_engine_gets_what_was_chosen():
    choices = Choices(micro_batch_tokens=2048, groups=4, layer_chunk_tokens=512)
    choices = replace(choices, offload_activations=True)
    settings = choices.settings(replace(JOB_7B, activations="int4"))
    for name in names(Choices) - {"micro_batch_tokens"}:
        assert getattr(settings, name) == getattr(choices, name)
    assert (settings.group_size, settings.activations) == (choices.micro_batches(JOB_7B), "int4")


OF_SETTINGS = [rule for rule in EXCLUSIONS if rule.other != "max_grad_norm"]  # an engine's own


@pytest.mark.parametrize("rule", OF_SETTINGS, ids=lambda rule: f"{rule.field}, {rule.other}")
def test_settings_name_fields_and_a_config_names_its_keys(rule):
    """Everything else that the option needs is there."""
    value = 1 if rule.field in ("nvme_blocks", "retained_on_host", "keep_attention") else True
    met = {other.other: other.needs for other in OF_SETTINGS if other.field == rule.field}
    given: dict[str, Any] = {rule.field: value, **met, rule.other: BREAKS[rule.other]}
    if rule.other == "retained_on_host":
        given["offload_activations"] = True
    fields_given: Any = {name: () if wanted is None else wanted for name, wanted in given.items()}
    with pytest.raises(ConfigError) as of_settings:
        Settings(**fields_given)
    keys = {KEYS[name]: wanted for name, wanted in given.items()}
    with pytest.raises(ValueError, match=r"\n") as of_config:
        Config.model_validate(MINIMAL).with_values(keys)
    words = f"{rule.field}: {rule.why}; set {rule.other}={rule.needs} as well"
    assert str(of_settings.value) == words
    shown = "true" if rule.needs is True else rule.needs
    assert f"{rule.why}; set {KEYS[rule.other]}: {shown} as well" in str(of_config.value)
    open_values = dict.fromkeys(KEYS) | {rule.field: value}
    assert contradiction(open_values, in_config=True) is None


def test_no_candidate_of_the_search_has_options_that_exclude_each_other():
    """The search makes its candidates by rules of its own."""
    search = Search(JOB_7B, QWEN_7B, H200, typical(H200), Budget(20 << 30, 60 << 30))
    layouts = search.about(search.fastest().choices)
    found = [each.choices for layout in layouts for each in search.placed(layout)]
    found += [layout.choices for layout in search.lean()]
    twice = {choices.second_backward for choices in found}
    assert {0, QWEN_7B.layers} < twice and len(twice) > 3
    for choices in found:
        choices.settings(JOB_7B)


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "2", True])
def test_numbers_out_of_range_are_refused_by_name(wrong):
    for option in OPTIONS:
        if option.least and option.field != "micro_batch_tokens":
            with pytest.raises(ConfigError, match=f"^{option.field}: .* at least 1"):
                Settings(**{option.field: wrong})
