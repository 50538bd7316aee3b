"""A saved engine's folder has the trained weights and its source's tokenizer and settings."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from megatrain.engine.engine import Engine
from tests.helpers.files import logits_of, names

IDS = torch.arange(16).view(1, 16)
WORDS = ["<unk>", "<|im_start|>", "<|im_end|>", "h", "e", "l", "o", "he", "ll", "hell", "hello"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
TURNS = [{"role": "user", "content": "hello"}]
SIZES: Any = {"hidden_size": 16, "intermediate_size": 24, "vocab_size": 32}
COUNTS: Any = {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 32}
CONFIG = transformers.LlamaConfig(**SIZES, **COUNTS)
GENERATION = {"eos_token_id": [2, 0], "temperature": 0.7, "top_p": 0.8}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder with all that published ones have."""
    folder = tmp_path / "model"
    words = {word: number for number, word in enumerate(WORDS)}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<unk>")),
        eos_token="<|im_end|>",
        pad_token="<unk>",
        extra_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    transformers.LlamaForCausalLM(CONFIG).save_pretrained(folder)
    # sampling off, as published models have it; GenerationConfig.save_pretrained refuses that
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    return folder


def train_and_save(engine: Engine, out: Path) -> torch.Tensor:
    """Logits of IDS after one step."""
    with engine:
        engine.train_step([{"input_ids": IDS, "labels": IDS}], lr=1e-2)
        engine.save_pretrained(out)
        return engine.logits(IDS).float()


def tokenizer_of(folder: Path) -> transformers.PreTrainedTokenizerBase:
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture(params=["folder", "hub id", "checkpoint"])
def source(
    request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> str | Path:
    """The model of `folder` by another name."""
    if request.param == "hub id":
        download: Callable[..., str] = lambda *_, **__: str(folder)  # noqa: E731
        monkeypatch.setattr("huggingface_hub.snapshot_download", download)
        return "someone/model"
    if request.param == "folder":
        return folder
    with Engine.from_pretrained(folder, device="cpu") as engine:
        engine.save_pretrained(folder.with_name("earlier"))
    return folder.with_name("earlier")


def test_a_folder_has_its_source_s_tokenizer_template_and_settings(folder, source, tmp_path):
    out = tmp_path / "out"
    logits = train_and_save(Engine.from_pretrained(source, device="cpu"), out)
    assert torch.equal(logits_of(out, IDS), logits)
    assert not torch.equal(logits_of(folder, IDS), logits)
    ours, theirs = tokenizer_of(out), tokenizer_of(folder)
    assert ours.chat_template == theirs.chat_template == TEMPLATE
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.special_tokens_map == theirs.special_tokens_map
    for prompt in (False, True):
        text = ours.apply_chat_template(TURNS, tokenize=False, add_generation_prompt=prompt)
        assert text == "<|im_start|>hello<|im_end|>" + "<|im_start|>" * prompt
    found = transformers.GenerationConfig.from_pretrained(out)
    assert found == transformers.GenerationConfig.from_pretrained(folder)
    assert {key: getattr(found, key) for key in GENERATION} == GENERATION


def test_an_engine_from_a_configuration_saves_weights_and_configuration(folder, tmp_path):
    out = tmp_path / "out"
    logits = train_and_save(Engine.from_config(CONFIG, device="cpu"), out)
    assert names(out) == {"config.json", "model.safetensors"}
    assert torch.equal(logits_of(out, IDS), logits)


@pytest.mark.parametrize("damage", ["missing", "malformed"])
def test_trained_weights_are_saved_though_the_source_s_tokenizer_cannot_be_read(
    folder, tmp_path, damage, caplog
):
    for path in folder.glob("tokenizer*"):
        path.unlink()
        if damage == "malformed":
            path.write_text("{")
    out = tmp_path / "out"
    logits = train_and_save(Engine.from_pretrained(folder, device="cpu"), out)
    assert torch.equal(logits_of(out, IDS), logits)
    assert f"saved without this: {folder}: the tokenizer cannot be used" in caplog.text
    assert transformers.GenerationConfig.from_pretrained(out).top_p == 0.8
