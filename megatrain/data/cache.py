"""The cache of tokenised rows: a folder for each set, with a folder in it for each of its shards.

A shard is there once its description is, which is written last; so is a set once its own file is,
which names the shards. Whatever a process leaves when it is killed is therefore a set that lacks
its last shards, or only its own file. All files have their hash in the one that is written after
them; a damaged set is made again from its first damaged shard on.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import shutil
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatrain.data.rows import (
    Counts,
    IdArray,
    IndexArray,
    Joined,
    MaskArray,
    TokenRows,
    measure_lengths,
)
from megatrain.data.samples import JUDGED, KINDS, PLAIN, Picture, name_for
from megatrain.durable import sync_folder
from megatrain.errors import StorageError, logger, system_errors
from megatrain.heartbeat import beat, may_end_here

ABOUT_SET = "set.json"  # what was asked for, counts of all rows, and each shard's hash
ABOUT = "shard.json"  # what is known of the shard, with the hash of every other file; written last
OFFSETS = "offsets.npy"
# Files of an entry a row, with the type code of `array`: 8 bytes, where a list of ints takes 40.
OF_ROWS = {"targets.npy": "q", "hashes.npy": "Q", "contexts.npy": "Q", "joined.npy": "b"}
OF_SIDES = {"values.npy": "f", "mismatches.npy": "Q"}  # further files of rows that have two
IMAGES_FILE, IMAGE_OFFSETS = "images.bin", "image-offsets.npy"  # JSON of each sequence's pictures
UNCUT = "uncut.npy"  # tokens of each sequence that was read, before any was cut
ANOTHER_FOLDER = "set MEGATRAIN_CACHE to another folder"
_LOOKED_EVERY_S = 0.2  # whether another process is done with the set
# what is left of a damaged description may be anything
_UNREADABLE = (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError)


# why: decision 0113
@dataclass(frozen=True)
class Shard:
    """One of a set's shards."""

    folder: Path
    begins: int  # rows of the source before it
    counts: Counts
    tail: dict[str, Any] | None  # what its last row gives to the next shard: `Cutter.tail`
    own: str  # the hash of what is known about it, which names all its files' hashes

    @property
    def uncut(self) -> IndexArray:
        """Tokens of each sequence that was read, int64."""
        lengths: IndexArray = np.load(self.folder / UNCUT)
        return lengths


class Making:
    """A set's folder while its shards are made."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder, self._kind = folder, kind
        places = sorted(path for path in folder.iterdir() if path.name.isdecimal())
        self.shards: list[Shard] = []
        for shard in _read_shards(places):
            if shard is None or shard.begins != self.rows:
                break
            self.shards.append(shard)

    @property
    def rows(self) -> int:
        """The number of rows of the source that the shards hold."""
        return sum(shard.counts.read for shard in self.shards)

    @property
    def is_whole(self) -> bool:
        """True if the set's own file is there, and names these shards."""
        owns = [shard.own for shard in self.shards]
        return bool(owns) and listed_shards(self.folder) == owns

    @contextmanager
    def new_shard(self) -> Iterator[RowWriter]:
        """Write the next shard, in place of what is left of one."""
        folder = self.folder / name_of(len(self.shards))
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        try:
            with closing(RowWriter(folder, self._kind)) as writer:
                yield writer
            sync_folder(self.folder)
            if (shard := read_shard(folder)) is None:
                raise unreadable(folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self.shards.append(shard)

    def finish(self, counts: Counts, asked: str) -> None:
        """Write the set's own file. asked: a name of what was asked for, see `sets_asked`."""
        owns = [shard.own for shard in self.shards]
        about = {"asked": asked, "kind": self._kind, "counts": asdict(counts), "shards": owns}
        new = self.folder / f"{ABOUT_SET}.new"
        new.unlink(missing_ok=True)  # of a process that was killed
        write_about(new, about)
        new.rename(self.folder / ABOUT_SET)
        sync_folder(self.folder)
        sync_folder(self.folder.parent)

    def clear(self) -> None:
        """Remove the shards: nothing of the set will be used."""
        for path in self.folder.iterdir():
            (shutil.rmtree if path.is_dir() else os.unlink)(path)


@contextmanager
def making_set(folder: Path, kind: str = PLAIN) -> Iterator[Making]:
    """The set of a folder, to be made or completed by one process at a time; others wait. Raises
    StorageError where it cannot be written, as on a full disk."""
    with system_errors(folder, "keep tokenised rows here", ANOTHER_FOLDER):
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        lock, waited = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), False
        try:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if not waited:
                        logger.info(f"{folder}: another process makes these rows; waiting for it")
                    waited = True
                    time.sleep(_LOOKED_EVERY_S)
                    may_end_here()
                    beat()
            yield Making(folder, kind)
        finally:
            os.close(lock)


