"""From a source to tokenised rows: read, convert, tokenise, cut, count; then hold some out."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatrain.data import show
from megatrain.data.cache import cached_set, make_shards, making_set, sets_asked, unreadable
from megatrain.data.encoding import PROMPTS_READ, Encoder, RowOptions
from megatrain.data.files import resolve_name
from megatrain.data.images import has_changed
from megatrain.data.rows import (
    LOSSY,
    TOO_LOSSY,
    Counts,
    IndexArray,
    Rows,
    TokenRows,
    check_digest,
    cut_warnings,
    default_cache,
    lost_text,
    mix64,
    pack,
    permutation,
)
from megatrain.data.samples import KINDS, digest_of, name_for
from megatrain.data.sources import Part, Source, open_source
from megatrain.data.template import CLOCK
from megatrain.errors import DataError, number_of
from megatrain.heartbeat import DATA_READ, doing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megatrain.data.sources import Given

CACHE_VERSION = 9  # raise it when the same input gives other tokens
CACHED_BY = (
    *("seq_len", "train_on", "format", "on_bad_row", "text_field", "columns", "prompts"),
    *("kind", "truncation_mode"),
)


@dataclass(frozen=True)
class Expected:
    """Digests of the rows of a run that goes on; None: not known, or others are asked for."""

    train: str | None
    held_out: str | None = None


def load_data(
    train: Given,
    held_out: float | int | Given | None,
    tokenizer: PreTrainedTokenizerBase,
    options: RowOptions,
    *,
    seed: int,
    pack_to: int | None = None,
    cache: Path | None = None,
    expected: Expected | None = None,
) -> tuple[Rows, Rows | None]:
    """Training and held-out rows.

    Args:
        train: a file, folder or hub id, a `datasets.Dataset`, a list of dicts or a list of `Part`:
            see `open_source`. Weights choose how often rows occur once some are held out.
        held_out: a share below 1, a number of rows, another source, or None.
        pack_to: concatenate documents and cut them into blocks of this many tokens; what is held
            out are whole documents.
        expected: where a source has changed or is gone, the rows of a run that goes on are taken
            from the cache, if they are there. Other training rows are refused.

    Raises as `AskedSet.rows`.
    """
    if pack_to is not None:
        options = replace(options, seq_len=None, train_on="all")
    before = None if expected is None else expected.train

    def chosen(rows: TokenRows) -> tuple[TokenRows, TokenRows | None]:
        held = None
        if isinstance(held_out, int | float) and held_out:
            rows, held = hold_out(rows, held_out, seed)
        if isinstance(train, list | tuple):
            rows = weighted(rows, [part for part in train if isinstance(part, Part)], seed)
        return rows, held

    def whole(rows: TokenRows) -> Rows:
        return rows if pack_to is None else pack(rows, pack_to, Encoder(tokenizer).eos)

    asked = AskedSet(train, tokenizer, options, cache)
    wanted = (lambda rows: whole(chosen(rows)[0]).digest == before) if before else None
    rows, held = chosen(asked.rows(wanted))
    if before is not None:
        check_digest(whole(rows).digest, before)
    if not isinstance(held_out, int | float | None):
        held = held_out_beside(rows, replace(asked, given=held_out), whole, expected)
    return whole(rows), None if held is None else whole(held)


def held_out_beside(
    rows: TokenRows, asked: AskedSet, whole: Callable[[TokenRows], Rows], expected: Expected | None
) -> TokenRows:
    """The rows of a source held out beside these, whose counts get the warnings; the expected ones,
    if they are there. asked: with the options of `rows`. Raises DataError."""
    before = None if expected is None else expected.held_out
    asked = replace(asked, options=replace(asked.options, split=None, streaming=False))
    try:
        held = asked.rows(None if before is None else lambda rows: whole(rows).digest == before)
    except DataError as error:
        if before is None:
            raise
        way_on = "to go on without them, or with others, set data.eval"
        raise DataError(f"held-out rows: {error}; {way_on}") from error
    if before is not None and whole(held).digest != before:
        held.counts.warned.append(
            "they are not those that the run began with, which are gone from the cache, too; their "
            "losses do not compare"
        )
    look_for_copies(rows, held)
    rows.counts.choices.extend(f"held-out rows: {line}" for line in held.counts.choices)
    rows.counts.warned.extend(f"held-out rows: {line}" for line in show.warnings(held))
    return held


@dataclass(frozen=True, eq=False)
class AskedSet:
    """Rows of a source as they are to be tokenised: a set in the cache, or one to be made there."""

    given: Given
    tokenizer: PreTrainedTokenizerBase
    options: RowOptions
    cache: Path | None = None

    def rows(self, wanted: Callable[[TokenRows], bool] | None = None) -> TokenRows:
        """Tokenised rows of the source, from the cache if the same were tokenised before.

        wanted: of cached rows of the source as it was before, true for those to take in place of
            what it now holds.

        Raises:
            DataError: the source cannot be read, holds no row or no target token, has bad rows
                (under `refuse`; names the first), or token ids outside `options.vocab_size`.
            StorageError: the cache cannot be written, or not be read back.
        """
        if wanted is not None and (rows := self._of_a_changed_source(wanted)) is not None:
            return rows
        source, rows = self.source, cached_set(self.folder)
        if wanted is None and rows is not None and any(map(has_changed, rows.all_pictures())):
            shutil.rmtree(self.folder, ignore_errors=True)  # rows of other pictures
            rows = None
        if rows is None:
            self.make()
            if (rows := cached_set(self.folder)) is None:
                raise unreadable(self.folder)
        return self.ready(rows, source.notes)

    @cached_property
    def source(self) -> Source:
        return open_source(self.given, self.options.split, self.options.streaming)

    @cached_property
    def folder(self) -> Path:
        """The set's folder, named by what is asked for and what the source holds."""
        return self._home / digest_of(self._asked + self.source.identity)

    @cached_property
    def _home(self) -> Path:
        return self.cache or default_cache()

    @cached_property
    def _asked(self) -> str:
        """A name of everything that tokenised rows follow from, but for what the source holds."""
        template = self.tokenizer.chat_template
        special = self.tokenizer.special_tokens_map.items()
        asked = {
            "version": CACHE_VERSION,
            "source": _spelt(self.given),
            "split": self.options.split,
            "template": template,
            "day": str(self.options.day) if CLOCK in str(template) else None,
            "special": {name: str(token) for name, token in special},
            "options": [getattr(self.options, name) for name in CACHED_BY],
            "tokenizer": self.tokenizer.backend_tokenizer.to_str(),
            "images": self.options.sight and self.options.sight.identity,
        }
        return name_for(asked)

    def make(self) -> None:
        """Make what of the set is not there. Raises as `rows`."""
        options = self.options
        how = options.train_on, options.prompts, options.day, options.sight
        encoder = Encoder(self.tokenizer, *how)
        size = None if options.streaming else self.source.size
        reading = doing("reading and tokenising rows", size, DATA_READ)
        with reading, making_set(self.folder, options.kind) as making:
            if making.is_whole:  # by another process, until now
                return
            counts = make_shards(making, self.source, encoder, options)
            if (reason := self.reason_to_refuse(counts)) is not None:
                if not options.streaming:  # else rows before the bad one may be in use
                    making.clear()
                raise reason
            making.finish(counts, self._asked)

    def _of_a_changed_source(self, wanted: Callable[[TokenRows], bool]) -> TokenRows | None:
        """Cached rows that are `wanted`, asked for in the same way, if the source's are not."""
        current = None
        with suppress(DataError):
            current = self.folder
        for folder in sorted(sets_asked(self._home, self._asked), key=lambda one: one != current):
            rows = cached_set(folder)
            with suppress(DataError):
                if rows is not None and wanted(rows):
                    note = "the data has changed, is read otherwise or is gone since the run began"
                    notes = [f"{note}; its rows come from the cache {folder}"]
                    return None if folder == current else self.ready(rows, notes)
        return None

    def ready(self, rows: TokenRows, notes: Sequence[str]) -> TokenRows:
        """Rows from the cache with notes and warnings about them. Raises DataError."""
        counts, options = rows.counts, self.options
        if options.vocab_size is not None and counts.max_token_id >= options.vocab_size:
            token = self.tokenizer.convert_ids_to_tokens(counts.max_token_id)
            raise DataError(
                f"{counts.max_token_where}: token {token!r} has id {counts.max_token_id}, but the "
                f"model knows {options.vocab_size} tokens; use the tokenizer that belongs to the "
                "model"
            )
        warned = cut_warnings(counts, options.seq_len, options.truncation_mode)
        warned += lost_text(counts, LOSSY)
        ways = PROMPTS_READ.get(options.prompts)
        if ways and not ways & counts.wrapped.keys():
            warned += [f"data.prompts: {options.prompts} has no effect: no row is of such a form"]
        counts = replace(counts, choices=list(notes), warned=warned)
        return replace(rows, counts=counts, sight=options.sight)

    def reason_to_refuse(self, counts: Counts) -> DataError | None:
        """The reason for refusing the rows of the source, or None."""
        name, read, bad = self.source.name, counts.read, counts.bad
        if not read:
            return DataError(f"{name}: holds no rows")
        if bad == read and not self.options.streaming:
            return DataError(f"{counts.first_bad[0]} (all {read} rows are bad)")
        if bad and self.options.on_bad_row == "refuse":
            many = "it is the only bad row" if bad == 1 else f"{bad} rows are bad"
            many = "" if self.options.streaming else f"{many} of {read}; "
            return DataError(
                f"{counts.first_bad[0]} ({many}mend them, or set data.on_bad_row: skip)"
            )
        if lost := lost_text(counts, TOO_LOSSY):
            return DataError(f"{name}: {lost[0]}; use a model whose tokenizer does")
        if sum(counts.parts):
            return None
        if counts.kept:
            return DataError(
                f"{name}: holds one row; method: {KINDS[self.options.kind].methods} also takes "
                "each prompt with another row's answer, so give it two rows or more"
            )
        return DataError(
            f"{name}: no token to train on is left in {number_of(read - bad, 'row')}: none has an "
            f"answer, or train.seq_len {self.options.seq_len} cuts it off (rows cut: "
            f"{counts.truncated}, dropped: {counts.too_long})"
        )


