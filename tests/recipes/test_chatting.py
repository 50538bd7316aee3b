"""`megatrain generate --chat`: answers that transformers would give to the same turns, through
pipes and on a terminal."""

from __future__ import annotations

import codecs
import io
import json
import os
import pty
import re
import select
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from megatrain.cli.app import type_out
from tests.helpers.commands import CHATML, Answer

Chat = Callable[..., Answer]
ENDS = ("<|endoftext|>", "<|im_end|>")


@pytest.fixture
def chat(megatrain, monkeypatch) -> Chat:
    """chat("run", "one", "two", options=("--json",)): lines through a pipe."""

    def run(model: str, *lines: str, options: tuple[str, ...] = (), code: int = 0) -> Answer:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return megatrain(f"generate {model} --chat", *options, code=code)  # type: ignore[no-any-return]

    return run


def answers(said: Answer) -> list[dict[str, Any]]:
    return [json.loads(line) for line in said.out.splitlines()]


def transformers_answers(
    folder: str, prompts: list[str], length: int, system: str | None = None
) -> list[tuple[str, int]]:
    """(text, tokens) of each answer of transformers' own `generate`, told all turns before."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    ends = tokenizer.convert_tokens_to_ids([*ENDS])
    turns = [] if system is None else [{"role": "system", "content": system}]
    found = []
    for prompt in prompts:
        turns.append({"role": "user", "content": prompt})
        given = tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        asked = {"do_sample": False, "eos_token_id": ends, "pad_token_id": 0}
        made = model.generate(**given, max_new_tokens=length, **asked)
        new = made[0, given["input_ids"].shape[1] :]
        text = str(tokenizer.decode(new, skip_special_tokens=True)).strip()
        turns.append({"role": "assistant", "content": text})
        found.append((text, len(new)))
    return found


GREEDY = ("--json", "--max-new-tokens", "12")
QUESTIONS = ["Count to 3.", "Count to 5."]


def test_turns_are_told_all_before_them(chat):
    expected = transformers_answers("model", QUESTIONS, 12)
    said = answers(chat("model", *QUESTIONS, options=GREEDY))
    assert [(one["answer"], one["tokens"]) for one in said] == expected
    assert [one["prompt"] for one in said] == QUESTIONS
    assert transformers_answers("model", QUESTIONS[1:], 12)[0] != expected[1], "turns matter"


def test_without_room_on_the_device_weights_are_streamed_with_the_same_tokens(chat, monkeypatch):
    expected = transformers_answers("model", QUESTIONS, 12)
    monkeypatch.setattr("megatrain.engine.inference.has_room", lambda *given: False)
    streamed = chat("model", *QUESTIONS, options=GREEDY)
    assert [(one["answer"], one["tokens"]) for one in answers(streamed)] == expected
    assert streamed.err.count("no room to stay on the device") == 1


def test_a_system_prompt_comes_first_and_a_prompt_is_the_first_turn(chat, megatrain):
    expected = transformers_answers("model", ["Count to 3."], 12, system="Be brief.")
    options = ("--system", "Be brief.", "--max-new-tokens", "12")
    assert expected != transformers_answers("model", ["Count to 3."], 12)
    said = chat("model", options=("Count to 3.", *options, "--json"))
    assert answers(said)[0]["answer"] == expected[0][0]
    assert megatrain("generate model", "Count to 3.", *options).out == f"{expected[0][0]}\n"


@pytest.mark.slow
def test_what_ends_an_answer_of_a_trained_model_ends_it_here(chat, finished):
    expected = transformers_answers("run/final", ["Count to 3."], 40)
    plain = chat("run", "Count to 3.")
    said = chat("run", "Count to 3.", options=("--json", "--max-new-tokens", "40"))
    (one,) = answers(said)
    assert (one["answer"], one["tokens"]) == expected[0]
    assert one["ended"] == ("end" if one["tokens"] < 40 else "length")
    assert plain.err.count("tokens/s") == 1
    assert "\x1b" not in plain.out + plain.err


def test_the_oldest_turns_are_forgotten_where_the_model_has_no_room(chat):
    """It reads 128 tokens, of which an answer may have 32 at least."""
    options = ("--json", "--max-new-tokens", "40", "--system", "Be brief.")
    said = chat("model", *QUESTIONS, "Count to 7.", options=options)
    assert (
        "the model reads 128 tokens, an answer included: the oldest 1 questions are forgotten"
        in said.err
    )
    (alone,) = transformers_answers("model", ["Count to 7."], 40, system="Be brief.")
    assert alone[0] == answers(said)[-1]["answer"]
    said = chat("model", *QUESTIONS * 3, options=GREEDY)
    assert "oldest 1 questions" in said.err and "oldest 0" not in said.err, "with their answers"


def test_a_line_that_cannot_be_asked_ends_a_pipe(chat):
    long = " ".join(map(str, range(90)))
    said = chat("model", "Count to 3.", long, "Count to 5.", options=GREEDY, code=2)
    assert "the model reads no more than 128, its answer included" in said.err
    assert len(answers(said)) == 1


@pytest.mark.parametrize("options", [("--chat",), ()])
def test_what_is_no_text_is_refused(megatrain, monkeypatch, options):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Count \udcff to 3.\n"))
    said = megatrain("generate model", *options, code=2).err
    assert "error: the prompt: is no UTF-8 text; convert it" in said


def test_text_does_not_steer_a_terminal(capsys):
    type_out("\x1b[2Jhello\r\n")
    assert capsys.readouterr().out == "\\x1b[2Jhello\\r\n"


NO_SYSTEM = CHATML.replace("in messages", "in messages if m['role'] != 'system'")
REFUSES = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('none') }}{% endif %}"


NO_EFFECT: list[tuple[str | None, tuple[str, ...], str]] = [
    (None, (), "has no chat template, which says how turns are written; leave --chat out"),
    (None, ("--system", "x"), "has no chat template"),
    (NO_SYSTEM, ("--system", "x"), "--system: the chat template leaves it out"),
    (REFUSES + CHATML, ("--system", "x"), "--system: the chat template refuses this prompt"),
    (CHATML, ("--system", " "), "--system: is empty"),
    (CHATML, (" ",), "PROMPT is empty"),
    (CHATML, ("--top-p", "0.5"), "--top-p: has no effect at temperature 0"),
]


def test_what_would_have_no_effect_is_refused_before_weights_are_read(chat, project):
    folder = (project / "model").resolve()
    (project / "model").unlink()
    shutil.copytree(folder, project / "model")
    (project / "model" / "model.safetensors").write_bytes(b"")
    file = project / "model" / "chat_template.jinja"
    for template, options, words in NO_EFFECT:
        file.unlink(missing_ok=True)
        if template is not None:
            file.write_text(template)
        assert words in chat("model", "hello", options=options, code=2).err


# -- on a terminal -------------------------------------------------------------------------------


class Screen:
    """What a command shows on a terminal, at which somebody types: without what it erased, such as
    the line that says how long it has been working."""

    def __init__(self, master: int) -> None:
        self.master = master
        self.decoder = codecs.getincrementaldecoder("utf-8")()
        self.shown = ""

    def wait(self, words: str, seconds: float = 60) -> str:
        """All that is shown from here on until it has these words."""
        end = time.monotonic() + seconds
        while words not in self.shown:
            assert time.monotonic() < end, self.shown
            if select.select([self.master], [], [], 0.1)[0]:
                self.shown += self.decoder.decode(os.read(self.master, 4096))
        before, found, self.shown = self.shown.partition(words)
        return re.sub(r"[^\n]*\r\x1b\[K", "", before + found)

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())


@pytest.fixture
def screen() -> Iterator[tuple[Screen, str]]:
    """A terminal, and Python code that makes it a command's."""
    master, slave = pty.openpty()
    name = os.ttyname(slave)
    opened = f"t = os.open({name!r}, os.O_RDWR); os.environ['TERM'] = 'xterm'"
    yield Screen(master), f"{opened}; [os.dup2(t, number) for number in range(3)]"
    os.close(master)
    os.close(slave)


@pytest.mark.slow
def test_a_conversation_on_a_terminal(forker, project, screen):
    terminal, takes_it = screen
    forker.start("generate", "model", "--chat", "--max-new-tokens", "100", first=takes_it)
    assert "Ctrl-D ends the chat" in terminal.wait("> ")
    terminal.type("Count to 3.\n")
    said = terminal.wait("tokens/s")
    expected = transformers_answers("model", ["Count to 3."], 100)[0][0]
    answer = said.partition("Count to 3.\r\n")[2].partition("\r\n\x1b[2m")[0]
    assert answer.strip().replace("\r\n", "\n") == expected
    terminal.wait("> ")
    terminal.type(" ".join(map(str, range(90))) + "\n")  # a prompt too long, which is passed over
    assert "the model reads no more than 128" in terminal.wait("> ").replace("\r\n", " ")
    terminal.type("\x04")
    assert forker.wait() == 0
