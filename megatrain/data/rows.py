"""Tokenised rows in flat arrays that are mapped from disk: a large data set takes no RAM."""

from __future__ import annotations

import json
import os
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from megatrain.data.images import Sight
from megatrain.data.samples import KINDS, PLAIN, Picture, digest_of
from megatrain.errors import ConfigError, DataError, number_of
from megatrain.machine.profile import cache_folder

IdArray = npt.NDArray[np.int32]
MaskArray = npt.NDArray[np.bool_]
IndexArray = npt.NDArray[np.int64]
HashArray = npt.NDArray[np.uint64]
ValueArray = npt.NDArray[np.float32]
BAD_ROWS_KEPT = 5  # messages of the first bad rows, to be shown
UNREAD_KEPT = 50  # names of columns
_SUMMED = (
    *("read", "bad", "truncated", "truncated_tokens", "too_long", "without_target"),
    *("rewritten_turns", "split_texts", "cut_answers", "unknown", "lossy"),
)  # of Counts


@dataclass
class Counts:
    """Counts of a source's rows by what became of them. Tokens are counted without padding."""

    read: int = 0
    bad: int = 0
    first_bad: list[str] = field(default_factory=list)
    truncated: int = 0
    truncated_tokens: int = 0  # cut off, not trained on
    too_long: int = 0  # dropped rather than cut
    without_target: int = 0  # dropped: all of it is context, or an answer was cut off
    rewritten_turns: int = 0  # answers that the chat template rewrites once others follow
    max_token_id: int = -1
    max_token_where: str = ""
    parts: list[int] = field(default_factory=lambda: [0])  # rows kept of each source
    choices: list[str] = field(default_factory=list)  # messages about what was chosen
    notes: dict[str, int] = field(default_factory=dict)  # messages, and how often each happened
    wrapped: dict[str, int] = field(default_factory=dict)  # rows by how they became text
    unread: list[str] = field(default_factory=list)  # columns and fields of turns that nobody reads
    split_texts: int = 0  # texts that are more than one row each
    tokens: int = 0  # before anything was cut
    cut_answers: int = 0  # rows that lost target tokens, and with them an answer's end
    unknown: int = 0  # tokens that stand for text which the tokenizer does not know
    lossy: int = 0  # rows that lose more than LOST of their letters, or of an answer's
    longest: int = 0  # before it was cut
    enough: int = 0  # the seq_len that keeps ENOUGH of all tokens
    warned: list[str] = field(default_factory=list)

    def add(self, later: Counts) -> None:
        """Add the counts of the next rows, except messages and what `measure_lengths` finds."""
        for name in _SUMMED:
            setattr(self, name, getattr(self, name) + getattr(later, name))
        self.first_bad += later.first_bad[: BAD_ROWS_KEPT - len(self.first_bad)]
        self.saw(later.max_token_id, later.max_token_where)
        self.parts = [sum(rows) for rows in zip_longest(self.parts, later.parts, fillvalue=0)]
        count_up(self.notes, later.notes)
        count_up(self.wrapped, later.wrapped)
        self.add_unread(later.unread)

    def keep(self, part: int) -> None:
        """Count a row that is kept, of this source."""
        self.parts += [0] * (part + 1 - len(self.parts))
        self.parts[part] += 1

    def saw(self, token_id: int, where: str) -> None:
        """Note a row's largest token id if none of an earlier row is as large."""
        if token_id > self.max_token_id:
            self.max_token_id, self.max_token_where = token_id, where

    @property
    def kept(self) -> int:
        """Rows that were not refused or dropped, before long texts are split."""
        return self.read - self.bad - self.without_target - self.too_long

    @property
    def cut_share(self) -> float:
        """The share of all tokens that is cut off."""
        return self.truncated_tokens / max(1, self.tokens)

    def add_unread(self, names: Iterable[str]) -> None:
        """Note columns that are not read, each once, and not all where there is no end of them."""
        new = [name for name in names if name not in self.unread]
        self.unread += new[: UNREAD_KEPT - len(self.unread)]

    def add_bad(self, message: str) -> None:
        """Count a bad row, and keep its message if it is one of the first."""
        self.bad += 1
        if len(self.first_bad) < BAD_ROWS_KEPT:
            self.first_bad.append(message)