def name_of(shard: int) -> str:
    """The name of a shard's folder."""
    return f"{shard:05}"


def listed_shards(folder: Path) -> list[str]:
    """The shards' hashes as a set's own file names them; none where it is not there."""
    try:
        return list(_read_about(folder / ABOUT_SET)["shards"])
    except _UNREADABLE:
        return []


def unreadable(folder: Path) -> StorageError:
    """The error where what was written just now cannot be read."""
    return StorageError(
        f"{folder}: cannot be read back after it was written; check the disk, or {ANOTHER_FOLDER}"
    )


def sets_asked(cache: Path, asked: str) -> Iterator[Path]:
    """The folders of all sets that were finished as `asked`."""
    for path in sorted(cache.glob(f"*/{ABOUT_SET}")):
        try:
            if _read_about(path)["asked"] == asked:
                yield path.parent
        except _UNREADABLE:
            continue


def cached_set(folder: Path) -> TokenRows | None:
    """The set of a folder, mapped from disk; None if it is missing or, with a warning, not as
    it was written. Every byte is read, at about 1 GB/s and core."""
    try:
        about = _read_about(folder / ABOUT_SET)
        places = [folder / name_of(number) for number in range(len(about["shards"]))]
        owns = [shard and shard.own for shard in _read_shards(places)]
        if owns == about["shards"]:
            return _rows_in(places, Counts(**about["counts"]), about["kind"])
    except FileNotFoundError:
        return None
    except _UNREADABLE:
        pass
    logger.warning(f"{folder}: the tokenised rows are damaged; they are made again")
    return None


def load_shard(folder: Path, number: int, begins: int, kind: str) -> TokenRows | None:
    """The rows of one shard of a set, mapped from disk; None if it is missing, not as it was
    written, or does not begin with row `begins` of the source."""
    shard = read_shard(folder / name_of(number))
    if shard is None or shard.begins != begins:
        return None
    try:
        measure_lengths(shard.counts, shard.uncut)
        return _rows_in([shard.folder], shard.counts, kind)
    except FileNotFoundError:  # it is just being made again
        return None


def _rows_in(places: list[Path], counts: Counts, kind: str) -> TokenRows:
    """All rows of these shards."""
    offsets, targets, hashes, contexts, joined = _index(places, [OFFSETS, *OF_ROWS])
    values, mismatches = (None, None) if kind == PLAIN else _index(places, OF_SIDES)
    ids, mask = _mapped(places, "ids.bin", np.int32), _mapped(places, "mask.bin", np.bool_)
    chosen = np.arange(len(targets))
    (image_offsets,) = _index(places, [IMAGE_OFFSETS])
    images = _mapped(places, IMAGES_FILE, np.uint8) if image_offsets[-1] else None
    return TokenRows(
        *(ids, mask, offsets, targets, hashes, joined.astype(np.bool_), contexts, chosen, counts),
        *(kind, values, mismatches if kind == JUDGED else None),
        images=images,
        image_offsets=image_offsets,
    )


def _index(places: list[Path], names: Iterable[str]) -> Iterator[Any]:
    """The arrays of these names, each of all shards; offsets count on."""
    for name in names:
        found = [np.load(place / name) for place in places]
        if name in (OFFSETS, IMAGE_OFFSETS):
            lengths = np.concatenate(list(map(np.diff, found)))
            yield np.concatenate([[0], np.cumsum(lengths)])
        else:
            yield np.concatenate(found)


def _mapped(places: list[Path], name: str, dtype: type[np.generic]) -> Any:
    """A file of every shard, mapped from disk; a shard may have no row."""
    paths = [place / name for place in places]
    found = [
        np.memmap(path, dtype, mode="r") if path.stat().st_size else np.zeros(0, dtype)
        for path in paths
    ]
    return found[0] if len(found) == 1 else Joined(found)


def read_shard(folder: Path) -> Shard | None:
    """Read a shard's description; None if it is missing or any file is not as it was written."""
    try:
        about = _read_about(folder / ABOUT)
        for name, written in about["blake2b"].items():
            with (folder / name).open("rb") as file:
                if hashlib.file_digest(file, _hasher).hexdigest() != written:
                    return None
        counts = Counts(**about["counts"])
        return Shard(folder, about["begins"], counts, about["tail"], about["own"])
    except _UNREADABLE:
        return None


def _read_shards(places: list[Path]) -> Iterator[Shard | None]:
    """Each shard as `read_shard` gives it, several at a time."""
    with ThreadPoolExecutor() as threads:
        yield from threads.map(read_shard, places)


def _read_about(path: Path) -> dict[str, Any]:
    """Read the description of a shard or a set. Raises ValueError if it is damaged."""
    about: dict[str, Any] = json.loads(path.read_bytes())
    own = about.pop("own")
    if own != name_for(about):
        raise ValueError(f"{path}: is damaged")
    return {**about, "own": own}