def _spelt(given: Given) -> object:
    """The name of a source, with absolute paths, as a run's folder has it."""
    if isinstance(given, str | Path):
        with suppress(DataError):
            named = resolve_name(str(given))
            if named.paths:
                return os.path.abspath(named.name) + named.spec[len(named.name) :]
        return str(given)
    if isinstance(given, list | tuple):
        others = "weight", "split", "format"
        return [
            {"path": _spelt(one.path)} | {name: getattr(one, name) for name in others}
            for one in given
            if isinstance(one, Part)
        ]
    return type(given).__name__


def hold_out(rows: TokenRows, share: float | int, seed: int) -> tuple[TokenRows, TokenRows]:
    """(train, held out): an int holds out that number of rows, a float below 1 that share of them.

    The choice follows from the rows' content and the seed alone, whatever their order. Rows with
    one context (what precedes the first target: a question) stay on one side, so that no held-out
    question is trained on with another answer. Contexts of more rows than are held out are told
    apart by their whole rows, which is noted in `counts.choices`: then equal rows stay together.
    Where that makes the number impossible, fewer are held out. Raises DataError if no row would be
    left on either side.
    """
    total = len(rows)
    wanted = share if isinstance(share, int) else max(1, round(share * total))
    if share <= 0 or wanted >= total:
        raise DataError(
            f"data.eval: {share} holds out {wanted} of {total} rows; at least one has to be left "
            "to train on"
        )
    contexts, hashes = rows.contexts[rows.chosen], rows.hashes[rows.chosen]
    _, group, sizes = np.unique(contexts, return_inverse=True, return_counts=True)
    too_large = sizes[group] > wanted
    keys = np.where(too_large, hashes, contexts)
    if (contexts != keys).any():
        rows.counts.choices.append(
            f"{int(too_large.sum()):,} rows share their prompt with more rows than are held out "
            f"({wanted:,}); of these, whole rows are held out, and their prompts are trained on"
        )
    values, group, sizes = np.unique(keys, return_inverse=True, return_counts=True)
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


