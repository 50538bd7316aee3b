"""Tokenised rows in flat arrays that are mapped from disk: a large data set takes no RAM."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import uuid
from array import array
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from tokenize import TokenError
from typing import Protocol

import numpy as np
import numpy.typing as npt

from megatrain.durable import sync_folder
from megatrain.errors import ConfigError, DataError, StorageError

IdArray = npt.NDArray[np.int32]
MaskArray = npt.NDArray[np.bool_]
IndexArray = npt.NDArray[np.int64]
HashArray = npt.NDArray[np.uint64]
BAD_ROWS_KEPT = 5  # messages of the first bad rows, to be shown
INDEX = ("offsets.npy", "targets.npy", "hashes.npy", "contexts.npy", "joined.npy")
ABOUT = "counts.json"  # counts, and the hashes of ids.bin, mask.bin and INDEX; written last
# what is left of a damaged file may be anything
UNREADABLE = (
    OSError,
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    EOFError,
    RecursionError,
    SyntaxError,  # numpy parses headers of arrays as Python
    TokenError,
)
UNREAD_KEPT = 50  # names of columns

logger = logging.getLogger("megatrain")


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
    parts: list[int] = field(default_factory=lambda: [0])  # rows kept of each source
    choices: list[str] = field(default_factory=list)  # what was chosen and how, to be said
    notes: dict[str, int] = field(default_factory=dict)  # what is said, and how often it happened
    wrapped: dict[str, int] = field(default_factory=dict)  # rows by how they became text
    unread: list[str] = field(default_factory=list)  # columns and fields of turns that nobody reads
    split_texts: int = 0  # texts that are more than one row each
    tokens: int = 0  # before anything was cut
    cut_answers: int = 0  # rows that lost target tokens, and with them an answer's end
    longest: int = 0  # before it was cut
    enough: int = 0  # the seq_len that keeps ENOUGH of all tokens
    warned: list[str] = field(default_factory=list)

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


def check_digest(rows: Rows, expected: object) -> None:
    """Raises DataError if the training rows are not those that a checkpoint names."""
    if rows.digest != expected:
        raise DataError(
            "the training rows are not those of the checkpoint: the data, the tokenizer or how "
            "rows are cut has changed; bring back what was changed, or start a new run"
        )


@dataclass(frozen=True, eq=False)
class TokenRows:
    """Rows `chosen` of flat arrays, in which row i is [offsets[i], offsets[i + 1])."""

    ids: IdArray
    mask: MaskArray
    offsets: IndexArray
    targets: IndexArray
    hashes: HashArray  # of each row's ids and mask; equal rows have equal ones
    joined: MaskArray  # rows that are pieces of a text which the next row goes on with
    contexts: HashArray  # of what precedes each row's first target; the row's where nothing does
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


class RowWriter:
    """Appends rows to the files of one cached set, which only their owner may read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ids, self._mask = (HashedFile(folder / name) for name in ("ids.bin", "mask.bin"))
        # 8 bytes a row each, where a list of ints takes 40
        self._lengths, self._targets = array("q"), array("q")
        self._hashes, self._contexts, self._joined = array("Q"), array("Q"), array("b")

    def add(self, ids: IdArray, mask: MaskArray, joined: bool = False) -> None:
        """Append a row: ids int32 [tokens], mask bool [tokens].

        joined: the next row goes on with its text.
        """
        data, flags = ids.tobytes(), mask.tobytes()
        self._ids.write(data)
        self._mask.write(flags)
        self._joined.append(joined)
        self._lengths.append(len(ids))
        self._targets.append(int(mask.sum()))
        self._hashes.append(_hash64(data + flags))
        first = int(mask.argmax())  # a row's first token is never a target
        self._contexts.append(_hash64(ids[:first].tobytes()) if first > 1 else self._hashes[-1])

    def __len__(self) -> int:
        return len(self._lengths)

    def finish(self, counts: Counts, asked: str = "") -> None:
        """Write the index and, last, the counts and every file's hash: theirs is the last file.

        asked: a name of what was asked for, whatever the source then held: see `sets_asked`.
        """
        offsets = np.concatenate([[0], np.cumsum(self._lengths)])
        of_rows = (self._targets, self._hashes, self._contexts, self._joined)
        index = (offsets, *map(np.asarray, of_rows))
        files = {"ids.bin": self._ids, "mask.bin": self._mask}
        for name, values in zip(INDEX, index, strict=True):
            files[name] = HashedFile(self._folder / name)
            with closing(files[name]) as file:
                np.save(file, values)
        self.close()
        about = {
            "asked": asked,
            "counts": asdict(counts),
            "blake2b": {name: file.hash.hexdigest() for name, file in files.items()},
        }
        with closing(HashedFile(self._folder / ABOUT)) as file:
            file.write(json.dumps({**about, "own": _hash_of(about)}).encode())
        sync_folder(self._folder)

    def close(self) -> None:
        """Close the files; what was written stays."""
        self._ids.close()
        self._mask.close()


