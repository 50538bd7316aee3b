"""Tokenised rows in flat arrays that are mapped from disk: a large data set takes no RAM."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from megatrain.data.samples import KINDS, PLAIN
from megatrain.errors import ConfigError, DataError

IdArray = npt.NDArray[np.int32]
MaskArray = npt.NDArray[np.bool_]
IndexArray = npt.NDArray[np.int64]
HashArray = npt.NDArray[np.uint64]
ValueArray = npt.NDArray[np.float32]
BAD_ROWS_KEPT = 5  # messages of the first bad rows, to be shown
UNREAD_KEPT = 50  # names of columns
_SUMMED = (
    *("read", "bad", "truncated", "truncated_tokens", "too_long", "without_target"),
    *("rewritten_turns", "split_texts", "cut_answers"),
)  # of Counts

Number = TypeVar("Number", bound=np.generic)


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
    longest: int = 0  # before it was cut
    enough: int = 0  # the seq_len that keeps ENOUGH of all tokens
    warned: list[str] = field(default_factory=list)

    def add(self, later: Counts) -> None:
        """Add the counts of the next rows, except messages and what `measure_lengths` finds
        of all rows."""
        for name in _SUMMED:
            setattr(self, name, getattr(self, name) + getattr(later, name))
        self.first_bad += later.first_bad[: BAD_ROWS_KEPT - len(self.first_bad)]
        self.saw(later.max_token_id, later.max_token_where)
        self.parts = [sum(rows) for rows in zip_longest(self.parts, later.parts, fillvalue=0)]
        for counted, more in ((self.notes, later.notes), (self.wrapped, later.wrapped)):
            for what, count in more.items():
                counted[what] = counted.get(what, 0) + count
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

    def add_notes(self, notes: Iterable[str]) -> None:
        """Count what happened to a row."""
        for note in notes:
            self.notes[note] = self.notes.get(note, 0) + 1

    def add_unread(self, names: Iterable[str]) -> None:
        """Note columns that are not read, each once, and not all where there is no end of them."""
        new = [name for name in names if name not in self.unread]
        self.unread += new[: UNREAD_KEPT - len(self.unread)]

    def add_bad(self, message: str) -> None:
        """Count a bad row, and keep its message if it is one of the first."""
        self.bad += 1
        if len(self.first_bad) < BAD_ROWS_KEPT:
            self.first_bad.append(message)


class Rows(Protocol):
    """A data set as loader, packing and display see it.

    A row is one sequence, or two: the answers of a pair, the chosen one first, or a judged answer
    and its mismatch, which is the same prompt with the answer of another row.
    """

    @property
    def counts(self) -> Counts:
        """Counts of the source's rows, those held out included."""

    def __len__(self) -> int: ...

    @property
    def kind(self) -> str:
        """One of KINDS."""

    @property
    def sides(self) -> int:
        """Sequences of each row."""

    @property
    def lengths(self) -> IndexArray:
        """Tokens of each row that are trained on, prompts included, int64 [rows]."""

    @property
    def side_lengths(self) -> IndexArray:
        """Tokens of each sequence, int64 [rows, sides]."""

    @property
    def target_counts(self) -> IndexArray:
        """Target tokens of each row, int64 [rows]."""

    @property
    def values(self) -> ValueArray | None:
        """float32 [rows], of judged rows 1 where the answer is wanted, else 0; of pairs the margin,
        nan where there is none. None: of plain rows."""

    @property
    def digest(self) -> str:
        """A short hash of the rows and their order: the same digest, the same data."""

    def row(self, index: int) -> tuple[IdArray, MaskArray]:
        """Ids int32 [tokens] and target mask bool [tokens] of a row's first sequence."""

    def side(self, index: int, side: int) -> tuple[IdArray, MaskArray]:
        """The same of any of its sequences."""


class PlainRows:
    """The common part of rows of one sequence."""

    kind = PLAIN
    sides = 1
    values = None

    if TYPE_CHECKING:  # which they have themselves; a property would be the default of a field

        @property
        def lengths(self) -> IndexArray: ...

        def row(self, index: int) -> tuple[IdArray, MaskArray]: ...

    @property
    def side_lengths(self) -> IndexArray:
        return self.lengths[:, None]

    def side(self, index: int, side: int) -> tuple[IdArray, MaskArray]:
        return self.row(index)


def check_digest(found: str, expected: object) -> None:
    """Raises DataError if the training rows are not those that a checkpoint names."""
    if found != expected:
        raise DataError(
            "the training rows are not those of the checkpoint: the data, the tokenizer or how "
            "rows are cut has changed; bring back what was changed, or start a new run"
        )


