"""Commands on the folder of a model that sees."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from examples.images import draw
from megatrain.engine.verify import tensors_of
from megatrain.storage.run_folder import PASSENGERS
from tests.helpers.commands import conversation, evaluations_of, write_jsonl
from tests.helpers.compare import differing
from tests.helpers.files import names
from tests.helpers.multimodal import save_multimodal
from tests.storage.test_passthrough import other_files, passengers_of

POSITIONS = {"vocab_size": 310, "max_position_embeddings": 128}
KEEP = ("model=./seeing", "checkpoint.keep=1")
IMAGE = {"type": "image", "url": "cat.png"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "seeing"
    save_multimodal(folder, "qwen3-vl", num_hidden_layers=2, **POSITIONS)
    return folder


@pytest.fixture
def seeing(project: Path, made: Path) -> Path:
    return Path(shutil.copytree(made, project / "seeing"))


@pytest.mark.slow
def test_a_run_begins_is_resumed_without_its_source_and_exported(megatrain, project, seeing, made):
    begun = megatrain("train cfg.yaml train.max_steps=1", *KEEP)
    said = f"{seeing}: carried along unchanged: model.visual; images are not read"
    assert said.replace(f"{project}/", "") in begun.err.replace(f"{project}/", "")
    shutil.rmtree(seeing)
    megatrain("resume run train.max_steps=2")
    megatrain("export run out")
    run = project / "run"
    for folder in (run / "checkpoint-2", run / "final", project / "out"):
        assert differing(passengers_of(folder), passengers_of(made)) == []
        written = other_files(folder)
        for name in (name for name in names(made) if name.endswith("processor_config.json")):
            assert written[name] == other_files(made)[name]
    assert names(run / PASSENGERS) == {"MANIFEST.json", "model-00002-of-00002.safetensors"}
    assert "passed" in megatrain("verify out").out


SEES = """
model: {config: ./sees/model}
method: sft
precision: float32
device: cpu
data: {train: ./sees/train.jsonl, eval: ./sees/eval.jsonl}
train: {freeze: [], tokens_per_step: 90, seq_len: 64, max_steps: 4, learning_rate: 1.0e-3}
checkpoint: {every: 2}
"""


def test_a_run_that_sees_goes_on_to_the_bit_and_answers(megatrain, project):
    """In the middle of an epoch, after a kill; what it saves sees, too."""
    draw.model(project / "sees" / "model")
    for name, count in (("train", 24), ("eval", 6)):
        draw.rows(project / "sees", name, count, seed=count)
    (project / "sees.yaml").write_text(SEES)
    shown = megatrain("data sees.yaml").out
    assert "0.png (96 x 48)" in shown and shown.count("<|image_pad|>") == 3
    row = {"instruction": "<image>which digit do you see ?", "output": "7", "seen": ["0.png"]}
    write_jsonl(project / "sees" / "train" / "renamed.jsonl", [row])
    keys = "data.eval=null data.columns.images=seen data.train=sees/train/renamed.jsonl"
    assert "0.png (96 x 48)" in megatrain(f"data sees.yaml {keys}").out
    megatrain("train sees.yaml output=whole")
    megatrain("train sees.yaml output=broken train.max_steps=3")
    shutil.rmtree(project / "broken" / "final")
    shutil.rmtree(project / "broken" / "checkpoint-3")
    megatrain("resume broken train.max_steps=4")
    whole, broken = (tensors_of(project / name / "final") for name in ("whole", "broken"))
    assert differing(whole, broken) == []
    assert (project / "whole" / "final" / "preprocessor_config.json").is_file()
    losses = [megatrain(f"eval {name} --json").json["eval_loss"] for name in ("whole", "broken")]
    assert losses[0] == losses[1]
    asked = ("generate whole --json --image sees/eval/0.png", "what shape is it ?")
    assert "answer" in megatrain(*asked).json
    given = (project / "sees" / "train.jsonl").read_text()
    pairs = [json.loads(line) for line in given.splitlines()]
    for row in pairs:
        *row["prompt"], row["chosen"] = row.pop("messages")
        row["rejected"] = {"role": "assistant", "content": "7 circle"}
    write_jsonl(project / "sees" / "pairs.jsonl", pairs)
    preferring = ("method=dpo", "model={path: ./whole/final}", "data.train=./sees/pairs.jsonl")
    megatrain("train sees.yaml output=dpo data.eval=6", *preferring)
    last = evaluations_of(project / "dpo")[-1]
    found = megatrain("eval dpo --json").json  # its reference sees, too
    assert found["eval_loss"] == pytest.approx(last["eval_loss"], rel=1e-6)
    (project / "sees" / "train" / "3.png").unlink()
    refused = megatrain("train sees.yaml output=other", code=3)
    assert "train.jsonl:4: image" in refused.err and "3.png: cannot be read" in refused.err


def test_a_plan_counts_passengers_once(megatrain, seeing):
    plan = megatrain("plan cfg.yaml --json", *KEEP).json
    passengers = sum(tensor.nbytes for tensor in passengers_of(seeing).values())
    assert plan["disk"]["weights carried along"] == passengers


def test_random_weights_have_no_tower_to_carry(megatrain, seeing):
    refused = megatrain(
        "train cfg.yaml", "model={config: ./seeing, init: random}", "method=pretrain", code=2
    )
    assert "model.init: model.visual: carried along from a folder with weights" in refused.err
    megatrain("bench seeing --steps 1 train.tokens_per_step=64 train.seq_len=32")


@pytest.mark.parametrize(
    "row",
    [
        conversation("What is this?", "A cat.") | {"images": ["cat.png"]},
        conversation("What is this?", "A cat.") | {"image": "cat.png"},
        {"messages": [{"role": "user", "content": [IMAGE]}, {"role": "assistant", "content": "!"}]},
    ],
)
def test_rows_with_images_are_refused(megatrain, project, seeing, row):
    write_jsonl(project / "rows.jsonl", [conversation("a", "b"), row])
    keys = "data.eval=null", "model.images=false"
    refused = megatrain("train cfg.yaml", *keys, *KEEP, code=3)
    assert "rows.jsonl:2" in refused.err
    assert "images are not read" in refused.err