def look_for_copies(rows: TokenRows, held: TokenRows) -> None:
    """Warn of held-out rows trained on, or whose prompts are. Raises DataError if all rows are."""
    copied = np.isin(held.hashes[held.chosen], rows.hashes[rows.chosen])
    asked = np.isin(held.contexts[held.chosen], rows.contexts[rows.chosen]) & ~copied
    if copied.all():
        raise DataError(
            f"data.eval: all {len(held):,} held-out rows are rows of data.train, too; name others, "
            "or a share of data.train such as 0.02"
        )
    for which, what in ((copied, "are"), (asked, "have a prompt that is")):
        if count := int(which.sum()):
            with_others = " with other answers" if which is asked else ""
            rows.counts.warned.append(
                f"{count:,} of {len(held):,} held-out rows {what} trained on as well{with_others}; "
                "the held-out loss looks better than it is"
            )


# Times the rows of all sources: with longer epochs, some source's rows occur over 100 times in one,
# which nobody wants, and the order of an epoch's rows (8 bytes each) would fill the memory.
LONGEST_EPOCH = 100


def weighted(rows: TokenRows, parts: Sequence[Part], seed: int) -> TokenRows:
    """Rows of which each source has its weight's share; the same rows where there are no weights.
    It is the shortest epoch with every row at least once: of one source each row occurs once, of
    the others each the same number of times, some once more. Those follow from the seed. Raises
    DataError if a source has no row left, and for weights that repeat rows beyond reason."""
    weights = [Fraction(part.weight) for part in parts if part.weight is not None]
    if not weights:
        return rows
    of_part = np.searchsorted(np.cumsum(rows.counts.parts), rows.chosen, side="right")
    places = [np.flatnonzero(of_part == number) for number in range(len(parts))]
    if empty := [part.path for part, found in zip(parts, places, strict=True) if not len(found)]:
        raise DataError(f"{empty[0]}: no row of it is left to train on, so it can have no weight")
    sizes = shares_of_sources([len(found) for found in places], weights)
    if sum(sizes) > LONGEST_EPOCH * len(rows):
        repeats = [size // len(found) for size, found in zip(sizes, places, strict=True)]
        most = max(repeats)
        raise DataError(
            f"{parts[repeats.index(most)].path}: by its weight each of its rows is {most:,} times "
            "in an epoch of all rows; give weights nearer to each other"
        )
    chosen = [repeated(found, size, seed) for found, size in zip(places, sizes, strict=True)]
    notes = [
        f"{part.path}: {size:,} rows of an epoch's {sum(sizes):,}, by its weight; "
        f"each of its {len(found):,} rows {size / len(found):.3g} times"
        for part, found, size in zip(parts, places, sizes, strict=True)
    ]
    counts = replace(rows.counts, choices=[*rows.counts.choices, *notes])
    return replace(rows.choose(np.concatenate(chosen)), counts=counts)


def shares_of_sources(sizes: Sequence[int], weights: Sequence[Fraction]) -> list[int]:
    """Rows of each source, within one of its weight's share, in the smallest total in which none
    has fewer than it holds."""
    parts = [weight / sum(weights) for weight in weights]
    total = -(-max(size / part for size, part in zip(sizes, parts, strict=True)) // 1)
    exact = [total * part for part in parts]
    found = [int(rows) for rows in exact]
    left = int(total) - sum(found)
    by_rest = sorted(range(len(exact)), key=lambda number: found[number] - exact[number])
    for number in by_rest[:left]:
        found[number] += 1
    return found


def repeated(places: IndexArray, size: int, seed: int) -> IndexArray:
    """`size` of the places in order, each as often as the next, or once more: int64 [size]."""
    times, more = divmod(size, len(places))
    extra = np.sort(permutation(len(places), seed, epoch=0)[:more])
    return np.concatenate([*[places] * times, places[extra]])
