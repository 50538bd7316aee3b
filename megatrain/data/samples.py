"""Samples, made of rows: a conversation, plain text, a pair of answers, or a judged answer.

Each method trains one kind of row."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from megatrain.errors import DataError
from megatrain.methods import METHODS

Row = Mapping[str, object]
ReadJson = Callable[[Any], object]
_PROPERTIES = ("properties",)
NO_IMAGES = "images are not read (model.images: true reads them, where the model sees)"
MARK = "\ufffc"  # an image in a text
IMAGES = ("images", "image")  # columns
MEDIA = (*IMAGES, "videos", "video", "audios", "audio")
IMAGE_PARTS = ("image", "image_url", "input_image")
IMAGE_KEYS = ("image", "image_url", "url", "path", "bytes")
NO_IMAGE = object()


class Picture(NamedTuple):
    """An image of a row: its file, when that was written (ns), the SHA-256 of its bytes, and its
    size in pixels as it is seen, after the rotation that a camera has noted."""

    path: str
    written: int
    sha256: str
    width: int
    height: int


class RowError(DataError):
    """A row cannot be trained on. The message says why; the caller adds file and line."""


def json_value(text: str) -> object:
    """The value that JSON text means. Raises ValueError, also for an object with a key twice, of
    which one would be lost."""
    return json.loads(text, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} is twice in one object; keep one")
    return found


def digest_of(data: bytes | str, size: int = 16) -> str:
    """A hash of `size` bytes, in hexadecimal."""
    data = data.encode() if isinstance(data, str) else data
    return hashlib.blake2b(data, digest_size=size).hexdigest()


def name_for(parts: Mapping[str, object]) -> str:
    """A name for a result that is kept: a hash of everything that it follows from, by name."""
    return digest_of(json.dumps(parts, sort_keys=True, default=str))


def is_given(value: object) -> bool:
    """False for a null and for an empty text, list or object, which say nothing."""
    return bool(value) if isinstance(value, str | list | tuple | dict) else value is not None


def without_nulls(value: object, places: Any = None, read: ReadJson = lambda one: one) -> object:
    """The value without the fields that are null, at any depth, but those of JSON columns. Arrow
    gives every object in a column the fields of all, which templates would render. places: of JSON,
    whose nulls are data (see `files.json_in`); read: makes a value of its text."""
    if isinstance(value, list):
        return [without_nulls(one, places, read) for one in value]
    if places is True or not isinstance(value, dict):
        return read(value) if places is True and value is not None else value
    of, given = places or {}, {key: one for key, one in value.items() if one is not None}
    return {key: without_nulls(one, of.get(key), read) for key, one in given.items()}


def unpadded(row: object) -> object:
    """A row of JSON or Python, without the nulls that it has from Arrow: all objects of a list then
    have the same fields. Other nulls are data."""
    objects: dict[tuple[str, ...], list[dict[str, object]]] = {}
    left: list[tuple[tuple[str, ...], object]] = [((), row)]
    for path, value in left:  # which grows
        if isinstance(value, dict):
            objects.setdefault(path, []).append(value)
            left += [((*path, key), one) for key, one in value.items()]
        elif isinstance(value, list):
            left += [(path, one) for one in value]
    alike = all(list(one) == list(same[0]) for same in objects.values() for one in same)
    # no tool has a property that is null
    several = (same for path, same in objects.items() if len(same) > 1 or path[-1:] == _PROPERTIES)
    padded = alike and any(None in one.values() for same in several for one in same)
    return without_nulls(row) if padded else row


def shared_length(one: Sequence[object], other: Sequence[object]) -> int:
    """Number of entries, such as characters, with which both begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def label(name: str, place: str) -> str:
    """A field as messages name it. place: of the turn that it is in, or ""."""
    return f"{place}.{name}" if place else f"field {name!r}"


