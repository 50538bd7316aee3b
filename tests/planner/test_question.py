"""A plan whose question is known is the plan that the model itself gives, without torch."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.questions import worked_out
from megatrain.config import Config
from megatrain.config.load import bench_config
from megatrain.data.samples import name_for
from megatrain.models.shapes import SHAPES
from megatrain.planner import question as question_module
from megatrain.planner.question import (
    SHIPPED,
    keep_question,
    known_question,
    question_file,
    releases,
    shipped,
)
from megatrain.recipes import plan as recipe
from megatrain.recipes.planned_site import planned_site

CARD: dict[str, Any] = {"gpu": "RTX 3060", "ram": "32GiB"}
ASKED = ("--gpu", CARD["gpu"], "--ram", CARD["ram"])
# eager: to predict what compiled layers take is most of the time of a first plan
TINY = ("train.seq_len=64", "compile=false")
HEAVY = ("torch", "transformers")
MAIN = f"""
import sys
from megatrain.cli import main
code = main(sys.argv[1:])
print(*sorted({{*{HEAVY!r}}} & sys.modules.keys()), file=sys.stderr)
sys.exit(code)
"""
ROWS = json.loads(gzip.decompress(SHIPPED.read_bytes()))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGATRAIN_CACHE", str(tmp_path / "cache"))


def planned(*arguments: object) -> tuple[str, list[str]]:
    """(stdout of `megatrain plan` in a process of its own, the heavy packages that it imported)."""
    command = [sys.executable, "-c", MAIN, "plan", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ}, check=True)
    return done.stdout, done.stderr.splitlines()[-1].split()


def test_the_second_plan_is_the_first_and_imports_no_torch(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}
    described = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], **sizes}
    (model / "config.json").write_text(json.dumps(described))
    first, heavy = planned(model, *ASKED, *TINY)
    assert heavy == [*HEAVY]
    assert planned(model, *ASKED, *TINY) == (first, [])
    more = planned(model, "--gpu", "H200", "--ram", "1TiB", *TINY, "train.tokens_per_step=4096")
    assert more[0] != first and more[1] == [], "machine and step may be others"
    before = causes_in(model)
    (model / "config.json").write_text(json.dumps({**described, "hidden_size": 128}))
    assert known_question(before) is not None and known_question(causes_in(model)) is None


def with_options(model: Path | str, *given: str) -> Config:
    set_by_hand = {one.partition("=")[0] for one in given}
    others = [one for one in TINY if one.partition("=")[0] not in set_by_hand]
    return bench_config(str(model), [*others, *given])


def causes_in(model: Path | str, *given: str) -> dict[str, Any]:
    config = with_options(model, *given)
    causes = recipe.question_causes(config, planned_site(config, **CARD))
    assert causes is not None
    return causes


def skip_unless_shipped(name: str) -> None:
    if releases() not in ROWS[name]["releases"]:
        pytest.skip("shipped for other releases of torch and transformers")


def test_a_named_shape_is_planned_at_once():
    skip_unless_shipped("qwen2.5-7b")
    assert planned("qwen2.5-7b", *ASKED[:3], "128GiB")[1] == []


SMALL = "tiny"


@pytest.mark.parametrize(
    "name",
    [name if name == SMALL else pytest.param(name, marks=pytest.mark.slow) for name in SHAPES],
)
def test_shipped_shapes_are_what_is_worked_out(name):
    skip_unless_shipped(name)
    causes, question = worked_out(name)
    assert shipped(causes, name) == question, "`python -m benchmarks.questions` writes them"


def test_shipped_shapes_are_of_known_releases_and_kernels(monkeypatch):
    causes = causes_in(SMALL)
    row = ROWS[SMALL]
    monkeypatch.setattr(question_module, "name_for", lambda causes: row["causes"])
    monkeypatch.setattr(question_module, "releases", lambda: row["releases"][-1])
    assert shipped(causes, SMALL) is not None and shipped(causes, None) is None
    monkeypatch.setattr(question_module, "releases", lambda: ["99.0", "99.0"])
    assert shipped(causes, SMALL) is None
    monkeypatch.setattr(question_module, "releases", lambda: row["releases"][-1])
    monkeypatch.setattr(question_module, "KERNELS", ("pytest",))
    assert shipped(causes, SMALL) is None


FREELY_CHOSEN = (
    (),
    (
        *("train.rows_per_step=8", "memory.host=8GiB", "memory.gpu=2GiB", "train.retained=1"),
        *("train.max_steps=7", "economy.price_per_hour=2", "threads=3"),
    ),
    (
        *("train.tokens_per_step=1024", "memory.resident=0", "train.head_chunk_tokens=128"),
        *("gpus=2", "memory.offload_activations=true", "memory.replicated=1"),
        "memory.transport=read",
    ),
)


def test_known_and_worked_out_plans_are_the_same(monkeypatch):
    """All keys that a kept question leaves open are read anew."""
    planned_before = {}
    with monkeypatch.context() as patch:
        patch.setattr(recipe, "known_question", lambda *_: None)
        for given in FREELY_CHOSEN:
            config = with_options(SMALL, *given)
            planned_before[given] = recipe.plan(config, True, CARD)
            assert causes_in(SMALL, *given) == causes_in(SMALL)
    for given, before in planned_before.items():
        again = recipe.plan(with_options(SMALL, *given), True, CARD)
        assert json.dumps(again.to_dict()) == json.dumps(before.to_dict())
        assert not hasattr(again.made_of, "skeleton"), "it was known"
    texts = {json.dumps(plan.to_dict()["choices"]) for plan in planned_before.values()}
    assert len(texts) == len(FREELY_CHOSEN)


@pytest.mark.parametrize(
    "given",
    [
        *("train.seq_len=32", "train.micro_batch_tokens=128", "train.layer_chunk_tokens=16"),
        *("attention=eager", "precision=fp8", "compile=true", "optimizer.moments=int8"),
        *("memory.activations=int8", "train.max_grad_norm=null", "checkpoint.keep=3"),
    ],
)
def test_other_options_ask_another_question(given):
    config = with_options(SMALL, given)
    site = planned_site(config, gpu="RTX 4090", ram="32GiB")
    assert name_for(recipe.question_causes(config, site) or {}) != name_for(causes_in(SMALL))


def test_what_is_not_looked_at_is_not_kept(tmp_path):
    for given in ("method=sft", "train.context_parallel=2", f"memory.nvme={tmp_path}"):
        config = with_options(SMALL, given)
        assert recipe.question_causes(config, planned_site(config, **CARD)) is None, given


def test_a_torn_file_is_written_anew(monkeypatch):
    causes = causes_in(SMALL)
    recipe.plan(with_options(SMALL), True, CARD)
    file = question_file(causes)
    whole, found = file.read_bytes(), known_question(causes)
    assert found is not None
    for torn in (b"", whole[: len(whole) // 2], b'{"job": 1}', b"\xff"):
        file.write_bytes(torn)
        assert known_question(causes) is None
    keep_question(causes, found)
    assert file.read_bytes() == whole and [*file.parent.glob(f"{file.name}*")] == [file]
    for one in ("installed_version", "source_digest"):
        with monkeypatch.context() as patch:
            patch.setattr(question_module, one, lambda *_: "another")
            assert question_file(causes) != file and known_question(causes) is None