class HashedFile:
    """A new file for its owner alone, hashed while it is written and on the disk once closed."""

    def __init__(self, path: Path) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._file = os.fdopen(fd, "wb")
        self.hash = hashlib.blake2b(digest_size=16)

    def write(self, data: bytes) -> int:
        self.hash.update(data)
        return self._file.write(data)

    def close(self) -> None:
        if not self._file.closed:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()


@contextmanager
def new_cached_set(cache: Path, key: str) -> Iterator[RowWriter]:
    """Write a set under `cache/key`, where it appears whole, or not at all if the block raises.

    Raises StorageError on a full disk.
    """
    folder = cache / f"{key}.tmp-{uuid.uuid4().hex[:8]}"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700)
        with closing(RowWriter(folder)) as writer:
            yield writer
        # else another process was quicker, and wrote the same
        if load_cached_set(cache, key) is None:
            shutil.rmtree(cache / key, ignore_errors=True)
            folder.rename(cache / key)
            sync_folder(cache)
    except OSError as error:
        reason = error.strerror or str(error)
        raise StorageError(
            f"{cache}: cannot keep the tokenised data here ({reason}); "
            "set MEGATRAIN_CACHE to another folder"
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def sets_asked(cache: Path, asked: str) -> Iterator[str]:
    """The keys of all sets that were finished as `asked`."""
    for path in sorted(cache.glob(f"*/{ABOUT}")):
        try:
            found = json.loads(path.read_bytes()).get("asked")
        except UNREADABLE:
            continue
        if found == asked and "." not in path.parent.name:
            yield path.parent.name


def cached_set(cache: Path, key: str) -> TokenRows | None:
    """`load_cached_set`, with a warning where it gives None for a damaged set."""
    rows = load_cached_set(cache, key)
    if rows is None and (cache / key).exists():
        logger.warning(f"{cache / key}: the tokenised rows are damaged; they are made anew")
    return rows


def load_cached_set(cache: Path, key: str, check: bool = True) -> TokenRows | None:
    """The set under `cache/key`, mapped from disk; None if it is missing or not as it was written.

    With `check` every byte is read, at about 1 GB/s and core.
    """
    folder = cache / key
    try:
        about = json.loads((folder / ABOUT).read_bytes())
        own = about.pop("own")
        written = about["blake2b"]
        if own != _hash_of(about) or (check and written != _hashes_of(folder, written)):
            return None
        offsets, targets, hashes, contexts, joined = (np.load(folder / name) for name in INDEX)
        ids = np.memmap(folder / "ids.bin", np.int32, mode="r")
        mask = np.memmap(folder / "mask.bin", np.bool_, mode="r")
        counts = Counts(**about["counts"])
    except UNREADABLE:
        return None
    chosen = np.arange(len(targets))
    joined = joined.astype(np.bool_)
    return TokenRows(ids, mask, offsets, targets, hashes, joined, contexts, chosen, counts)


def _hash64(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _hash_of(about: Mapping[str, object]) -> str:
    text = json.dumps(about, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _hashes_of(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """The hash of each file by name, several files at a time."""

    def hash_of(name: str) -> str:
        with (folder / name).open("rb") as file:
            found = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
            return found.hexdigest()

    with ThreadPoolExecutor() as threads:
        return dict(zip(names, threads.map(hash_of, names), strict=True))
