"""From a source to tokenised rows: read, convert, tokenise, cut, count; then hold some out."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatrain.data import dataset, formats
from megatrain.data.chat import Marked
from megatrain.data.dataset import Counts, Rows, RowWriter, TokenRows
from megatrain.data.fields import RowError
from megatrain.data.formats import FORMATS, Document, RowFormat, Sample
from megatrain.data.hashing import mix64
from megatrain.data.packing import pack
from megatrain.data.readers import RawRow
from megatrain.data.sources import Source, open_source
from megatrain.data.tokenize import Encoder
from megatrain.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megatrain.data.sources import Given

BATCH_ROWS = 256  # rows a call of the tokenizer, which works on them in parallel
CACHE_VERSION = 2  # raise it when the same input gives other tokens
CACHED_BY = ("seq_len", "train_on", "format", "on_bad_row", "text_field", "columns", "prompts")
ON_BAD_ROW = ("refuse", "skip")


@dataclass(frozen=True)
class DataOptions:
    """How rows are read and cut.

    Attributes:
        seq_len: longest row in tokens; None keeps whole documents, for packing.
        text_field: the column of plain text; None finds it.
        columns: columns that go by another name, ours first.
        prompts: as in `Encoder`.
        vocab_size: token ids from here on are refused; None allows all.
    """

    seq_len: int | None
    train_on: str = "assistant"
    format: str = "auto"
    on_bad_row: str = "refuse"
    text_field: str | None = None
    columns: Mapping[str, str] | None = None
    prompts: str = "text"
    split: str | None = None
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        for key, known in {"format": ("auto", *FORMATS), "on_bad_row": ON_BAD_ROW}.items():
            value = getattr(self, key)
            if value not in known:
                raise DataError(f"data.{key}: {value!r} is unknown; use one of {', '.join(known)}")


def load_data(
    train: Given,
    held_out: float | int | Given | None,
    tokenizer: PreTrainedTokenizerBase,
    options: DataOptions,
    *,
    seed: int,
    pack_to: int | None = None,
    cache: Path | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> tuple[Rows, Rows | None]:
    """Training and held-out rows.

    Args:
        train: a file, folder or hub id, a `datasets.Dataset` or a list of dicts: see `open_source`.
        held_out: a share below 1, a number of rows, another source, or None.
        pack_to: concatenate documents and cut them into blocks of this many tokens; what is held
            out are whole documents.
        on_progress: called with the number of rows read so far.

    Raises as `encode_source`.
    """
    if pack_to is not None:
        options = replace(options, seq_len=None, train_on="all")
    rows = encode_source(train, tokenizer, options, cache, on_progress)
    held: TokenRows | None = None
    if isinstance(held_out, int | float):
        if held_out:
            rows, held = hold_out(rows, held_out, seed)
    elif held_out is not None:
        held = encode_source(held_out, tokenizer, replace(options, split=None), cache, on_progress)
    if pack_to is None:
        return rows, held
    return pack(rows, pack_to), None if held is None else pack(held, pack_to)


def encode_source(
    given: Given,
    tokenizer: PreTrainedTokenizerBase,
    options: DataOptions,
    cache: Path | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> TokenRows:
    """Tokenised rows of a source, from the cache if the same were tokenised before.

    Raises:
        DataError: the source cannot be read, holds no row or no target token, has bad rows (under
            `refuse`; names the first), or token ids outside `options.vocab_size`.
        StorageError: the cache cannot be written.
    """
    source = open_source(given, options.split)
    encoder = Encoder(tokenizer, options.train_on, options.prompts)
    folder = cache or dataset.default_cache()
    key = _fingerprint(source, tokenizer, options)
    rows = dataset.load_cached_set(folder, key)
    if rows is None:
        with dataset.new_cached_set(folder, key) as writer:
            counts = _write(source, encoder, options, writer, on_progress or (lambda _: None))
            _refuse(source, counts, options, written=len(writer))
            writer.finish(counts)
        rows = dataset.load_cached_set(folder, key)
        assert rows is not None, "a set just written is there"
    _check_vocabulary(rows.counts, tokenizer, options.vocab_size)
    return rows


def hold_out(rows: TokenRows, share: float | int, seed: int) -> tuple[TokenRows, TokenRows]:
    """(train, held out): an int holds out that number of rows, a float below 1 that share of them.

    The choice follows from the rows' content and the seed alone, whatever their order. Equal rows
    stay on one side: a copy of a held-out row is never trained on. Where copies make the number
    impossible, fewer are held out. Raises DataError if no row would be left on either side.
    """
    total = len(rows)
    wanted = share if isinstance(share, int) else max(1, round(share * total))
    if share <= 0 or wanted >= total:
        raise DataError(
            f"data.eval: {share} holds out {wanted} of {total} rows; at least one has to be left "
            "to train on"
        )
    hashes = rows.hashes[rows.chosen]
    values, group, sizes = np.unique(hashes, return_inverse=True, return_counts=True)
    taken, held = 0, np.zeros(len(values), np.bool_)
    for index in np.argsort(mix64(values, seed), kind="stable"):
        if taken + sizes[index] <= wanted:
            held[index] = True
            taken += int(sizes[index])
        if taken == wanted:
            break
    if not taken:
        raise DataError(
            f"data.eval: no {wanted} of the {total} rows can be held out, because all are copies; "
            "name another source"
        )
    chosen = held[group]
    return rows.choose(np.flatnonzero(~chosen)), rows.choose(np.flatnonzero(chosen))


def _write(
    source: Source,
    encoder: Encoder,
    options: DataOptions,
    writer: RowWriter,
    on_progress: Callable[[int], None],
) -> Counts:
    counts = Counts()
    marked = _marked(source, encoder, options, counts)
    while batch := list(itertools.islice(marked, BATCH_ROWS)):
        on_progress(counts.read)
        if counts.bad and options.on_bad_row == "refuse":
            continue  # only count on: nothing of this will be used
        encoded = encoder.encode([text for _, text in batch])
        for (ids, mask), (where, text) in zip(encoded, batch, strict=True):
            if len(ids) and int(ids.max()) > counts.max_token_id:
                counts.max_token_id, counts.max_token_where = int(ids.max()), where
            if options.seq_len is not None and len(ids) > options.seq_len:
                counts.truncated += 1
                counts.truncated_tokens += len(ids) - options.seq_len
                ids, mask = ids[: options.seq_len], mask[: options.seq_len]
            counts.rewritten_turns += text.rewritten
            counts.add_notes(text.notes)
            if text.wrapping:
                counts.wrapped[text.wrapping] = counts.wrapped.get(text.wrapping, 0) + 1
            if mask.any():
                writer.add(ids, mask)
            else:
                counts.without_target += 1
    return counts


def _marked(
    source: Source, encoder: Encoder, options: DataOptions, counts: Counts
) -> Iterator[tuple[str, Marked]]:
    """(place, marked text) of every good row; bad ones are counted."""
    forms: dict[str, RowFormat] = {}  # by file
    for raw in source.read():
        counts.read += 1
        try:
            yield raw.where, encoder.mark(_sample(raw, forms, options, counts))
        except RowError as error:
            counts.add_bad(f"{raw.where}: {error}")


def _sample(
    raw: RawRow, forms: dict[str, RowFormat], options: DataOptions, counts: Counts
) -> Sample:
    """The row as a conversation or text. Raises RowError.

    A file keeps the format of its first row that has one: a later row is told what it lacks.
    """
    if raw.problem is not None:
        raise RowError(raw.problem)
    value = formats.renamed(raw.value, options.columns or {})
    name = "text" if options.text_field else options.format
    form = FORMATS.get(name) or forms.get(raw.file) or formats.detect_format(value)
    if form is None:
        raise formats.unknown_format(value)
    forms[raw.file] = form
    read = (options.text_field,) if options.text_field else form.reads
    counts.add_unread(formats.unread_columns(value, read))
    if options.text_field and isinstance(value, Mapping):
        if options.text_field not in value:
            raise RowError(f"field {options.text_field!r} is missing")
        value = {"text": value[options.text_field]}
    sample = formats.convert_row(form, value, pretrain=options.seq_len is None)
    if isinstance(sample, Document):
        return replace(sample, begins=raw.begins, ends=raw.ends)
    counts.add_unread(sample.unread)
    return sample


def _refuse(source: Source, counts: Counts, options: DataOptions, written: int) -> None:
    if not counts.read:
        raise DataError(f"{source.name}: holds no rows")
    if counts.bad == counts.read:
        raise DataError(f"{counts.first_bad[0]} (all {counts.read} rows are bad)")
    if counts.bad and options.on_bad_row == "refuse":
        rest = "it is the only bad row" if counts.bad == 1 else f"{counts.bad} rows are bad"
        raise DataError(
            f"{counts.first_bad[0]} ({rest} of {counts.read}; mend them, or set data.on_bad_row: "
            "skip)"
        )
    if not written:
        cut = f", {counts.truncated} of them cut to train.seq_len {options.seq_len}"
        raise DataError(
            f"{source.name}: no token to train on in {counts.read - counts.bad} rows"
            f"{cut if counts.truncated else ''}; no row has an answer left"
        )


def _check_vocabulary(
    counts: Counts, tokenizer: PreTrainedTokenizerBase, vocab_size: int | None
) -> None:
    if vocab_size is not None and counts.max_token_id >= vocab_size:
        token = tokenizer.convert_ids_to_tokens(counts.max_token_id)
        raise DataError(
            f"{counts.max_token_where}: token {token!r} has id {counts.max_token_id}, but the "
            f"model knows {vocab_size} tokens; use the tokenizer that belongs to the model"
        )


def _fingerprint(source: Source, tokenizer: PreTrainedTokenizerBase, options: DataOptions) -> str:
    state = {
        "version": CACHE_VERSION,
        "source": source.identity,
        "template": tokenizer.chat_template,
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "options": [getattr(options, name) for name in CACHED_BY],
    }
    text = json.dumps(state, sort_keys=True) + tokenizer.backend_tokenizer.to_str()
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
