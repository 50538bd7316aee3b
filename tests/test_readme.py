"""What README tells a reader to type, typed: its commands one after the other, and its loop."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ruamel.yaml import YAML
from transformers import AutoModelForCausalLM, LlamaConfig

import megatrain as mt
from megatrain.cli import main
from megatrain.recipes import loop
from megatrain.storage.checkpoint import save_checkpoint
from tests.helpers.commands import chat_rows, save_tiny_model, steps_of, tiny_tokenizer
from tests.helpers.gguf_toys import SIZES
from tests.helpers.hub_stub import local_hub
from tests.helpers.once import commands_are_short, runs_are_quick
from tests.helpers.support import full_batches

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
STEPS, STOPPED_AT = 20, 7
RUN = Path("runs/my-first")
AXOLOTL = """
base_model: {model}
datasets: [{{path: {rows}, ds_type: json, type: alpaca}}]
sequence_len: 512
micro_batch_size: 2
num_epochs: 1
learning_rate: 5e-5
output_dir: run
"""
# What is seen of each command in what it says, in README's order.
SEEN = {
    "data": "of them targets",
    "plan": "fits: ",
    "train": f"stopped by SIGINT after step {STOPPED_AT}; the run is saved",
    "resume": f"resuming from {RUN}/checkpoint-{STOPPED_AT}\n",
    "report": f"{RUN}/report.html\n",
    "eval": "\neval_loss: ",
    "generate": " tokens/s",
    "export": "out\n",
    "push": "/me/my-first\n",
    "import": "wrote new.yaml",
}


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    with commands_are_short(), runs_are_quick():
        yield


def blocks(language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    return [text for written_in, text in found if written_in == language]


def commands() -> list[list[str]]:
    """Words of each line that is typed."""
    lines = "".join(blocks("")).splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with what README's config names: a tiny model in a GGUF file, rows
    of instructions, and my.yaml itself."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEGATRAIN_CACHE", str(tmp_path / "cache"))
    (text,) = blocks("yaml")
    Path("my.yaml").write_text(text)
    given = YAML(typ="safe").load(text)
    model, rows = Path(given["model"]), Path(given["data"]["train"])
    sizes = LlamaConfig(**SIZES | {"max_position_embeddings": given["train"]["seq_len"]})
    with mt.Engine.from_config(sizes, settings=mt.Settings(), device="cpu") as engine:
        save_checkpoint(tmp_path / "made", 1, engine, tiny_tokenizer(), {})
    rows.parent.mkdir(parents=True)
    made = mt.export(tmp_path / "made", tmp_path / "gguf", format="gguf")
    (made / "model.gguf").rename(model)
    turns = [[turn["content"] for turn in row["messages"]] for row in chat_rows(200)]
    rows.write_text(json.dumps([{"instruction": asked, "output": said} for asked, said in turns]))
    Path("theirs.yml").write_text(AXOLOTL.format(model=model, rows=rows))
    return tmp_path


def stopped_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C is pressed during a step of the run."""
    # ignored, where tests were started in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
    step = loop.train_step

    def train_step(run: Any, *rest: Any) -> None:
        if run.step + 1 == STOPPED_AT:
            monkeypatch.setattr(loop, "train_step", step)
            os.kill(os.getpid(), signal.SIGINT)
        step(run, *rest)

    monkeypatch.setattr(loop, "train_step", train_step)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Use 'content=<...>'")  # of the hub's library
def test_its_commands_do_what_it_says(files, capfd, monkeypatch):
    stopped_once(monkeypatch)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Count to 3.\n"))
    typed = [words for command, *words in commands() if command == "megatrain"]
    assert [words[0] for words in typed] == [*SEEN]
    with local_hub() as hub:
        for words in typed:
            code = main(words)
            said = "".join(capfd.readouterr())
            assert code == (128 + signal.SIGINT if words[0] == "train" else 0), said
            assert SEEN[words[0]] in said, words
    assert [row["step"] for row in steps_of(RUN)] == [*range(1, STEPS + 1)]
    assert "model.safetensors" in hub.repositories["me/my-first"].files
    assert Path("out/model.safetensors").is_file() and (RUN / "report.html").is_file()
    assert mt.load_config("new.yaml").train.seq_len == 512


def test_what_else_is_typed_is_there_to_be_made():
    others = " ".join(" ".join(words) for words in commands() if words[0] != "megatrain")
    assert others.startswith("git clone URL-OF-THIS-REPOSITORY megatrain && cd megatrain make ")
    targets = {*re.findall(r"`make ([a-z]+)`", README), *others.partition(" make ")[2].split()}
    makefile = (ROOT / "Makefile").read_text()
    (phony,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert targets - {"make"} <= {*phony.split()}


def test_its_loop_trains(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_tiny_model(Path("folder-or-id"), tiny_tokenizer())
    (code,) = blocks("python")
    for size, small in {"65536": "64", "4096": "16"}.items():
        assert code.count(size) == 1
        code = code.replace(size, small)
    given: dict[str, Any] = {"batches": [full_batches(step, [(2, 16), (2, 16)]) for step in (0, 1)]}
    exec(compile(code, "README.md", "exec"), given)
    given["engine"].close()
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [int(tokens) for _, tokens in printed] == [60, 60]
    assert all(0 < float(loss) < 10 for loss, _ in printed)
    before, after = (
        AutoModelForCausalLM.from_pretrained(folder, dtype="float32").lm_head.weight
        for folder in ("folder-or-id", "out")
    )
    assert not torch.equal(before, after)
