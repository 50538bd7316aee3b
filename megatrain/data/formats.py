"""Row formats: how a row of a data file becomes a conversation or a text.

A format is one function and one row of FORMATS.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from megatrain.errors import DataError

ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
SHAREGPT_ROLES |= {role: role for role in ("user", "assistant", "system")}
# An empty system prompt is a choice, an empty question or answer a mistake.
MAY_BE_EMPTY = ("system", "developer", "tool")
TOOL_FIELDS = ("tools", "functions", "tool_calls", "function_call")

# Without a chat template: the prompt of the Stanford Alpaca release, as base models know it.
ALPACA = (
    "Below is an instruction that describes a task{paired}. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n{input}### Response:\n"
)
ALPACA_PAIRED = ", paired with an input that provides further context"


class RowError(DataError):
    """A row cannot be trained on. The message says why; the caller adds file and line."""


@dataclass(frozen=True)
class Message:
    """One turn.

    `trained` is False for an assistant's turn that is context only; `extra` goes to the chat
    template as it is.
    """

    role: str
    content: str
    trained: bool = True
    extra: Mapping[str, str] = field(default_factory=dict)

    def as_template_input(self) -> dict[str, str]:
        """The dict that Hugging Face chat templates take."""
        return {**self.extra, "role": self.role, "content": self.content}


@dataclass(frozen=True)
class Chat:
    """A conversation. `plain` is (prompt, completion) for tokenizers without a chat template."""

    messages: tuple[Message, ...]
    plain: tuple[str, str] | None = None


@dataclass(frozen=True)
class Document:
    """Plain text. `begins` and `ends` are False where it is a piece of a longer document."""

    text: str
    begins: bool = True
    ends: bool = True


Sample = Chat | Document
Row = Mapping[str, object]


@dataclass(frozen=True)
class RowFormat:
    """A row format: found by its `columns`, read by `convert`, which raises RowError."""

    columns: tuple[str, ...]
    convert: Callable[[Row], Sample]


def detect_format(row: object) -> RowFormat | None:
    """The first format whose columns the row has (a null counts as absent), or None."""
    if not isinstance(row, Mapping):
        return None
    present = {key for key, value in row.items() if value is not None}
    return next((form for form in FORMATS.values() if present.issuperset(form.columns)), None)


def convert_row(form: RowFormat, row: object) -> Sample:
    """A checked conversation or text.

    Raises RowError for what is missing, empty, of the wrong type or not supported.
    """
    if not isinstance(row, Mapping):
        raise RowError(f"expected an object, found {_kind(row)}")
    _refuse_tools(row)
    return form.convert(row)


def unknown_format(row: object) -> RowError:
    """The error of a row that no format fits."""
    if not isinstance(row, Mapping):
        return RowError(f"expected an object, found {_kind(row)}")
    wanted = "; ".join(f"{name}: {' + '.join(form.columns)}" for name, form in FORMATS.items())
    found = ", ".join(str(key) for key in list(row)[:12]) or "none"
    known = f"known formats are {wanted}"
    return RowError(f"no known row format has the columns found ({found}); {known}")


def _from_prompt_completion(row: Row) -> Sample:
    prompt, completion = row.get("prompt"), row.get("completion")
    plain = None
    if isinstance(prompt, str) and isinstance(completion, str):
        plain = (_text(row, "prompt"), _text(row, "completion"))
    asked = [replace(turn, trained=False) for turn in _side(row, "prompt", "user")]
    return Chat((*asked, *_side(row, "completion", "assistant")), plain)


def _from_alpaca(row: Row) -> Sample:
    instruction, output = _text(row, "instruction"), _text(row, "output")
    given = _text(row, "input") if row.get("input") else ""
    parts = {"paired": ALPACA_PAIRED, "input": f"### Input:\n{given}\n\n"} if given else {}
    prompt = ALPACA.format_map({"paired": "", "input": "", "instruction": instruction, **parts})
    asked = Message("user", f"{instruction}\n\n{given}" if given else instruction)
    system = _optional_system(row)
    plain = None if system else (prompt, output)
    return Chat((*system, asked, Message("assistant", output)), plain)


def _from_sharegpt(row: Row) -> Sample:
    turns = _filled_list(row, "conversations")
    # many sets name the column so and still use role and content
    if isinstance(turns[0], Mapping) and "role" in turns[0]:
        return Chat((*_optional_system(row), *_messages(turns, "conversations")))
    messages = []
    for place, turn in _numbered(turns, "conversations"):
        role = _one_of(SHAREGPT_ROLES, turn, "from", place)
        content = _text(turn, "value", place, may_be_empty=role in MAY_BE_EMPTY)
        messages.append(Message(SHAREGPT_ROLES[role], content))
    return Chat((*_optional_system(row), *messages))


FORMATS = {
    "messages": RowFormat(("messages",), lambda row: Chat(tuple(_turns_of(row, "messages")))),
    "sharegpt": RowFormat(("conversations",), _from_sharegpt),
    "prompt_completion": RowFormat(("prompt", "completion"), _from_prompt_completion),
    "alpaca": RowFormat(("instruction", "output"), _from_alpaca),
    "text": RowFormat(("text",), lambda row: Document(_text(row, "text"))),
}


def _side(row: Row, name: str, role: str) -> list[Message]:
    if isinstance(row.get(name), list):
        return _turns_of(row, name)
    return [Message(role, _text(row, name))]


def _turns_of(row: Row, name: str) -> list[Message]:
    return _messages(_filled_list(row, name), name)


def _messages(turns: list[object], name: str) -> list[Message]:
    messages = []
    for place, turn in _numbered(turns, name):
        _refuse_tools(turn, place)
        role = _one_of(ROLES, turn, "role", place)
        content = _content(turn, place, role in MAY_BE_EMPTY)
        # texts such as `name` or `reasoning_content` are for the template; the rest is metadata
        extra = {
            key: _text(turn, key, place, may_be_empty=True)
            for key, value in turn.items()
            if key not in ("role", "content") and isinstance(value, str)
        }
        messages.append(Message(role, content, _weight(turn, place), extra))
    return messages


def _refuse_tools(row: Row, place: str = "") -> None:
    for name in TOOL_FIELDS:
        if row.get(name):
            raise RowError(f"{_label(name, place)}: tool calling is not supported yet")


def _one_of(roles: Collection[str], turn: Row, name: str, place: str) -> str:
    role = _text(turn, name, place)
    if role not in roles:
        raise RowError(f"{place}.{name}: unknown role {role!r}; known are {', '.join(roles)}")
    return role


def _content(turn: Row, place: str, may_be_empty: bool) -> str:
    """A string, or OpenAI's list of text parts."""
    parts = turn.get("content")
    if not isinstance(parts, list):
        return _text(turn, "content", place, may_be_empty)
    texts = []
    for part_place, part in _numbered(parts, f"{place}.content"):
        if (kind := part.get("type")) != "text":
            raise RowError(f"{part_place}.type: only text parts can be trained on, found {kind!r}")
        texts.append(_text(part, "text", part_place, may_be_empty))
    return _text({"content": "".join(texts)}, "content", place, may_be_empty)


