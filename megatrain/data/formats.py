"""Row formats: how a row of a data file becomes a sample.

A format is one function and one row of ROW_FORMATS, with every column that it reads and the kinds
of rows that it is for. A row with a column of MATTERS that its format does not read is refused;
other such columns are named once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from unicodedata import category, east_asian_width

from megatrain.data.samples import (
    IMAGES,
    JUDGED,
    KINDS,
    MEDIA,
    NO_IMAGES,
    PAIRS,
    PLAIN,
    Chat,
    Document,
    Message,
    Picture,
    Row,
    RowError,
    Sample,
    Text,
    filled_list,
    is_given,
    shared_length,
    text_value,
    tools_of,
    turns_of,
    type_name,
    with_images,
)

Chats = tuple[Chat, ...]
Messages = tuple[Message, ...]
# Without a chat template: the prompt of the Stanford Alpaca release, as base models know it.
ALPACA = (
    "Below is an instruction that describes a task{paired}. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n{input}### Response:\n"
)
ALPACA_PAIRED = ", paired with an input that provides further context"

SYSTEM = ("system", "system_prompt")
ABOUT_CHATS = (*SYSTEM, "chat_template_kwargs", "tools", "functions")
ABOUT_ALPACA = ("input", "history", *SYSTEM, "chat_template_kwargs")
# Variables of a template that are not a row's to set.
_OURS = (
    *("messages", "conversations", "tools", "chat_template", "add_generation_prompt"),
    *("return_assistant_tokens_mask", "continue_final_message"),
)


def chat_of(row: Row, turns: Messages, plain: tuple[str, str] | None = None) -> Chat:
    """The conversation with what the row's columns say about it. Raises RowError."""
    prompts = [name for name in SYSTEM if is_given(row.get(name))]
    system = tuple(Message("system", text_value(row, name)) for name in prompts)
    of_turns = ["a system turn"] if any(m.role == "system" for m in turns) else []
    if len(said := [*prompts, *of_turns]) > 1 and prompts:
        raise RowError(f"field {said[0]!r}: {said[1]} says the same; keep one system prompt")
    variables = row.get("chat_template_kwargs")
    variables = variables if is_given(variables) else {}
    if not isinstance(variables, Mapping):
        found = type_name(variables)
        raise RowError(f"field 'chat_template_kwargs': expected an object, found {found}")
    given = {str(name): value for name, value in variables.items() if value is not None}
    for name in (name for name in _OURS if name in given):
        raise RowError(f"chat_template_kwargs.{name}: cannot be set by a row")
    messages = (*system, *turns)
    tools = tools_of(row, bare="conversations" in row)
    plain = None if system or given or tools else plain
    return Chat(messages, plain, given, tools)


def from_turns(row: Row, name: str) -> Chats:
    """A list of turns. Raises RowError, as all of these."""
    return (chat_of(row, turns_of(filled_list(row, name), name)),)


def from_prompt_completion(row: Row) -> Chats:
    """Two texts, or two lists of messages."""
    plain = None
    if isinstance(row.get("prompt"), str) and isinstance(row.get("completion"), str):
        plain = (text_value(row, "prompt"), text_value(row, "completion"))
    asked, answer = _turns(row, "prompt", "user"), _turns(row, "completion", "assistant")
    return (exchange(row, asked, answer, plain),)


def exchange(row: Row, asked: Messages, answer: Messages, plain: tuple[str, str] | None) -> Chat:
    """A prompt, which is context only, and its answer; `plain` where both are texts."""
    context = (replace(turn, trained=False) for turn in asked)
    return replace(chat_of(row, (*context, *answer), plain), literal=plain is not None)


def from_alpaca(row: Row, answer: str = "output") -> Chats:
    """answer: the column that holds it."""
    instruction, output = text_value(row, "instruction"), text_value(row, answer)
    given = text_value(row, "input") if is_given(row.get("input")) else ""
    parts = {"paired": ALPACA_PAIRED, "input": f"### Input:\n{given}\n\n"} if given else {}
    prompt = ALPACA.format_map({"paired": "", "input": "", "instruction": instruction, **parts})
    asked = Message("user", f"{instruction}\n\n{given}" if given else instruction)
    earlier = _history(row)
    turns = (*earlier, asked, Message("assistant", output))
    return (chat_of(row, turns, None if earlier else (prompt, output)),)


def _history(row: Row) -> list[Message]:
    """The turns before an instruction: a list of (instruction, output)."""
    pairs = filled_list(row, "history") if is_given(row.get("history")) else []
    turns = []
    for number, pair in enumerate(pairs):
        place = f"history[{number}]"
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise RowError(f"{place}: expected a list of two texts, question and answer")
        sides = {"0": pair[0], "1": pair[1]}
        turns.append(Message("user", text_value(sides, "0", place)))
        turns.append(Message("assistant", text_value(sides, "1", place)))
    return turns


