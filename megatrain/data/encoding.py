"""Turn raw rows into tokens, a batch at a time, in any process."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatrain.data import formats
from megatrain.data.chat import SYSTEM_ROLES, ChatTemplate, Marked
from megatrain.data.files import RawRow
from megatrain.data.images import Sight, picture_of
from megatrain.data.rows import CONTEXT, LOST, Counts, IdArray, MaskArray, Tokens, count_up
from megatrain.data.samples import IMAGES, KINDS, Chat, Document, Picture, RowError, Sample, Text
from megatrain.data.sources import Source
from megatrain.data.template import CharSpan
from megatrain.data.workers import ABOUT_TEMPLATE, begin_row
from megatrain.errors import DataError
from megatrain.heartbeat import may_end_here

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class RowOptions:
    """Options of how rows are read and cut."""

    seq_len: int | None  # longest row in tokens; None keeps whole documents, for packing
    train_on: str = "assistant"
    format: str = "auto"
    on_bad_row: str = "refuse"
    text_field: str | None = None  # the column of plain text; None finds it
    columns: Mapping[str, str] | None = None  # that go by another name, ours first
    prompts: str = "text"  # as in `Encoder`
    kind: str = "plain"  # as the method trains them; rows of another kind are bad
    truncation_mode: str = "keep_start"
    split: str | None = None
    vocab_size: int | None = None  # token ids from here on are refused
    day: date | None = None  # that chat templates get as the time; None: today
    processes: int = 1  # that tokenise a set of more than a thousand rows
    streaming: bool = False  # the set is used before all of it is read: see `streaming.py`
    sight: Sight | None = None  # reads the rows' images; None: they are refused


AS_THEY_ARE = "as they are: prompt, completion, end of sequence (data.prompts: chat makes turns)"
AS_TURNS = "as a question and its answer (data.prompts: chat)"
STANFORD = "by the Stanford Alpaca prompt, as there is no chat template"
ASKED = "by the Stanford Alpaca prompt (data.prompts: alpaca)"
# A value of data.prompts -> how rows that it is for became text.
PROMPTS_READ = {"chat": {AS_TURNS}, "alpaca": {ASKED, STANFORD}}


class Encoder:
    """A tokenizer with its rules of what is a target.

    Conversations go through the chat template, with the loss on what the assistant wrote
    (`train_on="assistant"`) or on everything ("all"). Two texts, prompt and completion, become
    `prompt completion eos` with the loss on completion and eos, unless `prompts` is "chat", which
    makes turns of them; so does an Alpaca row without a template, or with `prompts` "alpaca", its
    prompt in the Stanford words. Documents are `text eos` with the loss on all of it. The first
    token of a row is never a target, since nothing predicts it. Templates that ask for the time
    get `day`.

    Raises DataError when the tokenizer cannot serve: no offsets, or no eos.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        train_on: str = "assistant",
        prompts: str = "text",
        day: date | None = None,
        sight: Sight | None = None,
    ) -> None:
        if not tokenizer.is_fast:
            raise DataError(
                f"{tokenizer.name_or_path}: the tokenizer gives no character offsets; use one with "
                "a tokenizer.json"
            )
        self.tokenizer, self.sight = tokenizer, sight
        self.train_on = train_on
        self.prompts = prompts
        self.bos = tokenizer.bos_token
        self.template = ChatTemplate(tokenizer, day) if tokenizer.chat_template else None

    def mark(self, sample: Text) -> Marked:
        """A text and its target characters, with all tokens of its images. Raises RowError."""
        marked = self._mark(sample)
        if self.sight is None:
            return marked
        pictures = sample.pictures if isinstance(sample, Chat) else ()
        text, moved = self.sight.expanded(marked.text, pictures)
        spans = marked.spans and tuple((moved(a), moved(b)) for a, b in marked.spans)
        return replace(marked, text=text, spans=spans, pictures=pictures)

    def _mark(self, sample: Text) -> Marked:
        if isinstance(sample, Document):
            start = len(sample.before)
            return Marked(
                sample.before + sample.text + sample.after,
                None,
                add_special=sample.begins and not self._has_bos(sample.text),
                eos=sample.ends,
                keep=(start, start + len(sample.text)),
            )
        as_text = self.prompts == "alpaca" and sample.plain is not None
        if sample.pictures and self.template is None:
            raise RowError("the tokenizer has no chat template, which says where images stand")
        if self.template is None or (self.prompts != "chat" if sample.literal else as_text):
            return self._plain(sample)
        rendered = self.template.whole if self.train_on == "all" else self.template.mark
        marked = rendered(sample)
        return replace(marked, wrapping=AS_TURNS) if sample.literal else marked

    def _has_bos(self, text: str) -> bool:
        return bool(self.bos) and text.startswith(str(self.bos))

    def _plain(self, chat: Chat) -> Marked:
        if chat.plain is None and chat.literal:
            raise RowError(
                "a system prompt, tools or variables of the template have no place beside two "
                "texts; set data.prompts: chat to make turns of these"
            )
        if chat.plain is None:
            raise RowError(
                "the tokenizer has no chat template for conversations; name one "
                "(data.chat_template: chatml), or use rows of prompt and completion"
            )
        prompt, completion = chat.plain
        text = prompt + completion
        spans = None if self.train_on == "all" else ((len(prompt), len(text)),)
        wrapping = ASKED if self.template else STANFORD
        wrapping = AS_THEY_ARE if chat.literal else wrapping
        add_special = not self._has_bos(text)
        return Marked(text, spans, add_special=add_special, eos=True, wrapping=wrapping)

    def encode(self, batch: Sequence[Marked], lossy: set[int] | None = None) -> list[Tokens]:
        """Ids (int32 [tokens]) and target mask (bool [tokens]) of each text, in order, uncut.
        lossy: gets the numbers of texts of which the tokenizer loses a part."""
        encoded: dict[int, Tokens] = {}
        for add_special in (False, True):
            chosen = [i for i, marked in enumerate(batch) if marked.add_special == add_special]
            if not chosen:
                continue
            found = self.tokenizer(
                [batch[i].text for i in chosen],
                add_special_tokens=add_special,
                return_offsets_mapping=True,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,  # the caller cuts texts that are longer than the model's context
            )
            pairs = zip(found["input_ids"], found["offset_mapping"], strict=True)
            for i, (ids, offsets) in zip(chosen, pairs, strict=True):
                encoded[i] = self._finish(batch[i], ids, offsets)
                if lossy is not None and self._loses(batch[i], ids, offsets):
                    lossy.add(i)
        return [encoded[i] for i in range(len(batch))]

    def _finish(self, marked: Marked, ids: list[int], offsets: list[CharSpan]) -> Tokens:
        mask = np.ones(len(ids), np.bool_)
        if marked.spans is not None:
            mask = target_mask(offsets, marked.spans)
        tokens = np.asarray(ids, np.int32)
        if marked.keep != (0, len(marked.text)) and marked.keep is not None:
            # a token begins where the one before ended: so it belongs to one piece of a document,
            # white space in front of it included
            stops = np.asarray(offsets, np.int64).reshape(-1, 2)[:, 1]
            begins = np.maximum.accumulate(np.concatenate([[0], stops]))[:-1]
            kept = (begins >= marked.keep[0]) & (begins < marked.keep[1])
            tokens, mask = tokens[kept], mask[kept]
        if marked.eos and (not len(tokens) or tokens[-1] != self.eos):
            tokens, mask = np.append(tokens, np.int32(self.eos)), np.append(mask, True)
        elif marked.eos:
            mask[-1] = True  # the tokenizer appended it by itself
        mask[:1] = False
        if marked.pictures and self.sight is not None:  # they are no targets
            mask &= ~np.isin(tokens, [*self.sight.ids])
        return tokens, mask

    def _loses(self, marked: Marked, ids: list[int], offsets: list[CharSpan]) -> bool:
        """True if more than LOST of the letters and digits of a text, or of what is trained on in
        it, are in no token but the unknown one."""
        text, spaces = marked.text, marked.text.count(" ") + marked.text.count("\n")
        ends = [*itertools.chain.from_iterable(offsets)]
        bare = len(text) - sum(ends[1::2]) + sum(ends[::2])
        if bare <= spaces and self.unknown not in ids:  # white space may be in no token
            return False
        seen = bytearray(len(text))
        for token, (start, stop) in zip(ids, offsets, strict=True):
            if token != self.unknown:
                seen[start:stop] = b"\1" * (stop - start)
        letters = [letter.isalnum() for letter in text]
        lost = [there and not was for there, was in zip(letters, seen, strict=True)]
        parts = [slice(0, len(text)), *(slice(*span) for span in marked.spans or ())]
        return any(sum(lost[part]) > LOST * sum(letters[part]) for part in parts)

    @cached_property
    def unknown(self) -> int:
        """The token of text that the tokenizer does not know; -1 where there is no such text."""
        rare = self.tokenizer("𓀀 𒀀 ꙮ", add_special_tokens=False)["input_ids"]
        unknown = self.tokenizer.unk_token_id
        return unknown if isinstance(unknown, int) and unknown in rare else -1

    @property
    def eos(self) -> int:
        """The end-of-sequence token. Raises DataError if the tokenizer has none."""
        eos = self.tokenizer.eos_token_id
        if not isinstance(eos, int):
            raise DataError(
                f"{self.tokenizer.name_or_path}: the tokenizer has no eos_token to end a text "
                "with; set one in its files"
            )
        return eos