def count_up(counted: dict[str, int], more: Mapping[str, int]) -> None:
    """Add counts by name."""
    for what, count in more.items():
        counted[what] = counted.get(what, 0) + count


@dataclass(frozen=True)
class Position:
    """The position of a loader: the next row is number `index` of the shuffle of window `window` in
    epoch `epoch`, and `step` steps were handed out."""

    step: int = 0
    epoch: int = 0
    index: int = 0
    window: int = 0

    @property
    def opened(self) -> int | None:
        """Windows of which rows were handed out; None: all that there are."""
        return None if self.epoch else self.window + (self.index > 0)


def check_digest(found: str, expected: object) -> None:
    """Raises DataError if the training rows are not those that a checkpoint names."""
    if found != expected:
        raise DataError(
            "the training rows are not those of the checkpoint: the data, the tokenizer or how "
            "rows are cut has changed; bring back what was changed, or start a new run"
        )


class Joined:
    """Arrays one behind the other, of which a slice lies within one."""

    def __init__(self, pieces: Sequence[npt.NDArray[Any]]) -> None:
        self.pieces = pieces
        self._begins = np.cumsum([0, *map(len, pieces)])[:-1]

    def __getitem__(self, span: slice) -> npt.NDArray[Any]:
        number = int(np.searchsorted(self._begins, span.start, side="right")) - 1
        begin = int(self._begins[number])
        return self.pieces[number][span.start - begin : span.stop - begin]

    def __array__(self, *given: Any, **named: Any) -> npt.NDArray[Any]:
        return np.concatenate(self.pieces)


