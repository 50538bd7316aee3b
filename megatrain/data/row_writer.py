"""Writes tokenised rows into the files of a shard of the cache."""

from __future__ import annotations

import hashlib
import json
import math
import os
from array import array
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatrain.data.samples import JUDGED, KINDS, PLAIN
from megatrain.durable import sync_folder

if TYPE_CHECKING:
    from megatrain.data.dataset import IdArray, MaskArray

INDEX = ("offsets.npy", "targets.npy", "hashes.npy", "contexts.npy", "joined.npy")
OF_SIDES = ("values.npy", "mismatches.npy")  # further files of rows that have two
UNCUT = "uncut.npy"  # tokens of each sequence that was read, before any was cut
ABOUT = "shard.json"  # what is known of the shard, with the hash of every other file; written last


class RowWriter:
    """Appends rows to the files of a shard, which only their owner may read.

    Attributes:
        size: bytes of tokens and masks so far.
        uncut: tokens of each sequence that was read.
    """

    def __init__(self, folder: Path, kind: str = PLAIN) -> None:
        self._folder, self._kind = folder, kind
        self._ids, self._mask = (HashedFile(folder / name) for name in ("ids.bin", "mask.bin"))
        # 8 bytes a row each, where a list of ints takes 40
        self._lengths, self._targets = array("q"), array("q")
        self._hashes, self._contexts, self._joined = array("Q"), array("Q"), array("b")
        self._values, self._mismatches = array("f"), array("Q")
        self.size, self.uncut = 0, array("q")

    def add(self, ids: IdArray, mask: MaskArray, joined: bool = False) -> None:
        """Append a plain row: ids int32 [tokens], mask bool [tokens].

        joined: the next row goes on with its text.
        """
        self._hashes.append(self._append(ids, mask))
        self._targets.append(int(mask.sum()))
        self._joined.append(joined)
        first = int(mask.argmax())  # a row's first token is never a target
        self._contexts.append(hash64(ids[:first].tobytes()) if first > 1 else self._hashes[-1])

    def add_sides(
        self, sides: Sequence[tuple[IdArray, MaskArray]], prompt: IdArray, value: float
    ) -> None:
        """Append a row of another kind, by its sequences.

        prompt: as it was before the sequences were cut. value: see `Rows.values`.
        """
        trained = KINDS[self._kind].trained
        hashes = [self._append(ids, mask) for ids, mask in sides]
        self._targets.append(sum(int(mask.sum()) for _, mask in sides[:trained]))
        number = np.float32(math.nan if math.isnan(value) else value)  # one nan of the many
        self._values.append(float(number))
        of_row = np.array(hashes[:trained], np.uint64).tobytes() + number.tobytes()
        self._hashes.append(hash64(of_row))
        self._contexts.append(hash64(prompt.tobytes()) if len(prompt) > 1 else self._hashes[-1])
        self._joined.append(False)
        if self._kind == JUDGED:
            self._mismatches.append(hashes[1])

    def _append(self, ids: IdArray, mask: MaskArray) -> int:
        """Write a sequence; its hash."""
        data, flags = ids.tobytes(), mask.tobytes()
        self.size += self._ids.write(data) + self._mask.write(flags)
        self._lengths.append(len(ids))
        return hash64(data + flags)

    def __len__(self) -> int:
        return len(self._targets)

    def finish(self, about: Mapping[str, object]) -> None:
        """Write the index and, last, what is known about the shard and every file's hash."""
        offsets = np.concatenate([[0], np.cumsum(self._lengths)])
        of_rows = (self._targets, self._hashes, self._contexts, self._joined)
        index = dict(zip(INDEX, (offsets, *map(np.asarray, of_rows)), strict=True))
        if self._kind != PLAIN:
            of_sides = map(np.asarray, (self._values, self._mismatches))
            index |= dict(zip(OF_SIDES, of_sides, strict=True))
        index[UNCUT] = np.asarray(self.uncut)
        files = {"ids.bin": self._ids, "mask.bin": self._mask}
        for name, values in index.items():
            files[name] = HashedFile(self._folder / name)
            with closing(files[name]) as file:
                np.save(file, values)
        self.close()
        hashes = {name: file.hash.hexdigest() for name, file in files.items()}
        write_about(self._folder / ABOUT, {**about, "kind": self._kind, "blake2b": hashes})
        sync_folder(self._folder)

    def close(self) -> None:
        """Close the files; what was written stays."""
        with closing(self._ids):
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
            try:
                self._file.flush()
                os.fsync(self._file.fileno())
            finally:
                self._file.close()


def hash64(data: bytes) -> int:
    """The hash by which rows and contexts are told apart."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def hash_of(about: Mapping[str, object]) -> str:
    """The hash of what a file says about a shard or a set."""
    text = json.dumps(about, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def write_about(path: Path, about: Mapping[str, object]) -> None:
    """Write what is known about a shard or a set, with a hash of its own."""
    with closing(HashedFile(path)) as file:
        file.write(json.dumps({**about, "own": hash_of(about)}).encode())