_ANSWERS = ("chosen", "rejected")
LABELS = ("label", "kto_tag")
# 1 and 0 are equal to the first two
WANTED: dict[object, bool] = {True: True, False: False, "true": True, "false": False}
_LARGEST = 3e38  # margin, of float32
# Columns that hold a prompt under another name, where none is under ours.
PROMPT_NAMES = ("messages", "conversation", "context", "question", "query", "input", "instruction")


def from_preference(row: Row) -> Chats:
    """A prompt and two answers, each a text or a list of messages. A text beside two whole
    conversations is in both of these already."""
    if isinstance(row.get("prompt"), str) and all(map(_is_whole, map(row.get, _ANSWERS))):
        return _of_conversations(row)
    return _of_prompt(row, "prompt")


def from_ranking(row: Row) -> Chats:
    """A conversation up to its last question, and two answers."""
    filled_list(row, "conversations")
    return _of_prompt(row, "conversations")


def from_implicit(row: Row) -> Chats:
    """Two texts or two conversations, whose common beginning is the prompt."""
    kinds = [isinstance(row.get(name), str) for name in _ANSWERS]
    if all(kinds):
        return _of_texts(row)
    if any(kinds):
        raise RowError("fields 'chosen' and 'rejected': expected two texts, or two lists of turns")
    return _of_conversations(row)


def _refuse_guess(row: Row) -> None:
    """Raise RowError where the prompt may be in a column of its own: any text or list beside two
    texts, which often begin alike by chance, and a column of a known name beside conversations."""
    texts = any(isinstance(row.get(name), str) for name in _ANSWERS)
    others = unread_columns(row, ROW_FORMATS["implicit_prompt"].reads(PAIRS))
    others = [name for name in others if isinstance(row[name], str | list)]
    named = [name for name in PROMPT_NAMES if name in others]
    for name in (*named, *others) if texts else named:
        raise RowError(
            f"field {name!r}: may hold the prompt, which is looked for in a column 'prompt'; set "
            f"data.columns: {{prompt: {name}}}, or data.format: implicit_prompt where what both "
            "answers begin with is the prompt"
        )


def judged(row: Row, chat: Chat, several: bool) -> Sample:
    """The conversation with the row's label. several: the answer may be of several turns; else all
    but the last turn is context. Raises RowError."""
    given = [name for name in LABELS if row.get(name) is not None]
    if not given:
        raise RowError(
            "field 'label' is missing: each answer needs a label, true where it is wanted and "
            "false where it is not; rows without are for method: sft"
        )
    if len(given) > 1:
        raise RowError("field 'kto_tag': 'label' says the same; keep one")
    value = row[given[0]]
    label = value.strip().lower() if isinstance(value, str) else value
    if not isinstance(label, str | int | float) or label not in WANTED:
        raise RowError(f"field {given[0]!r}: expected true or false, found {repr(value)[:40]}")
    if chat.messages[-1].role != "assistant":
        raise RowError("the last turn is not the assistant's, so there is no answer to judge")
    return Sample((chat if several else _last_alone(chat),), float(WANTED[label]))


def _of_prompt(row: Row, name: str) -> Chats:
    asked = _turns(row, name, "user")
    return _pair(row, [(asked, _turns(row, answer, "assistant")) for answer in _ANSWERS], name)


def _of_texts(row: Row) -> Chats:
    texts = [text_value(row, name) for name in _ANSWERS]
    _refuse_equal(*texts)
    # something is left of each
    found = start = shared_length(*(text[:-1] for text in texts))
    while start and any(_in_word(text[start - 1]) and _in_word(text[start]) for text in texts):
        start -= 1
    differ = start < found or texts[0][start] != texts[1][start]
    if differ and texts[0][:start].endswith(" "):
        start -= 1  # a space belongs to the word behind it
    prompt = texts[0][:start]
    if not prompt.strip():
        raise RowError(
            "fields 'chosen' and 'rejected' do not begin alike, so there is no prompt in them; "
            "give it in a column 'prompt'"
        )
    for name, text in zip(_ANSWERS, texts, strict=True):
        if not text[start:].strip():
            raise RowError(f"field {name!r}: holds no answer behind the prompt")
    sides = [((Message("user", prompt),), (Message("assistant", text[start:]),)) for text in texts]
    return _pair(row, sides, _ANSWERS[0])


