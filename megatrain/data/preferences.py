"""Rows with a judgement: two answers to one prompt, or an answer that is wanted or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from megatrain.data.conversations import exchange, from_alpaca, turns_of
from megatrain.data.fields import Row, RowError, filled_list, is_given, kind_of, text_of
from megatrain.data.messages import Message, Turns
from megatrain.data.samples import Chat, Judged, Pair

ANSWERS = ("chosen", "rejected")
LABELS = ("label", "kto_tag")
# 1 and 0 are equal to the first two
WANTED: dict[object, bool] = {True: True, False: False, "true": True, "false": False}
LARGEST = 3e38  # margin, of float32
# Columns that hold a prompt under another name, where none is under ours.
PROMPT_NAMES = ("question", "query", "input", "instruction")


def from_preference(row: Row) -> Pair:
    """A prompt and two answers, each a text or a list of messages. Raises RowError, as all here.

    A text beside two whole conversations is in both of these already.
    """
    if isinstance(row.get("prompt"), str) and all(map(_is_whole, map(row.get, ANSWERS))):
        return _of_conversations(row)
    return _of_prompt(row, "prompt")


def from_ranking(row: Row) -> Pair:
    """A conversation up to its last question, and two answers."""
    filled_list(row, "conversations")
    return _of_prompt(row, "conversations")


def from_alpaca_ranking(row: Row) -> Pair:
    chosen, rejected = (_last_alone(from_alpaca(row, name)) for name in ANSWERS)
    return _pair(row, chosen, rejected)


def from_implicit(row: Row) -> Pair:
    """Two texts or two conversations, whose common beginning is the prompt."""
    for name in (name for name in PROMPT_NAMES if is_given(row.get(name))):
        raise RowError(
            f"field {name!r}: looks like the prompt, which is looked for in a column 'prompt', or "
            f"where both answers begin alike; set data.columns: {{prompt: {name}}}"
        )
    kinds = [isinstance(row.get(name), str) for name in ANSWERS]
    if all(kinds):
        return _of_texts(row)
    if any(kinds):
        raise RowError("fields 'chosen' and 'rejected': expected two texts, or two lists of turns")
    return _of_conversations(row)


def judged(row: Row, chat: Chat, several: bool) -> Judged:
    """The conversation with the row's label. Raises RowError.

    several: the answer may be of several turns; else all but the last turn is context.
    """
    given = [name for name in LABELS if row.get(name) is not None]
    if not given:
        raise RowError(
            "field 'label' is missing: each answer needs a label, true where it is wanted and "
            "false where it is not; rows without are for method: sft"
        )
    if len(given) > 1:
        raise RowError("field 'kto_tag': 'label' says the same; keep one")
    label = value = row[given[0]]
    if isinstance(value, str):
        label = value.strip().lower()
    if not isinstance(label, str | int | float) or label not in WANTED:
        shown = repr(value)[:40] if isinstance(value, str | int | float) else kind_of(value)
        raise RowError(f"field {given[0]!r}: expected true or false, found {shown}")
    if chat.messages[-1].role != "assistant":
        raise RowError("the last turn is not the assistant's, so there is no answer to judge")
    return Judged(chat if several else _last_alone(chat), WANTED[label])


def _of_prompt(row: Row, name: str) -> Pair:
    asked = _turns(row, name, "user")
    plain = isinstance(row.get(name), str)
    chats = []
    for answer in ANSWERS:
        turns = _turns(row, answer, "assistant")
        _check(asked.messages, turns.messages, answer)
        texts = plain and isinstance(row.get(answer), str)
        literal = (text_of(row, name), text_of(row, answer)) if texts else None
        chats.append(exchange(row, asked, turns, literal))
    return _pair(row, *chats)


def _of_texts(row: Row) -> Pair:
    texts = [text_of(row, name) for name in ANSWERS]
    _refuse_equal(*texts)
    start = _shared(*texts)
    if texts[0][start] != texts[1][start] and texts[0][:start].endswith(" "):
        start -= 1  # a space belongs to the word behind it
    prompt = texts[0][:start]
    if not prompt.strip():
        raise RowError(
            "fields 'chosen' and 'rejected' do not begin alike, so there is no prompt in them; "
            "give it in a column 'prompt'"
        )
    chats = []
    for name, text in zip(ANSWERS, texts, strict=True):
        if not (answer := text[start:]).strip():
            raise RowError(f"field {name!r}: holds no answer behind the prompt")
        asked, turns = Message("user", prompt), Message("assistant", answer)
        chats.append(exchange(row, Turns((asked,)), Turns((turns,)), (prompt, answer)))
    return _pair(row, *chats)


def _of_conversations(row: Row) -> Pair:
    sides = [_turns(row, name, "assistant") for name in ANSWERS]
    chosen, rejected = (turns.messages for turns in sides)
    _refuse_equal(chosen, rejected)
    start = _shared(chosen, rejected)
    if not start:
        raise RowError(
            "fields 'chosen' and 'rejected' have no turn in common to begin with, so there is no "
            "prompt in them; give it in a column 'prompt'"
        )
    chats = []
    for name, turns in zip(ANSWERS, sides, strict=True):
        asked, answer = turns.messages[:start], turns.messages[start:]
        _check(asked, answer, name)
        chats.append(exchange(row, Turns(asked, turns.unread), Turns(answer)))
    return _pair(row, *chats)


def _pair(row: Row, chosen: Chat, rejected: Chat) -> Pair:
    _refuse_equal(chosen, rejected)
    margin = row.get("margin")
    if margin is None:
        return Pair(chosen, rejected)
    if type(margin) is not bool and isinstance(margin, int | float) and abs(margin) <= LARGEST:
        return Pair(chosen, rejected, float(margin))
    found = repr(margin) if isinstance(margin, float) else kind_of(margin)
    raise RowError(f"field 'margin': expected a finite number, found {found}")


def _refuse_equal(chosen: object, rejected: object) -> None:
    if chosen == rejected:
        raise RowError("fields 'chosen' and 'rejected' are equal: neither answer is better")


def _check(asked: Sequence[Message], answer: Sequence[Message], name: str) -> None:
    """An answer begins and ends with a turn of the assistant, behind another's turn."""
    if answer[0].role != "assistant":
        raise RowError(f"field {name!r}: its answer begins with a {answer[0].role} turn")
    if answer[-1].role != "assistant":
        raise RowError(f"field {name!r}: its last turn is a {answer[-1].role} turn, not an answer")
    if asked[-1].role == "assistant":
        raise RowError(f"field {name!r}: its answer follows an answer, not a question")


def _last_alone(chat: Chat) -> Chat:
    """With all but the last turn as context."""
    context = [replace(message, trained=False) for message in chat.messages[:-1]]
    return replace(chat, messages=(*context, chat.messages[-1]))


def _shared(one: Sequence[object], other: Sequence[object]) -> int:
    """Number of entries with which both begin; something is left of each."""
    most = min(len(one), len(other)) - 1
    return next((place for place in range(most) if one[place] != other[place]), most)


def _turns(row: Row, name: str, role: str) -> Turns:
    """A text, a turn or a list of turns."""
    value = row.get(name)
    if isinstance(value, Mapping):
        return turns_of([value], name)
    if isinstance(value, list):
        return turns_of(filled_list(row, name), name)
    return Turns((Message(role, text_of(row, name)),))


def _is_whole(value: object) -> bool:
    """Whether it is a list of turns that begins with another's than the assistant's."""
    if not (isinstance(value, list) and value and isinstance(value[0], Mapping)):
        return False
    return value[0].get("role", value[0].get("from")) in ("system", "user", "human", "developer")