class Joined(Generic[Number]):
    """Arrays one behind the other, of which a slice lies within one."""

    def __init__(self, pieces: Sequence[npt.NDArray[Number]]) -> None:
        self.pieces = pieces
        self._begins = np.cumsum([0, *map(len, pieces)])[:-1]

    def __getitem__(self, span: slice) -> npt.NDArray[Number]:
        number = int(np.searchsorted(self._begins, span.start, side="right")) - 1
        begin = int(self._begins[number])
        return self.pieces[number][span.start - begin : span.stop - begin]

    def __array__(self, *given: Any, **named: Any) -> npt.NDArray[Number]:
        return np.concatenate(self.pieces)


@dataclass(frozen=True, eq=False)
class TokenRows:
    """Rows `chosen` of flat arrays, in which sequence i is [offsets[i], offsets[i + 1]).

    Sequences i * sides and on are those of row i.
    """

    ids: IdArray | Joined[np.int32]
    mask: MaskArray | Joined[np.bool_]
    offsets: IndexArray
    targets: IndexArray
    hashes: HashArray  # of what of each row is trained on, ids and mask; equal rows have equal ones
    joined: MaskArray  # rows that are pieces of a text which the next row goes on with
    contexts: HashArray  # of what precedes each row's first target; the row's where nothing does
    chosen: IndexArray
    counts: Counts
    kind: str = PLAIN
    of_rows: ValueArray | None = None  # see `Rows.values`
    mismatches: HashArray | None = None  # of the mismatches of judged rows

    def __len__(self) -> int:
        return len(self.chosen)

    @property
    def sides(self) -> int:
        return KINDS[self.kind].sides

    @cached_property
    def side_lengths(self) -> IndexArray:
        lengths: IndexArray = np.diff(self.offsets).reshape(-1, self.sides)
        return lengths[self.chosen]

    @cached_property
    def lengths(self) -> IndexArray:
        if self.sides == 1:
            return self.side_lengths[:, 0]
        lengths: IndexArray = self.side_lengths[:, : KINDS[self.kind].trained].sum(1)
        return lengths

    @cached_property
    def target_counts(self) -> IndexArray:
        return self.targets[self.chosen]

    @cached_property
    def values(self) -> ValueArray | None:
        return None if self.of_rows is None else self.of_rows[self.chosen]

    @cached_property
    def digest(self) -> str:
        found = self.hashes[self.chosen].tobytes()
        if self.mismatches is not None:
            found += self.mismatches[self.chosen].tobytes()
        return hashlib.blake2b(found, digest_size=8).hexdigest()

    def row(self, index: int) -> tuple[IdArray, MaskArray]:
        return self.side(index, 0)

    def side(self, index: int, side: int) -> tuple[IdArray, MaskArray]:
        place = int(self.chosen[index]) * self.sides + side
        start, stop = int(self.offsets[place]), int(self.offsets[place + 1])
        return self.ids[start:stop], self.mask[start:stop]

    def choose(self, rows: IndexArray) -> TokenRows:
        """The set of these rows (indices into this one), sharing the arrays."""
        return replace(self, chosen=self.chosen[rows])


def default_cache() -> Path:
    """The folder of tokenised data: $MEGATRAIN_CACHE, else one in the user's cache folder.

    Raises ConfigError where there is neither.
    """
    if "MEGATRAIN_CACHE" in os.environ:
        return Path(os.environ["MEGATRAIN_CACHE"])
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            "no home folder is known to keep tokenised rows in: set MEGATRAIN_CACHE to a folder"
        ) from error
    return folder / "megatrain" / "tokens"


def mix64(values: npt.NDArray[np.uint64], seed: int) -> npt.NDArray[np.uint64]:
    """Scrambled values, uint64 of the same shape, one to one for a given seed.

    The finaliser of SplitMix64 (Steele et al. 2014).
    """
    golden = 0x9E3779B97F4A7C15
    start = np.uint64((seed + 1) * golden % 2**64)
    mixed = values.astype(np.uint64) * np.uint64(golden) + start
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def permutation(size: int, seed: int, epoch: int, window: int = 0) -> npt.NDArray[np.int64]:
    """A shuffle of range(size), int64 [size], that follows from seed, epoch and window alone.

    The first window is shuffled as a whole set is.
    """
    keys = mix64(mix64(np.arange(size, dtype=np.uint64), seed), epoch)
    if window:
        keys = mix64(keys, window)
    return np.argsort(keys, kind="stable").astype(np.int64)
