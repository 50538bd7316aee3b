"""transformers' own generate stops where the answers of training end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from megatrain.storage.export import export
from megatrain.storage.manifest import read_manifest
from tests.commands import conversation, write_jsonl

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


def test_an_export_of_an_earlier_checkpoint_gets_them_too(copied, tmp_path):
    manifest = read_manifest(copied / "final")
    del manifest.files["generation_config.json"]
    (copied / "final" / "generation_config.json").unlink()
    (copied / "final" / "MANIFEST.json").write_bytes(manifest.encode())
    out = export(copied, tmp_path / "out")
    ends = GenerationConfig.from_pretrained(out).eos_token_id
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.convert_ids_to_tokens(ends) == ["<|endoftext|>", "<|im_end|>"]
