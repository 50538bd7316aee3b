"""Row formats: how a row of a data file becomes a conversation or a text.

A format is one function and one row of FORMATS, with every column that it reads. A row with a
column of MATTERS that its format does not read is refused; other such columns are named once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatrain.data.fields import NO_IMAGES, Row, RowError, filled_list, is_given, kind_of, text_of
from megatrain.data.messages import Message, Turns, openai_turns, sharegpt_turns
from megatrain.data.tools import Tool, tools_of

# Without a chat template: the prompt of the Stanford Alpaca release, as base models know it.
ALPACA = (
    "Below is an instruction that describes a task{paired}. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n{input}### Response:\n"
)
ALPACA_PAIRED = ", paired with an input that provides further context"

_PAIRS = "two answers, of which one is better, are for method: dpo"
_JUDGED = "answers that are marked as wanted or unwanted are for method: kto"
_GRADED = "graded answers are for method: reward"
_NOT_TEXT = "only text can be trained on"
_NO_PLACE = "a row of this format has no place for it"
# Columns that change what a row teaches, and why a format that does not read one refuses the row.
MATTERS = {
    **dict.fromkeys(("chosen", "rejected"), _PAIRS),
    **dict.fromkeys(("label", "kto_tag"), _JUDGED),
    **dict.fromkeys(("score", "margin"), _GRADED),
    "weight": "rows have no weights; leave the row out, or give its turns a weight of 0",
    **dict.fromkeys(("images", "image"), NO_IMAGES),
    **dict.fromkeys(("videos", "video", "audios", "audio"), _NOT_TEXT),
    **dict.fromkeys(("system", "system_prompt", "history", "chat_template_kwargs"), _NO_PLACE),
    **dict.fromkeys(("tools", "functions", "tool_calls", "function_call"), _NO_PLACE),
}
# What they say of a document is no instruction for pre-training on it.
ABOUT_DOCUMENTS = ("label", "score", "weight")
SYSTEM = ("system", "system_prompt")
ABOUT_CHATS = (*SYSTEM, "chat_template_kwargs", "tools", "functions")
# Variables of a template that are not a row's to set.
OURS = (
    *("messages", "conversations", "tools", "chat_template", "add_generation_prompt"),
    *("return_assistant_tokens_mask", "continue_final_message"),
)


@dataclass(frozen=True)
class Chat:
    """A conversation.

    Attributes:
        plain: (prompt, completion) for tokenizers without a chat template.
        literal: the row has two texts, which mean themselves rather than two turns.
        variables: what the row sets of its chat template, such as enable_thinking.
        tools: that the model may call.
        unread: fields of turns that nobody reads.
    """

    messages: tuple[Message, ...]
    plain: tuple[str, str] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[Tool, ...] = ()
    unread: frozenset[str] = frozenset()
    literal: bool = False


@dataclass(frozen=True)
class Document:
    """Plain text. `begins` and `ends` are False where it is a piece of a longer document, of which
    the characters `before` and `after` it are given."""

    text: str
    begins: bool = True
    ends: bool = True
    before: str = ""
    after: str = ""


Sample = Chat | Document


@dataclass(frozen=True)
class RowFormat:
    """A row format: found by its `columns`, read by `convert`, which raises RowError.

    also: further columns that it reads.
    """

    columns: tuple[str, ...]
    convert: Callable[[Row], Sample]
    also: tuple[str, ...] = ABOUT_CHATS

    @property
    def reads(self) -> tuple[str, ...]:
        return self.columns + self.also


def detect_format(row: object) -> RowFormat | None:
    """The first format whose columns the row has (a null counts as absent), or None."""
    if not isinstance(row, Mapping):
        return None
    present = {key for key, value in row.items() if value is not None}
    return next((form for form in FORMATS.values() if present.issuperset(form.columns)), None)


def convert_row(form: RowFormat, row: object, *, pretrain: bool = False) -> Sample:
    """A checked conversation or text.

    pretrain: documents are trained on whatever their labels and scores.

    Raises RowError for what is missing, empty, of the wrong type or not supported, and for a column
    of MATTERS that the format does not read.
    """
    if not isinstance(row, Mapping):
        raise RowError(f"expected an object, found {kind_of(row)}")
    about = ABOUT_DOCUMENTS if pretrain and form is FORMATS["text"] else ()
    _refuse_unread(row, (*form.reads, *about))
    return form.convert(row)


def renamed(row: object, columns: Mapping[str, str]) -> object:
    """The row with columns of other names under ours. Raises RowError where one is missing.

    columns: the row's name by our name.
    """
    if not columns or not isinstance(row, Mapping):
        return row
    kept = {key: value for key, value in row.items() if key not in columns.values()}
    for ours, theirs in columns.items():
        if theirs not in row:
            raise RowError(f"field {theirs!r}, which data.columns.{ours} names, is missing")
        if ours in kept:
            raise RowError(f"field {ours!r}: data.columns.{ours} names {theirs!r} instead")
        kept[ours] = row[theirs]
    return kept


def unread_columns(row: object, read: Sequence[str]) -> list[str]:
    """Columns that hold something and are not among those read."""
    if not isinstance(row, Mapping):
        return []
    return [str(key) for key in row if key not in read and is_given(row[key])]


def unknown_format(row: object) -> RowError:
    """The error of a row that no format fits."""
    if not isinstance(row, Mapping):
        return RowError(f"expected an object, found {kind_of(row)}")
    try:
        _refuse_unread(row, ABOUT_CHATS)
    except RowError as error:
        return error
    wanted = "; ".join(f"{name}: {' + '.join(form.columns)}" for name, form in FORMATS.items())
    names = [str(key) for key in list(row)[:12]] or ["none"]
    found = ", ".join(names)
    other = f"columns of other names are given as data.columns: {{prompt: {names[0]}}}"
    known = f"known formats are {wanted}; {other}"
    return RowError(f"no known row format has the columns found ({found}); {known}")


def _refuse_unread(row: Row, read: Sequence[str]) -> None:
    for name, reason in MATTERS.items():
        if name not in read and is_given(row.get(name)):
            raise RowError(f"field {name!r}: {reason}")


def _chat(row: Row, turns: Turns, plain: tuple[str, str] | None = None) -> Chat:
    """The conversation with what the row's columns say about it."""
    prompts = [name for name in SYSTEM if is_given(row.get(name))]
    system = tuple(Message("system", text_of(row, name)) for name in prompts)
    of_turns = ["a system turn"] if any(m.role == "system" for m in turns.messages) else []
    if len(said := [*prompts, *of_turns]) > 1 and prompts:
        raise RowError(f"field {said[0]!r}: {said[1]} says the same; keep one system prompt")
    variables = row.get("chat_template_kwargs") or {}
    if not isinstance(variables, Mapping):
        found = kind_of(variables)
        raise RowError(f"field 'chat_template_kwargs': expected an object, found {found}")
    given = {str(name): value for name, value in variables.items() if value is not None}
    for name in (name for name in OURS if name in given):
        raise RowError(f"chat_template_kwargs.{name}: cannot be set by a row")
    messages = (*system, *turns.messages)
    tools = tools_of(row, bare="conversations" in row)
    plain = None if system or given or tools else plain
    return Chat(messages, plain, given, tools, turns.unread)


