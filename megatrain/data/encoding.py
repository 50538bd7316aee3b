"""Turn raw rows into tokens, a batch at a time, in any process."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from megatrain.data import formats
from megatrain.data.fields import RowError
from megatrain.data.readers import RawRow
from megatrain.data.rows import Counts, IdArray
from megatrain.data.samples import Chat, Document, Judged, Pair, Sample, texts_of
from megatrain.data.truncation import Tokens
from megatrain.data.workers import ABOUT_TEMPLATE, begin_row

if TYPE_CHECKING:
    from megatrain.data.chat import Marked
    from megatrain.data.options import RowOptions
    from megatrain.data.sources import Source
    from megatrain.data.tokenize import Encoder

BATCH_ROWS = 256  # that a worker encodes at a time
TOKENISING = -1  # a batch's rows, in one call of the tokenizer; else the number of the row
SLOWEST_CHARACTERS_PER_S = 50_000  # of a tokenizer, which usually reads a million
Formats = dict[tuple[int, str], str]  # the format's name by source and file


@dataclass(frozen=True)
class RawBatch:
    """Raw rows that follow one another.

    formats: of their files, where rows before them have settled it.
    only_counted: their rows are not used, only bad ones are counted.
    """

    rows: Sequence[RawRow]
    formats: Formats
    only_counted: bool = False


@dataclass(frozen=True)
class Encoded:
    """A good row's sequences, uncut.

    Attributes:
        part: number of its source.
        text: it is plain text.
        joined: the next row goes on with its text.
        value: see `Rows.values`.
    """

    part: int
    text: bool
    joined: bool
    value: float
    sides: tuple[Tokens, ...]

    @property
    def begins(self) -> int:
        """Number of tokens before the answers: a row's first token is never a target."""
        return min(int(mask.argmax()) for _, mask in self.sides)

    @property
    def prompt(self) -> IdArray:
        return self.sides[0][0][: self.begins]


@dataclass(frozen=True)
class EncodedBatch:
    """An encoded batch. uncut: tokens of each sequence, int64."""

    rows: list[Encoded]
    counts: Counts
    uncut: array[int]


class RowReader:
    """Reads a source once, in batches. `rows` were read so far.

    on_progress: called with their number.
    """

    def __init__(
        self, source: Source, options: RowOptions, on_progress: Callable[[int], None]
    ) -> None:
        self._source, self._options, self._on_progress = source.read(), options, on_progress
        self._formats: Formats = {}
        self._next: RawRow | None = None
        self.rows, self.only_count = 0, False

    def has_more(self) -> bool:
        """True if there is another row."""
        if self._next is None:
            self._next = next(self._source, None)
        return self._next is not None

    def batches(self, stop: int | None = None) -> Iterator[RawBatch]:
        """The rows up to number `stop`, or all that are left."""
        while self.has_more() and (stop is None or self.rows < stop):
            left = BATCH_ROWS if stop is None else min(BATCH_ROWS, stop - self.rows)
            settled, rows = dict(self._formats), list(self._read(left))
            self._on_progress(self.rows)
            of_files = {(row.part, row.file) for row in rows}
            known = {file: name for file, name in settled.items() if file in of_files}
            yield RawBatch(rows, known, self.only_count)

    def skip(self, rows: int) -> None:
        """Read rows that need not be tokenised."""
        for _ in self.batches(self.rows + rows):
            pass

    def _read(self, rows: int) -> Iterator[RawRow]:
        while rows and self.has_more():
            assert self._next is not None
            row, self._next = self._next, None
            self.rows, rows = self.rows + 1, rows - 1
            if (row.part, row.file) not in self._formats:
                with suppress(RowError):
                    self._settle(row)
            yield row

    def _settle(self, row: RawRow) -> None:
        if row.problem is None:
            value = formats.renamed(row.value, self._options.columns or {})
            format_of(row, value, self._formats, self._options)