def _weight(turn: Row, place: str) -> bool:
    """OpenAI's `weight`: 0 makes an assistant turn context only."""
    weight = turn.get("weight")
    if weight is None:
        return True
    if weight not in (0, 1):
        raise RowError(f"{place}.weight: only 0 and 1 are supported, found {weight!r}")
    return bool(weight)


def _optional_system(row: Row) -> tuple[Message, ...]:
    return (Message("system", _text(row, "system")),) if row.get("system") else ()


def _filled_list(row: Row, name: str) -> list[object]:
    value = row.get(name)
    if value is None:
        raise RowError(f"field {name!r} is missing")
    if not isinstance(value, list):
        raise RowError(f"field {name!r}: expected a list, found {_kind(value)}")
    if not value:
        raise RowError(f"field {name!r} is empty")
    return value


def _numbered(turns: Iterable[object], name: str) -> Iterable[tuple[str, Row]]:
    for number, turn in enumerate(turns):
        place = f"{name}[{number}]"
        if not isinstance(turn, Mapping):
            raise RowError(f"{place}: expected an object, found {_kind(turn)}")
        yield place, turn


def _label(name: str, place: str) -> str:
    return f"{place}.{name}" if place else f"field {name!r}"


def _text(row: Row, name: str, place: str = "", may_be_empty: bool = False) -> str:
    label, value = _label(name, place), row.get(name)
    if value is None:
        raise RowError(f"{label} is missing")
    if not isinstance(value, str):
        raise RowError(f"{label}: expected text, found {_kind(value)}")
    if not may_be_empty and not value.strip():
        raise RowError(f"{label} is empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
        raise RowError(f"{label}: character {error.start} is half of a surrogate pair") from None
    return value


KINDS = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
KINDS |= {int: "a number", float: "a number"}


def _kind(value: object) -> str:
    return KINDS.get(type(value), type(value).__name__)