def target_mask(offsets: Sequence[CharSpan], spans: Sequence[CharSpan]) -> MaskArray:
    """Tokens (character ranges [start, stop), in order) that overlap a span, as bool [tokens].

    A token that straddles a span's start is a target: it holds the answer's first characters.
    Byte-level tokenizers may trim white space off their offsets (to nothing, for a newline), so
    each token is taken to start where the one before it ended.
    """
    if not offsets:
        return np.zeros(0, np.bool_)
    starts, stops = np.asarray(offsets, np.int64).T
    starts = np.minimum(starts, np.concatenate([[0], np.maximum.accumulate(stops)[:-1]]))
    mask = np.zeros(len(stops), np.bool_)
    for start, stop in spans:
        mask |= (starts < stop) & (stops > start)
    return mask


BATCH_ROWS = 256  # that a worker encodes at a time
TOKENISING = -1  # a batch's rows, in one call of the tokenizer; else the number of the row
SLOWEST_CHARACTERS_PER_S = 50_000  # of a tokenizer, which usually reads a million


@dataclass(frozen=True)
class RawBatch:
    """Raw rows that follow one another, and the formats that are settled by source and file.
    only_counted: their rows are not used, only bad ones are counted."""

    rows: Sequence[RawRow]
    formats: Mapping[tuple[int, str], str]
    only_counted: bool = False


