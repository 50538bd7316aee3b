"""`megatrain generate`: one answer, or a conversation, on a terminal or through pipes."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import typer

from megatrain.cli.app import print_json, type_out
from megatrain.errors import ConfigError, ModelError
from megatrain.reporting.streams import Lasting, console_on, result_stream
from megatrain.reporting.summary import human_seconds

NEW, EXIT = "/new", "/exit"
PROMPT = "> "
HELP = f"Ctrl-C ends an answer, {NEW} forgets all turns, {EXIT} or Ctrl-D ends the chat"
ENDED = {"end": "", "length": ", cut (--max-new-tokens)", "stop": ", stopped"}


def answer_once(
    model: str,
    prompt: str,
    max_new_tokens: int,
    sampling: Mapping[str, Any],
    system: str | None,
    as_json: bool,
    trust_remote_code: bool,
) -> None:
    """Print the answer to a prompt."""
    from megatrain.recipes import inspect
    from megatrain.reporting.progress import logging_on

    live = sys.stdout.isatty() and not as_json
    given = (max_new_tokens, sampling, type_out if live else None, trust_remote_code, system)
    with logging_on(console_on(stderr=True)):
        answer = inspect.generate(model, prompt, *given)
    if as_json:
        print_json({"prompt": prompt, "answer": answer})
    else:
        typer.echo("" if live else answer)


def converse(
    model: str,
    first: str | None,
    max_new_tokens: int,
    sampling: Mapping[str, Any],
    system: str | None,
    as_json: bool,
    trust_remote_code: bool,
) -> None:
    """Answer lines of stdin until it ends, or a line says so. first: a turn before them.

    On a terminal an answer can be stopped, and a turn that cannot be asked is passed over with its
    error; elsewhere it ends the chat, as later lines may build on it. Answers go to stdout, all
    else to stderr.
    """
    from megatrain.recipes.chat import open_chat
    from megatrain.recipes.sample import unseen
    from megatrain.reporting.progress import logging_on

    asks, console = sys.stdin.isatty(), console_on(stderr=True)
    live = sys.stdout.isatty() and not as_json

    def note(words: str) -> None:
        console.print(words, style="dim", highlight=False, markup=False)

    given = (max_new_tokens, sampling, system, trust_remote_code)
    with logging_on(console), open_chat(model, *given) as chat:
        if asks:
            note(HELP)
        for line in _lines(first, PROMPT if asks and live else ""):
            if line == EXIT:
                break
            if line == NEW:
                chat.forget()
                note("all turns are forgotten")
                continue
            try:
                with _noting_ctrl_c() if asks else nullcontext(lambda: False) as stopped:
                    reply = chat.answer(line, type_out if live else unseen, stopped)
            except (ConfigError, ModelError) as error:
                if not asks:
                    raise
                note(f"error: {error}")
                continue
            if as_json:
                about = {"tokens": reply.tokens, "seconds": reply.seconds, "ended": reply.ended}
                print_json({"prompt": line, "answer": reply.text, **about}, indent=None)
            else:
                typer.echo("" if live else reply.text)
            rate = reply.tokens / (reply.seconds or 1.0)
            speed = f"in {human_seconds(reply.seconds)}, {rate:.1f} tokens/s"
            note(f"{reply.tokens:,} tokens {speed}{ENDED[reply.ended]}")
            out = result_stream()
            if isinstance(out, Lasting) and out.error is not None:
                break  # nobody reads on


def _lines(first: str | None, prompt: str) -> Iterator[str]:
    """The first line and those of stdin, but for blank ones. prompt: before each, on a terminal."""
    if first is not None:
        yield first.strip()
    try:
        for line in _typed(prompt) if prompt else sys.stdin:
            if line.strip():
                yield line.strip()
    except UnicodeDecodeError:
        raise ConfigError("stdin: is no UTF-8 text; convert it") from None


def _typed(prompt: str) -> Iterator[str]:
    """Lines typed at a terminal, until Ctrl-D or Ctrl-C."""
    with suppress(ImportError):  # of a Python without it: lines can be typed all the same
        import readline

        readline.parse_and_bind("set enable-bracketed-paste on")  # a paste is one turn
    while True:
        try:
            yield input(prompt)
        except (EOFError, KeyboardInterrupt):
            typer.echo("")
            return


@contextmanager
def _noting_ctrl_c() -> Iterator[Callable[[], bool]]:
    """Inside, the first Ctrl-C is only noted, as the engine must not be left amid a sweep."""
    came: list[int] = []

    def note(number: int, _frame: object) -> None:
        came.append(number)
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(came)
    finally:
        signal.signal(signal.SIGINT, before)
