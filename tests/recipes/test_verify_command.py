"""`megatrain verify`, and that `plan` and `train` ask for its verdict once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.images import draw
from megatrain.engine.verify import Verdict
from megatrain.recipes import verify as recipe
from tests.helpers.support import tiny_config

WRONG = Verdict("failed", "gradients", "model.norm.weight is off by 0.5 of its norm")
UNKNOWN = Verdict("not checked", reason="it is too large")


@pytest.fixture
def verdicts(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[Verdict]]:
    """The verdicts that checks come to, one after the other, with a cache of this test's own."""
    given: list[Verdict] = []
    monkeypatch.setattr(recipe, "check", lambda *_: given.pop(0))
    monkeypatch.setenv("MEGATRAIN_CACHE", str(tmp_path / "cache"))
    yield given
    assert not given, "not asked for"


def test_a_family_that_computes_as_in_plain_pytorch_passes(megatrain):
    said = megatrain("verify model").out
    assert said.startswith("llama: passed (")
    assert "a small model of it is read, written and trained as in plain PyTorch" in said


def test_a_named_shape_is_shrunk_and_checked(megatrain):
    found = megatrain("verify qwen2.5-0.5b --json").json
    assert found.pop("seconds") > 0
    about = {"model": "qwen2.5-0.5b", "family": "qwen2"}
    assert found == about | {"state": "passed", "stage": "", "reason": "", "images": False}


def test_a_model_that_sees_is_shown_an_image(megatrain, project):
    """Where its processor cannot be used, that is said, and its text is checked."""
    draw.model(project / "sees")
    assert megatrain("verify sees --json").json["images"]
    told = "a small model of it is read, written and trained on text and images as in plain PyTorch"
    assert megatrain("verify sees").out.rstrip().endswith(told)
    (project / "sees" / "preprocessor_config.json").write_text("{")
    said = megatrain("verify sees").out
    assert ": passed (" in said and "on text alone (sees: its processor of images cannot" in said


def test_any_other_verdict_ends_with_8(megatrain, verdicts):
    for verdict in (WRONG, UNKNOWN):
        verdicts[:] = [verdict, verdict]
        said = megatrain("verify model", code=8).out
        assert f"llama: {verdict.state} (" in said and verdict.reason in said
        assert megatrain("verify model --json", code=8).json["reason"] == verdict.reason


def test_a_verdict_that_was_kept_goes_once_it_is_wrong(megatrain, verdicts):
    verdicts[:] = [Verdict("passed"), WRONG, WRONG]
    megatrain("plan cfg.yaml")
    megatrain("verify model", code=8)
    megatrain("plan cfg.yaml", code=8)


def test_a_model_that_cannot_be_streamed_is_refused(megatrain, project):
    tiny_config("llama", use_bidirectional_attention=True).save_pretrained(project / "other")
    assert "shows every token the one" in megatrain("verify other", code=2).err


@pytest.mark.slow
@pytest.mark.parametrize("command", ["plan", "train"])
def test_what_computes_wrongly_does_not_train_until_it_is_right_once(megatrain, verdicts, command):
    verdicts[:] = [WRONG, WRONG, Verdict("passed")]
    for _ in range(2):
        said = megatrain(f"{command} cfg.yaml", code=8).err
        assert "(gradients: model.norm.weight is off by 0.5 of its norm)" in said
    once = "comparing a small llama model with plain PyTorch, once"
    assert once in megatrain(f"{command} cfg.yaml output=a train.max_steps=1").err
    assert once not in megatrain(f"{command} cfg.yaml output=b train.max_steps=1").err


def test_what_cannot_be_checked_trains_with_a_warning_each_time(megatrain, verdicts):
    verdicts[:] = [UNKNOWN]
    for number in range(2):
        said = megatrain(f"train cfg.yaml output=run{number} train.max_steps=1").err
        assert "trained as in plain PyTorch was not checked: it is too large" in " ".join(
            said.split()
        )


def test_a_folder_that_cannot_be_loaded_is_left_to_loading(megatrain, verdicts):
    verdicts[:] = [Verdict("failed", "loading", "its folder holds another tensor")]
    megatrain("plan cfg.yaml")


@pytest.mark.slow
def test_another_configuration_or_version_is_asked_again(megatrain, verdicts, monkeypatch):
    verdicts[:] = [Verdict("passed")] * 3
    megatrain("plan cfg.yaml")
    megatrain("plan cfg.yaml attention=eager")
    monkeypatch.setattr(recipe, "installed_version", lambda package: f"another {package}")
    megatrain("plan cfg.yaml")
    assert not verdicts


def test_a_verdict_that_cannot_be_kept_stops_nothing(megatrain, verdicts, tmp_path):
    verdicts[:] = [Verdict("passed")]
    (tmp_path / "cache").write_text("no folder")
    assert "the verdict is not kept" in megatrain("plan cfg.yaml").err