@dataclass(frozen=True, eq=False)
class TokenRows:
    """Rows `chosen` of flat arrays: sequence i is [offsets[i], offsets[i + 1]), and those from i *
    sides on are row i's. A row is one sequence, or two: the answers of a pair, the chosen one
    first, or a judged answer and its mismatch: the same prompt with another row's answer."""

    ids: IdArray | Joined
    mask: MaskArray | Joined
    offsets: IndexArray
    targets: IndexArray
    hashes: HashArray  # of what of each row is trained on, ids and mask; equal rows have equal ones
    joined: MaskArray  # rows that are pieces of a text which the next row goes on with
    contexts: HashArray  # of what precedes each row's first target; the row's where nothing does
    chosen: IndexArray
    counts: Counts
    kind: str = PLAIN
    of_rows: ValueArray | None = None  # see `values`
    mismatches: HashArray | None = None  # of the mismatches of judged rows
    # of each token, by the names of micro-batches' tensors
    of_tokens: Mapping[str, ValueArray] = field(default_factory=dict)
    # JSON of each sequence's pictures, and where it is in that; None: no row has one
    images: npt.NDArray[np.uint8] | Joined | None = None
    image_offsets: IndexArray = field(default_factory=lambda: np.zeros(1, np.int64))
    sight: Sight | None = None  # opens them

    def __len__(self) -> int:
        return len(self.chosen)

    @property
    def sides(self) -> int:
        return KINDS[self.kind].sides

    @cached_property
    def side_lengths(self) -> IndexArray:
        """Tokens of each sequence, int64 [rows, sides]."""
        lengths: IndexArray = np.diff(self.offsets).reshape(-1, self.sides)
        return lengths[self.chosen]

    @cached_property
    def lengths(self) -> IndexArray:
        """Tokens of each row that are trained on, prompts included, int64 [rows]."""
        lengths: IndexArray = self.side_lengths[:, : KINDS[self.kind].trained].sum(1)
        return lengths

    @cached_property
    def target_counts(self) -> IndexArray:
        return self.targets[self.chosen]

    @cached_property
    def values(self) -> ValueArray | None:
        """float32 [rows], of judged rows 1 where the answer is wanted, else 0; of pairs the margin,
        nan where there is none. None: of plain rows."""
        return None if self.of_rows is None else self.of_rows[self.chosen]

    @cached_property
    def digest(self) -> str:
        """A short hash of the rows and their order."""
        found = self.hashes[self.chosen].tobytes()
        if self.mismatches is not None:
            found += self.mismatches[self.chosen].tobytes()
        return digest_of(found, 8)

    def row(self, index: int) -> tuple[IdArray, MaskArray]:
        return self.side(index, 0)

    def side(self, index: int, side: int) -> tuple[IdArray, MaskArray]:
        """Ids int32 [tokens] and target mask bool [tokens] of a row's sequence."""
        span = self.span(index, side)
        return self.ids[span], self.mask[span]

    def span(self, index: int, side: int) -> slice:
        """The place of a row's sequence in the flat arrays."""
        place = int(self.chosen[index]) * self.sides + side
        return slice(int(self.offsets[place]), int(self.offsets[place + 1]))

    def pictures(self, index: int, side: int) -> list[Picture]:
        """The images of a row's sequence, in order."""
        if self.images is None:
            return []
        place = int(self.chosen[index]) * self.sides + side
        span = slice(int(self.image_offsets[place]), int(self.image_offsets[place + 1]))
        found = bytes(self.images[span]) if span.stop > span.start else b"[]"
        return [Picture(*one) for one in json.loads(found)]

    def image_tokens(self) -> tuple[float, float, float]:
        """The share of tokens that are of images, the most of a sequence, and tokens per image."""
        if self.images is None or self.sight is None:
            return 0.0, 0.0, 1.0
        end = int(self.offsets[-1])
        places = np.flatnonzero(np.isin(self.ids[slice(0, end)], [*self.sight.ids]))
        counts = np.diff(np.searchsorted(places, self.offsets))
        shares = counts / np.maximum(1, np.diff(self.offsets))
        number = sum(len(self.pictures(*place)) for place in np.ndindex(*self.side_lengths.shape))
        return len(places) / max(1, end), float(shares.max()), len(places) / max(1, number)

    def all_pictures(self) -> set[Picture]:
        """The images of all rows."""
        sequences = np.ndindex(*self.side_lengths.shape) if self.images is not None else ()
        return {one for place in sequences for one in self.pictures(*place)}

    def choose(self, rows: IndexArray) -> TokenRows:
        """The set of these rows (indices into this one), sharing the arrays."""
        return replace(self, chosen=self.chosen[rows])


def default_cache() -> Path:
    """The folder of tokenised data: $MEGATRAIN_CACHE, else one in the user's cache folder."""
    try:
        folder = cache_folder()
    except RuntimeError as error:
        raise ConfigError(
            "no home folder is known to keep tokenised rows in: set MEGATRAIN_CACHE to a folder"
        ) from error
    return folder if os.environ.get("MEGATRAIN_CACHE") else folder / "tokens"


