"""From raw rows to tokenised ones: convert, tokenise, cut, count, and write them into the cache."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from megatrain.data import cuts, formats
from megatrain.data.cuts import Row
from megatrain.data.dataset import Counts, IdArray
from megatrain.data.fields import RowError
from megatrain.data.readers import RawRow
from megatrain.data.samples import (
    JUDGED,
    PLAIN,
    Chat,
    Document,
    Judged,
    Pair,
    Sample,
    texts_of,
)

if TYPE_CHECKING:
    from megatrain.data.build import DataOptions
    from megatrain.data.chat import Marked
    from megatrain.data.formats import RowFormat
    from megatrain.data.row_writer import RowWriter
    from megatrain.data.sources import Source
    from megatrain.data.tokenize import Encoder

BATCH_ROWS = 256  # rows a call of the tokenizer, which works on them in parallel


@dataclass(frozen=True)
class Encoded:
    """A sample's sequences, uncut."""

    raw: RawRow
    sample: Sample
    sides: tuple[Row, ...]

    @property
    def begins(self) -> int:
        """Number of tokens before the answers: a row's first token is never a target."""
        return min(int(mask.argmax()) for _, mask in self.sides)

    @property
    def prompt(self) -> IdArray:
        return self.sides[0][0][: self.begins]


Kept = tuple[Encoded, tuple[Row, ...]]  # with its sequences as they are cut


def write_rows(
    source: Source,
    encoder: Encoder,
    options: DataOptions,
    writer: RowWriter,
    on_progress: Callable[[int], None],
) -> Counts:
    """Write the good rows of a source; counts of all."""
    counts, lengths = Counts(parts=[0] * max(1, len(source.parts))), array("q")
    encoded = _encoded(source, encoder, options, counts, lengths, on_progress)
    write = _write_plain if options.kind == PLAIN else _write_sides
    write(encoded, options, writer, counts)
    cuts.measure(counts, np.asarray(lengths))
    return counts


def _write_plain(
    encoded: Iterator[Encoded], options: DataOptions, writer: RowWriter, counts: Counts
) -> None:
    """Write rows of one sequence; a long text is several."""
    for one in encoded:
        if isinstance(one.sample, Document):
            rows = cuts.split(*one.sides[0], options.seq_len, counts)
        else:
            cut = cuts.cut(one.sides, options.seq_len, counts, options.truncation_mode)
            rows = iter(cut or ())
        for ids, mask in rows:
            if mask.any():
                writer.add(ids, mask, joined=not one.raw.ends)
                counts.parts[one.raw.part] += 1
            else:
                counts.without_target += 1


def _write_sides(
    encoded: Iterator[Encoded], options: DataOptions, writer: RowWriter, counts: Counts
) -> None:
    """Write rows of two sequences."""
    rows = _kept(encoded, options, counts)
    if options.kind == JUDGED:
        rows = with_mismatches(rows, options.seq_len, options.truncation_mode)
    for one, sides in rows:
        writer.add_sides(sides, one.prompt, value_of(one.sample))
        counts.parts[one.raw.part] += 1


def _kept(encoded: Iterator[Encoded], options: DataOptions, counts: Counts) -> Iterator[Kept]:
    """The rows of which each sequence has a target left, beside their cut sequences."""
    for one in encoded:
        sides = cuts.cut(one.sides, options.seq_len, counts, options.truncation_mode)
        if sides is None:
            continue
        if all(mask.any() for _, mask in sides):
            yield one, sides
        else:
            counts.without_target += 1


def value_of(sample: Sample) -> float:
    """What `Rows.values` has of a sample."""
    if isinstance(sample, Judged):
        return float(sample.wanted)
    assert isinstance(sample, Pair)
    return np.nan if sample.margin is None else sample.margin


def with_mismatches(rows: Iterator[Kept], seq_len: int | None, mode: str) -> Iterator[Kept]:
    """Each row with one more sequence, its own prompt before the answer of the row before it; the
    first takes that of the second. Nothing comes of a single row."""

    def mismatched(row: Kept, other: Kept) -> Kept:
        one, sides = row
        return one, (*sides, cuts.shortened(*_mismatch(one, other[0]), seq_len, mode))

    first = before = next(rows, None)
    for row in rows:
        assert before is not None
        if first is not None:
            yield mismatched(first, row)
            first = None
        yield mismatched(row, before)
        before = row


