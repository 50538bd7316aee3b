"""`megatrain generate`: one answer, or a conversation, on a terminal or through pipes."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import typer

from megatrain.cli.app import print_json, type_out
from megatrain.errors import ConfigError, ModelError
from megatrain.reporting.streams import Lasting, console_on, result_stream
from megatrain.reporting.summary import human_seconds


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

    On a terminal a turn that cannot be asked is passed over with its error; elsewhere it ends the
    chat, as later lines may build on it. Answers go to stdout, all else to stderr.
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
            note("Ctrl-D ends the chat")
        for line in _lines(first, asks):
            try:
                reply = chat.answer(line, type_out if live else unseen)
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
            rate = f"{reply.tokens / (reply.seconds or 1.0):.1f} tokens/s"
            cut = ", cut (--max-new-tokens)" if reply.ended == "length" else ""
            note(f"{reply.tokens:,} tokens in {human_seconds(reply.seconds)}, {rate}{cut}")
            out = result_stream()
            if isinstance(out, Lasting) and out.error is not None:
                break  # nobody reads on


def _lines(first: str | None, asks: bool) -> Iterator[str]:
    """The first line and those of stdin, but for blank ones. asks: at a terminal."""
    if first is not None:
        yield first.strip()
    try:
        for line in iter(_typed, None) if asks else sys.stdin:
            if line.strip():
                yield line.strip()
    except UnicodeDecodeError:
        raise ConfigError("stdin: is no UTF-8 text; convert it") from None


def _typed() -> str | None:
    """A line typed at a terminal; None at Ctrl-D."""
    try:
        return input("> ")
    except EOFError:
        typer.echo("")
        return None
