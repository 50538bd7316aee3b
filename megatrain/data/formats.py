"""Row formats: how a row of a data file becomes a conversation or a text. One function and one row of FORMATS per format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from megatrain.errors import DataError

ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
}
MAY_BE_EMPTY = (
    "system",
    "developer",
    "tool",
)  # an empty system prompt is a choice; an empty question or answer is a mistake
TOOL_FIELDS = ("tools", "functions", "tool_calls", "function_call")

# Where no chat template exists: the prompt of the Stanford Alpaca release, which base models are usually given.
ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
ALPACA_WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)


class RowError(DataError):
    """One row cannot be trained on. The message says what is wrong; whoever knows the file and line adds them."""


@dataclass(frozen=True)
class Message:
    """One turn. `trained` is False for assistant turns that are context only; `extra` goes to the chat template as it is."""

    role: str
    content: str
    trained: bool = True
    extra: Mapping[str, str] = field(default_factory=dict)

    def as_template_input(self) -> dict[str, str]:
        """The dict that Hugging Face chat templates take."""
        return {**self.extra, "role": self.role, "content": self.content}


@dataclass(frozen=True)
class Chat:
    """A conversation. `plain` is (prompt, completion) for tokenizers without a chat template; None where there is no such form."""

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

    name: str
    columns: tuple[str, ...]
    convert: Callable[[Row], Sample]


def detect_format(row: object) -> RowFormat | None:
    """The first format whose columns the row has (a null counts as absent), or None."""
    if not isinstance(row, Mapping):
        return None
    present = {key for key, value in row.items() if value is not None}
    return next((form for form in FORMATS.values() if present.issuperset(form.columns)), None)


def convert_row(form: RowFormat, row: object) -> Sample:
    """A checked conversation or text. Raises RowError for whatever is missing, empty, of the wrong type or unsupported."""
    if not isinstance(row, Mapping):
        raise RowError(f"expected an object, found {_kind(row)}")
    for name in TOOL_FIELDS:
        if row.get(name):
            raise RowError(f"field {name!r}: tool calling is not supported yet")
    return form.convert(row)


def unknown_format(row: object) -> RowError:
    """What to say about a row that no format fits."""
    if not isinstance(row, Mapping):
        return RowError(f"expected an object, found {_kind(row)}")
    wanted = "; ".join(f"{form.name}: {' + '.join(form.columns)}" for form in FORMATS.values())
    found = ", ".join(str(key) for key in list(row)[:12]) or "none"
    return RowError(
        f"no known row format has the columns found ({found}); known formats are {wanted}"
    )


def _from_messages(row: Row) -> Sample:
    return Chat(tuple(_messages(_filled_list(row, "messages"), "messages")))


def _from_prompt_completion(row: Row) -> Sample:
    prompt, completion = row.get("prompt"), row.get("completion")
    plain = None
    if isinstance(prompt, str) and isinstance(completion, str):
        plain = (_text(row, "prompt"), _text(row, "completion"))
    asked = _side(row, "prompt", "user")
    answered = _side(row, "completion", "assistant")
    context = [Message(turn.role, turn.content, trained=False, extra=turn.extra) for turn in asked]
    return Chat((*context, *answered), plain)


def _from_alpaca(row: Row) -> Sample:
    instruction, output = _text(row, "instruction"), _text(row, "output")
    given = _text(row, "input") if row.get("input") else ""
    system = _optional_system(row)
    prompt = (ALPACA_WITH_INPUT if given else ALPACA_WITHOUT_INPUT).format_map(
        {"instruction": instruction, "input": given}
    )
    asked = Message("user", f"{instruction}\n\n{given}" if given else instruction)
    return Chat(
        (*system, asked, Message("assistant", output)), None if system else (prompt, output)
    )


def _from_sharegpt(row: Row) -> Sample:
    turns = _filled_list(row, "conversations")
    if (
        isinstance(turns[0], Mapping) and "role" in turns[0]
    ):  # many sets name the column so and still use role and content
        return Chat((*_optional_system(row), *_messages(turns, "conversations")))
    messages = []
    for place, turn in _numbered(turns, "conversations"):
        role = SHAREGPT_ROLES.get(_text(turn, "from", place))
        if role is None:
            raise RowError(
                f"{place}.from: unknown role {turn['from']!r}; known are {', '.join(SHAREGPT_ROLES)}"
            )
        messages.append(
            Message(role, _text(turn, "value", place, may_be_empty=role in MAY_BE_EMPTY))
        )
    return Chat((*_optional_system(row), *messages))


def _from_text(row: Row) -> Sample:
    return Document(_text(row, "text"))


FORMATS = {
    form.name: form
    for form in (
        RowFormat("messages", ("messages",), _from_messages),
        RowFormat("sharegpt", ("conversations",), _from_sharegpt),
        RowFormat("prompt_completion", ("prompt", "completion"), _from_prompt_completion),
        RowFormat("alpaca", ("instruction", "output"), _from_alpaca),
        RowFormat("text", ("text",), _from_text),
    )
}


def _side(row: Row, name: str, role: str) -> list[Message]:
    value = row.get(name)
    if isinstance(value, list):
        return _messages(_filled_list(row, name), name)
    return [Message(role, _text(row, name))]


def _messages(turns: list[object], name: str) -> list[Message]:
    messages = []
    for place, turn in _numbered(turns, name):
        for tool_field in TOOL_FIELDS:
            if turn.get(tool_field):
                raise RowError(f"{place}.{tool_field}: tool calling is not supported yet")
        role = _text(turn, "role", place)
        if role not in ROLES:
            raise RowError(f"{place}.role: unknown role {role!r}; known are {', '.join(ROLES)}")
        # strings such as `name` or `reasoning_content` are for the template to use; other metadata is not text
        strings = {
            key: value
            for key, value in turn.items()
            if key not in ("role", "content") and isinstance(value, str)
        }
        extra = {key: _checked(value, f"{place}.{key}") for key, value in strings.items()}
        messages.append(
            Message(role, _content(turn, place, role in MAY_BE_EMPTY), _weight(turn, place), extra)
        )
    return messages


def _content(turn: Row, place: str, may_be_empty: bool) -> str:
    """A string, or OpenAI's list of text parts."""
    parts = turn.get("content")
    if not isinstance(parts, list):
        return _text(turn, "content", place, may_be_empty)
    texts = []
    for part_place, part in _numbered(parts, f"{place}.content"):
        if part.get("type") != "text":
            raise RowError(
                f"{part_place}.type: only text parts can be trained on, found {part.get('type')!r}"
            )
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


def _text(row: Row, name: str, place: str = "", may_be_empty: bool = False) -> str:
    label = f"{place}.{name}" if place else f"field {name!r}"
    value = row.get(name)
    if value is None:
        raise RowError(f"{label} is missing")
    if not isinstance(value, str):
        raise RowError(f"{label}: expected text, found {_kind(value)}")
    if not may_be_empty and not value.strip():
        raise RowError(f"{label} is empty")
    return _checked(value, label)


def _checked(value: str, label: str) -> str:
    try:
        value.encode()
    except (
        UnicodeEncodeError
    ) as error:  # JSON can spell half of a surrogate pair; no tokenizer can take it
        raise RowError(f"{label}: character {error.start} is half of a surrogate pair") from None
    return value


def _kind(value: object) -> str:
    names = {
        dict: "an object",
        list: "a list",
        str: "text",
        bool: "true or false",
        int: "a number",
        float: "a number",
        type(None): "null",
    }
    return names.get(type(value), type(value).__name__)