def _of_conversations(row: Row) -> Chats:
    chosen, rejected = (_turns(row, name, "assistant") for name in _ANSWERS)
    _refuse_equal(chosen, rejected)
    if not (start := shared_length(chosen[:-1], rejected[:-1])):
        raise RowError(
            "fields 'chosen' and 'rejected' have no turn in common to begin with, so there is no "
            "prompt in them; give it in a column 'prompt'"
        )
    return _pair(row, [(side[:start], side[start:]) for side in (chosen, rejected)], _ANSWERS[0])


def _pair(row: Row, sides: Sequence[tuple[Messages, Messages]], prompt: str) -> Chats:
    """The pair of two (turns before it, answer). prompt: the column that has the turns before."""
    chats = []
    for name, (asked, answer) in zip(_ANSWERS, sides, strict=True):
        _check(asked, answer, name)
        texts = isinstance(row[prompt], str) and isinstance(row[name], str)
        literal = (asked[0].content, answer[0].content) if texts else None
        chats.append(exchange(row, asked, answer, literal))
    return tuple(chats)


def _margin_of(row: Row) -> float:
    """The number by which the chosen answer is better; nan where nobody says."""
    margin = row.get("margin")
    if margin is None:
        return math.nan
    if type(margin) is not bool and isinstance(margin, int | float) and abs(margin) <= _LARGEST:
        return float(margin)
    raise RowError(f"field 'margin': expected a finite number, found {repr(margin)[:40]}")


def _refuse_equal(chosen: object, rejected: object) -> None:
    if chosen == rejected:
        raise RowError("fields 'chosen' and 'rejected' are equal: neither answer is better")


def _check(asked: Messages, answer: Messages, name: str) -> None:
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


def _turns(row: Row, name: str, role: str) -> Messages:
    """A text, a turn or a list of turns."""
    value = row.get(name)
    if isinstance(value, Mapping):
        return turns_of([value], name)
    if isinstance(value, list):
        return turns_of(filled_list(row, name), name)
    return (Message(role, text_value(row, name)),)


def _in_word(letter: str) -> bool:
    """True for letters, marks and digits, but for those of scripts without spaces."""
    return category(letter)[0] in "LMN" and east_asian_width(letter) not in "WF"


def _is_whole(value: object) -> bool:
    """True for a list of turns that does not begin with the assistant's."""
    if not (isinstance(value, list) and value and isinstance(value[0], Mapping)):
        return False
    return value[0].get("role", value[0].get("from")) in ("system", "user", "human", "developer")


_OTHERS = (KINDS[PAIRS], KINDS[JUDGED])
_PAIRS, _JUDGED = (f"{kind.what} are for method: {kind.methods}" for kind in _OTHERS)
_NOT_SEEN = "videos and sounds are not read; leave the row out, or name its frames as images"
_NO_PLACE = "a row of this format has no place for it"
# Columns that change what a row teaches, and why a format that does not read one refuses the row.
MATTERS = {
    **dict.fromkeys(_ANSWERS, _PAIRS),
    **dict.fromkeys(LABELS, _JUDGED),
    "score": "grades of single answers are not read; make pairs of these, for method: reward",
    "margin": "margins between two answers are for method: reward",
    "weight": "rows have no weights; leave the row out, or give its turns a weight of 0",
    **dict.fromkeys(MEDIA, _NOT_SEEN),
    **dict.fromkeys(IMAGES, NO_IMAGES),
    **dict.fromkeys(("system", "system_prompt", "history", "chat_template_kwargs"), _NO_PLACE),
    **dict.fromkeys(("tools", "functions", "tool_calls", "function_call"), _NO_PLACE),
}
# What they say of a document is no instruction for pre-training on it.
ABOUT_DOCUMENTS = ("label", "score", "weight")
# Columns that all formats of a kind read.
OF_KIND = {PLAIN: (), PAIRS: (*_ANSWERS, "margin"), JUDGED: LABELS}


@dataclass(frozen=True)
class RowFormat:
    """A row format: found by its `columns`, read by `convert`; `also` are further columns that it
    reads. several: what it trains on may be several turns, where only an answer may be."""

    columns: tuple[str, ...]
    convert: Callable[[Row], tuple[Text, ...]]
    also: tuple[str, ...] = ABOUT_CHATS
    kinds: tuple[str, ...] = (PLAIN, JUDGED)
    several: bool = False

    def reads(self, kind: str = PLAIN) -> tuple[str, ...]:
        """All columns that it reads for a kind of rows."""
        return self.columns + self.also + OF_KIND[kind]


