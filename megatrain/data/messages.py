"""Conversations: the turns of a row, in OpenAI's form and in ShareGPT's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatrain.data.fields import Row, RowError, is_given, label, numbered, one_of, text_of

ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
SHAREGPT_ROLES |= {role: role for role in ("user", "assistant", "system")}
# An empty system prompt is a choice, an empty question or answer a mistake.
MAY_BE_EMPTY = ("system", "developer", "tool")
TOOL_FIELDS = ("tools", "functions", "tool_calls", "function_call")
# What trainers call the flag that makes a turn context only: OpenAI's, axolotl's two, ms-swift's.
FLAGS = ("weight", "train", "training", "loss")
# Fields of a turn that would change what is learnt, and are not read.
REFUSED = {"train_detail": "parts of a turn cannot be trained on alone; remove it"}


@dataclass(frozen=True)
class Message:
    """One turn.

    Attributes:
        trained: False for an assistant's turn that is context only.
        extra: what goes to the chat template beside role and content.
    """

    role: str
    content: str
    trained: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)

    def as_template_input(self) -> dict[str, Any]:
        """The dict that Hugging Face chat templates take."""
        return {**self.extra, "role": self.role, "content": self.content}


@dataclass(frozen=True)
class Turns:
    """The messages of a list, and its fields that nobody reads, as `messages[].id`."""

    messages: tuple[Message, ...]
    unread: frozenset[str] = frozenset()


def openai_turns(turns: list[object], name: str) -> Turns:
    """Turns of role and content. Raises RowError."""
    messages, unread = [], set()
    for place, turn in numbered(turns, name):
        _refuse(turn, place)
        role = one_of(ROLES, turn, "role", place)
        content = _content(turn, place, role in MAY_BE_EMPTY)
        others = {key: turn[key] for key in turn if key not in ("role", "content", *FLAGS)}
        # texts such as `name` or `reasoning_content` are for the template; the rest is metadata
        extra = {
            key: text_of(turn, key, place, may_be_empty=True)
            for key, value in others.items()
            if isinstance(value, str)
        }
        unread |= {f"{name}[].{key}" for key in others if key not in extra and is_given(turn[key])}
        messages.append(Message(role, content, _trained(turn, role, place), extra))
    return Turns(tuple(messages), frozenset(unread))


def sharegpt_turns(turns: list[object], name: str) -> Turns:
    """Turns of from and value. Raises RowError."""
    messages, unread = [], set()
    for place, turn in numbered(turns, name):
        _refuse(turn, place)
        role = SHAREGPT_ROLES[one_of(SHAREGPT_ROLES, turn, "from", place)]
        content = text_of(turn, "value", place, may_be_empty=role in MAY_BE_EMPTY)
        others = (key for key in turn if key not in ("from", "value", *FLAGS))
        unread |= {f"{name}[].{key}" for key in others if is_given(turn[key])}
        messages.append(Message(role, content, _trained(turn, role, place)))
    return Turns(tuple(messages), frozenset(unread))


def refuse_tools(row: Row, place: str = "") -> None:
    """Raise RowError where a row or turn asks for tools."""
    for name in TOOL_FIELDS:
        if row.get(name):
            raise RowError(f"{label(name, place)}: tool calling is not supported yet")


def _refuse(turn: Row, place: str) -> None:
    refuse_tools(turn, place)
    for name, reason in REFUSED.items():
        if is_given(turn.get(name)):
            raise RowError(f"{place}.{name}: {reason}")


def _content(turn: Row, place: str, may_be_empty: bool) -> str:
    """A string, or OpenAI's list of text parts."""
    parts = turn.get("content")
    if not isinstance(parts, list):
        return text_of(turn, "content", place, may_be_empty)
    texts = []
    for part_place, part in numbered(parts, f"{place}.content"):
        if (kind := part.get("type")) != "text":
            raise RowError(f"{part_place}.type: only text parts can be trained on, found {kind!r}")
        texts.append(text_of(part, "text", part_place, may_be_empty))
    return text_of({"content": "".join(texts)}, "content", place, may_be_empty)


def _trained(turn: Row, role: str, place: str) -> bool:
    """False where a flag makes the turn context only."""
    given = {name: turn[name] for name in FLAGS if turn.get(name) is not None}
    for name, value in given.items():
        if value not in (0, 1):  # true and false are equal to these
            raise RowError(f"{place}.{name}: only 0 and 1 are supported, found {value!r}")
        if value and role != "assistant" and name != "weight":  # OpenAI's is 1 unless set
            raise RowError(f"{place}.{name}: only the assistant's turns are trained on; remove it")
    return all(given.values())