@dataclass(frozen=True)
class Encoded:
    """A good row's sequences, uncut."""

    part: int  # number of its source
    text: bool  # it is plain text
    joined: bool  # the next row goes on with its text
    value: float  # see `TokenRows.values`
    sides: tuple[Tokens, ...]
    shorter: tuple[Tokens, ...] = ()  # with less context, for truncation_mode context
    pictures: tuple[Picture, ...] = ()  # of each sequence

    @property
    def begins(self) -> int:
        """Number of tokens before the answers: a row's first token is never a target."""
        return min(int(mask.argmax()) for _, mask in self.sides)

    @property
    def prompt(self) -> IdArray:
        return self.sides[0][0][: self.begins]


class RowReader:
    """Reads a source once, in batches."""

    def __init__(self, source: Source, options: RowOptions) -> None:
        self._source, self._options = source.read(), options
        self._formats: dict[tuple[int, str], str] = {}
        self.only_count = False

    def batches(self, most: int | None = None) -> Iterator[RawBatch]:
        """All rows that are left, or the next ones."""
        left = itertools.islice(self._source, most)
        while rows := list(itertools.islice(left, BATCH_ROWS)):
            may_end_here()
            for row in rows:
                self._settle(row)
            files = {(row.part, row.file) for row in rows} & self._formats.keys()
            yield RawBatch(rows, {file: self._formats[file] for file in files}, self.only_count)

    def _settle(self, row: RawRow) -> None:
        """A file keeps the format of its first row that has one, which errors of others name."""
        if row.problem is None and (row.part, row.file) not in self._formats:
            with suppress(RowError):
                value = formats.renamed(row.value, self._options.columns or {})
                self._formats[row.part, row.file] = format_of(row, value, self._options)


