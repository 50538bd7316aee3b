"""`final/`: what one uploads, and no more."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatrain.config import Config
from megatrain.recipes.card import in_a_cell, metadata_of, public_name
from megatrain.reporting.words import human_seconds
from megatrain.storage.export import export
from megatrain.storage.manifest import read_manifest, verify_checkpoint
from tests.helpers.commands import conversation, evaluations_of, steps_of, write_jsonl
from tests.helpers.files import names

FILES = {"model.safetensors", "config.json", "generation_config.json", "README.md"}
FILES |= {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "MANIFEST.json"}


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_it_holds_the_model_and_its_card(megatrain, finished):
    final = finished / "final"
    assert names(final) == FILES
    assert set(verify_checkpoint(final).files) == FILES - {"MANIFEST.json"}
    assert (final / "model.safetensors").samefile(finished / "last" / "model.safetensors")
    megatrain("export run exported")
    assert size(Path("exported")) == size(final) - (final / "MANIFEST.json").stat().st_size


def test_its_tokenizer_is_the_model_s_whatever_class_transformers_has_for_it(megatrain, project):
    """SmolLM's files, for whose class transformers has GPT-2's pipeline."""
    shutil.copytree("model", "mine")
    file, about = Path("mine/tokenizer.json"), Path("mine/tokenizer_config.json")
    digits = {"type": "Digits", "individual_digits": True}
    known = json.loads(file.read_text())
    known["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, known["pre_tokenizer"]]}
    file.write_text(json.dumps(known, indent=1))
    about.write_text(
        json.dumps(json.loads(about.read_text()) | {"tokenizer_class": "GPT2Tokenizer"})
    )
    err = megatrain("train cfg.yaml model=mine train.max_steps=1").err
    assert err.count("GPT2Tokenizer (tokenizer_class) reads text otherwise than this file") == 1
    megatrain("export run exported")
    for folder in ("run/checkpoint-1", "run/final", "exported"):
        assert Path(folder, "tokenizer.json").read_bytes() == file.read_bytes()
    assert "reads text otherwise" not in megatrain("export run as-gguf --format gguf").err
    (gguf,) = Path("as-gguf").glob("*.gguf")
    assert b"tokenizer.ggml.pre" in (data := gguf.read_bytes()) and b"smollm" in data


def cut(final: Path) -> None:
    """Of a copy: links would damage the checkpoint, too."""
    path = final / "model.safetensors"
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[:-9])


LOST: dict[str, Callable[[Path], object]] = {
    "all": shutil.rmtree,
    "its weights": lambda final: (final / "model.safetensors").unlink(),
    "an end of them": cut,
    "its manifest": lambda final: (final / "MANIFEST.json").unlink(),
    "its tokenizer": lambda final: (final / "tokenizer.json").write_text("{}"),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", LOST)
def test_what_it_lost_a_resume_of_the_finished_run_brings_back(megatrain, copied, what):
    before = {path.name: path.read_bytes() for path in (copied / "final").iterdir()}
    (copied / "final" / "tokenizer.json").unlink()
    (copied / "final" / "tokenizer.json").write_bytes(before["tokenizer.json"])  # no link
    LOST[what](copied / "final")
    done = megatrain("resume run")
    assert "nothing is left to train" not in done.err
    assert "nothing more: the run had come to its end before" in done.out
    after = {path.name: path.read_bytes() for path in (copied / "final").iterdir()}
    assert after == before
    assert len(steps_of(copied)) == 10
    assert "nothing is left to train" in megatrain("resume run").err


def test_an_edited_card_is_left_alone(megatrain, copied):
    card = copied / "final" / "README.md"
    card.write_text("mine")
    assert "nothing is left to train" in megatrain("resume run").err
    assert card.read_text() == "mine"


def test_float32_of_it_is_read_from_its_checkpoint(megatrain, project, trained_once):
    whole = trained_once("precision=bfloat16", "train.max_steps=1")
    run = Path(shutil.copytree(whole / "run", project / "run", symlinks=True))
    megatrain("export run out --dtype float32 --checkpoint final")
    assert size(Path("out")) > 1.5 * size(run / "final")
    os.rename(run / "checkpoint-1", "away")
    done = megatrain("export run out2 --dtype float32 --checkpoint final", code=2)
    assert "has no remainder" in done.err


@pytest.mark.parametrize(("wanted", "expected"), [("full", "optimizer"), ("none", None)])
def test_more_or_nothing_if_asked(megatrain, project, wanted, expected):
    config = ("train.max_steps=2", f"checkpoint.final={wanted}")
    done = megatrain("train cfg.yaml --json", *config)
    final = project / "run" / "final"
    assert final.is_dir() == (expected is not None)
    if expected:
        assert {expected, "state.json", "README.md"} < names(final)
    assert Path(done.json["final_dir"]).resolve() == (
        final if expected else project / "run" / "checkpoint-2"
    )
    again = megatrain("resume run")
    assert ("nothing is left to train" in again.err) == (expected is not None)
    assert read_manifest(project / "run" / "last").step == 2


def test_the_card_says_what_it_is(copied):
    card = ModelCard.load(copied / "final" / "README.md")
    data = card.data.to_dict()
    assert data["library_name"] == "transformers"
    assert data["tags"] == ["megatrain", "sft"]
    assert "base_model" not in data, "a local folder is nobody else's"
    for words in (
        "# `run`\n",
        "`model`",
        "`rows.jsonl`",
        "| train.schedule | `cosine` |",
        "| steps | `10` |",
    ):
        assert words in card.text
    first, last = (evaluations_of(copied)[at]["eval_loss"] for at in (0, -1))
    assert f"| eval_loss | {first:.4f} | {last:.4f} |" in card.text
    for words in ("52 rows, ", "held-out rows | `8 rows, ", f"torch {version('torch')}"):
        assert words in card.text
    tokens, seconds = (sum(row[name] for row in steps_of(copied)) for name in ("tokens", "step_s"))
    assert f"| tokens | `{tokens:,}` |" in card.text
    assert f"| time | `{human_seconds(seconds)} in steps` |" in card.text
    assert re.search(r"\| hardware \| `.+, \d+ cores, \d+ GiB of RAM` \|", card.text)
    assert "eval_s |" not in card.text, "figures of the model alone"
    assert str(copied.parent) not in card.content, "no path of this machine is published"


def metadata(*, train: object = "rows.jsonl", **model: object) -> dict[str, Any]:
    config = Config.model_validate({"model": model, "data": {"train": train}, "output": "run"})
    return dict(ModelCard(f"---\n{metadata_of(config)}\n---\n").data.to_dict())


def test_what_comes_from_the_hub_is_linked(project):
    train = ["org/set:main:train[:1%]", "rows.jsonl", {"path": "org/set"}, "rows-*.jsonl"]
    found = metadata(path="org/model", train=train)
    assert found["base_model"] == "org/model"
    assert found["datasets"] == ["org/set"]
    assert "license" not in found, "nobody knows it"
    assert "base_model" not in metadata(path="org/model", init="random")


SAID: dict[str, dict[str, str]] = {
    "license: mit": {"license": "mit"},
    "license: other\nlicense_name: l3\nlicense_link: https://a.b/c": {
        "license": "other",
        "license_name": "l3",
        "license_link": "https://a.b/c",
    },
    "license: [mit, other]": {},
    "tags: [x]": {},
    "license: [": {},
    "- license: mit": {},
}


def test_the_license_is_that_of_the_base_where_its_card_says_it(project):
    for head in SAID:
        (project / "base").mkdir(exist_ok=True)
        (project / "base" / "README.md").write_text(f"---\n{head}\n---\nlicense: gpl\n")

        def told(**model: object) -> dict[str, Any]:
            return {name: x for name, x in metadata(**model).items() if name.startswith("license")}

        assert told(path="base") == SAID[head]
        assert told(path="base", init="random") == {}, "its weights are nobody else's"


def test_of_local_files_only_the_name_is_told():
    for source, name in [
        ("org/model", "org/model"),
        ("/home/me/secret/rows.jsonl", "rows.jsonl"),
        (["/a/b.jsonl", "org/set"], "b.jsonl, org/set"),
        ([{"path": "/a/b.jsonl", "weight": 2}], "b.jsonl"),
        ("secret/rows-*.jsonl", "rows-*.jsonl"),
        ("secret/gone.jsonl", "gone.jsonl"),
        ("../secret/set", "set"),
        ("org/set:main:train[:1%]", "org/set:main:train[:1%]"),
    ]:
        assert public_name(source) == name


def test_a_name_cannot_break_out_of_its_place():
    assert in_a_cell("a`\n# b|\x1b[2J") == "a??# b??[2J"


def test_the_page_of_the_run_folder_names_all_that_a_run_leaves(finished):
    page = (Path(__file__).parent.parent.parent / "docs" / "run-folder.md").read_text()
    told = set(re.findall(r"`([\w.-]+)/?`", page))
    found = {re.sub(r"checkpoint-\d+", "checkpoint-N", path.name) for path in finished.iterdir()}
    assert found - told == {".lock"}


# -- saved models stop -----------------------------------------------------------------------------

QUESTION = "Say A."
TOKENS = 16
SHORT = "data.eval=null train.max_steps=30 train.seq_len=32 train.tokens_per_step=64"


def generated(folder: Path) -> list[int]:
    """What transformers generates with the folder's own settings, greedily."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    turns = [{"role": "user", "content": QUESTION}]
    given = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt")
    made = model.generate(**given, do_sample=False, max_new_tokens=TOKENS)
    return [int(token) for token in made[0, given["input_ids"].shape[1] :]]


def test_a_base_model_stops_at_the_end_of_a_turn(megatrain, project, model_dir, tmp_path):
    """Its end of sequence is <|endoftext|>, and its template ends turns with <|im_end|>."""
    write_jsonl(project / "rows.jsonl", [conversation(QUESTION, "A")] * 4)
    model = tmp_path / "base"
    model.mkdir()
    for path in model_dir.iterdir():
        (model / path.name).symlink_to(path)
    (model / "generation_config.json").unlink()
    known = {"eos_token_id": 0, "bos_token_id": 0}
    (model / "generation_config.json").write_text(json.dumps(known))
    run = f"train cfg.yaml model={model} {SHORT} precision=float32"
    done = megatrain(f"{run} sample_prompt='{QUESTION}' checkpoint.every=null")
    assert "<|im_end|> ends answers here: generation_config.json" in done.err
    final = project / "run" / "final"
    tokenizer = AutoTokenizer.from_pretrained(final)
    made = generated(final)
    assert tokenizer.decode(made) == "A<|im_end|>"
    assert "answer  A\n" in done.out
    assert generated(export(project / "run", tmp_path / "out")) == made
