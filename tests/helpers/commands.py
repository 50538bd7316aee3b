"""What tests of commands share: the tiny setup of `tests/recipes/conftest.py`, and how to read what
a run wrote."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import megatrain
from megatrain.storage.manifest import read_manifest

CHATML = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# the same, of a model that sees images: contents are lists of parts
OF_PARTS = CHATML.replace(
    " + m['content'] + ",
    " }}{% for part in m['content'] if part['type'] == 'text' %}{{ part['text'] }}{% endfor %}{{ ",
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ROWS = 60
POSITIONS = 128  # of the model

Row = dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """What a command wrote."""

    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Command = Callable[..., Answer]


def conversation(question: str, answer: str) -> Row:
    turns = {"user": question, "assistant": answer}
    return {"messages": [{"role": role, "content": text} for role, text in turns.items()]}


def chat_rows(count: int = ROWS) -> list[Row]:
    """Rows of unequal length: counting, with the row's number so that no two are equal."""
    draw, rows = random.Random(0), []
    for number in range(count):
        end = draw.randint(1, 9)
        counted = " ".join(str(i) for i in range(1, end + 1))
        rows.append(conversation(f"Count to {end}.", f"{counted} ({number})"))
    return rows


def byte_level_bpe(texts: list[str], vocab_size: int) -> Any:
    """BPE as GPT-2's, trained on a few texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    base = Tokenizer(models.BPE())
    base.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    base.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    base.train_from_iterator(texts, trainer)
    return base


def tiny_tokenizer() -> Any:
    """BPE of all bytes and 41 merges, with a chat template."""
    from transformers import PreTrainedTokenizerFast

    base = byte_level_bpe([turn["content"] for row in chat_rows() for turn in row["messages"]], 300)
    return PreTrainedTokenizerFast(
        tokenizer_object=base, eos_token=SPECIAL[0], pad_token=SPECIAL[0], chat_template=CHATML
    )


def save_tiny_model(folder: Path, tokenizer: Any, positions: int = POSITIONS) -> Path:
    """A random llama of 2 layers, as a Hugging Face folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: Any = {"hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": positions}
    counts: Any = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    ends: Any = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    config = LlamaConfig(
        vocab_size=len(tokenizer), **sizes, **counts, **ends, initializer_range=0.1
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


CONFIG = """
model: model
data: {train: rows.jsonl, eval: 8}
train:
  {tokens_per_step: 256, seq_len: 64, max_steps: 10, learning_rate: 0.01, warmup: 2, eval_every: 5}
checkpoint: {every: 5, keep: 2}
threads: 1
device: cpu
output: run
"""


def make_project(folder: Path, model_dir: Path) -> Path:
    """`model`, `rows.jsonl` and `cfg.yaml`: a run of 10 steps, evaluated and saved every 5."""
    folder.mkdir()
    (folder / "model").symlink_to(model_dir)
    write_jsonl(folder / "rows.jsonl", chat_rows())
    (folder / "cfg.yaml").write_text(CONFIG)
    return folder


def write_jsonl(path: Path, rows: list[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def metrics_of(run_dir: Path) -> list[Row]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@contextmanager
def changed_state(checkpoint: Path) -> Iterator[dict[str, Any]]:
    """Inside, the state of a checkpoint may be changed to what another release would have saved;
    resume it with `--no-verify`."""
    file = checkpoint / "state.json"
    about = json.loads(file.read_text())
    yield about["state"]
    file.write_text(json.dumps(about))
    manifest = read_manifest(checkpoint)
    size = file.stat().st_size
    manifest.files[file.name] = replace(manifest.files[file.name], nbytes=size)
    (checkpoint / "MANIFEST.json").write_bytes(manifest.encode())


def steps_of(run_dir: Path) -> list[Row]:
    return [row for row in metrics_of(run_dir) if "loss" in row]


def evaluations_of(run_dir: Path) -> list[Row]:
    return [row for row in metrics_of(run_dir) if "eval_loss" in row]


def small_windows(patch: pytest.MonkeyPatch, *, waits: bool = False) -> None:
    """Rows that are trained on while they are tokenised come in windows of 20. waits: the third one
    waits for a file `go` in the current folder."""
    from megatrain.data import cache as cached_sets
    from megatrain.data import encoding, streaming

    write = cached_sets._write_shard

    def slow(making: Any, *rest: Any) -> None:
        while waits and len(making.shards) >= 2 and not Path("go").exists():
            time.sleep(0.01)
        write(making, *rest)

    patch.setattr(encoding, "BATCH_ROWS", 5)
    patch.setattr(cached_sets, "SHARD_ROWS", 20)
    patch.setattr(streaming, "LOOKED_EVERY_S", 0.01)
    patch.setattr(cached_sets, "_write_shard", slow)


def wait_for(condition: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.005)


def files_of(run_dir: Path) -> dict[Path, int]:
    """When each file of a run was written last, but for its lock and its log."""
    files = (path for path in run_dir.rglob("*") if path.name not in (".lock", "train.log"))
    return {path: path.stat().st_mtime_ns for path in files}


def environment() -> dict[str, str]:
    """For a command in a process of its own."""
    folders = (str(Path(next(iter(megatrain.__path__))).parent), os.environ.get("PYTHONPATH"))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))}