def encode_batch(batch: RawBatch, encoder: Encoder, options: RowOptions) -> EncodedBatch:
    """Count rows and tokenise the good ones, in a worker; none where a bad row is refused."""
    counts, uncut, settled = Counts(), array("q"), dict(batch.formats)
    marked: list[tuple[RawRow, Sample, tuple[Marked, ...]]] = []
    for number, raw in enumerate(batch.rows):
        begin_row(number)
        counts.read += 1
        try:
            sample = _sample(raw, settled, options, counts)
            marked.append((raw, sample, encoder.marks(sample)))
        except RowError as error:
            counts.add_bad(f"{raw.where}: {error}")
    if batch.only_counted or (counts.bad and options.on_bad_row == "refuse"):
        return EncodedBatch([], counts, uncut)
    flat = [text for *_, texts in marked for text in texts]
    begin_row(TOKENISING, sum(len(text.text) for text in flat) / SLOWEST_CHARACTERS_PER_S)
    encoded, rows = iter(encoder.encode(flat)), []
    for raw, sample, texts in marked:
        sides = tuple(itertools.islice(encoded, len(texts)))
        for ids, _ in sides:
            counts.saw(int(ids.max()) if len(ids) else -1, raw.where)
            uncut.append(len(ids))
        _count(texts, counts)
        sides = sides if len(sides) == 1 else _begun_alike(sides)
        is_text = isinstance(sample, Document)
        rows.append(Encoded(raw.part, is_text, not raw.ends, value_of(sample), sides))
    return EncodedBatch(rows, counts, uncut)


def about_row(batch: RawBatch, number: int) -> tuple[str, str]:
    """The words of an error about the code that a worker ran on a row of a batch."""
    if number == TOKENISING:
        where = f"{batch.rows[0].where} and the {len(batch.rows) - 1} rows behind it"
        return f"{where}: the tokenizer", "for them; use another, or take out the row"
    before, after = ABOUT_TEMPLATE
    return f"{batch.rows[number].where}: {before}", after


def value_of(sample: Sample) -> float:
    """The entry of a sample in `Rows.values`; nan for a plain one."""
    if isinstance(sample, Judged):
        return float(sample.wanted)
    margin = sample.margin if isinstance(sample, Pair) else None
    return np.nan if margin is None else margin


def _count(texts: Sequence[Marked], counts: Counts) -> None:
    """Count notes about a row, each once where it holds for both sides."""
    for text in texts:
        counts.rewritten_turns += text.rewritten
    counts.add_notes(dict.fromkeys(note for text in texts for note in text.notes))
    if wrapping := texts[0].wrapping:
        counts.wrapped[wrapping] = counts.wrapped.get(wrapping, 0) + 1


def _begun_alike(sides: tuple[Tokens, ...]) -> tuple[Tokens, ...]:
    """Both answers begin where the first of them leaves the prompt, as in TRL: the end of a prompt
    may be one token with the beginning of one answer and not of the other."""
    begins = [int(mask.argmax()) for _, mask in sides if mask.any()]
    if len(begins) < len(sides):
        return sides  # which are dropped
    for (_, mask), begin in zip(sides, begins, strict=True):
        mask[min(begins) : begin] = True
    return sides


def format_of(raw: RawRow, value: object, settled: Formats, options: RowOptions) -> str:
    """The name of the row's format. Raises RowError where there is none.

    value: of the row, renamed. settled: gets the format of the row's file: a file keeps that of its
    first row that has one, and the error of a later row names what it lacks.
    """
    file, column = (raw.part, raw.file), text_column(raw, options)
    name = "text" if column else options.format if raw.format == "auto" else raw.format
    if name == "auto":
        name = settled.get(file) or formats.detected_name(value, options.kind)
    else:
        formats.named_format(name, options.kind)
    settled[file] = name
    return name


def text_column(raw: RawRow, options: RowOptions) -> str | None:
    """The column of plain text, if the row is to be read as such."""
    return options.text_field if raw.format in ("auto", "text") else None


def _sample(raw: RawRow, settled: Formats, options: RowOptions, counts: Counts) -> Sample:
    """Convert a raw row to a sample. Raises RowError."""
    if raw.problem is not None:
        raise RowError(raw.problem)
    value = formats.renamed(raw.value, options.columns or {})
    form = formats.ROW_FORMATS[format_of(raw, value, settled, options)]
    column = text_column(raw, options)
    read = (column,) if column else form.reads(options.kind)
    counts.add_unread(formats.unread_columns(value, read))
    if column and isinstance(value, Mapping):
        if column not in value:
            raise RowError(f"field {column!r} is missing")
        value = {"text": value[column]}
    pretrain = options.seq_len is None
    sample = formats.convert_row(form, value, kind=options.kind, pretrain=pretrain)
    if isinstance(sample, Document):
        around = {name: getattr(raw, name) for name in ("begins", "ends", "before", "after")}
        return replace(sample, **around)
    for text in texts_of(sample):
        # in an order that is the same in every process
        counts.add_unread(sorted(text.unread) if isinstance(text, Chat) else ())
    return sample