ROW_FORMATS = {
    "messages": RowFormat(("messages",), partial(from_turns, name="messages")),
    "sharegpt": RowFormat(("conversations",), partial(from_turns, name="conversations")),
    "prompt_completion": RowFormat(("prompt", "completion"), from_prompt_completion, several=True),
    "alpaca": RowFormat(("instruction", "output"), from_alpaca, ABOUT_ALPACA),
    "text": RowFormat(
        ("text",), lambda row: (Document(text_value(row, "text")),), also=(), kinds=(PLAIN,)
    ),
    "preference": RowFormat(("prompt", *_ANSWERS), from_preference, kinds=(PAIRS,)),
    "ranking": RowFormat(("conversations", *_ANSWERS), from_ranking, kinds=(PAIRS,)),
    "alpaca_ranking": RowFormat(
        ("instruction", *_ANSWERS),
        lambda row: tuple(_last_alone(*from_alpaca(row, name)) for name in _ANSWERS),
        ABOUT_ALPACA,
        kinds=(PAIRS,),
    ),
    "implicit_prompt": RowFormat(_ANSWERS, from_implicit, kinds=(PAIRS,)),
}


def formats_of(kind: str) -> dict[str, RowFormat]:
    """The formats of a kind of rows by name."""
    return {name: form for name, form in ROW_FORMATS.items() if kind in form.kinds}


def detect_format(row: object, kind: str = PLAIN) -> str | None:
    """The name of the first format whose columns the row has (a null counts as absent), or None."""
    if not isinstance(row, Mapping):
        return None
    present = {key for key, value in row.items() if value is not None}
    forms = formats_of(kind).items()
    return next((name for name, form in forms if present.issuperset(form.columns)), None)


def convert_row(
    name: str,
    row: object,
    *,
    kind: str = PLAIN,
    pretrain: bool = False,
    found: bool = True,
    find: Callable[[object], Picture] | None = None,
) -> Sample:
    """A checked sample of a row of this format. pretrain: documents are trained on whatever their
    labels and scores. found: by the row's columns; else the user named it. find: opens images,
    where they are read. Raises RowError, also for a column of MATTERS that it does not read."""
    if not isinstance(row, Mapping):
        raise RowError(f"expected an object, found {type_name(row)}")
    form, about = ROW_FORMATS[name], ABOUT_DOCUMENTS if pretrain and name == "text" else ()
    seen = IMAGES if find is not None and name != "text" else ()
    _refuse_unread(row, (*form.reads(kind), *about, *seen))
    if found and name == "implicit_prompt":
        _refuse_guess(row)
    texts, value = form.convert(row), math.nan
    if kind == PAIRS:
        _refuse_equal(*texts)
        value = _margin_of(row)
    texts = tuple(_seeing(text, row, find) for text in texts)
    if kind == JUDGED:
        assert isinstance(texts[0], Chat), "no format of judged rows makes anything else"
        return judged(row, texts[0], form.several)
    return Sample(texts, value)


def _seeing(text: Text, row: Row, find: Callable[[object], Picture] | None) -> Text:
    """A conversation with its pictures. Raises RowError, also where images are not read."""
    if isinstance(text, Document):
        return text
    if find is not None:
        return with_images(text, row, find)
    for place in (n for n, turn in enumerate(text.messages) if turn.images):
        raise RowError(f"messages[{place}]: {NO_IMAGES}")
    return text


def renamed(row: object, columns: Mapping[str, str]) -> object:
    """The row with columns of other names (values of `columns`) under ours. Raises RowError."""
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


_IDS = ("input_ids", "token_ids", "prompt_input_ids", "chosen_input_ids", "tokens")


def unknown_format(row: object, kind: str = PLAIN) -> RowError:
    """The error of a row that no format of a kind fits."""
    if not isinstance(row, Mapping):
        return RowError(f"expected an object, found {type_name(row)}")
    try:
        _refuse_unread(row, (*ABOUT_CHATS, *OF_KIND[kind]))
    except RowError as error:
        return error
    absent = [name for name in _ANSWERS if row.get(name) is None]
    if kind == PAIRS and (len(absent) == 1 or detect_format(row) is not None):
        return RowError(
            f"field {absent[0]!r} is missing: a row needs two answers, 'chosen' and 'rejected'; "
            f"{KINDS[PLAIN].what} are for method: {KINDS[PLAIN].methods}"
        )
    if (ids := next((name for name in _IDS if is_given(row.get(name))), None)) is not None:
        return RowError(f"field {ids!r}: token ids are not read; give the texts that they are of")
    label = (LABELS[0],) if kind == JUDGED else ()
    wanted = "; ".join(
        f"{name}: {' + '.join(form.columns + label)}" for name, form in formats_of(kind).items()
    )
    found = ", ".join(map(str, list(row)[:12])) or "none"
    return RowError(
        f"no known row format has the columns found ({found}); known formats are {wanted}; columns "
        "of other names are given as data.columns: {prompt: question}"
    )


def _refuse_unread(row: Row, read: Sequence[str]) -> None:
    for name, reason in MATTERS.items():
        if name not in read and is_given(row.get(name)):
            raise RowError(f"field {name!r}: {reason}")
