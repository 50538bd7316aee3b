"""What files say never steers the terminal: control characters are spelt out wherever they show."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from megatrain.reporting.streams import FRAMES
from tests.helpers.commands import conversation, environment, write_jsonl

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b2J\u202e"
CONTROLS = {"\x1b", "\x07", "\x9b", "\u202e"}


def edited(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def in_a_column(folder: Path) -> None:
    write_jsonl(folder / "rows.jsonl", [{HOSTILE: "text"}])


def in_a_role(folder: Path) -> None:
    write_jsonl(folder / "rows.jsonl", [{"messages": [{"role": HOSTILE, "content": "x"}]}])


def in_a_file_name(folder: Path) -> None:
    write_jsonl(folder / "rows.jsonl", [{"nothing": 1}]).rename(folder / f"{HOSTILE}.jsonl")
    config = (folder / "cfg.yaml").read_text()
    named = config.replace("train: rows.jsonl", f"train: {json.dumps(HOSTILE + '.jsonl')}")
    (folder / "cfg.yaml").write_text(named)


def in_a_key(folder: Path) -> None:
    with (folder / "cfg.yaml").open("a") as file:
        file.write(f"{json.dumps(HOSTILE)}: 1\n")


def in_a_tensor_name(folder: Path) -> None:
    weights = folder / "model" / "model.safetensors"
    header = json.dumps({HOSTILE: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    weights.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))


def in_the_model_type(folder: Path) -> None:
    edited(folder / "model" / "config.json", lambda it: it.update(model_type=HOSTILE))


def in_the_quantisation(folder: Path) -> None:
    method = {"quant_method": HOSTILE}
    edited(folder / "model" / "config.json", lambda it: it.update(quantization_config=method))


def in_the_template_s_error(folder: Path) -> None:
    (folder / "model" / "chat_template.jinja").write_text(
        "{{ raise_exception(" + json.dumps(HOSTILE) + ") }}"
    )


EXIT_CODES = {
    in_a_column: 3,
    in_a_role: 3,
    in_a_file_name: 3,
    in_a_key: 2,
    in_a_tensor_name: 2,
    in_the_model_type: 2,
    in_the_quantisation: 2,
    in_the_template_s_error: 3,
}


@pytest.mark.parametrize(("hide", "code"), EXIT_CODES.items())
def test_an_error_spells_it_out(megatrain, project, model_dir, hide, code):
    (project / "model").unlink()
    shutil.copytree(model_dir, project / "model")
    hide(project)
    done = megatrain("train cfg.yaml", code=code)
    logs = "".join(log.read_text() for log in project.rglob("train.log"))
    for shown in (done.out, done.err, logs):
        assert not CONTROLS & set(shown)
    assert "\\x1b]0;owned\\x07" in done.err


def test_so_do_the_summary_and_the_preview(megatrain, project):
    rows = [conversation(f"Say {n}. {HOSTILE}", f"{n} {HOSTILE}") for n in range(12)]
    write_jsonl(project / "rows.jsonl", rows)
    done = megatrain("train cfg.yaml data.eval=4 train.max_steps=1 train.eval_every=null")
    preview = megatrain("data cfg.yaml")
    assert "\\x1b]0;owned" in done.out
    assert "\\x1b]0;owned" in preview.out
    for shown in (done.out, done.err, preview.out):
        assert not CONTROLS & set(shown)


def typed(command: list[str], folder: Path) -> tuple[list[tuple[float, bytes]], int]:
    """What a command writes to a terminal of its own, piece by piece with the seconds since it
    began, and its exit code."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.execve(command[0], command, {**environment(), "TERM": "xterm-256color"})
    began, pieces = time.monotonic(), list[tuple[float, bytes]]()
    with suppress(OSError):  # the other end is closed
        while piece := os.read(terminal, 1 << 16):
            pieces.append((time.monotonic() - began, piece))
    return pieces, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_command_shows_that_it_works_and_leaves_no_trace_of_it(project):
    write_jsonl(
        project / "rows.jsonl", [conversation(f"Say {n}.", "x " * n) for n in range(1, 3000)]
    )
    command = [sys.executable, "-m", "megatrain", "data", "cfg.yaml", "train.seq_len=8192"]
    pieces, code = typed(command, project)
    text = b"".join(piece for _, piece in pieces).decode()
    assert code == 0 and re.match("\r. (starting|loading PyTorch) 0s\x1b\\[K", text)
    assert re.search("\r. reading and tokenising rows [0-9]+%", text)
    times = [when for when, _ in pieces]
    assert max(b - a for a, b in pairwise(times)) < 10, "it moves all the while"
    lines = text.replace("\r\n", "\n").split("\n")
    left = [line.rsplit("\r", 1)[-1].removeprefix("\x1b[K") for line in lines]
    assert not any(frame in line for line in left for frame in FRAMES)
    assert any("rows, " in line for line in left)
