"""Row formats: how a row of a data file becomes a sample.

A format is one function and one row of FORMATS, with every column that it reads and the kinds of
rows that it is for. A row with a column of MATTERS that its format does not read is refused; other
such columns are named once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megatrain.data.conversations import (
    ABOUT_ALPACA,
    ABOUT_CHATS,
    from_alpaca,
    from_messages,
    from_prompt_completion,
    from_sharegpt,
)
from megatrain.data.fields import NO_IMAGES, Row, RowError, is_given, kind_of, text_of
from megatrain.data.preferences import (
    ANSWERS,
    LABELS,
    from_alpaca_ranking,
    from_implicit,
    from_preference,
    from_ranking,
    judged,
)
from megatrain.data.samples import JUDGED, KINDS, PAIRS, PLAIN, Chat, Document, Sample

_PAIRS, _JUDGED = (
    f"{KINDS[kind].what} are for method: {KINDS[kind].methods}" for kind in (PAIRS, JUDGED)
)
_GRADED = "grades of single answers are not read; make pairs of these, for method: reward"
_MARGIN = "margins between two answers are for method: reward"
_NOT_TEXT = "only text can be trained on"
_NO_PLACE = "a row of this format has no place for it"
# Columns that change what a row teaches, and why a format that does not read one refuses the row.
MATTERS = {
    **dict.fromkeys(ANSWERS, _PAIRS),
    **dict.fromkeys(LABELS, _JUDGED),
    "score": _GRADED,
    "margin": _MARGIN,
    "weight": "rows have no weights; leave the row out, or give its turns a weight of 0",
    **dict.fromkeys(("images", "image"), NO_IMAGES),
    **dict.fromkeys(("videos", "video", "audios", "audio"), _NOT_TEXT),
    **dict.fromkeys(("system", "system_prompt", "history", "chat_template_kwargs"), _NO_PLACE),
    **dict.fromkeys(("tools", "functions", "tool_calls", "function_call"), _NO_PLACE),
}
# What they say of a document is no instruction for pre-training on it.
ABOUT_DOCUMENTS = ("label", "score", "weight")
# Columns that all formats of a kind read.
OF_KIND = {PLAIN: (), PAIRS: (*ANSWERS, "margin"), JUDGED: LABELS}


@dataclass(frozen=True)
class RowFormat:
    """A row format: found by its `columns`, read by `convert`, which raises RowError.

    Attributes:
        also: further columns that it reads.
        kinds: of rows that it makes.
        several: what it trains on may be several turns, where only an answer may be.
    """

    columns: tuple[str, ...]
    convert: Callable[[Row], Sample]
    also: tuple[str, ...] = ABOUT_CHATS
    kinds: tuple[str, ...] = (PLAIN, JUDGED)
    several: bool = False

    def reads(self, kind: str = PLAIN) -> tuple[str, ...]:
        """All columns that it reads for a kind of rows."""
        return self.columns + self.also + OF_KIND[kind]


FORMATS = {
    "messages": RowFormat(("messages",), from_messages),
    "sharegpt": RowFormat(("conversations",), from_sharegpt),
    "prompt_completion": RowFormat(("prompt", "completion"), from_prompt_completion, several=True),
    "alpaca": RowFormat(("instruction", "output"), from_alpaca, ABOUT_ALPACA),
    "text": RowFormat(
        ("text",), lambda row: Document(text_of(row, "text")), also=(), kinds=(PLAIN,)
    ),
    "preference": RowFormat(("prompt", *ANSWERS), from_preference, kinds=(PAIRS,)),
    "ranking": RowFormat(("conversations", *ANSWERS), from_ranking, kinds=(PAIRS,)),
    "alpaca_ranking": RowFormat(
        ("instruction", *ANSWERS), from_alpaca_ranking, ABOUT_ALPACA, kinds=(PAIRS,)
    ),
    "implicit_prompt": RowFormat(ANSWERS, from_implicit, kinds=(PAIRS,)),
}


def formats_of(kind: str) -> dict[str, RowFormat]:
    """The formats of a kind of rows by name."""
    return {name: form for name, form in FORMATS.items() if kind in form.kinds}


def named_format(name: str, kind: str) -> RowFormat:
    """The format of this name. Raises RowError where it makes rows of another kind."""
    known = formats_of(kind)
    if name not in known:
        raise RowError(
            f"format {name!r} is not for method: {KINDS[kind].methods}; use one of "
            f"{', '.join(known)}"
        )
    return known[name]


def detect_format(row: object, kind: str = PLAIN) -> RowFormat | None:
    """The first format whose columns the row has (a null counts as absent), or None."""
    if not isinstance(row, Mapping):
        return None
    present = {key for key, value in row.items() if value is not None}
    forms = formats_of(kind).values()
    return next((form for form in forms if present.issuperset(form.columns)), None)


def detected_name(row: object, kind: str = PLAIN) -> str:
    """The name of `detect_format`'s. Raises RowError where no format fits."""
    form = detect_format(row, kind)
    if form is None:
        raise unknown_format(row, kind)
    return next(name for name, known in FORMATS.items() if known is form)


def convert_row(
    form: RowFormat, row: object, *, kind: str = PLAIN, pretrain: bool = False
) -> Sample:
    """A checked sample.

    pretrain: documents are trained on whatever their labels and scores.

    Raises RowError for what is missing, empty, of the wrong type or not supported, and for a column
    of MATTERS that the format does not read.
    """
    if not isinstance(row, Mapping):
        raise RowError(f"expected an object, found {kind_of(row)}")
    about = ABOUT_DOCUMENTS if pretrain and form is FORMATS["text"] else ()
    _refuse_unread(row, (*form.reads(kind), *about))
    sample = form.convert(row)
    if kind == JUDGED:
        assert isinstance(sample, Chat), "no format of judged rows makes anything else"
        return judged(row, sample, form.several)
    return sample


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


def unknown_format(row: object, kind: str = PLAIN) -> RowError:
    """The error of a row that no format of a kind fits."""
    if not isinstance(row, Mapping):
        return RowError(f"expected an object, found {kind_of(row)}")
    try:
        _refuse_unread(row, (*ABOUT_CHATS, *OF_KIND[kind]))
    except RowError as error:
        return error
    absent = [name for name in ANSWERS if row.get(name) is None]
    if kind == PAIRS and (len(absent) == 1 or detect_format(row) is not None):
        return RowError(
            f"field {absent[0]!r} is missing: a row needs two answers, 'chosen' and 'rejected'; "
            f"{KINDS[PLAIN].what} are for method: {KINDS[PLAIN].methods}"
        )
    label = (LABELS[0],) if kind == JUDGED else ()
    forms = {name: " + ".join(form.columns + label) for name, form in formats_of(kind).items()}
    wanted = "; ".join(f"{name}: {columns}" for name, columns in forms.items())
    names = [str(key) for key in list(row)[:12]] or ["none"]
    found = ", ".join(names)
    other = f"columns of other names are given as data.columns: {{prompt: {names[0]}}}"
    known = f"known formats are {wanted}; {other}"
    return RowError(f"no known row format has the columns found ({found}); {known}")


def _refuse_unread(row: Row, read: Sequence[str]) -> None:
    for name, reason in MATTERS.items():
        if name not in read and is_given(row.get(name)):
            raise RowError(f"field {name!r}: {reason}")