def encode_batch(
    batch: RawBatch, encoder: Encoder, options: RowOptions
) -> tuple[list[Encoded], Counts]:
    """Count rows and tokenise the good ones, in a worker; none where a bad row is refused."""
    counts = Counts()
    marked: list[tuple[int, RawRow, Sample, tuple[Marked, ...]]] = []
    for number, raw in enumerate(batch.rows):
        begin_row(number)
        counts.read += 1
        try:
            sample = _sample(raw, batch.formats.get((raw.part, raw.file)), options, counts)
            marked.append((number, raw, sample, tuple(map(encoder.mark, sample.texts))))
        except RowError as error:
            counts.add_bad(f"{raw.where}: {error}")
    if batch.only_counted or (counts.bad and options.on_bad_row == "refuse"):
        return [], counts
    flat = [text for *_, texts in marked for text in texts]
    begin_row(TOKENISING, sum(len(text.text) for text in flat) / SLOWEST_CHARACTERS_PER_S)
    lossy, rows, place = set[int](), list[Encoded](), 0
    encoded = encoder.encode(flat, lossy)
    for number, raw, sample, texts in marked:
        sides, place = _begun_alike(tuple(encoded[place : place + len(texts)])), place + len(texts)
        counts.lossy += not lossy.isdisjoint(range(place - len(texts), place))
        for ids, _ in sides:
            counts.saw(int(ids.max()) if len(ids) else -1, raw.where)
            counts.unknown += int((ids == encoder.unknown).sum())
        counts.rewritten_turns += sum(text.rewritten for text in texts)
        notes = (note for text in texts for note in text.notes)
        count_up(counts.notes, dict.fromkeys(notes, 1))  # once where it holds for both sides
        if wrapping := texts[0].wrapping:
            count_up(counts.wrapped, {wrapping: 1})
        begin_row(number)
        pictures = texts[0].pictures
        if pictures and any(len(ids) > (options.seq_len or len(ids)) for ids, _ in sides):
            counts.too_long += 1  # an image is whole, or not there
            continue
        try:
            shorter = with_less_context(sample, sides, encoder, options)
        except RowError as error:
            counts.add_bad(f"{raw.where}: {error}")
            continue
        is_text = isinstance(sample.texts[0], Document)
        about = raw.part, is_text, not raw.ends, sample.value
        rows.append(Encoded(*about, sides, shorter, pictures))
    return ([] if counts.bad and options.on_bad_row == "refuse" else rows), counts