class RowWriter:
    """Appends rows to the files of a shard, which only their owner may read. size: bytes of tokens
    and masks so far. uncut: tokens of each sequence that was read."""

    def __init__(self, folder: Path, kind: str = PLAIN) -> None:
        self._folder, self._kind = folder, kind
        names = "ids.bin", "mask.bin", IMAGES_FILE
        self._ids, self._mask, self._images = (_HashedFile(folder / name) for name in names)
        codes = OF_ROWS if kind == PLAIN else OF_ROWS | OF_SIDES
        self._columns = {name: array(code) for name, code in codes.items()}
        self._lengths, self.size, self.uncut = array("q"), 0, array("q")
        self._image_ends, self._image_bytes = array("q", [0]), 0

    def add(
        self,
        ids: IdArray,
        mask: MaskArray,
        joined: bool = False,
        pictures: tuple[Picture, ...] = (),
    ) -> None:
        """Append a plain row: ids int32, mask bool [tokens]. joined: the next goes on with it."""
        first = int(mask.argmax())  # a row's first token is never a target
        before = _seen(ids[:first], pictures)
        self._add_row(int(mask.sum()), self._append(ids, mask, pictures), before, joined)

    def add_sides(
        self,
        sides: Sequence[tuple[IdArray, MaskArray]],
        prompt: IdArray,
        value: float,
        pictures: tuple[Picture, ...] = (),
    ) -> None:
        """Append a row of another kind. prompt: as it was uncut. value: see `TokenRows.values`."""
        trained = KINDS[self._kind].trained
        hashes = [self._append(ids, mask, pictures) for ids, mask in sides]
        number = np.float32(math.nan if math.isnan(value) else value)  # one nan of the many
        row = hash64(np.array(hashes[:trained], np.uint64).tobytes() + number.tobytes())
        targets = sum(int(mask.sum()) for _, mask in sides[:trained])
        before = _seen(prompt, pictures)
        self._add_row(targets, row, before, False, float(number), *hashes[trained:])

    def _add_row(self, targets: int, row: int, before: bytes, *more: Any) -> None:
        """Note a row of this hash. before: what precedes its first target."""
        context = hash64(before) if len(before) > 4 else row  # of more than one token
        # pairs have no mismatches
        entries = zip(self._columns.values(), (targets, row, context, *more), strict=False)
        for column, value in entries:
            column.append(value)

    def _append(self, ids: IdArray, mask: MaskArray, pictures: tuple[Picture, ...]) -> int:
        """Write a sequence; its hash."""
        data, flags = ids.tobytes(), mask.tobytes()
        whole = data + _seen(mask, pictures)
        if pictures:
            self._image_bytes += self._images.write(json.dumps(pictures).encode())
        self._image_ends.append(self._image_bytes)
        self.size += self._ids.write(data) + self._mask.write(flags)
        self._lengths.append(len(ids))
        return hash64(whole)

    def finish(self, about: Mapping[str, object]) -> None:
        """Write the index and, last, what is known about the shard and every file's hash."""
        offsets = np.concatenate([[0], np.cumsum(self._lengths)])
        index = {OFFSETS: offsets, **self._columns, UNCUT: self.uncut}
        index[IMAGE_OFFSETS] = self._image_ends
        files = {"ids.bin": self._ids, "mask.bin": self._mask, IMAGES_FILE: self._images}
        for name, values in index.items():
            with closing(_HashedFile(self._folder / name)) as files[name]:
                np.save(files[name], np.asarray(values))
        self.close()
        hashes = {name: file.hash.hexdigest() for name, file in files.items()}
        write_about(self._folder / ABOUT, {**about, "kind": self._kind, "blake2b": hashes})
        sync_folder(self._folder)

    def close(self) -> None:
        """Close the files; what was written stays."""
        with closing(self._ids), closing(self._images):
            self._mask.close()


def _seen(values: IdArray | MaskArray, pictures: Iterable[Picture]) -> bytes:
    """A part of a sequence with its images, to be hashed."""
    return values.tobytes() + "".join(one.sha256 for one in pictures).encode()


class _HashedFile:
    """A new file for its owner alone, hashed while it is written and on the disk once closed."""

    def __init__(self, path: Path) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._file = os.fdopen(fd, "wb")
        self.hash = _hasher()

    def write(self, data: bytes) -> int:
        self.hash.update(data)
        return self._file.write(data)

    def close(self) -> None:
        if not self._file.closed:
            with self._file:
                self._file.flush()
                os.fsync(self._file.fileno())


def _hasher() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=16)


def hash64(data: bytes) -> int:
    """The hash that distinguishes rows and contexts."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def write_about(path: Path, about: Mapping[str, object]) -> None:
    """Write what is known about a shard or a set, with a hash of its own."""
    with closing(_HashedFile(path)) as file:
        file.write(json.dumps({**about, "own": name_for(about)}).encode())
