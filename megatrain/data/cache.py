"""The cache of tokenised rows: a folder for each set, with a folder in it for each of its shards.

A shard is there once its description is, which is written last; so is a set once its own file is,
which names the shards. Whatever a process leaves when it is killed is therefore a set that lacks
its last shards, or only its own file. All files have their hash in the one that is written after
them; a damaged set is made again from its first damaged shard on.

A shard ends behind the batch with which it holds SHARD_ROWS rows of the source or
SHARD_LIMIT_BYTES of tokens, once every row before is written. So a set has the same
shards however often its making was interrupted, and however many processes tokenised it.
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
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from megatrain.data.encoding import Encoded, Encoder, RowOptions, RowReader, about_row, encode_batch
from megatrain.data.rows import (
    DROP,
    Counts,
    IdArray,
    IndexArray,
    Joined,
    MaskArray,
    TokenRows,
    Tokens,
    measure_lengths,
    shortened,
    split,
)
from megatrain.data.samples import JUDGED, KINDS, PLAIN, Picture, name_for
from megatrain.data.sources import Source
from megatrain.data.workers import Team
from megatrain.durable import sync_folder
from megatrain.errors import StorageError, logger, system_errors
from megatrain.heartbeat import beat, may_end_here

SHARD_ROWS = 50_000  # read from the source
SHARD_LIMIT_BYTES = 128 << 20  # of tokens and masks
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
_Kept = tuple[Encoded, tuple[Tokens, ...]]  # with its sequences as they are cut


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
        if [shard and shard.own for shard in _read_shards(places)] == about["shards"]:
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
        self._image_ends = array("q", [0])

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
        added = self._images.write(json.dumps(pictures).encode()) if pictures else 0
        self._image_ends.append(self._image_ends[-1] + added)
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


class _BadRow(Exception):
    """A bad row was met that is to be refused."""


def make_shards(making: Making, source: Source, encoder: Encoder, options: RowOptions) -> Counts:
    """Write the shards of a source that are not there; the counts of all rows. From a bad row on
    that is to be refused nothing is written, but all rows are counted, unless they are streamed."""
    reader, cutter, refused = RowReader(source, options), Cutter(options), Counts()
    for shard in making.shards:
        for _ in reader.batches(shard.counts.read):
            pass  # they need not be tokenised
        cutter.go_on_from(shard.tail)
    encode = partial(encode_batch, encoder=encoder, options=options)
    with Team(encode, options.processes, about_row) as team:
        encoded = team.map(reader.batches())
        try:
            for batch in encoded:
                _write_shard(making, chain([batch], encoded), cutter, refused)
        except _BadRow:
            reader.only_count = True
            for _, counts in () if options.streaming else encoded:
                refused.add(counts)
    counts = Counts(parts=[0] * max(1, len(source.parts)))
    for found in (*(shard.counts for shard in making.shards), refused):
        counts.add(found)
    if making.shards:
        measure_lengths(counts, np.concatenate([shard.uncut for shard in making.shards]))
    return counts


def _write_shard(
    making: Making, encoded: Iterator[tuple[list[Encoded], Counts]], cutter: Cutter, refused: Counts
) -> None:
    """Write one shard. Raises _BadRow, where `refused` gets the counts of what is not written."""
    counts, begins = Counts(), making.rows
    with making.new_shard() as writer:
        for rows, of_batch in encoded:
            may_end_here()
            counts.add(of_batch)
            if of_batch.bad and cutter.options.on_bad_row == "refuse":
                refused.add(counts)
                raise _BadRow
            cutter.write(rows, writer, counts)
            full = counts.read >= SHARD_ROWS or writer.size >= SHARD_LIMIT_BYTES
            if full and cutter.first is None:
                break
        writer.finish({"begins": begins, "counts": asdict(counts), "tail": cutter.tail()})


class Cutter:
    """Cuts rows and hands them to the writers of shards, in the source's order."""

    def __init__(self, options: RowOptions) -> None:
        self.options = options
        self._before: Tokens | None = None  # the answer of the last judged row
        self.first: _Kept | None = None  # judged row, which waits for the second

    def tail(self) -> dict[str, Any] | None:
        """The state that `go_on_from` takes for the next shard; JSON-able."""
        if self._before is None:
            return None
        ids, mask = self._before
        return {"ids": ids.tolist(), "mask": mask.astype(np.int8).tolist()}

    def go_on_from(self, tail: dict[str, Any] | None) -> None:
        if tail is not None:
            self._before = np.array(tail["ids"], np.int32), np.array(tail["mask"], np.bool_)

    def write(self, rows: list[Encoded], writer: RowWriter, counts: Counts) -> None:
        """Write what is left of the rows of a batch."""
        writer.uncut.extend(len(ids) for row in rows for ids, _ in row.sides)
        if self.options.kind == PLAIN:
            self._write_plain(rows, writer, counts)
            return
        kept = self._kept(rows, counts)
        for one, sides in self._with_mismatches(kept) if self.options.kind == JUDGED else kept:
            writer.add_sides(sides, one.prompt, one.value, one.pictures)
            counts.keep(one.part)

    def _write_plain(self, rows: list[Encoded], writer: RowWriter, counts: Counts) -> None:
        """Write rows of one sequence; a long text is several."""
        for one in rows:
            if one.text:
                cut = split(*one.sides[0], self.options.seq_len, counts)
            else:
                cut = iter(self._cut(one, counts) or ())
            for ids, mask in cut:
                if mask.any():
                    writer.add(ids, mask, one.joined, one.pictures)
                    counts.keep(one.part)
                else:
                    counts.without_target += 1

    def _cut(self, row: Encoded, counts: Counts) -> tuple[Tokens, ...] | None:
        """The row's sequences, or those with less context, cut to seq_len; None: it is dropped."""
        most, mode, sides = self.options.seq_len, self.options.truncation_mode, row.sides
        if most is None or all(len(ids) <= most for ids, _ in sides):
            return sides
        if mode == DROP:
            counts.too_long += 1
            return None
        kept = tuple(shortened(ids, mask, most, mode) for ids, mask in row.shorter or sides)
        counts.truncated += 1
        tokens, left = (sum(len(ids) for ids, _ in some) for some in (sides, kept))
        counts.truncated_tokens += tokens - left
        lost = sum(int(mask.sum()) for _, mask in sides) - sum(int(mask.sum()) for _, mask in kept)
        counts.cut_answers += lost > 0
        return kept

    def _kept(self, rows: list[Encoded], counts: Counts) -> Iterator[_Kept]:
        """The rows of which each sequence has a target left, beside their cut sequences."""
        for one in rows:
            sides = self._cut(one, counts)
            if sides is None:
                continue
            if all(mask.any() for _, mask in sides):
                yield one, sides
            else:
                counts.without_target += 1

    def _with_mismatches(self, rows: Iterator[_Kept]) -> Iterator[_Kept]:
        """Each row with one more sequence, its own prompt before the answer of the row before it;
        the first takes that of the second. Nothing comes of a single row."""
        for row in rows:
            (ids, mask), begins = row[0].sides[0], row[0].begins
            answer = ids[begins:], mask[begins:]
            if self.first is not None:
                yield self._mismatched(self.first, answer)
                self.first = None
            if self._before is None:
                self.first = row
            else:
                yield self._mismatched(row, self._before)
            self._before = answer

    def _mismatched(self, row: _Kept, answer: Tokens) -> _Kept:
        (one, sides), (ids, mask) = row, answer
        ids = np.concatenate([one.prompt, ids])
        mask = np.concatenate([np.zeros(len(one.prompt), np.bool_), mask])
        cut = shortened(ids, mask, self.options.seq_len, self.options.truncation_mode)
        return one, (*sides, cut)