def _from_messages(row: Row) -> Sample:
    return _chat(row, openai_turns(filled_list(row, "messages"), "messages"))


def _from_prompt_completion(row: Row) -> Sample:
    prompt, completion = row.get("prompt"), row.get("completion")
    plain = None
    if isinstance(prompt, str) and isinstance(completion, str):
        plain = (text_of(row, "prompt"), text_of(row, "completion"))
    asked, answer = _side(row, "prompt", "user"), _side(row, "completion", "assistant")
    context = [replace(turn, trained=False) for turn in asked.messages]
    turns = Turns((*context, *answer.messages), asked.unread | answer.unread)
    return replace(_chat(row, turns, plain), literal=plain is not None)


def _from_alpaca(row: Row) -> Sample:
    instruction, output = text_of(row, "instruction"), text_of(row, "output")
    given = text_of(row, "input") if row.get("input") else ""
    parts = {"paired": ALPACA_PAIRED, "input": f"### Input:\n{given}\n\n"} if given else {}
    prompt = ALPACA.format_map({"paired": "", "input": "", "instruction": instruction, **parts})
    asked = Message("user", f"{instruction}\n\n{given}" if given else instruction)
    earlier = _history(row)
    turns = Turns((*earlier, asked, Message("assistant", output)))
    return _chat(row, turns, None if earlier else (prompt, output))


def _history(row: Row) -> list[Message]:
    """The turns before an instruction: a list of (instruction, output)."""
    pairs = filled_list(row, "history") if is_given(row.get("history")) else []
    turns = []
    for number, pair in enumerate(pairs):
        place = f"history[{number}]"
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise RowError(f"{place}: expected a list of two texts, question and answer")
        sides = {"0": pair[0], "1": pair[1]}
        turns.append(Message("user", text_of(sides, "0", place)))
        turns.append(Message("assistant", text_of(sides, "1", place)))
    return turns


def _from_sharegpt(row: Row) -> Sample:
    turns = filled_list(row, "conversations")
    # many sets name the column so and still use role and content
    openai = isinstance(turns[0], Mapping) and "role" in turns[0]
    return _chat(row, (openai_turns if openai else sharegpt_turns)(turns, "conversations"))


FORMATS = {
    "messages": RowFormat(("messages",), _from_messages),
    "sharegpt": RowFormat(("conversations",), _from_sharegpt),
    "prompt_completion": RowFormat(("prompt", "completion"), _from_prompt_completion),
    "alpaca": RowFormat(
        ("instruction", "output"),
        _from_alpaca,
        also=("input", "history", *SYSTEM, "chat_template_kwargs"),
    ),
    "text": RowFormat(("text",), lambda row: Document(text_of(row, "text")), also=()),
}


def _side(row: Row, name: str, role: str) -> Turns:
    if isinstance(row.get(name), list):
        return openai_turns(filled_list(row, name), name)
    return Turns((Message(role, text_of(row, name)),))
