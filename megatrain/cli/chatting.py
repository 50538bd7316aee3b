"""`megatrain generate`: one answer, or a conversation, on a terminal or through pipes."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

import typer

from megatrain.cli.app import print_json, type_out
from megatrain.errors import ConfigError, ModelError
from megatrain.reporting.streams import Lasting, console_on, result_stream
from megatrain.reporting.words import human_seconds

if TYPE_CHECKING:
    from megatrain.recipes.chat import Chat, Reply

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

    Where stdin is a terminal, an answer can be stopped, and a turn that cannot be asked is said and
    passed over; elsewhere it ends the chat, as later lines may build on it. Answers go to stdout,
    all else to stderr.
    """
    from megatrain.recipes.chat import open_chat
    from megatrain.reporting.progress import logging_on

    asks, console = sys.stdin.isatty(), console_on(stderr=True)
    live = sys.stdout.isatty() and not as_json
    given = (max_new_tokens, sampling, system, trust_remote_code)
    with logging_on(console), open_chat(model, *given) as chat:
        if asks:
            console.print(HELP, style="dim", highlight=False)
        for line in _lines(first, PROMPT if asks and live else ""):
            if line == EXIT:
                break
            if line == NEW:
                chat.begin_anew()
                console.print("all turns are forgotten", style="dim", highlight=False)
                continue
            try:
                reply = _answer(chat, line, live, stoppable=asks)
            except (ConfigError, ModelError) as error:
                if not asks:
                    raise
                console.print(f"error: {error}", markup=False, highlight=False)
                continue
            if as_json:
                about = {"tokens": reply.tokens, "seconds": reply.seconds, "ended": reply.ended}
                said = {"prompt": line, "answer": reply.text, **about}
                print_json(said, indent=None)
            else:
                typer.echo("" if live else reply.text)
            console.print(in_words(reply), style="dim", highlight=False)
            out = result_stream()
            if isinstance(out, Lasting) and out.error is not None:
                break  # nobody reads on


def in_words(reply: Reply) -> str:
    """`42 tokens in 3.1s, 13.5 tokens/s`, and why there are no more, unless the model ended it."""
    speed = f"in {human_seconds(reply.seconds)}, {reply.tokens_per_s:.1f} tokens/s"
    return f"{reply.tokens:,} tokens {speed}{ENDED[reply.ended]}"


def _lines(first: str | None, prompt: str) -> Iterator[str]:
    """The first line and those of stdin, but for blank ones. prompt: before each, on a terminal."""
    if first is not None:
        yield first.strip()
    try:
        if prompt:
            yield from filter(None, _typed(prompt))
        else:
            yield from filter(None, (line.strip() for line in sys.stdin))
    except UnicodeDecodeError:
        raise ConfigError("stdin: is no UTF-8 text; convert it") from None


def _typed(prompt: str) -> Iterator[str]:
    """Lines typed at a terminal, until Ctrl-D or Ctrl-C."""
    with suppress(ImportError):  # of a Python without it: lines can be typed all the same
        import readline

        readline.parse_and_bind("set enable-bracketed-paste on")  # a paste is one turn
    while True:
        try:
            line = input(prompt)
        except (EOFError, KeyboardInterrupt):
            typer.echo("")
            return
        yield line.strip()


def _answer(chat: Chat, line: str, live: bool, stoppable: bool) -> Reply:
    options: dict[str, Any] = {"show": type_out} if live else {}
    if not stoppable:
        return chat.answer(line, **options)
    with _noting_ctrl_c() as stopped:
        return chat.answer(line, stopped=stopped, **options)


@contextmanager
def _noting_ctrl_c() -> Iterator[Callable[[], bool]]:
    """Inside, Ctrl-C is only noted, as the engine must not be left amid a sweep; the second one
    means what it meant before."""
    came: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        came.append(number)
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(came)
    finally:
        signal.signal(signal.SIGINT, before)