def text_value(row: Row, name: str, place: str = "", may_be_empty: bool = False) -> str:
    """The field's text. Raises RowError."""
    where, value = label(name, place), row.get(name)
    if value is None:
        raise RowError(f"{where} is missing")
    if not isinstance(value, str):
        raise RowError(f"{where}: expected text, found {type_name(value)}")
    if not may_be_empty and not value.strip():
        raise RowError(f"{where} is empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
        raise RowError(f"{where}: character {error.start} is half of a surrogate pair") from None
    return value


def filled_list(row: Row, name: str) -> list[object]:
    """The field's list of at least one entry. Raises RowError."""
    value = row.get(name)
    if value is None:
        raise RowError(f"field {name!r} is missing")
    if not isinstance(value, list):
        raise RowError(f"field {name!r}: expected a list, found {type_name(value)}")
    if not value:
        raise RowError(f"field {name!r} is empty")
    return value


def _numbered(entries: Iterable[object], name: str) -> Iterable[tuple[str, Row]]:
    """(place, entry) of a list of objects. Raises RowError for an entry of another type."""
    for number, entry in enumerate(entries):
        place = f"{name}[{number}]"
        if not isinstance(entry, Mapping):
            raise RowError(f"{place}: expected an object, found {type_name(entry)}")
        yield place, entry


def one_of(known: Collection[str], row: Row, name: str, place: str) -> str:
    """The field's text, which must be one of these. Raises RowError."""
    found = text_value(row, name, place)
    if found not in known:
        raise RowError(f"{place}.{name}: unknown role {found!r}; known are {', '.join(known)}")
    return found


_KINDS = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
_KINDS |= {int: "a number", float: "a number"}


def type_name(value: object) -> str:
    """A value's type, as data files name it."""
    return _KINDS.get(type(value), type(value).__name__)


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
_PARTS = "parts of a turn cannot be trained on alone; remove it"


@dataclass(frozen=True)
class Message:
    """One turn."""

    role: str
    content: str
    trained: bool = True  # False for an assistant's turn that is context only
    extra: Mapping[str, Any] = field(default_factory=dict)  # for the template, too
    # the image of each MARK in the content, as the row names it; None: the row's next one
    images: tuple[Any, ...] = ()
    unread: tuple[str, ...] = field(default=(), compare=False)  # its fields, as `messages[].id`

    @property
    def texts(self) -> list[str]:
        """Texts before, between and behind its images."""
        return self.content.split(MARK)


def turns_of(turns: list[object], name: str) -> tuple[Message, ...]:
    """The turns of a list: of from and value where the first has a `from` and no role, else of role
    and content. Raises RowError."""
    messages = []
    first = turns[0] if isinstance(turns[0], Mapping) else {}
    read = _sharegpt_turn if "from" in first and "role" not in first else _openai_turn
    for place, turn in _numbered(turns, name):
        message, others = read(turn, place)
        messages.append(replace(message, unread=tuple(f"{name}[].{key}" for key in others)))
    return tuple(messages)


def _openai_turn(turn: Row, place: str) -> tuple[Message, list[str]]:
    """The message of a turn, and the names of its fields that nobody reads. Raises RowError."""
    role = ROLES[one_of(ROLES, turn, "role", place)]
    called = next((name for name in reversed(CALLS) if is_given(turn.get(name))), None)
    calls = [] if called is None else parsed_calls(turn[called], label(called, place))
    if calls and role != "assistant":
        raise RowError(f"{place}.tool_calls: only the assistant's turns have calls")
    content, images, unread = _content(turn, place, role in MAY_BE_EMPTY, calls != [])
    others = [key for key in turn if key not in ("role", "content", *FLAGS, *CALLS)]
    # texts such as `name` or `reasoning_content` are for the template; the rest is metadata
    texts = [key for key in others if isinstance(turn[key], str)]
    extra: dict[str, Any] = {key: text_value(turn, key, place, may_be_empty=True) for key in texts}
    unread += [key for key in others if key not in extra and is_given(turn[key])]
    extra |= {"tool_calls": calls} if calls else {}
    return Message(role, content, _trained(turn, role, place), extra, images), unread


def _sharegpt_turn(turn: Row, place: str) -> tuple[Message, list[str]]:
    """As `_openai_turn`."""
    theirs = one_of(SHAREGPT_ROLES, turn, "from", place)
    role = SHAREGPT_ROLES[theirs]
    content = text_value(turn, "value", place, may_be_empty=role in MAY_BE_EMPTY)
    extra: dict[str, Any] = {}
    if theirs == "function_call":
        content, extra = "", {"tool_calls": parsed_calls(content, f"{place}.value")}
    message = Message(role, content, _trained(turn, role, place), extra)
    read = ("from", "value", *FLAGS)
    return message, [key for key in turn if key not in read and is_given(turn[key])]


def _content(
    turn: Row, place: str, may_be_empty: bool, calls: bool
) -> tuple[str, tuple[Any, ...], list[str]]:
    """A string, or the texts of OpenAI's list of parts; the images among these, and their fields
    that nobody reads. Empty where a turn has calls and no content."""
    parts = turn.get("content")
    if calls and not is_given(parts):
        return "", (), []
    if not isinstance(parts, list):
        return text_value(turn, "content", place, may_be_empty), (), []
    texts, images, unread = list[str](), list[Any](), list[str]()
    for part_place, part in _numbered(parts, f"{place}.content"):
        kind = part.get("type")
        read = ("type", *(IMAGE_KEYS if kind in IMAGE_PARTS else ("text",)))
        unread += [f"content[].{key}" for key in part if key not in read and is_given(part[key])]
        if kind in IMAGE_PARTS:
            named = {key: part[key] for key in IMAGE_KEYS if part.get(key) is not None}
            if len(named.keys() - {"path", "bytes"}) > 1:
                raise RowError(f"{part_place}: names an image by {' and '.join(named)}; keep one")
            texts.append(MARK)
            images.append(named or None)
            continue
        if kind != "text":
            reason = f"only texts and images are read, found {kind!r}; leave the row out"
            raise RowError(f"{part_place}.type: {reason}")
        for flag in (name for name in FLAGS if is_given(part.get(name))):
            raise RowError(f"{part_place}.{flag}: {_PARTS}")
        texts.append(text_value(part, "text", part_place, may_be_empty))
    text = text_value({"content": "".join(texts)}, "content", place, may_be_empty)
    return text, tuple(images), unread


def _trained(turn: Row, role: str, place: str) -> bool:
    """False where a flag makes the turn context only."""
    if is_given(turn.get("train_detail")):
        raise RowError(f"{place}.train_detail: {_PARTS}")
    given = {name: turn[name] for name in FLAGS if turn.get(name) is not None}
    for name, value in given.items():
        if value not in (0, 1):  # true and false are equal to these
            raise RowError(f"{place}.{name}: only 0 and 1 are supported, found {value!r}")
        if value and role != "assistant" and name != "weight":  # OpenAI's is 1 unless set
            raise RowError(f"{place}.{name}: only the assistant's turns are trained on; remove it")
    return all(given.values())


Tool = Mapping[str, Any]


def tools_of(row: Row, bare: bool = False) -> tuple[Tool, ...]:
    """The row's tools: a list of objects or JSON text of one. bare: wrap functions that are given
    without `type`, as those of the former field `functions`. Raises RowError."""
    given = [name for name in ("tools", "functions") if is_given(row.get(name))]
    if not given:
        return ()
    if len(given) > 1:
        raise RowError("field 'functions': 'tools' says the same; keep one")
    (name,) = given
    tools = _objects(row[name], f"field {name!r}")
    if bare or name == "functions":
        tools = [tool if "function" in tool else _function(tool) for tool in tools]
    for number, tool in enumerate(tools):
        function = tool.get("function", tool)
        if not isinstance(function, Mapping):
            raise RowError(f"{name}[{number}].function: expected an object")
        text_value(function, "name", f"{name}[{number}]")
    return tuple(tools)


def parsed_calls(value: object, place: str) -> list[dict[str, Any]]:
    """Calls, or one call, as objects or JSON text, with or without a `function` around name and
    arguments. Raises RowError."""
    calls = []
    for number, call in enumerate(_objects(value, place)):
        where = f"{place}[{number}]"
        wrapped = call if "function" in call else _function(call)
        function = wrapped["function"]
        if not isinstance(function, Mapping):
            raise RowError(f"{where}.function: expected an object, found {type_name(function)}")
        name = text_value(function, "name", where)
        given = function.get("arguments")
        if not is_given(given) or (isinstance(given, str) and not given.strip()):
            given = {}
        arguments = _parsed(given, f"{where}.arguments")
        if not isinstance(arguments, Mapping):
            found = f"an object or JSON text of one, found {type_name(arguments)}"
            raise RowError(f"{where}.arguments: expected {found}")
        kind = wrapped.get("type") or "function"
        function = {**function, "name": name, "arguments": dict(arguments)}
        calls.append({**wrapped, "type": kind, "function": function})
    return calls


def schema_texts(value: object) -> Iterator[str]:
    """Every text in nested objects and lists, keys left out."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for entry in value.values() if isinstance(value, Mapping) else value:
            yield from schema_texts(entry)


def _function(function: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": dict(function)}


def _objects(value: object, place: str) -> list[Mapping[str, Any]]:
    found = _parsed(value, place)
    entries: list[Any] = [*found] if isinstance(found, list | tuple) else [found]
    for entry in entries:
        if not isinstance(entry, Mapping):
            raise RowError(f"{place}: expected a list of objects, found {type_name(entry)}")
    return entries


def _parsed(value: object, place: str) -> object:
    """The value that JSON text means; any other as it is."""
    try:
        return json_value(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise RowError(f"{place}: not JSON: {error}") from None


IN_TEXT = re.compile(f"<image>|{MARK}")  # LLaVA's and ShareGPT's, and ours


def with_images(chat: Chat, row: Row, find: Callable[[object], Picture]) -> Chat:
    """The conversation with the pictures of its marks: of a turn's parts, or `<image>` in its texts
    for the next of the row's `images`. Without marks those are in front of the first question, as
    in TRL. find: opens what a row names. Raises RowError."""
    given = [row[name] for name in IMAGES if is_given(row.get(name))]
    if len(given) > 1:
        raise RowError("field 'image': 'images' says the same; keep one")
    left = [one for some in given for one in (some if isinstance(some, list | tuple) else [some])]
    turns, found = list[Message](), list[Picture]()
    messages, count = list(chat.messages), len(left)
    marked = any(turn.images or (left and IN_TEXT.search(turn.content)) for turn in messages)
    if left and not marked:
        first = next((n for n, turn in enumerate(messages) if turn.role == "user"), 0)
        asked = replace(messages[first], content=MARK * count + messages[first].content)
        messages[first] = replace(asked, images=(None,) * count)
    for number, turn in enumerate(messages):
        own = iter(turn.images)
        texts = IN_TEXT.split(turn.content) if count else turn.texts
        for mark in IN_TEXT.findall(turn.content) if count else MARK * (len(texts) - 1):
            image = next(own, NO_IMAGE) if mark == MARK else None
            if image is NO_IMAGE:
                raise RowError(f"messages[{number}]: holds U+FFFC, which stands for an image here")
            if image is None and not left:
                raise RowError(f"the conversation has more marks than the row's {count} images")
            found.append(find(left.pop(0) if image is None else image))
        turns.append(replace(turn, content=MARK.join(texts)))
    if left:
        raise RowError(f"{len(left)} of the row's {count} images have no mark in the conversation")
    if not found:
        return chat
    return replace(chat, messages=tuple(turns), pictures=tuple(found), plain=None, literal=False)


def pictures_in(turns: Turns) -> list[Picture]:
    """All pictures of turns, in order."""
    return [one for turn in turns for one in turn.get("pictures", ())]


def names_images(row: object) -> bool:
    """True if a row has images in a column or among the parts of a turn."""
    if not isinstance(row, Mapping):
        return False
    turns = [turn for value in row.values() if isinstance(value, list) for turn in value]
    contents = [turn.get("content") for turn in turns if isinstance(turn, Mapping)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    of_parts = (isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS for part in parts)
    return any(is_given(row.get(name)) for name in IMAGES) or any(of_parts)


Turns = Sequence[dict[str, Any]]
MANY = 1_000  # each is answered token by token


def read_prompts(name: str) -> list[Turns]:
    """The turns of each prompt of a file, of which the last is the user's: `prompt` or `messages`
    of each line of a .jsonl file, else the line itself. Raises DataError."""
    path, found = Path(name), list[Turns]()
    try:
        lines = path.read_text("utf-8").splitlines()
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; it holds one prompt a line") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as text: {error}") from None
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                of_json = path.suffix in (".jsonl", ".json")
                found.append(asked_in(json_value(line) if of_json else {"prompt": line}))
        except (ValueError, RowError) as error:
            raise DataError(f"{path}:{number}: {error}") from None
    if not 0 < len(found) <= MANY:
        raise DataError(f"{path}: holds {len(found):,} prompts; write one a line, {MANY:,} at most")
    return found


def asked_in(row: object) -> Turns:
    """The turns of a row that asks: of its `messages`, or one of its `prompt`. Raises RowError."""
    if not isinstance(row, Mapping):
        raise RowError(f"expected an object, found {type_name(row)}")
    if row.get("messages") is None:
        return [{"role": "user", "content": text_value(row, "prompt")}]
    turns = turns_of(filled_list(row, "messages"), "messages")
    if any(turn.images for turn in turns):
        raise RowError("images in prompts are not read; ask in text")
    if turns[-1].role == "assistant":
        raise RowError("ends with an answer; the last turn is the one to answer")
    return [{**turn.extra, "role": turn.role, "content": turn.content} for turn in turns]


PLAIN, PAIRS, JUDGED, PROMPTS = "plain", "pairs", "judged", "prompts"


@dataclass(frozen=True)
class _Kind:
    """A kind of row: its number of sequences, of which the first are trained on; the methods that
    take it, and its rows, as messages name them."""

    sides: int
    trained: int
    methods: str
    what: str


def _methods(kind: str) -> str:
    names = [
        name
        for name, method in METHODS.items()
        if method.kind == kind and not method.whole_documents
    ]
    return " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


KINDS = {
    PLAIN: _Kind(1, 1, _methods(PLAIN), "rows of one answer"),
    PAIRS: _Kind(2, 2, _methods(PAIRS), "two answers, of which one is better,"),
    JUDGED: _Kind(2, 1, _methods(JUDGED), "answers that are marked as wanted or unwanted"),
    PROMPTS: _Kind(1, 1, _methods(PROMPTS), "prompts"),
}


@dataclass(frozen=True)
class Chat:
    """A conversation."""

    messages: tuple[Message, ...]
    plain: tuple[str, str] | None = None  # (prompt, completion) for want of a chat template
    variables: Mapping[str, Any] = field(default_factory=dict)  # of the template, by the row
    tools: tuple[Tool, ...] = ()  # that the model may call
    pictures: tuple[Picture, ...] = ()  # of all MARKs in its turns
    literal: bool = False  # the row has two texts, which mean themselves rather than two turns

    @property
    def unread(self) -> set[str]:
        """Fields of turns that nobody reads."""
        return {name for message in self.messages for name in message.unread}


@dataclass(frozen=True)
class Document:
    """Plain text. `begins` and `ends` are False where it is a piece of a longer document, of which
    the characters `before` and `after` it are given."""

    text: str
    begins: bool = True
    ends: bool = True
    before: str = ""
    after: str = ""


Text = Chat | Document


@dataclass(frozen=True)
class Sample:
    """The texts of a row, of a pair the chosen answer's and the rejected one's, and the number that
    a loss takes beside their tokens: the margin of a pair, 1 or 0 of a judged answer; nan: none.
    """

    texts: tuple[Text, ...]
    value: float = math.nan