def mix64(values: npt.NDArray[np.uint64], seed: int) -> npt.NDArray[np.uint64]:
    """Scrambled values, uint64 of the same shape, one to one for a given seed. The finaliser of
    SplitMix64 (Steele et al. 2014)."""
    golden = 0x9E3779B97F4A7C15
    start = np.uint64((seed + 1) * golden % 2**64)
    mixed = values.astype(np.uint64) * np.uint64(golden) + start
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def permutation(size: int, seed: int, epoch: int, window: int = 0) -> npt.NDArray[np.int64]:
    """A shuffle of range(size), int64, that follows from seed, epoch and window alone; the first
    window's is that of a whole set."""
    # to add the seed to the rows' numbers would give the same order some rows further on
    keys = mix64(np.arange(size, dtype=np.uint64), 0) ^ mix64(np.zeros(1, np.uint64), seed)
    keys = mix64(keys, epoch)
    if window:
        keys = mix64(keys, window)
    return np.argsort(keys, kind="stable").astype(np.int64)


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Blocks of `seq_len` tokens over concatenated documents.

    The last block holds the rest, if that is two tokens or more. Every token but a block's first is
    a target, document starts included. Attention is not cut at document borders; each document ends
    with the end-of-sequence token, and so does a piece of one whose next piece is not there: it was
    held out. Blocks are gathered when asked for; nothing is copied ahead.
    """

    documents: TokenRows
    seq_len: int
    eos: int
    kind: ClassVar[str] = PLAIN
    sides: ClassVar[int] = 1
    values: ClassVar[None] = None

    @property
    def counts(self) -> Counts:
        return self.documents.counts

    @cached_property
    def _ends(self) -> IndexArray:
        return np.cumsum(self.documents.lengths + self._broken)

    @cached_property
    def _broken(self) -> MaskArray:
        """Pieces that the next row does not go on with, bool [documents]."""
        chosen = self.documents.chosen
        followed = np.append(chosen[1:] == chosen[:-1] + 1, False)
        broken: MaskArray = self.documents.joined[chosen] & ~followed
        return broken

    @property
    def _tokens(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    @property
    def remainder(self) -> int:
        """Tokens after the last whole block."""
        return self._tokens % self.seq_len

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def lengths(self) -> IndexArray:
        last = [self.remainder] if self.remainder >= 2 else []
        whole = np.full(self._tokens // self.seq_len, self.seq_len)
        return np.concatenate([whole, last]).astype(np.int64)

    @property
    def side_lengths(self) -> IndexArray:
        return self.lengths[:, None]

    @property
    def target_counts(self) -> IndexArray:
        return self.lengths - 1

    def side(self, index: int, side: int) -> tuple[IdArray, MaskArray]:
        return self.row(index)

    @cached_property
    def digest(self) -> str:
        breaks = np.flatnonzero(self._broken).tolist()
        return digest_of(f"{self.documents.digest} {self.seq_len} {breaks}", 8)

    def row(self, index: int) -> tuple[IdArray, MaskArray]:
        start = index * self.seq_len
        stop = start + int(self.lengths[index])
        first = int(np.searchsorted(self._ends, start, side="right"))
        pieces, place = [], start
        while place < stop:
            ids, _ = self.documents.row(first)
            if self._broken[first]:
                ids = np.append(ids, np.int32(self.eos))
            begin = int(self._ends[first]) - len(ids)
            pieces.append(ids[place - begin : stop - begin])
            place, first = place + len(pieces[-1]), first + 1
        mask = np.ones(stop - start, np.bool_)
        mask[0] = False
        return np.concatenate(pieces), mask


Rows = TokenRows | PackedRows  # as loader and display see them


def pack(documents: TokenRows, seq_len: int, eos: int) -> PackedRows:
    """Blocks of `seq_len` tokens. Raises DataError if the documents hold fewer than two tokens."""
    assert seq_len >= 2, "a block of one token has nothing to predict"
    packed = PackedRows(documents, seq_len, eos)
    if not len(packed):
        raise DataError("the documents hold fewer than two tokens; there is nothing to train on")
    return packed


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Numbers of the rows packed into each sequence of `capacity` tokens, where they leave the
    least room: this works best with the longest rows first."""
    sequences: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, number of the sequence), ascending
    for number, length in enumerate(lengths):
        assert length <= capacity, (length, capacity)
        place = bisect_left(room, (length, -1))
        if place == len(room):
            sequences.append([])
            left, sequence = capacity, len(sequences) - 1
        else:
            left, sequence = room.pop(place)
        sequences[sequence].append(number)
        insort(room, (left - length, sequence))
    return sequences