FORKER = """
import json, os, signal, subprocess, sys
if os.fork():
    os._exit(0)  # no child of the tests': theirs are counted after every step of a run
import datasets, ruamel.yaml
from megatrain import cli
from megatrain.optim import AdamW
from megatrain.recipes import inspect, run
from tests.helpers.once import commands_are_short, runs_are_quick
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
get_checkpoint_conversion_mapping("llama")
AdamW().compile()
short, quick = commands_are_short(), runs_are_quick()
short.__enter__()
quick.__enter__()
def opened(kind):
    if kind == "log":
        return os.open("forked.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    if kind == "full":
        return os.open("/dev/full", os.O_WRONLY)
    if kind == "broken":
        reader, writer = os.pipe()
        os.close(reader)
        return writer
    command = kind.split()
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=opened("log")).stdin.fileno()
def put(stream, kind):
    number = {"stdin": 0, "stdout": 1, "stderr": 2}[stream]
    if kind == "closed":
        os.close(number)
        setattr(sys, stream, None)
    else:
        os.dup2(opened(kind), number)
for line in sys.stdin:
    folder, arguments, first, streams = json.loads(line)
    child = os.fork()
    if child == 0:
        os.setsid()
        for name in ("INT", "TERM", "HUP", "USR1", "USR2", "XCPU", "ALRM"):  # whoever ignored them
            signal.signal(getattr(signal, "SIG" + name), signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.chdir(folder)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for stream, kind in streams.items():
            put(stream, kind)
        if streams["stdout"] == streams["stderr"] != "closed":
            os.dup2(2, 1)
        exec(first)
        os._exit(cli.main(arguments))
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
os._exit(0)  # to take down what was imported takes seconds
"""


class Forker:
    """Runs commands in processes of their own that need not import anything: they are forked from
    one that did, and never computed."""

    def __init__(self, token_cache: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", FORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**environment(), "MEGATRAIN_CACHE": str(token_cache)},
        )
        self.process.wait()

    def start(self, *arguments: str, first: str = "", **streams: str) -> int:
        """Start a command in the current folder, in a process group of its own; returns its id.

        first: Python code that the process runs before.
        streams: where stdin, stdout and stderr go: "log" (forked.log in that folder), "closed",
            "full", "broken" (a pipe that nobody reads), or a command that reads it, such as
            "head -1", in the same group.
        """
        assert self.process.stdin is not None
        given = {"stdout": "log", "stderr": "log", **streams}
        self.process.stdin.write(json.dumps([str(Path.cwd()), arguments, first, given]) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def wait(self) -> int:
        """The exit code of the command that was started; negative: the signal that ended it."""
        return self._answer()

    def _answer(self) -> int:
        assert self.process.stdout is not None
        return int(self.process.stdout.readline())

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.read()  # until it has ended
        self.process.stdout.close()


def children_of(parent: int) -> list[int]:
    """Numbers of the processes that a process started from its first thread."""
    try:
        text = Path(f"/proc/{parent}/task/{parent}/children").read_text()
    except OSError:  # it has ended
        return []
    return [int(word) for word in text.split()]