def with_less_context(
    sample: Sample, sides: tuple[Tokens, ...], encoder: Encoder, options: RowOptions
) -> tuple[Tokens, ...]:
    """The sequences of conversations without the system prompt, then without the oldest turns, down
    to the last question, until they fit; both of a pair without the same turns. None where they do
    fit, or are cut otherwise. Raises RowError where the template refuses what is left."""
    most, texts = options.seq_len, [text for text in sample.texts if isinstance(text, Chat)]
    fits = most is None or all(len(ids) <= most for ids, _ in sides)
    if fits or options.truncation_mode != CONTEXT or not texts:
        return ()
    roles = [message.role for message in texts[0].messages]
    trained = [i for i, m in enumerate(texts[0].messages) if m.trained and m.role == "assistant"]
    answer = (trained or [0])[0 if len(texts) > 1 else -1]
    system = next((i for i, role in enumerate(roles) if role not in SYSTEM_ROLES), 0)
    starts = [system, *(i for i in range(system + 1, answer) if roles[i] == "user")]

    @cache
    def left(start: int) -> tuple[Tokens, ...]:
        chats = [replace(text, messages=text.messages[start:]) for text in texts]
        return tuple(encoder.encode([encoder.mark(chat) for chat in chats]))

    def is_enough(start: int) -> bool:
        return all(len(ids) <= (most or 0) for ids, _ in left(start))

    return _begun_alike(left(starts[bisect_left(starts, True, hi=len(starts) - 1, key=is_enough)]))


def about_row(batch: RawBatch, number: int) -> tuple[str, str]:
    """The words of an error about the code that a worker ran on a row of a batch."""
    if number == TOKENISING:
        where = f"{batch.rows[0].where} and the {len(batch.rows) - 1} rows behind it"
        return f"{where}: the tokenizer", "for them; use another, or take out the row"
    before, after = ABOUT_TEMPLATE
    return f"{batch.rows[number].where}: {before}", after


def _begun_alike(sides: tuple[Tokens, ...]) -> tuple[Tokens, ...]:
    """Both answers begin where the first of them leaves the prompt, as in TRL: the end of a prompt
    may be one token with the beginning of one answer and not of the other."""
    begins = [int(mask.argmax()) for _, mask in sides if mask.any()]
    if len(begins) < len(sides):
        return sides  # which are dropped
    for (_, mask), begin in zip(sides, begins, strict=True):
        mask[min(begins) : begin] = True
    return sides


def format_of(raw: RawRow, value: object, options: RowOptions) -> str:
    """The name of the format of a row (renamed: `value`) by itself. Raises RowError."""
    name = "text" if text_column(raw, options) else options.format
    name = name if raw.format == "auto" else raw.format
    if name == "auto":
        if (found := formats.detect_format(value, options.kind)) is None:
            raise formats.unknown_format(value, options.kind)
        return found
    if name not in (known := formats.formats_of(options.kind)):
        what = f"is not for method: {KINDS[options.kind].methods}; use one of {', '.join(known)}"
        raise RowError(f"format {name!r} {what}")
    return name


def text_column(raw: RawRow, options: RowOptions) -> str | None:
    """The column of plain text, if the row is to be read as such."""
    return options.text_field if raw.format in ("auto", "text") else None


def _sample(raw: RawRow, settled: str | None, options: RowOptions, counts: Counts) -> Sample:
    """Convert a raw row to a sample. settled: the format of its file. Raises RowError."""
    if raw.problem is not None:
        raise RowError(raw.problem)
    value = formats.renamed(raw.value, options.columns or {})
    name, column = settled or format_of(raw, value, options), text_column(raw, options)
    read = (column,) if column else formats.ROW_FORMATS[name].reads(options.kind)
    read = (*read, *IMAGES) if options.sight and not column else read
    counts.add_unread(formats.unread_columns(value, read))
    if column and isinstance(value, Mapping):
        if column not in value:
            raise RowError(f"field {column!r} is missing")
        value = {"text": value[column]}
    pretrain, found = options.seq_len is None, options.format == raw.format == "auto"
    find = options.sight and partial(picture_of, folder=Path(raw.file).parent)
    how: dict[str, Any] = {"kind": options.kind, "pretrain": pretrain, "found": found, "find": find}
    sample = formats.convert_row(name, value, **how)
    for text in sample.texts:
        if isinstance(text, Document):
            around = {name: getattr(raw, name) for name in ("begins", "ends", "before", "after")}
            return Sample((replace(text, **around),))
        # in an order that is the same in every process
        counts.add_unread(sorted(text.unread))
    return sample