CUT_SHARE = 0.1  # of all tokens; more of them cut off is worth a warning
_ENOUGH = 0.99  # of all tokens, which the advised seq_len keeps
MOST_CUT = 0.5  # of all tokens; of more, somebody has to choose how they are cut
KEEP_END, CONTEXT, DROP = "keep_end", "context", "drop"  # else the start is kept
Tokens = tuple[IdArray, MaskArray]


def split(ids: IdArray, mask: MaskArray, seq_len: int | None, counts: Counts) -> Iterator[Tokens]:
    """Rows of at most `seq_len` tokens of a text. Each begins with the last token of the one
    before, as its first is no target: together they have the text's targets."""
    if seq_len is None or len(ids) <= seq_len:
        yield ids, mask
        return
    counts.split_texts += 1
    for start in range(0, len(ids) - 1, seq_len - 1):
        flags = mask[start : start + seq_len].copy()
        flags[0] = False
        yield ids[start : start + seq_len], flags


def shortened(ids: IdArray, mask: MaskArray, seq_len: int | None, mode: str) -> Tokens:
    """The first `seq_len` tokens, or the last of them, whose first is no target."""
    if seq_len is None or len(ids) <= seq_len:
        return ids, mask
    if mode not in (KEEP_END, CONTEXT):
        return ids[:seq_len], mask[:seq_len]
    kept = mask[-seq_len:].copy()
    kept[0] = False
    return ids[-seq_len:], kept


def measure_lengths(counts: Counts, lengths: IndexArray) -> None:
    """Note all tokens, the longest row and the seq_len that keeps _ENOUGH of the tokens; lengths,
    int64, are of rows before they were cut."""
    if not len(lengths):
        return
    ascending = np.sort(lengths)
    counts.tokens, counts.longest = int(ascending.sum()), int(ascending[-1])
    # what a seq_len of ascending[i] keeps: all of the rows up to i, and as much of each after it
    after = np.arange(len(ascending) - 1, -1, -1)
    kept = np.cumsum(ascending) + ascending * after
    place = int(np.searchsorted(kept, _ENOUGH * counts.tokens))
    # between two lengths each token of seq_len keeps one of every row that is longer
    longer = int(after[place]) + 1
    too_much = int((kept[place] - _ENOUGH * counts.tokens) // longer)
    counts.enough = int(ascending[place]) - too_much


LOST, LOSSY, TOO_LOSSY = 0.1, 0.01, 1 / 3  # of a row; of a set, worth a warning or a refusal


def lost_text(counts: Counts, above: float) -> list[str]:
    """A sentence if the tokenizer loses text, in more than this share of all tokens or rows."""
    found = []
    if counts.unknown > above * counts.tokens:
        found.append(f"{counts.unknown:,} of {counts.tokens:,} tokens are the unknown token")
    if counts.lossy > above * (good := counts.read - counts.bad):
        found.append(f"{counts.lossy:,} of {good:,} rows lose over {LOST:.0%} of their letters")
    return [f"the tokenizer does not know this text: {' and '.join(found)}"] if found else []


def cut_warnings(counts: Counts, seq_len: int | None, mode: str) -> list[str]:
    """A warning where the cuts take more than CUT_SHARE of the tokens, or a part of an answer."""
    share = counts.cut_share
    if seq_len is None or not (counts.cut_answers or share > CUT_SHARE):
        return []
    advice = f"{counts.longest:,} keeps all"
    part = {KEEP_END: "the beginning", CONTEXT: "all or the beginning"}.get(mode, "the end")
    if counts.enough > seq_len:
        advice = f"{counts.enough:,} keeps {_ENOUGH:.0%} of the tokens, {advice}"
    return [
        f"{number_of(counts.truncated, 'row')} over train.seq_len {seq_len:,}: {share:.1%} of "
        f"all tokens are cut off, and {part} of an answer in "
        f"{number_of(counts.cut_answers, 'row')}; a seq_len of {advice}"
    ]
