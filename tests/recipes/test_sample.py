"""`megatrain generate`: the likeliest tokens are those of transformers, and words come as they are
written."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest
import torch

from megatrain.recipes import sample
from tests.helpers.commands import conversation, write_jsonl

ASK = ("generate", "model", "Count to 3.", "--max-new-tokens")


def transformers_answer(length: int, **options: Any) -> str:
    """Of transformers' own `generate`, computing as we do."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained("model", dtype="float32")
    tokenizer: Any = AutoTokenizer.from_pretrained("model")
    turns = [{"role": "user", "content": "Count to 3."}]
    given = tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    turn = tokenizer.convert_tokens_to_ids("<|im_end|>")
    ends: Any = {"eos_token_id": [tokenizer.eos_token_id, turn], "pad_token_id": 0}
    torch.manual_seed(5)
    made = model.generate(**given, max_new_tokens=length, **ends, **options)
    new = made[0, given["input_ids"].shape[1] :]
    return str(tokenizer.decode(new, skip_special_tokens=True)).strip()


def test_temperature_0_takes_the_likeliest_tokens(megatrain):
    greedy = transformers_answer(8, do_sample=False)
    done = megatrain("", *ASK, "8")
    assert done.out == f"{greedy}\n" and "is cut" not in done.err, "as long as asked for"
    assert megatrain("", *ASK, "8", "--temperature", "0").out == f"{greedy}\n"


def test_equal_seeds_draw_equal_tokens(megatrain):
    drawn = ("--temperature", "0.7", "--top-p", "0.8", "--json")
    seeds = ["5", "5", "6", "0"]
    found = [megatrain("", *ASK, "12", *drawn, "--seed", seed).json["answer"] for seed in seeds]
    assert found[0] == found[1] != found[2]
    assert megatrain("", *ASK, "12", *drawn).json["answer"] == found[3]


class Terminal(io.StringIO):
    """Notes what is on it each time it is flushed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def isatty(self) -> bool:
        return True

    def flush(self) -> None:
        self.seen.append(self.getvalue())


def test_a_terminal_gets_the_words_as_they_come(megatrain, finished, monkeypatch):
    ask = ("generate", "run", "Count to 9.", "--max-new-tokens", "24")
    whole = megatrain("", *ask).out
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    megatrain("", *ask)
    assert terminal.seen[-1].split() == whole.split()
    assert len(set(terminal.seen)) > 4


REFUSED = {
    ("--top-p", "0.9"): "--top-p: has no effect at temperature 0",
    ("--seed", "3"): "--seed: has no effect at temperature 0",
    ("--temperature", "-1"): "--temperature: must be a number of at least 0",
    ("--temperature", "nan"): "--temperature: must be a number of at least 0",
    ("--temperature", "1", "--top-p", "0"): "--top-p: must be above 0 and at most 1, not 0.0",
}


def test_an_option_without_effect_is_refused(megatrain):
    for options, words in REFUSED.items():
        assert megatrain("", *ASK, "1", *options, code=2).err.startswith(f"error: {words}")


LONG = " ".join(str(number) for number in range(60))


@pytest.fixture
def gpt2(project: Any, tokenizer: Any) -> None:
    """The project's model is a GPT-2, which has an embedding of each of its 64 positions."""
    from transformers import GPT2Config, GPT2LMHeadModel

    (project / "model").unlink()
    ends: Any = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    sizes: Any = {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **sizes, **ends)).save_pretrained("model")
    tokenizer.save_pretrained("model")


def test_answers_end_with_the_model_s_positions(megatrain, gpt2):
    said = megatrain("generate model", "Count to 3.", "--max-new-tokens", "100").err
    assert "the answer is cut after" in said
    assert "tokens: with its prompt it has the 64 positions of this model" in said
    refused = megatrain("generate model", LONG, code=2).err
    assert "tokens, and the model reads no more than 64, its answer included" in refused


@pytest.mark.slow
def test_a_sample_prompt_beyond_the_positions_is_refused_before_anything_is_trained(
    megatrain, project, gpt2
):
    error = megatrain("train cfg.yaml", f"sample_prompt={LONG}", code=2).err
    assert "command line: sample_prompt: the prompt has" in error
    assert {path.name for path in (project / "run").iterdir()} == {".lock", "train.log"}


def test_a_run_whose_rows_fill_the_positions_ends_with_a_sample(
    megatrain, gpt2, project, monkeypatch
):
    monkeypatch.setattr(sample, "end_tokens", lambda model: [])
    monkeypatch.setattr(sample, "SAMPLE_TOKENS", 48)
    rows = [conversation(f"{LONG[:60]} {n}", "1 2 3 4 5 6 7 8 9") for n in range(6)]
    write_jsonl(project / "rows.jsonl", rows)
    said = megatrain("train cfg.yaml train.max_steps=1 data.eval=1").err
    assert "rows cut to seq_len" in said
    assert "the answer is cut after" in said
    assert (project / "run" / "final").exists()
