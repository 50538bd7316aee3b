"""Tokenised rows in flat arrays that are mapped from disk: a large data set takes no RAM."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from array import array
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from megatrain.errors import StorageError

IdArray = npt.NDArray[np.int32]
MaskArray = npt.NDArray[np.bool_]
IndexArray = npt.NDArray[np.int64]
BAD_ROWS_KEPT = 5  # messages of the first bad rows, to be shown
UNREAD_KEPT = 50  # names of columns


@dataclass
class Counts:
    """Counts of a source's rows by what became of them. Tokens are counted without padding."""

    read: int = 0
    bad: int = 0
    first_bad: list[str] = field(default_factory=list)
    truncated: int = 0
    truncated_tokens: int = 0  # cut off, not trained on
    without_target: int = 0  # dropped: all of it is context, or the answer was cut off
    rewritten_turns: int = 0  # answers that the chat template rewrites once others follow
    max_token_id: int = -1
    max_token_where: str = ""
    notes: dict[str, int] = field(default_factory=dict)  # what is said, and how often it happened
    wrapped: dict[str, int] = field(default_factory=dict)  # rows by how they became text
    unread: list[str] = field(default_factory=list)  # columns and fields of turns that nobody reads

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
    """A data set as loader, packing and display see it."""

    @property
    def counts(self) -> Counts:
        """Counts of the source's rows, those held out included."""

    def __len__(self) -> int: ...

    @property
    def lengths(self) -> IndexArray:
        """Tokens of each row, int64 [rows]."""

    @property
    def target_counts(self) -> IndexArray:
        """Target tokens of each row, int64 [rows]."""

    @property
    def digest(self) -> str:
        """A short hash of the rows and their order: the same digest, the same data."""

    def row(self, index: int) -> tuple[IdArray, MaskArray]:
        """Ids int32 [tokens] and target mask bool [tokens]."""


@dataclass(frozen=True, eq=False)
class TokenRows:
    """Rows `chosen` of flat arrays, in which row i is [offsets[i], offsets[i + 1])."""

    ids: IdArray
    mask: MaskArray
    offsets: IndexArray
    targets: IndexArray
    hashes: npt.NDArray[np.uint64]  # of each row's ids and mask; equal rows have equal ones
    chosen: IndexArray
    counts: Counts

    def __len__(self) -> int:
        return len(self.chosen)

    @cached_property
    def lengths(self) -> IndexArray:
        return np.diff(self.offsets)[self.chosen]

    @cached_property
    def target_counts(self) -> IndexArray:
        return self.targets[self.chosen]

    @cached_property
    def digest(self) -> str:
        return hashlib.blake2b(self.hashes[self.chosen].tobytes(), digest_size=8).hexdigest()

    def row(self, index: int) -> tuple[IdArray, MaskArray]:
        place = int(self.chosen[index])
        start, stop = int(self.offsets[place]), int(self.offsets[place + 1])
        return self.ids[start:stop], self.mask[start:stop]

    def choose(self, rows: IndexArray) -> TokenRows:
        """The set of these rows (indices into this one), sharing the arrays."""
        return replace(self, chosen=self.chosen[rows])


def default_cache() -> Path:
    """The folder of tokenised data: $MEGATRAIN_CACHE, else one in the user's cache folder."""
    if "MEGATRAIN_CACHE" in os.environ:
        return Path(os.environ["MEGATRAIN_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "megatrain" / "tokens"


class RowWriter:
    """Appends rows to the files of one cached set."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ids = (folder / "ids.bin").open("wb")
        self._mask = (folder / "mask.bin").open("wb")
        # 8 bytes a row each, where a list of ints takes 40
        self._lengths, self._targets, self._hashes = array("q"), array("q"), array("Q")

    def add(self, ids: IdArray, mask: MaskArray) -> None:
        """Append a row: ids int32 [tokens], mask bool [tokens]."""
        data, flags = ids.tobytes(), mask.tobytes()
        self._ids.write(data)
        self._mask.write(flags)
        self._lengths.append(len(ids))
        self._targets.append(int(mask.sum()))
        digest = hashlib.blake2b(data + flags, digest_size=8).digest()
        self._hashes.append(int.from_bytes(digest, "little"))

    def __len__(self) -> int:
        return len(self._lengths)

    def finish(self, counts: Counts) -> None:
        """Write the index and, last, the counts: their file marks the set as complete."""
        self.close()
        np.save(self._folder / "offsets.npy", np.concatenate([[0], np.cumsum(self._lengths)]))
        np.save(self._folder / "targets.npy", self._targets)
        np.save(self._folder / "hashes.npy", self._hashes)
        (self._folder / "counts.json").write_text(json.dumps(asdict(counts)))

    def close(self) -> None:
        """Close the files; what was written stays."""
        self._ids.close()
        self._mask.close()


@contextmanager
def new_cached_set(cache: Path, key: str) -> Iterator[RowWriter]:
    """Write a set under `cache/key`, where it appears whole, or not at all if the block raises.

    Raises StorageError on a full disk.
    """
    folder = cache / f"{key}.tmp-{uuid.uuid4().hex[:8]}"
    try:
        folder.mkdir(parents=True)
        with closing(RowWriter(folder)) as writer:
            yield writer
        # else another process was quicker, and wrote the same
        if load_cached_set(cache, key) is None:
            shutil.rmtree(cache / key, ignore_errors=True)
            folder.rename(cache / key)
    except OSError as error:
        reason = error.strerror or str(error)
        raise StorageError(
            f"{cache}: cannot keep the tokenised data here ({reason}); "
            "set MEGATRAIN_CACHE to another folder"
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def load_cached_set(cache: Path, key: str) -> TokenRows | None:
    """The set under `cache/key`, mapped from disk; None if it is missing or not whole."""
    folder = cache / key
    try:
        counts = Counts(**json.loads((folder / "counts.json").read_text()))
        files = (folder / f"{name}.npy" for name in ("offsets", "targets", "hashes"))
        offsets, targets, hashes = map(np.load, files)
        ids = np.memmap(folder / "ids.bin", np.int32, mode="r")
        mask = np.memmap(folder / "mask.bin", np.bool_, mode="r")
    except (OSError, ValueError, TypeError, EOFError):
        return None
    rows = len(targets)
    if not len(ids) == len(mask) == offsets[-1] or not len(offsets) - 1 == len(hashes) == rows:
        return None
    return TokenRows(ids, mask, offsets, targets, hashes, np.arange(rows), counts)