def _mismatch(asked: Encoded, other: Encoded) -> Row:
    (ids, mask), prompt = other.sides[0], asked.prompt
    flags = np.concatenate([np.zeros(len(prompt), np.bool_), mask[other.begins :]])
    return np.concatenate([prompt, ids[other.begins :]]), flags


def _encoded(
    source: Source,
    encoder: Encoder,
    options: DataOptions,
    counts: Counts,
    lengths: array[int],
    on_progress: Callable[[int], None],
) -> Iterator[Encoded]:
    """Every good row as tokens; none once a bad one was met that is to be refused.

    lengths: gets the tokens of each sequence.
    """
    marked = _marked(source, encoder, options, counts)
    while batch := list(itertools.islice(marked, BATCH_ROWS)):
        on_progress(counts.read)
        if counts.bad and options.on_bad_row == "refuse":
            continue  # only count on: nothing of this will be used
        encoded = iter(encoder.encode([text for _, _, texts in batch for text in texts]))
        for raw, sample, texts in batch:
            sides = tuple(itertools.islice(encoded, len(texts)))
            for ids, _ in sides:
                if len(ids) and int(ids.max()) > counts.max_token_id:
                    counts.max_token_id, counts.max_token_where = int(ids.max()), raw.where
                lengths.append(len(ids))
            _count(texts, counts)
            yield Encoded(raw, sample, sides if len(sides) == 1 else _begun_alike(sides))


def _count(texts: Sequence[Marked], counts: Counts) -> None:
    """Count what is to be said of a row, once where it is true of both sides."""
    for text in texts:
        counts.rewritten_turns += text.rewritten
    counts.add_notes(dict.fromkeys(note for text in texts for note in text.notes))
    if wrapping := texts[0].wrapping:
        counts.wrapped[wrapping] = counts.wrapped.get(wrapping, 0) + 1


def _begun_alike(sides: tuple[Row, ...]) -> tuple[Row, ...]:
    """Both answers begin where the first of them leaves the prompt, as in TRL: the end of a prompt
    may be one token with the beginning of one answer and not of the other."""
    begins = [int(mask.argmax()) for _, mask in sides if mask.any()]
    if len(begins) < len(sides):
        return sides  # which are dropped
    for (_, mask), begin in zip(sides, begins, strict=True):
        mask[min(begins) : begin] = True
    return sides


def _marked(
    source: Source, encoder: Encoder, options: DataOptions, counts: Counts
) -> Iterator[tuple[RawRow, Sample, tuple[Marked, ...]]]:
    """(row, sample, marked texts) of every good row; bad ones are counted."""
    forms: dict[tuple[int, str], RowFormat] = {}  # by source and file
    for raw in source.read():
        counts.read += 1
        try:
            sample = _sample(raw, forms, options, counts)
            yield raw, sample, encoder.marks(sample)
        except RowError as error:
            counts.add_bad(f"{raw.where}: {error}")


def _sample(
    raw: RawRow, forms: dict[tuple[int, str], RowFormat], options: DataOptions, counts: Counts
) -> Sample:
    """What the row is. Raises RowError.

    A file keeps the format of its first row that has one: a later row is told what it lacks.
    """
    if raw.problem is not None:
        raise RowError(raw.problem)
    value, file = formats.renamed(raw.value, options.columns or {}), (raw.part, raw.file)
    column = options.text_field if raw.format in ("auto", "text") else None
    name = "text" if column else options.format if raw.format == "auto" else raw.format
    form = forms.get(file) if name == "auto" else formats.named_format(name, options.kind)
    form = form or formats.detect_format(value, options.kind)
    if form is None:
        raise formats.unknown_format(value, options.kind)
    forms[file] = form
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
        counts.add_unread(text.unread if isinstance(text, Chat) else ())
    return sample
