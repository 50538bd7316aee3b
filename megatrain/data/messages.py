"""Conversations: the turns of a row, in OpenAI's form and in ShareGPT's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatrain.data.fields import NO_IMAGES, Row, RowError, is_given, numbered, one_of, text_of
from megatrain.data.tools import calls_of, parsed_calls

ROLES = {role: role for role in ("system", "developer", "user", "assistant", "tool")}
ROLES |= {"function": "tool"}  # its former name
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "function_call": "assistant"}
SHAREGPT_ROLES |= dict.fromkeys(("observation", "function_response"), "tool")
SHAREGPT_ROLES |= {role: role for role in ("user", "assistant", "system", "tool")}
# An empty system prompt is a choice, an empty question or answer a mistake.
MAY_BE_EMPTY = ("system", "developer", "tool")
CALLS = ("tool_calls", "function_call")
# What trainers call the flag that makes a turn context only: OpenAI's, axolotl's two, ms-swift's.
FLAGS = ("weight", "train", "training", "loss")
# Fields of a turn that would change what is learnt, and are not read.
PARTS = "parts of a turn cannot be trained on alone; remove it"
REFUSED = {"train_detail": PARTS}


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
        role = ROLES[one_of(ROLES, turn, "role", place)]
        calls = calls_of(turn, place)
        if calls and role != "assistant":
            raise RowError(f"{place}.tool_calls: only the assistant's turns have calls")
        content = _content(turn, place, role in MAY_BE_EMPTY, calls != [])
        others = {key: turn[key] for key in turn if key not in ("role", "content", *FLAGS, *CALLS)}
        # texts such as `name` or `reasoning_content` are for the template; the rest is metadata
        extra: dict[str, Any] = {
            key: text_of(turn, key, place, may_be_empty=True)
            for key, value in others.items()
            if isinstance(value, str)
        }
        unread |= {f"{name}[].{key}" for key in others if key not in extra and is_given(turn[key])}
        unread |= _unread_of_parts(turn, f"{name}[].content[]")
        extra |= {"tool_calls": calls} if calls else {}
        messages.append(Message(role, content, _trained(turn, role, place), extra))
    return Turns(tuple(messages), frozenset(unread))


def sharegpt_turns(turns: list[object], name: str) -> Turns:
    """Turns of from and value. Raises RowError."""
    messages, unread = [], set()
    for place, turn in numbered(turns, name):
        _refuse(turn, place)
        theirs = one_of(SHAREGPT_ROLES, turn, "from", place)
        role = SHAREGPT_ROLES[theirs]
        content = text_of(turn, "value", place, may_be_empty=role in MAY_BE_EMPTY)
        extra: dict[str, Any] = {}
        if theirs == "function_call":
            content, extra = "", {"tool_calls": parsed_calls(content, f"{place}.value")}
        others = (key for key in turn if key not in ("from", "value", *FLAGS))
        unread |= {f"{name}[].{key}" for key in others if is_given(turn[key])}
        messages.append(Message(role, content, _trained(turn, role, place), extra))
    return Turns(tuple(messages), frozenset(unread))


def _refuse(turn: Row, place: str) -> None:
    for name, reason in REFUSED.items():
        if is_given(turn.get(name)):
            raise RowError(f"{place}.{name}: {reason}")


def _content(turn: Row, place: str, may_be_empty: bool, calls: bool) -> str:
    """A string, or OpenAI's list of text parts; empty where a turn has calls and no content."""
    parts = turn.get("content")
    if calls and not is_given(parts):
        return ""
    if not isinstance(parts, list):
        return text_of(turn, "content", place, may_be_empty)
    texts = []
    for part_place, part in numbered(parts, f"{place}.content"):
        if (kind := part.get("type")) != "text":
            why = NO_IMAGES if "image" in str(kind) else "only text parts can be trained on"
            raise RowError(f"{part_place}.type: {why}, found {kind!r}")
        for flag in (name for name in FLAGS if is_given(part.get(name))):
            raise RowError(f"{part_place}.{flag}: {PARTS}")
        texts.append(text_of(part, "text", part_place, may_be_empty))
    return text_of({"content": "".join(texts)}, "content", place, may_be_empty)


def _unread_of_parts(turn: Row, name: str) -> set[str]:
    """Fields of a content's text parts that nobody reads."""
    content = turn.get("content")
    parts = content if isinstance(content, list) else []
    return {
        f"{name}.{key}"
        for part in parts
        for key, value in part.items()
        if key not in ("type", "text") and is_given(value)
    }


def _trained(turn: Row, role: str, place: str) -> bool:
    """False where a flag makes the turn context only."""
    given = {name: turn[name] for name in FLAGS if turn.get(name) is not None}
    for name, value in given.items():
        if value not in (0, 1):  # true and false are equal to these
            raise RowError(f"{place}.{name}: only 0 and 1 are supported, found {value!r}")
        if value and role != "assistant" and name != "weight":  # OpenAI's is 1 unless set
            raise RowError(f"{place}.{name}: only the assistant's turns are trained on; remove it")
    return all(given.values())
